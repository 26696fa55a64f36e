"""Every key, once: its type, default, bounds and description, in the order of the YAML's sections. Torch-free."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from gspo.algorithms import ALGORITHMS, GATES
from gspo.config.backends import EXTERNAL, SAMPLERS

_SCALARS = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}
INT_LIMIT = 1 << 63


def key(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    unset: str | None = None,
) -> Any:
    """A field with its description and bounds (low and high inclusive, `above` exclusive).

    `unset` describes what gspo decides where the key is null; null then counts as not set. Otherwise null is a value.
    """
    given: dict[str, Any] = {"default": default}
    extra: dict[str, Any] = {}
    # Defaults that can be changed (sections, lists, mappings) are created anew for every config.
    if isinstance(default, type):
        given = {"default_factory": default}
    elif isinstance(default, (list, dict)):
        given, extra = {"default_factory": lambda: type(default)(default)}, {"default": default}
    if unset is not None:
        doc, extra = f"{doc.rstrip('.')}; null: {unset}.", {"unset": unset}
    return Field(description=doc, ge=low, le=high, gt=above, json_schema_extra=extra, **given)


class Section(BaseModel):
    """A section of the YAML; its fields are the keys. Types are not converted, and an instance cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_writable(cls, value: Any) -> Any:
        """Refuse what pydantic's types let through: integers beyond 64 bits, and inf and nan in free mappings."""
        if isinstance(value, int) and abs(value) >= INT_LIMIT:
            raise PydanticCustomError("int_64_bits", "must fit into 64 bits")
        if isinstance(value, (dict, list)) and not all(map(math.isfinite, numbers_in(value))):
            raise PydanticCustomError("finite_number", "must be finite")
        return value


def numbers_in(value: Any) -> Iterable[float]:
    """Every float in nested mappings and lists."""
    if isinstance(value, (dict, list)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(child)
    elif isinstance(value, float):
        yield value


@dataclass(frozen=True)
class Key:
    """One key of the schema, or one section of it.

    >>> from gspo.config.schema import known_keys
    >>> known_keys()["gconfig.top_p"].above, known_keys()["actor"].section.__name__
    (0.0, 'Actor')
    """

    name: str
    default: Any
    doc: str
    scalars: tuple[type, ...] = ()  # accepted scalar types; empty for sections, lists and mappings
    choices: tuple[str | int, ...] = ()
    nullable: bool = False
    null_is_unset: bool = False  # null leaves the decision to gspo; otherwise null is a value ("none")
    section: type[Section] | None = None
    items: type | None = None  # of a list; a Section where its items are sections
    more_items: tuple[Any, ...] = ()  # what else the items may be: of another type, or mappings, passed on as they are
    free: bool = False  # a mapping passed on as it is
    low: float | None = None
    high: float | None = None
    above: float | None = None

    @property
    def wanted(self) -> str:
        """What a value must be, in words."""
        if self.section is not None:
            parts = ["a section"]
        elif self.free:
            parts = ["a mapping"]
        else:
            parts = [_SCALARS[kind] for kind in self.scalars]
        if self.items is not None:
            others = (_PLURALS.get(kind, "mappings") for kind in self.more_items)
            parts.append("a list of " + " or ".join((_PLURALS.get(self.items, "sections"), *others)))
        if self.choices:
            parts.append("one of " * (len(self.choices) > 1) + ", ".join(map(str, self.choices)))
        return " or ".join([*parts, "null"] if self.nullable else parts)

    @property
    def bounds(self) -> str:
        """The allowed range in words; empty where there is none."""
        limits = ((self.above, "above"), (self.low, "at least"), (self.high, "at most"))
        return " and ".join(f"{word} {limit:.9g}" for limit, word in limits if limit is not None)


def keys_of(cls: type[Section], prefix: str) -> Iterable[Key]:
    """The keys of a section class, below `prefix`; sections before what they hold."""
    for name, entry in cls.model_fields.items():
        found = _key(prefix + name, entry)
        yield found
        if found.section is not None:
            yield from keys_of(found.section, found.name + ".")


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _key(name: str, entry: FieldInfo) -> Key:
    found: dict[str, Any] = {"scalars": (), "choices": ()}
    limits = list(entry.metadata)
    for option in _options(entry.annotation):
        if get_origin(option) is Annotated:
            option, *more = get_args(option)
            limits += more
        if get_origin(option) is Literal:
            found["choices"] += get_args(option)
        elif get_origin(option) is list:
            found["items"], *others = _options(get_args(option)[0])
            found["more_items"] = tuple(others)
        elif get_origin(option) is dict:
            found["free"] = True
        elif issubclass(option, Section):
            found["section"] = option
        elif option is type(None):
            found["nullable"] = True
        else:
            found["scalars"] += (option,)
    for limit in limits:
        match limit:
            case Ge(low):
                found["low"] = low
            case Le(high):
                found["high"] = high
            case Gt(above):
                found["above"] = above
    default = entry.get_default(call_default_factory=True)
    extra = entry.json_schema_extra if isinstance(entry.json_schema_extra, dict) else {}
    return Key(name, default, entry.description or "", null_is_unset="unset" in extra, **found)


class MicroBatch(Section):
    max_tokens_per_mb: int = key(
        8192, "Tokens per forward and backward pass. It changes memory and speed, not results.", low=1
    )


class Optimizer(Section):
    lr: float | None = key(
        None, "Learning rate.", unset="1e-6, or 1e-5 with LoRA; ten times that with algorithm sft", low=0.0
    )
    type: Literal["adam", "adamw", "adamw8bit", "sgd"] = key(
        "adamw",
        "Optimizer. adam means AdamW, as in AReaL; adamw8bit stores its moments in 8 bits (one rank; docs/memory.md).",
    )
    offload: bool = key(
        False,
        "On a GPU: keep AdamW's moments and the float32 copy of the weights in the host's memory and update there (one "
        "rank). It saves 12 bytes of GPU memory per weight and costs the copies of gradients and weights.",
    )
    weight_decay: float = key(0.0, "Decoupled weight decay.", low=0.0)
    gradient_clipping: float = key(1.0, "Maximum norm of the gradient; 0: no clipping.", low=0.0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "constant", "Learning rate schedule after the warm-up. linear and cosine end at 0."
    )
    warmup_steps_proportion: float = key(
        0.0, "Fraction of all steps in which the learning rate rises from 0.", low=0.0, high=1.0
    )
    beta1: float = key(0.9, "Adam's decay of the first moment.", low=0.0, high=0.9999999)
    beta2: float = key(0.999, "Adam's decay of the second moment.", low=0.0, high=0.9999999)
    eps: float = key(1e-8, "Adam's ε, added to the square root of the second moment.", low=0.0)


Epochs = Annotated[str, StringConstraints(pattern=r"^(epoch|[1-9]\d{0,8} epochs)$")]


def num_epochs(frequency: str) -> int:
    """
    >>> num_epochs("epoch"), num_epochs("2 epochs")
    (1, 2)
    """
    return 1 if frequency == "epoch" else int(frequency.split()[0])


class SaverSection(Section):
    freq_steps: Annotated[int, Ge(1)] | Epochs | None = key(
        None, "Write a checkpoint every N steps; `epoch` and `2 epochs` count epochs; null: recover.freq_secs decides."
    )
    keep: int = key(2, "Number of checkpoints to keep, besides the best one.", low=1)


class EvaluatorSection(Section):
    freq_steps: Annotated[int, Ge(0)] | Epochs | None = key(
        None,
        "Evaluate every N steps; `epoch` and `2 epochs` count epochs; the last step is always evaluated. 0: no "
        "evaluation at all",
        unset="ten times in a run, at least 10 steps apart",
    )
    at_start: bool = key(True, "Evaluate before the first step.")
    best: str | None = key(
        None,
        "Metric of the best checkpoint, the highest value: eval/accuracy, eval/reward or eval/pass_at_k; of one source "
        "of a mixture: eval/<source>/reward. With algorithm sft also eval/loss, the lowest value",
        unset="eval/accuracy if every reward is 0 or 1, otherwise eval/reward; without a reward eval/loss",
    )
    size: int | None = key(512, "Number of held-out problems per evaluation; null: all.", low=1)


class Recover(Section):
    freq_secs: float | None = key(300.0, "Write a checkpoint every N seconds; null: never.", above=0)
    mode: Literal["auto", "disabled"] = key(
        "auto", "If the run directory already has a run: auto resumes it, disabled is an error."
    )


class WandB(Section):
    mode: Literal["disabled", "offline", "online"] = key(
        "disabled",
        "offline: write to RUN/wandb for `wandb sync`; online: send while training. The project is $WANDB_PROJECT or "
        "experiment_name. Needs gspo[wandb].",
    )


class StatsLogger(Section):
    wandb: WandB = key(WandB, "Weights & Biases.")
    tensorboard: bool = key(False, "Also write TensorBoard events to RUN/tensorboard. Needs gspo[tensorboard].")
    trackio: bool = key(False, "Also write a Trackio database to RUN/trackio or $TRACKIO_DIR. Needs gspo[trackio].")


class Cluster(Section):
    fileroot: str = key("runs", "Root of all run directories: <fileroot>/<experiment_name>/<trial_name>.")
    n_nodes: int = key(1, "Number of machines.", low=1)
    n_gpus_per_node: int | None = key(None, "Number of GPUs on each machine.", unset="all GPUs of the machine", low=0)


class Slurm(Section):
    sbatch: list[str] = key([], "More sbatch options, for example [--time=24:00:00, --mem=64G].")
    setup: list[str] = key([], "Shell lines that run before anything starts, for example [module load cuda].")


class Scheduler(Section):
    type: Literal["local", "ray", "slurm"] | None = key(None, "Where processes run.", unset="local")
    restarts: int = key(
        3, "How many times a killed process is restarted: each sampler, and with ray and slurm also the trainer.", low=0
    )
    slurm: Slurm = key(Slurm, "Options of the Slurm job.")


ENVIRONMENT_ROWS = "env"  # as a path: the rows of the environment itself


class SourceSection(Section):
    """The keys that a data set and a source of a mixture share."""

    path: str = key(
        "embedded:arithmetic",
        "embedded:arithmetic, embedded:digits, reasoning_gym:<task>, a hub name, a file or a folder; env: the rows of "
        "the environment, the default with env.path gymnasium:…, openenv:… and verifiers:….",
    )
    split: str | None = key(
        None, "Split to read.", unset="train for training, test for validation; in a mixture, the data set's"
    )
    size: int | None = key(None, "Use this many rows. Procedural tasks generate as many.", low=1)
    max_length: int | None = key(
        None,
        "Prompts with more tokens are dropped and counted; with algorithm sft, prompt and completion together. In a "
        "mixture, null means the data set's.",
        low=1,
    )
    columns: dict[str, Any] = key(
        {},
        "Names of columns: {prompt: task, answer: reward_model.ground_truth, completion: text}; those that are not set "
        "are found by common names (completion: only with algorithm sft). Others are further columns for rewards, by "
        "a new name: {level: extra_info.level}.",
    )
    image_folder: str | None = key(
        None,
        "Folder of the image files that rows name: a name is relative to it, and a file outside of it is an error.",
        unset="the folder of the data set",
    )
    system_prompt: str | None = key(
        None,
        "System message. Without a chat template it is put before the prompt. In a mixture, null means the data set's.",
    )
    chat_template_kwargs: dict[str, Any] = key(
        {}, "Arguments of the chat template: {enable_thinking: false}. In a mixture, empty means the data set's."
    )
    options: dict[str, Any] = key({}, "Settings of a reasoning_gym task: {min_terms: 2, max_terms: 4}.")


class MixtureSource(SourceSection):
    path: str = key("", "As in train_dataset.path; required.")
    weight: float = key(1.0, "Fraction of prompts from this source, relative to the other weights.", above=0.0)
    name: str | None = key(None, "Name of the source in metrics.", unset="the last part of path")
    chat_template: bool | str | None = key(
        None, "As in train_dataset.chat_template.", unset="the data set's chat_template"
    )
    reward: list[str | dict[str, Any]] = key(
        [],
        "Rewards of these rows, in the form of reward.functions; empty: the source's own. If reward.functions is set, "
        "it is used instead.",
    )


class DatasetSpec(SourceSection):
    chat_template: bool | str = key(
        "auto",
        "auto: the tokenizer's template if it has one; true: the tokenizer's, required; false or none: plain text; or "
        "a .jinja file, or the template itself.",
    )
    mixture: list[MixtureSource] = key(
        [],
        "Several data sets with weights, instead of path. A source inherits split, max_length, system_prompt and the "
        "chat template keys.",
    )


class ValidDataset(Section):
    path: str | None = key(None, "As in train_dataset.path.", unset="train_dataset.path")
    split: str | None = key(None, "Split to read.", unset="test")
    mixture: list[MixtureSource] = key([], "Several data sets, instead of path; each may have its own columns.")


class TrainDataset(DatasetSpec):
    batch_size: int = key(32, "Prompts per rollout batch; with algorithm sft, rows per batch.", low=1)
    shuffle: bool | Literal["pass_rate"] = key(
        True,
        "true: every prompt once per epoch, in a random order that depends on the seed; false: in file order. "
        "pass_rate: prompts are drawn by their measured pass rate; those near 1/2 are drawn up to 10 times as often as "
        "those that are always or never solved (docs/data.md).",
    )


class Environment(Section):
    path: str | None = key(
        None,
        "Environment of multi-turn episodes: tools, self_correct, module:function or file.py:function "
        "(docs/episodes.md); or of another system: gymnasium:<id>, openenv:<url or package>, trl:<module:Class>, "
        "verifiers:<environment> (docs/environments.md).",
        unset="one completion per prompt",
    )
    options: dict[str, Any] = key({}, "Settings of the environment, as keyword arguments: {tools: [calculator]}.")
    max_turns: int = key(
        16, "Maximum number of model answers in one episode. An episode that asks for more fails.", low=1
    )
    timeout: float = key(
        60.0,
        "Seconds that an environment may take between an answer and its next request; after that the sample fails.",
        above=0,
    )
    turn_discount: float = key(
        1.0, "Discount γ of a reward for every turn between the credited turn and the reward.", low=0, high=1
    )
    agent: str | list[str] | None = key(
        None,
        "Instead of path, an agent that calls an OpenAI-compatible address: module:function or file.py:function with "
        "the arguments (base_url, api_key, data); or a command line such as [node, a.js], started once per episode "
        "with OPENAI_BASE_URL and OPENAI_API_KEY in its environment (docs/agents.md).",
    )


class Reward(Section):
    functions: list[str | dict[str, Any]] = key(
        [],
        "Rewards: math, numeric, final, format, …, module:function, or with settings {name: reward_model, path: …}, "
        "{name: judge, url: …, model: …} (docs/data.md); empty: the task's own. The reward is their weighted sum. An "
        "entry with `gate: true`, as {name: language, to: fr, gate: true}, is not in the sum but multiplies it.",
    )
    weights: list[float] = key([], "One weight per function; empty: all weights are 1.")
    normalize: Literal["sum", "each"] = key(
        "sum",
        "What the advantage normalises: the weighted sum of the rewards, or each reward apart, before the weighted sum "
        "(GDPO; docs/algorithms.md).",
    )
    timeout: float = key(10.0, "A reward that takes longer than this many seconds is killed.", above=0)
    workers: int = key(2, "Number of worker processes, for rewards that need one.", low=1)
    max_failure_fraction: float = key(
        0.5, "The run stops if more than this fraction of a batch's rewards failed.", low=0.0, high=1.0
    )
    check: Literal["warn", "stop", "off"] = key(
        "warn",
        "Before the first step, score known answers to a few rows (reference, empty, another row's): warn or stop if "
        "the reward looks broken; off: no check. `gspo doctor --reward` does the same with more rows.",
    )
    allow_unsandboxed_code: bool = key(
        False,
        "UNSAFE: if bubblewrap does not work, run code that the model wrote without a sandbox, with your own rights "
        "(docs/sandbox.md).",
    )


class Rollout(Section):
    backend: str = key(
        "auto",
        f'Sampler: {", ".join(SAMPLERS)}; "local:d2" starts 2 servers, "vllm:d4t2" 4 servers of 2 GPUs each. With auto '
        "and no CUDA, the trainer's process samples.",
    )
    max_head_offpolicyness: int = key(
        0,
        "η, the staleness bound: a sample may be this many weight versions old when it is trained on; 0: synchronous.",
        low=0,
    )
    max_concurrent_rollouts: int | None = key(
        None,
        "Number of sequences sampled at the same time, in whole groups.",
        unset="as many as max_head_offpolicyness and the sampler allow (in process 256, up to 1,024 for small models)",
        low=1,
    )
    dump_to_file: bool | Annotated[int, Ge(1)] = key(
        True, "Write every sample to samples/step_*.jsonl. A number keeps the files of the last N steps only."
    )
    dynamic_filter_fn: str | None = key(
        None, "module:function or file.py:function that returns whether to train on a group; others are resampled."
    )
    request_timeout: float = key(3600.0, "The run fails if the samplers return nothing for this many seconds.", above=0)
    sampler_precision: Literal["none", "bf16", "int8"] = key(
        "none",
        "For studies: round the weights of the in-process sampler (int8: per output channel), so that it differs from "
        "the trainer as a faster sampler does. none: it uses the trainer's own weights.",
    )


class EvalGeneration(Section):
    n_samples: int = key(8, "Completions per prompt: the group size G.", low=1)
    max_new_tokens: int = key(512, "Maximum length of a completion, in tokens.", low=1)
    temperature: float = key(
        1.0, "Sampling temperature: the logits are divided by it. In an evaluation, 0 is greedy decoding.", low=0.0
    )
    top_p: float = key(
        1.0, "Nucleus sampling: keep the smallest set of tokens with this probability.", above=0.0, high=1.0
    )
    top_k: int = key(0, "Keep the k most likely tokens; 0: all.", low=0)
    min_p: float = key(
        0.0,
        "Keep the tokens whose probability is at least this fraction of the most likely token's; 0: all.",
        low=0.0,
        high=1.0,
    )


class Generation(EvalGeneration):
    max_tokens: int | None = key(
        None, "Maximum length of prompt and completion together, in tokens.", unset="the model's context", low=1
    )
    stop: list[str | int] = key(
        [], "What ends a completion besides EOS: strings, and token ids. The token that completes a string is kept."
    )
    min_new_tokens: int = key(0, "EOS and stop tokens are not sampled before this many tokens.", low=0)
    ignore_eos: bool = key(False, "Do not stop at EOS; sample max_new_tokens tokens.")


def gate_key(gate: str, name: str, doc: str) -> Any:
    """The key of a gate's setting, with its default and bound."""
    setting = GATES[gate].settings[name]
    return key(setting.default, doc, above=setting.above)


class Norm(Section):
    mean_level: Literal["batch", "group"] | None = key(None, "Subtract the mean of the group or batch; null: none.")
    std_level: Literal["batch", "group"] | None = key(None, "Divide by the std of the group or batch; null: none.")


class RewardNorm(Section):
    mean_level: Literal["batch", "group", "leave1out"] | None = key(
        None, "Subtract the mean of the batch, of the group, or of the group's other samples (leave1out); null: none."
    )
    std_level: Literal["batch", "group"] | None = key(None, "Divide by the std of the group or batch; null: none.")


class Correction(Section):
    preset: Literal["tis", "mis", "seq_tis", "icepop", "sequence_mask", "geometric"] | None = key(
        None, "Preset values for the keys below. Keys that you set override it."
    )
    level: Literal["token", "sequence"] = key("token", "Compare each token, or each sequence, with the bounds.")
    action: Literal["mask", "clamp"] = key(
        "mask",
        "Outside the bounds: drop it (mask), or truncate the weight (clamp). A dropped token is not in the ratio of "
        "its sequence either.",
    )
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = key("ratio", "The quantity that is compared with the bounds.")
    upper: float | None = key(5.0, "Upper bound; null: none.")
    lower: float | None = key(None, "Lower bound; null: none.")
    agg: Literal["mean", "sum", "max", "product"] = key(
        "mean",
        "How tokens are reduced to a sequence. The ratio is reduced in log space. With mean, sum and max the weight of "
        "a sequence is the geometric mean of its token ratios; with product it is their product. With a kl metric each "
        "token keeps its own ratio as weight.",
    )


class Sharding(Section):
    param_dtype: Literal["bfloat16", "float16"] | None = key(
        None,
        "Data type of the computation, if the weights have a wider actor.dtype such as float32.",
        unset="actor.dtype",
    )


class Actor(Section):
    # The model and how it is trained.
    path: str = key(
        "embedded:tiny",
        "Model: embedded:tiny, embedded:tiny-{moe,tools,control,hybrid,chains,vision}, smollm2-135m, a folder, a hub "
        "name, or a .gguf file; with `gspo train` also a run directory, whose best checkpoint is exported and used.",
    )
    optimizer: Optimizer = key(Optimizer, "Optimizer and its schedule.")
    ppo_n_minibatches: int | None = key(
        None, "Optimizer updates (mini-batches) per rollout batch.", unset="the algorithm's", low=1
    )
    ppo_epochs: int = key(
        1,
        "Passes over each rollout batch. Each makes ppo_n_minibatches updates with the same samples and π_old; "
        "later passes take the mini-batches in another order. The critic makes one pass.",
        low=1,
    )
    mb_spec: MicroBatch = key(MicroBatch, "Micro-batches of the actor, ref and critic.")
    backend: str = key(
        "auto", 'Trainer: auto, "fsdp:d4", or local, which is fsdp:d1. With auto and no CUDA, one rank trains.'
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = key(
        "auto", "Data type of the weights. auto: bfloat16 on CUDA, otherwise float32."
    )
    gradient_checkpointing: bool = key(False, "Recompute activations in the backward pass: less memory, more time.")
    use_lora: bool = key(False, "Train a LoRA adapter (peft) instead of all weights.")
    lora_rank: int = key(32, "Rank of the adapter.", low=1)
    lora_alpha: int = key(16, "Scale of the adapter: it is multiplied by lora_alpha / lora_rank.", low=1)
    target_modules: list[str] = key(
        ["all-linear"],
        "Layers with an adapter, by the last part of their names. [all-linear]: all except the LM head. In a "
        "vision-language model both mean the language part; `vision` adds the linear layers of the vision tower. In a "
        "mixture, `experts` adds the experts, each with an adapter of its own: [all-linear, experts].",
    )
    lora_base_bits: Literal[8, 4] | None = key(
        None,
        "With use_lora: store the frozen linear layers in 8 or 4 bits (QLoRA; 4 needs bitsandbytes), for sampler and "
        "trainer (docs/memory.md).",
        unset="in actor.dtype",
    )
    freeze_vision: bool | None = key(
        None,
        "true: do not train the vision tower of a vision-language model. The features of an image are then computed "
        "once and used by the sampler and in every pass of the trainer. true or false loads a model that can also be "
        "loaded without its tower (Qwen3.5) with it.",
        unset="false; Qwen3.5 is loaded without its tower, for text",
    )

    # The objective.
    importance_sampling_level: Literal["token", "sequence"] | None = key(
        None,
        "Importance ratio per token (PPO, GRPO) or per sequence (GSPO). It also sets the defaults of the clip range "
        "and the aggregation.",
        unset="the algorithm's",
    )
    eps_clip: Annotated[float, Gt(0.0), Le(1.0)] | Literal["auto"] | None = key(
        None,
        "Lower clip range ε_low; auto: both bounds follow the run, so that 5 % of the sequences are clipped.",
        unset="the level's or algorithm's",
    )
    eps_clip_higher: float | None = key(
        None, "Upper clip range ε_high.", unset="eps_clip if that is set, otherwise the algorithm's", above=0.0
    )
    loss_aggregation: Literal["sequence_mean", "sequence_sum", "token_mean", "token_sum"] | None = key(
        None, "How the loss is averaged over tokens and sequences.", unset="the level's or algorithm's"
    )
    zero_variance_groups: Literal["count", "drop", "refill"] | None = key(
        None,
        "Groups with equal rewards: count them in the denominator, drop them, or sample others instead (refill).",
        unset="the algorithm's",
    )
    max_refills: int = key(8, "Maximum number of refill rounds per step.", low=1)
    kl_loss_coef: float = key(0.0, "Coefficient of KL(π_θ‖π_ref) in the loss. Above 0, ref must be set.", low=0.0)
    kl_ctl: float = key(
        0.0, "Coefficient of the KL penalty in the reward, as in AReaL. Above 0, ref must be set.", low=0.0
    )
    kl_estimator: Literal["k1", "k2", "k3"] | None = key(
        None, "KL estimator.", unset="k3 in the loss, k1 in the reward"
    )
    entropy_coef: float = key(
        0.0,
        "Coefficient of the policy's entropy, which is subtracted from the loss: the policy stays more random. With "
        "entropy_target, the first coefficient.",
        low=0.0,
    )
    entropy_target: float | None = key(
        None,
        "Entropy in nats per token that the coefficient follows: it rises while the entropy is lower, by at most 10 % "
        "per step, and falls while it is higher, within a factor of 100 of entropy_coef; null: it stays.",
        above=0.0,
    )
    c_clip: float | None = gate_key("clip", "dual_clip", "Dual clip: upper bound of the ratio for A < 0; null: off.")
    sapo_tau_pos: float = gate_key("sapo", "tau_pos", "SAPO temperature for A > 0.")
    sapo_tau_neg: float = gate_key("sapo", "tau_neg", "SAPO temperature for A ≤ 0.")
    sequence_unit: Literal["trajectory", "turn"] = key(
        "trajectory",
        "In multi-turn episodes, the unit of the sequence ratio, clip and length: the whole trajectory, or each turn.",
    )

    # Rewards and advantages.
    reward_norm: RewardNorm | None = key(None, "Normalisation of rewards.", unset="the algorithm's advantage")
    adv_norm: Norm | None = key(
        None,
        "Normalisation of the final advantages over trained tokens: a completion counts by its length; null: none, "
        "except with reinforce_pp.",
    )
    discount: float = key(1.0, "γ: the reward at the end is discounted per token.", low=0.0, high=1.0)
    gae_lambda: float = key(1.0, "λ of GAE.", low=0.0, high=1.0)
    overlong_reward_penalty: bool | Annotated[float, Gt(0.0)] | None = key(
        None,
        "Subtract a penalty from the reward of completions near max_new_tokens: at most this number; true: 1.",
        unset="the algorithm's",
    )
    overlong_tokens: int | None = key(
        None,
        "The penalty grows over the last N tokens before max_new_tokens.",
        unset="a fifth of max_new_tokens",
        low=1,
    )
    mask_no_eos_with_zero: bool | Literal["reward"] = key(
        False,
        "true: set the advantage of truncated completions to 0; reward: set their normalised reward to 0, before KL, "
        "critic and adv_norm, as AReaL does.",
    )
    reward_bias: float = key(0.0, "Added to every reward, before scaling.")
    reward_scaling: float = key(1.0, "Every reward is multiplied by it, after the bias.")
    reward_clip: float = key(20.0, "Rewards are clipped to ± this value, after scaling.", above=0.0)

    # π_old, and the difference between the sampler and the trainer.
    prox_logp_method: Literal["auto", "recompute", "rollout", "loglinear"] | None = key(
        None,
        "Source of π_old: recompute (a forward pass of the trainer), rollout (the sampler's log-probs), or loglinear "
        "(interpolation).",
        unset="auto, which is recompute, or rollout if the sampler's measured noise is far below the clip range",
    )
    use_decoupled_loss: bool = key(False, "Multiply the loss by π_old/μ (behavior correction).")
    rejection_sampling: Correction | None = key(None, "Behavior correction: bounds on π_old/μ.")
    prox_logp_force: bool = key(
        False, "With prox_logp_method rollout: train even if the sampler's noise is above the clip range."
    )
    routing_replay: Literal["none", "proximal", "rollout"] = key(
        "none",
        "For mixture-of-experts models, the experts in training passes: chosen by the routers (none), as in π_old's "
        "forward pass (proximal), or as in the sampler (rollout). The paper claims that GSPO needs none (docs/moe.md).",
    )
    sampling_mask_replay: bool = key(
        True,
        "With gconfig.top_p, top_k or min_p: the sampler records the tokens that they keep, and all log-probs, ratios "
        "and KL of the trainer are over these tokens only (docs/mismatch.md). false: over the whole vocabulary.",
    )

    # Rarely set.
    weight_update_mode: Literal["auto", "disk", "shm", "broadcast"] = key(
        "auto",
        "How weights are sent to sampler servers: shm (shared memory of this machine), disk (the run directory, on a "
        "shared file system), or broadcast (over the network with gloo; the network must be trusted). auto: shm if all "
        "servers run on this machine and it has room, otherwise disk.",
    )
    fsdp: Sharding = key(Sharding, "Mixed precision on several ranks, for the actor, ref and critic.")
    fp32_lm_head: bool | None = key(None, "Compute the LM head in float32.", unset="true for sequence ratios")
    share_prefix: bool = key(True, "Compute the prompt of a group once for all its completions.")
    init_from_scratch: bool = key(False, "Start from random weights in the model's architecture.")


class ReferenceSection(Section):
    path: str | None = key(None, "Reference model.", unset="actor.path")


class TeacherSection(Section):
    path: str = key(
        "",
        "Teacher of algorithm distill, with the policy's vocabulary: as in actor.path, a LoRA adapter, or the address "
        "of a server that scores tokens (http://HOST:PORT, vLLM: http://HOST:PORT/v1); required.",
    )
    coef: float = key(1.0, "Weight of the teacher beside a reward (reward.functions).", above=0.0)
    exact_kl: float | None = key(
        None,
        "Exact KL over the vocabulary at trained tokens as a loss, instead of the sampled tokens' log-ratio as an "
        "advantage: 0 is the reverse KL(π_θ‖teacher), 1 the forward KL(teacher‖π_θ), between them their mixture.",
        low=0.0,
        high=1.0,
    )

    @property
    def is_server(self) -> bool:
        return self.path.startswith(("http://", "https://"))


class CriticOptimizer(Section):
    lr: float | None = key(
        None, "Learning rate of the critic; everything else is as in actor.optimizer.", unset="1e-5", low=0.0
    )


class CriticSection(Section):
    path: str | None = key(None, "Value model.", unset="actor.path with a new value head")
    optimizer: CriticOptimizer = key(CriticOptimizer, "Optimizer of the critic.")
    value_eps_clip: float = key(0.2, "Clip range of the value.", above=0.0)


class Config(Section):
    experiment_name: str = key("gspo", "First part of the run directory's name.")
    trial_name: str = key("trial0", "Second part of the run directory's name.")
    algorithm: str | None = key(
        None,
        f"Preset: {', '.join(ALGORITHMS)}; or a function of yours, file.py:function.",
        unset="ppo with a critic, grpo with importance_sampling_level: token, otherwise gspo",
    )
    seed: int = key(1, "Seed of all random numbers.", low=0)
    total_train_steps: int | None = key(None, "Number of training steps.", unset="total_train_epochs decides", low=1)
    total_train_epochs: int = key(1, "Number of passes over the training data.", low=1)
    actor: Actor = key(Actor, "The policy, its objective and its trainer.")
    gconfig: Generation = key(Generation, "Sampling parameters for training.")
    train_dataset: TrainDataset = key(TrainDataset, "Training problems.")
    reward: Reward = key(Reward, "Reward functions and their workers.")
    rollout: Rollout = key(Rollout, "Samplers and staleness.")
    valid_dataset: ValidDataset | None = key(
        None,
        "Held-out problems. Everything that it does not set is as in train_dataset.",
        unset="the held-out split of train_dataset",
    )
    eval_gconfig: EvalGeneration | None = key(
        None,
        "Sampling parameters for evaluation. A key that is not set here has gconfig's value.",
        unset="one greedy sample (temperature 0); lengths and stops are always those of gconfig",
    )
    evaluator: EvaluatorSection = key(EvaluatorSection, "Held-out evaluation.")
    saver: SaverSection = key(SaverSection, "Checkpoints by steps or epochs, and how many are kept.")
    recover: Recover = key(Recover, "Checkpoints by time, and resuming.")
    ref: ReferenceSection | None = key(None, "Reference model for KL.")
    teacher: TeacherSection | None = key(None, "Teacher model for distillation.")
    critic: CriticSection | None = key(None, "Value model for PPO.")
    env: Environment = key(Environment, "Multi-turn episodes, tools and agents.")
    stats_logger: StatsLogger = key(StatsLogger, "Where metrics go besides the run directory.")
    cluster: Cluster = key(Cluster, "Machines, and the root of run directories.")
    scheduler: Scheduler = key(Scheduler, "Where processes run.")
    # A key of flags for each external engine, under its name: `vllm`. Code reads them by `layout.flags_of`.
    __annotations__ |= dict.fromkeys(EXTERNAL, dict[str, Any])
    locals().update({name: key({}, engine.flags) for name, engine in EXTERNAL.items()})
    tokenizer_path: str | None = key(None, "Tokenizer.", unset="actor.path")
    strict: bool = key(False, "Treat warnings about the config as errors.")
    on_alarm: Literal["warn", "stop"] = key("warn", "What a warning about the metrics of a step does.")
    threads: int | None = key(
        None,
        "CPU threads of the trainer. The last bits of results depend on it.",
        unset="OMP_NUM_THREADS, else all cores",
        low=1,
    )
    profile: bool = key(
        False, "Write a timeline of steps 2 and 3 (profile/*.trace.json.gz) for a browser's trace viewer."
    )
    stall_timeout: float = key(
        7200.0, "After this many seconds without progress the run stops and writes stack traces to log.txt.", above=0
    )

    @property
    def run_path(self) -> Path:
        """The run directory."""
        return Path(self.cluster.fileroot) / self.experiment_name / self.trial_name


def held_out(config: Config) -> DatasetSpec:
    """The data set of held-out problems: train_dataset with what valid_dataset sets, or its whole test split."""
    train, valid = config.train_dataset, config.valid_dataset
    # `size` limits the training rows; evaluation uses the whole split.
    whole = {"split": "test" if valid is None else valid.split, "size": None}
    if valid is None or not (valid.path or valid.mixture):
        sources = [source.model_copy(update=whole) for source in train.mixture]
        return train.model_copy(update={**whole, "mixture": sources})
    # Options belong to one procedural task.
    options = train.options if valid.path == train.path else {}
    other = {"path": valid.path or train.path, "mixture": valid.mixture, "options": options}
    return train.model_copy(update={**whole, **other})


@functools.cache
def known_keys() -> Mapping[str, Key]:
    """Every key of the schema by its dotted name, sections before what they hold."""
    return types.MappingProxyType({key.name: key for key in keys_of(Config, "")})

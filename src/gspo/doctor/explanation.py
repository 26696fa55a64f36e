"""What a config will do, as one tree of plain values: the content of `gspo doctor`, for people and as JSON.

Each section is a function from the facts of a config to a dict of words and numbers; `render.py` only lays them out.
Torch-free, except for the memory of a model that must be counted.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gspo import lint
from gspo.algorithms import CLIP_RANGE, GATES
from gspo.config import (
    ENVIRONMENT_ROWS,
    SAMPLERS,
    CriticSection,
    DatasetSpec,
    Loaded,
    Norm,
    ObjectiveSettings,
    RewardNorm,
    algorithm_in,
    held_out,
    is_supervised,
    layout_of,
    parse_backend,
    same_as,
)
from gspo.data import default_reward
from gspo.doctor import memory
from gspo.doctor.memory import (
    Item,
    ModelFields,
    Shape,
    Unknown,
    adapted_layers,
    adapter_parameters,
    find_source,
    shape_of,
)
from gspo.learner import HEAD_CHUNK
from gspo.lint import Facts, Finding, facts_of, ineffective
from gspo.rewards import TEXT
from gspo.sampling import rows_at_once
from gspo.system import count, number, parse_yaml, source_file


def batch_section(f: Facts) -> dict[str, Any]:
    group, parts, total = f.config.gconfig.n_samples, f.num_minibatches, f.num_sequences
    ranks, longest = layout_of(f.config, f.num_gpus).ranks, f.longest
    each, spec = total / parts, f.actor.mb_spec
    tokens = math.ceil(each * (longest or f.config.gconfig.max_new_tokens))
    micro = max(1, math.ceil(tokens / ranks / spec.max_tokens_per_mb))
    steps = f.config.total_train_steps
    return {
        "supervised": is_supervised(f.config),
        "prompts": f.num_prompts,
        "group_size": group,
        "sequences": total,
        "minibatches": parts,
        "sequences_per_minibatch": int(each) if each.is_integer() else each,
        "divides": each.is_integer(),
        "tokens_per_minibatch_at_most": tokens,
        "prompt_length_known": longest is not None,
        "max_tokens_per_microbatch": spec.max_tokens_per_mb,
        "microbatches_at_most": micro,
        "ranks": ranks,
        "steps": steps,
        "epochs": f.actor.ppo_epochs,
        "updates": None if steps is None else steps * f.num_updates,
    }


NOT_SETTINGS = ("name", "weight", "label", "gate")  # of an entry of reward.functions; the others go to the function

_CURRICULUM_WORDS = (
    "; prompts are drawn by their measured pass rate, those near 1/2 up to 10 times as often as those that are always "
    "or never solved"
)


def data_section(f: Facts) -> dict[str, Any]:
    """Training problems, held-out problems and rewards, in words."""
    train, valid, functions = f.config.train_dataset, f.config.valid_dataset, f.config.reward.functions
    own = "the held-out part of " + ("each training source" if train.mixture else "the training data")
    if train.path == ENVIRONMENT_ROWS:
        own = "other problems of the environment"
    reward = reward_words(functions, f.config.reward.weights) if functions else _own_words(train)
    if f.config.env.path or f.config.env.agent:
        reward = f"that of the episode; if it gives none: {reward}"
    return {
        "training": _data_words(train) + _CURRICULUM_WORDS * (train.shuffle == "pass_rate"),
        "held_out": own if valid is None else _data_words(held_out(f.config)),
        "template": _template_words(train),
        "reward": reward,
    }


def reward_words(functions: Sequence[str | dict[str, Any]], weights: Sequence[float] = ()) -> str:
    """The sum of rewards and its gates, with their main settings; API keys and prompts are never shown.

    >>> reward_words(["math", {"name": "reward_model", "path": "rm", "weight": 0.5}])
    "math + 0.5 × reward_model rm, in the trainer's process"
    >>> reward_words(["chrf", {"name": "language", "to": "fr", "gate": True}])
    'chrf × language(to=fr)'
    """
    words, gates = list[str](), list[str]()
    for index, entry in enumerate(functions):
        settings = {"name": entry} if isinstance(entry, str) else entry
        name = str(settings.get("name", "?"))
        weight = weights[index] if index < len(weights) else settings.get("weight", 1.0)
        if name == "judge":
            host = re.sub(r"//[^/@]*@", "//", str(settings.get("url", "?")))
            name = f"judge {settings.get('model', '?')} at {host}"
        elif name == "reward_model":
            name = f"reward_model {settings.get('path', '?')}, in the trainer's process"
        elif name in TEXT:
            own = [f"{key}={value}" for key, value in settings.items() if key not in NOT_SETTINGS]
            name += f"({', '.join(own)})" if own else ""
        (gates if settings.get("gate") else words).append(name if weight == 1 else f"{weight:g} × {name}")
    total = " + ".join(words)
    return " × ".join([f"({total})" if gates and len(words) > 1 else total, *gates])


def _own_words(data: DatasetSpec) -> str:
    if not data.mixture:
        return f"{default_reward(data.path)['name']}, the default of the data set"
    rewards = {s.name or s.path: reward_words(s.reward) for s in data.mixture if s.reward}
    named = "; ".join(f"{name}: {words}" for name, words in rewards.items())
    others = "; other sources: their default" * (len(rewards) < len(data.mixture))
    return named + others if named else "the default of each source"


def _data_words(data: DatasetSpec) -> str:
    if data.path == ENVIRONMENT_ROWS and not data.mixture:
        return "problems of the environment" + (f", {data.size:,} of them" if data.size else "")
    if not data.mixture:
        return f"{data.path}, split {data.split}" + (f", {data.size:,} rows" if data.size else "")
    total = sum(source.weight for source in data.mixture)
    return "; ".join(
        f"{100 * source.weight / total:.3g} % {source.path}" + (f" as {source.name}" if source.name else "")
        for source in data.mixture
    )


def _template_words(data: DatasetSpec) -> str:
    if data.chat_template in (False, "none"):
        words = "plain text"
    elif data.chat_template in ("auto", True):
        words = "the tokenizer's chat template" + ", if it has one" * (data.chat_template == "auto")
    else:
        words = "the chat template of the config"
    limit = f"; prompts of more than {data.max_length:,} tokens are dropped" if data.max_length else ""
    return words + (", with a system prompt" if data.system_prompt is not None else "") + limit


def memory_section(f: Facts, source: ModelFields | Unknown) -> dict[str, Any]:
    shape = source if isinstance(source, Unknown) else shape_of(source)
    if isinstance(source, Unknown) or isinstance(shape, Unknown):
        reason = shape.reason if isinstance(shape, Unknown) else ""
        return {"model": f.actor.path, "known": False, "unknown": reason, "items": []}
    tokens, num_parts = _micro_batch(f)
    items = [*_trainer_memory(f, shape, tokens), *_sampler_memory(f, shape)]
    sizes = [item.num_bytes for item in items if item.side == "sampler"]
    # An unknown item makes the total unknown; a partial sum would look too small.
    sampler = None if None in sizes else sum(size for size in sizes if size is not None)
    totals = {"trainer": memory.peak(items, num_parts), "sampler": sampler}
    return {
        "model": f.actor.path,
        "known": True,
        "unknown": None,
        "shape": {
            "source": source.name,
            "family": shape.family,
            "parameters": shape.parameters,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "vocabulary": shape.vocabulary,
            "context": source.context,
            "experts": shape.experts,
        },
        "items": [asdict(item) for item in items],
        "totals": totals,
        "least": memory.peak(items, 0),  # of the trainer, with short completions
        "per_rank": layout_of(f.config, f.num_gpus).ranks,
    }


def _micro_batch(f: Facts) -> tuple[int, int]:
    """Tokens of the largest micro-batch of a rank if all completions are as long as allowed; micro-batches per update.

    A prompt counts once for its completions, as it is computed. If its length is unknown, it does not count.
    """
    generation, group = f.config.gconfig, max(f.config.gconfig.n_samples, 1)
    each = f.num_sequences / f.num_minibatches / layout_of(f.config, f.num_gpus).ranks
    tokens = math.ceil(each * (generation.max_new_tokens + (f.config.train_dataset.max_length or 0) / group))
    most = f.actor.mb_spec.max_tokens_per_mb
    return min(tokens, most), math.ceil(tokens / most)


def _trainer_memory(f: Facts, shape: Shape, tokens: int) -> list[Item]:
    actor, shards = f.actor, layout_of(f.config, f.num_gpus).ranks
    bits, quantised = actor.lora_base_bits, shape.linear_parameters if actor.lora_base_bits else 0
    items = [memory.parameters_item("actor", shape.parameters - quantised, f.dtype, shards)]
    if bits is not None:
        items.append(memory.quantized_item("actor", quantised, bits, f.dtype))
        if f.on_cpu:  # for a GPU the model is loaded and quantised in the host's memory
            size = memory.BYTES[f.dtype]
            how = f"{count(shape.parameters)} × {size} bytes ({f.dtype}), until they are quantised"
            items.append(Item("actor parameters, as loaded", shape.parameters * size, how, when="loading"))
    if actor.use_lora:
        items += _adapter_memory(f, shape, shards)
    else:
        items += _training_memory(f, "actor", shape.parameters, f.dtype, shards)
    adapted = adapted_layers(shape, actor.target_modules) * actor.lora_rank if actor.use_lora else 0
    items.append(
        memory.activations_item(
            shape,
            tokens=tokens,
            dtype=f.dtype,
            checkpointing=actor.gradient_checkpointing,
            adapter_numbers=adapted,
            heap=memory.HEAP if f.on_cpu else 1.0,
            note="" if f.config.train_dataset.max_length else ", plus prompts",
        )
    )
    items += memory.logits_items(shape, chunk=HEAD_CHUNK, tokens_per_mb=tokens)
    if not actor.use_lora:
        num = shape.vocabulary * shape.hidden
        how = f"{count(num)} × 4 bytes; it is made first, while all activations are there"
        items.append(Item("gradient of the head", num * 4, how, when="pass"))
    if f.on_cpu:
        items.append(Item("Python and libraries", memory.LIBRARIES, "torch, transformers and their data; measured"))
    ref, critic = f.config.ref, f.config.critic
    frozen: dict[str, str] = {}
    if ref is not None and (actor.kl_loss_coef > 0 or actor.kl_ctl > 0) and not reference_is_policy(f):
        frozen["reference"] = ref.path or actor.path
    if f.config.teacher is not None and not f.config.teacher.is_server:
        frozen["teacher"] = f.config.teacher.path
    for name, path in frozen.items():
        other = _shape_at(path)
        items.append(
            Item(f"{name} parameters", None, other.reason)
            if isinstance(other, Unknown)
            else memory.parameters_item(name, other.parameters, f.dtype, shards, ", no gradients")
        )
    if critic is not None and f.objective["advantage"] == "gae":
        other = _shape_at(critic.path or actor.path)
        if isinstance(other, Unknown):
            return [*items, Item("critic", None, other.reason)]
        # The language-model head is replaced by a linear layer from the hidden state to one value.
        num = other.parameters - other.head + other.hidden + 1
        items.append(memory.parameters_item("critic", num, f.dtype, shards))
        items += _training_memory(f, "critic", num, f.dtype, shards)
    return items


def _adapter_memory(f: Facts, shape: Shape, shards: int) -> list[Item]:
    """A LoRA adapter has at least float32 parameters, whatever the frozen model's precision."""
    num = adapter_parameters(shape, f.actor.lora_rank, f.actor.target_modules)
    if num is None:
        unknown = "the adapter's size is unknown: actor.target_modules names a layer that the model does not have"
        return [Item("adapter", None, unknown)]
    dtype = "float64" if f.dtype == "float64" else "float32"
    return [
        memory.parameters_item("adapter", num, dtype, shards),
        *_training_memory(f, "adapter", num, dtype, shards),
    ]


def _training_memory(f: Facts, what: str, num: int, dtype: str, shards: int) -> list[Item]:
    how = f.actor.optimizer
    offload = how.offload and how.type != "sgd" and not f.on_cpu
    return memory.training_items(what, num, dtype, how.type, shards, offload=offload)


def _shape_at(path: str) -> Shape | Unknown:
    source = find_source(path)
    return source if isinstance(source, Unknown) else shape_of(source)


def _sampler_memory(f: Facts, shape: Shape) -> list[Item]:
    sampler, generation = parse_backend(f.config.rollout.backend, SAMPLERS), f.config.gconfig
    items = []
    concurrent = f.config.rollout.max_concurrent_rollouts or (
        f.num_sequences
        if f.external_sampler
        else rows_at_once(shape.parameters, generation.max_new_tokens, f.config.rollout.max_head_offpolicyness)
    )
    if f.external_sampler:
        gpus = sampler.tensor * sampler.pipeline
        size = memory.BYTES[f.dtype] if f.dtype != "float64" else 4
        items.append(
            Item(
                "sampler parameters",
                shape.parameters * size // gpus,
                f"{count(shape.parameters)} × {size} bytes" + (f" / {gpus} GPUs" if gpus > 1 else ""),
                side="sampler",
            )
        )
    items.append(
        memory.cache_item(
            shape,
            num_sequences=min(concurrent, f.num_sequences),
            group_size=generation.n_samples,
            prompt_tokens=f.config.train_dataset.max_length,
            max_new_tokens=generation.max_new_tokens,
            dtype=f.dtype,
            num_samplers=sampler.data,
        )
    )
    return items


# Ratios, advantages, aggregations and norms in words and formulas, by their names in a config.
WORDS: Mapping[str, Mapping[str, str]] = parse_yaml(Path(__file__).with_name("words.yaml").read_text(encoding="utf-8"))


def formula(objective: ObjectiveSettings, numbers: bool = True, penalised: bool = False) -> str:
    """The objective as it will run, composed from its parts: a changed level or aggregation is visible.

    `penalised`: KL in the reward, or γ, makes advantages differ from token to token.
    """
    gate, level = GATES[objective["gate"]], objective["level"]
    by_token = penalised or objective["advantage"] in ("gae", "teacher")
    per_token = level == "sequence_token" or (by_token and level == "token")
    parts = {name: setting.symbol for name, setting in gate.settings.items()}
    parts |= _numbers(objective) if numbers else {}
    parts |= {"ratio": WORDS["ratio_symbol"][level], "A": "Aᵢₜ" if per_token else "Aᵢ"}
    term = "".join([gate.formula, *_extra(objective, "formula")]).format(**parts)
    # A gate whose formula has no ratio defines what it has instead.
    return f"{_sum_over(objective)} {term}" + (
        f",   {WORDS['ratio_definition'][level]}" if "{ratio}" in gate.formula else ""
    )


def _numbers(objective: ObjectiveSettings) -> dict[str, str]:
    """The settings of the gate that are on, in their short form; with eps_clip: auto the range stays a symbol."""
    found = {}
    for name, setting in GATES[objective["gate"]].settings.items():
        value = objective["settings"][name]
        if value is not None:
            found[name] = setting.symbol if objective["eps_auto"] and name in CLIP_RANGE else number(value)
    return found


def _extra(objective: ObjectiveSettings, text: Literal["formula", "words"]) -> list[str]:
    """What the settings that are on add to the gate's formula or words."""
    settings = GATES[objective["gate"]].settings
    return [getattr(settings[name], text) for name in _numbers(objective)]


def _sum_over(objective: ObjectiveSettings) -> str:
    aggregation, outer = objective["aggregation"], WORDS["sum"][objective["aggregation"]]
    if objective["level"] != "sequence":
        return f"J = E {outer} (1/|yᵢ|) Σₜ" if aggregation == "sequence_mean" else f"J = E {outer} Σₜ"
    return f"J = E {outer}" if aggregation == "sequence_mean" else f"J = E {outer} |yᵢ| ·"


def objective_section(f: Facts) -> dict[str, Any]:
    objective, actor = f.objective, f.actor
    algorithm, settings = algorithm_in(f.config), objective["settings"]
    own = _function_of(f)
    as_published = objective["level"] == algorithm.level and objective["aggregation"] == algorithm.aggregation
    return {
        "algorithm": algorithm.name,
        "title": algorithm.title if own is None else own.title or algorithm.title,
        "paper": algorithm.paper,
        "as_published": as_published or algorithm.of_user,
        "same_as": None if as_published else same_as(objective),
        "formula": formula(objective, penalised=actor.kl_ctl > 0 or actor.discount < 1)
        if own is None
        else own.formula(f),
        "words": _words(f),
        "level": objective["level"],
        "gate": None if algorithm.of_user else objective["gate"],
        "advantage": objective["advantage"],
        "aggregation": objective["aggregation"],
        "settings": dict(settings),
        "eps_auto": objective["eps_auto"],
        "decided_by": [
            {"key": key, "value": value, "where": f.where(key)} for key, value in _decisions(f) if value is not None
        ],
    }


def _words(f: Facts) -> list[str]:
    objective, kind = f.objective, WORDS["ratio"][f.objective["level"]]
    if is_supervised(f.config):
        return [
            "completions: those of the data set; nothing is sampled or rewarded in training",
            f"loss: negative log-likelihood, {WORDS['aggregation'][objective['aggregation']]}",
        ]
    own = _function_of(f)
    band = GATES[objective["gate"]].words
    if objective["eps_auto"]:
        band = (
            "clipped to an automatic range: nothing is clipped in the first step, then the range adapts until 5 % of "
            "the sequences are clipped"
        )
    band = "".join([band, *_extra(objective, "words")]).format(**_numbers(objective))
    words = [
        *([f"ratio: {kind}, {band}"] if own is None else own.words(f)),
        f"advantage: {_advantage_words(f)}",
        f"loss: {WORDS['aggregation'][objective['aggregation']]}",
        f"groups with equal rewards: {_zero_variance_words(f)}",
    ]
    if f.actor.entropy_coef:
        words.append(f"entropy: {_entropy_words(f)}")
    if f.config.rollout.dynamic_filter_fn is not None:
        words.append(
            f"other groups: {f.config.rollout.dynamic_filter_fn} decides which are trained on; others are resampled, "
            f"at most {f.actor.max_refills} rounds"
        )
    if f.actor.overlong_reward_penalty:
        longest, most = f.config.gconfig.max_new_tokens, float(f.actor.overlong_reward_penalty)
        words.append(
            f"overlong completions: a penalty of up to {number(most)}, rising over the last "
            f"{f.actor.overlong_tokens:,} of {longest:,} tokens"
        )
    env = f.config.env
    agent = " ".join(env.agent) if isinstance(env.agent, list) else env.agent
    if played := env.path or agent:
        unit = f.actor.sequence_unit if f.sequence_level else "token"
        words.append(
            f"episodes: {played}, at most {env.max_turns} turns; one ratio per {unit}; tokens of tools and of the "
            "environment are neither in |y| nor in the loss"
        )
    if agent:
        words.append("agents: call an OpenAI-compatible server on this machine; the policy is the model 'policy'")
    if objective["advantage"] == "gae" and f.config.critic is not None:
        words.append(f"critic: {_critic_words(f, f.config.critic)}")
    return words


@dataclass(frozen=True)
class _Function:
    """A function of the user, as its file has it; it is not imported here."""

    name: str
    file: Path | None
    title: str  # the first line of its docstring
    parameters: Sequence[str] | None  # None: the file has no such `def`

    def keys(self, f: Facts) -> list[str]:
        """The keys of `actor` that it asks for."""
        return [name for name in self.parameters or () if name in type(f.actor).model_fields]

    def formula(self, f: Facts) -> str:
        call = "…" if self.parameters is None else ", ".join(self.parameters)
        return f"loss = {WORDS['sum'][f.objective['aggregation']]} {self.name}({call})ᵢ"

    def words(self, f: Facts) -> list[str]:
        if self.parameters is None:
            return [f"function: {self.name}; its file is not found here, or has no `def {self.name}`"]
        given = [f"actor.{key} {_value(getattr(f.actor, key))}" for key in self.keys(f)]
        return [
            f"function: {self.name} in {self.file}; it computes the ratio, and what is clipped",
            f"keys that it is given: {', '.join(given) or 'none'}",
        ]


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _function_of(f: Facts) -> _Function | None:
    """None for a preset."""
    if not f.objective["of_user"]:
        return None
    name, file = f.objective["name"].rpartition(":")[2], source_file(f.objective["name"])
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.parse(file.read_bytes() if file is not None else b"").body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                title = (ast.get_docstring(node) or "").partition("\n")[0]
                return _Function(name, file, title, [each.arg for each in arguments])
    return _Function(name, file, "", None)


def _entropy_words(f: Facts) -> str:
    coefficient, target = number(f.actor.entropy_coef), f.actor.entropy_target
    if target is None:
        return f"{coefficient} × the policy's entropy is subtracted from the loss"
    return (
        f"α × the policy's entropy is subtracted from the loss; α starts at {coefficient} and follows the target of "
        f"{number(target)} nats per token"
    )


def _critic_words(f: Facts, critic: CriticSection) -> str:
    return (
        f"{critic.path} with a new value head, {f.num_minibatches} updates per batch at "
        f"{number(critic.optimizer.lr or 0)}, values clipped to ±{number(critic.value_eps_clip)} around those at the "
        "start of the batch"
    )


def _advantage_words(f: Facts) -> str:
    chosen, actor = f.objective["advantage"], f.actor
    words = WORDS["advantage"].get(chosen)
    if words is None:
        words = "reward normalised by actor.reward_norm: " + _norm_words(actor.reward_norm or Norm())
    if f.config.reward.normalize == "each":
        words += ", for each reward apart; their weighted sum is the advantage (GDPO)"
    if chosen == "gae":
        words += f" (γ {actor.discount:g}, λ {actor.gae_lambda:g})"
    elif actor.discount < 1:
        words += f", times γ = {actor.discount:g} for each later token"
    if actor.kl_ctl > 0:
        words += f"; {number(actor.kl_ctl)} × the KL to the reference is subtracted from the reward of each token"
        if f.objective["level"] == "sequence":
            words += " (with a sequence ratio: its mean over tokens)"
    if actor.adv_norm is not None:
        words += f"; then, over the trained tokens, {_norm_words(actor.adv_norm)}"
    if actor.mask_no_eos_with_zero:
        where = "reward of truncated completions is 0, before that" if actor.mask_no_eos_with_zero == "reward" else ""
        words += f"; the {where or 'advantage of truncated completions is 0, at the end'}"
    return words


def _norm_words(norm: Norm | RewardNorm) -> str:
    return f"{WORDS['mean'][norm.mean_level or 'none']}, {WORDS['std'][norm.std_level or 'none']}"


def _zero_variance_words(f: Facts) -> str:
    chosen = f.actor.zero_variance_groups or "count"
    if f.objective["advantage"] == "gae" and chosen == "count":
        return "treated like other groups: the critic gives their advantages"
    if f.actor.kl_ctl > 0 and chosen == "count":
        return "advantage 0 before the KL penalty; counted in the loss denominator"
    return WORDS["zero_variance"][chosen].format(max_refills=f.actor.max_refills)


def _decisions(f: Facts) -> list[tuple[str, Any]]:
    actor, gate = f.actor, GATES[f.objective["gate"]]
    keys = [
        "importance_sampling_level",
        "loss_aggregation",
        "ppo_n_minibatches",
        "zero_variance_groups",
        "kl_loss_coef",
    ]
    own = _function_of(f)
    keys[1:1] = [setting.key for setting in gate.settings.values() if setting.key] if own is None else own.keys(f)
    keys += ["kl_ctl"] if actor.kl_ctl > 0 else []
    keys += ["discount", "gae_lambda"] if f.objective["advantage"] == "gae" else []
    return [("algorithm", f.config.algorithm), *((f"actor.{key}", getattr(actor, key)) for key in keys)]


def policy_section(f: Facts) -> dict[str, Any]:
    return {
        "sampler": "completions of the data set; the sampler answers held-out problems only"
        if is_supervised(f.config)
        else _sampler_words(f),
        "sampling": _sampling_words(f),
        "staleness": f.config.rollout.max_head_offpolicyness,
        "proximal": f.objective["proximal"],
        "pi_old": "none: the loss has no ratio" if is_supervised(f.config) else _proximal_words(f),
        "corrected": f.objective["corrected"],
        "correction": f.objective["settings"]["correction"],
        "correction_words": _correction_words(f),
        "kl": _kl_words(f) if f.config.teacher is None else f"teacher {f.config.teacher.path}: {_teacher_words(f)}",
        "experts": WORDS["routing_replay"].get(f.actor.routing_replay, ""),
        "trained": _trained_words(f),
    }


def _teacher_words(f: Facts) -> str:
    assert f.config.teacher is not None
    share, coef = f.config.teacher.exact_kl, number(f.config.teacher.coef)
    if share is None:
        return f"{coef} × (its log-prob − the sampler's) is the advantage of each token"
    return f"{coef} × exact KL over the vocabulary in the loss, {share:.0%} forward"


def _trained_words(f: Facts) -> str:
    actor = f.actor
    if not actor.use_lora:
        return "all weights"
    where = ", ".join(WORDS["target_modules"].get(name, name) for name in actor.target_modules)
    scale = actor.lora_alpha / actor.lora_rank
    adapter = f"an adapter of rank {actor.lora_rank}, scaled by alpha/rank = {scale:g}, on {where}"
    return f"{adapter}; the model itself is frozen"


def _sampler_words(f: Facts) -> str:
    backend, stale = f.config.rollout.backend, f.config.rollout.max_head_offpolicyness
    layout = layout_of(f.config, f.num_gpus)
    sampler, gpus = layout.sampler, layout.num_nodes * layout.gpus_per_node
    if sampler is None:
        where = "in the trainer's process"
    else:
        where = f"{sampler.data} {sampler.name} server{'s' if sampler.data > 1 else ''}"
        where += f", {sampler.world} GPU{'s' if sampler.world > 1 else ''}" if gpus else ""
    if backend == "auto":
        where += f" (GPUs: {gpus})" if gpus else " (no GPU is visible here)"
    when = "synchronous: every sample is from the newest weights"
    if stale > 0 and "in the trainer's process" in where:
        when = f"sampling ahead, inline: batch b is sampled by weight version b − {stale}"
    elif stale > 0:
        when = f"sampling ahead, in the background: samples are up to {stale} weight versions old"
    precision = f.config.rollout.sampler_precision
    rounded = "" if precision == "none" else f", on weights rounded to {precision}"
    return f"{where}{rounded}; {when}"


def _sampling_words(f: Facts) -> str:
    generation = f.config.gconfig
    how = f"temperature {generation.temperature:g}"
    cuts = [f"top-p {generation.top_p:g}"] if generation.top_p < 1 else []
    cuts += [f"top-k {generation.top_k}"] if generation.top_k else []
    cuts += [f"min-p {generation.min_p:g}"] if generation.min_p else []
    how = ", ".join([how, *cuts, f"at most {generation.max_new_tokens:,} new tokens"])
    if f.replays_kept:
        return how + "; the sampler records the kept tokens, and ratios are over the kept tokens"
    return how + "; ratios are over the whole vocabulary" if cuts else how


def _proximal_words(f: Facts) -> str:
    method, parts = f.objective["proximal"], f.num_updates
    if method == "rollout":
        return "the sampler's log-probs (μ), recorded with each token; the run stops if their error is above ε"
    if method == "loglinear":
        return "interpolated between the sampler's and the trainer's log-probs by each token's weight version"
    if parts == 1:
        return "the trainer's weights at the start of the batch; with one mini-batch, every ratio is 1"
    later = "mini-batch 2 uses" if parts == 2 else f"mini-batches 2…{parts} use"
    own = f"the trainer's weights at the start of the batch: mini-batch 1 uses its own log-probs, {later} "
    if method == "auto":
        return f"{own}the sampler's log-probs while their measured error is far below ε, else a forward pass"
    return f"{own}a forward pass before the first update"


def _correction_words(f: Facts) -> str:
    form = f.objective["settings"]["correction"]
    if form is None:
        return "no off-policy correction"
    low, high = form["lower"], form["upper"]
    if low is None and high is None:
        if form["level"] == "token":
            return "each token is weighted by π_old/μ, without bounds"
        return "each sequence is weighted by π_old/μ (geometric mean over its tokens), without bounds"
    if form["agg"] == "product" and form["level"] == "sequence":
        weight = "each sequence is weighted by the product of its tokens' π_old/μ"
        how = "is dropped" if form["action"] == "mask" else "is truncated"
        return f"{weight}; outside [{number(low or 0.0)}, {'∞' if high is None else number(high)}] it {how}"
    what = "each token" if form["level"] == "token" else f"each sequence (its {form['agg']} over tokens)"
    metric = "π_old/μ" if form["metric"] == "ratio" else f"{form['metric']} between π_old and μ"
    band = f"[{'−∞' if low is None else number(low)}, {'∞' if high is None else number(high)}]"
    action = "is dropped" if form["action"] == "mask" else "has its weight truncated"
    only = " where A < 0" if form["only_negative"] else ""
    return f"{what} is weighted by π_old/μ; outside {metric} ∈ {band} it {action}{only}"


def _kl_words(f: Facts) -> str:
    actor, parts = f.actor, []
    ref = "a missing reference" if f.config.ref is None else str(f.config.ref.path)
    if reference_is_policy(f):
        ref += " (the policy with its adapter off)"
    if actor.kl_loss_coef > 0:
        parts.append(f"{number(actor.kl_loss_coef)} × KL to {ref} in the loss ({actor.kl_estimator or 'k3'})")
    if actor.kl_ctl > 0:
        parts.append(f"{number(actor.kl_ctl)} × KL to {ref} in the reward ({actor.kl_estimator or 'k1'})")
    return " and ".join(parts) or "none"


def reference_is_policy(f: Facts) -> bool:
    """Whether the reference needs no weights of its own: it is the LoRA policy with its adapter off."""
    ref, actor = f.config.ref, f.actor
    return ref is not None and actor.use_lora and ref.path == actor.path


@dataclass(frozen=True)
class Report:
    """`sections` is what `report_json` writes, findings included; the findings decide the exit code."""

    sections: dict[str, Any]
    findings: tuple[Finding, ...]
    strict: bool

    @property
    def exit_code(self) -> int:
        """2: the config contradicts itself; 1: this machine cannot run it; 0: neither."""
        if any(f.severity == "error" or self.strict for f in self.findings):
            return 2
        return int(any(check["state"] == "failed" for check in self.sections["machine"] or ()))

    def with_machine(self, checks: Sequence[Any]) -> Report:
        """The report with the checks of this machine (`doctor.ready.examine`)."""
        return replace(self, sections={**self.sections, "machine": [asdict(check) for check in checks]})


def explain(loaded: Loaded, *, num_gpus: int | None = None, with_memory: bool = True) -> Report:
    """Everything that `gspo doctor` shows. The memory section may import torch to count the model's parameters."""
    source = find_source(loaded.config.actor.path)
    facts = facts_of(loaded, num_gpus)
    context = source.context if isinstance(source, ModelFields) else None
    findings = lint.lint(loaded, facts.num_gpus, context)
    config = facts.config
    sections = {
        "config": None if loaded.path is None else str(loaded.path),
        "run_directory": f"{config.cluster.fileroot}/{config.experiment_name}/{config.trial_name}",
        "objective": objective_section(facts),
        "data": data_section(facts),
        "batch": batch_section(facts),
        "policies": policy_section(facts),
        **({"memory": memory_section(facts, source)} if with_memory else {}),
        "messages": list(loaded.messages),
        "warnings": [asdict(finding) for finding in findings if finding.severity == "warning"],
        "errors": [asdict(finding) for finding in findings if finding.severity == "error"],
        "without_effect": [
            {"key": key, "where": facts.where(key), "why": why} for key, why in ineffective(loaded, facts.num_gpus)
        ],
        "strict": config.strict,
        "machine": None,  # not looked at
    }
    return Report(sections, tuple(findings), config.strict)


def report_json(report: Report) -> str:
    # ASCII only: no text of a config can act on a terminal.
    return json.dumps({**report.sections, "exit_code": report.exit_code}, indent=2, ensure_ascii=True, allow_nan=False)

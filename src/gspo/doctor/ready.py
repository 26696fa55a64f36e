"""Whether a config can run on this machine: the checks that `gspo train` makes before its first step.

Nothing is trained and no weights are loaded. Hub names cost one request each. What cannot be checked is named.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gspo.config import ENVIRONMENT_ROWS, Config, Loaded, algorithm_in, held_out, layout_of
from gspo.data import is_on_hub
from gspo.doctor.memory import ModelFields, find_source
from gspo.errors import ConfigError, GspoError
from gspo.launcher import make_launch_plan, require_machine
from gspo.lint import facts_of
from gspo.models import cache, check_settings, check_weights, embedded, find_here, gguf, hub_problem, read_adapter
from gspo.rewards import BUILTIN, PRELOAD, SCORERS, Judge, RewardPool, check_classifier
from gspo.system import beat, by_name, human, install_command, memory_bytes, num_cores, visible_gpus


@dataclass(frozen=True)
class ReadyCheck:
    """One thing that a run needs. ok: it is here; failed: the run cannot start; unknown: not checked."""

    what: str
    state: Literal["ok", "failed", "unknown"]
    text: str


def attempt(what: str, look: Callable[[], str]) -> ReadyCheck:
    """Ok with the text that `look` returns; failed with the message of its error."""
    beat(f"checking {what}")
    try:
        return ReadyCheck(what, "ok", look())
    except GspoError as error:
        return ReadyCheck(what, "failed", str(error))


ROWS = 1000  # prompts that are rendered to find the longest one


def look_at_objective(loaded: Loaded) -> str:
    """A function of the user in place of a preset, called on small tensors as before a run."""
    if not algorithm_in(loaded.config).of_user:
        return ""
    by_name("gspo.train.build.own_objective:find_objective")(loaded)
    return f"{loaded.config.algorithm} was called on small tensors; its loss and its gradient are finite"


def look_at_rewards(config: Config) -> str:
    """Libraries, keys of judges, reward models, and the user's functions, which a worker imports."""
    from gspo.train import reward_specs

    parts = [part for spec in reward_specs(config).values() for part in spec]
    for part in parts:
        module, package, extra = PRELOAD.get(part.name, ("", "", ""))
        if module and importlib.util.find_spec(module.partition(".")[0]) is None:
            raise ConfigError(f"the reward {part.name!r} needs {package}: {install_command(extra)}")
        if part.name == "reward_model":
            _look_at_classifier(part.kwargs["path"])
        elif part.is_scorer:
            with closing(by_name(SCORERS[part.name])(**part.kwargs, key="reward")) as scorer:
                if isinstance(scorer, Judge):
                    scorer.check_reachable()
    own = {part.name: part for part in parts if part.name not in BUILTIN and not part.is_scorer}
    if own:
        with RewardPool(tuple(own.values()), workers=1, log_path=os.devnull) as pool:
            pool.wait_ready()
    return ", ".join(dict.fromkeys(part.label for part in parts))


def _look_at_classifier(path: str) -> None:
    import torch

    if find_here(str(Path(path).expanduser()), "reward: reward_model.path") is not None:
        check_classifier(path, torch.float32, "reward")


def look_at_environment(config: Config) -> str:
    """The environment or agent; its code is imported."""
    from gspo.train import find_environment

    env = config.env
    return "" if find_environment(config, None) is None else str(env.path or env.agent)


def check_data(config: Config, tokenizer: Any) -> Iterator[ReadyCheck]:
    """Rows, columns, the held-out part, and the longest prompt if the tokenizer is here."""
    from gspo.train import (
        alphabet_warning,
        default_rewards,
        evaluation_params,
        find_environment,
        limit_context,
        make_data,
        make_reader,
        refuse_images,
        refuse_long_prompts,
        scores_answers,
    )

    elsewhere = list(_hub_data(config))
    yield from elsewhere
    if elsewhere:
        return
    try:
        readable = config if tokenizer is not None else _without_rendering(config)
        environment = find_environment(config, None)
        reader = None if tokenizer is None else make_reader(config, tokenizer)
        data, valid = make_data(readable, None, None, reader, environment)
        both = [part for part in (data, valid) if part is not None]
        if tokenizer is not None:
            refuse_images(config, both, has_environment=environment is not None, policy=None)
        if environment is None and scores_answers(config, None, both):
            default_rewards(config, None, both)
        sizes = "; ".join(line for part in (data, valid) if part is not None for line in part.describe().splitlines())
        if tokenizer is None:
            yield ReadyCheck("data", "ok", sizes)
            yield ReadyCheck("prompt lengths", "unknown", "the tokenizer is not on this machine")
            return
        source = find_source(config.actor.path)
        limit = limit_context(config, source.context if isinstance(source, ModelFields) else None)
        refuse_long_prompts(data, limit, config.gconfig.max_new_tokens, most=ROWS)
        longest = max(len(data.prompt(row).tokens) for row in range(min(len(data), ROWS)))
        if valid is not None:
            refuse_long_prompts(valid, limit, evaluation_params(config)[0].max_new_tokens, "eval_gconfig", most=ROWS)
        few = "" if len(data) <= ROWS else f" among the first {ROWS:,}"
        unreadable = "".join(f"; {line}" for line in alphabet_warning(config, data.prompt(0).text))
        yield ReadyCheck("data", "ok", f"{sizes}; longest prompt{few}: {longest:,} tokens{unreadable}")
    except GspoError as error:
        yield ReadyCheck("data", "failed", str(error))


def _hub_data(config: Config) -> Iterator[ReadyCheck]:
    """Data sets that are not on this machine, and those that are nowhere."""
    valid = None if config.valid_dataset is None else held_out(config)
    for section, spec in (("train_dataset", config.train_dataset), ("valid_dataset", valid)):
        key = f"{section}.path"
        for path in dict.fromkeys([s.path for s in spec.mixture] or [spec.path]) if spec is not None else ():
            if path == ENVIRONMENT_ROWS:
                continue
            try:
                if not is_on_hub(path, section):
                    continue
            except GspoError as error:
                yield ReadyCheck(key, "failed", str(error))
                continue
            if importlib.util.find_spec("datasets") is None:
                yield ReadyCheck(
                    key,
                    "failed",
                    f"{key}: {path} is not on this machine; the hub needs a package: {install_command('tasks')}",
                )
            elif problem := hub_problem(path.partition(":")[0], "dataset"):
                remedy = f"set {key} to a file or folder, or GSPO_DATA to its parent folder"
                yield ReadyCheck(
                    key,
                    "failed",
                    f"{key}: {path} was not found: there is no such file or folder, and the hub did not provide it "
                    f"({problem}); {remedy}",
                )
            else:
                yield ReadyCheck(key, "unknown", f"{path} is on the hub; its rows and columns were not read")


def _without_rendering(config: Config) -> Config:
    """The config whose data sets need no tokenizer."""
    plain = {"max_length": None, "chat_template": "none"}

    def stripped(spec: Any, **own: Any) -> Any:
        return spec and spec.model_copy(
            update={**own, "mixture": [source.model_copy(update=plain) for source in spec.mixture]}
        )

    sections = {
        "train_dataset": stripped(config.train_dataset, **plain),
        "valid_dataset": stripped(config.valid_dataset),
    }
    return config.model_copy(update=sections)


def look_at_processes(config: Config) -> str:
    """The processes of the run; ConfigError if this machine lacks GPUs or an engine."""
    num_gpus = visible_gpus()
    layout = make_launch_plan(config, [], num_gpus).layout
    if config.scheduler.type in ("ray", "slurm"):
        return f"{layout}, placed by {config.scheduler.type}"
    require_machine(config, layout, num_gpus)
    return f"{layout}; this machine has {num_gpus} GPUs and {num_cores()} CPU cores"


def check_packages(config: Config) -> Iterator[ReadyCheck]:
    """Optional dependencies; those of data sets, rewards and models are checked with them."""
    for is_used, key, package, extra in (
        (config.actor.use_lora, "actor.use_lora", "peft", "lora"),
        (config.actor.lora_base_bits == 4, "actor.lora_base_bits", "bitsandbytes", "quantized"),
        (config.scheduler.type == "ray", "scheduler.type", "ray", "ray"),
    ):
        if is_used and importlib.util.find_spec(package) is None:
            yield ReadyCheck(key, "failed", f"{key} needs {package}: {install_command(extra)}")


def check_memory(loaded: Loaded, memory: Mapping[str, Any]) -> ReadyCheck:
    """The estimate against the memory of this machine or of its first GPU."""
    config, facts = loaded.config, facts_of(loaded)
    if config.scheduler.type in ("ray", "slurm"):
        return ReadyCheck("memory", "unknown", "the memory of the cluster's machines is not known here")
    trainer, sampler = (memory.get("totals", {}).get(side) for side in ("trainer", "sampler"))
    if trainer is None or sampler is None:
        return ReadyCheck("memory", "unknown", memory.get("unknown") or "a part of the estimate is unknown")
    layout = layout_of(config, facts.num_gpus)
    # An engine divides the memory that it has among its sequences; the in-process sampler and our servers do not.
    sampler = 0 if facts.external_sampler else sampler
    if facts.num_gpus:
        found, where = _gpu_memory(), "a GPU of this machine"
        needed = trainer + sampler if layout.sampler is None else max(trainer, sampler)
    else:
        found, where = memory_bytes(), "this machine"
        needed = trainer * layout.ranks + sampler * max(layout.num_samplers, 1)
    if found is None:
        return ReadyCheck("memory", "unknown", f"the memory of {where} could not be read")
    parts = f"trainer {human(trainer)}, samples {human(sampler)} at most"
    if needed <= found:
        return ReadyCheck("memory", "ok", f"needs {human(needed)} ({parts}); {where} has {human(found)}")
    # The difference is activations of the longest completions that are allowed.
    if needed - (trainer - memory["least"]) * (layout.ranks if not facts.num_gpus else 1) <= found:
        return ReadyCheck(
            "memory",
            "unknown",
            f"may need {human(needed)} with completions of full length ({parts}), and {where} has {human(found)}; "
            "actor.gradient_checkpointing: true or a smaller actor.mb_spec.max_tokens_per_mb needs less",
        )
    remedy = (
        "use a smaller model, actor.use_lora: true, or actor.dtype: bfloat16"
        if trainer > found
        else "lower gconfig.max_new_tokens, rollout.max_concurrent_rollouts or train_dataset.batch_size"
    )
    return ReadyCheck("memory", "failed", f"needs {human(needed)} ({parts}), but {where} has {human(found)}; {remedy}")


def _gpu_memory() -> int | None:
    import torch

    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


_MAY_BE_ADAPTERS = ("ref.path", "critic.path", "teacher.path")


def check_models(config: Config) -> Iterator[ReadyCheck]:
    """A check for each model that the run loads, named by its key."""
    actor, ref, critic = config.actor, config.ref, config.critic
    wanted = {"actor.path": actor.path, "tokenizer_path": config.tokenizer_path}
    if ref is not None and (actor.kl_loss_coef or actor.kl_ctl):
        wanted["ref.path"] = ref.path
    if critic is not None:
        wanted["critic.path"] = critic.path
    if config.teacher is not None and not config.teacher.is_server:
        wanted["teacher.path"] = config.teacher.path
    seen: set[str] = set()
    for key, path in wanted.items():
        if path is not None and path not in seen:
            seen.add(path)
            yield _model(
                path, key, weights=key != "tokenizer_path" and not (path == actor.path and actor.init_from_scratch)
            )


def _model(path: str, key: str, *, weights: bool) -> ReadyCheck:
    """Whether a model is on this machine; a GGUF file is not converted here."""
    if path.endswith(gguf.SUFFIX) and not Path(path).is_dir():
        return attempt(key, lambda: gguf.require_file(path, key))
    try:
        found = find_here(path, key)
    except GspoError as error:
        return ReadyCheck(key, "failed", str(error))
    if found is None:
        return ReadyCheck(key, "unknown", f"{path} is on the hub; its files are downloaded when the run starts")
    if found.startswith("embedded:"):
        is_built = cache.is_whole(embedded.embedded_folder(found))
        when = "" if is_built else f", built at the first start in {embedded.build_time(found)}"
        return ReadyCheck(key, "ok", found + when)
    try:
        # Models that are not trained may be an adapter on a base model.
        if key in _MAY_BE_ADAPTERS and (adapter := read_adapter(Path(found), key)) is not None:
            base = _model(adapter.base, key, weights=True)
            return replace(base, text=f"an adapter in {found}, on {base.text}") if base.state == "ok" else base
        check_settings(Path(found))
        if weights:
            check_weights(Path(found), key)
    except GspoError as error:
        return ReadyCheck(key, "failed", f"{key}: {error}")
    return ReadyCheck(key, "ok", f"{path} in {found}" if path != found else found)


def find_tokenizer(config: Config, checks: list[ReadyCheck]) -> Any:
    """The tokenizer of the run; None, with a failed check, if it cannot be loaded."""
    from gspo.train import make_tokenizer

    if any(path.endswith(".gguf") for path in (config.actor.path, config.tokenizer_path or "")):
        return None
    try:
        return make_tokenizer(config)
    except GspoError as error:
        checks.append(ReadyCheck("tokenizer", "failed", str(error)))
        return None


def check_vocabularies(config: Config, tokenizer: Any, present: set[str]) -> Iterator[ReadyCheck]:
    """A failed check for each present model whose token ids mean other tokens."""
    from gspo.models import refuse_foreign_vocabulary

    others = {"actor.path": config.actor.path}
    others |= {f"{name}.path": part.path for name in ("ref", "teacher", "critic") if (part := getattr(config, name))}
    if (teacher := config.teacher) is not None and teacher.is_server:
        yield attempt("teacher.path", lambda: _ask_teacher(teacher.path, tokenizer))
    for key, path in others.items():
        if path and key in present:
            try:
                refuse_foreign_vocabulary(tokenizer, path, key)
            except GspoError as error:
                yield ReadyCheck(key, "failed", str(error))


def _ask_teacher(url: str, tokenizer: Any) -> str:
    from gspo.sampling import START_S, open_scores

    server = open_scores(url, timeout_s=START_S)
    try:
        server.check_vocabulary(tokenizer)
    finally:
        server.close()
    return f"{url} answers and has the vocabulary of the policy"


def examine(loaded: Loaded, memory: Mapping[str, Any] | None = None) -> list[ReadyCheck]:
    """Every check, in the order in which a run needs the things. `memory`: the section of `gspo doctor`."""
    config = loaded.config
    checks = [attempt("processes", lambda: look_at_processes(config)), *check_packages(config)]
    models = list(check_models(config))
    checks += models
    tokenizer = None
    if all(check.state == "ok" for check in models if check.what in ("actor.path", "tokenizer_path")):
        tokenizer = find_tokenizer(config, checks)
    if tokenizer is not None:
        checks += check_vocabularies(config, tokenizer, {check.what for check in models if check.state == "ok"})
    checks.append(attempt("objective", lambda: look_at_objective(loaded)))
    checks.append(attempt("rewards", lambda: look_at_rewards(config)))
    environment = attempt("environment", lambda: look_at_environment(config))
    checks.append(environment)
    if environment.state == "failed":  # the rows may come from it
        checks.append(ReadyCheck("data", "unknown", "not read, because the environment failed"))
    else:
        checks += check_data(config, tokenizer)
    if memory is not None:
        checks.append(check_memory(loaded, memory))
    failed = {check.what for check in checks if check.state == "failed"}
    return [check for check in checks if check.text and not (check.state == "ok" and check.what in failed)]

"""What belongs to the run itself: its folder, its length, loggers, and when to evaluate, save and resume."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.config import (
    Config,
    EvaluatorSection,
    Loaded,
    SaverSection,
    config_fingerprint,
    dump,
    effective_objective,
    is_supervised,
    load,
    num_epochs,
    objective_words,
    write_origins,
)
from gspo.data import Data
from gspo.diagnosis import Diagnosis
from gspo.learner import Learner
from gspo.monitor import Display, Loggers
from gspo.runs import RunDir, Saver, State, checkpoint, resume
from gspo.system import Every, read_jsonl, step_name, to_json, versions_and_hardware, write_run_file
from gspo.train.build.given import Given
from gspo.train.build.learner import alphabet_warning, device_and_dtype, first_proximal_source
from gspo.train.record import Recorder

# Keys that may change between a run and its resumption: they decide when to evaluate, what to show, where to run and
# what the run is called, not what is learnt.
FREE = (
    "experiment_name", "trial_name",
    "total_train_steps", "total_train_epochs", "strict", "on_alarm", "stall_timeout", "profile", "saver", "recover",
    "evaluator", "stats_logger", "rollout.dump_to_file", "rollout.request_timeout",
    "reward.timeout", "reward.workers", "reward.check", "cluster", "scheduler", "actor.backend",
    "threads",  # the number that it results in is compared
)  # fmt: skip

MAX_IGNORED = 5  # messages about ignored keys that a run shows one by one


def length_of(config: Config, num_rows: int) -> tuple[int, int]:
    """Steps of the run, and steps of one epoch."""
    # At least 1: a data set smaller than one batch still has epochs.
    steps_per_epoch = max(num_rows // config.train_dataset.batch_size, 1)
    return config.total_train_steps or config.total_train_epochs * steps_per_epoch, steps_per_epoch


def make_every(key: EvaluatorSection | SaverSection, steps_per_epoch: int, seconds: float | None = None) -> Every:
    often = key.freq_steps
    return Every(num_epochs(often) * steps_per_epoch if isinstance(often, str) else often, seconds)


def make_saver(
    config: Config, run: RunDir, learner: Learner, identity: Mapping[str, Any], steps_per_epoch: int, last_step: int
) -> Saver:
    return Saver(
        run,
        *learner.trained,
        identity=identity,
        config=config_fingerprint(config),
        keep=config.saver.keep,
        keep_sample_steps=None if isinstance(kept := config.rollout.dump_to_file, bool) else kept,
        every=make_every(config.saver, steps_per_epoch, config.recover.freq_secs),
        last_step=last_step,
    )


def make_recorder(
    loaded: Loaded,
    run: RunDir,
    learner: Learner,
    display: Display,
    say: Callable[[str], None],
    decode: Callable[[Sequence[int]], str],
) -> Recorder:
    """Also writes config.yaml, origins.json and environment.json; loggers read config.yaml."""
    config = loaded.config
    with write_run_file(run.path / "config.yaml") as tmp:
        tmp.write_text(dump(loaded), encoding="utf-8")
    with write_run_file(run.path / "origins.json") as tmp:
        tmp.write_text(write_origins(loaded.origins), encoding="utf-8")
    with write_run_file(run.path / "environment.json") as tmp:
        found = versions_and_hardware(str(learner.policy.model.device), learner.threads)
        tmp.write_text(to_json(found), encoding="utf-8")
    return Recorder(
        run,
        display,
        make_loggers(config, run.path, say),
        say,
        decode,
        saves_samples=bool(config.rollout.dump_to_file),
        stop_on_alarm=config.on_alarm == "stop",
        profile=config.profile,
        diagnosis=None if is_supervised(config) else _diagnosis(loaded, run, learner),
    )


def _diagnosis(loaded: Loaded, run: RunDir, learner: Learner) -> Diagnosis:
    """What looks for mistakes in the metrics; it has seen the rows of a resumed run."""
    diagnosis = Diagnosis(
        groups=loaded.config.train_dataset.batch_size,
        num_updates=learner.plan.num_updates,
        by_sequence=effective_objective(loaded)["level"] != "token",
        noise_is_forced=loaded.config.actor.prox_logp_force,
    )
    metrics = run.path / "metrics.jsonl"
    for row in read_jsonl(metrics) if metrics.exists() else ():
        diagnosis.see(row)
    return diagnosis


def make_loggers(config: Config, run: Path, say: Callable[[str], None]) -> Loggers:
    """Where metrics go besides the run directory."""
    stats, named = config.stats_logger, {"project": config.experiment_name, "name": config.trial_name}
    settings: dict[str, dict[str, Any]] = {}
    if stats.tensorboard:
        settings["tensorboard"] = {}
    if stats.wandb.mode != "disabled":
        project = os.environ.get("WANDB_PROJECT") or config.experiment_name
        settings["wandb"] = {**named, "project": project, "mode": stats.wandb.mode}
    if stats.trackio:
        settings["trackio"] = named
    return Loggers(run, settings, say)


def resume_run(
    config: Config, run: RunDir, learner: Learner, identity: Mapping[str, Any], say: Callable[[str], None]
) -> State:
    """The state of the newest valid checkpoint, loaded into the learner; the first state in a new run directory."""
    found = resume(
        run,
        *learner.trained,
        identity=identity,
        say=say,
        allowed=config.recover.mode != "disabled",
        changed_settings=lambda file: changed_keys(load(file).config, config),
    )
    return found or State(proximal=first_proximal_source(config))


def load_step(config: Config, learner: Learner, step: int) -> State:
    """Load the checkpoint of `step` on a rank other than 0; rank 0 sends the whole state with every batch."""
    if step:
        checkpoint.load_checkpoint(config.run_path / "checkpoints" / step_name(step), *learner.trained)
    return State(step=step)


def changed_keys(before: Config, after: Config) -> list[str]:
    """`key: before → after` for every changed key that decides what is learnt."""
    had, has = _flat(before.model_dump()), _flat(after.model_dump())
    # A schedule and a warm-up are fractions of the run, so its length decides every learning rate.
    o = after.actor.optimizer
    scheduled = o.lr_scheduler_type != "constant" or o.warmup_steps_proportion > 0
    free = tuple(f for f in FREE if not (scheduled and f.startswith("total_train")))
    return [
        f"{key}: {had.get(key)!r} → {has.get(key)!r}"
        for key in sorted(had.keys() | has.keys())
        if had.get(key) != has.get(key) and not any(key == f or key.startswith(f + ".") for f in free)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        # An empty mapping stays a value, so that a change from {} to a filled section is reported.
        if isinstance(value, Mapping) and value:
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out


def headline(loaded: Loaded) -> str:
    """The first line of a run: objective, model, batch, learning rate, device."""
    config = loaded.config
    model = config.actor.path + (f" with LoRA of rank {config.actor.lora_rank}" if config.actor.use_lora else "")
    batch = f"{config.train_dataset.batch_size} prompts × {config.gconfig.n_samples} completions"
    if is_supervised(config):
        batch = f"{config.train_dataset.batch_size} rows per batch"
    device, dtype = device_and_dtype(config)
    line = f"{objective_words(loaded)}, {model}, {batch}, lr {config.actor.optimizer.lr:g}, "
    return line + f"{device.type} {str(dtype).removeprefix('torch.')}"


def _translations(messages: Sequence[str]) -> list[str]:
    """Messages about keys of other systems; many ignored ones (AReaL's files have dozens) are one line.

    >>> _translations(["a.yaml:1: x is now y", *(f"a.yaml:{i}: k{i} is ignored: default" for i in range(9))])
    ['a.yaml:1: x is now y', '9 keys of the config are ignored, because they change nothing; `gspo doctor` lists them']
    """
    ignored = [message for message in messages if " is ignored: " in message]
    if len(ignored) <= MAX_IGNORED:
        return list(messages)
    one = f"{len(ignored)} keys of the config are ignored, because they change nothing; `gspo doctor` lists them"
    return [*(message for message in messages if message not in ignored), one]


def opening_messages(
    given: Given, data: Data, valid: Data | None, learner: Learner, about_rewards: Sequence[str]
) -> list[str]:
    """What rank 0 logs before the first step: translated keys, warnings, the data, the layout of micro-batches."""
    loaded = given.loaded
    lines = [*_translations(loaded.messages), *(f"warning: {finding}" for finding in given.warnings)]
    lines += data.describe().splitlines()
    lines += ["no evaluation (evaluator.freq_steps: 0)"] if valid is None else valid.describe().splitlines()
    lines.append(f"layout: {learner.policy.layout_line}")
    return [*lines, *alphabet_warning(loaded.config, data.prompt(0).text), *about_rewards]

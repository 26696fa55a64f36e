"""Lint rules for data sets, reward functions and evaluation."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator
from pathlib import Path

from gspo.config.objective import is_supervised
from gspo.lint.facts import Facts, Finding, rule

BEST = ("accuracy", "reward", "pass_at_k")  # higher is better; train/evaluate.py records them
SANDBOX_SECONDS = 2  # that the sandbox of `code` may take beyond the program itself


@rule
def one_weight_per_function(f: Facts) -> Iterator[Finding]:
    reward = f.config.reward
    if reward.weights and reward.functions and len(reward.weights) != len(reward.functions):
        yield f.error(
            "reward.weights",
            f"there are {len(reward.weights)} weights for {len(reward.functions)} functions",
            "give one weight per function, or remove reward.weights",
        )


@rule
def rewards_normalised_apart(f: Facts) -> Iterator[Finding]:
    if f.config.reward.normalize != "each":
        return
    if f.objective["advantage"] == "gae":
        yield f.error(
            "reward.normalize",
            "each normalises every reward within its group, but GAE uses the reward itself",
            "set reward.normalize: sum, or an algorithm with group advantages",
        )
    if f.config.env.turn_discount < 1:
        yield f.error(
            "reward.normalize",
            f"each gives one advantage per trajectory, but env.turn_discount {f.config.env.turn_discount:g} needs one "
            "per turn",
            "set reward.normalize: sum, or env.turn_discount: 1",
        )


@rule
def source_without_a_path(f: Facts) -> Iterator[Finding]:
    for key, data in (("train_dataset", f.config.train_dataset), ("valid_dataset", f.config.valid_dataset)):
        if data is not None and any(not source.path for source in data.mixture):
            yield f.error(f"{key}.mixture", "a source has no path", "give every source a path")


@rule
def reward_without_a_name(f: Facts) -> Iterator[Finding]:
    sources = f.config.train_dataset.mixture
    for entry in (*f.config.reward.functions, *(entry for source in sources for entry in source.reward)):
        if isinstance(entry, dict) and not isinstance(entry.get("name"), str):
            yield f.error(
                "reward.functions",
                f"{entry} has no name, so the reward is unknown",
                "write {name: judge, …}, {name: reward_model, …} or another name with its settings",
            )


@rule
def missing_python_file(f: Facts) -> Iterator[Finding]:
    """The user's functions as file.py:function; modules are imported later, before a model is loaded."""
    env, data = f.config.env, (("train_dataset", f.config.train_dataset), ("valid_dataset", f.config.valid_dataset))
    named: list[tuple[str, object]] = [("reward.functions", entry) for entry in f.config.reward.functions]
    for key, spec in data:
        sources = [] if spec is None else spec.mixture
        named += [(f"{key}.mixture", entry) for source in sources for entry in source.reward]
    named += [("env.path", env.path and env.path.removeprefix("trl:")), ("env.agent", env.agent)]
    named += [("rollout.dynamic_filter_fn", f.config.rollout.dynamic_filter_fn)]
    for key, entry in named:
        name = entry.get("name") if isinstance(entry, dict) else entry
        file = name.rpartition(":")[0] if isinstance(name, str) else ""
        if file.endswith(".py") and not Path(file).is_file():
            yield f.error(
                key,
                f"there is no file {file} (looked in {Path.cwd()})",
                "write the path relative to the working directory",
            )


@rule
def validation_on_training_data(f: Facts) -> Iterator[Finding]:
    train, valid = f.config.train_dataset, f.config.valid_dataset
    if valid is None or train.mixture or valid.mixture:
        return
    if (valid.path or train.path, valid.split) == (train.path, train.split):
        yield f.warn(
            "valid_dataset.split" if f.loaded.is_set("valid_dataset.split") else "valid_dataset.path",
            f"evaluation uses the training problems ({train.path}, split {train.split}), so it cannot show overfitting",
            "set valid_dataset.split: test (or another file), or remove valid_dataset for the task's held-out split",
        )


@rule
def best_names_a_metric(f: Facts) -> Iterator[Finding]:
    best = f.config.evaluator.best
    known = (*BEST, "loss") if is_supervised(f.config) else BEST
    if best is None or (best.startswith("eval/") and best.rpartition("/")[2] in known):
        return
    near = difflib.get_close_matches(best, [f"eval/{name}" for name in known], 1, 0.3)
    yield f.error(
        "evaluator.best",
        f"{best!r} is not a metric by which checkpoints can be compared",
        f"set {near[0] if near else 'eval/reward'}, or eval/<source>/reward for one source of a mixture",
    )


@rule
def program_longer_than_its_reward(f: Facts) -> Iterator[Finding]:
    limit = f.config.reward.timeout
    for entry in f.code_rewards:
        seconds = entry.get("timeout", 5.0)
        if isinstance(seconds, int | float) and seconds + SANDBOX_SECONDS > limit:
            yield f.error(
                "reward.timeout",
                f"a program may run {seconds:g} s and its sandbox needs {SANDBOX_SECONDS} s more, but the reward's "
                f"timeout is {limit:g} s",
                f"set reward.timeout={seconds + SANDBOX_SECONDS:g}, or a smaller timeout for `code`",
            )


@rule
def code_without_a_sandbox(f: Facts) -> Iterator[Finding]:
    if not f.code_rewards:
        return
    if f.config.reward.allow_unsandboxed_code:
        yield f.warn(
            "reward.allow_unsandboxed_code",
            "where bubblewrap does not work, model-written code runs with your permissions: files, network, keys",
            "install the Debian package bubblewrap and remove the key, or use a machine that holds nothing of value",
        )
    elif shutil.which("bwrap") is None:
        yield f.warn(
            "reward.functions",
            "`code` runs model-written programs in a bubblewrap sandbox, but bwrap is not installed on this machine",
            "install the Debian package bubblewrap; a run without it is refused (docs/sandbox.md)",
        )

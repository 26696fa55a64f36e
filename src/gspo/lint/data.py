"""Lint rules for data, rewards, episodes and sampling."""

from __future__ import annotations

import difflib
import shutil
from collections.abc import Iterator
from pathlib import Path

from gspo.config import is_supervised
from gspo.lint.facts import Facts, Finding, error, rule, warning


@rule
def shortest_above_longest(f: Facts) -> Iterator[Finding]:
    shortest = f.config.gconfig.min_new_tokens  # of evaluation too
    longest = {"gconfig": f.config.gconfig.max_new_tokens}
    if f.config.eval_gconfig is not None and f.loaded.is_set("eval_gconfig.max_new_tokens"):
        longest["eval_gconfig"] = f.config.eval_gconfig.max_new_tokens
    for section, limit in longest.items():
        if shortest > limit:
            yield f.error(
                "gconfig.min_new_tokens",
                f"the minimum of {shortest:,} new tokens is above {section}.max_new_tokens, {limit:,}",
                f"set gconfig.min_new_tokens: 0, or a larger {section}.max_new_tokens",
            )


@error("gconfig.temperature", "set gconfig.temperature: 1.0 (eval_gconfig.temperature: 0 is for evaluations)")
def no_randomness(f: Facts) -> str | None:
    if f.config.gconfig.temperature == 0:
        return "training samples without randomness: all completions of a prompt are equal and all advantages are 0"


@warning("gconfig.temperature", "set gconfig.temperature: 1.0")
def little_randomness(f: Facts) -> str | None:
    chosen = f.config.gconfig
    if 0 < chosen.temperature < 0.3 and chosen.n_samples > 1 and not is_supervised(f.config):
        return (
            f"at temperature {chosen.temperature:g} the completions of a prompt hardly differ, so most groups have "
            "equal rewards and give no gradient"
        )
    return None


@rule
def longer_than_the_context(f: Facts) -> Iterator[Finding]:
    prompt, new = f.config.train_dataset.max_length, f.config.gconfig.max_new_tokens
    if f.context is not None and (prompt or 1) + new > f.context:
        yield f.warn(
            "gconfig.max_new_tokens",
            f"{f.actor.path} has a context of {f.context:,} tokens, too short for {new:,} new tokens after "
            f"{'a prompt' if prompt is None else f'a prompt of {prompt:,} tokens'}",
            f"set gconfig.max_new_tokens to at most {max(1, f.context - (prompt or f.context // 2))}",
        )


@error("gconfig.max_tokens", "raise gconfig.max_tokens, or lower gconfig.max_new_tokens")
def longer_than_max_tokens(f: Facts) -> str | None:
    gconfig = f.config.gconfig
    wanted = (f.config.train_dataset.max_length or 0) + gconfig.max_new_tokens
    if gconfig.max_tokens is not None and wanted > gconfig.max_tokens:
        return (
            f"{gconfig.max_tokens:,} is less than the longest prompt plus max_new_tokens ({wanted:,}); such prompts "
            "are refused"
        )


@rule
def needs_samples(f: Facts) -> Iterator[Finding]:
    """Keys that only make sense if the policy samples."""
    if not is_supervised(f.config):
        return
    env = f.config.env
    keys = {
        "gconfig.n_samples": (f.config.gconfig.n_samples > 1, "a row of the data set has one completion, not a group"),
        "env.path": (
            bool(env.path or env.agent),
            "an environment plays episodes, and nothing is sampled",
        ),
        "actor.kl_loss_coef": (f.actor.kl_loss_coef > 0, "the KL estimators need samples of the policy"),
        "actor.kl_ctl": (f.actor.kl_ctl > 0, "a KL penalty is part of a reward, and there is none"),
        "actor.zero_variance_groups": (
            f.actor.zero_variance_groups != "count",
            "a group of one completion always has equal rewards",
        ),
        "actor.routing_replay": (f.actor.routing_replay != "none", "there is no sampler or π_old to replay"),
    }
    for key, (holds, why) in keys.items():
        if holds:
            yield f.error(key, f"algorithm sft trains on the completions of the data set: {why}", f"remove {key}")


BEST = ("accuracy", "reward", "pass_at_k")  # higher is better; train/evaluate.py records them
SANDBOX_SECONDS = 2  # that the sandbox of `code` may take beyond the program itself


@error("reward.weights", "give one weight per function, or remove reward.weights")
def one_weight_per_function(f: Facts) -> str | None:
    reward = f.config.reward
    if reward.weights and reward.functions and len(reward.weights) != len(reward.functions):
        return f"there are {len(reward.weights)} weights for {len(reward.functions)} functions"


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


ENVIRONMENTS = ("tools", "self_correct")  # the built-in ones of envs/find.py


@error("env.path", "name your own environment as module:function or file.py:function")
def unknown_environment(f: Facts) -> str | None:
    path = f.config.env.path
    if path is not None and ":" not in path and path not in ENVIRONMENTS:
        return f"{path!r} is not a built-in environment; these are {', '.join(ENVIRONMENTS)}"


@rule
def more_turns_than_the_limit(f: Facts) -> Iterator[Finding]:
    env = f.config.env
    turns = env.options.get("max_turns", env.options.get("attempts"))
    if env.path in ENVIRONMENTS and isinstance(turns, int) and turns > env.max_turns:
        yield f.error(
            "env.max_turns",
            f"the environment may take {turns} turns but an episode is limited to {env.max_turns}, so the longest "
            "episodes would fail",
            f"set env.max_turns={turns}",
        )


@error("env.turn_discount", "set actor.discount, or an algorithm with a group advantage")
def turn_discount_with_gae(f: Facts) -> str | None:
    env = f.config.env
    if env.path is not None and f.objective["advantage"] == "gae" and env.turn_discount < 1:
        return "GAE discounts per token, not per turn"


@warning("env.turn_discount", "set actor.sequence_unit: turn, or algorithm: gspo_token")
def turn_credit_averaged_over_a_trajectory(f: Facts) -> str | None:
    is_whole = f.actor.sequence_unit == "trajectory"
    if f.objective["level"] == "sequence" and f.config.env.turn_discount < 1 and is_whole:
        return "the credit differs from turn to turn, but one ratio per trajectory uses its mean"


@rule
def two_players(f: Facts) -> Iterator[Finding]:
    named = [f"env.{name}" for name in ("path", "agent") if getattr(f.config.env, name)]
    if len(named) > 1:
        yield f.error(
            named[1], f"{' and '.join(named)} are both set, but an episode uses only one of them", "remove one"
        )


@error("env.agent", "write its full path, or install it")
def missing_command(f: Facts) -> str | None:
    command = f.config.env.agent
    if isinstance(command, list) and command and shutil.which(command[0]) is None:
        return f"there is no program {command[0]}"

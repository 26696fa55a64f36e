"""Reward functions, by source where the data is a mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from gspo.config import algorithm_in
from gspo.config.schema import Config, DatasetSpec, MixtureSource
from gspo.data.dataset import Dataset
from gspo.data.mixture import Data, distinct_names
from gspo.data.sources import default_reward
from gspo.errors import ConfigError, TrainingError
from gspo.rewards.functions.builtin import NEEDS_ANSWER
from gspo.rewards.pool import RewardPool
from gspo.rewards.route import RewardRouter, Rewards
from gspo.rewards.spec import RewardSpec, reward_spec
from gspo.system.imports import by_name
from gspo.train.build.data import held_out

ANY_SOURCE = ""
CHECKED_ROWS = 4  # rows of reward.check before training
PROCEDURAL = ("embedded:", "reasoning_gym:")  # tasks with a reward of their own


def make_rewards(config: Config, given: Any, log_path: str | None) -> Rewards:
    """The reward functions of the caller, of the config, or of the task; for a mixture, one set per source.

    A worker has imported the user's functions when this returns: a missing one is found before a model is loaded.
    """
    reward = config.reward
    settings = {"workers": reward.workers, "timeout_s": reward.timeout, "log_path": log_path}
    specs = reward_specs(config, given)
    # One data set for training and one for evaluation need one pool of workers.
    one = specs.get(ANY_SOURCE)
    rewards = RewardRouter(specs, **settings) if one is None else RewardPool(one, key="reward", **settings)
    try:
        rewards.check_functions()
    except BaseException:
        rewards.close()
        raise
    return rewards


def reward_specs(config: Config, given: Any = None) -> dict[str, RewardSpec]:
    """The rewards by name of their source; ANY_SOURCE is the only name if there is no mixture."""
    reward, train, common = config.reward, config.train_dataset, _common(config, given)

    def ready(spec: RewardSpec) -> RewardSpec:
        if not any(part.name == "code" for part in spec):
            return spec
        prepare = by_name("gspo.rewards.functions.code:prepare")
        return prepare(spec, allow_unsandboxed=reward.allow_unsandboxed_code, timeout_s=reward.timeout)

    if not (train.mixture or held_out(config).mixture):
        return _refuse_gates({ANY_SOURCE: ready(common or reward_spec(default_reward(train.path)))}, reward.normalize)
    # Rewards are selected by the source's name, so a name must mean one reward in both mixtures.
    specs, others = _rewards_by_source(train, "train_dataset"), _rewards_by_source(held_out(config), "valid_dataset")
    if common is None and (twice := [name for name in specs if others.get(name, specs[name]) != specs[name]]):
        raise ConfigError(
            f"valid_dataset.mixture and train_dataset.mixture give {twice[0]} different rewards; name one of them "
            "otherwise"
        )
    specs |= others
    return _refuse_gates({name: ready(common or spec) for name, spec in specs.items()}, reward.normalize)


def _refuse_gates(specs: dict[str, RewardSpec], normalize: str) -> dict[str, RewardSpec]:
    """The specs; ConfigError for a gate if each reward is normalised apart, because a gate is no term of the sum."""
    gate = next((part.label for spec in specs.values() for part in spec if part.gate), None)
    if gate is not None and normalize == "each":
        raise ConfigError(
            f"reward.normalize: each normalises every reward of the sum apart, but {gate} is a gate, which multiplies "
            f"the sum; set reward.normalize: sum, or give {gate} a weight instead of gate: true"
        )
    return specs


def scores_answers(config: Config, given: Any, data: Sequence[Data]) -> bool:
    """Whether answers are scored. Fine-tuning and distillation do so only if a reward is configured."""
    needs_rewards = algorithm_in(config).advantage not in ("one", "teacher")
    if needs_rewards or _common(config, given) is not None:
        return True
    # Procedural tasks have a reward of their own; a mixture may name one per source.
    chosen = _chosen(config)
    return all(name in chosen or source.source.startswith(PROCEDURAL) for one in data for name, source in _sources(one))


def reward_problems(config: Config, given: Any, rewards: Rewards, data: Data, tokenizer: Any) -> list[str]:
    """reward.check: what is wrong with the reward, by known answers to a few rows; TrainingError with `stop`.

    Judges and reward models are not asked: their calls are expensive, and `gspo doctor --reward` asks them.
    """
    specs = reward_specs(config, given)
    names = {part.name for spec in specs.values() for part in spec}
    if config.reward.check == "off" or names & {"judge", "reward_model", "code"}:
        return []
    prompts = [data.prompt(row) for row in range(min(CHECKED_ROWS, len(data)))]
    encode = partial(tokenizer.encode, add_special_tokens=False)
    from gspo.rewards.check import check_reward, diagnose

    lines = check_reward(prompts, rewards, markers=answer_markers(specs), encode=encode, until_failure=True)
    found = diagnose(lines, config.reward.timeout)
    fatal = [problem.text for problem in found if problem.is_fatal]
    if fatal and config.reward.check == "stop":
        raise TrainingError(f"stopped by reward.check: stop: {fatal[0]}; `gspo doctor --reward` shows the scores")
    return [f"warning: {text}; `gspo doctor --reward` shows more" for text in fatal]


def answer_markers(specs: Mapping[str, RewardSpec]) -> list[str]:
    """What the rewards expect before an answer: the settings `marker`, and their default."""
    given = [part.kwargs["marker"] for spec in specs.values() for part in spec if "marker" in part.kwargs]
    return list(dict.fromkeys([*map(str, given), ">"]))


def default_rewards(config: Config, given: Any, data: Sequence[Data]) -> list[str]:
    """Names the rewards that are used because none is configured; ConfigError if one needs answers that are missing."""
    common, said, train, valid = _common(config, given), list[str](), config.train_dataset, held_out(config)
    own = {**_rewards_by_source(train, "train_dataset"), **_rewards_by_source(valid, "valid_dataset")}
    chosen = _chosen(config)
    for name, source in (pair for one in data for pair in _sources(one)):
        # A data set of the caller has no name in the config; its rewards are those of train_dataset.
        spec = common or own.get(name) or reward_spec(default_reward(config.train_dataset.path))
        is_default = common is None and name not in chosen
        comparing = next((part.name for part in spec if part.name in NEEDS_ANSWER), None)
        if comparing is not None and not source.has_references:
            why = "no reward is configured" if is_default else f"the reward `{comparing}` needs the right answer"
            raise ConfigError(
                f"{why}, and the rows of {source.source} have no answer column (its columns are "
                f"{', '.join(source.columns)}). Set reward.functions to a function that needs no answer, for example "
                f"[my_module:my_function], or {source.key}.columns.answer to the column with the answer"
            )
        if is_default and not source.source.startswith(PROCEDURAL):
            said.append(f"no reward is configured; using `{spec[0].name}` for {source.source} (reward.functions)")
    return list(dict.fromkeys(said))


def _common(config: Config, given: Any) -> RewardSpec | None:
    """The reward of all data: the caller's functions, else reward.functions; None: each data set has its default."""
    if given is not None:
        return reward_spec(given)
    reward = config.reward
    return reward_spec(reward.functions, weights=reward.weights, key="reward.functions") if reward.functions else None


def _chosen(config: Config) -> set[str]:
    """The sources of mixtures that name their reward."""
    specs = (config.train_dataset, held_out(config))
    return {name for spec in specs for name, source in _named(spec).items() if source.reward}


def _sources(data: Data) -> list[tuple[str, Dataset]]:
    if isinstance(data, Dataset):
        return [(data.source, data)]
    return list(zip(data.names, data.sources, strict=True))


def _rewards_by_source(spec: DatasetSpec, key: str) -> dict[str, RewardSpec]:
    if not spec.mixture:
        return {spec.path: reward_spec(default_reward(spec.path))}
    return {
        name: reward_spec(source.reward or default_reward(source.path), key=f"{key}.mixture[{number}].reward")
        for number, (name, source) in enumerate(_named(spec).items())
    }


def _named(spec: DatasetSpec) -> dict[str, MixtureSource]:
    names = distinct_names([source.path for source in spec.mixture], [source.name for source in spec.mixture])
    return dict(zip(names, spec.mixture, strict=True))

"""Reward functions, by source where the data is a mixture."""

from __future__ import annotations

from functools import partial
from typing import Any

from gspo.config.schema import Config, DatasetSpec
from gspo.data.dataset import default_reward
from gspo.data.mixture import distinct_names
from gspo.errors import ConfigError
from gspo.rewards.functions.code import prepare
from gspo.rewards.pool import RewardPool
from gspo.rewards.route import RewardRouter, Rewards
from gspo.rewards.spec import RewardSpec, reward_spec
from gspo.train.build.data import held_out

ANY_SOURCE = ""


def make_rewards(config: Config, given: Any, log_path: str | None) -> Rewards:
    """The reward functions of the caller, of the config, or of the task; for a mixture, one set per source."""
    reward = config.reward
    settings = {"workers": reward.workers, "timeout_s": reward.timeout, "log_path": log_path}
    specs = reward_specs(config, given)
    # One data set for training and one for evaluation need one pool of workers.
    if ANY_SOURCE in specs:
        return RewardPool(specs[ANY_SOURCE], key="reward", **settings)
    return RewardRouter(specs, **settings)


def reward_specs(config: Config, given: Any = None) -> dict[str, RewardSpec]:
    """The rewards by name of their source; ANY_SOURCE is the only name if there is no mixture."""
    reward, train = config.reward, config.train_dataset
    # Priority: the caller's functions, then reward.functions, then the default of each data set.
    common: RewardSpec | None = None
    if given is not None:
        common = reward_spec(given)
    elif reward.functions:
        common = reward_spec(reward.functions, weights=reward.weights, key="reward.functions")
    ready = partial(prepare, allow_unsandboxed=reward.allow_unsandboxed_code, timeout_s=reward.timeout)
    if not (train.mixture or held_out(config).mixture):
        return {ANY_SOURCE: ready(common or reward_spec(default_reward(train.path)))}
    # Rewards are selected by the source's name, so a name must mean one reward in both mixtures.
    specs, others = _rewards_by_source(train, "train_dataset"), _rewards_by_source(held_out(config), "valid_dataset")
    if common is None and (twice := [name for name in specs if others.get(name, specs[name]) != specs[name]]):
        raise ConfigError(
            f"valid_dataset.mixture and train_dataset.mixture give {twice[0]} different rewards; name one of them "
            "otherwise"
        )
    specs |= others
    return {name: ready(common or spec) for name, spec in specs.items()}


def _rewards_by_source(spec: DatasetSpec, key: str) -> dict[str, RewardSpec]:
    if not spec.mixture:
        return {spec.path: reward_spec(default_reward(spec.path))}
    names = distinct_names([source.path for source in spec.mixture], [source.name for source in spec.mixture])
    return {
        name: reward_spec(source.reward or default_reward(source.path), key=f"{key}.mixture[{number}].reward")
        for number, (name, source) in enumerate(zip(names, spec.mixture, strict=True))
    }

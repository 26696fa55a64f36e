"""What a run is given: its config, and the caller's objects. Torch-free, so that a wrong one is refused at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gspo
from gspo.config import Config, Loaded, algorithm_in
from gspo.errors import ConfigError
from gspo.system import by_name, find_function, source_file


@dataclass(frozen=True)
class Given:
    """The arguments of `Trainer`: the config, and objects that replace some of its keys."""

    loaded: Loaded
    warnings: Sequence[Any]
    reward: Any
    dataset: Any
    valid: Any
    environment: Callable[..., Any] | None  # None: a sample is one completion
    workflow: Callable[..., Any] | None  # None: by the environment, or one completion per prompt
    filter: Callable[..., Any] | None
    code: Mapping[str, Path]  # functions of the user by name, and the files that define them
    objective: Any = None  # `build.own_objective.OwnObjective`; None: a preset


def find_environment(config: Config, given: Any) -> Callable[..., Any] | None:
    """The environment of the caller or of the config; None if a sample is one completion."""
    env = config.env
    if given is None and env.agent:
        find_agent = by_name("gspo.envs.agents.agent:find_agent")
        agent = env.agent if isinstance(env.agent, list) else find_agent(env.agent, env.options)
        return by_name("gspo.envs.agents.agent:Agents")(agent, request_timeout_s=config.rollout.request_timeout)
    named = env.path if given is None else given
    return None if named is None else by_name("gspo.envs.find:find_environment")(named, env.options)


def find_filter(config: Config, given: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """The filter of groups of the caller or of the config."""
    named = config.rollout.dynamic_filter_fn
    if given is not None or named is None:
        return given
    try:
        return find_function(named)
    except ValueError as error:
        raise ConfigError(f"rollout.dynamic_filter_fn: {error}") from error


def code_files(config: Config, reward: Any, env: Any, dynamic_filter_fn: Any, objective: Any = None) -> dict[str, Path]:
    """The user's functions by name, and the files that define them; the caller's have priority over the config's."""
    mixtures = [*config.train_dataset.mixture, *(config.valid_dataset.mixture if config.valid_dataset else ())]
    rewards = reward if isinstance(reward, list | tuple) else [reward] if reward is not None else []
    entries = rewards or [*config.reward.functions, *(entry for source in mixtures for entry in source.reward)]
    named = [("reward", entry["name"] if isinstance(entry, Mapping) else entry) for entry in entries]
    agent = config.env.agent
    agents = [word for word in agent if Path(word).is_file()] if isinstance(agent, list) else [agent]
    named += [("environment", env or config.env.path), *(("agent", each) for each in agents)]
    named += [("objective", objective or (config.algorithm if algorithm_in(config).of_user else None))]
    named += [("filter", dynamic_filter_fn or config.rollout.dynamic_filter_fn)]
    found: dict[str, Path] = {}
    for kind, given in named:
        path = Path(given) if isinstance(given, str) and ":" not in given and kind == "agent" else source_file(given)
        if given is not None and path is not None and not path.is_relative_to(Path(gspo.__file__).parent):
            found[f"{kind} {given if isinstance(given, str) else getattr(given, '__name__', type(given).__name__)}"] = (
                path
            )
    return found

"""Environments, agents, and the workflow that runs their episodes."""

from __future__ import annotations

from typing import Any

from gspo.config.schema import Config
from gspo.data.dataset import Dataset
from gspo.data.mixture import Data
from gspo.envs.agents.agent import Agents, find_agent
from gspo.envs.chat import Chat
from gspo.envs.driver import Environment, Episodes
from gspo.envs.find import find_environment
from gspo.system.launched import Launched


def make_environment(config: Config, given: Any) -> Environment | None:
    """The environment of the caller or of the config; None if a sample is one completion."""
    env = config.env
    if given is not None:
        return find_environment(given, env.options)
    if agent := env.command or (env.agent and find_agent(env.agent, env.options)):
        return Agents(agent, request_timeout_s=config.rollout.request_timeout)
    return None if env.path is None else find_environment(env.path, env.options)


def make_episodes(config: Config, environment: Environment, data: Data, tokenizer: Any, max_context: int) -> Episodes:
    """The workflow that runs episodes; it renders messages with the chat template of the data set."""
    first = data if isinstance(data, Dataset) else data.sources[0]
    # A data set says True for the tokenizer's own template.
    chat = Chat(tokenizer, None if first.chat is True else first.chat, first.template_kwargs)
    return Episodes(
        environment,
        chat,
        max_context=max_context,
        max_turns=config.env.max_turns,
        timeout_s=config.env.timeout,
        rounds=not Launched.read().num_samplers,
        request_timeout_s=config.rollout.request_timeout,
        at_once=config.rollout.max_concurrent_rollouts or getattr(environment, "at_once", 256),
    )

"""How prompts are answered and scored: by one completion, by an environment or agent, or by the data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo.config.objective import is_supervised
from gspo.config.schema import Config
from gspo.data.dataset import Dataset
from gspo.data.mixture import Data
from gspo.learner.learner import Learner
from gspo.rewards.route import GivenRewards, NoRewards, Rewards
from gspo.rollout.workflow import Workflow
from gspo.system.imports import by_name
from gspo.system.launched import Launched
from gspo.train.build.data import refuse_images
from gspo.train.build.given import Given
from gspo.train.build.rewards import default_rewards, scores_answers
from gspo.train.build.rollout import make_single_turn, make_workflow


@dataclass(frozen=True)
class Answering:
    """How prompts are answered and scored, in training and in evaluations."""

    rewards: Rewards
    workflow: Workflow
    evaluation_workflow: Workflow
    scores: bool  # False: no reward (fine-tuning and distillation without reward.functions)
    checks_reward: bool  # whether reward.check can score known answers: the reward is a function of prompt and answer
    messages: list[str] = field(default_factory=list)  # about rewards that are used by default
    count_episodes: Callable[[], Mapping[str, float]] = dict[str, float]  # what the environment counted
    close: Callable[[], None] = lambda: None


def make_answering(
    given: Given, rewards: Rewards, learner: Learner, data: Data, valid: Data | None, max_context: int
) -> Answering:
    """An environment may give its own rewards; supervised fine-tuning needs none."""
    config, environment = given.loaded.config, given.environment
    both = [data, *([valid] if valid else [])]
    refuse_images(config, both, has_environment=environment is not None, policy=learner.policy)
    if environment is not None:
        episodes = make_episodes(config, environment, data, learner.tokenizer, max_context)
        return Answering(
            GivenRewards(rewards),
            episodes,
            episodes,
            scores=True,
            checks_reward=False,
            count_episodes=episodes.metrics,
            close=episodes.close,
        )
    scores = scores_answers(config, given.reward, both)
    messages = default_rewards(config, given.reward, both) if scores else []
    rewards = rewards if scores else NoRewards()
    workflow = given.workflow or make_workflow(config)
    if is_supervised(config):
        # Rows bring their own completion in training; evaluations sample.
        return Answering(GivenRewards(rewards), workflow, make_single_turn(config), scores, False, messages)
    return Answering(rewards, workflow, workflow, scores, checks_reward=scores, messages=messages)


def make_episodes(config: Config, environment: Any, data: Data, tokenizer: Any, max_context: int) -> Any:
    """The workflow that runs episodes; it renders messages with the chat template of the data set."""
    first = data if isinstance(data, Dataset) else data.sources[0]
    # A data set says True for the tokenizer's own template.
    chat = by_name("gspo.envs.chat:Chat")(tokenizer, None if first.chat is True else first.chat, first.template_kwargs)
    return by_name("gspo.envs.driver:Episodes")(
        environment,
        chat,
        max_context=max_context,
        max_turns=config.env.max_turns,
        timeout_s=config.env.timeout,
        rounds=not Launched.read().num_samplers,
        request_timeout_s=config.rollout.request_timeout,
        at_once=config.rollout.max_concurrent_rollouts or getattr(environment, "at_once", 256),
    )

"""`gspo preview`: the first prompts of a run, a few completions of the untrained model, and their rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gspo.config.schema import Config
from gspo.rewards.route import GivenRewards
from gspo.rollout.groups import sample_groups
from gspo.rollout.workflow import Workflow, single_turn
from gspo.system.text import turns_text
from gspo.train.build.compute import set_threads
from gspo.train.build.data import load_data, prompt_stream, refuse_long_prompts
from gspo.train.build.episodes import make_episodes
from gspo.train.build.given import find_environment
from gspo.train.build.policy import context_length, load_policy
from gspo.train.build.rewards import default_rewards, make_rewards
from gspo.train.build.sampler import decoder, make_sampler, sampling_params
from gspo.train.evaluate import FIRST
from gspo.types import Prompt, Sample, Score

ROWS = 1000  # prompts whose length is checked


@dataclass(frozen=True)
class Previewed:
    """One prompt as the model sees it, with the texts of its completions and their rewards in words."""

    prompt: str
    num_tokens: int
    completions: tuple[tuple[str, str], ...]  # text, reward


def preview(config: Config, num_prompts: int, num_samples: int) -> list[Previewed]:
    """Sample and score the first prompts of a run in this process. Nothing is trained, and nothing is written."""
    set_threads(config)
    with ExitStack() as stack:
        rewards = make_rewards(config, None, None)
        stack.callback(rewards.close)
        policy, tokenizer = load_policy(config, None, 0)
        environment, limit = find_environment(config, None), context_length(config, policy)
        data = load_data(
            config, config.train_dataset, "train", policy.processor or tokenizer, "train_dataset", environment
        )
        refuse_long_prompts(data, limit, config.gconfig.max_new_tokens, most=ROWS)
        prompt_of, workflow = prompt_stream(config, data), single_turn
        if data.supervised:
            return [_supervised(prompt_of(index), decoder(tokenizer)) for index in range(num_prompts)]
        if environment is None:
            default_rewards(config, None, (data,))
        sampler = make_sampler(config, policy, tokenizer, 0)
        stack.callback(sampler.close)
        if environment is not None:
            rewards = GivenRewards(rewards)
            episodes = make_episodes(config, environment, data, tokenizer, limit)
            stack.callback(episodes.close)
            workflow: Workflow = episodes
        groups = sample_groups(
            [(FIRST + index, prompt_of(index)) for index in range(num_prompts)],
            num_samples=num_samples,
            params=sampling_params(config),
            sampler=sampler,
            rewards=rewards,
            decode=decoder(tokenizer),
            workflow=workflow,
        )
    return [
        Previewed(
            group.prompt.text,
            len(group.prompt.tokens),
            tuple(
                (_whole(sample, text, decoder(tokenizer)), _words(outcome))
                for sample, text, outcome in zip(group.samples, group.texts, group.outcomes, strict=True)
            ),
        )
        for group in groups
    ]


def _whole(sample: Sample, text: str, decode: Callable[[Sequence[int]], str]) -> str:
    """A completion; of an episode every turn, with what the environment wrote, and not the last answer alone."""
    if not sample.is_episode:
        return text
    return "\n".join(turns_text((not own, part) for own, part, _ in _spans(s, decode)) for s in sample.sequences)


def _spans(sequence: Sample, decode: Callable[[Sequence[int]], str]) -> Iterator[tuple[bool, str, int]]:
    """(is trained, text, number of tokens) of each run of tokens."""
    cuts = [0, *(np.flatnonzero(np.diff(sequence.mask)) + 1).tolist(), len(sequence.tokens)]
    for begin, end in pairwise(cuts):
        yield bool(sequence.mask[begin]), decode(sequence.tokens[begin:end].tolist()), end - begin


def _supervised(prompt: Prompt, decode: Callable[[Sequence[int]], str]) -> Previewed:
    """A row of supervised fine-tuning: what is trained, span by span."""
    assert prompt.target is not None
    spans = tuple(
        (text, f"{'trained' if own else 'input'}, {num} tokens")
        for sequence in prompt.target.sequences
        for own, text, num in _spans(sequence, decode)
    )
    return Previewed(prompt.text, len(prompt.tokens), spans)


def _words(outcome: object) -> str:
    if not isinstance(outcome, Score):
        return f"failed: {outcome}"
    parts = ", ".join(f"{name} {value:g}" for name, value in outcome.parts.items())
    return f"{outcome.value:g}" + (f" ({parts})" if len(outcome.parts) > 1 else "")

"""`gspo eval`, `gspo export` and `gspo preview`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gspo.config import Config
from gspo.data import default_reward
from gspo.errors import ConfigError
from gspo.rewards import GivenRewards
from gspo.rollout import Workflow, refuse_failures, sample_groups, single_turn
from gspo.runs import SHARD, base_name, refuse_used, write_model
from gspo.sampling import Sampler
from gspo.stats import mean_interval, pass_at_k, share_interval
from gspo.system import turns_text
from gspo.train.build.data import (
    default_rewards,
    held_out,
    load_data,
    make_episodes,
    make_rewards,
    prompt_stream,
    refuse_long_prompts,
)
from gspo.train.build.given import find_environment
from gspo.train.build.learner import context_length, load_policy, set_threads
from gspo.train.build.rollout import decoder, evaluation_params, make_sampler, sampling_params
from gspo.train.evaluate import FIRST, answer_rows, evaluate, is_correct, problem_of, summarise_groups
from gspo.types import Group, Prompt, Request, Sample, Score


def evaluate_run(
    config: Config, run: Path | None, step: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Answer the held-out problems with the weights after `step`, by `eval_gconfig`; plain values, see `score_figures`.

    Nothing here touches the run: it may be training. Draws are those of training's own evaluation, so the same
    checkpoint with the same settings gives the same accuracy.
    """
    start = time.perf_counter()
    set_threads(config)
    spec = held_out(config)
    # The default reward of the held-out data, which may be another data set than that of training.
    reward = None if config.reward.functions or spec.mixture else default_reward(spec.path)
    # Closed in reverse order: episodes use the sampler and the rewards.
    with ExitStack() as stack:
        rewards = make_rewards(config, reward, None)
        stack.callback(rewards.close)
        # Load weights and data, and check the lengths of prompts before sampling starts.
        policy, tokenizer = load_policy(config, run, step)
        environment, max_context = find_environment(config, None), context_length(config, policy)
        data = load_data(config, spec, "test", policy.processor or tokenizer, "valid_dataset", environment)
        params, num_samples = evaluation_params(config)
        refuse_long_prompts(data, max_context, params.max_new_tokens, "eval_gconfig")
        if environment is None:
            default_rewards(config, None, (data,))
        decode = decoder(tokenizer)
        sampler = make_sampler(config, policy, tokenizer, step)
        stack.callback(sampler.close)
        workflow: Workflow = single_turn
        if environment is not None:
            rewards = GivenRewards(rewards)
            workflow = episodes = make_episodes(config, environment, data, tokenizer, max_context)
            stack.callback(episodes.close)

        def watched(requests: Sequence[Request], sampler: Sampler) -> Iterator[Sample]:
            for done, sample in enumerate(workflow(requests, sampler), 1):
                progress(done, len(requests))
                yield sample

        _, groups = evaluate(
            data,
            num_problems=config.evaluator.size,
            num_samples=num_samples,
            params=params,
            sampler=sampler,
            rewards=rewards,
            decode=decode,
            workflow=watched,
        )
    refuse_failures(groups, config.reward.max_failure_fraction)
    return {
        "model": config.actor.path,
        "step": step if run is not None else None,
        "data": spec.path,
        "split": spec.split,
        "seed": config.seed,
        "sampling": asdict(params),
        "seconds": time.perf_counter() - start,
        **score_figures(groups, num_samples),
        "problems": [_problem(group, decode) for group in groups],
    }


def score_figures(groups: Sequence[Group], num_samples: int) -> dict[str, Any]:
    """Mean reward, avg@n and pass@k for k = 1, 2, 4, … n, each with its 95 % interval over problems; also by source.

    A failed reward does not count as a wrong answer: its problem has fewer samples, and pass@k uses the problems with
    at least k.
    """
    scored = [[outcome for outcome in group.outcomes if isinstance(outcome, Score)] for group in groups]
    answered = [scores for scores in scored if scores]
    counts = [(len(scores), sum(bool(is_correct(score)) for score in scores)) for scores in answered]
    samples = [sample for group in groups for sample in group.samples]
    powers = {1 << i for i in range(num_samples.bit_length())} | {num_samples}
    names = list(dict.fromkeys(group.prompt.source for group in groups))
    whole = summarise_groups(groups, num_samples)
    return {
        "num_problems": len(groups),
        "num_samples": num_samples,
        "avg": _interval(share_interval([right / total for total, right in counts]), len(counts)),
        "pass": {str(k): _pass(counts, k) for k in sorted(k for k in powers if k <= num_samples)},
        "reward": _interval(
            mean_interval([sum(s.value for s in each) / len(each) for each in answered]), len(answered)
        ),
        "graded": whole.graded,
        "mean_tokens": whole.length,
        "truncated": sum(s.ending == "length" for s in samples) / max(len(samples), 1),
        "reward_failures": whole.failures,
        "sources": {
            name: score_figures([group for group in groups if group.prompt.source == name], num_samples)
            for name in names
        }
        if len(names) > 1
        else {},
    }


def _pass(counts: Sequence[tuple[int, int]], k: int) -> dict[str, Any]:
    seen = [pass_at_k(total, right, k) for total, right in counts if total >= k]
    return _interval(share_interval(seen), len(seen))


def _interval(ends: tuple[float, float, float], problems: int) -> dict[str, Any]:
    value, low, high = ends if problems else (None, None, None)
    return {"value": value, "low": low, "high": high, "problems": problems}


def _problem(group: Group, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    answers = answer_rows(group, decode)
    return {
        **problem_of(group),
        "num_correct": sum(answer["correct"] is True for answer in answers),
        "num_answered": sum(answer["correct"] is not None for answer in answers),
        "samples": answers,
    }


def export(
    config: Config,
    run: Path,
    step: int,
    to: Path,
    *,
    merge: bool = False,
    shard: str = SHARD,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write the policy after `step` into the new or empty folder `to`: configs, weights, tokenizer.

    A run with an adapter exports the adapter in peft's format, or with `merge` the merged plain model.
    `texts` are further files by name, such as the model card.
    """
    if merge and not config.actor.use_lora:
        raise ConfigError(f"{run} has no adapter to merge (actor.use_lora is false): leave out --merge")
    refuse_used(to)
    policy, tokenizer = load_policy(config, run, step)
    origin = {"run": str(run), "step": step, "from": config.actor.path, "algorithm": config.algorithm}
    base = base_name(config.actor.path) if config.actor.use_lora and not merge else None
    return write_model(policy, tokenizer, to, origin, adapter_of=base, shard=shard, texts=texts)


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

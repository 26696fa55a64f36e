"""Episodes of many short turns in process, with and without the keys and values of earlier turns.

    python -m lab.bench.turns [--episodes 64] [--turns 50] [--repeats 5]

Both sides alternate, in one process and one thread; CPU seconds, so that a busy machine changes little. The environment
is Gymnasium's Pendulum-v1: three letters an observation, one digit an action.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from gspo.envs import Chat, Episodes, Gymnasium
from gspo.models import embedded
from gspo.sampling import LocalSampler
from gspo.types import Prompt, Request, SampleId, SamplingParams


class _Forgetful:
    """The sampler without `release`: the driver then asks it to keep nothing."""

    def __init__(self, sampler: LocalSampler) -> None:
        self.submit, self.completed, self._sampler = sampler.submit, sampler.completed, sampler


def _requests(num: int, prompt: tuple[int, ...]) -> Sequence[Request]:
    params = SamplingParams(1, ignore_eos=True)
    prompts = [Prompt(prompt, "", data={"seed": seed}) for seed in range(num)]
    return [Request(SampleId(i, 0), prompt, params, origin=p) for i, p in enumerate(prompts)]


def measure_turns(num_episodes: int, num_turns: int, repeats: int) -> dict[str, dict[str, float]]:
    """By side: median CPU seconds, tokens of the episodes per second, and tokens computed in prefills."""
    model, tokenizer = embedded.build("embedded:tiny-control")
    sampler = LocalSampler(model, seed=0, eos_token_ids=[1])
    levels = {"levels": 11, "low": -8.0, "high": 8.0}
    environment = Gymnasium("Pendulum-v1", observation=levels, action={"levels": 5}, max_steps=num_turns, at_once=256)
    chat = Chat(tokenizer)
    episodes = Episodes(environment, chat, max_context=2048, max_turns=num_turns, rounds=True)
    requests = _requests(num_episodes, tuple(tokenizer.encode("a")))
    sides: dict[str, Any] = {"kept": sampler, "prefilled again": _Forgetful(sampler)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    out: dict[str, dict[str, float]] = {side: {} for side in sides}
    for repeat in range(repeats + 1):
        for side, used in sides.items():
            before, begin = sampler.health()["prefill_tokens"], time.process_time()
            samples = list(episodes(requests, used))
            spent = time.process_time() - begin
            if repeat:  # the first one warms up
                seconds[side].append(spent)
            tokens = sum(len(s.tokens) for sample in samples for s in sample.sequences)
            out[side] = {"tokens": tokens, "prefill_tokens": sampler.health()["prefill_tokens"] - before}
    episodes.close()
    for side, spent in seconds.items():
        median = statistics.median(spent)
        out[side] |= {"cpu_s": median, "tokens_per_s": out[side]["tokens"] / median}
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("episodes", 64), ("turns", 50), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for side, row in measure_turns(given.episodes, given.turns, given.repeats).items():
        print(side, {name: round(value, 2) for name, value in row.items()})

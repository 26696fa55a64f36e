"""Costs of this machine's components: a sampler alone, two at the same time, and two short runs.

`python -m lab.planning.calibrate FOLDER` measures a sampler in its own process and prints one JSON object.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.planning.simulation import LEADER, Result, SamplerCost, SharedCores, TrainerCost, Work, simulate

ROWS = (8, 32, 96, 256)
_PROMPT, _GROUP, _SHORT, _LONG = 16, 8, 8, 24  # tokens, samples per prompt, new tokens of the two measurements
_REPEATS = 3


def measure_sampler(folder: str) -> dict[str, Any]:
    """Seconds of a decode step by rows, of a token of context more, of a prefilled token, and of new weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from gspo.sampling import LocalSampler, publish, read_published

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampler = LocalSampler(model, seed=0, eos_token_ids=[0], max_rows=max(ROWS), verify=False)

    def seconds(num_prompts: int, group_size: int, prompt_tokens: int, new_tokens: int) -> float:
        return _median(lambda: _sample(sampler, num_prompts, group_size, prompt_tokens, new_tokens))

    decode = []
    for rows in ROWS:
        short, long = (seconds(rows // _GROUP, _GROUP, _PROMPT, new) for new in (_SHORT, _LONG))
        decode.append((long - short) / (_LONG - _SHORT))
    # The same with prompts of 96 tokens more: what a longer context costs.
    rows, more = 96, 96
    short, long = (seconds(rows // _GROUP, _GROUP, _PROMPT + more, new) for new in (_SHORT, _LONG))
    context = max((long - short) / (_LONG - _SHORT) - decode[ROWS.index(rows)], 0.0) / rows / more
    num_prompts, prompt_tokens = 48, 64
    one, two = (seconds(num_prompts, 1, prompt_tokens * n, 1) for n in (1, 2))

    def load() -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as shared:
            tensors = ((name, p.detach()) for name, p in model.named_parameters())
            found = publish(Path(shared), sampler.version + 1, tensors)
            sampler.load_weights(found.version, read_published(found.path, found.sha256).items())

    return {
        "decode_s": decode,
        "context_s": context,
        "prefill_token_s": max(two - one, 0.0) / num_prompts / prompt_tokens,
        "load_s": _median(load),
    }


def _sample(sampler: Any, num_prompts: int, group_size: int, prompt_tokens: int, new_tokens: int) -> None:
    from gspo.types import Request, SampleId, SamplingParams

    params = SamplingParams(new_tokens, ignore_eos=True)
    prompts = [tuple(2 + (17 * i + j) % 60 for j in range(prompt_tokens)) for i in range(num_prompts)]
    sampler.submit(
        [Request(SampleId(i, k), prompt, params) for i, prompt in enumerate(prompts) for k in range(group_size)]
    )
    assert len(list(sampler.completed())) == num_prompts * group_size


def _median(work: Callable[[], Any]) -> float:
    seconds = []
    for repeat in range(_REPEATS + 1):
        begin = time.perf_counter()
        work()
        if repeat:  # the first one warms up
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def slowdown_of(alone: Mapping[str, Any], together: Sequence[Mapping[str, Any]]) -> float:
    """How much longer a decode step takes while another process is busy on the other core."""
    ratios = [b / a for one in together for a, b in zip(alone["decode_s"], one["decode_s"], strict=True)]
    return max(statistics.median(ratios), 1.0)


def costs_of(
    sampler: Mapping[str, Any], inline: Mapping[str, Any], served: Mapping[str, Any], work: Work
) -> dict[str, float]:
    """What the two short runs add: a trained token, a step's fixed cost, publishing, and the latency of a request.

    inline  the run in one process, synchronous; served: the same with one server
    """
    rest = inline["step_s"] - inline["rollout_s"]
    tokens = inline["tokens"] + work.num_groups * work.prompt_tokens
    train = {"token_s": rest / tokens, "publish_s": served["sync_s"], "latency_s": 0.0}
    # In one process the simulated sampler differs from the measured one by a factor, which is the sampler's in a run:
    # log-probs recorded, groups assembled, rewards.
    predicted = predict({**sampler, **train}, work, num_servers=0).step_s - rest
    train["rollout_factor"] = inline["rollout_s"] / predicted
    # What a request to a server costs beyond sampling.
    train["latency_s"] = max(served["step_s"] - predict({**sampler, **train}, work, num_servers=1).step_s, 0.0)
    return train


def predict(found: Mapping[str, Any], work: Work, *, num_servers: int) -> Result:
    """The simulated run: the trainer on core 0, all servers on core 1; 0 servers: one process samples and trains."""
    if not num_servers:
        trainer = TrainerCost(found["token_s"], found["token_s"])  # the sampler reads the trainer's own tensors
        return simulate(work, _sampler_cost({**found, "load_s": 0.0, "latency_s": 0.0}), trainer, in_process=True)
    cores = SharedCores([1] * num_servers, 0, found.get("slowdown", 1.0))
    trainer = TrainerCost(found["token_s"], found["token_s"], publish_s=found["publish_s"])
    return simulate(work, _sampler_cost(found), trainer, num_servers=num_servers, leader=LEADER, cores=cores)


def _sampler_cost(found: Mapping[str, Any]) -> SamplerCost:
    factor = found.get("rollout_factor", 1.0)
    base = _PROMPT + (_SHORT + _LONG) / 2

    def decode(rows: int, context: float) -> float:
        step = float(np.interp(rows, ROWS, found["decode_s"]))
        return factor * (step + found["context_s"] * rows * (context - base))

    prefill = factor * found["prefill_token_s"]
    return SamplerCost(decode, prefill, max(ROWS), load_s=found["load_s"], latency_s=found["latency_s"])


if __name__ == "__main__":
    print(json.dumps(measure_sampler(sys.argv[1])))

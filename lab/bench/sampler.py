"""The workload `sampler`: tokens per second of our sampler, of transformers' generate and of vLLM, alternately.

One process of each side per round: `python -m lab.bench.sampler SIDE WORKLOAD_JSON FOLDER`. vLLM runs in its own
environment (`make setup-vllm`), without compilation, and is left out where there is none. All sides record the
log-probs of the sampled tokens; completions have a fixed length.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gspo
from lab.bench.workloads import SMALL, Workload, workload_rows, write_workload_model

SIDES = ("ours", "transformers", "vllm")
NAMES = {"ours": "ours", "transformers": "transformers' generate", "vllm": "vLLM, eager"}
SHAPES = (  # rows: 32, 64, and 32 with long prompts
    Workload("sampler", SMALL, 4, 8, 44, 48, rounds=3),
    Workload("sampler", SMALL, 8, 8, 44, 48, rounds=3),
    Workload("sampler", SMALL, 4, 8, 512, 32, rounds=3),
)
_SIDE_S = 3600.0
_REPEATS = 2  # generations of one process that count, after one that warms up
_VLLM_ENV = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that CPU seconds include the engine
    "VLLM_NO_USAGE_STATS": "1",
}


def compare_samplers(rounds: int | None, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """For each shape, the medians of each side."""
    pythons = {side: python for side in SIDES if (python := _python(side)) is not None}
    out = []
    with tempfile.TemporaryDirectory() as folder:
        write_workload_model(SHAPES[0], Path(folder))
        for shape in SHAPES:
            w = replace(shape, rounds=rounds or shape.rounds)
            found: dict[str, list[dict[str, float]]] = {side: [] for side in pythons}
            for number in range(w.rounds):
                for side, python in pythons.items():
                    found[side].append(_run(python, side, w, folder))
                said = ", ".join(f"{side} {runs[-1]['tokens_s']:,.0f}" for side, runs in found.items())
                say(f"sampler, {w.num_sequences} rows, round {number + 1} of {w.rounds}: tokens/s {said}")
            sides = {
                side: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
                for side, runs in found.items()
            }
            shown = {name: value for name, value in asdict(w).items() if name != "model"}
            out.append({"workload": shown, "sides": sides})
    return out


def sampler_table(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A heading, then one line per shape: tokens per second, and ours ÷ the other."""
    sides = [side for side in SIDES if any(side in one["sides"] for one in found)]
    lines = [["rows", "prompt / new tokens", *(f"{NAMES[side]}, tokens/s" for side in sides), "ours ÷ others, CPU"]]
    for one in found:
        w, ours = one["workload"], one["sides"]["ours"]
        ratios = [one["sides"][side]["cpu_s"] / ours["cpu_s"] for side in sides[1:] if side in one["sides"]]
        lines.append(
            [
                str(w["num_prompts"] * w["num_samples"]),
                f"{w['prompt_tokens']} / {w['new_tokens']}",
                *(f"{one['sides'][side]['tokens_s']:,.0f}" if side in one["sides"] else "–" for side in sides),
                ", ".join(f"{ratio:.2f}" for ratio in ratios) or "–",
            ]
        )
    return lines


def _python(side: str) -> str | None:
    """The interpreter of a side; None if vLLM is not installed."""
    from gspo.config import python_of
    from gspo.errors import ConfigError

    try:
        return sys.executable if side != "vllm" else str(python_of("vllm", {}))
    except ConfigError:
        return None


def _run(python: str, side: str, w: Workload, folder: str) -> dict[str, float]:
    from gspo.errors import GspoError

    source = str(Path(gspo.__file__).parents[1])  # vLLM's environment has no gspo of its own
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, **(_VLLM_ENV if side == "vllm" else {})}
    command = [python, "-m", "lab.bench.sampler", side, json.dumps(asdict(w)), folder]
    try:
        # wait: 3600 s, gspo bench
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SIDE_S, env=env)
    except subprocess.TimeoutExpired:
        raise GspoError(f"bench: sampler {side} did not end within {_SIDE_S:g} s") from None
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise GspoError(f"bench: sampler {side} ended with exit code {done.returncode}:\n{tail}")
    return json.loads(done.stdout.strip().splitlines()[-1])


Prompts = Sequence[tuple[int, ...]]
Generate = Callable[[Prompts], int]  # returns the number of sampled tokens


def _ours(w: Workload, folder: str) -> Generate:
    from transformers import AutoModelForCausalLM

    from gspo.sampling import LocalSampler
    from gspo.types import Request, SampleId, SamplingParams

    model = AutoModelForCausalLM.from_pretrained(folder)
    sampler = LocalSampler(model, seed=1, eos_token_ids=[0])
    params = SamplingParams(w.new_tokens, ignore_eos=True)

    def generate(prompts: Prompts) -> int:
        sampler.submit(
            [Request(SampleId(i, k), prompt, params) for i, prompt in enumerate(prompts) for k in range(w.num_samples)]
        )
        return sum(len(sample.tokens) for sample in sampler.completed())

    return generate


def _transformers(w: Workload, folder: str) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)

    def generate(prompts: Prompts) -> int:
        inputs = torch.tensor([prompt for prompt in prompts for _ in range(w.num_samples)])  # [B, T]
        made = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            min_new_tokens=w.new_tokens, max_new_tokens=w.new_tokens, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        torch.stack(made.logits, 1).log_softmax(-1).gather(-1, made.sequences[:, inputs.shape[1] :, None])
        return inputs.shape[0] * (made.sequences.shape[1] - inputs.shape[1])

    return generate


def _vllm(w: Workload, folder: str) -> Generate:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine = LLM(
        model=folder, dtype="float32", enforce_eager=True, max_num_seqs=w.num_sequences, enable_prefix_caching=True,
        max_model_len=w.prompt_tokens + w.new_tokens + 8, generation_config="vllm",
    )  # fmt: skip
    params = SamplingParams(n=w.num_samples, temperature=1.0, max_tokens=w.new_tokens, ignore_eos=True, logprobs=0)

    def generate(prompts: Prompts) -> int:
        made = engine.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return sum(len(choice.token_ids) for one in made for choice in one.outputs)

    return generate


def measure_side(side: str, w: Workload, folder: str) -> dict[str, float]:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    # Every repetition has prompts of its own: a prefix cache shares a prompt within its group, and finds no other.
    rows = workload_rows(w, w.num_prompts * (1 + _REPEATS))
    prompts = [tuple(int(word[1:]) for word in row["prompt"].split()) for row in rows]
    with torch.inference_mode():
        generate = {"ours": _ours, "transformers": _transformers, "vllm": _vllm}[side](w, folder)
        times, num_tokens = [], 0
        for i in range(0, len(prompts), w.num_prompts):
            wall, cpu = time.perf_counter(), time.process_time()
            num_tokens = generate(prompts[i : i + w.num_prompts])
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
    assert num_tokens == w.num_sequences * w.new_tokens, f"{side} sampled {num_tokens} tokens"
    wall_s, cpu_s = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return {"wall_s": wall_s, "cpu_s": cpu_s, "tokens_s": num_tokens / wall_s}


if __name__ == "__main__":
    print(json.dumps(measure_side(sys.argv[1], Workload(**json.loads(sys.argv[2])), sys.argv[3])))

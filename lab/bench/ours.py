"""Our side of the comparison, in its own process: `python -m lab.bench.ours WORKLOAD_JSON FOLDER [key=value]`."""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.bench.episode import episode_environment
from lab.bench.timeline import breakdown
from lab.bench.vision import count_tower_images
from lab.bench.workloads import Workload, flops, gemm_rate, reward, workload_rows


def run_settings(w: Workload, folder: str, root: str) -> list[str]:
    """The keys of a run of this workload: the model in `folder`, the run directory below `root`."""
    return [
        "algorithm=gspo",
        f"actor.path={folder}",
        f"actor.ppo_n_minibatches={w.num_minibatches}",
        "actor.optimizer.lr=1e-6",
        f"gconfig.n_samples={w.num_samples}",
        f"gconfig.max_new_tokens={w.new_tokens}",
        "gconfig.ignore_eos=true",
        f"train_dataset.batch_size={w.num_prompts}",
        f"total_train_steps={w.steps}",
        f"cluster.fileroot={root}",
        *([f"actor.freeze_vision={str(w.frozen).lower()}"] if w.visual_tokens else []),
    ]


def measure_ours(w: Workload, folder: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Train through the public interface, then read the metrics from the run directory."""
    from gspo.config import load
    from gspo.train import Leader, Trainer

    with tempfile.TemporaryDirectory() as root:
        settings = [*run_settings(w, folder, root), "evaluator.freq_steps=0", *overrides]
        data = workload_rows(w, w.num_prompts * w.steps)
        cpu_s: list[float] = []
        tower_images: list[int] = []
        num_images: Callable[[], int] = lambda: 0  # noqa: E731

        class Counting(Leader):
            def record(self, batch: Any, report: Any, clock: Any) -> None:
                # Before an evaluation: from one step to the next there is none.
                cpu_s.append(time.process_time())
                tower_images.append(num_images())
                super().record(batch, report, clock)

        trainer = Trainer(load(None, settings), reward=reward, dataset=data, valid=data[:1], env=episode_environment(w))
        trainer.leader = Counting
        with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as counting:
            rate = gemm_rate()
            if w.visual_tokens:
                num_images = counting.enter_context(count_tower_images(w.visual_tokens))
            summary = trainer.train(report=False)
            rate = (rate + gemm_rate()) / 2
            decode_rate = gemm_rate(w.num_sequences, w.text["hidden_size"], w.text["intermediate_size"], weights=32)
        lines = (Path(summary.path) / "metrics.jsonl").read_text().splitlines()
        traces = sorted((Path(summary.path) / "profile").glob("*.trace.json.gz"))
        breakdowns = [breakdown(trace) for trace in traces]
        state = json.loads(next((Path(summary.path) / "checkpoints").glob("*/state.json")).read_text())
    seen = [json.loads(line) for line in lines][1:]  # the first step warms caches up

    def median(key: str) -> float:
        return statistics.median(row[key] for row in seen)

    evaluation = [row.get("time/eval_s", 0.0) for row in seen]
    step = statistics.median(row["time/step_s"] - e for row, e in zip(seen, evaluation, strict=True))
    decode, train = flops(w)
    rollout_s, train_s = median("time/rollout_s"), median("time/train_s")
    return {
        **({"breakdown": breakdowns[-1]} if breakdowns else {}),
        "num_parameters": state["identity"]["parameters"],
        "step_s": step,
        "cpu_s": statistics.median(b - a for a, b in pairwise(cpu_s)),
        "tower_images": statistics.median(b - a for a, b in pairwise(tower_images)),
        "rollout_s": rollout_s,
        "train_s": train_s,
        "rollout_tokens_s": w.num_sequences * w.sampled_tokens / rollout_s,
        "train_tokens_s": w.num_sequences * (w.all_prompt_tokens + w.completion_tokens) / train_s,
        "bookkeeping_share": median("time/bookkeeping_s") / step,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        "gemm_gflops": rate,
        "decode_gemm_gflops": decode_rate,
        "floor_s": decode * w.num_sequences * w.sampled_tokens / rate / 1e9 + train / rate / 1e9,
        "train_share": train / train_s / 1e9 / rate,
        "decode_share": decode * w.num_sequences * w.sampled_tokens / rollout_s / 1e9 / rate,
    }


if __name__ == "__main__":
    print(json.dumps(measure_ours(Workload(**json.loads(sys.argv[1])), sys.argv[2], sys.argv[3:])))

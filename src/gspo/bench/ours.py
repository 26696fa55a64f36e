"""Our side of the comparison, in a process of its own: `python -m gspo.bench.ours WORKLOAD FOLDER STEPS`."""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import sys
import tempfile
from pathlib import Path

from gspo.bench.workloads import WORKLOADS, flops, gemm_rate, reward, rows


def measure(name: str, folder: str, steps: int) -> dict[str, float]:
    """Train `steps` steps as a user would, and read the run directory."""
    from gspo.config import load
    from gspo.train import Trainer

    w = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as root:
        overrides = [
            "algorithm=gspo",
            f"actor.path={folder}",
            f"actor.ppo_n_minibatches={w.num_minibatches}",
            "actor.optimizer.lr=1e-6",
            f"gconfig.n_samples={w.num_samples}",
            f"gconfig.max_new_tokens={w.new_tokens}",
            "gconfig.ignore_eos=true",
            f"train_dataset.batch_size={w.num_prompts}",
            f"total_train_steps={steps}",
            f"cluster.fileroot={root}",
            "evaluator.at_start=false",
            "evaluator.size=1",
        ]
        data = rows(w, w.num_prompts * steps)
        with contextlib.redirect_stdout(sys.stderr):
            rate = gemm_rate()
            summary = Trainer(load(None, overrides), reward=reward, dataset=data, valid=data[:1]).train()
            rate = max(rate, gemm_rate())
        lines = (Path(summary.path) / "metrics.jsonl").read_text().splitlines()
    seen = [json.loads(line) for line in lines][1:]  # the first step warms caches up

    def median(key: str) -> float:
        return statistics.median(row[key] for row in seen)

    evaluation = [row.get("time/eval_s", 0.0) for row in seen]
    step = statistics.median(row["time/step_s"] - e for row, e in zip(seen, evaluation, strict=True))
    decode, train = flops(w)
    rollout_s, train_s = median("time/rollout_s"), median("time/train_s")
    return {
        "step_s": step,
        "rollout_s": rollout_s,
        "train_s": train_s,
        "rollout_tokens_s": w.num_sequences * w.new_tokens / rollout_s,
        "train_tokens_s": w.num_sequences * (w.prompt_tokens + w.new_tokens) / train_s,
        "bookkeeping_share": median("time/bookkeeping_s") / step,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        "gemm_gflops": rate,
        "train_share": train / train_s / 1e9 / rate,
        "decode_share": decode * w.num_sequences * w.new_tokens / rollout_s / 1e9 / rate,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]))))

"""One measured run: `python -m lab.planning.trial MODEL_JSON FOLDER ROOT SERVERS ETA STEPS`.

Random weights, two updates per batch, π_old recomputed at every η, so that the work of a step depends on nothing but
the lengths. Of 64 tokens one ends a completion: lengths are geometric, cut at `new_tokens`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from lab.bench.ours import run_settings
from lab.bench.workloads import TINY, Workload, reward, workload_rows

NUM_STEPS = 8  # that count; a run has 2 η more, which fill and empty the pipeline
# Two sizes: about 1 and 7 million parameters.
MODELS = {
    w.name: w
    for w in (
        Workload("1M", TINY, 24, 8, 16, 96),
        Workload(
            "7M",
            {**TINY, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8},
            12, 8, 16, 96,
        ),
    )
}  # fmt: skip


def trial_settings(w: Workload, folder: str, root: str, num_servers: int, eta: int, num_steps: int) -> list[str]:
    return [
        *run_settings(w, folder, root),
        "gconfig.ignore_eos=false",
        f"total_train_steps={num_steps}",
        f"rollout.max_head_offpolicyness={eta}",
        "actor.prox_logp_method=recompute",
        "actor.use_decoupled_loss=true",
        "evaluator.freq_steps=0",
        "threads=1",
        f"trial_name=servers{num_servers}_eta{eta}",
        *([f"rollout.backend=local:d{num_servers}"] if num_servers else []),
    ]


def main() -> None:
    from gspo.config import load
    from gspo.train import Trainer

    shape, folder, root, *numbers = sys.argv[1:]
    w = Workload(**json.loads(shape))
    num_servers, eta, num_steps = map(int, numbers)
    rows: list[dict[str, Any]] = workload_rows(w, w.num_prompts * num_steps)
    loaded = load(None, trial_settings(w, folder, root, num_servers, eta, num_steps))
    Trainer(loaded, reward=reward, dataset=rows, valid=rows[:1]).train(report=False)


if __name__ == "__main__":
    main()

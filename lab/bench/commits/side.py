"""One side of `gspo bench --compare`: trains, and waits for a line on stdin after each step.

This file runs with the sources of another commit, so it imports nothing of gspo but `load` and `Trainer`. A step ends
with its last optimizer update; PyTorch's own hook reports that, whatever the trainer's code looks like. After a step
the process prints its seconds as one line of JSON. The first step warms caches up and has no times.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any


def side_reward(completions: Sequence[str], flat: Sequence[bool], **_: Any) -> list[float]:
    """As in `workloads.py`, which the other commit may not have: differs within a group; 0 for rows with `flat`."""
    return [0.0 if f else sum(map(ord, c)) % 97 / 97 for c, f in zip(completions, flat, strict=True)]


def main() -> None:
    job = json.loads(sys.stdin.readline())  # wait: none, stdin ends with the measuring process
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        from torch.optim.optimizer import register_optimizer_step_post_hook

        import gspo
        from gspo.config import load
        from gspo.train import Trainer

        if not gspo.__file__.startswith(job["source"]):
            sys.exit(f"gspo was imported from {gspo.__file__} and not from {job['source']}")
        num_updates, begin = 0, None

        def after_update(*_: Any) -> None:
            nonlocal num_updates, begin
            num_updates += 1
            if num_updates % job["num_minibatches"]:
                return
            now = time.perf_counter(), time.process_time()
            times = None if begin is None else {"wall_s": now[0] - begin[0], "cpu_s": now[1] - begin[1]}
            print(json.dumps(times), file=out, flush=True)
            # wait: none, stdin ends with the measuring process
            if not sys.stdin.readline():  # the other side does its step now
                os._exit(0)  # the measuring process has ended
            begin = time.perf_counter(), time.process_time()

        register_optimizer_step_post_hook(after_update)
        rows = job["rows"]
        Trainer(load(None, job["settings"]), reward=side_reward, dataset=rows, valid=rows[:1]).train()

"""Our own rows: the objective compiled by torch, and with the sequences of a batch on two ranks.

The second is a program for torchrun, `python -m torch.distributed.run --nproc-per-node 2 -m lab.conformance.ours FILE`:
each rank has every second sequence; the trainer's `World` sums the counts of the denominator, the losses and the
gradients over the ranks. Rank 0 writes the outcomes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo import objectives
from gspo.conformance import Batch, Implementation, Package, check_all, show, targets
from gspo.learner import World, joined
from gspo.system import StopRequest


def compiled() -> Implementation:
    """`torch.compile(objectives.loss)` with the default backend. Each objective is another graph: GSPO alone here."""
    torch._dynamo.config.recompile_limit = 100  # else cases beyond the eighth graph would run uncompiled
    made = targets.gspo(Package("gspo"), torch.compile(objectives.loss, dynamic=True))
    return replace(made, name="gspo, compiled", objectives=frozenset({"gspo"}))


def on_two_ranks() -> dict[str, Any]:
    """The outcomes of two gloo processes, as `show.as_json`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*command, "-m", "lab.conformance.ours", str(file)], check=True, timeout=240)  # wait: 240 s
        return json.loads(file.read_text(encoding="utf-8"))


def ranked(world: World) -> Implementation:
    alone = targets.gspo(Package("gspo"))

    class Shared(torch.autograd.Function):
        """The log-probs on every rank; their gradient is the sum over ranks."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            parts = world.all_gather({"g": np.asarray(grads[0].double())})
            return torch.from_numpy(sum(part["g"] for part in parts)).to(grads[0].dtype)

    class Total(torch.autograd.Function):
        """The sum of the ranks' losses; each rank differentiates its own."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.new_tensor(world.all_reduce_sum(float(x)))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    def loss(b: Batch) -> tuple[Tensor, None]:
        whole = replace(b, logp=Shared.apply(b.logp))
        rows = own_rows(whole, world.rank, world.size)
        if b.num_sequences is None:
            counts = len(rows.advantage), int(rows.mask.sum())
            sequences, tokens = (int(world.all_reduce_sum(count)) for count in counts)
            rows = replace(rows, num_sequences=sequences, num_tokens=tokens)
        return Total.apply(alone.loss(rows)[0]), None

    return replace(alone, name="gspo, two ranks", loss=loss)


def own_rows(b: Batch, rank: int, size: int) -> Batch:
    """Every size-th sequence of a padded or packed batch."""
    if b.cu_seqlens is None:
        return replace(b, **{name: x[rank::size] for name, x in vars(b).items() if isinstance(x, Tensor)})
    lengths = b.cu_seqlens.diff()
    mine = torch.arange(len(lengths)) % size == rank  # [B]
    tokens = mine.repeat_interleave(lengths)  # [N]
    found = {name: x[tokens] for name, x in vars(b).items() if isinstance(x, Tensor) and x.shape == tokens.shape}
    cuts = torch.nn.functional.pad(lengths[mine].cumsum(0), (1, 0))
    return replace(b, **found, advantage=b.advantage[mine], cu_seqlens=cuts)


def main(file: Path) -> None:
    with joined(None, 60, StopRequest()) as world:
        implementation = ranked(world)
        found = show.as_json(implementation, check_all(implementation))
        if world.is_first:
            file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

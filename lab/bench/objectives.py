"""Time of each objective relative to a minimal computation: `python -m lab.bench.objectives`.

The minimal computation (`bare`) is exp + segment sum, forward and backward, on the same packed tensors. All of them run
alternately in one process and medians are compared, so load of other programs affects all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gspo.algorithms import ALGORITHMS
from gspo.objectives import loss


def ratios(
    num_sequences: int = 256, length: int = 2048, rounds: int = 15, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """Median milliseconds and the ratio to the bare computation, for each preset and for `bare` itself."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = num_sequences * length
    cu_seqlens = torch.arange(0, num_tokens + 1, length)  # [B + 1]
    proximal_logp = -torch.rand(num_tokens, generator=generator)  # [N]
    logp = proximal_logp + 0.01 * torch.randn(num_tokens, generator=generator)  # [N]
    advantage = torch.randn(num_sequences, generator=generator)  # [B]

    def bare(x: Tensor) -> Tensor:
        return torch.segment_reduce(x.exp(), "sum", offsets=cu_seqlens, unsafe=True, initial=0).sum()

    def objective(name: str) -> Callable[[Tensor], Tensor]:
        return lambda x: (
            loss(name, x, proximal_logp, advantage, None, cu_seqlens=cu_seqlens, max_new_tokens=length).loss
        )

    arms: dict[str, Callable[[Tensor], Tensor]] = {"bare": bare} | {name: objective(name) for name in ALGORITHMS}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 1):
        for name, arm in arms.items():
            leaf = logp.clone().requires_grad_()
            start = time.perf_counter()
            arm(leaf).backward()
            seconds[name].append(time.perf_counter() - start)
    # The first round is not counted: it allocates memory.
    medians = {name: statistics.median(times[1:]) * 1e3 for name, times in seconds.items()}
    return {name: (ms, ms / medians["bare"]) for name, ms in medians.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(f"forward + backward, {args.sequences} × {args.length} tokens, packed, {torch.get_num_threads()} threads")
    for name, (ms, ratio) in ratios(args.sequences, args.length, args.rounds).items():
        print(f"{name:14}{ms:9.2f} ms{ratio:8.2f} ×")


if __name__ == "__main__":
    main()

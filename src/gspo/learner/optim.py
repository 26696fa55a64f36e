"""The optimizer: AdamW or SGD, the learning rate as a pure function of the update number, and a check for NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.adamw import adamw

from gspo.faults import reached
from gspo.learner.policy.sharding import full


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    kind: str,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """AdamW (fused: one pass over the weights, 6× faster than the loop on CPU) or SGD."""
    trained = [p for p in parameters if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=lr, weight_decay=weight_decay)
    halves = any(p.dtype in (torch.bfloat16, torch.float16) for p in trained)
    form = HalfAdamW if halves else torch.optim.AdamW
    return form(trained, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True)


class HalfAdamW(torch.optim.AdamW):
    """AdamW for 16-bit weights: it trains a float32 copy with float32 moments, and rounds the copy into the weights.

    Near 0.01 two neighbouring bfloat16 numbers are 6e-5 apart, so an update of 1e-6 would be rounded away; the copy
    keeps it.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            # First step: moments and the exact copy. All are in the optimizer's state, so a checkpoint contains them.
            for p in weights:
                if not self.state[p]:
                    copy = p.detach().to(torch.float32, copy=True)
                    self.state[p] = {
                        "step": torch.zeros((), dtype=torch.float32, device=p.device),
                        "exp_avg": torch.zeros_like(copy),
                        "exp_avg_sq": torch.zeros_like(copy),
                        "weight": copy,
                    }
            states = [self.state[p] for p in weights]
            copies = [state["weight"] for state in states]
            adamw(
                copies,
                [p.grad.to(torch.float32) for p in weights],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],  # max_exp_avg_sqs, for amsgrad only
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for p, copy in zip(weights, copies, strict=True):
                # Rounds into the 16-bit weight; the copy keeps the part that is rounded away.
                p.copy_(copy)


def learning_rate(update: int, total: int, *, peak: float, schedule: str, warmup_proportion: float) -> float:
    """The learning rate of update number `update` (from 0) of `total`: linear warm-up, then the schedule.

    >>> [learning_rate(u, 10, peak=1.0, schedule="linear", warmup_proportion=0.2) for u in (0, 1, 2, 9)]
    [0.5, 1.0, 1.0, 0.125]
    """
    warmup = round(total * warmup_proportion)
    if update < warmup:
        # update + 1: the first update must not have the learning rate 0.
        return peak * (update + 1) / warmup
    progress = (update - warmup) / max(total - warmup, 1)
    if schedule == "linear":
        factor = 1 - progress
    elif schedule == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * progress))
    else:
        return peak
    return peak * factor


def apply_update(
    optimizer: torch.optim.Optimizer, *, lr: float, max_norm: float, is_finite: bool = True
) -> tuple[float, bool]:
    """Clip the gradient, check it, update. Returns the norm before clipping, and whether the update was applied.

    If the norm or the loss (`is_finite`) is not finite, weights and moments stay unchanged. Gradients are reset in
    either case.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # A parameter that no sequence reached gets gradient 0 instead of None: Adam must update the same set every time.
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    # Of sharded weights the norm is a DTensor; `full` reduces it, so all ranks make the same decision.
    norm = full(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    applied = is_finite and bool(norm.isfinite())
    if applied:
        if max_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        reached("train.optimizer")
        optimizer.step()
        reached("train.updated")
    optimizer.zero_grad(set_to_none=True)
    return float(norm), applied

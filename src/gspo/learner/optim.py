"""The optimizer: AdamW (its moments in 32 or 8 bits) or SGD, the learning rate by update number, a check for NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from gspo.errors import ConfigError
from gspo.faults import reached
from gspo.learner.policy.sharding import full

BLOCK = 256  # numbers of an 8-bit moment that share one scale
SMALLEST = 4096  # a tensor with fewer numbers keeps moments of 32 bits
_CHUNK = 2**20  # numbers whose moments are unpacked at a time; a multiple of BLOCK
_CUT = 19  # bits that a float32 has more than a code: 4 of its 23 bits of mantissa stay
_FIRST = (127 - 15) << 4  # of the 8 bits of exponent: codes are from 2⁻¹⁵ to 2


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    kind: str,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    offload: bool = False,
) -> torch.optim.Optimizer:
    """AdamW (fused: one pass over the weights, 6× faster than the loop on CPU) or SGD.

    `offload`: AdamW's state is in the host's memory, if the weights are not.
    """
    trained = [p for p in parameters if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=lr, weight_decay=weight_decay)
    if kind == "adamw8bit":
        if any(hasattr(p, "full_tensor") for p in trained):
            raise ConfigError("actor.optimizer.type adamw8bit trains on one rank: set actor.backend: fsdp:d1, or adamw")
        return AdamW8bit(trained, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
    offload = offload and any(p.device.type != "cpu" for p in trained)
    halves = any(p.dtype in (torch.bfloat16, torch.float16) for p in trained)
    form = HalfAdamW if halves or offload else torch.optim.AdamW
    optimizer = form(trained, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True)
    if offload and isinstance(optimizer, HalfAdamW):
        optimizer.state_device = torch.device("cpu")
    return optimizer


class HalfAdamW(torch.optim.AdamW):
    """AdamW for 16-bit weights: it trains a float32 copy with float32 moments, and rounds the copy into the weights.

    Near 0.01 two neighbouring bfloat16 numbers are 6e-5 apart, so an update of 1e-6 would be rounded away; the copy
    keeps it. With `state_device`, copy and moments are there, and so is the update; only gradients and new weights
    move (`actor.optimizer.offload`).
    """

    state_device: torch.device | None = None  # None: that of the weights

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            # First step: moments and the exact copy. All are in the optimizer's state, so a checkpoint contains them.
            for p in weights:
                if not self.state[p]:
                    wide = torch.promote_types(p.dtype, torch.float32)
                    copy = p.detach().to(self.state_device or p.device, wide, copy=True)
                    self.state[p] = {
                        "step": torch.zeros((), dtype=torch.float32, device=copy.device),
                        "exp_avg": torch.zeros_like(copy),
                        "exp_avg_sq": torch.zeros_like(copy),
                        "weight": copy,
                    }
            states = [self.state[p] for p in weights]
            copies = [state["weight"] for state in states]
            _adamw(
                group,
                copies,
                [p.grad.to(copy) for p, copy in zip(weights, copies, strict=True)],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
            )
            for p, copy in zip(weights, copies, strict=True):
                # Rounds into the 16-bit weight; the copy keeps the part that is rounded away.
                p.copy_(copy)


class AdamW8bit(torch.optim.AdamW):
    """AdamW whose moments are stored in 8 bits each: 2 bytes per weight instead of 8.

    For an update, a chunk of the moments is unpacked to float32, AdamW computes with it, and it is packed again: as
    8-bit floats, with one scale for a block of 256 numbers. Of the second moment the square root is packed, which has
    the range of the first moment. It is rounded at random with the right mean: it changes by 0.05 % per update, and the
    nearest of numbers that are 6 % apart would never change. The random numbers are a function of the update's
    number, so a resumed run is the uninterrupted one. 16-bit weights have a float32 copy as in `HalfAdamW`.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        # All states before the first update: between them, the temporary tensors of updates would leave holes.
        for p, _ in trained:
            if not self.state[p]:
                self._start(p, self.state[p])
        noise: Tensor | None = None
        for p, group in trained:
            if noise is None:
                draw = torch.Generator(p.device).manual_seed(int(self.state[p]["step"]))
                noise = torch.randint(2**_CUT, (_CHUNK,), generator=draw, dtype=torch.int32, device=p.device)
            self._update(p, self.state[p], group, noise)

    def _start(self, p: nn.Parameter, state: dict[str, Tensor]) -> None:
        state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        if p.dtype in (torch.bfloat16, torch.float16):
            state["weight"] = p.detach().to(torch.float32, copy=True)
        wide, is_packed = torch.promote_types(p.dtype, torch.float32), p.numel() >= SMALLEST
        for name, kind in (("exp_avg", torch.float8_e4m3fn), ("exp_avg_sq", torch.uint8)):
            state[name] = torch.zeros(p.shape, dtype=kind if is_packed else wide, device=p.device)
            if is_packed:
                state[f"{name}_scale"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)

    def _update(self, p: nn.Parameter, state: dict[str, Tensor], group: dict[str, Any], noise: Tensor) -> None:
        assert p.grad is not None
        weight = state.get("weight", p.detach()).contiguous()  # the tensor itself, unless it is a transposed one
        flat, grad = weight.view(-1), p.grad.reshape(-1)  # [n]
        first, second = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)  # [n]
        is_packed = "exp_avg_scale" in state
        for low in range(0, len(flat), _CHUNK):
            part = slice(low, min(low + _CHUNK, len(flat)))
            blocks = slice(low // BLOCK, -(-part.stop // BLOCK))
            m, v = first[part], second[part]
            if is_packed:
                m = _unpacked(m, state["exp_avg_scale"][blocks]).to(flat.dtype)
                v = _unpacked(v, state["exp_avg_sq_scale"][blocks]).to(flat.dtype).square_()
            # The update adds 1 to the counter that it gets, for each chunk.
            _adamw(group, [flat[part]], [grad[part].to(flat.dtype)], [m], [v], [state["step"].clone()])
            if is_packed:
                first[part], state["exp_avg_scale"][blocks] = _packed(m.float(), None)
                second[part], state["exp_avg_sq_scale"][blocks] = _packed(v.sqrt_().float(), noise)
        state["step"] += 1
        if weight.data_ptr() != p.data_ptr():
            p.copy_(weight.view(p.shape))


def _packed(values: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """Numbers [c] as 8-bit floats [c], and the scales of their blocks.

    Without `noise`: PyTorch's format of 4 bits of exponent and 3 of mantissa, rounded to the nearest. With it: numbers
    ≥ 0, and the bit of the sign is one more of mantissa; rounded up or down by a random number.
    """
    blocks = nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    # The largest number becomes 256 (PyTorch's format ends at 448), or 1.
    scale = blocks.abs().amax(1) / (256 if noise is None else 1)
    scaled = blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    if noise is None:
        return scaled.to(torch.float8_e4m3fn).view(-1)[: len(values)], scale
    # The upper bits of a float32 are exponent and mantissa: random lower bits carry over into them by chance. A number
    # below all others but 0 becomes the smallest one: divided by 0, a first moment would be a step of any size.
    codes = scaled.view(torch.int32).add_(noise[: scaled.numel()].view_as(scaled)) >> _CUT
    codes.sub_(_FIRST).clamp_(1, 255).mul_(blocks > 0)
    return codes.to(torch.uint8).view(-1)[: len(values)], scale


def _unpacked(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [c]"""
    values = codes.float()
    if codes.dtype == torch.uint8:
        values = (codes.to(torch.int32).add_(_FIRST) << _CUT).view(torch.float32).mul_(codes > 0)
    blocks = nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    return (blocks * scale[:, None]).view(-1)[: len(codes)]


def _adamw(
    group: dict[str, Any],
    weights: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
) -> None:
    """PyTorch's own update of some tensors and their moments, in place."""
    adamw(
        weights,
        grads,
        first,
        second,
        [],  # max_exp_avg_sqs, for amsgrad only
        steps,
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


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

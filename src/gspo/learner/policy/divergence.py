"""The exact KL between two policies over the whole vocabulary, chunk by chunk, for distillation.

    D_t = α KL(π_T ‖ π_θ) + (1 − α) KL(π_θ ‖ π_T)      at the position that predicts token t

As in `head.py`, logits exist for one chunk of hidden rows at a time and are recomputed in the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gspo.learner.policy.head import HeadForm, Logits, Targets


class Head(NamedTuple):
    """A model's language-model head and the hidden rows that enter it."""

    hidden: Tensor  # [U, hidden]; the two models may have different sizes
    weight: Tensor  # [V, hidden]
    bias: Tensor | None  # [V]
    scale: float  # of hidden·Wᵀ, with the temperature
    softcap: float | None
    temperature: float

    def logits(self, form: HeadForm) -> Logits:
        none = self.hidden.new_zeros(0, dtype=torch.int64)
        begins = self.hidden.new_zeros(len(self.hidden) + 1, dtype=torch.int64)  # no targets: whole rows are compared
        targets = Targets(none, begins, self.scale, self.softcap, self.temperature)
        return Logits(self.hidden, self.weight, self.bias, targets, form)


def divergence_of(student: Head, teacher: Head, forward_share: float, form: HeadForm) -> Tensor:
    """[U] D of every hidden row."""
    # Heads of one family may have more rows than tokens (padding to a multiple); only common rows are compared.
    num = min(len(student.weight), len(teacher.weight))
    student, teacher = (
        head._replace(weight=head.weight[:num], bias=None if head.bias is None else head.bias[:num])
        for head in (student, teacher)
    )
    teacher = teacher._replace(
        weight=teacher.weight.detach(), bias=None if teacher.bias is None else teacher.bias.detach()
    )
    return ChunkedDivergence.apply(  # pyright: ignore[reportReturnType]
        student.hidden, student.weight, student.bias, tuple(student[3:]), teacher, forward_share, form
    )


class ChunkedDivergence(torch.autograd.Function):
    """[U] D of every hidden row, with exact gradients for the student's hidden rows, weight and bias.

    With z the student's logits/T, p its probabilities and q the teacher's:
        dF/dz = p − q,   F = KL(q ‖ p);        dR/dz = p·(log p − log q − R),   R = KL(p ‖ q)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        student: tuple[float, float | None, float],  # scale, soft cap, temperature
        teacher: Head,
        forward_share: float,
        form: HeadForm,
    ) -> Tensor:
        own, other = Head(hidden, weight, bias, *student).logits(form), teacher.logits(form)
        out = hidden.new_empty(len(hidden), dtype=own.out_dtype)  # [U]
        for rows, *_ in own.chunks():
            logp, logq = (x(rows)[0].log_softmax(-1) for x in (own, other))  # [c, V]
            out[rows] = _divergence(logp, logq, forward_share)
        ctx.save_for_backward(hidden, weight, bias)
        ctx.rest = student, teacher, forward_share, form
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        student, teacher, share, form = ctx.rest
        own, other = Head(hidden, weight, bias, *student).logits(form), teacher.logits(form)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        # Sums over chunks are at least float32, as in `head.py`.
        d_weight = torch.zeros_like(weight, dtype=own.out_dtype) if want_weight else None
        d_bias = torch.zeros_like(bias, dtype=own.out_dtype) if want_bias and bias is not None else None
        for rows, *_ in own.chunks():
            z, slope = own(rows)
            logp, logq = z.log_softmax(-1), other(rows)[0].log_softmax(-1)  # [c, V]
            p, q, gap = logp.exp(), logq.exp(), logp - logq
            reverse = (p * gap).sum(-1, keepdim=True)  # [c, 1]
            d = share * (p - q) + (1 - share) * p * (gap - reverse)  # [c, V], d D / d z
            d *= grads[0][rows, None]
            if slope is not None:
                d *= slope
            d *= student[0]
            if d_bias is not None:
                d_bias += d.sum(0)
            d = d.to(own.weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = (d @ own.weight).to(hidden.dtype)
            if d_weight is not None:
                d_weight += d.T @ own.hidden(rows)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _divergence(logp: Tensor, logq: Tensor, forward_share: float) -> Tensor:
    """α Σ q log(q/p) + (1 − α) Σ p log(p/q), [c]; never below 0 but for rounding."""
    gap = logp - logq  # [c, V]
    return (((1 - forward_share) * logp.exp() - forward_share * logq.exp()) * gap).sum(-1)

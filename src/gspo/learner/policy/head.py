"""The chunked language-model head: log-probs and entropy at the targets without a [targets, vocabulary] tensor.

Logits exist for one chunk of hidden rows at a time, and are recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A logit whose exp() is 0 beside any real one. Finite, because 0 · (−inf) in the entropy would be NaN.
_IMPOSSIBLE = -1e20


class Targets(NamedTuple):
    """The M target tokens whose log-probs are computed, sorted by the hidden row (of U) that predicts them."""

    token: Tensor  # [M]
    begins: Tensor  # [U+1] where the targets of each hidden row begin
    scale: float  # of hidden·Wᵀ, before the soft cap
    softcap: float | None
    temperature: float
    # Truncated sampling only: the kept set of each hidden row, which then predicts one target (U = M).
    kept_begins: Tensor | None = None  # [U+1] where the set of each row begins; an empty set is the whole vocabulary
    kept_ids: Tensor | None = None


class HeadForm(NamedTuple):
    chunk_size: int  # hidden rows per chunk
    fp32: bool  # compute hidden·Wᵀ in float32 even if the weights are 16-bit
    with_entropy: bool
    entropy_grad: bool  # the entropy is differentiated too


class ChunkedHead(torch.autograd.Function):
    """Log-probs of targets under softmax(logits/T), chunk by chunk, with exact gradients.

    logits = hidden·Wᵀ + b, then the model's own scaling and soft cap. For upstream gradients g (per target)
    and h (per row's entropy H): d logits/T = g·(onehot − p) − h·p·(log p + H). Logits are recomputed in the
    backward pass: g is not known in the forward pass, and Σᵢ gᵢ(onehotᵢ − pᵢ)hiddenᵢᵀ does not factor.

    With kept sets (truncated sampling), the softmax of a row is over its set: the other logits are so low that their
    probability, and with it their gradient, is exactly 0.

    Shapes: hidden [U, hidden], weight [V, hidden], bias [V]; M targets; a chunk has c hidden rows and m targets.
    Returns log-probs [M], the entropy of each hidden row, [U], and the probability of its kept set under the softmax
    over the whole vocabulary, [U]; the last is empty without kept sets or without entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, form: HeadForm
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = Logits(hidden, weight, bias, targets, form)
        logp = hidden.new_empty(len(targets.token), dtype=logits.out_dtype)  # [M]
        lse = hidden.new_empty(len(hidden), dtype=logits.out_dtype)  # [U] log Σ_v exp(logits/T)
        entropy = torch.empty_like(lse) if form.with_entropy else lse.new_empty(0)  # [U] or [0]
        with_mass = form.with_entropy and targets.kept_ids is not None
        mass = torch.empty_like(lse) if with_mass else lse.new_empty(0)  # [U] or [0]
        for rows, mine, row, token in logits.chunks():
            z, _ = logits(rows)  # [c, V]
            if targets.kept_ids is not None:
                # [c] of the whole vocabulary
                whole = z.logsumexp(-1) if with_mass else None
                logits.restrict(z, rows)
                if whole is not None:
                    mass[rows] = (z.logsumexp(-1) - whole).exp_()
            # Read first: z is overwritten in place below.
            chosen = z[row, token]  # [m]
            # With the largest logit of each row subtracted, exp cannot overflow.
            peak = z.amax(-1, keepdim=True)  # [c, 1]
            z.sub_(peak)
            if form.with_entropy:
                e = torch.exp(z, out=logits.buffer(1, len(z)))  # [c, V]
                total = e.sum(-1)  # [c]
                log_total = total.log()  # [c]
                # H = log Σe − Σ e·z / Σe, with z measured from the peak
                entropy[rows] = log_total - e.mul_(z).sum(-1) / total
            else:
                log_total = z.exp_().sum(-1).log()  # [c]
            lse[rows] = log_total + peak[:, 0]
            logp[mine] = chosen - lse[rows][row]
        ctx.targets, ctx.form = targets, form
        # The log-sum-exp [U] is enough to get p from recomputed logits without another reduction over V.
        ctx.save_for_backward(hidden, weight, bias, lse, entropy)
        ctx.mark_non_differentiable(mass, *(() if form.entropy_grad else (entropy,)))
        return logp, entropy, mass

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, lse, entropy = ctx.saved_tensors
        targets, form = ctx.targets, ctx.form
        logits = Logits(hidden, weight, bias, targets, form)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if want_hidden else None  # [U, hidden]
        # Sums over chunks are float32 even if the product of one chunk is not: many small terms are added.
        d_weight: Tensor | None = None  # [V, hidden]
        d_bias = (
            torch.zeros_like(logits.bias, dtype=logits.out_dtype) if want_bias and logits.bias is not None else None
        )
        for rows, mine, row, token in logits.chunks():
            z, slope = logits(rows)  # [c, V]
            if targets.kept_ids is not None:
                logits.restrict(z, rows)
            grad = grads[0][mine]  # [m] g, one per target of the chunk
            row_grad = grad.new_zeros(len(z)).index_add_(0, row, grad)  # [c] Σ over the targets of a row
            z.sub_(lse[rows, None])  # log p
            if form.entropy_grad:
                # z becomes −p · (h·(log p + H) + Σg)
                p = torch.exp(z, out=logits.buffer(1, len(z)))
                z.add_(entropy[rows, None]).mul_(grads[1][rows, None]).add_(row_grad[:, None]).mul_(p).neg_()
            else:
                # z becomes −p · Σg
                z.exp_().mul_(row_grad.neg_()[:, None])
            # Add g · onehot. accumulate: two targets of a row can be the same token.
            z.index_put_((row, token), grad, accumulate=True)  # now d logits/T, [c, V]
            if slope is not None:
                z.mul_(slope)
            if d_bias is not None:
                d_bias.add_(z.sum(0), alpha=targets.scale)
            # From d logits to the inputs of hidden·Wᵀ + b. The scale is a factor of each gradient.
            z = z.to(logits.weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = (z @ logits.weight).mul_(targets.scale).to(hidden.dtype)
            if want_weight:
                h = logits.hidden(rows)  # [c, hidden]
                if d_weight is None:  # made by the first chunk: filling zeros would be one more pass over [V, hidden]
                    d_weight = (z.T @ h).mul_(targets.scale).to(logits.out_dtype)
                elif h.dtype == d_weight.dtype:
                    # Multiplies and adds in one call, without a temporary [V, hidden].
                    d_weight.addmm_(z.T, h, alpha=targets.scale)
                else:
                    d_weight.add_(z.T @ h, alpha=targets.scale)
        return (
            d_hidden,
            d_weight.to(weight.dtype) if d_weight is not None else None,
            d_bias.to(bias.dtype) if d_bias is not None else None,
            None,
            None,
        )


class Logits:
    """Chunks of logits/T, [c, V], float32 or float64, written into buffers that all chunks reuse."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, form: HeadForm) -> None:
        dtype = output_dtype(weight.dtype) if form.fp32 else weight.dtype
        self.out_dtype = output_dtype(weight.dtype)
        self.weight, self._hidden = weight.to(dtype), hidden
        self.bias = None if bias is None else bias.to(dtype)
        self._targets = targets
        # Slices need Python numbers; read once, because each read waits for the device.
        self._begins = targets.begins.tolist()
        self._kept_begins = None if targets.kept_begins is None else targets.kept_begins.tolist()
        self._chunk = min(form.chunk_size, len(hidden))
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, which: int, num_rows: int) -> Tensor:
        if which not in self._buffers:
            self._buffers[which] = self.weight.new_empty(self._chunk, len(self.weight), dtype=self.out_dtype)
        return self._buffers[which][:num_rows]

    def chunks(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Per chunk: slice of hidden rows, slice of targets, [m] each target's row in the chunk, [m] its token."""
        counts = self._targets.begins.diff()
        for low in range(0, len(self._hidden), self._chunk):
            high = min(low + self._chunk, len(self._hidden))
            mine = slice(self._begins[low], self._begins[high])
            yield slice(low, high), mine, torch.repeat_interleave(counts[low:high]), self._targets.token[mine]

    def restrict(self, z: Tensor, rows: slice) -> None:
        """Put the logits outside each row's kept set so low that their probability is 0."""
        begins, ids = self._targets.kept_begins, self._targets.kept_ids
        assert begins is not None
        assert ids is not None
        assert self._kept_begins is not None
        counts = begins.diff()[rows]  # [c]
        mine = slice(self._kept_begins[rows.start], self._kept_begins[rows.stop])
        outside = torch.ones_like(z, dtype=torch.bool)  # [c, V]
        outside[torch.repeat_interleave(counts), ids[mine]] = False
        outside[counts == 0] = False
        z.masked_fill_(outside, _IMPOSSIBLE)

    def hidden(self, rows: slice) -> Tensor:
        return self._hidden[rows].to(self.weight.dtype)

    def __call__(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        h, scale, softcap = self.hidden(rows), self._targets.scale, self._targets.softcap
        # The scale multiplies [c, hidden], not [c, V]: the temperature costs almost nothing.
        if self.weight.dtype == self.out_dtype:
            z = torch.mm(h * scale, self.weight.T, out=self.buffer(0, len(h)))
        else:
            # A 16-bit product cannot be written into the float32 buffer. It is scaled after the conversion.
            z = torch.mm(h, self.weight.T).to(self.out_dtype).mul_(scale)
        if self.bias is not None:
            # The scale applies to hidden·Wᵀ + b as a whole.
            z.add_(self.bias, alpha=scale)
        slope = None
        if softcap is not None:
            # cap·tanh(x/cap)/T on z = x/T
            bound = softcap / self._targets.temperature
            z.div_(bound).tanh_()
            # d tanh(x) = 1 − tanh²(x); kept for the backward pass
            slope = 1 - z * z
            z.mul_(bound)
        return z, slope


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least float32: the ratio compares log-probs that differ by 1e-4."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logit_transform(config: Any) -> tuple[float, float | None]:
    """(factor, soft cap) that a model applies to hidden·Wᵀ: each family has its own name. `probe` checks the result."""
    text = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        scale *= float(getattr(text, name, None) or 1.0)
    scale /= float(getattr(text, "logits_scaling", None) or 1.0)  # Granite
    caps = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")  # Gemma 2, RecurrentGemma, xLSTM
    softcap = next((cap for name in caps if (cap := getattr(text, name, None))), None)
    return scale, float(softcap) if softcap else None


def measured_form(made: Tensor, logits: Tensor, expected: tuple[float, float | None]) -> tuple[float, float | None]:
    """(factor, soft cap) between the head's output and the model's logits: the expected one if it fits them.

    Else a factor without a cap if that fits: families use the same name in a config with another meaning (Granite
    divides by logits_scaling, HyperCLOVA X multiplies). If nothing fits, `probe` refuses the model.
    """
    z, want = made.double(), logits.double()

    def fits(scale: float, softcap: float | None) -> bool:
        x = z * scale
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        close = {torch.float64: 1e-6, torch.float32: 1e-4}.get(made.dtype, 0.03)
        return z.shape == want.shape and bool((x - want).abs().max() <= close * want.abs().max())

    if fits(*expected) or z.shape != want.shape:
        return expected
    scale = float((z * want).sum() / (z * z).sum())
    # Six digits: the factor of a config, not its rounding error.
    scale = float(f"{scale:.6g}")
    return (scale, None) if fits(scale, None) else expected

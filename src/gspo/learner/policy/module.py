"""The policy as the trainer sees it: packed tokens in, log-probs of the trained tokens out.

`PolicyModule` wraps trunk and head of one transformers model, so that sharding, adapters and hooks apply
to one forward. Logits exist only for the targets, a chunk at a time, and are recomputed in the backward
pass; nothing of size targets × vocabulary is ever kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo import rng
from gspo.errors import DataError
from gspo.learner.policy.packing import Completion, Packed, PackItem, pack
from gspo.learner.policy.sharding import full
from gspo.learner.ranks.world import ALONE, World
from gspo.models.flex import FLEX
from gspo.models.lora import merged_state
from gspo.models.moe import recomputing
from gspo.models.tree_attention import TREE, use_attention

# Largest |log-prob difference| between two right computations of the probe; a leak is far above it.
_PROBE_TOLERANCE = {torch.float64: 1e-8, torch.float32: 5e-4, torch.bfloat16: 0.15, torch.float16: 0.05}


class PolicyOutput(NamedTuple):
    """Per target, in the order of `Packed.target`; float32, or float64 for a float64 model."""

    logp: Tensor  # [M]
    entropy: Tensor  # [M]; detached unless asked for; empty when not computed


class PolicyModule(nn.Module):
    """Trunk and head of a causal language model, called on packed micro-batches.

    `share_prefix` says how `pack` must lay them out; `probe()` sets it by measurement. Dropout is never
    active: its noise would enter the ratio, which compares two evaluations of the same tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk_size: int = 1024,
        fp32_head: bool = True,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.chunk_size = chunk_size
        self.fp32_head = fp32_head
        self.share_prefix = True
        self.attention = TREE  # the registered implementation that shares prefixes
        self.world: World = ALONE  # the ranks that the weights are cut over (`train/shard.py`)
        self.compute_dtype: torch.dtype | None = None  # of layers that compute in another type than they keep
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise DataError(
                f"{type(model).__name__} has no plain linear head (got {type(head).__name__}): "
                "actor.path must be a causal language model"
            )
        if gradient_checkpointing:
            # A layer is recomputed during backward, long after forward has put the attention back, so the
            # recomputation switches it again. The packed layout itself travels as a keyword of the layer. A mixture's
            # experts are those of the forward: a router near a tie must not choose anew.
            model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": self._recomputed})
        self.train()

    def train(self, mode: bool = True) -> PolicyModule:
        """Training mode without dropout: only the layers that decide on checkpointing are told of it."""
        super().train(False)
        self.training = mode
        for module in self.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = mode
        return self

    def _head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)  # __init__ refused anything else
        return head

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        # Plain packing runs on the model's own implementation, whose masks transformers derives from the
        # restarting positions.
        return use_attention(self.model, self.attention) if self.share_prefix else contextlib.nullcontext()

    def _recomputed(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """What surrounds a layer's forward, and its recomputation in the backward pass."""
        attention, experts = self._attention(), recomputing()

        @contextlib.contextmanager
        def both() -> Iterator[None]:
            with attention, experts:
                yield

        return contextlib.nullcontext(), both()

    def forward(
        self, packed: Packed, *, temperature: float = 1.0, with_entropy: bool = True, entropy_grad: bool = False
    ) -> PolicyOutput:
        """log softmax(logits / temperature) at the targets, and the entropy of that distribution."""
        head = self._head()
        if not packed.num_targets:
            # A leaf of its own, so that a loss over nothing can still be driven backward.
            empty = torch.zeros(0, dtype=_output_dtype(head.weight.dtype), device=head.weight.device)
            return PolicyOutput(empty.requires_grad_(torch.is_grad_enabled()), empty.detach())
        rows, order, begins = packed.by_source
        hidden = self.hidden(packed).index_select(0, rows)  # [U, hidden]
        scale, softcap = _logit_transform(self.model.config)
        logp, entropy = _Head.apply(
            hidden,
            head.weight,
            head.bias,
            _Targets(packed.target[order], begins, scale / temperature, softcap, temperature),
            _HeadForm(self.chunk_size, self.fp32_head, with_entropy or entropy_grad, entropy_grad),
        )  # pyright: ignore[reportGeneralTypeIssues]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        row_of_target = torch.repeat_interleave(begins.diff())
        return PolicyOutput(logp[place], entropy[row_of_target][place] if len(entropy) else entropy)

    def hidden(self, packed: Packed) -> Tensor:
        """The trunk's last hidden states, [N, hidden]."""
        extra: dict[str, Any] = {"tree": packed.layout} if self.share_prefix else {}
        if not self.share_prefix and bool((packed.parent >= 0).any()):
            raise ValueError("this model runs on plain packing: pack(..., share_prefix=policy.share_prefix)")
        with self._attention():
            return self.model.base_model(
                input_ids=packed.tokens[None], position_ids=packed.positions[None], use_cache=False, **extra
            ).last_hidden_state[0]

    def probe(self) -> None:
        """Compare packed with plain log-probs on random tokens; choose the packing, or refuse the model.

        Shared prefixes first (on CUDA by the fused kernel, then without); if they disagree, plain packing; if that
        disagrees too, DataError. Catches models that keep state outside the attention (linear-attention hybrids),
        ignore the attention interface, or transform their logits in a way unknown here.
        """
        items = _probe_items(self.model.config.get_text_config().vocab_size)
        weight = self._head().weight
        tolerance = _PROBE_TOLERANCE.get(self.compute_dtype or weight.dtype, 0.1)
        with torch.no_grad():
            plain = self.plain_logp(items)
            causes = []
            ways = [(FLEX, True)] if weight.is_cuda else []
            for self.attention, self.share_prefix in [*ways, (TREE, True), (TREE, False)]:
                try:
                    packed = pack(items, share_prefix=self.share_prefix).to(weight.device)
                    error = float((self(packed, with_entropy=False).logp - plain).abs().max())
                except Exception as cause:  # whatever a foreign model does with an unknown keyword
                    causes.append(f"{type(cause).__name__}: {cause}")
                    continue
                if error <= tolerance:
                    return
                causes.append(f"log-probs differ by {error:.2g} (allowed {tolerance:.2g})")
        raise DataError(
            f"{type(self.model).__name__} cannot be trained on packed sequences: with shared prefixes, {causes[-2]}; "
            f"with plain packing, {causes[-1]}. It keeps state outside the attention or changes its logits in a way "
            "this trainer does not know; set actor.path to another architecture"
        )

    def plain_logp(self, items: list[PackItem]) -> Tensor:
        """Log-probs of every completion token by the model itself: one sequence, one forward, no packing."""
        parts, device = [], self.model.device
        for item in items:
            for completion in item.completions:
                tokens = torch.from_numpy(np.concatenate([item.prompt, completion.tokens])).to(device)
                logits = self.model(input_ids=tokens[None, :-1], use_cache=False).logits[0, len(item.prompt) - 1 :]
                logp = logits.to(_output_dtype(logits.dtype)).log_softmax(-1)
                parts.append(logp.gather(1, tokens[len(item.prompt) :, None])[:, 0])
        return torch.cat(parts)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`weight_names` as whole tensors on the CPU, one after the other; all ranks walk through it together."""
        for name, tensor in weight_names(self):
            yield name, full(tensor).to("cpu", self.compute_dtype)


def weight_names(policy: PolicyModule) -> Iterator[tuple[str, Tensor]]:
    """(name as in the model's checkpoint on disk, tensor), tied weights once, for sync, export and checkpoints.

    transformers holds experts as one tensor per layer; the names and shapes here are those of the files. An adapter is
    merged into copies of the weights that it changes: who takes these needs to know nothing of it.
    """
    model = policy.model
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in merged_state(model).items() if name not in tied}
    yield from sorted(revert_weight_conversion(model, state).items())


class _Targets(NamedTuple):
    token: Tensor  # [M] sorted by hidden row
    begins: Tensor  # [U+1] where each hidden row's targets begin
    scale: float  # of hidden·Wᵀ, before soft-capping
    softcap: float | None
    temperature: float


class _HeadForm(NamedTuple):
    chunk_size: int
    fp32: bool
    with_entropy: bool
    entropy_grad: bool


class _Head(torch.autograd.Function):
    """Log-probs of targets under softmax(logits/T), chunk by chunk, with exact gradients.

    logits = hidden·Wᵀ + b, then the model's own scaling and soft cap. For upstream gradients g (per target)
    and h (per row's entropy H): d logits/T = g·(onehot − p) − h·p·(log p + H). Logits are recomputed in the
    backward pass: g is not known before it, and Σᵢ gᵢ(onehotᵢ − pᵢ)hiddenᵢᵀ does not factor.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: _Targets, form: _HeadForm
    ) -> tuple[Tensor, Tensor]:
        logits = _Logits(hidden, weight, bias, targets, form)
        logp = hidden.new_empty(len(targets.token), dtype=logits.out_dtype)
        lse = hidden.new_empty(len(hidden), dtype=logits.out_dtype)
        entropy = torch.empty_like(lse) if form.with_entropy else lse.new_empty(0)
        for rows, mine, row, token in logits.chunks():
            z, _ = logits(rows)  # [c, V]
            chosen = z[row, token]
            peak = z.amax(-1, keepdim=True)
            z.sub_(peak)
            if form.with_entropy:
                e = torch.exp(z, out=logits.buffer(1, len(z)))
                total = e.sum(-1)
                log_total = total.log()
                # H = log Σe − Σ e·z / Σe, with z measured from the peak
                entropy[rows] = log_total - e.mul_(z).sum(-1) / total
            else:
                log_total = z.exp_().sum(-1).log()
            lse[rows] = log_total + peak[:, 0]
            logp[mine] = chosen - lse[rows][row]
        ctx.targets, ctx.form = targets, form
        ctx.save_for_backward(hidden, weight, bias, lse, entropy)
        if not form.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        hidden, weight, bias, lse, entropy = ctx.saved_tensors
        targets, form = ctx.targets, ctx.form
        logits = _Logits(hidden, weight, bias, targets, form)
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        # Sums over all chunks are float32 even where each chunk's product is not.
        d_weight: Tensor | None = None
        d_bias = (
            torch.zeros_like(logits.bias, dtype=logits.out_dtype) if want_bias and logits.bias is not None else None
        )
        for rows, mine, row, token in logits.chunks():
            z, slope = logits(rows)
            grad = grads[0][mine]
            row_grad = grad.new_zeros(len(z)).index_add_(0, row, grad)  # Σ over the targets of a row
            z.sub_(lse[rows, None])  # log p
            if form.entropy_grad:
                p = torch.exp(z, out=logits.buffer(1, len(z)))
                z.add_(entropy[rows, None]).mul_(grads[1][rows, None]).add_(row_grad[:, None]).mul_(p).neg_()
            else:
                z.exp_().mul_(row_grad.neg_()[:, None])
            z.index_put_((row, token), grad, accumulate=True)
            if slope is not None:
                z.mul_(slope)
            if d_bias is not None:
                d_bias.add_(z.sum(0), alpha=targets.scale)
            z = z.to(logits.weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = (z @ logits.weight).mul_(targets.scale).to(hidden.dtype)
            if want_weight:
                h = logits.hidden(rows)
                if d_weight is None:  # the first chunk makes it: zeros would be another pass over vocabulary × hidden
                    d_weight = (z.T @ h).mul_(targets.scale).to(logits.out_dtype)
                elif h.dtype == d_weight.dtype:
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


class _Logits:
    """Chunks of logits/T, float32 or float64, written into buffers that every chunk uses again."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: _Targets, form: _HeadForm) -> None:
        dtype = _output_dtype(weight.dtype) if form.fp32 else weight.dtype
        self.out_dtype = _output_dtype(weight.dtype)
        self.weight, self._hidden = weight.to(dtype), hidden
        self.bias = None if bias is None else bias.to(dtype)
        self._targets = targets
        self._begins = targets.begins.tolist()
        self._chunk = min(form.chunk_size, len(hidden))
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, which: int, num_rows: int) -> Tensor:
        if which not in self._buffers:
            self._buffers[which] = self.weight.new_empty(self._chunk, len(self.weight), dtype=self.out_dtype)
        return self._buffers[which][:num_rows]

    def chunks(self) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Hidden rows, their targets, and of each such target its row inside the chunk and its token."""
        counts = self._targets.begins.diff()
        for low in range(0, len(self._hidden), self._chunk):
            high = min(low + self._chunk, len(self._hidden))
            mine = slice(self._begins[low], self._begins[high])
            yield slice(low, high), mine, torch.repeat_interleave(counts[low:high]), self._targets.token[mine]

    def hidden(self, rows: slice) -> Tensor:
        return self._hidden[rows].to(self.weight.dtype)

    def __call__(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        h, scale, softcap = self.hidden(rows), self._targets.scale, self._targets.softcap
        # The scale multiplies [c, hidden], not [c, V]: temperature costs nothing.
        if self.weight.dtype == self.out_dtype:
            z = torch.mm(h * scale, self.weight.T, out=self.buffer(0, len(h)))
        else:
            z = torch.mm(h, self.weight.T).to(self.out_dtype).mul_(scale)
        if self.bias is not None:
            z.add_(self.bias, alpha=scale)
        slope = None
        if softcap is not None:
            # cap·tanh(x/cap)/T on z = x/T
            bound = softcap / self._targets.temperature
            z.div_(bound).tanh_()
            slope = 1 - z * z
            z.mul_(bound)
        return z, slope


def _output_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logit_transform(config: Any) -> tuple[float, float | None]:
    """What a model does to hidden·Wᵀ: factor (Cohere, Granite) and soft cap (Gemma 2). The probe checks it."""
    text = config.get_text_config()
    scale = float(getattr(text, "logit_scale", None) or 1.0) / float(getattr(text, "logits_scaling", None) or 1.0)
    softcap = getattr(text, "final_logit_softcapping", None)
    return scale, float(softcap) if softcap else None


def _probe_items(vocab_size: int) -> list[PackItem]:
    """Two uneven groups, one with a one-token completion: every kind of edge the packing has."""
    draw = rng.generator(0, "probe")
    items, index = [], 0
    for num_prompt, lengths in ((9, (5, 1, 8)), (4, (7, 3))):
        completions = []
        for num in lengths:
            completions.append(Completion(draw.integers(0, vocab_size, num), np.ones(num, bool), index))
            index += 1
        items.append(PackItem(draw.integers(0, vocab_size, num_prompt), tuple(completions)))
    return items

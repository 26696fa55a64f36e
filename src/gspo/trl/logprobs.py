"""Log-probs of completions from packed rows: a group's prompt is computed once, and logits at trained tokens only."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.learner import LOGP_TOLERANCE, Completion, PackItem, PolicyModule, filler, packed_parts, probe

PACKED = "gspo_packed"  # the argument of the model's forward that asks for log-probs of a packed row


class PackedModel:
    """A causal language model whose `forward(gspo_packed=…)` returns log-probs and entropies of a packed row.

    The call goes through the module that the trainer passes, so wrappers (DistributedDataParallel, peft, autocast)
    act as in TRL's own call. Every other call of the model is as before.
    """

    def __init__(self, model: Any, *, checkpointing: bool, temperature: float, dtype: torch.dtype | None) -> None:
        training = model.training
        self.policy = PolicyModule(model, gradient_checkpointing=checkpointing)
        self.policy.compute_dtype = dtype
        self.checkpointing = checkpointing
        try:
            probe(self.policy)  # DataError for a model whose log-probs it cannot compute
        finally:
            model.train(training)  # TRL reads the mode of a step from it
        plain = model.forward

        # The signature stays: `generate` reads it.
        @functools.wraps(plain)
        def forward(*args: Any, gspo_packed: Any = None, **kwargs: Any) -> Any:
            if gspo_packed is None:
                return plain(*args, **kwargs)
            packed, with_entropy, entropy_grad = gspo_packed
            out = self.policy(packed, temperature=temperature, with_entropy=with_entropy, entropy_grad=entropy_grad)
            return out.logp, out.entropy

        model.forward = forward

    def __call__(
        self, model: Any, items: list[PackItem], trained: Tensor, *, max_tokens: int, entropy: bool, grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and entropies, [B, T], 0 where `trained` [B, T] is False. `model` is this one, as it is wrapped."""
        device = next(model.parameters()).device
        if self.checkpointing and torch.is_grad_enabled():
            self.policy.checkpoint_layers()  # TRL switches it off and on again around generation
        parts = [part for part in packed_parts(self.policy, items, max_tokens) if part.num_targets]
        places, logps, entropies = [], [], []
        for packed in parts or [filler().to(device)]:
            logp, of_tokens = model(**{PACKED: (packed, entropy or grad, grad)})  # [M] each
            logps.append(logp)
            entropies.append(of_tokens)
            if not packed.is_filler:
                which, at = trained[packed.index.cpu()].nonzero(as_tuple=True)  # [M], in the order of the targets
                places.append((packed.index.cpu()[which], at))
        return self._rows(places, logps, trained, device), (
            self._rows(places, entropies, trained, device) if entropy else None
        )

    @staticmethod
    def _rows(places: list[tuple[Tensor, Tensor]], values: list[Tensor], trained: Tensor, device: Any) -> Tensor:
        found = values[0].new_zeros(trained.shape)  # [B, T]
        if not places:
            # Zero, with a gradient of zero: the optimizer steps, and other processes wait for every gradient.
            return found + 0.0 * values[0].sum()
        rows, at = (torch.cat(part).to(device) for part in zip(*places, strict=True))
        return found.index_put((rows, at), torch.cat(values))


def pack_rows(input_ids: Tensor, attention_mask: Tensor, trained: Tensor) -> list[PackItem]:
    """Left-padded prompts [B, P] and right-padded completions, [B, P + T], as groups with equal prompts."""
    num_prompt = input_ids.shape[1] - trained.shape[1]
    ids, seen, mask = (x.cpu().numpy() for x in (input_ids, attention_mask.bool(), trained))
    groups: dict[bytes, tuple[Any, list[Completion]]] = {}
    for i, row in enumerate(ids):
        prompt, tokens = row[:num_prompt][seen[i, :num_prompt]], row[num_prompt:]
        groups.setdefault(prompt.tobytes(), (prompt, []))[1].append(Completion(tokens, mask[i], i))
    return [PackItem(prompt, tuple(completions)) for prompt, completions in groups.values()]


def disagreement(ours: Tensor, theirs: Tensor, trained: Tensor, dtype: torch.dtype) -> str:
    """Why our log-probs of a batch are not TRL's; empty if they are, up to rounding."""
    gap = float((ours - theirs)[trained].abs().max())
    allowed = LOGP_TOLERANCE.get(dtype, 0.1)
    return "" if gap <= allowed else f"log-probs of padded rows differ by {gap:.2g} (allowed {allowed:.2g})"


def probe_rows(vocab_size: int, pad: int, device: Any) -> tuple[Tensor, Tensor, int]:
    """Ids [4, 16], attention mask and completion length: two groups whose prompts and completions are padded."""
    draw = np.random.default_rng(0)
    ids, seen = draw.integers(0, vocab_size, (4, 16)), np.ones((4, 16), np.int64)
    ids[1, :9], ids[3, :9] = ids[0, :9], ids[2, :9]
    seen[2:, :5] = 0  # a prompt of 4 tokens beside one of 9
    seen[1, 13:] = 0
    ids[seen == 0] = pad
    return torch.from_numpy(ids).to(device), torch.from_numpy(seen).to(device), 7

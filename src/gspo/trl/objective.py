"""Objectives of gspo inside TRL's training loop: gspo_token, ratios per turn, corrections, functions of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gspo import objectives
from gspo.algorithms import ALGORITHMS, GATES
from gspo.objectives import own, turn_cuts
from gspo.system import find_function
from gspo.trl.config import GSPOConfig


class Loss:
    """The loss of a micro-batch of TRL, divided by one number per optimizer update."""

    def __init__(self, args: GSPOConfig) -> None:
        assert args.objective is not None
        self.name: str | Callable[..., Any] = args.objective
        given: dict[str, Any] = {
            "kl_coef": args.beta, "correction": args.correction, "max_new_tokens": args.max_completion_length
        }  # fmt: skip
        eps = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high
        if args.objective in ALGORITHMS:
            self.aggregation: str = ALGORITHMS[args.objective].aggregation
            has_range = GATES[ALGORITHMS[args.objective].gate].has_range
            names = ("clip_low", "clip_high") if has_range else ()
        else:
            self.name = find_function(args.objective)
            self.aggregation = "sequence_mean"
            names = [name for name in ("eps_clip", "eps_clip_higher") if name in own.signature_of(self.name).settings]
        given |= dict(zip(names, eps, strict=False)) | args.settings
        self.settings = own.merged(self.name, given) if callable(self.name) else given
        if callable(self.name):
            own.probe(self.name, self.settings)
        self.aggregation = given.get("aggregation", self.aggregation)
        self.per_turn = args.per_turn

    def __call__(
        self, logp: Tensor, inputs: dict[str, Any], mask: Tensor, entropy: Tensor, scale: float, num_tokens: Tensor
    ) -> objectives.Objective:
        """`scale`: micro-batches per update; `num_tokens`: trained tokens of the update, per process."""
        old, sampled = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
        tensors: dict[str, Any] = {
            "logp": logp,
            "proximal_logp": logp.detach() if old is None else old,
            "behavior_logp": sampled,
            "reference_logp": inputs.get("ref_per_token_logps"),
            "entropy": entropy,
        }
        # DistributedDataParallel takes the mean of the gradients, so a process counts its own sequences only.
        denominator = objectives.denominator(
            "gspo",
            num_sequences=logp.new_tensor(len(logp) * scale),
            num_tokens=num_tokens.to(logp).clamp(min=1),
            max_new_tokens=self.settings["max_new_tokens"],
            aggregation=self.aggregation,
        )
        advantage, layout, weight = inputs["advantages"], {"mask": mask}, None
        if self.per_turn:
            cuts, sequence = turns(mask)
            tensors = {name: None if x is None else x[mask] for name, x in tensors.items()}  # [N]
            advantage = advantage[sequence] if advantage.dim() == 1 else advantage[mask]
            layout = {"mask": None, "cu_seqlens": cuts}
            if self.aggregation == "sequence_mean":
                weight = cuts.diff() / mask.sum(-1)[sequence]  # [U] the turn's share of its sequence
        return objectives.loss(
            self.name,
            tensors.pop("logp"),
            tensors.pop("proximal_logp"),
            advantage,
            **layout,
            **tensors,
            weight=weight,
            denominator=denominator,
            **self.settings,
        )


def turns(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Runs of trained tokens, [B, T]: (where each begins among the trained tokens [U + 1], sequence of each [U]).

    >>> turns(torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]]).bool())
    (tensor([0, 2, 3, 4]), tensor([0, 0, 1]))
    """
    begins = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))  # [B, T]
    lengths = mask.sum(-1)  # [B]
    return turn_cuts(begins.long().cumsum(-1)[mask], torch.nn.functional.pad(lengths.cumsum(0), (1, 0)))

"""The vectors as objects (docs/conformance.md has the format), and what an implementation is given and returns."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from gspo.errors import ConfigError

VECTORS = Path(__file__).parent / "vectors"


@dataclass(frozen=True)
class Answer:
    """What the paper gives, or one of the known answers to what it leaves open; `loss` None: not finite."""

    name: str
    arrays: Mapping[str, Tensor]  # gradient [B, T], clipped [B, T], log_s [B]; or advantage, logp
    loss: float | None = None
    scale: float = 1.0  # Σ |terms of the loss|
    clip_fraction_sequences: float = 0.0
    clip_fraction_tokens: float = 0.0


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # loss, split, packed, advantage, logp
    objective: str
    dtype: str
    decided: bool  # by the source; else any answer is as good
    claim: str
    source: str
    meaning: str  # of a difference, for a run
    bites: str  # when
    settings: Mapping[str, Any]
    tolerance: float
    inputs: Mapping[str, Tensor]
    answers: tuple[Answer, ...]
    parts: tuple[tuple[int, int], ...] = ()
    temperature: float = 1.0


@functools.cache
def load(folder: Path = VECTORS) -> tuple[Case, ...]:
    """All cases, in the order of the file."""
    suite = json.loads((folder / "suite.json").read_text(encoding="utf-8"))
    arrays = load_file(folder / "arrays.safetensors")

    def below(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}

    found = []
    for entry in suite["cases"]:
        here = below(f"{entry['name']}/")
        answers = [Answer(**a, arrays=below(f"{entry['name']}/answer{i}/")) for i, a in enumerate(entry["answers"])]
        entry |= {"answers": tuple(answers), "parts": tuple(map(tuple, entry.get("parts", ())))}
        inputs = {name: x for name, x in here.items() if "/" not in name}
        found.append(Case(**entry, inputs=inputs, tolerance=suite["tolerance"][entry["dtype"]]))
    return tuple(found)


def case_named(name: str) -> Case:
    for case in load():
        if case.name == name:
            return case
    raise ConfigError(f"there is no case {name!r}; the cases are {', '.join(case.name for case in load())}")


@dataclass(frozen=True)
class Batch:
    """The inputs of a loss: [B, T] with a mask, or packed [N] with cu_seqlens."""

    objective: str
    settings: Mapping[str, Any]
    logp: Tensor  # log π_θ; the gradient is taken with respect to it
    proximal_logp: Tensor  # log π_old
    advantage: Tensor  # [B], or token-shaped
    mask: Tensor  # bool
    behavior_logp: Tensor | None = None
    reference_logp: Tensor | None = None
    turn: Tensor | None = None  # int, number of the turn of each token
    cu_seqlens: Tensor | None = None  # [B + 1], packed only
    # Of the whole update, where this is one of its micro-batches.
    num_parts: int = 1
    num_sequences: int | None = None
    num_tokens: int | None = None
    num_trained: int | None = None  # sequences with trained tokens

    @property
    def token_advantage(self) -> Tensor:
        """[B, T]."""
        return self.advantage if self.advantage.ndim > 1 else self.advantage[:, None].expand_as(self.mask)

    def rows(self, first: int, last: int) -> dict[str, Tensor]:
        return {name: x[first:last] for name, x in vars(self).items() if isinstance(x, Tensor)}


class NotOfferedError(Exception):
    """The implementation has nothing for this case; the message says what is missing."""


@dataclass(frozen=True)
class Implementation:
    """A loss of anybody. `loss` returns a scalar tensor, or a pair of it and the clip fraction that it reports."""

    name: str
    loss: Callable[[Batch], Tensor | tuple[Tensor, float | None]]
    objectives: frozenset[str] = frozenset({"gspo"})
    advantage: Callable[[Tensor, Tensor], Tensor] | None = None  # (rewards, groups), [n] each
    logp: Callable[[Tensor, Tensor, float], Tensor] | None = None  # (logits [T, V], tokens [T], temperature)
    version: str = ""
    file: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)  # how it was called, where that is a choice


def batch_of(case: Case, logp: Tensor) -> Batch:
    """The batch of a case around its leaf; log-probs in the case's type, advantages at least in float32."""
    inputs, dtype = case.inputs, getattr(torch, case.dtype)
    names = ("proximal_logp", "behavior_logp", "reference_logp")
    # Copies: an implementation that writes into its inputs must not change the suite.
    others = {name: inputs[name].to(dtype, copy=True) for name in names if name in inputs}
    return Batch(
        case.objective,
        case.settings,
        logp,
        advantage=inputs["advantage"].clone(),
        mask=inputs["mask"] != 0,
        turn=inputs["turn"].clone() if "turn" in inputs else None,
        proximal_logp=others["proximal_logp"],
        behavior_logp=others.get("behavior_logp"),
        reference_logp=others.get("reference_logp"),
    )

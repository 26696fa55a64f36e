"""`gspo models check`: which layout and which sampler a model gets, and how exact they are.

The gradient of GSPO's loss is compared with the model's own padded forward pass, for all weights, and sampled log-probs
with the trainer's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from gspo.doctor.checks import gradients, parity
from gspo.errors import GspoError
from gspo.learner import WORDS, PolicyModule, probe
from gspo.models import load_model
from gspo.sampling import LocalSampler

COLUMNS = ("model", "training layout", "sampler", "gradients", "log-probs", "seconds")


@dataclass(frozen=True)
class Checked:
    """The outcome for one model. `refused` is the reason if it cannot be trained or sampled."""

    name: str
    model_class: str = ""
    layout: str = ""
    engine: str = ""
    gradient_gap: float | None = None  # ‖∇ − ∇ plain‖ / ‖∇ plain‖ over all weights
    logp_gap: float | None = None  # largest |log-prob of the sampler − of the trainer|
    gradient_bound: float = 0.0
    logp_bound: float = 0.0
    seconds: float = 0.0
    refused: str = ""
    not_built: str = ""  # transformers itself cannot build or run it here

    def cells(self) -> tuple[str, ...]:
        if self.refused or self.not_built:
            return self.name, self.refused or f"not built: {self.not_built}", "", "", "", f"{self.seconds:.1f}"
        gaps = [f"{gap:.1e}" if gap is not None else "" for gap in (self.gradient_gap, self.logp_gap)]
        return self.name, WORDS[self.layout], self.engine, *gaps, f"{self.seconds:.1f}"  # pyright: ignore


def check_model(path: str) -> Checked:
    """Check a model that `actor.path` could name."""
    start = time.perf_counter()
    known: dict[str, Any] = {"name": path}
    try:
        known |= measured(load_model(path))
    except GspoError as error:
        known["refused"] = str(error)
    return Checked(**known, seconds=time.perf_counter() - start)


def measured(model: PreTrainedModel) -> dict[str, Any]:
    """The fields of `Checked` of a loaded model, with the bounds of its dtype."""
    known: dict[str, Any] = {"model_class": type(model).__name__}
    try:
        policy = PolicyModule(model)
        known["layout"] = probe(policy).layout
        known["gradient_gap"], known["gradient_bound"] = gradients(policy)
        sampler = LocalSampler(model, seed=0, eos_token_ids=())
        try:
            known["engine"] = str(sampler.health()["engine"])
            known["logp_gap"], known["logp_bound"] = parity(policy, sampler, model.dtype)
        finally:
            sampler.close()
    except GspoError as error:
        known["refused"] = str(error)
    return known


def is_exact(row: Checked) -> bool:
    """Whether a model that can be built is trained and sampled within the bounds."""
    if row.refused or row.gradient_gap is None or row.logp_gap is None:
        return False
    return row.gradient_gap <= row.gradient_bound and row.logp_gap <= row.logp_bound

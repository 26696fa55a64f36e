"""`gspo models check`: which layout and which sampler a model gets, and how exact they are.

An architecture of transformers is checked as a tiny model with random weights in float64, a folder as it is. The
gradient of GSPO's loss is compared with the model's own padded forward pass, for all weights, and sampled log-probs
with the trainer's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf

from gspo.doctor import vision
from gspo.doctor.checks import gradients, parity
from gspo.errors import GspoError
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.probe import WORDS, probe
from gspo.models import tiny
from gspo.models.loading import load_model
from gspo.sampling.local.engine import LocalSampler

COLUMNS = ("model", "training layout", "sampler", "gradients", "log-probs", "seconds")
# Bounds of tiny models: of the gradient in float64, and of log-probs, which samples carry in float32.
GRADIENT, LOGP = 1e-8, 1e-5
TYPES = tuple(dict.fromkeys((*tiny.CAUSAL_TYPES, *vision.TYPES)))  # model types that can be checked


@dataclass(frozen=True)
class Checked:
    """The outcome for one model. `refused` is the reason if it cannot be trained or sampled."""

    name: str
    model_class: str = ""
    layout: str = ""
    engine: str = ""
    gradient_gap: float | None = None  # ‖∇ − ∇ plain‖ / ‖∇ plain‖ over all weights
    logp_gap: float | None = None  # largest |log-prob of the sampler − of the trainer|
    gradient_bound: float = GRADIENT
    logp_bound: float = LOGP
    seconds: float = 0.0
    refused: str = ""
    not_built: str = ""  # transformers itself cannot build or run it here

    def cells(self) -> tuple[str, ...]:
        if self.refused or self.not_built:
            return self.name, self.refused or f"not built: {self.not_built}", "", "", "", f"{self.seconds:.1f}"
        gaps = [f"{gap:.1e}" if gap is not None else "" for gap in (self.gradient_gap, self.logp_gap)]
        return self.name, WORDS[self.layout], self.engine, *gaps, f"{self.seconds:.1f}"  # pyright: ignore


def check_model(name: str) -> Checked:
    """Check a model type of transformers, or a model that `actor.path` could name."""
    start = time.perf_counter()
    known: dict[str, Any] = {"name": name}
    is_type = name in TYPES
    try:
        with float64_inside() if is_type else contextlib.nullcontext():
            known |= _measured(name, is_type)
    except GspoError as error:
        known["refused"] = str(error)
    return Checked(**known, seconds=time.perf_counter() - start)


def _measured(name: str, is_type: bool) -> dict[str, Any]:
    if name in vision.TYPES:
        return vision.measured(name)
    model = _tiny(name) if is_type else load_model(name)
    if isinstance(model, str):
        return {"not_built": model}
    known: dict[str, Any] = {"model_class": type(model).__name__}
    try:
        policy = PolicyModule(model)
        known["layout"] = probe(policy).layout
        known["gradient_gap"], bound = gradients(policy)
        known["gradient_bound"] = GRADIENT if is_type else bound
        sampler = LocalSampler(model, seed=0, eos_token_ids=())
        try:
            known["engine"] = str(sampler.health()["engine"])
            known["logp_gap"], bound = parity(policy, sampler, model.dtype)
            known["logp_bound"] = LOGP if is_type else bound
        finally:
            sampler.close()
    except GspoError as error:
        known["refused"] = str(error)
    return known


@contextlib.contextmanager
def float64_inside() -> Iterator[None]:
    """Casts to float32 go to float64: transformers computes norms and rotations in float32 whatever the dtype.

    Only for tiny models in a process of their own: it replaces names of torch.
    """
    kept = torch.float32, torch.float, torch.Tensor.float
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # XGLM writes the smallest float64 into a tensor of the default dtype
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept  # pyright: ignore[reportAttributeAccessIssue]
        torch.set_default_dtype(default)


def _tiny(name: str) -> Any:
    """The tiny model, or why transformers cannot build or run it."""
    try:
        model = tiny.tiny_model(name, torch.float64)
        with torch.no_grad():
            model(input_ids=torch.arange(1, 9)[None], use_cache=False)
    except Exception as error:  # whatever the code of an architecture raises
        first = (str(error).splitlines() or [""])[0][:160]
        return first if isinstance(error, GspoError) else f"{type(error).__name__}: {first}"
    return model


def is_exact(row: Checked) -> bool:
    """Whether a model that can be built is trained and sampled within the bounds; wider ones for a folder's dtype."""
    if row.refused or row.gradient_gap is None or row.logp_gap is None:
        return False
    return row.gradient_gap <= row.gradient_bound and row.logp_gap <= row.logp_bound


def check_families(names: Iterable[str], say: Callable[[Checked], None]) -> list[Checked]:
    rows = []
    for name in names:
        rows.append(check_model(name))
        say(rows[-1])
    return rows


def families_page(rows: Sequence[Checked]) -> str:
    """docs/model_families.md."""
    built = [row for row in rows if not row.not_built]
    trained = [row for row in built if not row.refused]
    by_layout = {words: sum(row.layout == layout for row in trained) for layout, words in WORDS.items()}
    by_engine: dict[str, int] = {}
    for row in trained:
        by_engine[row.engine] = by_engine.get(row.engine, 0) + 1
    lines = [
        "# Model families",
        "",
        f"Written by `gspo models check --all --write docs/model_families.md` with transformers {tf.__version__}. "
        "Every causal language model of transformers, as a tiny model with random weights in float64. Models with "
        f"images in every prompt: {', '.join(vision.TYPES)}.",
        "",
        f"{len(trained)} of {len(rows)} model types train and are sampled. The others are listed at the end with the "
        "reason. "
        + "Training layouts: " + ", ".join(f"{words} {num}" for words, num in by_layout.items())
        + ". Samplers: " + ", ".join(f"{name} {num}" for name, num in by_engine.items()) + ". "
        + "[models.md](models.md) explains both.",
        "",
        "*Gradients*: ‖∇ − ∇ plain‖ / ‖∇ plain‖ of GSPO's loss over all weights in float64, against the model's own "
        f"forward pass on padded rows; at most {GRADIENT:g}. *Log-probs*: largest difference between the sampler and "
        f"the trainer; at most {LOGP:g}, because samples carry float32.",
        "",
        f"| {' | '.join(COLUMNS[:-1])} |",
        "|" + "---|" * (len(COLUMNS) - 1),
        *(f"| {' | '.join(row.cells()[:-1])} |" for row in trained),
    ]  # fmt: skip
    for title, some in (("Refused", [r for r in built if r.refused]), ("Exceptions", [r for r in rows if r.not_built])):
        if some:
            lines += ["", f"## {title}", "", "| model | reason |", "|---|---|"]
            lines += [f"| {row.name} | {(row.refused or row.not_built).replace('|', '/')} |" for row in some]
    return "\n".join(lines) + "\n"

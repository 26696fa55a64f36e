"""`gspo models check`: which layout and which sampler a model gets, and how exact they are.

An architecture of transformers is checked as a tiny model with random weights in float64, a folder as it is. The
gradient of GSPO's loss is compared with the model's own padded forward pass, for all weights, and sampled log-probs
with the trainer's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gspo.doctor.checks import gradients, parity
from gspo.errors import GspoError
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.probe import WORDS, probe
from gspo.models import tiny
from gspo.models.loading import load_model
from gspo.sampling.local.engine import LocalSampler

COLUMNS = ("model", "training layout", "sampler", "gradients", "log-probs", "seconds")
# A model that computes parts in float32 whatever its dtype cannot be compared more exactly than this.
EXACT, FLOAT32_INSIDE = 1e-8, 1e-4


@dataclass(frozen=True)
class Checked:
    """The outcome for one model. `refused` is the reason if it cannot be trained or sampled."""

    name: str
    model_class: str = ""
    layout: str = ""
    engine: str = ""
    gradient_gap: float | None = None  # ‖∇ − ∇ plain‖ / ‖∇ plain‖ over all weights
    logp_gap: float | None = None  # largest |log-prob of the sampler − of the trainer|
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
    try:
        if name in tiny.CAUSAL_TYPES:
            model = _tiny(name)
            if isinstance(model, str):
                return Checked(name, not_built=model, seconds=time.perf_counter() - start)
        else:
            model = load_model(name)
        known["model_class"] = type(model).__name__
        policy = PolicyModule(model)
        known["layout"] = probe(policy).layout
        known["gradient_gap"] = gradients(policy)[0]
        sampler = LocalSampler(model, seed=0, eos_token_ids=())
        try:
            known["engine"] = str(sampler.health()["engine"])
            known["logp_gap"] = parity(policy, sampler, model.dtype)[0]
        finally:
            sampler.close()
    except GspoError as error:
        known["refused"] = str(error)
    return Checked(**known, seconds=time.perf_counter() - start)


def _tiny(name: str) -> Any:
    """The tiny model, or why transformers cannot build or run it."""
    try:
        model = tiny.tiny_model(name, torch.float64)
        with torch.no_grad():
            model(input_ids=torch.arange(1, 9)[None], use_cache=False)
    except Exception as error:  # whatever the code of an architecture raises
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else type(error).__name__
    return model


def is_exact(row: Checked) -> bool:
    """Whether a model that was not refused is within the bounds."""
    gaps = [gap for gap in (row.gradient_gap, row.logp_gap) if gap is not None]
    return not row.refused and (bool(row.not_built) or all(gap <= FLOAT32_INSIDE for gap in gaps))


def check_models(names: Iterable[str], say: Callable[[Checked], None]) -> list[Checked]:
    rows = []
    for name in names:
        rows.append(check_model(name))
        say(rows[-1])
    return rows


def page(rows: Sequence[Checked], versions: str) -> str:
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
        f"Written by `gspo models check --all` with {versions}. Every causal language model of transformers, as a tiny "
        "model with random weights in float64.",
        "",
        f"{len(built)} of {len(rows)} model types can be built; {len(built) - len(trained)} of them are refused. "
        + "Training layouts: " + ", ".join(f"{words} {num}" for words, num in by_layout.items())
        + ". Samplers: " + ", ".join(f"{name} {num}" for name, num in by_engine.items()) + ". "
        + "[models.md](models.md) explains both.",
        "",
        "*Gradients*: ‖∇ − ∇ plain‖ / ‖∇ plain‖ of GSPO's loss over all weights, against the model's own forward pass on "
        "padded rows. *Log-probs*: largest difference between the sampler and the trainer. Values near 1e-7 are models "
        "that compute norms, rotary angles or states in float32 whatever their dtype.",
        "",
        f"| {' | '.join(COLUMNS[:-1])} |",
        "|" + "---|" * (len(COLUMNS) - 1),
        *(f"| {' | '.join(row.cells()[:-1])} |" for row in trained),
    ]  # fmt: skip
    for title, some in (("Refused", [r for r in built if r.refused]), ("Not built", [r for r in rows if r.not_built])):
        if some:
            lines += ["", f"## {title}", "", "| model | reason |", "|---|---|"]
            lines += [f"| {row.name} | {(row.refused or row.not_built).replace('|', '/')} |" for row in some]
    return "\n".join(lines) + "\n"


def as_json(rows: Sequence[Checked]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]

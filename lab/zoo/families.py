"""The zoo: every causal architecture of transformers as a tiny model with random weights in float64.

`gspo models check --all` and `gspo models check TYPE` compare its gradients and sampled log-probs with those of the
model's own forward pass, as `gspo.doctor.models` does for a folder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers as tf

from gspo.doctor import COLUMNS, Checked, models
from gspo.errors import GspoError
from gspo.learner import WORDS
from lab.zoo import text, vision

# Bounds of tiny models: of the gradient in float64, and of log-probs, which samples carry in float32.
GRADIENT, LOGP = 1e-8, 1e-5
TYPES = tuple(dict.fromkeys((*text.CAUSAL_TYPES, *vision.TYPES)))  # model types that can be checked


def check_type(name: str) -> Checked:
    """Check a model type of transformers."""
    start = time.perf_counter()
    known: dict[str, Any] = {"name": name}
    try:
        with float64_inside():
            known |= _measured(name)
    except GspoError as error:
        known["refused"] = str(error)
    return Checked(**known, seconds=time.perf_counter() - start)


def _measured(name: str) -> dict[str, Any]:
    bounds = {"gradient_bound": GRADIENT, "logp_bound": LOGP}
    if name in vision.TYPES:
        return vision.measured(name) | bounds
    model = _tiny(name)
    return {"not_built": model} if isinstance(model, str) else models.measured(model) | bounds


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
        model = text.tiny_model(name, torch.float64)
        with torch.no_grad():
            model(input_ids=torch.arange(1, 9)[None], use_cache=False)
    except Exception as error:  # whatever the code of an architecture raises
        first = (str(error).splitlines() or [""])[0][:160]
        return first if isinstance(error, GspoError) else f"{type(error).__name__}: {first}"
    return model


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

"""compare.html: a comparison as one file, with the charts, style and content policy of the report page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from gspo.errors import ConfigError
from gspo.report.compare.arms import Arm
from gspo.report.compare.compare import Comparison
from gspo.report.compare.terminal import show_value
from gspo.report.page.page import html_page
from gspo.stats import Floats

SCRIPTS = ("uPlot.iife.min.js", "text.js", "charts.js", "compare.js")
POINTS = 2000  # per curve: more than a screen can show
SHARES = frozenset(
    {"eval/accuracy", "eval/pass_at_k", "reward/zero_variance_groups", "length/truncated", "clip/tokens"}
)
WORDS = {
    "eval/accuracy": "held-out problems",
    "eval/reward": "held-out problems",
    "reward/mean": "mean of the batch",
    "eval/loss": "nats per token of held-out rows",
    "clip/sequences": "share of the sequences of mini-batches ≥ 2, low and high together",
    "policy/entropy": "nats per token",
    "length/mean": "tokens per completion",
    "policy/kl_behavior": "nats per token, to the sampler",
    "grad/norm": "before clipping",
    "time/step_s": "seconds, including evaluation",
}


def write_page(found: Comparison, to: Path) -> Path:
    """Write the page atomically."""
    boot = {
        "title": " against ".join(arm.name for arm in found.arms[:4]) + (" …" if len(found.arms) > 4 else ""),
        "arms": [{"name": arm.name, "runs": [_run(run) for run in arm.runs]} for arm in found.arms],
        "outcome": [[what, list(cells)] for what, cells in found.outcome],
        "config": [[key, [show_value(value) for value in values]] for key, values in found.config],
        "notes": list(found.notes),
        "curves": [_curve(found.arms, metric, big=i == 0) for i, metric in enumerate(found.metrics)],
    }
    tmp = to.with_name(f".{to.name}.tmp")
    try:
        with open(tmp, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(
                html_page(f"{boot['title']} · gspo compare", boot, template="compare.html", scripts=SCRIPTS)
            )
        os.replace(tmp, to)
    except OSError as cause:
        raise ConfigError(f"{to} cannot be written: {cause.strerror}; choose another file with --out") from cause
    return to


def _run(run: Any) -> dict[str, Any]:
    seed = run.config.get("seed")
    return {"name": run.name, "path": str(run.path), "steps": run.steps, "seed": None if seed is None else str(seed)}


def _curve(arms: tuple[Arm, ...], metric: str, *, big: bool) -> dict[str, Any]:
    """One metric of all arms over the union of their steps; null where an arm has no value."""
    is_share = metric in SHARES or metric.startswith("clip/sequences")
    bands = [arm.band(metric) for arm in arms]
    runs = [[run.curve(metric) for run in arm.runs] for arm in arms]
    x = np.unique(np.concatenate([*(b.steps for b in bands), *(at for arm in runs for at, _ in arm)]))
    every = -(-len(x) // POINTS)
    note = WORDS.get(metric, "") + (f"; every {every}th step" if every > 1 else "")
    x = x[:: max(every, 1)]
    drawn = [
        {
            "mean": _over(x, band.steps, band.mean),
            "low": _over(x, band.steps, np.maximum(band.low, 0) if is_share else band.low),
            "high": _over(x, band.steps, np.minimum(band.high, 1) if is_share else band.high),
            "runs": [_over(x, at, values) for at, values in members] if len(members) > 1 else [],
        }
        for band, members in zip(bands, runs, strict=True)
    ]
    return {"metric": metric, "note": note, "x": x.tolist(), "arms": drawn, "big": big, "share": is_share}


def _over(x: Floats, at: Floats, values: Floats) -> list[float | None]:
    """Values at the steps x; null at steps that were not measured."""
    known = dict(zip(at.tolist(), values.tolist(), strict=True))
    return [None if (value := known.get(step)) is None else float(f"{value:.6g}") for step in x.tolist()]

"""report.html: one self-contained file. It needs no network and runs only its own script.

Data are JSON in elements that no browser executes. The content security policy in the page's head lists its scripts and
styles by hash, so that injected markup could not run either.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from gspo.report.cards import clip_story
from gspo.report.page.data import config_of, high_over_low, metric_table, overview
from gspo.report.read import read_metrics
from gspo.report.samples import choose_files, pictures, read_block, sample_steps
from gspo.system import atomic_write

STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("uPlot.iife.min.js", "text.js", "charts.js", "samples.js", "page.js")
BUDGET = 64_000_000  # bytes of sample files in one page; browsers stay fast with it


def write_report(run: Path, to: Path | None = None, *, doctor: Any = None, budget: int = BUDGET) -> Path:
    """Write RUN/report.html (or `to`) atomically and return its path."""
    rows = read_metrics(run)
    signatures = sample_steps(run)
    config = config_of(run)
    ratio = high_over_low(rows)
    stories, blocks, shown = [], [], []
    # Each step becomes text at once, so that only one step's samples are in memory as objects.
    for kind, step in choose_files(run, budget):
        block = read_block(run, step, kind)
        if kind == "samples":
            stories.append(clip_story(block, ratio))
        shown += [image["sha256"] for image in block["images"]]
        blocks.append(embed(block, kind="samples"))
    if found := pictures(run, shown):
        blocks.append(embed(found, kind="pictures"))
    boot = {
        "kind": "report",
        "overview": overview(run, rows, config, stories, doctor),
        "metrics": metric_table(rows),
        "kept_steps": len(signatures),
    }
    target = to or run / "report.html"
    name = boot["overview"]["name"]
    with atomic_write(target) as tmp, open(tmp, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(html_page(f"{name} · gspo report", boot, blocks))
    return target


def html_page(
    title: str,
    boot: Mapping[str, Any],
    blocks: Iterable[str] = (),
    *,
    connect: str = "'none'",
    template: str = "page.html",
    scripts: Sequence[str] = SCRIPTS,
) -> Iterator[str]:
    """The page in pieces. `connect`: which addresses its script may request, none or its own server."""
    styles = [asset(name) for name in STYLES]
    scripts = [asset(name) for name in scripts]
    # Content Security Policy: only our own scripts and styles run, identified by their hash. Text of samples is written
    # by a model and must never be executed.
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_digest, scripts))}",
            f"style-src {' '.join(map(_digest, styles))}",
            f"connect-src {connect}",
            "img-src data:",  # small pictures of prompts, in the page's own data
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    filled = {
        "policy": html.escape(policy, quote=True),
        "title": html.escape(_visible(title)),
        "styles": "".join(f"<style>{text}</style>\n" for text in styles),
        "scripts": "".join(f"<script>{text}</script>\n" for text in scripts),
    }
    # The template has {{name}} placeholders. Pieces are yielded, because the data can be large.
    for piece in asset(template).split("{{"):
        name, mark, rest = piece.partition("}}")
        if not mark:
            yield piece
            continue
        if name == "data":
            yield embed(boot, kind="boot")
            yield from blocks
        else:
            yield filled[name]
        yield rest


def embed(value: Any, *, kind: str) -> str:
    r"""A value as JSON in an element that is not executed, and that no text in it can end.

    >>> embed({"a": "</script>\u2028\ud800"}, kind="boot")
    '<script type="application/json" class="boot">{"a":"\\u003c/script\\u003e\\u2028\\ud800"}</script>\n'
    """
    return f'<script type="application/json" class="{kind}">{inert_json(value)}</script>\n'


def inert_json(value: Any) -> str:
    """Strict JSON in ASCII, without characters that are special in HTML."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def asset(name: str) -> str:
    """A file of assets/; uPlot comes with its licence text, which every copy must include."""
    text = (resources.files("gspo.report.page") / "assets" / name).read_text(encoding="utf-8")
    return f"/*\n{asset('uPlot.LICENSE')}*/\n{text}" if name == "uPlot.iife.min.js" else text


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _visible(text: str) -> str:
    """A title with unprintable characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

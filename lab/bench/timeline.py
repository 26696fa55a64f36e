"""The share of each phase's time by kind of work, from a timeline that `profile: true` writes."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.sampling import decode, few_rows

PHASES = ("rollout", "train")
# The kind of work by the operator's name; the first match counts. Time outside operators is Python and the allocator.
KINDS = (
    ("matrix products", ("aten::mm", "aten::addmm", "aten::linear", few_rows.OPERATOR)),
    ("compiled layers", (decode.OPERATOR,)),
    ("attention", ("aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product", "_TreeAttention", "aten::index_add_")),
    ("softmax and exp", ("aten::_softmax", "aten::_log_softmax", "aten::exp", "aten::amax", "aten::log")),
    ("optimizer", ("aten::_fused_adamw_", "aten::_foreach")),
    ("other operators", ("aten::", "autograd::", "_")),
)
OUTSIDE = "outside operators"


def breakdown(path: Path) -> dict[str, dict[str, float]]:
    """{phase: {kind: share of its time}} of one step's Chrome trace, by self time."""
    raw = path.read_bytes()
    trace = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    spans = {e["name"]: e for e in events if e["name"] in PHASES and e.get("cat") == "user_annotation"}
    return {name: _shares(span, events) for name, span in spans.items()}


def _shares(span: dict[str, Any], events: Sequence[dict[str, Any]]) -> dict[str, float]:
    begin, end = span["ts"], span["ts"] + span["dur"]
    # On a CPU one thread calls all operators. Of two events that begin together, the longer one contains the other.
    inside = sorted(
        (e for e in events if e["tid"] == span["tid"] and _is_operator(e) and begin <= e["ts"] < end),
        key=lambda e: (e["ts"], -e["dur"]),
    )
    own: dict[str, float] = defaultdict(float)
    open_: list[tuple[float, str]] = []  # (end, kind) of the operators that contain the current one
    for event in inside:
        while open_ and open_[-1][0] <= event["ts"]:
            open_.pop()
        kind = next((kind for kind, names in KINDS if event["name"].startswith(names)), "other operators")
        own[kind] += event["dur"]
        own[open_[-1][1] if open_ else OUTSIDE] -= event["dur"]
        open_.append((event["ts"] + event["dur"], kind))
    own[OUTSIDE] += span["dur"]
    return {kind: own[kind] / span["dur"] for kind in (*(kind for kind, _ in KINDS), OUTSIDE)}


def _is_operator(event: dict[str, Any]) -> bool:
    # To PyTorch, a call of C is an annotation.
    return event.get("cat") == "cpu_op" or event["name"] in (few_rows.OPERATOR, decode.OPERATOR)

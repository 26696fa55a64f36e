"""Outcomes as a table and as sentences, for people and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from gspo.conformance.check import Outcome
from gspo.conformance.suite import Implementation

GSPO = "arXiv 2507.18071"
STYLES = {"agrees": "green", "differs": "bold red", "failed": "bold red", "open": "yellow", "not offered": "dim"}


def in_words(outcome: Outcome) -> str:
    """One cell: `=`, `differs: token mean`, `open: left out`, `–`."""
    if outcome.status in ("agrees", "not offered"):
        return {"agrees": "=", "not offered": "–"}[outcome.status]
    return f"{outcome.status}: {outcome.answer}" if outcome.answer not in ("", "other") else outcome.status


def table_of(implementation: Implementation, outcomes: Sequence[Outcome], everything: bool = False) -> Group:
    """The table, then what each difference means. Cases that were not tested are left out, unless `everything`."""
    table = Table(box=None, pad_edge=False)
    for name in ("case", "what is tested", "result", "clip fraction counts"):
        table.add_column(name, no_wrap=name == "case")
    for outcome in outcomes:
        if everything or outcome.status != "not offered":
            result = Text(in_words(outcome), STYLES[outcome.status])
            table.add_row(outcome.case.name, outcome.case.claim, result, outcome.metric)
    head = " ".join(filter(None, (implementation.name, implementation.version)))
    lines = [Text(head, "bold"), *(Text(f"  {note}") for note in implementation.notes), Text("")]
    return Group(*lines, table, Text(""), *(Text(line) for line in sentences(outcomes)))


# Losses under the name of GSPO that the suite knows: what the difference means, and when it bites.
VARIANTS = {
    "token mean": "the mean is over all tokens of the batch, so an answer weighs in proportion to its length. "
    "When: whenever lengths differ (with equal lengths it is the loss of the paper)",
    "sum over tokens": "the gradient of a sequence lacks 1/|y| (this is LUSPO), so long answers weigh more. "
    "When: whenever lengths differ; the step is |y| times as large",
    "token ratio": "ratio and clip are those of each token: this is GRPO. When: in every update off the old policy",
    "no root |y|": "the ratio is the product of the token ratios, without the root |y|: nearly all sequences of "
    "some length are outside the clip range. When: in every update off the old policy",
}


def sentences(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What each difference means; differences with one known cause are one entry."""
    for variant, meaning in VARIANTS.items():
        if names := [o.case.name for o in outcomes if o.is_wrong and o.answer == variant]:
            yield f"{variant}, in {', '.join(names)}"
            yield f"  {GSPO}, eq. 5 and 7: the mean over sequences of min(s A, clip(s) A), s with the root |y|."
            yield f"  For a run: {meaning}."
    for outcome in outcomes:
        is_ours = outcome.answer == outcome.case.answers[0].name
        if outcome.answer in VARIANTS or not (outcome.is_wrong or (outcome.status == "open" and not is_ours)):
            continue
        case = outcome.case
        yield f"{case.name}: {outcome.answer if outcome.answer not in ('', 'other') else '; '.join(outcome.details)}"
        yield f"  {case.source}." if case.decided else f"  The paper does not say. {case.source}."
        yield f"  For a run: {case.meaning}. When: {case.bites}."
        if not case.decided:
            yield f"  gspo: {case.answers[0].name}."
    counts = Counter("differs" if outcome.is_wrong else outcome.status for outcome in outcomes)
    yield (
        f"Of {len(outcomes)} cases {counts['agrees']} agree, {counts['differs']} differ where the paper decides, "
        f"{counts['open']} are open, {counts['not offered']} were not tested (no such option)."
    )


def as_json(implementation: Implementation, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    rows = [
        {
            "case": outcome.case.name,
            "decided": outcome.case.decided,
            "status": outcome.status,
            "answer": outcome.answer,
            "details": list(outcome.details),
            "clip_fraction": outcome.metric,
        }
        for outcome in outcomes
    ]
    return {"name": implementation.name, "version": implementation.version, "cases": rows}

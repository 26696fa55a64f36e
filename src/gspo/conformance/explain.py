"""Which loss gives the numbers of a dump: `gspo conformance --explain run.jsonl` (docs/conformance.md has the format).

A line is one call of a trainer's loss, a micro-batch or a whole batch. The loops of `paper.py` compute every objective
with every aggregation and every denominator that trainers use, and compare with the dumped loss.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.conformance import paper
from gspo.errors import ConfigError

NEEDED = ("logp", "proximal_logp", "advantage", "loss")
NUMBERS = ("loss", "clip_low", "clip_high", "max_new_tokens", "num_sequences", "num_tokens")
TERMS: Mapping[str, tuple[paper.Objective, str]] = {  # of a name: terms, and what they are in words
    "GSPO": (paper.gspo, "sequence ratio, clipped"),
    "GSPO without the root |y|": (paper.product, "product of the token ratios, clipped"),
    "GRPO, PPO": (paper.token_clip, "token ratio, clipped"),
    "GMPO": (paper.gmpo, "geometric mean of bounded token ratios"),
    "CISPO": (paper.cispo, "bounded token weight times log π"),
    "SAPO": (paper.sapo, "soft gate of the token ratio"),
    "no clip": (paper.importance, "token ratio, not clipped"),
    "REINFORCE": (paper.reinforce, "log π without a ratio"),
}
RANGES = ((3e-4, 4e-4), (0.2, 0.2), (0.2, 0.28), (0.2, 0.27), (2e-3, 2.5e-3))  # of the papers and of defaults
CONSTANTS = {"tau_pos": 1.0, "tau_neg": 1.05, "log_clip_low": 0.4, "log_clip_high": 0.4, "weight_max": 5.0}
# Digits that a loss in float32 has at least, and that another formula has by chance at most.
ENOUGH = 4.5


@dataclass(frozen=True)
class Candidate:
    name: str  # of TERMS
    clip: tuple[float, float] | None
    aggregation: str
    denominator: str
    digits: float  # of agreement, of the worst record

    def in_words(self) -> str:
        clip = "" if self.clip is None else f", ε {self.clip[0]:g}/{self.clip[1]:g}"
        over = {"sequence_mean": "mean over the tokens of each sequence", "token_sum": "sum over tokens"}
        return f"{self.name} ({TERMS[self.name][1]}{clip}); {over[self.aggregation]}; divided by {self.denominator}"


@dataclass(frozen=True)
class Explanation:
    candidates: tuple[Candidate, ...]  # best first
    spread: float  # largest |log s| of a sequence
    num_records: int

    @property
    def found(self) -> list[Candidate]:
        """Those that agree; one that is a digit better than the rest is alone."""
        best = self.candidates[0].digits
        return [c for c in self.candidates if c.digits >= max(ENOUGH, best - 1.5)]

    @property
    def is_explained(self) -> bool:
        return bool(self.found)

    def lines(self) -> Iterator[str]:
        yield f"{self.num_records} records, largest |log s| {self.spread:.3g}"
        if not self.is_explained:
            yield f"No known loss gives the dumped numbers to {ENOUGH} digits. Those that agree to 2 or more:"
        for candidate in self.found[:12] or [c for c in self.candidates[:3] if c.digits >= 2]:
            yield f"  {min(candidate.digits, 16):4.1f} digits: {candidate.in_words()}"
        if len({c.name for c in self.found}) > 1 and self.spread < 1e-5:
            yield "All ratios are 1, so the objectives cannot be told apart: dump a later mini-batch of an update."
        elif len(self.found) > 1:
            yield "These agree on this dump. More records, of unequal lengths and clipped sequences, tell them apart."

    def as_json(self) -> dict[str, Any]:
        rows = [{"loss": c.in_words(), "digits": round(c.digits, 2)} for c in self.found or self.candidates[:3]]
        return {"explained": self.is_explained, "candidates": rows, "largest_log_s": self.spread}


def explain_file(file: Path) -> Explanation:
    return explain(read(file))


def explain(records: Sequence[Mapping[str, Any]]) -> Explanation:
    given = {(r["clip_low"], r["clip_high"]) for r in records if "clip_low" in r and "clip_high" in r}
    found = []
    for name, (terms, _) in TERMS.items():
        clips = (given or RANGES) if name in ("GSPO", "GSPO without the root |y|", "GRPO, PPO") else (None,)
        for clip, aggregation in itertools.product(clips, ("sequence_mean", "token_sum")):
            settings = CONSTANTS | ({"clip_low": clip[0], "clip_high": clip[1]} if clip else {})
            # The denominator 1 first: every other one divides the same sum.
            sums = [paper.evaluate(r, terms, aggregation, {**settings, "denominator": 1}) for r in records]
            options = [denominators(record, aggregation) for record in records]
            for denominator in set.intersection(*(set(option) for option in options)):
                pairs = zip(records, sums, options, strict=True)
                digits = min(_digits(r["loss"], a.loss / o[denominator], a.scale / o[denominator]) for r, a, o in pairs)
                found.append(Candidate(name, clip, aggregation, denominator, digits))
    found.sort(key=lambda c: -c.digits)
    plain = (paper.evaluate(r, paper.reinforce, "sequence_mean", {}) for r in records)
    return Explanation(tuple(found), max(abs(x) for answer in plain for x in answer.log_s), len(records))


def denominators(record: Mapping[str, Any], aggregation: str) -> dict[str, float]:
    """What trainers divide by: counts of this record, of the whole update if they were dumped, or nothing."""
    lengths = [sum(bool(m) for m in row) for row in record["mask"]]
    width = max(map(len, record["mask"]))
    found = {"1 (a sum)": 1, "the sequences": len(lengths)}
    if 0 in lengths:
        found["the sequences with trained tokens"] = sum(n > 0 for n in lengths)
    if "num_sequences" in record:
        found["num_sequences, those of the update"] = record["num_sequences"]
    if aggregation == "token_sum":
        found |= {"the trained tokens": sum(lengths), "sequences × padded length": len(lengths) * width}
        if "num_tokens" in record:
            found["num_tokens, those of the update"] = record["num_tokens"]
        if "max_new_tokens" in record:
            found["sequences × max_new_tokens"] = len(lengths) * record["max_new_tokens"]
    return {name: count for name, count in found.items() if count > 0}


def _digits(dumped: float, computed: float, scale: float) -> float:
    """Digits of agreement, relative to the sum of the absolute terms: their sum may be near 0."""
    return -math.log10(max(abs(dumped - computed) / max(scale, abs(dumped), 1e-30), 1e-16))


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a dump; ConfigError that names the line for what is missing or has another shape."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    found = [_record(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"{file} has no records; a line is one call of the loss (docs/conformance.md)")
    return found


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    missing = [name for name in NEEDED if not isinstance(record, dict) or name not in record]
    if missing:
        raise ConfigError(f"{where}: the record has no {', '.join(missing)} (docs/conformance.md has the format)")
    for name in NUMBERS:
        if name in record and not (isinstance(record[name], int | float) and math.isfinite(record[name])):
            raise ConfigError(f"{where}: {name} must be a finite number, got {record[name]!r}")
    rows = record["logp"]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) for row in rows):
        raise ConfigError(f"{where}: logp must be a list with one list of numbers per sequence")
    record.setdefault("mask", [[1] * len(row) for row in rows])
    shape = [len(row) for row in rows]
    for name in ("proximal_logp", "mask", "advantage"):
        value = record[name]
        is_rows = isinstance(value, list) and all(isinstance(row, list) for row in value)
        if not isinstance(value, list) or len(value) != len(rows) or (is_rows and [len(r) for r in value] != shape):
            raise ConfigError(f"{where}: {name} must have {len(rows)} rows of {_shown(shape)} tokens, as logp")
        if not is_rows and name != "advantage":
            raise ConfigError(f"{where}: {name} must be a list with one list of numbers per sequence")
    _check_numbers(record, where)
    return record


def _check_numbers(record: Mapping[str, Any], where: str) -> None:
    for name in ("logp", "proximal_logp", "advantage"):
        for i, (row, mask) in enumerate(zip(record[name], record["mask"], strict=True)):
            trained = itertools.compress(row, mask) if isinstance(row, list) else [row]
            wrong = [x for x in trained if not isinstance(x, int | float) or not math.isfinite(x)]
            if wrong:
                raise ConfigError(f"{where}: {name} of sequence {i} is {wrong[0]!r} at a trained token")


def _shown(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape[:8])) + (", …" if len(shape) > 8 else "")

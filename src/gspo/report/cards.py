"""The cards of a report: questions about a run and their answers.

Ratios of mini-batch 1 are 1 by construction, so in a run with several mini-batches only the later ones count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gspo.report.read import Row
from gspo.report.samples import Block, finite_number
from gspo.report.summary import RunSummary, clipped_count, ends_text, score_name
from gspo.system import duration

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
TARGET = 0.05  # share of clipped sequences that `eps_clip: auto` and a suggested ε aim at
ACCEPTED = (0.03, 0.15)  # with a share between these no other ε is suggested
ENOUGH = 200  # with fewer sequences no ε is judged
HIGH_OVER_LOW = 4 / 3  # ε_high/ε_low if the run has none
EPS_MAX = 0.2


def clip_story(block: Block, high_over_low: float = HIGH_OVER_LOW) -> dict[str, Any]:
    """One step: quantiles of log s, counts by mini-batch, and how far each sequence moved.

    `minibatch` has [entered the model, clipped with A ≤ 0, clipped with A > 0] for each mini-batch.
    A sequence is clipped by every ε_low below its entry of `moved`; those with A = 0 cannot be clipped and have none.
    """
    # All arrays: [n], one entry per sequence; NaN where a value is missing.
    log_s = np.array([np.nan if v is None else v for v in block["log_s"]], dtype=np.float64)
    advantage = np.array([np.nan if v is None else v for v in block["advantage"]], dtype=np.float64)
    part = np.array([0 if v is None or not 0 <= v < 4096 else v for v in block["minibatch"]], dtype=np.int64)
    clipped = np.array([v is True for v in block["clipped"]], dtype=bool)
    entered = np.isfinite(log_s)
    high = clipped & (advantage > 0)
    kinds = (entered, clipped & ~high, high)
    counts = [[int((kind & (part == k)).sum()) for kind in kinds] for k in range(int(part.max(initial=-1)) + 1)]
    # Mini-batch 1 is left out: its ratios are 1 before the first update.
    later = entered & ((part > 0) if len(counts) > 1 else True)
    seen = later & (advantage != 0) & np.isfinite(advantage)
    # s − 1 of a rise, divided by ε_high/ε_low, and 1 − s of a fall are on one scale: both are compared with ε_low.
    change = np.expm1(log_s[seen])
    moved = np.where(advantage[seen] > 0, change / high_over_low, -change)
    farthest = int(np.where(later, np.abs(log_s), -1.0).argmax()) if later.any() else None
    return {
        "step": block["step"],
        "quantiles": [finite_number(float(q)) for q in np.quantile(log_s[later], QUANTILES)] if later.any() else None,
        "minibatch": counts,
        "moved": moved.tolist(),
        "farthest": None
        if farthest is None
        else {name: block[name][farthest] for name in ("sequence", "log_s", "advantage", "length", "clipped")},
    }


def suggest_eps(
    stories: Sequence[Mapping[str, Any]], eps: tuple[float, float], share: float, noise: float | None
) -> tuple[float, float, int, int] | None:
    """(ε_low, ε_high, sequences that it would have clipped, of how many); None where no advice is certain.

    eps: the run's; share: the clipped share of its sequences; noise: the error of π_old, the least ε.

    >>> suggest_eps([{"moved": [1e-4 * i for i in range(200)]}], (0.002, 0.004), share=0.9, noise=None)
    (0.019, 0.038, 9, 200)
    """
    moved = np.array([distance for story in stories for distance in story["moved"]])
    if len(moved) < ENOUGH or ACCEPTED[0] <= share <= ACCEPTED[1] or min(eps) <= 0:
        return None
    ratio = eps[1] / eps[0]
    low = min(max(float(np.quantile(moved, 1 - TARGET)), noise or 0.0), EPS_MAX / max(1.0, ratio))
    low, high = float(f"{low:.2g}"), float(f"{low * ratio:.2g}")
    # To clip fewer sequences ε must grow. Bounds, rounding, or samples that were not kept can lead to the contrary.
    is_wider, is_narrower = low > eps[0] and high > eps[1], 0 < low < eps[0] and high < eps[1]
    if not (is_wider if share > TARGET else is_narrower):
        return None
    return low, high, int((moved > low).sum()), len(moved)


Answer = dict[str, Any]  # question, verdict (good, note, bad or none), text, more, section

# Times that are part of another time; every other time/…_s is a part of the step.
INSIDE = {"reward": "rollout", "proximal": "train", "forward_backward": "train", "optimizer": "train"}
WORDS = {
    "rollout": "sampling",
    "reward": "waiting for rewards",
    "train": "training",
    "proximal": "π_old",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "sync": "weights to the sampler",
    "bookkeeping": "metrics and sample files",
    "eval": "evaluation",
    "reference": "reference log-probs",
    "critic": "critic",
}


def answers(
    summary: RunSummary,
    steps: Sequence[Row],
    stories: Sequence[Mapping[str, Any]],
    suggested: tuple[float, float, int, int] | None,
    advice: Sequence[Answer] = (),
) -> list[Answer]:
    """The questions with their answers; `advice` comes after the first."""
    return [
        _learned(summary),
        *advice,
        _clipped(summary, steps, stories),
        _eps(summary, steps, suggested),
        _worst(stories),
        _time(steps),
    ]


def card(question: str, section: str, verdict: str | None, text: str, more: str = "") -> Answer:
    return {"question": question, "section": section, "verdict": verdict, "text": text, "more": more}


def _learned(s: RunSummary) -> Answer:
    question, section = "Did it learn?", "curves"
    reward = ""
    if s.reward is not None and s.reward_end is not None:
        reward = f"Reward of the samples {ends_text(s, s.reward, s.reward_end)}."
    elif s.loss is not None:
        reward = f"Loss {ends_text(s, *s.loss)}"
        reward += f", held-out {s.held_out_loss[0]:.3f} → {s.held_out_loss[1]:.3f}." if s.held_out_loss else "."
    if s.score is None or s.score_end is None or s.evaluations < 2:
        evaluated = "There was no evaluation on held-out problems." if not s.evaluations else "Only one evaluation."
        return card(question, section, None, reward or "No step yet.", f"{evaluated} See evaluator.freq_steps.")
    (start, low, high), (end, low_end, high_end) = s.score, s.score_end
    text = f"{score_name(s)} {shown(start, s.graded)} → {shown(end, s.graded)} on {s.problems or 0:,} problems."
    if start == end:
        return card(question, section, "bad", f"No: {text}", reward)
    text = f"{text[0].upper()}{text[1:]}"
    # Intervals that do not overlap are a conservative test for a difference.
    if low_end > high:
        return card(question, section, "good", text, f"The 95 % intervals do not overlap. {reward}")
    if high_end < low:
        return card(question, section, "bad", text, f"It got worse: the 95 % intervals do not overlap. {reward}")
    return card(question, section, "note", text, f"The 95 % intervals overlap, so the change may be chance. {reward}")


def _clipped(s: RunSummary, steps: Sequence[Row], stories: Sequence[Mapping[str, Any]]) -> Answer:
    question, section = "Was anything clipped, and why?", "clipping"
    # GMPO, CISPO or an objective of the user may clip without ε.
    if s.eps is None and not (s.clipped_low or s.clipped_high):
        return card(question, section, None, "This objective does not clip the ratio.")
    if s.clipped_low is None or s.clipped_high is None:
        tokens = _mean_share(steps, "tokens")
        if tokens is None:
            return card(question, section, None, "No update with a ratio other than 1 yet.")
        text = f"{percent(tokens)} of the tokens." if tokens else "Nothing was clipped."
        why = "Shares by sequence and by sign of the advantage were not recorded."
        return card(question, section, "note" if tokens == 0 else "bad" if tokens > 0.5 else "good", text, why)
    share = s.clipped_low + s.clipped_high
    whole, ratio = ("sequence", "s") if s.by_sequence else ("token", "a token's ratio")
    if share == 0:
        return card(question, section, "note", f"Nothing was clipped: every {whole} stayed inside the clip range.")
    text = f"{percent(share)} of the {'sequences' if s.by_sequence else 'sequences have a clipped token'}"
    text += f" ({count}): " if (count := clipped_count(s)) else ": "
    below, above = (f" and {ratio} < 1 − {s.eps[0]:.2g}", f" and {ratio} > 1 + {s.eps[1]:.2g}") if s.eps else ("", "")
    text += f"{percent(s.clipped_low)} with A < 0{below}, {percent(s.clipped_high)} with A > 0{above}."
    if s.eps is None:
        return card(question, section, "bad" if share > 0.5 else "good", text)
    # Explain the cause by mini-batch, if there are at least three.
    shares = minibatch_shares(stories)
    more = f"These {whole}s had already moved by ε in the direction of their advantage, so they give no gradient."
    if len(shares) > 2 and shares[1] is not None and shares[-1] is not None:
        more = f"{percent(shares[1])} in mini-batch 2, {percent(shares[-1])} in mini-batch {len(shares)}: "
        more += "each update of a batch moves the policy further away from π_old."
    # With token ratios a few clipped tokens in every sequence are usual.
    many = share if s.by_sequence else _mean_share(steps, "tokens") or 0.0
    return card(question, section, "bad" if many > 0.5 else "good", text, more)


def minibatch_shares(stories: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Share of clipped sequences by mini-batch, all steps together.

    >>> minibatch_shares([{"minibatch": [[4, 0, 0], [4, 1, 1]]}, {"minibatch": [[4, 0, 0], [4, 0, 0]]}])
    [0.0, 0.25]
    """
    parts = max((len(s["minibatch"]) for s in stories), default=0)
    out: list[float | None] = []
    for k in range(parts):
        rows = [s["minibatch"][k] for s in stories if k < len(s["minibatch"])]
        entered = sum(row[0] for row in rows)
        out.append(sum(row[1] + row[2] for row in rows) / entered if entered else None)
    return out


def _mean_share(steps: Sequence[Row], what: str) -> float | None:
    shares = [share for row in steps if (share := finite_number(row.get(f"clip/{what}"))) is not None]
    return sum(shares) / len(shares) if shares else None


def _worst(stories: Sequence[Mapping[str, Any]]) -> Answer:
    question, section = "Which sequences were the worst?", "samples"
    seen = [{**s["farthest"], "step": s["step"]} for s in stories if s["farthest"] is not None]
    if not seen:
        why = "The samples have no log s." if stories else "No samples were kept (rollout.dump_to_file)."
        return card(question, section, None, why)
    worst = max(seen, key=lambda one: abs(one["log_s"]))
    advantage = "unknown" if worst["advantage"] is None else f"{worst['advantage']:+.2f}"
    text = f"Farthest from π_old: step {worst['step']}, sequence {worst['sequence']}: log s = {worst['log_s']:+.2g}, "
    text += f"A = {advantage}, {worst['length']} tokens, {'clipped' if worst['clipped'] else 'not clipped'}."
    return card(question, section, None, text, "The sample browser sorts by distance, advantage, reward and length.")


def _eps(s: RunSummary, steps: Sequence[Row], suggested: tuple[float, float, int, int] | None) -> Answer:
    question, section = "Is my ε sensible?", "clipping"
    if s.eps is None:
        return card(question, section, None, "This objective has no ε.")
    if not s.by_sequence:
        return card(question, section, None, f"ε {s.eps[0]:.2g} / {s.eps[1]:.2g} bounds single tokens.")
    share, unit = clipped_share(s), "sequences"
    if share is None:
        share, unit = _mean_share(steps, "tokens"), "tokens"
    noise = last(steps, "noise/log_s_p95_abs")
    eps, text = f"ε {s.eps[0]:.2g} / {s.eps[1]:.2g}", "Nothing measured yet."
    if share == 0:
        text = f"{eps} was not reached: clipping had no effect."
    elif share is not None:
        count = clipped_count(s)
        text = f"{eps} clipped {f'{count} {unit} ({percent(share)})' if count else f'{percent(share)} of the {unit}'}."
    floor = proposal = ""
    if noise is not None and noise > 0:
        times = float(f"{min(s.eps[0] / noise, 1e9):.2g}")
        floor = f"ε_low is {times:,.0f} times the error of the sampler's log-probs ({noise:.1g}). "
    if suggested is not None:
        low, high, num, total = suggested
        proposal = f"ε {low:.2g} / {high:.2g} would have clipped about {num:,} of {total:,} ({percent(num / total)})."
    if noise is not None and s.eps[0] < 10 * noise:
        text = "ε is not far above the error of the sampler's log-probs."
        return card(question, section, "bad", text, floor + proposal)
    if s.collapsed or share is None or (s.clipped_of or ENOUGH) < ENOUGH:
        why = "" if share is None else f"Fewer than {ENOUGH} sequences do not show whether ε is sensible. "
        if s.collapsed:
            why = "The run ended far below its best, so its clipping does not show whether ε is sensible. "
        return card(question, section, None, text, why + floor)
    verdict = "good" if ACCEPTED[0] <= share <= ACCEPTED[1] else "note"
    return card(question, section, verdict, text, floor + proposal)


def clipped_share(s: RunSummary) -> float | None:
    return None if s.clipped_low is None or s.clipped_high is None else s.clipped_low + s.clipped_high


def _time(steps: Sequence[Row]) -> Answer:
    question, section = "Where did the time go?", "time"
    parts = [part for part in time_parts(steps) if part["inside"] is None]
    total = sum(part["seconds"] for part in parts)
    if not total:
        return card(question, section, None, "No step yet.")
    largest = sorted(parts, key=lambda part: -part["seconds"])[:3]
    text = ", ".join(f"{percent(part['seconds'] / total, 0)} {part['words']}" for part in largest)
    if [part["name"] for part in parts] == ["rest"]:
        text = "The parts of a step were not recorded"
    each = total / len(steps)
    return card(question, section, None, f"{text}.", f"{duration(total)} in {len(steps):,} steps, {each:.2f} s each.")


def time_parts(steps: Sequence[Row]) -> list[dict[str, Any]]:
    """Seconds of all steps by part, in the order of a step; `inside` names the part that contains a part."""
    totals: dict[str, float] = {}
    for row in steps:
        for name, value in row.items():
            if name.startswith("time/") and name.endswith("_s") and (seconds := finite_number(value)) is not None:
                part = name[len("time/") : -len("_s")]
                totals[part] = totals.get(part, 0.0) + max(seconds, 0.0)
    # Parts inside of another part are not added to the sum again.
    whole = totals.pop("step", 0.0)
    outer = {name: seconds for name, seconds in totals.items() if INSIDE.get(name) not in totals}
    rest = whole - sum(outer.values())
    order = [*WORDS, *sorted(name for name in totals if name not in WORDS)]
    parts = [
        {
            "name": name,
            "words": WORDS.get(name, name.replace("_", " ")),
            "seconds": totals[name],
            "inside": INSIDE.get(name) if INSIDE.get(name) in totals else None,
        }
        for name in order
        if name in totals
    ]
    if rest > 0.01 * whole:
        parts.append({"name": "rest", "words": "everything else", "seconds": rest, "inside": None})
    return parts


def last(rows: Sequence[Row], name: str) -> float | None:
    """The last number of a metric."""
    return next((v for row in reversed(rows) if (v := finite_number(row.get(name))) is not None), None)


def shown(score: float, graded: bool) -> str:
    """A held-out score: an accuracy in percent, a reward as a number."""
    return f"{score:.3f}" if graded else percent(score)


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, with a no-break space.

    >>> percent(0.1234), percent(0.15, 0)
    ('12.3\\xa0%', '15\\xa0%')
    """
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"

"""The results of a run in a dozen numbers: the table at the end of `gspo train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from gspo.report.read import (
    Row,
    best_of,
    evaluations,
    has_sequence_ratio,
    is_graded,
    read_metrics,
    score_interval,
    score_text,
    sources_of,
)
from gspo.stats import COLLAPSE, has_collapsed
from gspo.system import duration

FEW = 8  # rewards of fewer steps are too noisy to tell a collapse
ENDS = 5  # steps averaged at both ends of a curve, because one batch is noisy; fewer for runs under 10 steps


Interval = tuple[float, float, float]  # a score and the ends of its 95 % interval


@dataclass(frozen=True)
class RunSummary:
    """Numbers of a run; None where nothing was measured."""

    steps: int
    seconds: float
    graded: bool  # the held-out score is the reward; False: the accuracy
    score: Interval | None  # held-out, before training (or at the first evaluation)
    score_end: Interval | None
    score_step: int | None  # of the first figure; 0 is before training
    sources: dict[str, tuple[Interval, Interval]]  # the same by source of a mixture, first and last
    evaluations: int
    problems: int | None
    best_step: int | None
    ends: int  # steps averaged at both ends of reward and entropy
    reward: float | None  # mean of the first `ends` steps
    reward_end: float | None  # mean of the last `ends` steps
    loss: tuple[float, float] | None  # of supervised fine-tuning: mean of the first and last `ends` steps
    held_out_loss: tuple[float, float] | None  # first and last
    collapsed: bool  # reward or held-out score ended far below its best
    clipped_low: float | None  # share of the sequences of mini-batches 2…K
    clipped_high: float | None
    clipped_of: int | None  # how many sequences these are; None: not recorded, and the shares are means over steps
    by_sequence: bool  # False: the share of sequences with a clipped token
    eps: tuple[float, float] | None  # of the last step
    entropy: tuple[float, float] | None  # mean of the first and last `ends` steps
    rollout_tokens_s: float | None
    train_tokens_s: float | None


def summarise(run: Path) -> RunSummary:
    """The numbers of a run directory, finished or not."""
    return summary_of(read_metrics(run), has_sequence_ratio(run))


def summary_of(rows: Sequence[Row], by_sequence: bool) -> RunSummary:
    """`summarise` of rows that are already read."""
    # Step 0 is the evaluation before training and has no training metrics.
    steps = [row for row in rows if row["step"] > 0]
    graded = is_graded(rows)
    evals = evaluations(rows, graded)
    scores = [score_interval(row, graded) for row in evals]
    reward, entropy = _values(steps, "reward/mean"), _values(steps, "policy/entropy")
    loss, held = _values(steps, "loss/mean"), _values(rows, "eval/loss")
    last: Row = steps[-1] if steps else {}
    eps = (last.get("clip/eps_low"), last.get("clip/eps_high"))
    low, high, num = _clipped(steps)
    ends = max(min(ENDS, len(steps) // 2), 1)  # the two windows never overlap
    return RunSummary(
        steps=max((row["step"] for row in rows), default=0),
        seconds=sum(_values(steps, "time/step_s")),
        graded=graded,
        score=scores[0] if scores else None,
        score_end=scores[-1] if scores else None,
        score_step=evals[0]["step"] if evals else None,
        sources=_by_source(evals, graded),
        evaluations=len(evals),
        problems=evals[-1].get("eval/problems") if evals else None,
        best_step=best_of(rows),
        ends=ends,
        reward=_mean(reward[:ends]),
        reward_end=_mean(reward[-ends:]),
        loss=(fmean(loss[:ends]), fmean(loss[-ends:])) if loss and not reward else None,
        held_out_loss=(held[0], held[-1]) if held else None,
        collapsed=(len(reward) >= FEW and has_collapsed(reward)) or _fell(scores),
        clipped_low=low,
        clipped_high=high,
        clipped_of=num,
        by_sequence=by_sequence,
        eps=(eps[0], eps[1]) if eps[0] is not None and eps[1] is not None else None,
        entropy=(fmean(entropy[:ends]), fmean(entropy[-ends:])) if entropy else None,
        rollout_tokens_s=_rate(steps, "rollout"),
        train_tokens_s=_rate(steps, "train"),
    )


def summary_rows(s: RunSummary) -> list[tuple[str, str]]:
    """The measured numbers as (name, text)."""
    rows: list[tuple[str, str]] = [("steps", f"{s.steps:,} in {duration(s.seconds)}")]
    if s.score and s.score_end:
        when = "before training" if s.score_step == 0 else f"at step {s.score_step}"
        since = f" (measured once, {when})" if s.evaluations == 1 else f" (first measured {when})" * bool(s.score_step)
        for name, (first, last) in {score_name(s): (s.score, s.score_end), **s.sources}.items():
            ends = interval_text(first, s.graded), interval_text(last, s.graded)
            is_whole = name == score_name(s)
            tail = f"  on {s.problems:,} problems{since}" if is_whole else ""
            rows.append((name if is_whole else f"  {name}", change_text(*ends, s.evaluations) + tail))
    if s.best_step is not None:
        rows.append(("best", "before training (step 0)" if s.best_step == 0 else f"step {s.best_step}"))
    if s.reward is not None and s.reward_end is not None:
        rows.append(("reward", ends_text(s, s.reward, s.reward_end) + ends_words(s)))
    if s.loss is not None:
        rows.append(("loss", f"{ends_text(s, *s.loss)} nats per token{ends_words(s)}"))
    if s.held_out_loss is not None:
        rows.append(("held-out loss", f"{s.held_out_loss[0]:.3f} → {s.held_out_loss[1]:.3f} nats per token"))
    if s.clipped_low is not None and s.clipped_high is not None:
        eps = f"  at ε {s.eps[0]:.2g} / {s.eps[1]:.2g}" if s.eps else ""
        what = "sequences" if s.by_sequence else "sequences with any clipped token"
        share = f"{s.clipped_low:.1%} low + {s.clipped_high:.1%} high, "
        rows.append(("clipped", f"{share}{clipped_count(s) or 'of'} {what}{eps}"))
    if s.entropy is not None:
        rows.append(("entropy", f"{ends_text(s, *s.entropy)} nats per token"))
    if s.rollout_tokens_s and s.train_tokens_s:
        rows.append(("tokens/s", f"{s.rollout_tokens_s:,.0f} sampled, {s.train_tokens_s:,.0f} trained"))
    return rows


def clipped_count(s: RunSummary) -> str:
    """How many sequences were clipped, such as "13 of 120"; "" if their number was not recorded."""
    if s.clipped_of is None or s.clipped_low is None or s.clipped_high is None:
        return ""
    return f"{round((s.clipped_low + s.clipped_high) * s.clipped_of):,} of {s.clipped_of:,}"


def ends_text(s: RunSummary, first: float, last: float) -> str:
    """Both ends of a curve; one step is not a change."""
    return f"{last:.3f}" if s.steps == 1 else f"{first:.3f} → {last:.3f}"


def ends_words(s: RunSummary) -> str:
    """Which steps the two ends of a curve are, after two spaces; "" for one step."""
    if s.steps == 1:
        return ""
    return "  first and last step" if s.ends == 1 else f"  mean of the first and last {s.ends} steps"


def change_text(first: str, last: str, evaluations: int) -> str:
    """The first and the last held-out score; only one of them if there was one evaluation or no change.

    >>> change_text("25 %", "50 %", 3), change_text("50 %", "50 %", 3), change_text("50 %", "50 %", 1)
    ('25 % → 50 %', '50 %, unchanged', '50 %')
    """
    if evaluations == 1:
        return last
    return f"{last}, unchanged" if first == last else f"{first} → {last}"


def score_name(s: RunSummary) -> str:
    return f"held-out {'reward' if s.graded else 'accuracy'}"


def interval_text(ends: Interval, graded: bool) -> str:
    """A held-out score with its 95 % interval.

    >>> interval_text((0.25, 0.2, 0.3), False), interval_text((-0.25, -0.3, -0.2), True)
    ('25.0% (20.0–30.0)', '-0.250 (-0.300 … -0.200)')
    """
    value, low, high = ends
    text = score_text(value, graded)
    return f"{text} ({low:.3f} … {high:.3f})" if graded else f"{text} ({100 * low:.1f}–{100 * high:.1f})"


def _by_source(evals: Sequence[Row], graded: bool) -> dict[str, tuple[Interval, Interval]]:
    """First and last score by source; the reward for all if one source is graded, so that they have one unit."""
    found: dict[str, tuple[Interval, Interval]] = {}
    for source in sources_of(evals):
        prefix = f"eval/{source}/"
        name = f"{prefix}{'reward' if graded else 'accuracy'}"
        seen = [row for row in evals if row.get(name) is not None]
        if seen:
            found[source] = score_interval(seen[0], graded, prefix), score_interval(seen[-1], graded, prefix)
    return found


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _clipped(steps: Sequence[Row]) -> tuple[float | None, float | None, int | None]:
    """Clipped shares, low and high, of the sequences of all steps together, and how many sequences these are."""
    names = "clip/sequences_low", "clip/sequences_high"
    seen = [row for row in steps if all(row.get(name) is not None for name in names)]
    counts = [row.get("clip/num_sequences") or 0 for row in seen]
    if not all(counts) or not seen:  # rows of another trainer, or of an earlier version
        return _mean(_values(steps, names[0])), _mean(_values(steps, names[1])), None
    low, high = (sum(row[name] * n for row, n in zip(seen, counts, strict=True)) / sum(counts) for name in names)
    return low, high, sum(counts)


def _fell(scores: Sequence[Interval]) -> bool:
    """Whether the last held-out score is far below the best one, by more than chance."""
    best, last = max(scores, default=(0.0, 0.0, 0.0)), scores[-1] if scores else (0.0, 0.0, 0.0)
    return last[0] < COLLAPSE * best[0] and last[2] < best[1]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _rate(rows: Sequence[Row], part: str) -> float | None:
    """Tokens of all steps over seconds of all steps: a mean of rates would favour the quick steps.

    Where the row has the number of tokens, its seconds are tokens/rate: servers in the background sample during the
    whole step (`time/step_s`), not only while the trainer waits for them (`time/rollout_s`). A step in which no token
    was sampled counts with the same kind of seconds as the other steps.
    """
    rate_of, count_of, own_of = f"throughput/{part}_tokens_s", f"throughput/{part}_tokens", f"time/{part}_s"
    counted = [row for row in rows if row.get(rate_of) and row.get(count_of)]
    # tokens / rate gives the seconds that the rate was computed with. If they exceed the time of the phase, sampling
    # ran in the background.
    in_background = any(row[count_of] / row[rate_of] > 1.001 * (row.get(own_of) or 0.0) for row in counted)
    tokens = sum(float(row[count_of]) for row in counted)
    seconds = sum(row[count_of] / row[rate_of] for row in counted)
    # Rows without a count of tokens (or with none sampled): use the seconds of the phase or the step.
    for row in rows:
        if row.get(rate_of) is None or (row[rate_of] and row.get(count_of)):
            continue
        own = row.get(own_of) or 0.0
        tokens += row[rate_of] * own
        seconds += row.get("time/step_s", own) if in_background else own
    return tokens / seconds if seconds else None

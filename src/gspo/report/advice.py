"""What to do next with a run: one key to change and why, or that the run is done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from gspo.diagnosis import Finding, findings
from gspo.report.cards import Answer, card, clipped_share, percent
from gspo.report.read import Row, has_sequence_ratio, read_config, read_metrics, status_of
from gspo.report.samples import finite_number
from gspo.report.summary import RunSummary, summary_of

WASTED = 0.5  # share of groups with equal rewards above which sampling others pays
STILL = 1e-5  # mean spread of log s below which the updates do not move the policy
SEVERE = ("collapse", "update too large")  # findings that explain a run by themselves
TOO_FEW = 4  # steps of a half below which a trend is not judged


def mean_of(rows: Sequence[Row], name: str) -> float | None:
    values = [value for row in rows if (value := finite_number(row.get(name))) is not None]
    return fmean(values) if values else None


def _wasted(steps: Sequence[Row]) -> Answer | None:
    """The card about groups without a gradient; None: not recorded."""
    share = mean_of(steps, "reward/zero_variance_groups")
    if share is None:
        return None
    question, text = (
        "Was sampling wasted?",
        f"{percent(share, 0)} of the groups had equal rewards and gave no gradient.",
    )
    if share <= WASTED:
        return card(question, "curves", "good", text)
    more = "actor.zero_variance_groups: refill samples other prompts in their place; train_dataset.shuffle: pass_rate "
    more += "prefers prompts that are solved about half of the time; a higher gconfig.n_samples makes groups differ."
    return card(question, "curves", "note", text, more)


def next_steps(s: RunSummary, steps: Sequence[Row], found: Sequence[Finding], done: bool) -> list[Answer]:
    """The cards that advise. found: in the order of steps; done: all planned steps ran."""
    severe = not has_learned(s) and any(finding.name in SEVERE for finding in found)
    cards = [_next(s, steps, found, done), None if severe else _wasted(steps)]
    return [one for one in cards if one is not None]


def advise(run: Path) -> Answer | None:
    """The card "What next?" of a run directory; None: no step yet."""
    rows, config = read_metrics(run), read_config(run)
    done = status_of(run, max((row["step"] for row in rows), default=0), config) == "finished"
    return advise_on(rows, config, has_sequence_ratio(run), done)


def advise_on(rows: Sequence[Row], config: Row, by_sequence: bool, done: bool) -> Answer | None:
    """The same, of what is already read."""
    steps, found = [row for row in rows if row["step"] > 0], findings(rows, config, by_sequence)
    return _next(summary_of(rows, by_sequence), steps, found, done)


def _next(s: RunSummary, steps: Sequence[Row], found: Sequence[Finding], done: bool) -> Answer | None:
    if not steps:
        return None
    if has_learned(s):  # a run that recovered is judged by its end
        return _after_success(s, steps, done)
    severe = [finding for finding in found if finding.name in SEVERE]
    if severe:
        # The first one is the cause; later ones are its consequences.
        return _of_finding(severe[0])
    return _after_failure(s, steps, found, done)


def has_learned(s: RunSummary) -> bool:
    """Held-out intervals that do not overlap; without them, a reward that rose by a tenth of what was missing."""
    if s.score is not None and s.score_end is not None and s.evaluations > 1:
        return s.score_end[1] > s.score[2]
    return s.reward is not None and s.reward_end is not None and s.reward_end > s.reward + 0.1 * max(1 - s.reward, 0)


def _card(verdict: str | None, text: str, more: str = "") -> Answer:
    return card("What next?", "config", verdict, text, more)


def _of_finding(finding: Finding) -> Answer:
    text = f"Set {finding.change}." if finding.change else "Read the samples of the steps before the warning."
    return _card("bad", text, f"Step {finding.step}: {finding.text}.")


def _trend(steps: Sequence[Row]) -> float:
    """Change of the reward between the two quarters at the end, in its standard errors; 0 if there are few steps."""
    rewards = [value for row in steps if (value := finite_number(row.get("reward/mean"))) is not None]
    half = len(rewards) // 4
    if half < TOO_FEW:
        return 0.0
    before, after = rewards[-2 * half : -half], rewards[-half:]
    error = ((stdev(before) ** 2 + stdev(after) ** 2) / half) ** 0.5
    return (fmean(after) - fmean(before)) / error if error else 0.0


def _after_success(s: RunSummary, steps: Sequence[Row], done: bool) -> Answer:
    if not done:
        return _card("good", "It is learning. Nothing needs a change.")
    if _trend(steps) > 3:
        return _card("good", "Train longer: set total_train_steps higher.", "The reward was still rising at the end.")
    best = [row for row in steps if row["step"] == s.best_step]
    name = "eval/reward" if s.graded else "eval/accuracy"
    if best and s.score_end and s.score_end[0] < 0.95 * (finite_number(best[0].get(name)) or 0.0):
        return _card("note", f"Use the best step: gspo export RUN --step {s.best_step}.", "The end is below it.")
    return _card(
        "good", "The run is done.", "gspo eval measures it with several samples; gspo export writes the model."
    )


def _after_failure(s: RunSummary, steps: Sequence[Row], found: Sequence[Finding], done: bool) -> Answer:
    """Why not? The first cause that the metrics show."""
    if found:
        return _of_finding(found[-1])
    truncated, equal = mean_of(steps[-5:], "length/truncated"), mean_of(steps, "reward/zero_variance_groups")
    if truncated is not None and truncated > 0.5:
        reason = f"{percent(truncated, 0)} of the completions were cut off at the limit."
        return _card("note", "Set gconfig.max_new_tokens higher.", reason)
    if equal is not None and equal > 0.8:
        reason = f"{percent(equal, 0)} of the groups had equal rewards, so few samples gave a gradient."
        return _card("note", "Set gconfig.n_samples higher, or actor.zero_variance_groups: refill.", reason)
    share = clipped_share(s)
    if s.by_sequence and share is not None and share > 0.5:
        return _card("note", "Set actor.eps_clip higher.", f"{percent(share)} of the sequences were clipped.")
    moved = mean_of(steps, "ratio/log_s_std")
    if moved is not None and moved < STILL:
        reason = f"The updates hardly move the policy: log s has a spread of {moved:.1g}."
        return _card("note", "Set actor.optimizer.lr higher.", reason)
    if not done:
        return _card(None, "Too early to say.", "No mistake is visible in the metrics.")
    if _trend(steps) > 2:
        return _card("note", "Train longer: set total_train_steps higher.", "The reward was rising at the end.")
    few = s.problems is not None and s.problems < 200
    text = (
        "Evaluate on more problems: set evaluator.size higher." if few else "Train longer, or raise actor.optimizer.lr."
    )
    return _card("note", text, "No mistake is visible in the metrics, and the change may be chance.")

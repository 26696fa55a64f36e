"""What goes wrong in a run, found in its metrics: while it trains, and afterwards by its report.

A finding is a function of the rows of metrics.jsonl so far, so nothing of it is in a checkpoint: a resumed run reads
its rows again. The thresholds are tested on recorded runs (tests/test_diagnosis.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gspo.stats import COLLAPSE

PATIENCE = 20  # steps in a row before a condition that may pass is told; again after 2, 4, 8, … times as many
TOTAL = 3  # the same for a condition that leaves nothing to learn from
FAR = 0.5  # mean log s of a batch's later mini-batches that no healthy run reached; 0.5 is a factor of 1.6 per token
CERTAIN, LIKELY = 4.0, 2.0  # standard errors of a fall: alone, and with other evidence of a collapse

Row = Mapping[str, Any]

REPLACED_SETTINGS = (
    "note: the agent sets temperature, top_p, top_k or min_p, and the run's values are used instead (gconfig.*): the "
    "trainer needs one known distribution; agent/settings_replaced counts these requests"
)


@dataclass(frozen=True)
class Finding:
    """What happened, the cause that the metrics support, and the key to set."""

    name: str
    step: int
    text: str
    change: str = ""  # the first change that the text names, such as "actor.optimizer.lr lower"
    stops: bool = True  # whether on_alarm: stop ends the run

    def __str__(self) -> str:
        return f"warning at step {self.step}: {self.text}"


@dataclass(frozen=True)
class _Level:
    """The mean reward of one or two steps, with its standard error."""

    step: int
    mean: float
    error: float


class Diagnosis:
    """Findings of one run; `see` takes its rows in order.

    groups: prompts of a batch, the independent units of its mean reward; by_sequence: one ratio per sequence (with one
    per token, a few clipped tokens in every sequence are usual); noise_is_forced: the user has allowed a π_old that is
    noisier than the clip range.
    """

    def __init__(self, *, groups: int, num_updates: int, by_sequence: bool, noise_is_forced: bool = False) -> None:
        self._groups, self._num_updates = max(groups, 1), num_updates
        self._by_sequence, self._noise_is_forced = by_sequence, noise_is_forced
        self._counts: dict[str, int] = {}  # steps in a row, by condition
        self._last: deque[Row] = deque(maxlen=2)
        self._start: _Level | None = None
        self._best: _Level | None = None
        self._held_out: tuple[int, float, float] | None = None  # the best: step, score, half of its interval
        self._jump: Row | None = None  # the step whose updates moved the policy farthest since the best reward
        self._has_collapsed = False

    def see(self, row: Row) -> list[Finding]:
        """The findings of one step. Step 0 is the evaluation before training."""
        found = [*self._fall_of_held_out(row)]
        if row["step"] > 0:
            found += [*self._far(row), *self._fall(row), *self._first_batch(row), *self._at_once(row)]
            found += self._lasting(row)
        return found

    def _finding(self, row: Row, name: str, text: str, change: str = "", stops: bool = True) -> Finding:
        return Finding(name, row["step"], text, change, stops)

    # Collapse.

    def _far(self, row: Row) -> Iterator[Finding]:
        """Updates that moved the policy by many ε. Old samples and a noisy π_old are far away without an update."""
        moved, eps = row.get("ratio/log_s_mean"), row.get("clip/eps_low")
        if moved is None or row.get("staleness/max") or row.get("policy/proximal") == "rollout":
            return
        if abs(moved) > abs((self._jump or {}).get("ratio/log_s_mean") or 0.0):
            self._jump = row
        if abs(moved) > FAR and self._is_first_of_powers("far", True):
            width = f" (ε is {eps:.2g})" if eps else ""
            yield self._finding(
                row,
                "update too large",
                f"the updates of this step moved the sequences by log s = {moved:+.2g} on average{width}: "
                f"{self._advice(row)}",
                "actor.optimizer.lr lower",
            )

    def _advice(self, row: Row) -> str:
        lr = row.get("optimizer/lr")
        tried = f"; it is {lr:.3g}, try {lr / 10:.2g}" if lr else ""
        return f"the learning rate is too high; set actor.optimizer.lr lower{tried}, and start again from step 0"

    def _fall(self, row: Row) -> Iterator[Finding]:
        """A reward that stays below half of its best, or below its start if it was negative, for two steps."""
        if row.get("reward/mean") is None:
            return
        self._last.append(row)
        now = self._level(list(self._last))
        if self._start is None:
            self._start = now
        before = self._best
        if len(self._last) == 2 and before is not None:
            is_low = now.mean < COLLAPSE * before.mean if before.mean > 0 else now.mean < self._start.mean
            # One error for both: a step in which every sample earned 1 has no variance of its own.
            error = max(before.error, now.error) * math.sqrt(2)
            errors = (before.mean - now.mean) / error if error else math.inf
            is_collapse = is_low and errors > (LIKELY if self._evidence(row) else CERTAIN)
            if is_collapse and not self._has_collapsed:
                yield self._collapse(
                    row, f"the reward fell from {before.mean:.3g} (step {before.step}) to {now.mean:.3g}"
                )
            self._has_collapsed = is_low and (is_collapse or self._has_collapsed)
        if before is None or now.mean >= before.mean:
            self._best = now
            self._jump = row if row.get("ratio/log_s_mean") is not None else None

    def _level(self, rows: list[Row]) -> _Level:
        variance = sum((row.get("reward/std") or 0.0) ** 2 for row in rows) / self._groups / len(rows) ** 2
        return _Level(rows[-1]["step"], sum(row["reward/mean"] for row in rows) / len(rows), math.sqrt(variance))

    def _fall_of_held_out(self, row: Row) -> Iterator[Finding]:
        """A held-out score below half of its best, with intervals that do not overlap."""
        score, half = row.get("eval/reward"), row.get("eval/reward_ci") or 0.0
        if score is None:
            return
        if self._held_out is None or score >= self._held_out[1]:
            self._held_out = (row["step"], score, half)
            return
        step, best, best_half = self._held_out
        if best > 0 and score < COLLAPSE * best and score + half < best - best_half and not self._has_collapsed:
            self._has_collapsed = True
            yield self._collapse(row, f"the held-out score fell from {best:.3g} (step {step}) to {score:.3g}")

    def _evidence(self, row: Row) -> tuple[str, str] | None:
        """(cause and remedy, change) that the metrics since the best reward support."""
        jump = self._jump
        if jump is not None and abs(jump["ratio/log_s_mean"]) > FAR:
            return (
                f"the updates of step {jump['step']} moved the sequences by log s = {jump['ratio/log_s_mean']:+.2g} on "
                f"average: {self._advice(jump)}",
                "actor.optimizer.lr lower",
            )
        if (row.get("length/truncated") or 0.0) > 0.9:
            return (
                f"{row['length/truncated']:.0%} of the completions reach gconfig.max_new_tokens: the policy no longer "
                "ends its answers; set actor.optimizer.lr lower, and start again from step 0",
                "actor.optimizer.lr lower",
            )
        if (entropy := row.get("policy/entropy")) is not None and entropy < 1e-3:
            return (
                f"the policy's entropy is {entropy:.1g}: it no longer explores; set gconfig.temperature or "
                "actor.entropy_coef higher, or actor.optimizer.lr lower, and start again",
                "actor.optimizer.lr lower",
            )
        return None

    def _collapse(self, row: Row, what: str) -> Finding:
        cause, change = self._evidence(row) or (
            f"the metrics do not show why; read samples of these steps, and compare with a run at a lower "
            f"actor.optimizer.lr (it is {row.get('optimizer/lr') or 0.0:.3g})",
            "",
        )
        return self._finding(row, "collapse", f"{what}: {cause}", change)

    # Conditions of single steps.

    def _first_batch(self, row: Row) -> Iterator[Finding]:
        """No group of the first batch has different rewards: the likely cause, by evidence."""
        if row["step"] != 1 or row.get("reward/zero_variance_groups") != 1.0:
            return
        mean, is_equal = row.get("reward/mean"), row.get("reward/std") == 0.0
        change = ""
        if row.get("length/truncated") == 1.0:
            change = "gconfig.max_new_tokens higher"
            why = f"every completion was truncated; set {change}, or train the model to end its answers"
        elif is_equal and mean == 0.0 and row.get("reward/part_format") == 0.0:
            why = "no completion has the wanted format (reward/part_format is 0); show it in the prompt, or train it"
        elif is_equal and mean == 0.0:
            why = (
                "every reward of the first batch is 0: the reward does not match the completions, or the problems are "
                "too hard (`gspo preview` shows completions and rewards, `gspo doctor --reward` checks the reward)"
            )
        elif is_equal and mean is not None and mean >= 1.0:
            why = "every completion is correct: the problems are too easy for this model"
        else:
            change = "gconfig.n_samples or gconfig.temperature higher"
            why = f"prompts are either too easy or too hard; set {change}"
        nothing = "nothing was learnt from the first batch, because the samples of every prompt earn the same"
        # A model that solves some held-out problems, or was not evaluated, may have had bad luck in one batch.
        is_certain = self._held_out is not None and self._held_out[1] in (0.0, 1.0)
        yield self._finding(row, "nothing to learn", f"{nothing}: {why}", change, stops=is_certain)

    def _at_once(self, row: Row) -> Iterator[Finding]:
        at_clip = row.get("reward/at_clip") or 0.0
        if at_clip > 0.01 and self._is_first_of_powers("rewards clipped", True):
            text = (
                f"{at_clip:.0%} of the rewards are at or beyond actor.reward_clip and look equal to the trainer; set "
            )
            text += "actor.reward_clip higher or actor.reward_scaling lower"
            yield self._finding(row, "rewards clipped", text, "actor.reward_clip higher")
        worst = row.get("ratio/first_minibatch_max_abs")
        if row.get("policy/proximal") != "rollout" and worst is not None and worst > 1e-6:
            text = (
                f"mini-batch 1 has a ratio other than 1 (|log s| up to {worst:.2e}): π_old is not its own forward pass"
            )
            yield self._finding(row, "first mini-batch", text)

    # Conditions that last.

    def _is_first_of_powers(self, name: str, holds: bool, patience: int = 1) -> bool:
        """Whether `name` has held for patience × 1, 2, 4, 8, … steps in a row with this one."""
        self._counts[name] = count = self._counts.get(name, 0) + 1 if holds else 0
        # bit_count() == 1 is true for powers of two.
        return count >= patience and count % patience == 0 and (count // patience).bit_count() == 1

    def _lasting(self, row: Row) -> Iterator[Finding]:
        for name, (holds, patience, change, text) in self._conditions(row).items():
            if self._is_first_of_powers(name, holds, patience) and not (name in AFTER_COLLAPSE and self._has_collapsed):
                yield self._finding(row, name, text.format(n=self._counts[name]), change)

    def _conditions(self, row: Row) -> dict[str, tuple[bool, int, str, str]]:
        """By finding: whether its condition holds in this step, after how many it is told, the change, the text."""
        return {**self._of_clipping(row), **self._of_rewards(row)}

    def _of_clipping(self, row: Row) -> dict[str, tuple[bool, int, str, str]]:
        clipped = (row.get("clip/sequences_low") or 0.0) + (row.get("clip/sequences_high") or 0.0)
        seen, clips = row.get("ratio/log_s_std") is not None, row.get("clip/eps_low") is not None
        age, uses_sampler = row.get("staleness/max") or 0, row.get("policy/proximal") == "rollout"
        noise = (row.get("noise/log_s_p95_abs") or 0.0) if uses_sampler else 0.0
        whole, auto = ("sequence", ", or actor.eps_clip=auto") if self._by_sequence else ("token", "")
        many = clipped if self._by_sequence else row.get("clip/tokens") or 0.0
        # Without a clip range ε is infinite, and no noise is above it.
        eps = min(row.get("clip/eps_low") or math.inf, row.get("clip/eps_high") or math.inf)
        return {
            "noise above the clip range": (
                noise > eps and not self._noise_is_forced,
                PATIENCE,
                "actor.prox_logp_method: recompute",
                "the sampler's log-probs are used as π_old, and their noise was above the clip range for {n} steps "
                f"(noise/log_s_p95_abs); set actor.prox_logp_method=recompute or actor.eps_clip higher{auto}",
            ),
            "nothing clipped": (
                clips and self._num_updates > 1 and seen and clipped == 0 and row.get("clip/sequences_low") is not None,
                PATIENCE,
                "actor.eps_clip lower",
                f"no {whole} was clipped for {{n}} steps: the clip range is wider than the policy's drift; "
                f"set actor.eps_clip lower{auto}",
            ),
            "most clipped": (
                clips and many > 0.5,
                MOST_CLIPPED,
                "actor.use_decoupled_loss: true" if age and uses_sampler else "actor.eps_clip higher",
                f"more than half of the {whole}s were clipped for {{n}} steps: "
                + self._why_most(age, uses_sampler, auto),
            ),
            "ratio stuck at 1": (
                self._num_updates > 1 and seen and row.get("ratio/log_s_max_abs") == 0.0,
                PATIENCE,
                "",
                "every ratio was exactly 1 for {n} steps: π_old is the policy that is being trained, or no weight "
                "changes (actor.optimizer.lr 0?)",
            ),
        }

    def _of_rewards(self, row: Row) -> dict[str, tuple[bool, int, str, str]]:
        entropy, mean = row.get("policy/entropy"), row.get("reward/mean")  # 0.0 is a value, so no `or` here
        equal = row.get("reward/zero_variance_groups") == 1.0
        is_zero, is_solved = equal and mean == 0.0, equal and mean is not None and mean >= 1.0
        change, why = "", "the problems are too hard, or the reward does not match the completions; look with `gspo "
        why += "preview` and `gspo doctor --reward`"
        if (row.get("length/truncated") or 0.0) > 0.9:
            change = "gconfig.max_new_tokens higher"
            why = f"most completions are cut off; set {change}"
        return {
            "every reward is 0": (
                is_zero,
                TOTAL,
                change,
                "every reward was 0 for {n} steps, so nothing is learnt: " + why,
            ),
            "everything is solved": (
                is_solved,
                PATIENCE,
                "",
                "every sample earned the full reward for {n} steps, so nothing is learnt: use harder problems, or stop",
            ),
            "nothing to learn": (
                equal and not is_zero and not is_solved,
                PATIENCE,
                "gconfig.n_samples or gconfig.temperature higher",
                "every group had equal rewards for {n} steps: prompts are either too easy or too hard; set "
                "gconfig.n_samples or gconfig.temperature higher",
            ),
            "entropy collapsed": (
                entropy is not None and entropy < 1e-3,
                PATIENCE,
                "gconfig.temperature higher",
                "the policy's entropy has been below 0.001 for {n} steps: it no longer explores; set "
                "gconfig.temperature higher, or stop earlier",
            ),
        }

    @staticmethod
    def _why_most(age: int, uses_sampler: bool, auto: str) -> str:
        if age and uses_sampler:
            return (
                f"the ratio compares with weights up to {age} versions old, so it is not 1 before any update; set "
                "actor.use_decoupled_loss=true, which clips against the trainer's own π_old and weights by π_old/μ"
            )
        return f"set actor.eps_clip higher or actor.optimizer.lr lower{auto}"


MOST_CLIPPED = 5  # steps in a row
AFTER_COLLAPSE = ("every reward is 0", "nothing to learn", "entropy collapsed", "most clipped")  # its consequences


def findings(rows: Iterable[Row], config: Mapping[str, Any], by_sequence: bool) -> list[Finding]:
    """All findings of a run from its rows and its config.yaml as plain values."""
    data, actor = config.get("train_dataset"), config.get("actor")
    groups = data.get("batch_size") if isinstance(data, Mapping) else None
    updates = actor.get("ppo_n_minibatches") if isinstance(actor, Mapping) else None
    diagnosis = Diagnosis(
        groups=groups if isinstance(groups, int) else 1,  # 1: a fall must be large to be a finding
        num_updates=updates if isinstance(updates, int) else 1,
        by_sequence=by_sequence,
        noise_is_forced=isinstance(actor, Mapping) and actor.get("prox_logp_force") is True,
    )
    return [finding for row in rows for finding in diagnosis.see(row)]

"""What rank 0 writes of every step: metrics, samples, held-out answers, log lines and warnings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.diagnosis import REPLACED_SETTINGS, Diagnosis, Finding
from gspo.learner import Batch, StepReport
from gspo.monitor import (
    Display,
    Loggers,
    question_of,
    sample_rows,
    shown_text,
    step_metrics,
    supervised_metrics,
    time_metrics,
    token_tensors,
)
from gspo.rollout import RolloutProducer
from gspo.runs import RunDir
from gspo.system import PROFILED_STEPS, Clock, step_name
from gspo.train.evaluate import answer_rows, problem_of
from gspo.types import Failure, Group

_MAX_TOLD = 5  # failures that are shown in full


class Recorder:
    """Writes what happened in a step.

    saves_samples: whether sample files are written; stop_on_alarm: a finding ends the run; profile: record timelines of
    some steps; diagnosis: None for completions of the data set, because its checks are about samples and rewards.
    """

    def __init__(
        self,
        run: RunDir,
        display: Display,
        loggers: Loggers,
        say: Callable[[str], None],
        decode: Callable[[Sequence[int]], str],
        *,
        saves_samples: bool,
        stop_on_alarm: bool,
        profile: bool,
        diagnosis: Diagnosis | None,
    ) -> None:
        self._run, self._display, self._loggers, self._say, self._decode = run, display, loggers, say, decode
        self.saves_samples, self._stop_on_alarm, self._profile = saves_samples, stop_on_alarm, profile
        self._diagnosis = diagnosis
        self._found: list[Finding] = []  # in the last row
        self._told_settings = False
        self._told: set[tuple[str, str]] = set()  # failures that were shown

    def metrics(self, batch: Batch, report: StepReport, step: int) -> dict[str, Any]:
        """The metrics of `step`, without times."""
        # The batch of `step` was trained with weights of version step − 1.
        return {"step": step, **step_metrics(batch, report, step - 1), **report.settings}

    def time_metrics(
        self, batch: Batch, report: StepReport, clock: Clock, producer: RolloutProducer
    ) -> dict[str, float]:
        """Seconds by phase, and tokens per second; call it last."""
        return time_metrics(batch, report, clock, producer.count_sampled(), background=producer.background)

    def write(self, metrics: Mapping[str, Any], batch: Batch | None) -> None:
        """One row of metrics, with an example of its batch for the display."""
        if self._diagnosis is None:
            metrics = supervised_metrics(metrics)
        else:
            self._found = self._diagnosis.see(metrics)
        if batch is not None:
            self._tell_failures(batch, metrics["step"])
        self._run.metrics(metrics)
        self._loggers.write(metrics)
        self._display.step(metrics, None if batch is None else _example(batch))

    def _tell_failures(self, batch: Batch, step: int) -> None:
        """The first failure of each kind, in full: the samples are masked, and the run continues."""
        for group in batch.groups:
            for outcome in group.outcomes:
                if isinstance(outcome, Failure) and outcome.kind != "limit" and len(self._told) < _MAX_TOLD:
                    first = outcome.message.partition("\n")[0]
                    if (outcome.kind, first) not in self._told:
                        self._told.add((outcome.kind, first))
                        self._say(f"warning: a reward failed in step {step}: {outcome.kind}: {outcome.message}")

    def save_samples(self, batch: Batch, report: StepReport, step: int) -> None:
        """Every sample of a step, and values per token of some."""
        self._run.samples(step, sample_rows(batch, report, step, self._decode), token_tensors(batch, report))
        self._run.images(group.prompt.images for group in batch.groups)

    def save_evaluation(self, groups: Sequence[Group], step: int) -> None:
        """Every held-out answer of an evaluation after `step`."""
        rows = (
            {"step": step, **problem_of(group), **answer}
            for group in groups
            for answer in answer_rows(group, self._decode)
        )
        self._run.evaluation(step, rows)
        self._run.images(group.prompt.images for group in groups)

    def save_pass_rates(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._run.pass_rates(rows)

    def alarm(self, metrics: Mapping[str, Any]) -> str | None:
        """Print the findings of the row that was written; returns the one that must stop the run, if any."""
        if metrics.get("agent/settings_replaced") and not self._told_settings:
            self._told_settings = True
            self._say(REPLACED_SETTINGS)
        for finding in self._found:
            self._say(str(finding))
        return next((f.text for f in self._found if f.stops and self._stop_on_alarm), None)

    def profile_file(self, step: int) -> Path | None:
        """Where the timeline of this step is written; None: it is not profiled."""
        if not (self._profile and step in PROFILED_STEPS):
            return None
        return self._run.path / "profile" / f"{step_name(step)}.trace.json.gz"

    def close(self) -> None:
        self._loggers.close()


def _example(batch: Batch) -> tuple[str, str, bool] | None:
    """The first prompt, its first completion, and whether that completion's reward is positive."""
    if not batch.groups or not batch.groups[0].texts:
        return None
    first = batch.groups[0]
    # The end of a prompt that a chat template made is the same for all prompts.
    question = question_of(first.prompt).get("question", first.prompt.text)
    return shown_text(first.prompt.images) + question, first.texts[0], bool(batch.rewards[0] > 0)

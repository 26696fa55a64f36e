"""What rank 0 writes of every step: metrics, samples, held-out answers, log lines and alarms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.learner import Batch, StepReport
from gspo.monitor import (
    REPLACED_SETTINGS,
    Display,
    Loggers,
    alarms,
    first_step_message,
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
from gspo.system import PROFILED_STEPS, Clock, read_jsonl, step_name
from gspo.train.evaluate import answer_rows, problem_of
from gspo.types import Failure, Group

_MAX_TOLD = 5  # failures that are shown in full


class Recorder:
    """Writes what happened in a step.

    saves_samples: whether sample files are written; stop_on_alarm: an alarm ends the run; noise_is_forced: the user
    accepted a π_old that is noisier than the clip range; by_sequence: one ratio per sequence; profile: record timelines
    of some steps; supervised: the completions are those of the data set.
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
        noise_is_forced: bool,
        by_sequence: bool,
        profile: bool,
        num_updates: int,
        supervised: bool,
    ) -> None:
        self._run, self._display, self._loggers, self._say, self._decode = run, display, loggers, say, decode
        self.saves_samples, self._stop_on_alarm, self._profile = saves_samples, stop_on_alarm, profile
        self._noise_is_forced, self._by_sequence, self._num_updates = noise_is_forced, by_sequence, num_updates
        self._supervised = supervised
        self._first_accuracy: float | None = None  # on held-out problems, before training
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
        if self._supervised:
            metrics = supervised_metrics(metrics)
        if metrics["step"] == 0:
            self._first_accuracy = metrics.get("eval/accuracy")
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

    def alarm(self, metrics: Mapping[str, Any], counts: dict[str, int]) -> str | None:
        """Print the alarms of a step; returns the one that must stop the run (on_alarm: stop), if any."""
        if self._supervised:  # every check below is about samples and rewards
            return None
        if at_once := first_step_message(metrics):
            self._say(f"warning: {at_once}")
            # A model that solves some held-out problems, or was not evaluated, may have had bad luck in one batch.
            if self._stop_on_alarm and self._first_accuracy in (0.0, 1.0):
                return at_once
        if metrics.get("agent/settings_replaced") and not self._told_settings:
            self._told_settings = True
            self._say(REPLACED_SETTINGS)
        messages = alarms(
            metrics,
            counts,
            clips=metrics["clip/eps_low"] is not None,
            num_updates=self._num_updates,
            own_forward=metrics["policy/proximal"] != "rollout",
            noise_is_forced=self._noise_is_forced,
            by_sequence=self._by_sequence,
            history=lambda: read_jsonl(self._run.path / "metrics.jsonl"),
        )
        for message in list(messages):  # a list first: every alarm is counted before the first can end the run
            self._say(f"alarm at step {metrics['step']}: {message}")
            if self._stop_on_alarm:
                return message
        return None

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

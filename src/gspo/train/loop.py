"""The training loop, from prompts to new weights:

    prompts → groups of samples → rewards → advantages → mini-batches → updates → weights for the sampler → record

Rank 0 runs a `Leader`. The other ranks run a `Follower`, which trains on the batches that rank 0 broadcasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from gspo.errors import GspoError, TrainingError
from gspo.faults import reached
from gspo.learner import (
    Batch,
    StepReport,
    batch_with_advantages,
    reference_logp,
    with_teacher_advantages,
    with_token_advantages,
)
from gspo.rollout import pack_batch, unpack_batch
from gspo.runs import State, checkpoint
from gspo.system import Clock, beat, by_name, timeline
from gspo.train.evaluate import Evaluator, held_out_loss
from gspo.train.opening import LeaderParts, Parts
from gspo.train.trainer import Summary
from gspo.types import Group


class Loop:
    """What every rank does with a batch."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def assemble(self, groups: Sequence[Group], clock: Clock) -> Batch:
        """Rewards become advantages, and sequences are assigned to mini-batches; nothing later changes either."""
        learner = self.parts.learner
        batch = batch_with_advantages(groups, num_minibatches=learner.plan.num_minibatches, **learner.assembly)
        # Reference log-probs and values are computed once per batch, before the first update changes the models. The
        # token advantages below use both.
        if learner.reference is not None:
            with clock("reference"):
                batch = replace(batch, reference_logp=reference_logp(learner.reference, batch))
        if learner.critic is not None:
            token_values = by_name("gspo.learner.critic:token_values")
            with clock("critic"):
                batch = replace(batch, values=token_values(learner.critic, batch))
        batch = with_token_advantages(batch, learner.credit)
        if learner.teacher is not None:
            with clock("teacher"):
                logp = learner.teacher.logp(batch)
            # With an exact KL the loss has the teacher's term, and the advantages do not.
            coef = learner.teacher.coef if learner.teacher.exact_kl is None else 0.0
            batch = with_teacher_advantages(batch, logp, coef)
        return batch

    def update(self, batch: Batch, clock: Clock) -> StepReport:
        """K optimizer updates, one per mini-batch."""
        self.parts.display.phase("training")
        return self.parts.updater.update(batch, self.parts.state, clock)

    def publish(self, clock: Clock) -> None:
        """The new weights are a new version: servers load them; an in-process sampler shares them."""
        with clock("sync"):
            self.parts.state.step += 1
            self.parts.publish(self.parts.state.step)


class Leader(Loop):
    """What rank 0 does, or the only process: it samples, decides and records."""

    def __init__(self, parts: LeaderParts) -> None:
        super().__init__(parts)
        self.parts: LeaderParts = parts

    def run(self) -> Summary:
        parts = self.parts
        self.begin()
        while parts.state.step < parts.total_steps and parts.stop.signal is None:
            with timeline(parts.recorder.profile_file(parts.state.step + 1)):
                clock = Clock()
                groups = self.sample(clock)
                # Every rank must take part in the collectives of assemble, update and publish, so it needs the batch
                # first.
                self.broadcast(groups)
                batch = self.assemble(groups, clock)
                report = self.update(batch, clock)
                self.publish(clock)
                self.record(batch, report, clock)
        return self.end()

    def begin(self) -> None:
        """Log the data and the warnings; evaluate before the first step."""
        parts = self.parts
        for message in parts.opening_messages:
            parts.say(message)
        # A signal while the parts were opened ends the run before its first evaluation.
        is_first = parts.state.step == 0 and parts.stop.signal is None
        if is_first and parts.evaluator is not None and parts.evaluator.at_start:
            parts.recorder.write({"step": 0, **self.evaluate(parts.evaluator), **parts.count_episodes()}, None)

    def sample(self, clock: Clock) -> list[Group]:
        """A rollout batch of scored groups: sampled now, or ahead of time within rollout.max_head_offpolicyness."""
        self.parts.display.phase("sampling")
        try:
            groups, self.parts.num_refilled = self.parts.producer.next(self.parts.state.step, clock)
            if self.parts.curriculum is not None:
                self.parts.curriculum.close(group.submission for group in groups)
            return groups
        except GspoError:
            # The last step is complete, so the run can resume after it.
            self.save_unsaved_step()
            raise

    def broadcast(self, groups: Sequence[Group]) -> None:
        """Send the whole batch to every rank; each trains on its share of every mini-batch."""
        if self.parts.world.size > 1:
            self.parts.world.broadcast_command("train", *pack_batch({"state": asdict(self.parts.state)}, groups))

    def record(self, batch: Batch, report: StepReport, clock: Clock) -> None:
        """Samples, metrics, evaluation, findings, checkpoint."""
        parts, step = self.parts, self.parts.state.step
        recorder = parts.recorder
        with clock("bookkeeping"):
            metrics = recorder.metrics(batch, report, step)
            metrics["reward/refilled_groups"] = parts.num_refilled
            if parts.curriculum is not None:
                metrics |= parts.curriculum.metrics()
            if recorder.saves_samples:
                recorder.save_samples(batch, report, step)
        is_last = step == parts.total_steps
        # A signal does not cause an evaluation: a resumed run has the same evaluations as an uninterrupted one.
        if parts.evaluator is not None and (is_last or parts.evaluator.is_due(step)):
            with clock("eval"):
                metrics |= self.evaluate(parts.evaluator)
        # Before the checkpoint, so that the stored time includes this step.
        parts.state.seconds += clock.total()
        metrics |= recorder.time_metrics(batch, report, clock, parts.producer)
        metrics |= parts.count_episodes()
        recorder.write(metrics, batch)
        # After the metrics are written: the row that explains the finding is on disk.
        if fatal := recorder.alarm(metrics):
            self.save_unsaved_step()
            raise TrainingError(f"stopped by on_alarm: stop at step {step}: {fatal}")
        is_best = parts.state.best_step == step
        if is_last or is_best or parts.stop.signal is not None or parts.saver.is_due(step):
            self.save()

    def evaluate(self, evaluator: Evaluator) -> dict[str, float | int | None]:
        """Held-out scores as metrics, with the best step so far, which the state remembers."""
        self.parts.display.phase("evaluating")
        (scores, groups), state, world = evaluator.evaluate(), self.parts.state, self.parts.world
        if evaluator.rows:
            if world.size > 1:
                world.broadcast_command("held_out_loss", *pack_batch({}, evaluator.rows))
            scores |= held_out_loss(self.parts.learner, evaluator.rows)
        state.compare_best(scores, evaluator.best)
        if groups and self.parts.recorder.saves_samples:
            self.parts.recorder.save_evaluation(groups, state.step)
        return {**scores, "eval/best_step": state.best_step}

    def save(self) -> None:
        """Publish a checkpoint of the finished step."""
        # Groups that were sampled ahead are part of the checkpoint, so a resumed run trains on the same samples.
        pending = self.parts.producer.snapshot()
        self.parts.world.broadcast_command("save")  # the other ranks hold their shards of the weights
        curriculum = self.parts.curriculum
        self.parts.saver.save(self.parts.state, pending, None if curriculum is None else curriculum.to_json())
        if curriculum is not None:
            self.parts.recorder.save_pass_rates(curriculum.rows())

    def save_unsaved_step(self) -> None:
        """Save the last finished step unless a checkpoint holds it already. Call it between steps only."""
        if self.parts.state.step != self.parts.saver.last_step:
            self.save()

    def end(self) -> Summary:
        parts, step = self.parts, self.parts.state.step
        if step < parts.total_steps:
            self.save_unsaved_step()  # the signal may have arrived after `record` looked for it
            parts.say(f"stopped after step {step}; run the same command again to resume")
        else:
            parts.say(f"finished after step {step}")
        beat("closing the run")
        reached("end.close")
        return Summary(parts.path, step, parts.state.seconds, finished=step >= parts.total_steps)


class Follower(Loop):
    """What the other ranks do: train on rank 0's batches and help it to save, until it ends the run."""

    def run(self) -> Summary:
        parts = self.parts
        for command in parts.world.commands():
            if command.what == "train":
                clock = Clock()
                # Every rank uses rank 0's state, so decisions such as the clip range are the same everywhere.
                parts.state = State(**command.content["state"])
                self.update(self.assemble(unpack_batch(command), clock), clock)
                self.publish(clock)
            elif command.what == "held_out_loss":
                held_out_loss(parts.learner, unpack_batch(command))
            elif command.what == "save":
                checkpoint.contribute(*parts.learner.trained)
            else:
                return Summary(parts.path, **command.content, rank=parts.world.rank)
        raise AssertionError("rank 0 ends the run by a command")

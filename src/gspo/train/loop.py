"""The screenplay: sample, score, train, publish, record; again.

    prompts → groups of samples → rewards → advantages → mini-batches → updates → new weights for the sampler

`Trainer(config, reward=…, dataset=…, env=…).train()` is the whole Python surface.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.config import Loaded, digest, dump, load, write_origins
from gspo.config.lint import check
from gspo.data.dataset import Dataset
from gspo.data.mixture import Mixture
from gspo.errors import ConfigError, GspoError, TrainingError
from gspo.learner.batch import Batch
from gspo.learner.credit import assemble, assign
from gspo.learner.critic import Critic, critic_metrics, token_values, train_critic
from gspo.learner.proximal import AutoClip, choose_source, clip_range, judge_noise, next_quantile, noise_message
from gspo.learner.ranks.signals import StopRequest
from gspo.learner.ranks.world import ALONE, NullSampler, World, joined
from gspo.learner.reference import reference_logp
from gspo.learner.step import Plan, StepReport, train_step
from gspo.monitor.alarms import alarms
from gspo.monitor.display import Silent, make_display
from gspo.monitor.metrics import measured_noise, step_metrics, time_metrics
from gspo.monitor.samples import sample_rows, token_tensors
from gspo.rewards.route import GivenRewards
from gspo.rollout.buffer import Snapshot
from gspo.rollout.groups import Filter, Workflow, refuse_failures, single_turn
from gspo.rollout.storage import handed, pack, received, unpack
from gspo.runs import checkpoint
from gspo.runs.directory import RunDir, environment
from gspo.runs.resume import resume
from gspo.runs.state import State
from gspo.system.clock import PROFILED_STEPS, Clock, timeline
from gspo.system.files import to_json, write_run_file
from gspo.system.heartbeat import watched
from gspo.system.launched import Launched
from gspo.train.build.compute import num_ranks, set_threads
from gspo.train.build.data import make_data, refuse_long_prompts
from gspo.train.build.episodes import make_environment, make_episodes
from gspo.train.build.objective import assembly, first_proximal_source, make_credit, make_plan, narrowest_clip
from gspo.train.build.optim import learning_rates, make_trained_optimizer
from gspo.train.build.other_models import make_critic, make_reference
from gspo.train.build.policy import context_length, make_policy
from gspo.train.build.rewards import make_rewards
from gspo.train.build.rollout import make_filter, make_producer
from gspo.train.build.run import checkpoint_frequency, is_due, make_loggers
from gspo.train.build.sampler import decoder, evaluation_params, make_sampler, weights_for
from gspo.train.evaluate import Evaluation, evaluate
from gspo.train.relaunch import hand_over
from gspo.types import Group, Prompt


@dataclass(frozen=True)
class Summary:
    """What a run came to."""

    path: Path
    steps: int
    seconds: float
    finished: bool  # False: a signal ended it; the same command goes on
    rank: int = 0  # of the process that says so


class Trainer:
    """Trains one policy by one config.

    config      a YAML path (with `overrides`), or what `gspo.config.load` returned
    reward      a function, a name, or a list of them; None: the config's, else the task's own
    dataset     rows (mappings with a prompt and what the reward needs) or a `tasks.Dataset`; None: train_dataset
    valid       the same for held-out problems; None: valid_dataset, else the training data's held-out split
    env         an environment, `async (client, data)` (docs/episodes.md); None: env.path's, else one completion
    workflow    how requests become samples (see `train.rollout.Workflow`); None: by env, or one completion per prompt
    dynamic_filter_fn  which groups to train on (see `train.rollout.Filter`); None: rollout.dynamic_filter_fn
    """

    def __init__(
        self,
        config: str | Path | Loaded,
        *,
        reward: Any = None,
        dataset: Dataset | Mixture | Sequence[dict[str, Any]] | None = None,
        valid: Dataset | Mixture | Sequence[dict[str, Any]] | None = None,
        env: Any = None,
        workflow: Workflow | None = None,
        dynamic_filter_fn: Filter | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self.loaded = config if isinstance(config, Loaded) else load(config, overrides)
        self.config = self.loaded.config
        self.warnings = check(self.loaded)
        self.environment = make_environment(self.config, env)
        if self.environment is not None and workflow is not None:
            raise ConfigError("an environment (env=…, env.path) and a workflow are given; one of them makes samples")
        self.workflow = workflow or partial(single_turn, deadline_s=self.config.rollout.request_timeout)
        self.stop = StopRequest()
        self.world: World = ALONE  # until `train` has joined another
        self._given = reward, dataset, valid
        self.keeps = make_filter(self.config, dynamic_filter_fn)

    def train(self) -> Summary:
        """Run to the end, or to a signal; the same call again goes on from the last checkpoint."""
        hand_over(self.loaded)
        timeout = self.config.stall_timeout
        with joined(num_ranks(self.config), timeout, self.stop) as self.world:
            try:
                self.open()
                with watched(timeout + self.world.margin, self.path / "log.txt", self.say):
                    summary = self.lead() if self.world.is_first else self.follow()
            finally:
                self.close()
            self.world.broadcast_command(
                "end", {"steps": summary.steps, "seconds": summary.seconds, "finished": summary.finished}
            )
        return summary

    def lead(self) -> Summary:
        """What rank 0 does, or a process that is alone."""
        self.begin()
        while self.state.step < self.total_steps and self.stop.signal is None:
            with timeline(self.profiled()):
                clock = Clock()
                groups = self.sample(clock)
                self.hand_out(groups)
                batch = self.assemble(groups, clock)
                report = self.update(batch, clock)
                self.publish(clock)
                self.record(batch, report, clock)
        return self.end()

    def follow(self) -> Summary:
        """What the other ranks do: train on what rank 0 hands out and help it to save, until it lets them go."""
        for turn in self.world.commands():
            if turn.what == "train":
                clock = Clock()
                self.state = State(**turn.content["state"])
                self.update(self.assemble(received(turn), clock), clock)
                self.publish(clock)
            elif turn.what == "save":
                checkpoint.contribute(self.policy, self.optimizer, self.critic and self.critic.trained)
            else:
                return Summary(self.path, **turn.content, rank=self.world.rank)
        raise AssertionError("turns have an end")

    # The acts

    def sample(self, clock: Clock) -> list[Group]:
        """A rollout batch of scored groups: sampled now, or ahead of time within rollout.max_head_offpolicyness."""
        self.display.phase("sampling")
        try:
            groups, self.num_refilled = self.ahead.next(self.state.step, clock)
            return groups
        except GspoError:
            # Nothing has changed since the last step but the place in the stream: the run can go on from there.
            self.keep()
            raise

    def hand_out(self, groups: Sequence[Group]) -> None:
        """Every rank gets the whole batch, and takes its part of each mini-batch."""
        if self.world.size > 1:
            self.world.broadcast_command("train", *handed({"state": asdict(self.state)}, groups))

    def assemble(self, groups: Sequence[Group], clock: Clock) -> Batch:
        """Rewards to advantages, sequences to mini-batches; nothing below can change either."""
        batch = assemble(groups, num_minibatches=self.plan.num_minibatches, **assembly(self.loaded))
        if self.reference is not None:
            with clock("reference"):
                batch = replace(batch, reference_logp=reference_logp(self.reference, batch))
        if self.critic is not None:
            with clock("critic"):
                batch = replace(batch, values=token_values(self.critic, batch))
        return batch if self.credit is None else assign(batch, self.credit)

    def update(self, batch: Batch, clock: Clock) -> StepReport:
        """K optimizer updates; what they measure decides the next step's clip range and π_old."""
        self.display.phase("training")
        count, plan = self.plan.num_minibatches, self.plan_now()
        rates = learning_rates(self.config.actor.optimizer, self.state.update, count, self.total_steps * count)
        with clock("train"):
            report = train_step(
                self.policy,
                self.optimizer,
                batch,
                plan,
                proximal=self.state.proximal,
                version=self.state.step,
                learning_rates=rates,
                keep_tokens_of=self.kept(batch),
                before_update=self.doubt(batch, plan),
            )
        report.settings = {
            "optimizer/lr": rates[-1],
            "clip/eps_low": plan.settings.get("clip_low"),
            "clip/eps_high": plan.settings.get("clip_high"),
            "policy/proximal": self.state.proximal,
        }
        self.state.update += count
        self.guard("policy", report.applied, batch, report)
        if self.critic is not None:
            with clock("critic"):
                report.settings |= self.update_critic(self.critic, batch, report)
        self.learn_from(batch, report, plan)
        return report

    def update_critic(self, critic: Critic, batch: Batch, policy: StepReport) -> dict[str, Any]:
        """The value model learns from the returns that the advantages were made of."""
        assert self.config.critic is not None
        count, total = critic.num_minibatches, self.total_steps * critic.num_minibatches
        rates = learning_rates(self.config.critic.optimizer, self.state.step * count, count, total)
        report = train_critic(critic, batch, rates)
        self.guard("critic", report.applied, batch, policy)
        return critic_metrics(batch, report, rates[-1])

    def publish(self, clock: Clock) -> None:
        """The new weights are a new version: servers load it, the in-process sampler shares it and drops its cache."""
        with clock("sync"):
            self.state.step += 1
            self.ahead.publish(self.state.step, weights_for(self.config, self.sampler, self.policy))

    def record(self, batch: Batch, report: StepReport, clock: Clock) -> None:
        """Metrics, samples, evaluation, display, alarms, checkpoint."""
        step = self.state.step
        with clock("bookkeeping"):
            metrics = {"step": step, **step_metrics(batch, report, step - 1), **report.settings}
            metrics["reward/refilled_groups"] = self.num_refilled
            if self.config.rollout.dump_to_file:
                self.dump(batch, report, step)
        last = step == self.total_steps
        # Not for a signal: a resumed run must not have measured more than an uninterrupted one.
        if last or self.is_due(self.config.evaluator, self.evaluated):
            with clock("eval"):
                metrics |= self.evaluate().metrics()
        self.state.seconds += clock.total()
        metrics |= time_metrics(batch, report, clock, self.ahead.count_sampled(), beside=self.ahead.beside)
        metrics |= self.counted()
        self.run.metrics(metrics)
        self.loggers.write(metrics)
        self.display.step(metrics, _example(batch))
        self.alarm(metrics)
        if (
            last
            or self.stop.signal is not None
            or self.state.best_step == step
            or self.is_due(checkpoint_frequency(self.config), self.saved)
        ):
            self.save()

    # Evaluation and checkpoints

    def evaluate(self) -> Evaluation:
        """Accuracy on held-out problems; the best checkpoint is kept."""
        self.display.phase("evaluating")
        self.evaluated = time.monotonic()
        params, num_samples = evaluation_params(self.config)
        result, groups = evaluate(
            self.valid,
            num_problems=self.config.evaluator.size,
            num_samples=num_samples,
            params=params,
            sampler=self.ahead.sampler,
            rewards=self.ahead.rewards,
            decode=self.decode,
            workflow=self.workflow,
        )
        refuse_failures(groups, self.config.reward.max_failure_fraction)
        if self.state.best_accuracy is None or result.accuracy > self.state.best_accuracy:
            self.state.best_accuracy, self.state.best_step = result.accuracy, self.state.step
        return result

    def save(self) -> None:
        """Publish a checkpoint of this step, then forget those no longer needed."""
        waiting = self.ahead.snapshot()
        self.world.broadcast_command("save")  # the other ranks hold their parts of it
        self.state.submission, self.state.again = waiting.submission, list(waiting.again)
        state = {**asdict(self.state), "identity": self.identity}
        trained = self.policy, self.optimizer
        critic = self.critic and self.critic.trained
        kept = pack(waiting.groups) if waiting.groups else None
        checkpoint.save(self.run.checkpoints, self.state.step, *trained, state, digest(self.config), critic, kept)
        checkpoint.prune(self.run.checkpoints, self.state.step, self.config.saver.keep, self.state.best_step)
        # Here and not with every step: what is deleted before a checkpoint could be missing after a resume.
        if self.config.stats_logger.keep_sample_steps is not None:
            self.run.delete_samples(self.state.step - self.config.stats_logger.keep_sample_steps)
        self.saved, self.saved_step = time.monotonic(), self.state.step

    def left_waiting(self) -> tuple[Group, ...]:
        """Groups that the checkpoint of this step holds, sampled ahead of it."""
        kept = checkpoint.load_pending_groups(self.run.checkpoints / f"step_{self.state.step:06d}")
        return () if kept is None else unpack(*kept, self.prompt_of)

    def keep(self) -> None:
        """The last finished step, where no checkpoint holds it yet. Call it between steps only."""
        if self.state.step != self.saved_step:
            self.save()

    # Opening and closing

    def open(self) -> None:
        """Build every part; refuse what cannot work before any work is done."""
        if not self.world.is_first:
            return self.open_part()
        config = self.config
        reward, rows, valid = self._given
        self.run = RunDir(self.path)
        self.rewards = make_rewards(config, reward, str(self.run.path / "rewards.log"))
        threads = self.build()
        self.decode = decoder(self.tokenizer)
        self.data, self.valid = make_data(config, rows, valid, self.tokenizer)
        limit = context_length(config, self.policy)
        if self.environment is not None:
            self.rewards = GivenRewards(self.rewards)
            self.workflow = self.episodes = make_episodes(config, self.environment, self.data, self.tokenizer, limit)
        refuse_long_prompts(self.data, limit, config.gconfig.max_new_tokens)
        longest = evaluation_params(config)[0].max_new_tokens
        refuse_long_prompts(self.valid, limit, longest, "eval_gconfig")
        self.num_prompts = config.train_dataset.batch_size
        self.steps_per_epoch = max(len(self.data) // self.num_prompts, 1)
        self.total_steps = config.total_train_steps or config.total_train_epochs * self.steps_per_epoch
        num_parameters = sum(p.numel() for p in self.policy.parameters())
        self.identity = {"threads": threads, "data": self.data.digest(), "parameters": num_parameters}
        self.identity["ranks"] = self.world.size
        self.display = make_display(f"gspo · {self.run.path}", self.total_steps)
        started = State(proximal=first_proximal_source(config))
        critic = self.critic and self.critic.trained
        self.state = resume(self.run, config, self.policy, self.optimizer, self.identity, self.say, critic) or started
        self.display.start_at(self.state.step)
        opened = {
            "step": self.state.step,
            "total_steps": self.total_steps,
            "in_process": not Launched.read().num_samplers,
        }
        self.world.broadcast_command("open", opened)
        self.sampler = make_sampler(config, self.policy, self.tokenizer, self.state.step, self.run.path, self.say)
        self.ahead = make_producer(
            config,
            Snapshot(self.state.submission, tuple(self.state.again), self.left_waiting()),
            sampler=self.sampler,
            rewards=self.rewards,
            prompt_of=self.prompt_of,
            decode=self.decode,
            workflow=self.workflow,
            keeps=self.keeps,
            step=self.state.step,
            total_steps=self.total_steps,
        )
        with write_run_file(self.run.path / "config.yaml") as tmp:
            tmp.write_text(dump(self.loaded), encoding="utf-8")
        with write_run_file(self.run.path / "origins.json") as tmp:
            tmp.write_text(write_origins(self.loaded.origins), encoding="utf-8")
        with write_run_file(self.run.path / "environment.json") as tmp:
            tmp.write_text(to_json(environment(str(self.policy.model.device), threads)), encoding="utf-8")
        self.loggers = make_loggers(config, self.run.path, self.say)
        self.saved = self.evaluated = time.monotonic()
        self.saved_step = self.state.step
        self.stop.listen(self.say)

    def build(self) -> int:
        """The parts that every rank has; the number of threads they compute with."""
        config, world = self.config, self.world
        threads = set_threads(config, world.local_size)
        self.plan, self.credit = make_plan(self.loaded), make_credit(self.loaded)
        self.policy, self.tokenizer = make_policy(config, self.plan.settings["level"] != "token", world)
        self.optimizer = make_trained_optimizer(config, self.policy)
        self.reference = make_reference(config, self.policy, self.tokenizer)
        self.critic = make_critic(config, self.tokenizer, world)
        return threads

    def open_part(self) -> None:
        """`open` for the other ranks: their part of the weights, where rank 0 starts or goes on."""
        self.display = Silent()
        self.stop.listen(self.say)
        self.build()
        opened = next(self.world.commands()).content
        self.total_steps = opened["total_steps"]
        if opened["step"]:
            critic = self.critic and self.critic.trained
            checkpoint.load(
                self.path / "checkpoints" / f"step_{opened['step']:06d}", self.policy, self.optimizer, critic
            )
        null_sampler: Any = NullSampler(opened["in_process"])  # of the sampler, only what `publish` asks of it
        self.sampler = self.ahead = null_sampler
        self.ahead.publish(opened["step"], weights_for(self.config, self.sampler, self.policy))

    def begin(self) -> None:
        """Say what is about to happen; measure held-out accuracy before the first step."""
        for message in (*self.loaded.messages, *(f"warning: {finding}" for finding in self.warnings)):
            self.say(message)
        for line in (*self.data.describe().splitlines(), *self.valid.describe().splitlines()):
            self.say(line)
        if self.valid is self.data:
            self.say(f"warning: {len(self.data)} rows leave none to hold out; evaluation reads them too. Give valid=…")
        if self.state.step == 0 and self.config.evaluator.at_start:
            metrics = {"step": 0, **self.evaluate().metrics(), **self.counted()}
            self.run.metrics(metrics)
            self.loggers.write(metrics)
            self.display.step(metrics, None)

    def end(self) -> Summary:
        finished = self.state.step >= self.total_steps
        if not finished:
            self.keep()  # the signal may have come after the step had looked for it
            self.say(f"stopped after step {self.state.step}; run the same command again to go on from there")
        return Summary(self.run.path, self.state.step, self.state.seconds, finished)

    def close(self) -> None:
        """Give back what was opened, in the reverse order; also after an error half way through `open`."""
        if self.world.size == 1:  # several ranks end together, and are being asked to while they do
            self.stop.restore()
        for part in ("display", "loggers", "episodes", "ahead", "sampler", "rewards", "run"):
            if hasattr(self, part):
                getattr(self, part).close()

    # Details

    @property
    def path(self) -> Path:
        config = self.config
        return Path(config.cluster.fileroot) / config.experiment_name / config.trial_name

    def say(self, message: str) -> None:
        self.display.say(message)
        if self.world.is_first:
            self.run.log(message)

    def prompt_of(self, submission: int) -> Prompt:
        shuffle = self.config.train_dataset.shuffle
        return self.data.prompt(self.data.row_of(self.config.seed, submission, shuffle=shuffle))

    def plan_now(self) -> Plan:
        """The plan with this step's clip range, which `eps_clip: auto` moves."""
        if self.config.actor.eps_clip != "auto":
            return self.plan
        start = self.plan.settings["clip_low"], self.plan.settings["clip_high"]
        # The sampler's noise binds ε only where π_old is the sampler's.
        noise = None if self.state.proximal == "recompute" else self.state.noise
        low, high = clip_range(self.state.auto_eps, noise, start, self.auto_clip())
        return replace(self.plan, settings={**self.plan.settings, "clip_low": low, "clip_high": high})

    def auto_clip(self) -> AutoClip:
        return AutoClip(**self.config.actor.eps_clip_auto.model_dump())

    def learn_from(self, batch: Batch, report: StepReport, plan: Plan) -> None:
        """Noise floor, the automatic clip range, and whether the sampler may serve as π_old."""
        state, noise = self.state, measured_noise(report.noise_log_s, batch, self.state.step)
        first, measured = state.noise is None, noise and noise.floor(state.proximal == "centred")
        state.noise = state.noise if measured is None else measured
        if self.config.actor.eps_clip == "auto":
            later = batch.minibatch > 0
            log_s, advantages = report.log_s[later], batch.advantages[later]
            state.auto_eps = next_quantile(state.auto_eps, log_s, advantages, self.auto_clip())
        if self.config.actor.prox_logp_method != "auto" or plan.num_minibatches == 1:
            return
        eps = plan.settings.get("clip_low")
        source = choose_source(measured, eps, state.proximal)
        if measured is not None and (first or source != state.proximal):
            self.say(
                f"π_old of mini-batches 2…{plan.num_minibatches} comes from the "
                f"{'sampler' if source == 'sampler' else 'trainer, recomputed'}: noise p95 |log s| = {measured:.1e}"
                + (f", clip range {eps:.1e}" if eps else "")
            )
        state.proximal = source

    def doubt(self, batch: Batch, plan: Plan) -> Callable[[NDArray[np.float64]], None] | None:
        """With the sampler's log-probs as π_old, the first noise that is measured decides whether they may be."""
        state, actor = self.state, self.config.actor
        eps, centred = narrowest_clip(self.config, plan.settings), state.proximal == "centred"
        if state.noise is not None or eps is None or state.proximal not in ("rollout", "centred"):
            return None

        def decide(log_s: NDArray[np.float64]) -> None:
            noise = measured_noise(log_s, batch, state.step)
            verdict = "fine" if noise is None else judge_noise(noise.floor(centred), eps)
            if noise is None or verdict == "fine":
                return
            said = noise_message(noise, eps, centred=centred)
            if verdict == "above" and not actor.prox_logp_force:
                raise TrainingError(f"{said}; actor.prox_logp_force=true trains all the same")
            self.say(f"warning: {said}")

        return decide

    def guard(self, whose: str, updates: Sequence[bool], batch: Batch, report: StepReport) -> None:
        """A non-finite gradient touched nothing; its batch is kept to look at, and too many in a row end the run."""
        if not self.world.is_first:
            return
        step, in_row = self.state.step + 1, self.state.nonfinite_in_row
        if not all(updates):
            self.dump(batch, report, step)
        for k, taken in enumerate(updates):
            in_row[whose] = 0 if taken else in_row.get(whose, 0) + 1
            if not taken:
                self.say(
                    f"step {step}, mini-batch {k + 1} of the {whose}: non-finite gradient, update skipped; "
                    f"its batch is samples/step_{step:06d}.jsonl"
                )
            if in_row[whose] >= self.config.actor.max_nonfinite_updates:
                raise TrainingError(
                    f"{in_row[whose]} updates of the {whose} in a row had a non-finite gradient "
                    f"(actor.max_nonfinite_updates); the last checkpoint is in {self.run.checkpoints}. "
                    "Lower actor.optimizer.lr, or look at samples/ for broken rewards"
                )

    def dump(self, batch: Batch, report: StepReport, step: int) -> None:
        self.run.samples(step, sample_rows(batch, report, step, self.decode), token_tensors(batch, report))

    def alarm(self, metrics: dict[str, Any]) -> None:
        own_forward = metrics["policy/proximal"] != "rollout"
        spoken = alarms(
            metrics,
            self.state.alarm_counts,
            clips=metrics["clip/eps_low"] is not None,
            num_minibatches=self.plan.num_minibatches,
            own_forward=own_forward,
            noise_is_forced=self.config.actor.prox_logp_force,
        )
        for message in list(spoken):  # all of them have counted before the first can end the run
            self.say(f"alarm at step {metrics['step']}: {message}")
            if self.config.on_alarm == "stop":
                self.keep()
                raise TrainingError(f"stopped by on_alarm: stop at step {metrics['step']}: {message}")

    def kept(self, batch: Batch) -> frozenset[int]:
        """Sequences whose per-token values are kept: evenly spread over those that are trained."""
        live = np.flatnonzero(batch.has_gradient)
        count = min(self.config.stats_logger.keep_token_samples, len(live))
        return frozenset(live[np.arange(count) * len(live) // max(count, 1)].tolist())

    def counted(self) -> Mapping[str, float]:
        """What the environment counted since it was last asked."""
        return {} if self.environment is None else self.episodes.metrics()

    def profiled(self) -> Path | None:
        """Where the timeline of the coming step goes, if there is to be one."""
        step = self.state.step + 1
        asked = self.config.profile and step in PROFILED_STEPS
        return self.run.path / "profile" / f"step_{step:06d}.trace.json.gz" if asked else None

    def is_due(self, frequency: Any, since: float) -> bool:
        return is_due(frequency, self.state.step, self.steps_per_epoch, time.monotonic() - since)


def _example(batch: Batch) -> tuple[str, str, bool] | None:
    """One prompt with its first completion, and whether that earned more than its group's mean or anything at all."""
    if not batch.groups or not batch.groups[0].texts:
        return None
    return batch.groups[0].prompt.text, batch.groups[0].texts[0], bool(batch.rewards[0] > 0)


def run(loaded: Loaded) -> Summary:
    """`gspo train`."""
    return Trainer(loaded).train()

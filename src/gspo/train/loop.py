"""The screenplay: sample, score, train, publish, record; again.

    prompts → groups of samples → rewards → advantages → mini-batches → updates → new weights for the sampler

`Trainer(config, reward=…, dataset=…, workflow=…).train()` is the whole Python surface.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from gspo.config import Config, Loaded, digest, dump, load
from gspo.config.lint import check
from gspo.errors import CheckpointError, ConfigError, DataError, TrainingError
from gspo.tasks.dataset import Dataset
from gspo.tasks.order import order
from gspo.train import checkpoint, setup
from gspo.train.alarms import alarms
from gspo.train.autoclip import AutoClip, bounds, follow
from gspo.train.batch import Batch, assemble, is_flat
from gspo.train.display import make_display
from gspo.train.evaluate import Evaluation, evaluate
from gspo.train.metrics import noise_floor, sample_rows, step_metrics, token_tensors
from gspo.train.optim import learning_rate, make_optimizer
from gspo.train.rollout import Workflow, refuse_failures, sample_groups, single_turn
from gspo.train.rundir import RunDir, atomic, environment, to_json
from gspo.train.step import Plan, ProximalSource, StepReport, train_step
from gspo.types import Group, Score

# The sampler's log-probs serve as π_old where their noise is this far below the clip range.
NOISE_MARGIN = 10.0


@dataclass
class State:
    """Everything that is not weights or moments. There is no RNG state: every draw is a function of its key."""

    step: int = 0  # finished steps; also the version of the weights
    submission: int = 0  # next prompt of the stream
    update: int = 0  # optimizer updates
    proximal: ProximalSource = "recompute"  # where π_old of mini-batches 2…K comes from
    proximal_note: str = ""
    noise: float = 0.0  # last measured p95 |log s|, sampler against trainer
    auto_eps: float | None = None
    nonfinite_in_row: int = 0
    best_accuracy: float | None = None
    best_step: int | None = None
    seconds: float = 0.0  # spent training, over all sessions
    alarm_counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """What a run came to."""

    path: Path
    steps: int
    seconds: float
    first: Evaluation | None
    last: Evaluation | None
    finished: bool


class Trainer:
    """Trains one policy by one config.

    config      a YAML path, a `Loaded` config, or a `Config`
    reward      a function, a name, or a list of them; None: the config's, else the task's own
    dataset     rows (dicts with a prompt and what the reward needs) or a `tasks.Dataset`; None: train_dataset
    valid       the same for held-out problems; None: valid_dataset, else the training data's held-out split
    workflow    how requests become samples (see `train.rollout.Workflow`); None: one completion per prompt
    """

    def __init__(
        self,
        config: str | Path | Loaded | Config,
        *,
        reward: Any = None,
        dataset: Dataset | Sequence[dict[str, Any]] | None = None,
        valid: Dataset | Sequence[dict[str, Any]] | None = None,
        workflow: Workflow | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        self.loaded = _loaded(config, overrides)
        self.config = self.loaded.config
        self.warnings = check(self.loaded)
        setup.refuse_unbuilt(self.config)
        self.workflow = workflow or single_turn
        self._reward, self._dataset, self._valid = reward, dataset, valid
        self._stop_signal: int | None = None

    def train(self) -> Summary:
        """Run to the end, or to a signal; the same call again goes on from the last checkpoint."""
        self.open()
        try:
            first = self.begin()
            while self.state.step < self.total_steps and self._stop_signal is None:
                clock = _Clock()
                groups = self.sample(clock)
                batch = self.assemble(groups)
                report = self.update(batch, clock)
                self.publish(clock)
                self.record(batch, report, clock)
            return self.end(first)
        finally:
            self.close()

    # The acts

    def sample(self, clock: _Clock) -> list[Group]:
        """Fill a rollout batch with scored groups; where asked, in place of those that teach nothing."""
        self.display.phase("sampling")
        wanted, groups, rounds = self.num_prompts, [], 0
        self._flat_groups = 0
        while len(groups) < wanted:
            prompts = [self._next_prompt() for _ in range(wanted - len(groups))]
            with clock("rollout"):
                fresh = sample_groups(
                    prompts,
                    num_samples=self.config.gconfig.n_samples,
                    params=setup.sampling_params(self.config.gconfig),
                    sampler=self.sampler,
                    rewards=self.rewards,
                    decode=self.decode,
                    workflow=self.workflow,
                )
            refuse_failures(fresh, self.config.reward.max_failure_fraction)
            rounds += 1
            if self.config.actor.zero_variance_groups != "refill" or rounds > self.config.actor.max_refills:
                groups += fresh
                break
            groups += [group for group in fresh if not is_flat(group)]
            self._flat_groups += sum(map(is_flat, fresh))
        return groups

    def assemble(self, groups: Sequence[Group]) -> Batch:
        """Rewards to advantages, sequences to mini-batches; nothing below can change either."""
        actor = self.config.actor
        return assemble(
            groups,
            norm=self.norm,
            shaping=setup.make_shaping(self.config),
            num_minibatches=self.plan.num_minibatches,
            adv_norm=None if actor.adv_norm is None else setup.norm_settings(actor.adv_norm),
            zero_variance=actor.zero_variance_groups or "count",
            truncated_is_zero=actor.mask_no_eos_with_zero,
        )

    def update(self, batch: Batch, clock: _Clock) -> StepReport:
        """K optimizer updates; then what they measured decides the next step's clip range and π_old."""
        self.display.phase("training")
        optimizer, total = self.config.actor.optimizer, self.total_steps * self.plan.num_minibatches
        rates = [
            learning_rate(
                self.state.update + k,
                total,
                peak=float(optimizer.lr or 0.0),
                schedule=optimizer.lr_scheduler_type,
                warmup_proportion=optimizer.warmup_steps_proportion,
                min_ratio=optimizer.min_lr_ratio,
            )
            for k in range(self.plan.num_minibatches)
        ]
        with clock("train"):
            report = train_step(
                self.policy,
                self.optimizer,
                batch,
                self.plan_with_clip(),
                proximal=self.state.proximal,
                learning_rates=rates,
                keep_tokens_of=self._kept(batch),
            )
        self.state.update += self.plan.num_minibatches
        self._rate = rates[-1]
        self._guard(report)
        self._learn_from(batch, report)
        return report

    def publish(self, clock: _Clock) -> None:
        """The new weights are a new version; the in-process sampler shares them and only drops its cache."""
        with clock("sync"):
            self.state.step += 1
            self.sampler.load_weights(self.state.step, None)

    def record(self, batch: Batch, report: StepReport, clock: _Clock) -> None:
        """Metrics, samples, evaluation, checkpoint, display, alarms."""
        step, state = self.state.step, self.state
        with clock("bookkeeping"):
            metrics = {"step": step, **step_metrics(batch, report, step - 1)}
            metrics["reward/refilled_groups"] = self._flat_groups
            metrics["optimizer/lr"] = self._rate
            metrics["clip/eps_low"], metrics["clip/eps_high"] = self._eps_used
            metrics["policy/proximal"] = self._proximal_used
            if self.config.rollout.dump_to_file:
                self.run.samples(step, sample_rows(batch, report, step), token_tensors(batch, report))
        last = step == self.total_steps
        if last or setup.is_due(self.config.evaluator, step, self.steps_per_epoch, time.monotonic() - self._evaluated):
            with clock("eval"):
                metrics |= self.evaluate().metrics()
        state.seconds += clock.total()
        metrics |= clock.metrics(batch, report)
        self.run.metrics(metrics)
        self.display.step(metrics, _example(batch))
        self._check(metrics)
        stopping = last or self._stop_signal is not None or state.best_step == step
        since = time.monotonic() - self._saved
        if stopping or any(
            setup.is_due(f, step, self.steps_per_epoch, since) for f in (self.config.saver, self.config.recover)
        ):
            self.save()

    # Evaluation and checkpoints

    def evaluate(self) -> Evaluation:
        """Accuracy on held-out problems; the best checkpoint is kept."""
        self.display.phase("evaluating")
        self._evaluated = time.monotonic()
        how = self.config.eval_gconfig or self.config.gconfig
        greedy = self.config.eval_gconfig is None
        params = setup.sampling_params(how)
        result, _ = evaluate(
            self.valid,
            num_problems=self.config.evaluator.size,
            num_samples=1 if greedy else how.n_samples,
            params=params if not greedy else _greedy(params),
            sampler=self.sampler,
            rewards=self.rewards,
            decode=self.decode,
            workflow=self.workflow,
        )
        self._last_evaluation = result
        if self.state.best_accuracy is None or result.accuracy > self.state.best_accuracy:
            self.state.best_accuracy, self.state.best_step = result.accuracy, self.state.step
        return result

    def save(self) -> None:
        """Publish a checkpoint of this step, then forget those no longer needed."""
        self._saved = time.monotonic()
        checkpoint.save(
            self.run.checkpoints,
            self.state.step,
            self.policy,
            self.optimizer,
            {**asdict(self.state), "identity": self.identity},
            digest(self.config),
        )
        checkpoint.prune(self.run.checkpoints, self.config.saver.keep, self.state.best_step)

    # Opening and closing

    def open(self) -> None:
        """Build every part; refuse what cannot work before any work is done."""
        config = self.config
        self.run = RunDir(Path(config.cluster.fileroot) / config.experiment_name / config.trial_name)
        self.run_log: Callable[[str], None] = self.run.log
        threads = setup.set_threads(config)
        self.plan, self.norm = setup.make_plan(self.loaded)
        if isinstance(self.norm, str) and self.norm == "gae":
            raise ConfigError("algorithm ppo needs a critic, which is not built yet; choose another algorithm")
        self.policy, self.tokenizer = setup.make_policy(config, self.plan.settings["level"] != "token")
        self.decode = setup.decoder(self.tokenizer)
        self.data = self._data(self._dataset, config.train_dataset, "train", "train_dataset")
        self.valid = self._data(self._valid, config.valid_dataset or config.train_dataset, "test", "valid_dataset")
        self.num_prompts = config.rollout.consumer_batch_size or config.train_dataset.batch_size
        self.steps_per_epoch = max(len(self.data) // self.num_prompts, 1)
        self.total_steps = config.total_train_steps or config.total_train_epochs * self.steps_per_epoch
        optimizer = config.actor.optimizer
        self.optimizer = make_optimizer(
            self.policy.parameters(),
            kind=optimizer.type,
            lr=float(optimizer.lr or 0.0),
            weight_decay=optimizer.weight_decay,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        )
        self.identity = {
            "threads": threads,
            "data": self.data.digest(),
            "parameters": sum(p.numel() for p in self.policy.parameters()),
        }
        self.state = State(proximal="rollout" if self._proximal_method() == "rollout" else "recompute")
        self._saved = self._evaluated = time.monotonic()
        self._last_evaluation: Evaluation | None = None
        self.display = make_display(f"gspo · {self.run.path}", self.total_steps)
        self._resume()
        self.sampler = setup.make_sampler(config, self.policy, self.tokenizer, self.state.step)
        self.rewards = setup.make_rewards(config, self._reward, str(self.run.path / "rewards.log"))
        self._refuse_long_prompts()
        with atomic(self.run.path / "config.yaml") as aside:
            aside.write_text(dump(self.loaded), encoding="utf-8")
        device = str(next(self.policy.parameters()).device)
        with atomic(self.run.path / "environment.json") as aside:
            aside.write_text(to_json(environment(device, threads)), encoding="utf-8")
        self._handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}

    def begin(self) -> Evaluation | None:
        """Say what is about to happen; measure held-out accuracy before the first step."""
        for message in (*self.loaded.messages, *(f"warning: {finding}" for finding in self.warnings)):
            self.say(message)
        if self.state.step or not self.config.evaluator.at_start:
            return None
        first = self.evaluate()
        metrics = {"step": 0, **first.metrics()}
        self.run.metrics(metrics)
        self.display.step(metrics, None)
        return first

    def end(self, first: Evaluation | None) -> Summary:
        finished = self.state.step >= self.total_steps
        if not finished:
            self.say(f"stopped after step {self.state.step}; run the same command again to go on from there")
        return Summary(self.run.path, self.state.step, self.state.seconds, first, self._last_evaluation, finished)

    def close(self) -> None:
        for part in ("display", "rewards", "sampler"):
            if hasattr(self, part):
                getattr(self, part).close()
        for number, handler in getattr(self, "_handlers", {}).items():
            signal.signal(number, handler)
        self.run.close()

    def say(self, message: str) -> None:
        self.display.say(message)
        self.run.log(message)

    # Details

    def plan_with_clip(self) -> Plan:
        """The plan with this step's clip range, which `eps_clip: auto` moves."""
        from dataclasses import replace

        settings = dict(self.plan.settings)
        if self.config.actor.eps_clip == "auto":
            default = settings["clip_low"], settings["clip_high"]
            settings["clip_low"], settings["clip_high"] = bounds(
                self.state.auto_eps, self.state.noise, default, self._auto()
            )
        self._eps_used = settings.get("clip_low"), settings.get("clip_high")
        self._proximal_used = self.state.proximal
        return replace(self.plan, settings=settings)

    def _learn_from(self, batch: Batch, report: StepReport) -> None:
        version = self.state.step
        floor = noise_floor(report, batch, version)
        if floor is not None:
            self.state.noise = floor
        if self.config.actor.eps_clip == "auto":
            later = batch.minibatch > 0
            self.state.auto_eps = follow(
                self.state.auto_eps, report.log_s[later], batch.advantages[later], self._auto()
            )
        if self._proximal_method() is not None or floor is None or self.plan.num_minibatches == 1:
            return
        # Unset: the sampler serves as π_old as long as the measured noise is far below the clip range.
        eps = min([e for e in self._eps_used if e is not None], default=0.2)
        source: ProximalSource = "sampler" if floor * NOISE_MARGIN < eps else "recompute"
        if source != self.state.proximal or not self.state.proximal_note:
            self.state.proximal = source
            self.state.proximal_note = (
                f"π_old of mini-batches 2…{self.plan.num_minibatches}: {source} "
                f"(noise p95 |log s| = {floor:.1e}, clip range {eps:.1e})"
            )
            self.say(self.state.proximal_note)

    def _guard(self, report: StepReport) -> None:
        """A non-finite gradient touched nothing; too many in a row end the run."""
        for k, taken in enumerate(report.taken):
            self.state.nonfinite_in_row = 0 if taken else self.state.nonfinite_in_row + 1
            if not taken:
                self.say(f"step {self.state.step + 1}, mini-batch {k + 1}: non-finite gradient, update skipped")
        if self.state.nonfinite_in_row >= self.config.actor.max_nonfinite_updates:
            raise TrainingError(
                f"{self.state.nonfinite_in_row} updates in a row had a non-finite gradient "
                f"(actor.max_nonfinite_updates); the last checkpoint is in {self.run.checkpoints}. "
                "Lower actor.optimizer.lr or look at samples/ for broken rewards"
            )

    def _check(self, metrics: dict[str, Any]) -> None:
        clips = self._eps_used[0] is not None
        method = self._proximal_method()
        watched = metrics if method != "rollout" else {**metrics, "ratio/first_minibatch_max_abs": None}
        for message in alarms(watched, self.state.alarm_counts, clips=clips, num_minibatches=self.plan.num_minibatches):
            self.say(f"alarm at step {metrics['step']}: {message}")
            if self.config.on_alarm == "stop":
                raise TrainingError(f"stopped by on_alarm: stop at step {metrics['step']}: {message}")

    def _next_prompt(self) -> tuple[int, Any]:
        submission = self.state.submission
        self.state.submission += 1
        shuffle = self.config.train_dataset.shuffle
        return submission, self.data.prompt(order(self.config.seed, len(self.data), submission, shuffle=shuffle))

    def _kept(self, batch: Batch) -> frozenset[int]:
        """Sequences whose tokens are kept: evenly spread over those that are trained."""
        live = np.flatnonzero(batch.live)
        count = min(self.config.stats_logger.keep_token_samples, len(live))
        return frozenset(live[np.arange(count) * len(live) // max(count, 1)].tolist())

    def _data(self, given: Any, spec: Any, split: str, key: str) -> Dataset:
        if isinstance(given, Dataset):
            return given
        if given is not None:
            from gspo.tasks.dataset import from_rows

            return from_rows(given, tokenizer=self.tokenizer, key=key)
        return setup.make_data(spec, split, self.tokenizer, self.config.seed, key)

    def _refuse_long_prompts(self) -> None:
        """A prompt that leaves no room for its completion is an error now, not in the middle of the night."""
        limit = self.config.gconfig.max_tokens or self.policy.model.config.get_text_config().max_position_embeddings
        room = limit - self.config.gconfig.max_new_tokens
        for data in (self.data, self.valid):
            for row in range(len(data)):
                if (length := len(data.prompt(row).tokens)) > room:
                    raise DataError(
                        f"{data.key}, row {row}: the prompt has {length} tokens; with gconfig.max_new_tokens = "
                        f"{self.config.gconfig.max_new_tokens} the context of {limit} leaves {room}. Set "
                        f"{data.key}.max_length={max(room, 1)} to drop such rows, or gconfig.max_new_tokens lower"
                    )

    def _resume(self) -> None:
        """Go on from the last good checkpoint of this directory, if there is one and it is this run's."""
        mode = self.config.recover.mode
        for folder, manifest in checkpoint.latest(self.run.checkpoints):
            if mode == "disabled":
                raise ConfigError(
                    f"{self.run.path} holds a run already; set recover.mode=auto to resume it, trial_name to start "
                    "another, or remove the folder"
                )
            if isinstance(manifest, CheckpointError):
                self.say(f"ignored: {manifest}")
                continue
            self._refuse_another_run()
            stored = checkpoint.load(folder, self.policy, self.optimizer)
            identity = stored.pop("identity")
            odd = [f"{k}: {identity[k]} → {v}" for k, v in self.identity.items() if identity.get(k) != v]
            if odd:
                raise ConfigError(f"{folder} is of another run ({'; '.join(odd)}); set trial_name to start a new one")
            self.state = State(**stored)
            self.run.cut_back(self.state.step)
            self.say(f"resumed from {folder} at step {self.state.step}")
            return
        if checkpoint.steps(self.run.checkpoints):
            raise CheckpointError(
                f"no checkpoint in {self.run.checkpoints} can be used; move it away to start from the beginning"
            )
        self.run.cut_back(-1)

    def _refuse_another_run(self) -> None:
        file = self.run.path / "config.yaml"
        if not file.exists():
            return
        if changes := setup.changed_keys(load(file).config, self.config):
            raise ConfigError(
                f"{self.run.path} was started with other settings:\n  "
                + "\n  ".join(changes)
                + "\nset trial_name to start another run, or undo the change"
            )

    def _proximal_method(self) -> str | None:
        actor = self.config.actor
        if actor.prox_logp_method is None and actor.recompute_logprob is None and not actor.use_decoupled_loss:
            return None
        from gspo.config import proximal_policy

        return proximal_policy(actor.recompute_logprob, actor.use_decoupled_loss, actor.prox_logp_method).method

    def _auto(self) -> AutoClip:
        return AutoClip(**asdict(self.config.actor.eps_clip_auto))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._stop_signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._stop_signal = number
        self.say(f"{signal.Signals(number).name}: saving after this step (once more: leave at once)")


class _Clock:
    """Seconds of each part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def __call__(self, name: str) -> _Clock:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + time.perf_counter() - self._entered

    def total(self) -> float:
        return time.perf_counter() - self._start

    def metrics(self, batch: Batch, report: StepReport) -> dict[str, float]:
        sampled = sum(len(s.tokens) for s in batch.samples)
        out = {f"time/{name}_s": value for name, value in self.seconds.items()}
        out |= {f"time/{name}_s": value for name, value in report.seconds.items()}
        out["time/step_s"] = self.total()
        out["throughput/rollout_tokens_s"] = sampled / max(self.seconds.get("rollout", 0.0), 1e-9)
        # Tokens as a plain trainer would count them: prompt and completion of every sequence that was trained.
        whole = sum(len(batch.groups[g].prompt.tokens) for g in batch.group_of) + sampled
        out["throughput/train_tokens_s"] = whole / max(self.seconds.get("train", 0.0), 1e-9)
        return out


def _loaded(config: str | Path | Loaded | Config, overrides: Sequence[str]) -> Loaded:
    if isinstance(config, Loaded):
        return config
    if isinstance(config, Config):
        from gspo.config.load import from_config

        return from_config(config)
    return load(config, overrides)


def _example(batch: Batch) -> tuple[str, str, bool] | None:
    if not batch.groups or not batch.groups[0].texts:
        return None
    group = batch.groups[0]
    outcome = group.outcomes[0]
    return group.prompt.text, group.texts[0], isinstance(outcome, Score) and outcome.value > 0


def _greedy(params: Any) -> Any:
    from dataclasses import replace

    return replace(params, greedy=True, temperature=1.0, top_p=1.0, top_k=0)


__all__ = ["State", "Summary", "Trainer"]


def run(loaded: Loaded) -> Summary:
    """`gspo train`."""
    torch.manual_seed(loaded.config.seed)
    return Trainer(loaded).train()

"""The optimizer updates of a step; after them, the clip range and the source of π_old are chosen for the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gspo.algorithms import CLIP_RANGE, clip_range_of
from gspo.errors import TrainingError
from gspo.learner import (
    AutoClip,
    Batch,
    Learner,
    Plan,
    StepReport,
    choose_proximal_source,
    clip_range,
    judge_noise,
    next_coefficient,
    next_eps,
    noise_message,
    train_step,
)
from gspo.monitor import measured_noise, token_mean
from gspo.runs import State
from gspo.system import Clock, return_freed_memory, step_name

if TYPE_CHECKING:
    from gspo.learner import Critic

MAX_NONFINITE = 3  # the run ends after this many skipped updates of a model in a row
TOKEN_SAMPLES = 16  # sequences per step whose values per token are recorded

Rates = Callable[[int], list[float]]  # the learning rates of one step's updates, from the number of its first update


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of `Updater`."""

    auto_clip: AutoClip | None  # actor.eps_clip: auto
    choose_proximal: bool  # actor.prox_logp_method: auto
    narrowest_clip: Callable[[Mapping[str, Any]], float | None]  # the ε that sampler noise is compared with
    allow_noise: bool  # actor.prox_logp_force
    keeps_token_values: bool  # rollout.dump_to_file: record values per token of TOKEN_SAMPLES sequences
    entropy_target: float | None = None  # actor.entropy_target


class Updater:
    """Trains on a batch; every rank has one. Rank 0 also checks the updates (`save_samples`; None elsewhere)."""

    def __init__(
        self,
        learner: Learner,
        settings: UpdateSettings,
        *,
        rates: Rates,
        critic_rates: Rates,
        say: Callable[[str], None],
        checkpoints: Path,
        save_samples: Callable[[Batch, StepReport, int], None] | None = None,
    ) -> None:
        self._learner, self._settings = learner, settings
        self._rates, self._critic_rates = rates, critic_rates
        self._say, self._checkpoints, self._save_samples = say, checkpoints, save_samples

    def update(self, batch: Batch, state: State, clock: Clock) -> StepReport:
        """K optimizer updates of the policy, then those of the critic."""
        # The plan and the rates depend on the state only, so every rank computes the same ones.
        learner, plan = self._learner, self._plan_of(state)
        rates = self._rates(state.update)
        # The sampler's keys and values are free now; activations of other sizes would not fit into their blocks.
        return_freed_memory()
        with clock("train"):
            report = train_step(
                learner.policy,
                learner.optimizer,
                batch,
                plan,
                proximal=state.proximal,
                version=state.step,
                learning_rates=rates,
                keep_tokens_of=self._token_samples(batch),
                before_update=self.check_sampler_noise(batch, plan, state),
                teacher=learner.teacher,
            )
        # Recorded now: `_adapt` changes the state for the next step.
        low, high = clip_range_of(plan.settings) or CLIP_RANGE
        report.settings = {
            "optimizer/lr": rates[-1],
            "clip/eps_low": plan.settings.get(low),
            "clip/eps_high": plan.settings.get(high),
            "policy/proximal": state.proximal,
        }
        if plan.settings["entropy_coef"]:
            report.settings["policy/entropy_coef"] = plan.settings["entropy_coef"]
        # Skipped updates count too, so the learning-rate schedule does not depend on them.
        state.update += plan.num_updates
        self._skip_nonfinite("policy", report.applied, batch, report, state)
        if learner.critic is not None:
            with clock("critic"):
                report.settings |= self._update_critic(learner.critic, batch, report, state)
        self._adapt(batch, report, plan, state)
        return report

    def check_sampler_noise(
        self, batch: Batch, plan: Plan, state: State
    ) -> Callable[[NDArray[np.float64]], None] | None:
        """A check of the first measured noise, if the sampler's log-probs are used as π_old; else None."""
        eps = self._settings.narrowest_clip(plan.settings)
        # Noise that was measured in an earlier step has passed this check already.
        if state.noise is not None or eps is None or state.proximal != "rollout":
            return None

        def check(log_s: NDArray[np.float64]) -> None:  # [n], NaN where a sequence measured nothing
            noise = measured_noise(log_s, batch, state.step)
            verdict = "fine" if noise is None else judge_noise(noise.p95, eps)
            if noise is None or verdict == "fine":
                return
            problem = noise_message(noise, eps)
            if verdict == "above" and not self._settings.allow_noise:
                raise TrainingError(f"{problem}; set actor.prox_logp_force=true to train anyway")
            self._say(f"warning: {problem}")

        return check

    def _update_critic(self, critic: Critic, batch: Batch, policy: StepReport, state: State) -> dict[str, Any]:
        """Train the value model on the returns that the advantages were computed from."""
        from gspo.learner import critic_metrics, train_critic

        # The critic may have another number of mini-batches, so state.update does not count its updates.
        rates = self._critic_rates(state.step * critic.num_minibatches)
        report = train_critic(critic, batch, rates)
        self._skip_nonfinite("critic", report.applied, batch, policy, state)
        return critic_metrics(batch, report, rates[-1])

    def _plan_of(self, state: State) -> Plan:
        """The plan with this step's values of what adapts: `eps_clip: auto` and `entropy_target`."""
        plan, auto = self._learner.plan, self._settings.auto_clip
        if self._settings.entropy_target is not None and state.entropy_coef is not None:
            plan = replace(plan, settings={**plan.settings, "entropy_coef": state.entropy_coef})
        if auto is None:
            return plan
        # Sampler noise is a lower bound of ε only if π_old comes from the sampler.
        noise = None if state.proximal == "recompute" else state.noise
        names = clip_range_of(plan.settings) or CLIP_RANGE
        adjusted = dict(zip(names, clip_range(state.auto_eps, noise, auto), strict=True))
        return replace(plan, settings={**plan.settings, **adjusted})

    def _adapt(self, batch: Batch, report: StepReport, plan: Plan, state: State) -> None:
        """Store the measured noise, update what adapts, and choose the next source of π_old."""
        noise = measured_noise(report.noise_log_s, batch, state.step)
        first, measured = state.noise is None, noise and noise.p95
        state.noise = state.noise if measured is None else measured
        if self._settings.entropy_target is not None:
            state.entropy_coef = next_coefficient(
                plan.settings["entropy_coef"],
                token_mean(report.entropy, batch.trained_tokens),
                target=self._settings.entropy_target,
                start=self._learner.plan.settings["entropy_coef"],
            )
        if self._settings.auto_clip is not None:
            # Shapes: log_s, advantages [n]. The first mini-batch is left out: the weights have not changed yet, so its
            # ratios show noise only.
            later = (batch.minibatch > 0) | (plan.num_epochs > 1)
            log_s, advantages = report.log_s[later], batch.advantages[later]
            state.auto_eps = next_eps(state.auto_eps, log_s, advantages, self._settings.auto_clip)
        # With one mini-batch there is no mini-batch 2…K to choose a source for.
        if not self._settings.choose_proximal or plan.num_updates == 1:
            return
        eps = plan.settings.get((clip_range_of(plan.settings) or CLIP_RANGE)[0])
        source = choose_proximal_source(measured, eps, state.proximal)
        if measured is not None and (first or source != state.proximal):
            what = "the sampler's log-probs" if source == "sampler" else "log-probs computed again"
            parts = (
                "update 2 of a batch uses"
                if plan.num_updates == 2
                else f"updates 2 to {plan.num_updates} of a batch use"
            )
            self._say(
                f"{parts} {what} as old policy: the sampler's error is {measured:.1e}"
                + (f", the clip range {eps:.1e}" if eps else "")
            )
        state.proximal = source

    def _skip_nonfinite(
        self, model: str, applied: Sequence[bool], batch: Batch, report: StepReport, state: State
    ) -> None:
        """Report updates that a non-finite gradient skipped and save their batch; too many in a row end the run."""
        if self._save_samples is None:
            return
        step, in_row = state.step + 1, state.nonfinite_in_row
        # Saved even if sample files are off: the batch is needed to find the cause.
        if not all(applied):
            self._save_samples(batch, report, step)
        for k, was_applied in enumerate(applied):
            in_row[model] = 0 if was_applied else in_row.get(model, 0) + 1
            if not was_applied:
                self._say(
                    f"step {step}, mini-batch {k + 1} of the {model}: non-finite gradient, update skipped; "
                    f"its batch is samples/{step_name(step)}.jsonl"
                )
            if in_row[model] >= MAX_NONFINITE:
                raise TrainingError(
                    f"{in_row[model]} updates of the {model} in a row had a non-finite gradient; "
                    f"the last checkpoint is in {self._checkpoints}. "
                    "Lower actor.optimizer.lr, or look at samples/ for broken rewards"
                )

    def _token_samples(self, batch: Batch) -> frozenset[int]:
        """Sequences whose values per token are recorded: evenly spread over those with a gradient."""
        # [m] indices of sequences with a gradient; `count` of them at equal distances.
        trained = np.flatnonzero(batch.has_gradient)
        count = min(TOKEN_SAMPLES if self._settings.keeps_token_values else 0, len(trained))
        return frozenset(trained[np.arange(count) * len(trained) // max(count, 1)].tolist())

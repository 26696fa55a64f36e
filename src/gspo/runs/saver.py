"""Saving checkpoints of a run: when, what, and which older ones to delete."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gspo.rollout.buffer import Snapshot
from gspo.rollout.storage import pack_groups
from gspo.runs import checkpoint
from gspo.runs.directory import RunDir
from gspo.runs.state import State
from gspo.system.clock import Every


class Saver:
    """Saves checkpoints of one run; holds the last saved step and its time.

    identity: what a resumed run must agree on; config: the digest of the resolved config; keep: checkpoints to keep
    beside the best; keep_sample_steps: steps whose sample files are kept (None: all); every: when to save.
    """

    def __init__(
        self,
        run: RunDir,
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        critic: tuple[nn.Module, torch.optim.Optimizer] | None,
        *,
        identity: Mapping[str, Any],
        config: str,
        keep: int,
        keep_sample_steps: int | None,
        every: Every,
        last_step: int,
    ) -> None:
        self._run, self._trained, self._critic = run, (policy, optimizer), critic
        self._identity, self._config = identity, config
        self._keep, self._keep_sample_steps, self._every = keep, keep_sample_steps, every
        self.last_step, self._last_time = last_step, time.monotonic()

    def is_due(self, step: int) -> bool:
        return self._every.is_due(step, time.monotonic() - self._last_time)

    def save(self, state: State, pending: Snapshot, curriculum: dict[str, Any] | None = None) -> None:
        """Publish a checkpoint of this state, then delete those that are no longer needed."""
        state.submission, state.resubmit = pending.submission, list(pending.resubmit)
        stored = {**replace(state, curriculum=curriculum).to_json(), "identity": self._identity}
        groups = pack_groups(pending.groups) if pending.groups else None
        folder = self._run.checkpoints
        self._run.lock.check()
        checkpoint.save(folder, state.step, *self._trained, stored, self._config, self._critic, groups)
        # After the new checkpoint is published: a failed save never reduces the number of valid checkpoints.
        checkpoint.prune(folder, state.step, self._keep, state.best_step)
        # Only here: samples that are deleted before a checkpoint could be missing after a resume.
        if self._keep_sample_steps is not None:
            self._run.delete_samples(state.step - self._keep_sample_steps)
        self.last_step, self._last_time = state.step, time.monotonic()

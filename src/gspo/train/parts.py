"""Everything that a run has open, as one object. `gspo.train.open` opens it and closes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo.data.curriculum import Curriculum
from gspo.data.mixture import Data
from gspo.learner.learner import Learner
from gspo.learner.ranks.world import World
from gspo.monitor.display import Display
from gspo.rewards.route import Rewards
from gspo.rollout.producer import RolloutProducer
from gspo.rollout.workflow import Workflow
from gspo.runs.saver import Saver
from gspo.runs.state import State
from gspo.sampling.api import Sampler
from gspo.system.program import StopRequest
from gspo.train.evaluate import Evaluator
from gspo.train.record import Recorder
from gspo.train.update import Updater
from gspo.types import Prompt


@dataclass
class Parts:
    """What every rank has open."""

    path: Path  # the run directory
    world: World
    stop: StopRequest
    learner: Learner
    updater: Updater
    state: State
    total_steps: int
    display: Display
    publish: Callable[[int], None]  # sends the current weights to the sampler as this version
    say: Callable[[str], None]


@dataclass
class LeaderParts(Parts):
    """What only rank 0 has open: data, sampler, rewards, and all that writes the run directory."""

    producer: RolloutProducer
    data: Data
    valid: Data | None  # None: no evaluation (evaluator.freq_steps: 0)
    sampler: Sampler
    rewards: Rewards
    workflow: Workflow
    decode: Callable[[Sequence[int]], str]
    prompt_of: Callable[[int], Prompt]
    evaluator: Evaluator | None
    recorder: Recorder
    saver: Saver
    opening_messages: Sequence[str]
    count_episodes: Callable[[], Mapping[str, float]]  # what the environment counted since the last call
    curriculum: Curriculum | None = None
    num_refilled: int = 0  # groups that were rejected on the way to the current batch

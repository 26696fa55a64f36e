"""The whole config: the keys without a section, and the sections."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from gspo.algorithms import ALGORITHMS
from gspo.config.backends import EXTERNAL
from gspo.config.schema.actor import Actor
from gspo.config.schema.cluster import Cluster, Scheduler
from gspo.config.schema.critic import CriticSection, ReferenceSection, TeacherSection
from gspo.config.schema.dataset import DatasetSpec, TrainDataset, ValidDataset
from gspo.config.schema.env import Environment
from gspo.config.schema.key import Key, Section, key, keys_of
from gspo.config.schema.reward import Reward
from gspo.config.schema.rollout import EvalGeneration, Generation, Rollout
from gspo.config.schema.saver import EvaluatorSection, Recover, SaverSection
from gspo.config.schema.stats_logger import StatsLogger


class Config(Section):
    experiment_name: str = key("gspo", "First part of the run directory's name.")
    trial_name: str = key("trial0", "Second part of the run directory's name.")
    algorithm: str | None = key(
        None,
        f"Preset: {', '.join(ALGORITHMS)}; or a function of yours, file.py:function.",
        unset="ppo if a critic is configured, otherwise grpo",
    )
    seed: int = key(1, "Seed of all random numbers.", low=0)
    total_train_steps: int | None = key(None, "Number of training steps.", unset="total_train_epochs decides", low=1)
    total_train_epochs: int = key(1, "Number of passes over the training data.", low=1)
    actor: Actor = key(Actor, "The policy, its objective and its trainer.")
    gconfig: Generation = key(Generation, "Sampling parameters for training.")
    train_dataset: TrainDataset = key(TrainDataset, "Training problems.")
    reward: Reward = key(Reward, "Reward functions and their workers.")
    rollout: Rollout = key(Rollout, "Samplers and staleness.")
    valid_dataset: ValidDataset | None = key(
        None,
        "Held-out problems. Everything that it does not set is as in train_dataset.",
        unset="the held-out split of train_dataset",
    )
    eval_gconfig: EvalGeneration | None = key(
        None,
        "Sampling parameters for evaluation. A key that is not set here has gconfig's value.",
        unset="one greedy sample (temperature 0); lengths and stops are always those of gconfig",
    )
    evaluator: EvaluatorSection = key(EvaluatorSection, "Held-out evaluation.")
    saver: SaverSection = key(SaverSection, "Checkpoints by steps or epochs, and how many are kept.")
    recover: Recover = key(Recover, "Checkpoints by time, and resuming.")
    ref: ReferenceSection | None = key(None, "Reference model for KL.")
    teacher: TeacherSection | None = key(None, "Teacher model for distillation.")
    critic: CriticSection | None = key(None, "Value model for PPO.")
    env: Environment = key(Environment, "Multi-turn episodes, tools and agents.")
    stats_logger: StatsLogger = key(StatsLogger, "Where metrics go besides the run directory.")
    cluster: Cluster = key(Cluster, "Machines, and the root of run directories.")
    scheduler: Scheduler = key(Scheduler, "Where processes run.")
    # A key of flags for each external engine, under its name: `vllm`. Code reads them by `layout.flags_of`.
    __annotations__ |= dict.fromkeys(EXTERNAL, dict[str, Any])
    locals().update({name: key({}, engine.flags) for name, engine in EXTERNAL.items()})
    tokenizer_path: str | None = key(None, "Tokenizer.", unset="actor.path")
    strict: bool = key(False, "Treat warnings about the config as errors.")
    on_alarm: Literal["warn", "stop"] = key("warn", "What the run does if a check during training raises an alarm.")
    threads: int | None = key(
        None,
        "CPU threads of the trainer. The last bits of results depend on it.",
        unset="OMP_NUM_THREADS, else all cores",
        low=1,
    )
    profile: bool = key(
        False, "Write a timeline of steps 2 and 3 (profile/*.trace.json.gz) for a browser's trace viewer."
    )
    stall_timeout: float = key(
        7200.0, "After this many seconds without progress the run stops and writes stack traces to log.txt.", above=0
    )

    @property
    def run_path(self) -> Path:
        """The run directory."""
        return Path(self.cluster.fileroot) / self.experiment_name / self.trial_name


def held_out(config: Config) -> DatasetSpec:
    """The data set of held-out problems: train_dataset with what valid_dataset sets, or its whole test split."""
    train, valid = config.train_dataset, config.valid_dataset
    # `size` limits the training rows; evaluation uses the whole split.
    whole = {"split": "test" if valid is None else valid.split, "size": None}
    if valid is None or not (valid.path or valid.mixture):
        sources = [source.model_copy(update=whole) for source in train.mixture]
        return train.model_copy(update={**whole, "mixture": sources})
    # Options belong to one procedural task.
    options = train.options if valid.path == train.path else {}
    other = {"path": valid.path or train.path, "mixture": valid.mixture, "options": options}
    return train.model_copy(update={**whole, **other})


@functools.cache
def known_keys() -> Mapping[str, Key]:
    """Every key of the schema by its dotted name, sections before what they hold."""
    return types.MappingProxyType({key.name: key for key in keys_of(Config, "")})

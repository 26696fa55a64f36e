"""The whole config: the keys without a section, and the sections."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any, Literal

from gspo.algorithms import ALGORITHMS
from gspo.config.schema.actor import Actor
from gspo.config.schema.cluster import Cluster, Scheduler
from gspo.config.schema.critic import Critic, Reference
from gspo.config.schema.dataset import DatasetSpec, TrainDataset
from gspo.config.schema.env import Environment
from gspo.config.schema.key import Key, Section, key, keys_of
from gspo.config.schema.reward import Reward
from gspo.config.schema.rollout import EvalGeneration, Generation, Rollout
from gspo.config.schema.saver import Evaluator, Recover, Saver
from gspo.config.schema.stats_logger import StatsLogger


class Config(Section):
    experiment_name: str = key("gspo", "First part of the run directory's name.")
    trial_name: str = key("trial0", "Second part of the run directory's name.")
    algorithm: str | None = key(
        None, f"Preset: {', '.join(ALGORITHMS)}.", unset="ppo where a critic is configured, else grpo"
    )
    seed: int = key(1, "Everything random is a function of it.", low=0)
    total_train_epochs: int = key(1, "Passes over the training data.", low=1)
    total_train_steps: int | None = key(None, "Training steps.", unset="by total_train_epochs", low=1)
    tokenizer_path: str | None = key(None, "Tokenizer.", unset="actor.path")
    strict: bool = key(False, "Turn warnings into errors.")
    stall_timeout: float = key(
        7200.0, "Seconds without any progress until a run ends itself with a stack dump (log.txt).", above=0
    )
    on_alarm: Literal["warn", "stop"] = key("warn", "What the checks during training do.")
    profile: bool = key(
        False, "Write a timeline of steps 2 and 3 (profile/*.trace.json.gz) for a browser's trace viewer."
    )
    threads: int | None = key(None, "CPU threads of the trainer; part of a run's identity.", unset="all cores", low=1)
    cluster: Cluster = key(Cluster, "Machines and the run root.")
    scheduler: Scheduler = key(Scheduler, "Where processes run.")
    rollout: Rollout = key(Rollout, "Samplers and staleness.")
    gconfig: Generation = key(Generation, "Sampling for training.")
    eval_gconfig: EvalGeneration | None = key(
        None,
        "Sampling for evaluation; what is not set here is as in gconfig.",
        unset="one greedy sample; lengths and stops are always those of gconfig",
    )
    actor: Actor = key(Actor, "The policy, its objective and its trainer.")
    ref: Reference | None = key(None, "Reference model for KL.")
    critic: Critic | None = key(None, "Value model for PPO.")
    reward: Reward = key(Reward, "Reward functions and their workers.")
    env: Environment = key(Environment, "Multi-turn episodes, tools, agents.")
    train_dataset: TrainDataset = key(TrainDataset, "Training problems.")
    valid_dataset: DatasetSpec | None = key(None, "Held-out problems.", unset="train_dataset's held-out split")
    saver: Saver = key(Saver, "Checkpoints by steps or epochs, and how many are kept.")
    recover: Recover = key(Recover, "Checkpoints by time, and resuming.")
    evaluator: Evaluator = key(Evaluator, "Held-out evaluation.")
    stats_logger: StatsLogger = key(StatsLogger, "Where metrics go beside the run directory.")
    vllm: dict[str, Any] = key(
        {},
        "Flags passed on to vLLM servers, by their own names (max_model_len); and python: the interpreter that has "
        "vLLM, env: its variables, url: the address of servers that you run yourself.",
    )
    sglang: dict[str, Any] = key({}, "The same for SGLang servers; experimental.")


@functools.cache
def known_keys() -> Mapping[str, Key]:
    """Every key of the schema by its dotted name, sections before what they hold."""
    return types.MappingProxyType({key.name: key for key in keys_of(Config, "")})

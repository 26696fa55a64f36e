"""Every key, once: its type, default, bounds and description; one file per section of the YAML. Torch-free.

`--help`, docs/config.md, error messages and the resolved config all read these classes. An unset key whose description
says "algorithm" is filled in by `config.resolve` from `algorithms.py`, with the precedence: set by the user >
importance_sampling_level > algorithm > default.
"""

from gspo.config.schema.actor import Actor, AutoClip, Correction, Norm, RewardNorm, Sharding
from gspo.config.schema.cluster import Cluster, Scheduler, Slurm
from gspo.config.schema.config import Config, held_out, known_keys
from gspo.config.schema.critic import Critic, CriticOptimizer, Reference, Teacher
from gspo.config.schema.dataset import DatasetSpec, MixtureSource, TrainDataset, ValidDataset
from gspo.config.schema.env import Environment
from gspo.config.schema.key import Key, Section, keys_of
from gspo.config.schema.optimizer import MicroBatch, Optimizer
from gspo.config.schema.reward import Reward
from gspo.config.schema.rollout import EvalGeneration, Generation, Rollout
from gspo.config.schema.saver import Evaluator, Recover, Saver
from gspo.config.schema.stats_logger import StatsLogger, WandB

__all__ = [
    "Actor",
    "AutoClip",
    "Cluster",
    "Config",
    "Correction",
    "Critic",
    "CriticOptimizer",
    "DatasetSpec",
    "Environment",
    "EvalGeneration",
    "Evaluator",
    "Generation",
    "Key",
    "MicroBatch",
    "MixtureSource",
    "Norm",
    "Optimizer",
    "Recover",
    "Reference",
    "Reward",
    "RewardNorm",
    "Rollout",
    "Saver",
    "Scheduler",
    "Section",
    "Sharding",
    "Slurm",
    "StatsLogger",
    "Teacher",
    "TrainDataset",
    "ValidDataset",
    "WandB",
    "held_out",
    "keys_of",
    "known_keys",
]

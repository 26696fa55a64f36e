"""Every key, once: its type, default, bounds and description; one file per section of the YAML. Torch-free.

`--help`, docs/config.md, error messages and the resolved config all read these classes. An unset key whose description
says "algorithm" is filled in by `config.resolve` from `algorithms.py`, with the precedence: set by the user >
importance_sampling_level > algorithm > default.
"""

from gspo.config.schema.actor import Actor, Correction, Norm, RewardNorm, Sharding
from gspo.config.schema.cluster import Cluster, Scheduler, Slurm
from gspo.config.schema.config import Config, held_out, known_keys
from gspo.config.schema.critic import CriticOptimizer, CriticSection, ReferenceSection, TeacherSection
from gspo.config.schema.dataset import DatasetSpec, MixtureSource, TrainDataset, ValidDataset
from gspo.config.schema.env import Environment
from gspo.config.schema.key import Key, Section, keys_of
from gspo.config.schema.optimizer import MicroBatch, Optimizer
from gspo.config.schema.reward import Reward
from gspo.config.schema.rollout import EvalGeneration, Generation, Rollout
from gspo.config.schema.saver import EvaluatorSection, Recover, SaverSection
from gspo.config.schema.stats_logger import StatsLogger, WandB

__all__ = [
    "Actor",
    "Cluster",
    "Config",
    "Correction",
    "CriticOptimizer",
    "CriticSection",
    "DatasetSpec",
    "Environment",
    "EvalGeneration",
    "EvaluatorSection",
    "Generation",
    "Key",
    "MicroBatch",
    "MixtureSource",
    "Norm",
    "Optimizer",
    "Recover",
    "ReferenceSection",
    "Reward",
    "RewardNorm",
    "Rollout",
    "SaverSection",
    "Scheduler",
    "Section",
    "Sharding",
    "Slurm",
    "StatsLogger",
    "TeacherSection",
    "TrainDataset",
    "ValidDataset",
    "WandB",
    "held_out",
    "keys_of",
    "known_keys",
]

"""Configuration: one schema, YAML with places, AReaL's spellings, algorithm-aware defaults. Torch-free."""

from gspo.config.loading import load
from gspo.config.resolve import Loaded, Origin, config_fingerprint, dump, write_origins
from gspo.config.resolve import (
    ObjectiveSettings,
    algorithm_in,
    default_algorithm_note,
    effective_objective,
    is_supervised,
    objective_words,
    proximal_policy,
)
from gspo.config.resolve import value_of
from gspo.config.schema import Config

__all__ = [
    "Config",
    "Loaded",
    "ObjectiveSettings",
    "Origin",
    "algorithm_in",
    "config_fingerprint",
    "default_algorithm_note",
    "dump",
    "effective_objective",
    "is_supervised",
    "load",
    "objective_words",
    "proximal_policy",
    "value_of",
    "write_origins",
]

"""Configuration: one schema, YAML with places, AReaL's spellings, algorithm-aware defaults. Torch-free."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.config import engine_flags, yaml_tree
    from gspo.config.backends import Backend, ENGINES, EXTERNAL, Engine, OWN, SAMPLERS, TRAINERS, parse_backend
    from gspo.config.engine_flags import check_engine, python_of
    from gspo.config.layout import Layout, engine_of, flags_of, layout_of
    from gspo.config.loading import load, unknown_key
    from gspo.config.resolve import (
        Loaded, ObjectiveSettings, Origin, algorithm_in, config_fingerprint, dump,
        effective_objective, is_supervised, objective_words, proximal_policy, read_origins, same_as, value_of,
        write_origins, written,
    )
    from gspo.config.schema import (
        Actor, Config, CriticSection, DatasetSpec, ENVIRONMENT_ROWS, EvaluatorSection, Generation, Key, MixtureSource,
        Norm, Optimizer, RewardNorm, SaverSection, Section, Slurm, held_out, keys_of, known_keys, num_epochs,
    )
    from gspo.config.yaml_tree import Node, describe, is_failed
    # fmt: on

__getattr__ = face(__name__)

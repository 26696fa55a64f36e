"""The policy of a finished or running run, at any of its checkpoints: for evaluation and export, not to resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gspo.config.schema import Config
from gspo.learner.policy.module import PolicyModule
from gspo.models.loading import load_model, load_tokenizer
from gspo.runs import checkpoint
from gspo.system.files import step_name
from gspo.train.build import setup


def load_policy(config: Config, run: Path | None, step: int) -> tuple[PolicyModule, Any]:
    """The policy after `step` and its tokenizer; step 0 is the model that training started from.

    The checkpoint is verified and keeps its dtype: a run trained in bfloat16 on a GPU loads as bfloat16 on a CPU.
    """
    device, dtype = setup.device_and_dtype(config)
    folder = None
    if step and run is not None:
        folder = run / "checkpoints" / step_name(step)
        dtype = checkpoint.stored_dtype(folder, dtype)
    tokenizer = load_tokenizer(config.tokenizer_path or config.actor.path)
    actor = config.actor
    model = load_model(
        actor.path, dtype, device, from_scratch=actor.init_from_scratch, seed=config.seed, tokenizer=tokenizer
    )
    setup.add_configured_adapter(config, model)
    policy = PolicyModule(model)
    if folder is not None:
        checkpoint.load(folder, policy, None)
    return policy, tokenizer

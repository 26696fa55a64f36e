"""What this room assumes of TRL: its version, the methods that are overridden, and when its own path is taken."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from gspo.errors import ConfigError
from gspo.system import install_command

OLDEST, NEWEST = (1, 14), (1, 16)  # both are tested (tests/trl/test_versions.py)
# Its GRPOTrainer needs Triton, also on a CPU, so that no numbers could be compared.
UNTESTED = (1, 15)

# The methods that GSPOTrainer overrides or calls, with the parameters that it reads.
METHODS = {
    "_get_per_token_logps_and_entropies": (
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy",
        "compute_aux_loss",
    ),
    "_prepare_inputs": ("self", "generation_batch"),
    "_compute_loss": ("self", "model", "inputs"),
    "_generate": ("self", "prompts"),
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_generate_and_score_completions": ("self", "inputs"),
    "training_step": ("self", "model", "inputs", "num_items_in_batch"),
}  # fmt: skip
# TRL 1.14 passes the rest on by position.
OTHERWISE = {
    "_get_per_token_logps_and_entropies": ("self", "model", "args", "batch_size", "compute_aux_loss", "kwargs")
}
ATTRIBUTES = ("_step", "_buffered_inputs", "_metrics", "aux_loss_enabled", "_entropy_bonus_enabled", "eos_token_ids",
              "epsilon_low", "epsilon_high", "importance_sampling_level", "temperature")  # fmt: skip
# Of a micro-batch: tensors with one row per sequence, and the number of tokens of the generation batch.
INPUTS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")

REMEDY = f"install trl>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1},!={UNTESTED[0]}.{UNTESTED[1]}.*"


def check_class(trainer: type[Any], version: str) -> None:
    """ConfigError for a version of TRL that is not supported, or whose methods are not those that were tested."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST <= numbers <= NEWEST or numbers == UNTESTED:
        raise ConfigError(
            f"gspo.trl is tested with TRL {OLDEST[0]}.{OLDEST[1]} and {NEWEST[0]}.{NEWEST[1]}, but trl {version} is "
            f"installed: {REMEDY} ({install_command('trl')})"
        )
    for name, wanted in METHODS.items():
        method = getattr(trainer, name, None)
        found = tuple(inspect.signature(method).parameters)[: len(wanted)] if method else ()
        if found not in (wanted, OTHERWISE.get(name)):
            raise ConfigError(
                f"trl {version} has changed GRPOTrainer.{name}: it takes ({', '.join(found)}), and gspo.trl expects "
                f"({', '.join(wanted)}, …). Results could differ, so GSPOTrainer does not run: {REMEDY}"
            )


def check_instance(trainer: Any, version: str) -> None:
    missing = [name for name in ATTRIBUTES if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"the GRPOTrainer of trl {version} has no {', '.join(missing)}, which gspo.trl reads: {REMEDY}"
        )


def check_batches(batches: Any, num: int, version: str) -> None:
    """The micro-batches that TRL keeps for the updates of a generation batch."""
    right = isinstance(batches, list) and len(batches) == num and all(isinstance(one, dict) for one in batches)
    missing = [name for name in INPUTS if name not in batches[0]] if right else ["micro-batches"]
    if missing:
        raise ConfigError(f"trl {version} keeps no {', '.join(missing)} in its buffered inputs, as gspo.trl expects: "
                          f"{REMEDY}")  # fmt: skip


def why_not(trainer: Any) -> str:
    """Why the log-probs of this trainer are computed by TRL's own code; empty if by ours."""
    args, kind = trainer.args, str(getattr(trainer.accelerator.distributed_type, "value", ""))
    reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    reasons = {
        f"the weights are sharded ({kind})": kind not in ("NO", "MULTI_CPU", "MULTI_GPU"),
        f"completions come from vLLM (vllm_mode={trainer.vllm_mode!r})": trainer.use_vllm,
        "the model takes images": trainer._is_vlm,
        "the loss has the router's auxiliary term (router_aux_loss_coef)": trainer.aux_loss_enabled,
        "Liger's kernels replace the model's layers (use_liger_kernel)": args.use_liger_kernel,
        "torch_compile=True": args.torch_compile,
        "gradient checkpointing is reentrant; set use_reentrant=False in gradient_checkpointing_kwargs": (
            args.gradient_checkpointing and reentrant
        ),
        "the model's layers are on several devices": len(set(getattr(trainer.model, "hf_device_map", {}).values())) > 1,
        "the adapter adds virtual tokens to the prompt": any(
            config.is_prompt_learning for config in getattr(trainer.model, "peft_config", {}).values()
        ),
    }
    found = next((reason for reason, holds in reasons.items() if holds), "")
    return found or _dropout(trainer.model)


def _dropout(model: nn.Module) -> str:
    """Which module drops activations: with prompts that are shared, the sequences of a group would share the noise."""
    for name, module in model.named_modules():
        rates = {"p": module.p} if isinstance(module, nn.Dropout) else vars(module)
        if any("drop" in key or key == "p" for key, rate in rates.items() if isinstance(rate, float) and rate > 0):
            return f"the model has dropout ({name}); set disable_dropout=True, or 0 in its config"
    return ""

"""Losses of further trainers, for the page: as in `gspo.conformance.targets`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gspo.conformance import Batch, Implementation, Package, Stub, targets


def unsloth(package: Package) -> Implementation:
    compute = package.take("unsloth_zoo/rl_replacements.py", "grpo_compute_loss").grpo_compute_loss

    def loss(b: Batch) -> tuple[Tensor, None]:
        targets.refuse_packed(b)
        targets.refuse_uneven(b)
        settings = targets.trl_settings(b, targets.TRL_LOSSES) | targets.temperatures(b)
        value, *_ = compute(
            b.reference_logp,
            b.logp,
            b.proximal_logp,
            None,
            torch.zeros_like(b.mask, dtype=torch.long),
            b.mask.long(),
            settings.pop("beta"),
            b.advantage,
            num_items_in_batch=targets.tokens_of(b),
            current_gradient_accumulation_steps=b.num_parts,
            steps_per_generation=b.num_parts,
            **settings,
        )
        return value, None

    return Implementation(
        "unsloth-zoo", loss, frozenset(targets.TRL_LOSSES), version=package.version, notes=(targets.RECIPE,)
    )


def skyrl(package: Package) -> Implementation:
    below = "skyrl/backends/skyrl_train/utils"
    helpers = vars(package.take(f"{below}/torch_utils.py", "masked_mean", "safe_exp_delta"))
    names = ("reduce_loss", "gspo_policy_loss", "ppo_policy_loss", "sapo_policy_loss")
    scale = "apply_loss_reduction_to_advantages_minibatch"
    off_policy = {"apply_off_policy_correction": lambda loss, old, new, mask, _: (loss, mask, {})}
    functions = package.take(f"{below}/ppo_utils.py", *names, scale, **helpers, **off_policy)

    def loss(b: Batch) -> tuple[Tensor, float | None]:
        targets.refuse_packed(b)
        targets.refuse_kl(b)
        reduction = "token_mean" if b.objective in ("dapo", "ppo") else "sequence_mean"
        mask = b.mask.to(torch.float32)
        scaled = getattr(functions, scale)(b.token_advantage, mask, reduction, len(mask), mask.shape[1])
        # Its trainer scales the advantages of the whole mini-batch, of which this may be a micro-batch.
        share = (
            mask.sum() / targets.tokens_of(b)
            if reduction == "token_mean"
            else len(mask) / (b.num_sequences or len(mask))
        )
        config = Stub(loss_reduction="sequence_mean", policy_loss_type="regular")
        config.eps_clip_low, config.eps_clip_high = b.settings.get("clip_low"), b.settings.get("clip_high")
        config.sapo = Stub(tau_pos=b.settings.get("tau_pos"), tau_neg=b.settings.get("tau_neg"))
        kind = {"gspo": "gspo", "gspo_token": "gspo", "sapo": "sapo"}.get(b.objective, "ppo")
        compute = getattr(functions, f"{kind}_policy_loss")
        value, metrics = compute(b.logp, b.proximal_logp, scaled * share, config, mask)
        return value, metrics["clip_ratio"]

    notes = ("called with loss_reduction=sequence_mean, which it recommends for GSPO",)
    objectives = frozenset({"gspo", "gspo_token", "grpo", "dapo", "ppo", "sapo"})
    return Implementation("skyrl", loss, objectives, version=package.version, notes=notes)


def nemo_rl(package: Package) -> Implementation:
    helpers = vars(package.take("nemo_rl/algorithms/utils.py", "masked_mean", "calculate_kl"))
    kinds: dict[str, Any] = {
        "LossType": SimpleNamespace(TOKEN_LEVEL="token", SEQUENCE_LEVEL="sequence"),
        "LossInputType": Stub(),
        "MetricNormalizer": Stub(),
        "LossFunction": object,
    }
    compute = package.take("nemo_rl/algorithms/loss/loss_functions.py", "ClippedPGLossFn", **kinds, **helpers)

    def loss(b: Batch) -> tuple[Tensor, float | None]:
        targets.refuse_packed(b)
        config = Stub(
            token_level_loss=b.objective in ("dapo", "ppo", "cispo"),
            sequence_level_importance_ratios=b.objective == "gspo",
            ratio_clip_min=b.settings.get("clip_low", 1.0),
            ratio_clip_max=b.settings.get("clip_high", b.settings.get("weight_max", 1.0) - 1),
            use_cispo=b.objective == "cispo",
            reference_policy_kl_penalty=b.settings.get("kl_coef", 0.0),
            reference_policy_kl_type=b.settings.get("kl_estimator", "k3"),
            kl_input_clamp_value=20.0,
            kl_output_clamp_value=10.0,
            positive_example_nll_weight=0.0,
        )
        names = {"advantages": b.token_advantage, "prev_logprobs": b.proximal_logp, "token_mask": b.mask.float()}
        names |= {"generation_logprobs": b.proximal_logp, "reference_policy_logprobs": b.reference_logp}
        # Its tensors have a first column for the first prompt token, which has no log-prob.
        data = {name: functional.pad(x, (1, 0)) for name, x in names.items() if x is not None}
        data["sample_mask"] = torch.ones(len(b.logp))
        sequences = torch.tensor(float(b.num_sequences or len(b.logp)))
        return compute.ClippedPGLossFn(config)(b.logp, data, sequences, targets.tokens_of(b))[0], None

    notes = ("called with sequence_level_importance_ratios=True and token_level_loss=False",)
    objectives = frozenset({"gspo", "grpo", "dapo", "ppo", "cispo"})
    return Implementation("nemo-rl", loss, objectives, version=package.version, notes=notes)


TARGETS = {"unsloth-zoo": unsloth, "skyrl": skyrl, "nemo-rl": nemo_rl}

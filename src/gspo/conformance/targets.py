"""The losses of trainers, as installed or in a folder: `gspo conformance --target trl`.

How each one is called is our reading of its trainer: the settings of its GSPO recipe, and the clip range of the case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gspo import objectives
from gspo.conformance.check import packed
from gspo.conformance.loading import Package, Stub, same
from gspo.conformance.suite import Batch, Implementation, NotOfferedError
from gspo.errors import ConfigError
from gspo.learner import ChunkedHead, HeadForm, Targets

# objective: importance_sampling_level and loss_type, of TRL and its relatives
TOKEN_LOSSES = {name: ("token", name) for name in ("grpo", "dapo", "dr_grpo", "cispo", "sapo")}
TRL_LOSSES = {"gspo": ("sequence", "grpo"), "luspo": ("sequence", "luspo"), **TOKEN_LOSSES}
SWIFT_LOSSES = {"gspo": ("sequence", "grpo"), "gspo_token": ("sequence_token", "grpo"), **TOKEN_LOSSES}
RECIPE = "called with importance_sampling_level=sequence and loss_type=grpo, TRL's recipe for GSPO"


def trl_settings(batch: Batch, kinds: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """The options that TRL and its relatives share."""
    level, loss_type = kinds[batch.objective]
    if batch.settings.get("kl_estimator", "k3") != "k3":
        raise NotOfferedError("its loss has the k3 estimator only")
    return {
        "importance_sampling_level": level,
        "loss_type": loss_type,
        "epsilon_low": batch.settings.get("clip_low"),
        "epsilon_high": batch.settings.get("weight_max", batch.settings.get("clip_high")),
        "beta": batch.settings.get("kl_coef", 0.0),
        "max_completion_length": batch.settings.get("max_new_tokens"),
    }


def temperatures(b: Batch) -> dict[str, Any]:
    return {"sapo_temperature_pos": b.settings.get("tau_pos"), "sapo_temperature_neg": b.settings.get("tau_neg")}


def tokens_of(batch: Batch) -> Tensor:
    """Trained tokens of the whole update."""
    return torch.tensor(float(batch.num_tokens or int(batch.mask.sum())))


def refuse_uneven(batch: Batch) -> None:
    if batch.num_parts > 1 and len(batch.logp) * batch.num_parts != batch.num_sequences:
        raise NotOfferedError("its trainer makes micro-batches of equal size only")


def refuse_packed(batch: Batch) -> None:
    if batch.cu_seqlens is not None:
        raise NotOfferedError("its loss takes padded tensors")


def refuse_kl(batch: Batch) -> None:
    if batch.settings.get("kl_coef"):
        raise NotOfferedError("its KL is computed outside of this function")


def trl(package: Package) -> Implementation:
    file = "trl/trainer/grpo_trainer.py"
    compute = package.take(file, "GRPOTrainer._compute_loss", nanmin=torch.amin, nanmax=torch.amax)._compute_loss

    def loss(b: Batch) -> tuple[Tensor, float | None]:
        refuse_packed(b)
        refuse_uneven(b)
        metrics = {"train": defaultdict(list)}
        arguments = Stub(steps_per_generation=b.num_parts, **temperatures(b))
        trainer = Stub(
            **trl_settings(b, TRL_LOSSES),
            top_entropy_quantile=1.0,
            model=Stub(training=True),
            current_gradient_accumulation_steps=b.num_parts,
            accelerator=Stub(num_processes=1, gather=same, reduce=same, gather_for_metrics=same),
            args=arguments,
            _metrics=metrics,
            _get_per_token_logps_and_entropies=lambda *_, **__: (b.logp, torch.zeros_like(b.logp), None),
        )
        none = torch.zeros(len(b.logp), 0, dtype=torch.long)
        inputs = {"prompt_ids": none, "prompt_mask": none, "completion_ids": torch.zeros_like(b.mask, dtype=torch.long)}
        inputs |= {"completion_mask": b.mask.long(), "advantages": b.advantage, "old_per_token_logps": b.proximal_logp}
        inputs |= {"ref_per_token_logps": b.reference_logp, "num_items_in_batch": tokens_of(b)}
        value = compute(trainer, None, inputs)
        return value, next(iter(metrics["train"].get("clip_ratio/region_mean", [])), None)

    return Implementation("trl", loss, frozenset(TRL_LOSSES), version=package.version, notes=(RECIPE,))


def ms_swift(package: Package) -> Implementation:
    file, method = "swift/rlhf_trainers/grpo_trainer.py", "GRPOTrainer._compute_loss_and_metrics"
    names = {"gather_object": same, "gather": same, "nanmin": torch.amin, "nanmax": torch.amax}
    compute = package.take(file, "WINDOW_NORMALIZED_LOSS_TYPES", method, **names)._compute_loss_and_metrics

    def loss(b: Batch) -> tuple[Tensor, float | None]:
        refuse_packed(b)
        refuse_uneven(b)
        trainer = Stub(
            **trl_settings(b, SWIFT_LOSSES),
            tau_pos=b.settings.get("tau_pos"),
            tau_neg=b.settings.get("tau_neg"),
            model=Stub(training=True),
            args=Stub(top_entropy_quantile=1.0),
            sdar_loss_coef=0.0,
            accelerator=Stub(num_processes=1, gather_for_metrics=same),
            _get_per_token_logps_and_entropies=lambda *_, **__: (b.logp, None),
            _undo_gradient_accumulation_scaling=lambda x: x * b.num_parts,  # the Trainer divides by it afterwards
        )
        data = Stub(completion_mask=b.mask, advantages=b.token_advantage, old_per_token_logps=b.proximal_logp)
        data.ref_per_token_logps, data.num_items_in_batch = b.reference_logp, tokens_of(b)
        value, metrics = compute(trainer, None, {}, data)
        return value / b.num_parts, (metrics.get("clipping") or {}).get("region_clip_mean")

    return Implementation("ms-swift", loss, frozenset(SWIFT_LOSSES), version=package.version, notes=(RECIPE,))


def liger(package: Package) -> Implementation:
    below = "liger_kernel/chunked_loss"
    base = package.take(f"{below}/fused_linear_ppo.py", "LigerFusedLinearPPOBase._compute_dapo_normalizer")
    names = ("k3_loss_fn", "sapo_loss_fn", "clip_coef_fn", "LigerFusedLinearGRPOFunction.ppo_loss_fn")
    compute = package.take(f"{below}/grpo_loss.py", *names, LigerFusedLinearPPOBase=base).ppo_loss_fn

    def loss(b: Batch) -> tuple[Tensor, float | None]:
        refuse_packed(b)
        mask = b.mask.to(torch.float32)
        whole = torch.zeros(b.num_sequences or len(mask), mask.shape[1])  # of the update: only its counts are used
        whole[0, 0] = tokens_of(b)
        arguments = {"old_per_token_logps": b.proximal_logp, "num_items_in_batch": tokens_of(b), **temperatures(b)}
        value, metrics = compute(
            b.logp,
            mask,
            b.advantage,
            whole,
            ref_per_token_logps=b.reference_logp,
            **{name: x for name, x in arguments.items() if x is not None},
            **trl_settings(b, TRL_LOSSES),
        )
        return value, float(metrics[-1])

    notes = (RECIPE, "the loss on log-probs; its fused projection is not tested")
    return Implementation("liger", loss, frozenset(TRL_LOSSES), version=package.version, notes=notes)


VERL_LOSSES = {  # function, loss_agg_mode
    "gspo": ("compute_policy_loss_gspo", "seq-mean-token-mean"),
    "gspo_token": ("compute_policy_loss_gspo", "seq-mean-token-mean"),
    "ppo": ("compute_policy_loss_vanilla", "token-mean"),
    "dapo": ("compute_policy_loss_vanilla", "token-mean"),
    "grpo": ("compute_policy_loss_vanilla", "seq-mean-token-mean"),
    "dr_grpo": ("compute_policy_loss_vanilla", "seq-mean-token-sum-norm"),
    "sapo": ("compute_policy_loss_sapo", "seq-mean-token-mean"),
    "cispo": ("compute_policy_loss_cispo", "token-mean"),
    "gmpo": ("compute_policy_loss_geo_mean", "seq-mean-token-mean"),
}


def verl(package: Package) -> Implementation:
    verl_f = package.take("verl/utils/torch_functional.py", "masked_sum", "masked_mean")
    names = ("agg_loss", *dict.fromkeys(function for function, _ in VERL_LOSSES.values()))
    space = {"verl_F": verl_f, "ActorConfig": Stub, "AlgoConfig": type(None), "DictConfig": Stub}
    functions = package.take("verl/trainer/ppo/core_algos.py", *names, **space)

    def loss(b: Batch) -> tuple[Tensor, float | None]:
        refuse_packed(b)
        refuse_kl(b)
        name, mode = VERL_LOSSES[b.objective]
        low, high = (b.settings.get(f"clip_{side}", b.settings.get(f"log_clip_{side}")) for side in ("low", "high"))
        if "weight_max" in b.settings:  # its range is two-sided; this low one is off
            low, high = 1.0, b.settings["weight_max"] - 1
        counts = {"dp_size": 1, "global_batch_size": b.num_sequences, "batch_num_tokens": b.num_tokens}
        counts |= {"loss_scale_factor": b.settings["max_new_tokens"]} if b.objective == "dr_grpo" else {}
        config = Stub(clip_ratio=0.2, clip_ratio_low=low, clip_ratio_high=high, global_batch_info=counts)
        config.tau_pos, config.tau_neg = b.settings.get("tau_pos"), b.settings.get("tau_neg")
        inputs = (b.proximal_logp, b.logp, b.token_advantage, b.mask.to(torch.float32))
        value, metrics = getattr(functions, name)(*inputs, loss_agg_mode=mode, config=config)
        return value, metrics["actor/pg_clipfrac"]

    notes = ("called with loss_agg_mode=seq-mean-token-mean, which it recommends for GSPO; its default is token-mean",)
    return Implementation("verl", loss, frozenset(VERL_LOSSES), version=package.version, notes=notes)


def areal(package: Package) -> Implementation:
    names = ("_compute_sequence_level_ratio_and_advantages", "ppo_actor_loss_fn", "sapo_loss_fn")
    functions = package.take("areal/utils/functional/functional.py", *names)

    def loss(b: Batch) -> tuple[Tensor, float | None]:
        refuse_kl(b)
        lengths = None if b.cu_seqlens is None else b.cu_seqlens.diff()
        advantage = b.token_advantage if lengths is None else b.advantage.repeat_interleave(lengths)
        # Micro-batches are weighted by their trained tokens (loss_weight_fn of its trainer).
        share = b.mask.sum() / (b.num_tokens or b.mask.sum())
        if b.objective == "sapo":
            taus = b.settings["tau_pos"], b.settings["tau_neg"]
            return share * functions.sapo_loss_fn(b.logp, b.proximal_logp, advantage, *taus, b.mask)[0], None
        value, stat = functions.ppo_actor_loss_fn(
            b.logp,
            b.proximal_logp,
            b.proximal_logp,
            advantage,
            b.settings["clip_low"],
            b.mask,
            eps_clip_higher=b.settings["clip_high"],
            importance_sampling_level="sequence" if b.objective == "gspo" else "token",
            cu_seqlens=b.cu_seqlens,
        )
        return share * value, float((stat["clip_mask"] & b.mask).sum() / b.mask.sum())

    notes = ("called with importance_sampling_level=sequence",)
    objectives = frozenset({"gspo", "ppo", "dapo", "sapo"})
    return Implementation("areal", loss, objectives, version=package.version, notes=notes)


def openrlhf(package: Package) -> Implementation:
    masked_mean = package.take("openrlhf/models/utils.py", "masked_mean").masked_mean
    space = package.take("openrlhf/models/loss.py", "aggregate_loss", "PolicyLoss", masked_mean=masked_mean)

    def loss(b: Batch) -> tuple[Tensor, float | None]:
        refuse_packed(b)
        refuse_kl(b)
        policy_loss = space.PolicyLoss(
            clip_eps_low=b.settings["clip_low"],
            clip_eps_high=b.settings["clip_high"],
            token_level_loss=b.objective != "grpo",
            policy_loss_type="gspo" if b.objective == "gspo" else "ppo",
        )
        # Its replay buffer counts the sequences with trained tokens.
        counts = {"batch_num_tokens": b.num_tokens, "global_batch_size": b.num_trained}
        inputs = (b.logp, b.proximal_logp, b.token_advantage, b.mask.to(torch.float32))
        value, clip_ratio, *_ = policy_loss(*inputs, **counts)
        return value, float(clip_ratio)

    objectives = frozenset({"gspo", "ppo", "dapo", "grpo"})
    return Implementation("openrlhf", loss, objectives, version=package.version)


def slime(package: Package) -> Implementation:
    names = ("compute_gspo_kl", "compute_policy_loss", "compute_cispo_loss")
    functions = package.take("slime/utils/ppo_utils.py", *names)
    one_rank = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    file = "slime/backends/megatron_utils/cp_utils.py"
    reducer = package.take(file, "get_sum_of_sample_mean", mpu=one_rank).get_sum_of_sample_mean

    def loss(b: Batch) -> tuple[Tensor, float | None]:
        refuse_kl(b)
        count = b.num_sequences or len(b.advantage)
        rows, cuts = packed(b)
        lengths = cuts.diff()
        new, old, masks = (x.split(lengths.tolist()) for x in (rows.logp, rows.proximal_logp, rows.mask.float()))
        if b.objective == "gspo":
            ppo_kl = functions.compute_gspo_kl(new, old, new, masks)
        else:
            ppo_kl = rows.proximal_logp - rows.logp
        advantage = rows.advantage
        advantage = advantage.repeat_interleave(lengths) if len(advantage) != len(rows.logp) else advantage
        if b.objective == "cispo":
            clip = (1.0, b.settings["weight_max"] - 1)
            values, clipped = functions.compute_cispo_loss(ppo_kl, rows.logp, advantage, *clip)
        else:
            clip = (b.settings["clip_low"], b.settings["clip_high"])
            values, clipped = functions.compute_policy_loss(ppo_kl, advantage, *clip)
        per_token = b.objective in ("dapo", "cispo", "ppo")
        reduce = reducer(lengths.tolist(), lengths.tolist(), masks, None, per_token)
        count = float(tokens_of(b)) if per_token else count
        return reduce(values) / count, float(reduce(clipped)) / count

    notes = ("sequences are given without padding, as in its trainer, which divides by the sequences of the update",)
    objectives = frozenset({"gspo", "grpo", "dapo", "cispo", "ppo"})
    return Implementation("slime", loss, objectives, version=package.version, notes=notes)


def gspo(package: Package, compute: Callable[..., objectives.Objective] = objectives.loss) -> Implementation:
    """Our own objective, by the same door; `compute` is its compiled form, for example."""

    def loss(b: Batch) -> tuple[Tensor, float | None]:
        name, settings, rows = b.objective, dict(b.settings), b
        others = {"behavior_logp": b.behavior_logp, "reference_logp": b.reference_logp}
        mask, weight, count = b.mask, None, objectives.denominator
        if name == "decoupled_ppo":
            name, settings["correction"] = "ppo", {"action": "clamp", "upper": None}
        if name == "gspo_turns":
            # A turn is a sequence with its share of the trajectory's tokens.
            name, (rows, whole) = "gspo", packed(b)
            assert rows.turn is not None
            cuts, trajectory = objectives.turn_cuts(rows.turn, whole)
            weight = cuts.diff() / whole.diff()[trajectory]
            rows, mask = replace(rows, cu_seqlens=cuts, advantage=b.advantage[trajectory]), None
        totals = {"num_sequences": b.num_sequences or len(b.advantage), "num_tokens": tokens_of(b)}
        settings["denominator"] = count(name, **totals, max_new_tokens=settings.get("max_new_tokens"))
        shape = {"cu_seqlens": rows.cu_seqlens, "weight": weight}
        out = compute(name, rows.logp, rows.proximal_logp, rows.advantage, mask, **shape, **others, **settings)
        return out.loss, float(objectives.clip_fractions(out.stats)["sequences"])

    every = frozenset({*TRL_LOSSES, "gspo_token", "gspo_turns", "ppo", "gmpo", "decoupled_ppo"})
    return Implementation("gspo", loss, every, objectives.advantage.group_std, target_logp, version=package.version)


def target_logp(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """By the trainer's head, with the logits as hidden rows and the unit matrix as its weight."""
    begins = torch.arange(len(tokens) + 1)
    targets = Targets(tokens, begins, 1 / temperature, None, temperature)
    form = HeadForm(chunk_size=2, fp32=True, with_entropy=False, entropy_grad=False)
    return ChunkedHead.apply(logits, torch.eye(logits.shape[1]), None, targets, form)[0]


# Of --target: how it is loaded, and the name of its distribution.
TARGETS: Mapping[str, tuple[Callable[[Package], Implementation], str]] = {
    "gspo": (gspo, "gspo"),
    "trl": (trl, "trl"),
    "verl": (verl, "verl"),
    "areal": (areal, "areal"),
    "openrlhf": (openrlhf, "openrlhf"),
    "liger": (liger, "liger-kernel"),
    "ms-swift": (ms_swift, "ms-swift"),
    "slime": (slime, "slime"),
}


def target(name: str, source: Path | None = None) -> Implementation:
    """A loss of TARGETS, from the installed package or from a folder."""
    load, distribution = TARGETS[name]
    if source is not None and not source.is_dir():
        raise ConfigError(f"--source {source}: there is no such folder")
    return load(Package(distribution, source))

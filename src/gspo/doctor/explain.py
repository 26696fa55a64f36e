"""What a config will do, as one tree of plain values: the content of `gspo doctor`, for people and as JSON. Torch-free.

Each section is a function from the facts to a dict of words and numbers; `render.py` only lays them out.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from gspo.algorithms import ALGORITHMS
from gspo.config import lint
from gspo.config.backends import SAMPLERS, parse_backend
from gspo.config.layout import layout_of
from gspo.config.lint.facts import Facts, Finding, facts_of
from gspo.config.lint.unused import ineffective
from gspo.config.loaded import Loaded
from gspo.config.resolve import Objective
from gspo.config.schema import Critic, Norm
from gspo.doctor import memory
from gspo.doctor.memory import EmbeddedShape, Item, Shape, Unknown
from gspo.doctor.problems import data_section
from gspo.system.text import count, number

RATIO = {"token": "wᵢₜ", "sequence": "sᵢ", "sequence_token": "sᵢₜ"}
RATIO_DEFINITION = {
    "token": "wᵢₜ = π_θ(yᵢₜ)/π_old(yᵢₜ)",
    "sequence": "sᵢ = exp( (1/|yᵢ|) Σₜ log π_θ(yᵢₜ)/π_old(yᵢₜ) )",
    "sequence_token": "sᵢₜ = sg[sᵢ] · π_θ(yᵢₜ)/sg[π_θ(yᵢₜ)]",
}
RATIO_WORDS = {
    "token": "one ratio per token",
    "sequence": "one ratio per completion, the geometric mean of its token ratios",
    "sequence_token": "the completion's ratio in value, each token's own gradient",
}
ADVANTAGE_WORDS = {
    "group_std": "reward minus its group's mean, divided by its group's std",
    "group_mean": "reward minus its group's mean",
    "leave_one_out": "reward minus the mean of the group's other samples",
    "batch": "reward normalised by mean and std over the whole batch",
    "gae": "generalised advantage estimation (GAE) with the critic, per token",
}
AGGREGATION_WORDS = {
    "sequence_mean": "the mean over completions, each with one vote whatever its length",
    "sequence_sum": "the mean over completions, each weighing as much as it has tokens",
    "token_mean": "the mean over all tokens of the update",
    "token_sum": "the sum over all tokens, divided by completions × max_new_tokens",
}
_OUTER = {
    "sequence_mean": "(1/G) Σᵢ",
    "sequence_sum": "(1/G) Σᵢ",
    "token_mean": "(1/Σᵢ|yᵢ|) Σᵢ",
    "token_sum": "(1/(G·L)) Σᵢ",
}


@dataclass(frozen=True)
class Report:
    """`sections` holds what `to_json` writes; findings are in it, and decide the exit code."""

    sections: dict[str, Any]
    findings: tuple[Finding, ...]
    strict: bool

    @property
    def exit_code(self) -> int:
        return 2 if any(f.severity == "error" or self.strict for f in self.findings) else 0


def explain(loaded: Loaded, *, embedded: EmbeddedShape | None = None, num_gpus: int | None = None) -> Report:
    """Everything `gspo doctor` has to say; `embedded` knows shapes that live above config/, see `find_shape`."""
    shape = memory.find_shape(loaded.config.actor.path, embedded)
    facts = facts_of(loaded, num_gpus)
    findings = lint.missing(loaded) + lint.lint(
        loaded, facts.num_gpus, shape.context if isinstance(shape, Shape) else None
    )
    config = facts.config
    sections = {
        "config": None if loaded.path is None else str(loaded.path),
        "run_directory": f"{config.cluster.fileroot}/{config.experiment_name}/{config.trial_name}",
        "objective": objective_section(facts),
        "data": data_section(facts),
        "batch": batch_section(facts),
        "policies": policy_section(facts),
        "memory": memory_section(facts, shape, embedded),
        "messages": list(loaded.messages),
        "warnings": [asdict(finding) for finding in findings if finding.severity == "warning"],
        "errors": [asdict(finding) for finding in findings if finding.severity == "error"],
        "without_effect": [
            {"key": key, "where": facts.where(key), "why": why} for key, why in ineffective(loaded, facts.num_gpus)
        ],
        "strict": config.strict,
    }
    report = Report(sections, tuple(findings), config.strict)
    sections["exit_code"] = report.exit_code
    return report


def to_json(report: Report) -> str:
    # ASCII only: whatever a config's texts hold is inert in a terminal.
    return json.dumps(report.sections, indent=2, ensure_ascii=True, allow_nan=False)


# The objective


def formula(objective: Objective, numbers: bool = True, penalised: bool = False) -> str:
    """The objective as it will run, put together from its parts, so that a changed level or aggregation shows.

    `penalised`: KL in the reward makes advantages differ from token to token.
    """
    settings, level = objective["settings"], objective["level"]
    by_token = penalised or objective["advantage"] == "gae"
    per_token = level == "sequence_token" or (by_token and level == "token")
    ratio, advantage = RATIO[level], "Aᵢₜ" if per_token else "Aᵢ"

    def shown(name: str, symbol: str) -> str:
        return f"{number(settings[name])}" if numbers and not objective["eps_auto"] else symbol

    if objective["gate"] == "gmpo":
        low, high = shown("log_clip_low", "c_low"), shown("log_clip_high", "c_high")
        bound = f"dᵢₜ = min(log wᵢₜ, {high}) for A > 0, max(log wᵢₜ, −{low}) for A < 0"
        return f"{_sum_over(objective)} Aᵢ exp( (1/|yᵢ|) Σₜ dᵢₜ ),   {bound}"
    if objective["gate"] == "clip":
        low, high = shown("clip_low", "ε_low"), shown("clip_high", "ε_high")
        inner = f"min( {ratio} {advantage} , clip({ratio}, 1−{low}, 1+{high}) {advantage} )"
        dual = settings.get("dual_clip")
        if dual is not None:
            inner = f"{inner}, for A < 0 not below {number(dual)} {advantage}"
    elif objective["gate"] == "cispo":
        inner = f"sg[min({ratio}, {shown('weight_max', 'w_max')})] {advantage} log π_θ(yᵢₜ)"
    elif objective["gate"] == "sapo":
        inner = f"(4/τ) σ(τ({ratio}−1)) {advantage}"
    else:
        inner = f"{ratio} {advantage}"
    return f"{_sum_over(objective)} {inner},   {RATIO_DEFINITION[level]}"


def _sum_over(objective: Objective) -> str:
    aggregation, outer = objective["aggregation"], _OUTER[objective["aggregation"]]
    if objective["level"] != "sequence":
        return f"J = E {outer} (1/|yᵢ|) Σₜ" if aggregation == "sequence_mean" else f"J = E {outer} Σₜ"
    return f"J = E {outer}" if aggregation == "sequence_mean" else f"J = E {outer} |yᵢ| ·"


def objective_section(f: Facts) -> dict[str, Any]:
    objective, actor = f.objective, f.actor
    algorithm, settings = ALGORITHMS[objective["name"]], objective["settings"]
    as_published = objective["level"] == algorithm.level and objective["aggregation"] == algorithm.aggregation
    return {
        "algorithm": algorithm.name,
        "title": algorithm.title,
        "paper": algorithm.paper,
        "as_published": as_published,
        "same_as": None if as_published else _same_as(objective),
        "formula": formula(objective, penalised=actor.kl_ctl > 0),
        "words": _words(f),
        "level": objective["level"],
        "gate": objective["gate"],
        "advantage": objective["advantage"],
        "aggregation": objective["aggregation"],
        "settings": dict(settings),
        "eps_auto": asdict(actor.eps_clip_auto) if objective["eps_auto"] else None,
        "decided_by": [
            {"key": key, "value": value, "where": f.where(key)} for key, value in _decisions(f) if value is not None
        ],
    }


def _same_as(objective: Objective) -> str | None:
    """The preset that has exactly these parts under another name: grpo with level sequence is gspo."""
    for algorithm in ALGORITHMS.values():
        parts = ("level", "gate", "advantage", "aggregation")
        if all(getattr(algorithm, part) == objective[part] for part in parts):
            return algorithm.name
    return None


def _words(f: Facts) -> list[str]:
    objective, settings = f.objective, f.objective["settings"]
    kind, gate = RATIO_WORDS[objective["level"]], objective["gate"]
    if objective["eps_auto"]:
        auto = f.actor.eps_clip_auto
        band = (
            f"clipped to a band that follows the data: it starts at [1 − {number(settings['clip_low'])}, 1 + "
            f"{number(settings['clip_high'])}] and steers to {auto.target_fraction:.0%} clipped sequences, "
            f"never beyond {number(auto.eps_max)}"
        )
    elif gate == "clip":
        band = f"clipped to [1 − {number(settings['clip_low'])}, 1 + {number(settings['clip_high'])}]"
    elif gate == "cispo":
        band = f"a constant weight of at most {number(settings['weight_max'])}; no token loses its gradient"
    elif gate == "sapo":
        band = f"through a soft gate, τ {number(settings['tau_pos'])} for A > 0, else {number(settings['tau_neg'])}"
    elif gate == "gmpo":
        bound = settings["log_clip_high"]
        band = f"each token's log-ratio bounded at ±{number(bound)} on the side the advantage's sign allows"
    else:
        band = "not clipped"
    if settings.get("dual_clip") is not None:
        band += f"; for A < 0 the ratio counts as at most {number(settings['dual_clip'])}"
    words = [
        f"ratio: {kind}, {band}",
        f"advantage: {_advantage_words(f)}",
        f"loss: {AGGREGATION_WORDS[objective['aggregation']]}",
        f"groups of equal rewards: {_zero_variance_words(f)}",
    ]
    if f.config.rollout.dynamic_filter_fn is not None:
        words.append(
            f"other groups: {f.config.rollout.dynamic_filter_fn} decides which are trained on; the rest is resampled, "
            f"at most {f.actor.max_refills} rounds"
        )
    if f.actor.overlong_reward_penalty:
        longest = f.config.gconfig.max_new_tokens
        words.append(
            f"overlong completions: up to {number(f.actor.overlong_penalty_factor)} less reward, rising over the last "
            f"{f.actor.overlong_tokens:,} of {longest:,} tokens"
        )
    env = f.config.env
    agent = env.agent or " ".join(env.command)
    if played := env.path or agent:
        unit = f.actor.sequence_unit if f.sequence_level else "token"
        words.append(
            f"episodes: {played}, at most {env.max_turns} turns; one ratio per {unit}; what tools and environment "
            "say is neither in |y| nor in the loss"
        )
    if agent:
        words.append(f"agents: through an OpenAI-compatible address on this machine, the policy named {env.model!r}")
    if objective["advantage"] == "gae" and f.config.critic is not None:
        words.append(f"critic: {_critic_words(f, f.config.critic)}")
    return words


def _critic_words(f: Facts, critic: Critic) -> str:
    updates = critic.ppo_n_minibatches or f.num_minibatches
    return (
        f"{critic.path} with a new value head, {updates} updates per batch at {number(critic.optimizer.lr or 0)}, "
        f"values clipped to ±{number(critic.value_eps_clip)} around those at the start of the batch"
    )


def _advantage_words(f: Facts) -> str:
    chosen, actor = f.objective["advantage"], f.actor
    words = ADVANTAGE_WORDS.get(chosen)
    if words is None:
        words = "reward normalised by actor.reward_norm: " + _norm_words(actor.reward_norm or Norm())
    if chosen == "gae":
        words += f" (γ {actor.discount:g}, λ {actor.gae_lambda:g})"
    if actor.kl_ctl > 0:
        words += f"; each token pays {number(actor.kl_ctl)} × the KL to the reference that follows it"
        if f.objective["level"] == "sequence":
            words += " (a sequence ratio takes the mean over tokens)"
    if actor.adv_norm is not None:
        words += "; then " + _norm_words(actor.adv_norm)
    return words


def _norm_words(norm: Norm) -> str:
    mean = {None: "no mean subtracted", "group": "minus its group's mean", "batch": "minus the batch's mean"}
    std = {None: "not divided", "group": "divided by its group's std", "batch": "divided by the batch's std"}
    leave = " (itself left out)" if norm.mean_leave1out and norm.mean_level else ""
    return f"{mean[norm.mean_level]}{leave}, {std[norm.std_level]}"


def _zero_variance_words(f: Facts) -> str:
    chosen = f.actor.zero_variance_groups or "count"
    if f.objective["advantage"] == "gae" and chosen == "count":
        return "as any other: the critic says what each token was worth"
    if f.actor.kl_ctl > 0 and chosen == "count":
        return "advantage 0 before the KL penalty, counted in the denominator"
    return {
        "count": "advantage 0, still counted in the denominator",
        "drop": "advantage 0, left out of the denominator",
        "refill": f"resampled, at most {f.actor.max_refills} rounds",
    }[chosen]


def _decisions(f: Facts) -> list[tuple[str, Any]]:
    actor, gate = f.actor, f.objective["gate"]
    keys = [
        "importance_sampling_level",
        "loss_aggregation",
        "ppo_n_minibatches",
        "zero_variance_groups",
        "kl_loss_coef",
    ]
    if gate == "clip":
        keys[1:1] = ["eps_clip", "eps_clip_higher", "c_clip"]
    keys += ["kl_ctl"] if actor.kl_ctl > 0 else []
    keys += ["discount", "gae_lambda"] if f.objective["advantage"] == "gae" else []
    gates = {"cispo": ["cispo_weight_max"], "sapo": ["sapo_tau_pos", "sapo_tau_neg"], "gmpo": ["gmpo_log_clip"]}
    keys[1:1] = gates.get(gate, [])
    return [("algorithm", f.config.algorithm), *((f"actor.{key}", getattr(actor, key)) for key in keys)]


# Batches and policies


def batch_section(f: Facts) -> dict[str, Any]:
    group, parts, total = f.config.gconfig.n_samples, f.num_minibatches, f.num_sequences
    ranks, longest = layout_of(f.config, f.num_gpus).ranks, f.longest
    each, spec = total / parts, f.actor.mb_spec
    tokens = math.ceil(each * (longest or f.config.gconfig.max_new_tokens))
    micro = max(spec.n_mbs or 1, math.ceil(tokens / ranks / spec.max_tokens_per_mb))
    steps = f.config.total_train_steps
    return {
        "prompts": f.num_prompts,
        "group_size": group,
        "sequences": total,
        "minibatches": parts,
        "sequences_per_minibatch": int(each) if each.is_integer() else each,
        "divides": each.is_integer(),
        "tokens_per_minibatch_at_most": tokens,
        "prompt_length_known": longest is not None,
        "max_tokens_per_microbatch": spec.max_tokens_per_mb,
        "microbatches_at_most": micro,
        "ranks": ranks,
        "steps": steps,
        "updates": None if steps is None else steps * parts,
    }


def policy_section(f: Facts) -> dict[str, Any]:
    return {
        "sampler": _sampler_words(f),
        "sampling": _sampling_words(f),
        "staleness": f.config.rollout.max_head_offpolicyness,
        "proximal": f.objective["proximal"],
        "pi_old": _proximal_words(f),
        "corrected": f.objective["corrected"],
        "correction": f.objective["settings"]["correction"],
        "correction_words": _correction_words(f),
        "kl": _kl_words(f),
        "experts": _expert_words(f),
        "trained": _trained_words(f),
    }


def _expert_words(f: Facts) -> str:
    replay = f.actor.routing_replay
    if replay == "proximal":
        return "of a mixture: mini-batches 2 and on take those of π_old's own forward (routing replay)"
    if replay == "rollout":
        return "of a mixture: every training pass takes those that the sampler chose (routing replay)"
    return ""


def _trained_words(f: Facts) -> str:
    actor = f.actor
    if not actor.use_lora:
        return "all weights"
    where = "all linear layers but the head"
    if actor.target_modules != ["all-linear"]:
        where = ", ".join(actor.target_modules)
    scale = actor.lora_alpha / actor.lora_rank
    return f"an adapter of rank {actor.lora_rank}, scaled by alpha/rank = {scale:g}, on {where}; the model stays frozen"


def _sampler_words(f: Facts) -> str:
    backend, stale = f.config.rollout.backend, f.config.rollout.max_head_offpolicyness
    layout = layout_of(f.config, f.num_gpus)
    sampler, gpus = layout.sampler, layout.num_nodes * layout.gpus_per_node
    if sampler is None:
        where = "in the trainer's process"
    else:
        where = f"{sampler.data} {sampler.name} server{'s' if sampler.data > 1 else ''}"
        where += f", {sampler.world} GPU{'s' if sampler.world > 1 else ''}" if gpus else ""
    if backend == "auto":
        where += f" (GPUs: {gpus})" if gpus else " (no GPU is visible here)"
    when = "synchronous, every sample is of the newest weights"
    if stale > 0 and "in the trainer's process" in where:
        when = f"taking turns: batch b is sampled by version b − {stale}, up to {stale} weight versions old"
    elif stale > 0:
        when = f"beside the trainer, samples up to {stale} weight versions old"
    precision = f.config.rollout.sampler_precision
    rounded = "" if precision == "none" else f", on weights rounded to {precision}"
    return f"{where}{rounded}; {when}"


def _sampling_words(f: Facts) -> str:
    generation = f.config.gconfig
    how = "greedy" if generation.greedy else f"temperature {generation.temperature:g}"
    cuts = [f"top-p {generation.top_p:g}"] if generation.top_p < 1 else []
    cuts += [f"top-k {generation.top_k}"] if generation.top_k else []
    return ", ".join([how, *cuts, f"at most {generation.max_new_tokens:,} new tokens"])


def _proximal_words(f: Facts) -> str:
    method, parts = f.objective["proximal"], f.num_minibatches
    if f.recentred:
        return "mini-batch 1 is its own π_old; later ones take the sampler's log-probs (μ) less their mean error"
    if method == "rollout":
        return "the sampler's own log-probs (μ), recorded with each token; refused where their noise is above ε"
    if method == "loglinear":
        return "interpolated between the sampler's and the trainer's log-probs by each token's weight version"
    if parts == 1:
        return "the trainer's weights at the start of the batch; with one mini-batch that is the policy itself: ratio 1"
    own = f"the trainer's weights at the start of the batch: mini-batch 1 is its own π_old, mini-batches 2…{parts} "
    if method == "auto":
        return f"{own}take the sampler's log-probs while their measured noise is far below ε, else a forward pass"
    return f"{own}take a forward pass before the first update"


def _correction_words(f: Facts) -> str:
    form = f.objective["settings"]["correction"]
    if form is None:
        return "none: the loss is not weighed by π_old/μ"
    low, high = form["lower"], form["upper"]
    if low is None and high is None:
        if form["level"] == "token":
            return "each token weighs π_old/μ, without bounds"
        return "each sequence weighs π_old/μ, the geometric mean over its tokens, without bounds"
    what = "each token" if form["level"] == "token" else f"each sequence (its {form['agg']} over tokens)"
    metric = "π_old/μ" if form["metric"] == "ratio" else f"{form['metric']} between π_old and μ"
    band = f"[{'−∞' if low is None else number(low)}, {'∞' if high is None else number(high)}]"
    action = "is dropped" if form["action"] == "mask" else "has its weight truncated"
    only = " where A < 0" if form["only_negative"] else ""
    return f"{what} weighs π_old/μ; outside {metric} ∈ {band} it {action}{only}"


def _kl_words(f: Facts) -> str:
    actor, parts = f.actor, []
    ref = "a missing reference" if f.config.ref is None else str(f.config.ref.path)
    if _adapter_is_off(f):
        ref += " (the policy with its adapter off)"
    if actor.kl_loss_coef > 0:
        parts.append(f"{number(actor.kl_loss_coef)} × KL to {ref} in the loss ({actor.kl_estimator or 'k3'})")
    if actor.kl_ctl > 0:
        parts.append(f"{number(actor.kl_ctl)} × KL to {ref} in the reward ({actor.kl_estimator or 'k1'})")
    return " and ".join(parts) or "none"


def _adapter_is_off(f: Facts) -> bool:
    """The reference is the policy's own frozen weights."""
    ref, actor = f.config.ref, f.actor
    return ref is not None and actor.use_lora and ref.path == actor.path and ref.dtype in ("auto", actor.dtype)


# Memory


def memory_section(f: Facts, shape: Shape | Unknown, embedded: EmbeddedShape | None) -> dict[str, Any]:
    if isinstance(shape, Unknown):
        return {"model": f.actor.path, "known": False, "unknown": shape.reason, "items": []}
    items = [*_trainer_memory(f, shape, embedded), *_sampler_memory(f, shape)]
    totals = {}
    for side in ("trainer", "sampler"):
        sizes = [item.num_bytes for item in items if item.side == side]
        totals[side] = None if None in sizes else sum(size for size in sizes if size is not None)
    return {
        "model": f.actor.path,
        "known": True,
        "unknown": None,
        "shape": {
            "source": shape.source,
            "family": shape.family,
            "parameters": shape.parameters,
            "layers": shape.layers,
            "hidden": shape.hidden,
            "vocabulary": shape.vocabulary,
            "context": shape.context,
            "experts": shape.experts,
            "exact": shape.exact,
        },
        "items": [asdict(item) for item in items],
        "totals": totals,
        "per_rank": layout_of(f.config, f.num_gpus).ranks,
    }


def _trainer_memory(f: Facts, shape: Shape, embedded: EmbeddedShape | None) -> list[Item]:
    actor, shards = f.actor, layout_of(f.config, f.num_gpus).ranks
    trained: int | None = shape.parameters
    if actor.use_lora:
        trained = memory.adapter_parameters(shape, actor.lora_rank, actor.target_modules)
    items = memory.trainer_items(
        shape, dtype=f.dtype, optimizer=actor.optimizer.type, trained_parameters=trained, num_shards=shards
    )
    items += memory.logits_items(shape, chunk=actor.logprobs_chunk_size, tokens_per_mb=actor.mb_spec.max_tokens_per_mb)
    ref, critic = f.config.ref, f.config.critic
    if ref is not None and (actor.kl_loss_coef > 0 or actor.kl_ctl > 0) and not _adapter_is_off(f):
        other = memory.find_shape(ref.path or actor.path, embedded)
        dtype = f.dtype if ref.dtype == "auto" else ref.dtype
        items.append(
            Item("reference parameters", None, other.reason)
            if isinstance(other, Unknown)
            else memory.frozen_item(other, "reference", dtype, shards)
        )
    if critic is not None and f.objective["advantage"] == "gae":
        other = memory.find_shape(critic.path or actor.path, embedded)
        if isinstance(other, Unknown):
            items.append(Item("critic", None, other.reason))
        else:
            items += memory.trainer_items(
                other,
                dtype=f.dtype if critic.dtype == "auto" else critic.dtype,
                optimizer=critic.optimizer.type,
                trained_parameters=other.parameters,
                num_shards=shards,
                what="critic",
            )
    return items


def _sampler_memory(f: Facts, shape: Shape) -> list[Item]:
    sampler, generation = parse_backend(f.config.rollout.backend, SAMPLERS), f.config.gconfig
    items = []
    if f.external_sampler:
        gpus = sampler.tensor * sampler.pipeline
        size = memory.BYTES[f.dtype] if f.dtype != "float64" else 4
        items.append(
            Item(
                "sampler parameters",
                shape.parameters * size // gpus,
                f"{count(shape.parameters)} × {size} bytes" + (f" / {gpus} GPUs" if gpus > 1 else ""),
                side="sampler",
            )
        )
    items.append(
        memory.cache_item(
            shape,
            num_sequences=min(f.config.rollout.max_concurrent_rollouts or f.num_sequences, f.num_sequences),
            group_size=generation.n_samples,
            prompt_tokens=f.config.train_dataset.max_length,
            max_new_tokens=generation.max_new_tokens,
            dtype=f.dtype,
            num_samplers=sampler.data,
        )
    )
    return items

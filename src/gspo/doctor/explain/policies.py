"""The policies of a config: the sampler (μ), π_old, the reference, and what is trained."""

from __future__ import annotations

from typing import Any

from gspo.config.layout import layout_of
from gspo.config.objective import is_supervised
from gspo.lint.facts import Facts
from gspo.system.text import number


def policy_section(f: Facts) -> dict[str, Any]:
    return {
        "sampler": "completions of the data set; the sampler answers held-out problems only"
        if is_supervised(f.config)
        else _sampler_words(f),
        "sampling": _sampling_words(f),
        "staleness": f.config.rollout.max_head_offpolicyness,
        "proximal": f.objective["proximal"],
        "pi_old": "none: the loss has no ratio" if is_supervised(f.config) else _proximal_words(f),
        "corrected": f.objective["corrected"],
        "correction": f.objective["settings"]["correction"],
        "correction_words": _correction_words(f),
        "kl": _kl_words(f) if f.config.teacher is None else f"teacher {f.config.teacher.path}: {_teacher_words(f)}",
        "experts": _expert_words(f),
        "trained": _trained_words(f),
    }


def _teacher_words(f: Facts) -> str:
    assert f.config.teacher is not None
    share, coef = f.config.teacher.exact_kl, number(f.config.teacher.coef)
    if share is None:
        return f"{coef} × (its log-prob − the sampler's) is the advantage of each token"
    return f"{coef} × exact KL over the vocabulary in the loss, {share:.0%} forward"


def _expert_words(f: Facts) -> str:
    replay = f.actor.routing_replay
    if replay == "proximal":
        return "routing replay: mini-batches 2 and later use the experts that π_old's forward pass chose"
    if replay == "rollout":
        return "routing replay: every training pass uses the experts that the sampler chose"
    return ""


def _trained_words(f: Facts) -> str:
    actor = f.actor
    if not actor.use_lora:
        return "all weights"
    where = "all linear layers except the head"
    if actor.target_modules != ["all-linear"]:
        named = {"all-linear": where, "experts": "every expert", "vision": "the vision tower"}
        where = ", ".join(named.get(name, name) for name in actor.target_modules)
    scale = actor.lora_alpha / actor.lora_rank
    adapter = f"an adapter of rank {actor.lora_rank}, scaled by alpha/rank = {scale:g}, on {where}"
    return f"{adapter}; the model itself is frozen"


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
    when = "synchronous: every sample is from the newest weights"
    if stale > 0 and "in the trainer's process" in where:
        when = f"sampling ahead, inline: batch b is sampled by weight version b − {stale}"
    elif stale > 0:
        when = f"sampling ahead, in the background: samples are up to {stale} weight versions old"
    precision = f.config.rollout.sampler_precision
    rounded = "" if precision == "none" else f", on weights rounded to {precision}"
    return f"{where}{rounded}; {when}"


def _sampling_words(f: Facts) -> str:
    generation = f.config.gconfig
    how = f"temperature {generation.temperature:g}"
    cuts = [f"top-p {generation.top_p:g}"] if generation.top_p < 1 else []
    cuts += [f"top-k {generation.top_k}"] if generation.top_k else []
    cuts += [f"min-p {generation.min_p:g}"] if generation.min_p else []
    how = ", ".join([how, *cuts, f"at most {generation.max_new_tokens:,} new tokens"])
    if f.replays_kept:
        return how + "; the sampler records the kept tokens, and ratios are over the kept tokens"
    return how + "; ratios are over the whole vocabulary" if cuts else how


def _proximal_words(f: Facts) -> str:
    method, parts = f.objective["proximal"], f.num_updates
    if method == "rollout":
        return "the sampler's log-probs (μ), recorded with each token; the run stops if their error is above ε"
    if method == "loglinear":
        return "interpolated between the sampler's and the trainer's log-probs by each token's weight version"
    if parts == 1:
        return "the trainer's weights at the start of the batch; with one mini-batch, every ratio is 1"
    later = "mini-batch 2 uses" if parts == 2 else f"mini-batches 2…{parts} use"
    own = f"the trainer's weights at the start of the batch: mini-batch 1 uses its own log-probs, {later} "
    if method == "auto":
        return f"{own}the sampler's log-probs while their measured error is far below ε, else a forward pass"
    return f"{own}a forward pass before the first update"


def _correction_words(f: Facts) -> str:
    form = f.objective["settings"]["correction"]
    if form is None:
        return "no off-policy correction"
    low, high = form["lower"], form["upper"]
    if low is None and high is None:
        if form["level"] == "token":
            return "each token is weighted by π_old/μ, without bounds"
        return "each sequence is weighted by π_old/μ (geometric mean over its tokens), without bounds"
    if form["agg"] == "product" and form["level"] == "sequence":
        weight = "each sequence is weighted by the product of its tokens' π_old/μ"
        how = "is dropped" if form["action"] == "mask" else "is truncated"
        return f"{weight}; outside [{number(low or 0.0)}, {'∞' if high is None else number(high)}] it {how}"
    what = "each token" if form["level"] == "token" else f"each sequence (its {form['agg']} over tokens)"
    metric = "π_old/μ" if form["metric"] == "ratio" else f"{form['metric']} between π_old and μ"
    band = f"[{'−∞' if low is None else number(low)}, {'∞' if high is None else number(high)}]"
    action = "is dropped" if form["action"] == "mask" else "has its weight truncated"
    only = " where A < 0" if form["only_negative"] else ""
    return f"{what} is weighted by π_old/μ; outside {metric} ∈ {band} it {action}{only}"


def _kl_words(f: Facts) -> str:
    actor, parts = f.actor, []
    ref = "a missing reference" if f.config.ref is None else str(f.config.ref.path)
    if reference_is_policy(f):
        ref += " (the policy with its adapter off)"
    if actor.kl_loss_coef > 0:
        parts.append(f"{number(actor.kl_loss_coef)} × KL to {ref} in the loss ({actor.kl_estimator or 'k3'})")
    if actor.kl_ctl > 0:
        parts.append(f"{number(actor.kl_ctl)} × KL to {ref} in the reward ({actor.kl_estimator or 'k1'})")
    return " and ".join(parts) or "none"


def reference_is_policy(f: Facts) -> bool:
    """Whether the reference needs no weights of its own: it is the LoRA policy with its adapter off."""
    ref, actor = f.config.ref, f.actor
    return ref is not None and actor.use_lora and ref.path == actor.path

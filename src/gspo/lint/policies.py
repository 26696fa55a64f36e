"""Lint rules for π_old (the proximal policy), μ (the sampler's policy), staleness, and the weight π_old/μ."""

from __future__ import annotations

from collections.abc import Iterator

from gspo.config.layout import flags_of
from gspo.lint.facts import Facts, Finding, rule
from gspo.system.imports import by_name
from gspo.system.text import number

LONG_PRODUCT = 1000  # tokens from which the product of token ratios is advised against
SAMPLER_NOISE = 2e-3  # published sampler-trainer KL per token: 6e-4 dense, 1.5e-3 MoE


@rule
def decoupled_without_effect(f: Facts) -> Iterator[Finding]:
    if f.actor.use_decoupled_loss and f.objective["proximal"] == "rollout":
        yield f.error(
            "actor.use_decoupled_loss",
            "π_old is the sampler's policy μ (prox_logp_method rollout), so the weight π_old/μ is always 1",
            "set actor.prox_logp_method: recompute, or actor.use_decoupled_loss: false",
        )


@rule
def staleness_without_correction(f: Facts) -> Iterator[Finding]:
    stale = f.max_staleness
    if stale > 0 and f.objective["proximal"] != "rollout" and not f.objective["corrected"]:
        yield f.warn(
            "rollout.max_head_offpolicyness",
            f"samples may be {stale} weight versions old, and π_old comes from the trainer: the difference between "
            "sampler and trainer is neither corrected nor clipped",
            "set actor.use_decoupled_loss: true, which multiplies the loss by π_old/μ",
        )


@rule
def staleness_uses_up_the_clip_range(f: Facts) -> Iterator[Finding]:
    if f.max_staleness > 0 and f.objective["proximal"] == "rollout" and f.clips:
        yield f.warn(
            "actor.prox_logp_method",
            f"the ratio compares with samplers up to {f.max_staleness} weight versions old, so the ratio can leave the "
            f"clip range (ε = {number(min(f.clips))}) before the first update",
            "set actor.use_decoupled_loss: true, which clips against the trainer's π_old and multiplies by π_old/μ",
        )


@rule
def truncated_sampling(f: Facts) -> Iterator[Finding]:
    """Truncation that the trainer does not replay: its log-probs are of another distribution than the sampler's."""
    # A kept set never holds a forbidden end token, so replay covers min_new_tokens too.
    cut = [] if f.replays_kept else [*f.truncations, *(["min_new_tokens"] if f.config.gconfig.min_new_tokens else [])]
    if not cut:
        return
    replay = "actor.sampling_mask_replay: true" if f.truncations else ""
    if f.objective["proximal"] not in ("auto", "recompute") or f.objective["corrected"]:
        yield f.warn(
            f"gconfig.{cut[0]}",
            f"{' and '.join(cut)} truncate the sampled distribution, and the sampler's log-probs are used as π_old or "
            "in π_old/μ; the trainer's log-probs are of the full distribution, so every ratio is wrong",
            f"set {replay or 'gconfig.min_new_tokens: 0'}, or actor.prox_logp_method: recompute without a correction",
        )
    elif f.truncations:
        yield f.warn(
            f"gconfig.{cut[0]}",
            f"{' and '.join(cut)} truncate the sampled distribution, but the trainer differentiates the full one: "
            "samples and gradient belong to different distributions",
            f"set {replay}, or remove {' and '.join(cut)} from gconfig",
        )


@rule
def truncated_sampling_without_kept_sets(f: Facts) -> Iterator[Finding]:
    if f.truncations and not f.engine.returns_kept:
        yield f.error(
            f"gconfig.{f.truncations[0]}",
            f"{f.engine.name}'s log-probs are of the whole vocabulary, and it does not return the tokens that "
            f"{' and '.join(f.truncations)} keep",
            "set gconfig.top_p: 1, top_k: 0 and min_p: 0, or another rollout.backend",
        )


@rule
def noisy_sampler(f: Facts) -> Iterator[Finding]:
    if f.objective["proximal"] != "rollout" or not f.sequence_level or not f.external_sampler or not f.clips:
        return
    if min(f.clips) < SAMPLER_NOISE:
        yield f.warn(
            "actor.prox_logp_method",
            f"{f.external_sampler}'s log-probs differ from the trainer's by 6e-4 to 1.5e-3 per token (published "
            f"values), which is more than ε = {number(min(f.clips))}: sequences are clipped before any update",
            "measure it with `gspo doctor --probe`; set actor.prox_logp_method: recompute, or an ε above the noise",
        )


@rule
def correction_without_bounds(f: Facts) -> Iterator[Finding]:
    correction = f.actor.rejection_sampling
    if correction is None or not f.objective["corrected"]:
        return
    if correction.upper is None and correction.lower is None:
        yield f.warn(
            "actor.rejection_sampling.upper",
            "a correction without bounds drops nothing and truncates nothing",
            "set actor.rejection_sampling.upper, for example 2.0, or a preset such as tis",
        )


@rule
def product_of_ratios(f: Facts) -> Iterator[Finding]:
    correction = f.actor.rejection_sampling
    if correction is None or not f.objective["corrected"]:
        return
    if (correction.level, correction.metric, correction.agg) == ("sequence", "ratio", "sum"):
        yield f.warn(
            "actor.rejection_sampling.agg",
            "the product of token ratios shrinks with length (0.06 at 8k tokens), so long completions are dropped",
            "set actor.rejection_sampling.agg: mean",
        )
    longest = f.config.gconfig.max_new_tokens
    if correction.agg == "product" and longest > LONG_PRODUCT:
        yield f.warn(
            "actor.rejection_sampling.agg",
            f"the weight of a sequence is the product of its token ratios, of up to {longest:,} tokens: with length it "
            "goes to 0 or to its upper bound, so that few sequences carry the gradient",
            "set actor.rejection_sampling.agg: mean, or preset tis",
        )
    if correction.agg == "product" and correction.upper is None:
        yield f.error(
            "actor.rejection_sampling.upper",
            "a product of token ratios without an upper bound has no finite variance",
            "set actor.rejection_sampling.upper, for example 2.0",
        )


@rule
def routes_without_a_proximal_pass(f: Facts) -> Iterator[Finding]:
    proximal = f.objective["proximal"]
    if f.actor.routing_replay == "proximal" and proximal not in ("auto", "recompute"):
        yield f.error(
            "actor.routing_replay",
            f"proximal replays the expert routes of the trainer's π_old forward pass, but prox_logp_method {proximal} "
            "has no such pass",
            "set actor.prox_logp_method: recompute, or actor.routing_replay: rollout",
        )


@rule
def routes_of_an_external_sampler(f: Facts) -> Iterator[Finding]:
    if f.actor.routing_replay != "rollout" or not f.engine.no_routes:
        return
    why = by_name(f.engine.no_routes)(flags_of(f.config), f.num_gpus)
    if not why:
        return
    yield f.error(
        "actor.routing_replay",
        f"rollout replays the sampler's expert routes, but {why}",
        "set rollout.backend: local:dN (gspo's own servers), or actor.routing_replay: proximal",
    )

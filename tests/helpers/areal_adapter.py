"""A pytest plugin: AReaL's tests of its loss call our functions. Arguments are checked, and statistics that gspo does
not have are computed, by AReaL's own functions; losses, masks and weights are ours."""

import torch
from their_code import imported

from gspo import objectives
from gspo.objectives import correction, surrogate
from gspo.objectives.aggregate import at_tokens, keep_trained, token_layout

_, theirs = imported(
    "areal",
    "areal.api.cli_args",
    "areal.utils.functional",
    empty=("areal.utils.logging", "areal.infra", "areal.experimental", "areal.engine"),
)
_THEIRS = {name: getattr(theirs, name) for name in ("apply_rejection_sampling", "ppo_actor_loss_fn", "sapo_loss_fn")}


def _form(config):
    names = ("level", "action", "metric", "agg", "upper", "lower")
    return correction.canonical({name: getattr(config, name) for name in names})


def _layout(like, mask, cu_seqlens):
    # AReaL takes packed tokens without offsets where it needs no sequences.
    if like.ndim == 1 and cu_seqlens is None:
        cu_seqlens = torch.tensor([0, len(like)])
    return token_layout(like, mask, cu_seqlens)


def apply_rejection_sampling(proximal_logprobs, old_logprobs, loss_mask, cu_seqlens, config):
    result = _THEIRS["apply_rejection_sampling"](proximal_logprobs, old_logprobs, loss_mask, cu_seqlens, config)
    layout, form = _layout(proximal_logprobs, loss_mask, cu_seqlens), _form(config)
    shape = (layout.num_sequences,) if form["level"] == "sequence" else layout.shape
    weights = correction.weights(proximal_logprobs.float(), old_logprobs.float(), torch.zeros(shape), layout, form)
    if not correction.by_token(form):
        weights = correction.to_tokens(weights, layout)
    if config.action == "mask":
        result.loss_mask = (loss_mask.bool() & ~weights.outside).to(loss_mask.dtype)
    result.behave_imp_weight = torch.where(result.loss_mask.bool(), weights.weight, 0.0)
    return result


def _loss(name, stat, logprobs, proximal, advantages, mask, level, cu, **settings):
    layout = _layout(logprobs, mask, cu)
    settings |= {"level": level, "aggregation": "token_mean", "cu_seqlens": layout.cu_seqlens}
    out = objectives.loss(name, logprobs, proximal, advantages, mask, **settings)
    log_ratio = surrogate.token_log_ratio(logprobs.detach(), proximal, layout)
    if level == "sequence":
        log_ratio = at_tokens(out.stats["log_s"], layout)
    return out.loss, stat | {"importance_weight": keep_trained(log_ratio.exp(), layout)}


def ppo_actor_loss_fn(logprobs, proximal_logprobs, old_logprobs, advantages, eps_clip, loss_mask, **more):
    _, stat = _THEIRS["ppo_actor_loss_fn"](
        logprobs=logprobs, proximal_logprobs=proximal_logprobs, old_logprobs=old_logprobs, advantages=advantages,
        eps_clip=eps_clip, loss_mask=loss_mask, **more,
    )  # fmt: skip
    limits = more.get("rejection_sampling")
    return _loss(
        "grpo", stat, logprobs, proximal_logprobs, advantages, loss_mask,
        more.get("importance_sampling_level", "token"), more.get("cu_seqlens"),
        clip_low=eps_clip, clip_high=more.get("eps_clip_higher") or eps_clip, dual_clip=more.get("c_clip"),
        behavior_logp=old_logprobs, correction=None if limits is None else _form(limits),
    )  # fmt: skip


def sapo_loss_fn(logprobs, old_logprobs, advantages, tau_pos, tau_neg, loss_mask, **more):
    _, stat = _THEIRS["sapo_loss_fn"](
        logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, tau_pos=tau_pos, tau_neg=tau_neg,
        loss_mask=loss_mask, **more,
    )  # fmt: skip
    level = more.get("importance_sampling_level", "token")
    return _loss(
        "sapo", stat, logprobs, old_logprobs, advantages, loss_mask, level, more.get("cu_seqlens"),
        tau_pos=tau_pos, tau_neg=tau_neg,
    )  # fmt: skip


for _name in _THEIRS:
    setattr(theirs, _name, globals()[_name])

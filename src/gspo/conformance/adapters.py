"""From a function of anybody to an `Implementation`: its parameters are recognised by the names that trainers use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from gspo.conformance.suite import Batch, Implementation, NotOfferedError
from gspo.errors import ConfigError
from gspo.system import find_function

# Names of inputs and settings in trainers: the first is ours. A function may use any of them, by keyword.
NAMES: Mapping[str, tuple[str, ...]] = {
    "logp": ("log_prob", "log_probs", "logprobs", "logps", "per_token_logps", "curr_logprobs", "new_logp", "new"),
    "proximal_logp": (
        *("old_log_prob", "old_log_probs", "old_logprobs", "old_logps", "old_per_token_logps", "prev_logprobs"),
        *("proximal_logprobs", "old_logp", "old"),
    ),
    "advantage": ("advantages", "adv"),
    "mask": ("response_mask", "loss_mask", "action_mask", "completion_mask", "attention_mask", "token_mask"),
    "clip_low": ("eps_clip", "epsilon_low", "clip_ratio_low", "eps_clip_low", "clip_eps_low", "epsilon", "eps_low"),
    "clip_high": ("eps_clip_higher", "eps_clip_high", "epsilon_high", "clip_ratio_high", "clip_eps_high", "eps_high"),
    "behavior_logp": ("rollout_log_probs", "rollout_logprobs", "sampling_per_token_logps", "behavior_logprobs"),
    "reference_logp": ("ref_log_prob", "ref_log_probs", "ref_logp", "ref_per_token_logps", "reference_logprobs", "ref"),
    "kl_coef": ("beta", "kl_loss_coef"),
    "kl_estimator": ("kl_type", "kl_loss_type"),
    "cu_seqlens": (),
    "turn": ("turns", "turn_ids"),
    "num_sequences": ("global_batch_size", "batch_num_sequences"),
    "num_tokens": ("num_items_in_batch", "batch_num_tokens"),
    "num_parts": ("gradient_accumulation_steps", "current_gradient_accumulation_steps"),
    "objective": (),
    "max_new_tokens": ("max_completion_length",),
    "weight_max": (),
    "tau_pos": ("sapo_temperature_pos",),
    "tau_neg": ("sapo_temperature_neg",),
    "log_clip_low": (),
    "log_clip_high": (),
}
MEANING = {name: ours for ours, others in NAMES.items() for name in (ours, *others)}
CONFIG = ("config", "cfg", "args")  # a parameter of one of these names gets all settings as attributes
# Cases with these need a parameter for them.
NEEDED = ("cu_seqlens", "turn", "behavior_logp", "reference_logp")


def implementation(name: str, advantage: str | None = None, logp: str | None = None, **options: Any) -> Implementation:
    """The functions that `module:function` or `file.py:function` name; options as those of `adapted`."""
    try:
        others = {"advantage": advantage and find_function(advantage), "logp": logp and find_function(logp)}
        return adapted(find_function(name), name=name, **others, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def adapted(
    function: Callable[..., Any],
    *,
    name: str = "",
    objective: str = "gspo",
    advantage_per: str | None = None,
    advantage: Callable[..., Any] | None = None,
    logp: Callable[..., Any] | None = None,
) -> Implementation:
    """A function that is called with the parameters that it names; ValueError if one of them is unknown.

    advantage_per: `token` [B, T] or `sequence` [B]; default: per token if the mask is called response_mask, action_mask
    or loss_mask, as in verl, OpenRLHF, SkyRL and AReaL, else per sequence, as in TRL.
    """
    name = name or getattr(function, "__name__", type(function).__name__)
    asked = parameters(function, name)
    if advantage_per is None:
        advantage_per = "token" if {"response_mask", "action_mask", "loss_mask"} & asked.keys() else "sequence"
    chosen = {meaning for meaning in asked.values() if meaning}
    # A function with **settings gets those of a case by our names.
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())

    def call(batch: Batch) -> Any:
        given = values(batch, advantage_per)
        for need in NEEDED:
            if given[need] is not None and need not in chosen:
                raise NotOfferedError(f"it has no parameter for {need} ({', '.join((need, *NAMES[need]))})")
        if batch.settings.get("kl_coef") and "kl_coef" not in chosen and not takes_any:
            raise NotOfferedError(f"it has no parameter for kl_coef ({', '.join(NAMES['kl_coef'])})")
        if batch.settings.get("kl_estimator", "k3") != "k3" and "kl_estimator" not in chosen and not takes_any:
            raise NotOfferedError("it has no parameter for the KL estimator, so it is tested with k3 only")
        every = {word: given.get(ours) for word, ours in MEANING.items()}
        arguments = {word: given.get(ours) if ours else SimpleNamespace(**every) for word, ours in asked.items()}
        if takes_any:
            arguments |= {ours: value for ours, value in batch.settings.items() if ours not in chosen}
        if batch.num_parts == 1 or chosen & {"num_sequences", "num_tokens"}:
            return result(function(**arguments))
        is_even = batch.num_sequences == batch.num_parts * len(batch.logp) and batch.objective not in TOKEN_MEANS
        if not is_even:
            raise NotOfferedError("it has no parameter for the denominator (num_sequences, num_tokens) of an update")
        # Trainers average the losses of equal micro-batches.
        loss, metric = result(function(**arguments))
        return (loss if "num_parts" in chosen else loss / batch.num_parts), metric

    every = {objective, *FAMILY} if "objective" in chosen else {objective}
    return Implementation(name, call, frozenset(every), advantage, logp)


TOKEN_MEANS = ("ppo", "dapo", "cispo", "decoupled_ppo")
FAMILY = ("gspo", "gspo_token", "grpo", "dapo", "dr_grpo", "cispo", "sapo", "gmpo", "luspo", "ppo")


def parameters(function: Callable[..., Any], name: str) -> dict[str, str]:
    """The parameters to pass, and what each means ("" for a config object); ConfigError for one that is required."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: its parameters cannot be read ({error}); wrap it in a Python function") from None
    asked = {}
    for p in found:
        if p.name in MEANING or p.name in CONFIG:
            asked[p.name] = MEANING.get(p.name, "")
        elif p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            known = "; ".join(f"{ours}: {', '.join(others)}" for ours, others in NAMES.items() if others)
            raise ConfigError(
                f"{name} has the parameter {p.name!r} without a default, and its meaning is not known. Give it a "
                f"default, or write a function around it with parameters of these names. {known}"
            )
    if missing := {"logp", "proximal_logp", "advantage"} - set(asked.values()):
        words = "; ".join(f"{ours} ({', '.join(NAMES[ours])})" for ours in sorted(missing))
        raise ConfigError(f"{name} has no parameter for {words}; name it so, or write a function around it")
    return asked


def values(batch: Batch, advantage_per: str) -> dict[str, Any]:
    """What a batch gives for each of our names."""
    given = {**vars(batch), **batch.settings}
    if batch.cu_seqlens is None:
        given["advantage"] = batch.token_advantage if advantage_per == "token" else batch.advantage
    elif advantage_per == "token" and batch.advantage.shape != batch.logp.shape:
        given["advantage"] = batch.advantage.repeat_interleave(batch.cu_seqlens.diff())
    return given


def result(found: Any) -> tuple[Any, float | None]:
    """(loss, clip fraction or None) from a tensor, a tuple that begins with it, or an object with `.loss`."""
    if isinstance(found, tuple) and found and isinstance(found[0], Tensor):
        return found[0], next((x for x in map(clip_fraction, found[1:]) if x is not None), None)
    loss = getattr(found, "loss", None)
    return loss if isinstance(loss, Tensor) else found, None


def clip_fraction(metrics: Any) -> float | None:
    """The entry of a dict of metrics that is called clip… and means both sides."""
    if not isinstance(metrics, Mapping):
        return None
    for name, x in metrics.items():
        word = str(name).lower()
        is_number = isinstance(x, int | float) or (isinstance(x, Tensor) and x.numel() == 1)
        if "clip" in word and is_number and not any(side in word for side in ("low", "high", "upper", "dual")):
            return float(x)
    return None

"""Lint rules for the objective: advantages, batches, ratio and clip, π_old, reference and critic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from gspo.config import Norm, RewardNorm, algorithm_in, flags_of, layout_of
from gspo.lint.facts import Facts, Finding, error, rule, warning
from gspo.system import by_name, number


@rule
def kl_without_reference(f: Facts) -> Iterator[Finding]:
    for key, coefficient in (("actor.kl_loss_coef", f.actor.kl_loss_coef), ("actor.kl_ctl", f.actor.kl_ctl)):
        if coefficient > 0 and f.config.ref is None:
            yield f.error(
                key,
                f"a KL coefficient of {number(coefficient)} needs a reference policy, but ref is null",
                f"add a ref section (ref.path={f.actor.path}), or set {key}: 0",
            )


@warning("actor.kl_ctl", "set one of actor.kl_ctl and actor.kl_loss_coef to 0")
def kl_counted_twice(f: Facts) -> str | None:
    if f.actor.kl_loss_coef > 0 and f.actor.kl_ctl > 0:
        return "the KL to the reference counts twice: in the reward and in the loss"


@warning(
    "actor.kl_estimator",
    "set actor.kl_estimator: k3 (the default in the loss) or k2, or use actor.kl_ctl, where k1 is correct",
)
def k1_in_the_loss(f: Facts) -> str | None:
    if f.actor.kl_loss_coef > 0 and f.actor.kl_estimator == "k1":
        return "the gradient of k1 in the loss is 0 on average, so it does not keep the policy near the reference"


@warning(
    "actor.kl_ctl", "set algorithm: gspo_token, which keeps per-token advantages, or use actor.kl_loss_coef instead"
)
def kl_reward_averaged_over_a_sequence(f: Facts) -> str | None:
    if f.objective["level"] == "sequence" and f.actor.kl_ctl > 0:
        return "a KL penalty in the reward differs from token to token, but one ratio per sequence uses its mean"


@error("algorithm", "set teacher.path to a model with the policy's vocabulary, or choose algorithm: gspo")
def distillation_without_a_teacher(f: Facts) -> str | None:
    if f.objective["advantage"] == "teacher" and not (f.config.teacher and f.config.teacher.path):
        return "distill needs a teacher, but teacher.path is not set"


@error("teacher", "choose algorithm: distill, or remove the teacher section")
def teacher_without_distillation(f: Facts) -> str | None:
    if f.objective["advantage"] != "teacher" and f.config.teacher is not None:
        return f"{f.objective['name']} does not use a teacher"


@error("teacher.exact_kl", "remove teacher.exact_kl, or set actor.backend: fsdp:d1")
def exact_kl_on_several_ranks(f: Facts) -> str | None:
    teacher = f.config.teacher
    if teacher is not None and teacher.exact_kl is not None and layout_of(f.config, f.num_gpus).ranks > 1:
        return "the exact KL needs the whole heads of both models in one rank, and several ranks train"


@rule
def server_as_teacher(f: Facts) -> Iterator[Finding]:
    """A server scores tokens at temperature 1, over the whole vocabulary."""
    teacher, generation = f.config.teacher, f.config.gconfig
    if teacher is None or not teacher.is_server:
        return
    if teacher.exact_kl is not None:
        yield f.error(
            "teacher.exact_kl",
            f"the exact KL needs the teacher's weights in the trainer, and {teacher.path} is a server",
            "remove teacher.exact_kl, or set teacher.path to a model",
        )
    if generation.temperature != 1 or f.truncations:
        key = "temperature" if generation.temperature != 1 else f.truncations[0]
        yield f.error(
            f"gconfig.{key}",
            f"a teacher on a server scores tokens at temperature 1 over the whole vocabulary, but gconfig.{key} is "
            f"{number(getattr(generation, key))}",
            f"remove gconfig.{key}, or set teacher.path to a model, which is loaded in the trainer",
        )


@rule
def gae_without_critic(f: Facts) -> Iterator[Finding]:
    if f.objective["advantage"] == "gae" and f.config.critic is None:
        yield f.error(
            "algorithm",
            f"{f.objective['name']} computes advantages from a value model, but critic is null",
            "add critic: {} (on the command line: 'critic={}'), which brings critic.path (default: actor.path), "
            "critic.optimizer.lr (default: 1e-5) and critic.value_eps_clip, or choose algorithm: gspo",
        )


@warning("critic", "remove the critic section, or choose algorithm: ppo")
def critic_without_gae(f: Facts) -> str | None:
    if f.objective["advantage"] != "gae" and f.config.critic is not None:
        return f"{f.objective['name']} computes advantages from the group, so the critic is never used"


@rule
def undividable_batch(f: Facts) -> Iterator[Finding]:
    total, group = f.num_sequences, f.config.gconfig.n_samples
    parts = f.num_minibatches
    if total % parts == 0:
        return
    divisors = _around([n for n in range(1, min(total, 4096) + 1) if total % n == 0], parts)
    unit = parts // math.gcd(group, parts)
    prompts = [n for n in (f.num_prompts // unit * unit, (f.num_prompts // unit + 1) * unit) if n > 0]
    yield f.error(
        "actor.ppo_n_minibatches",
        f"{f.num_prompts:,} prompts × {group:,} samples = {total:,} sequences cannot be divided into {parts:,} "
        "mini-batches of equal size; sequences are not split",
        f"set actor.ppo_n_minibatches: {_either(divisors)}, or train_dataset.batch_size: {_either(prompts)}",
    )


def _around(choices: list[int], target: int) -> list[int]:
    """The nearest choice below the target and the nearest above it."""
    below, above = [n for n in choices if n < target], [n for n in choices if n > target]
    return ([below[-1]] if below else []) + ([above[0]] if above else [])


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)


@rule
def micro_batch_below_a_sequence(f: Facts) -> Iterator[Finding]:
    longest, limit = f.longest, f.actor.mb_spec.max_tokens_per_mb
    if longest is not None and longest > limit:
        yield f.warn(
            "actor.mb_spec.max_tokens_per_mb",
            f"{limit:,} is less than the longest sequence ({longest:,} tokens); such a sequence becomes a micro-batch "
            "of its own that exceeds the memory limit",
            f"set actor.mb_spec.max_tokens_per_mb: {longest} or more, or lower gconfig.max_new_tokens",
        )


GROUP_ADVANTAGES = frozenset({"group_std", "group_mean", "leave_one_out"})


def _uses_groups(norm: Norm | RewardNorm | None) -> bool:
    return norm is not None and bool({"group", "leave1out"} & {norm.mean_level, norm.std_level})


def _by_group(f: Facts) -> bool:
    chosen = f.objective["advantage"]
    return chosen in GROUP_ADVANTAGES or (chosen != "gae" and _uses_groups(f.actor.reward_norm))


@error("gconfig.n_samples", "set gconfig.n_samples: 8 (or more), or choose algorithm: reinforce_pp or ppo")
def group_of_one(f: Facts) -> str | None:
    if f.config.gconfig.n_samples == 1 and _by_group(f):
        return f"the {f.objective['advantage']} advantage of a group of one sample is always 0"


@rule
def every_group_rejected(f: Facts) -> Iterator[Finding]:
    fate = f.actor.zero_variance_groups
    if f.objective["advantage"] in ("gae", "batch") and f.config.gconfig.n_samples == 1 and fate in ("drop", "refill"):
        yield f.error(
            "actor.zero_variance_groups",
            f"{fate} rejects groups of equal rewards, and a group of one sample always has equal rewards",
            "set actor.zero_variance_groups: count, or gconfig.n_samples: 2 or more",
        )


@warning("actor.reward_norm", "remove actor.reward_norm, or choose the algorithm with this advantage")
def norm_replaces_the_advantage(f: Facts) -> str | None:
    chosen, own = f.objective["advantage"], algorithm_in(f.config).advantage
    if f.actor.reward_norm is not None and f.loaded.is_set("algorithm") and own != "gae" and chosen != own:
        return f"replaces the advantage of {f.objective['name']} ({own}) by {chosen}"


@warning("actor.adv_norm", "remove actor.adv_norm, or set its levels to batch")
def normalised_twice(f: Facts) -> str | None:
    if _by_group(f) and _uses_groups(f.actor.adv_norm):
        return "the advantages are already normalised within their group; actor.adv_norm does it a second time"


@rule
def overlong_tail_too_long(f: Facts) -> Iterator[Finding]:
    tail, longest = f.actor.overlong_tokens, f.config.gconfig.max_new_tokens
    if f.actor.overlong_reward_penalty and tail is not None and tail > longest:
        yield f.error(
            "actor.overlong_tokens",
            f"the penalised tail of {tail:,} tokens is longer than the longest completion ({longest:,})",
            f"set actor.overlong_tokens: {max(1, longest // 5)}",
        )


@error("actor.mask_no_eos_with_zero", "set gconfig.ignore_eos: false, or actor.mask_no_eos_with_zero: false")
def every_completion_masked(f: Facts) -> str | None:
    if f.actor.mask_no_eos_with_zero and f.config.gconfig.ignore_eos and not f.config.gconfig.stop:
        return "with gconfig.ignore_eos every completion is truncated, so every advantage would be 0"


WIDE_EPS = 0.05  # the geometric mean of a completion almost never moves this far from 1; twice as far if it is brief
FEW_TOKENS, BRIEF_TOKENS = 8, 32
NARROW_EPS = 0.02  # with token ratios it clips tokens in a quarter of the sequences (docs/baselines.md#clipping)
SHORT_TOKENS, LONG_EPS = 64, 5e-4  # the paper's 3e-4 / 4e-4 is for completions of thousands of tokens
FLOAT32_EPS = 1e-5  # float32 rounding alone moves log s by about 1e-6


@error("algorithm", "correct the path")
def objective_without_file(f: Facts) -> str | None:
    file = str(f.config.algorithm).rpartition(":")[0]
    if f.objective["of_user"] and file.endswith(".py") and not Path(file).is_file():
        return f"there is no file {file} (looked in {Path.cwd()})"


@error("actor.eps_clip", "remove actor.eps_clip")
def auto_without_clipping(f: Facts) -> str | None:
    if f.actor.eps_clip == "auto" and not f.objective["eps_auto"]:
        return f"auto adjusts a clip range, but {f.objective['name']} does not clip"


@error("actor.eps_clip", "set actor.importance_sampling_level: sequence, or set actor.eps_clip to a number such as 0.2")
def auto_per_token(f: Facts) -> str | None:
    if f.objective["eps_auto"] and not f.sequence_level:
        return "auto follows the quantiles of the sequence ratio, but this objective has one ratio per token"


@error("actor.eps_clip", "set actor.eps_clip below 1 (and actor.eps_clip_higher for the upper bound)")
def lower_bound_at_zero(f: Facts) -> str | None:
    if f.clips is not None and f.clips[0] >= 1:
        low = f.clips[0]
        return (
            f"ε = {number(low)} gives the lower bound 1 − ε = {1 - low:g}; a ratio of probabilities is always above 0, "
            "so it never reaches this bound"
        )


@rule
def too_wide_for_a_sequence(f: Facts) -> Iterator[Finding]:
    if f.clips is None or not f.sequence_level:
        return
    longest = f.config.gconfig.max_new_tokens
    sides = zip(("actor.eps_clip", "actor.eps_clip_higher"), f.clips, strict=True)
    wide = [(key, eps) for key, eps in sides if eps >= WIDE_EPS * (2 if longest <= BRIEF_TOKENS else 1)]
    if wide and longest > FEW_TOKENS:
        values = " and ".join(number(eps) for eps in dict.fromkeys(eps for _, eps in wide))
        yield f.warn(
            wide[0][0],
            f"ε = {values} is a clip range for token ratios; the sequence ratio is a mean over up to {longest:,} "
            "tokens and does not move that far from 1, so nothing is ever clipped",
            f"set actor.eps_clip: auto, which clips 5 % of the sequences, or {f.usual_eps}",
        )


@rule
def too_narrow_for_a_token(f: Facts) -> Iterator[Finding]:
    if f.clips is None or f.sequence_level or f.num_updates == 1:
        return
    sides = zip(("actor.eps_clip", "actor.eps_clip_higher"), f.clips, strict=True)
    narrow = {key: eps for key, eps in sides if eps < NARROW_EPS and f.loaded.is_set(key)}
    if narrow:
        values = " and ".join(number(eps) for eps in dict.fromkeys(narrow.values()))
        unset = " ".join(f"'~{key}'" for key in narrow)
        yield f.warn(
            next(iter(narrow)),
            f"ε = {values} is a clip range for sequence ratios; {f.objective['name']} has one ratio per token, which "
            "moves much farther from 1, so most sequences may have clipped tokens",
            f"remove {' and '.join(narrow)} for the usual 0.2 (on a command line: {unset})",
        )


@rule
def too_narrow_for_short_completions(f: Facts) -> Iterator[Finding]:
    longest = f.config.gconfig.max_new_tokens
    is_short = longest <= SHORT_TOKENS and not f.config.env.path and not f.config.env.agent
    if f.clips is None or not f.sequence_level or f.num_updates == 1 or not is_short:
        return
    if FLOAT32_EPS <= max(f.clips) <= LONG_EPS:
        yield f.warn(
            "actor.eps_clip",
            f"ε = {number(f.clips[0])} is for completions of thousands of tokens; the ratio of a completion of at most "
            f"{longest} tokens moves farther from 1, so most sequences may be clipped",
            f"set actor.eps_clip: auto, or {f.usual_eps}",
        )


@rule
def too_narrow_for_the_dtype(f: Facts) -> Iterator[Finding]:
    if f.clips is None or not f.sequence_level or f.dtype == "float64":
        return
    low, high = f.clips
    if min(low, high) < FLOAT32_EPS:
        yield f.warn(
            "actor.eps_clip" if low < FLOAT32_EPS else "actor.eps_clip_higher",
            f"ε = {number(min(low, high))} is close to the rounding error of {f.dtype} log-probs, so rounding decides "
            "which sequences are clipped",
            "set ε to 1e-4 or more, or set actor.dtype: float64",
        )


@warning("actor.ppo_n_minibatches", "set actor.ppo_n_minibatches: 4, as in the paper")
def ratio_always_one(f: Facts) -> str | None:
    from_trainer = f.objective["proximal"] in ("auto", "recompute")
    if f.num_updates > 1 or not from_trainer or f.objective["of_user"]:
        return None
    rest = (
        "only the π_old/μ weight has an effect" if f.objective["corrected"] else "GSPO, GSPO-token and GRPO are equal"
    )
    auto = ", and eps_clip: auto has no ratios to follow" if f.objective["eps_auto"] else ""
    return (
        "with one update per rollout batch and π_old from the trainer every ratio is exactly 1: nothing is clipped, "
        f"{rest}{auto}"
    )


@warning("actor.loss_aggregation", "set actor.loss_aggregation: sequence_mean (the paper) or sequence_sum (LUSPO)")
def token_aggregation(f: Facts) -> str | None:
    chosen = f.objective["aggregation"]
    if f.sequence_level and chosen.startswith("token_") and not f.objective["of_user"]:
        return (
            f"{chosen} weights a completion by its length, but {f.objective['name']} uses sequence ratios; in the "
            "paper every completion has the same weight"
        )


LONG_PRODUCT = 1000  # tokens from which the product of token ratios is advised against
SAMPLER_NOISE = 2e-3  # published sampler-trainer KL per token: 6e-4 dense, 1.5e-3 MoE


@error("actor.use_decoupled_loss", "set actor.prox_logp_method: recompute, or actor.use_decoupled_loss: false")
def decoupled_without_effect(f: Facts) -> str | None:
    if f.actor.use_decoupled_loss and f.objective["proximal"] == "rollout":
        return "π_old is the sampler's policy μ (prox_logp_method rollout), so the weight π_old/μ is always 1"


@warning("rollout.max_head_offpolicyness", "set actor.use_decoupled_loss: true, which multiplies the loss by π_old/μ")
def staleness_without_correction(f: Facts) -> str | None:
    stale = f.max_staleness
    if stale > 0 and f.objective["proximal"] != "rollout" and not f.objective["corrected"]:
        return (
            f"samples may be {stale} weight versions old, and π_old comes from the trainer: the difference between "
            "sampler and trainer is neither corrected nor clipped"
        )


@warning(
    "actor.prox_logp_method",
    "set actor.use_decoupled_loss: true, which clips against the trainer's π_old and multiplies by π_old/μ",
)
def staleness_uses_up_the_clip_range(f: Facts) -> str | None:
    if f.max_staleness > 0 and f.objective["proximal"] == "rollout" and f.clips:
        return (
            f"the ratio compares with samplers up to {f.max_staleness} weight versions old, so the ratio can leave the "
            f"clip range (ε = {number(min(f.clips))}) before the first update"
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


@warning(
    "actor.prox_logp_method",
    "measure it with `gspo doctor --probe`; set actor.prox_logp_method: recompute, or an ε above the noise",
)
def noisy_sampler(f: Facts) -> str | None:
    if f.objective["proximal"] != "rollout" or not f.sequence_level or not f.external_sampler or not f.clips:
        return None
    if min(f.clips) < SAMPLER_NOISE:
        return (
            f"{f.external_sampler}'s log-probs differ from the trainer's by 6e-4 to 1.5e-3 per token (published "
            f"values), which is more than ε = {number(min(f.clips))}: sequences are clipped before any update"
        )


@warning(
    "actor.rejection_sampling.upper", "set actor.rejection_sampling.upper, for example 2.0, or a preset such as tis"
)
def correction_without_bounds(f: Facts) -> str | None:
    correction = f.actor.rejection_sampling
    if correction is None or not f.objective["corrected"]:
        return None
    if correction.upper is None and correction.lower is None:
        return "a correction without bounds drops nothing and truncates nothing"


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


@error("actor.routing_replay", "set actor.prox_logp_method: recompute, or actor.routing_replay: rollout")
def routes_without_a_proximal_pass(f: Facts) -> str | None:
    proximal = f.objective["proximal"]
    if f.actor.routing_replay == "proximal" and proximal not in ("auto", "recompute"):
        return (
            f"proximal replays the expert routes of the trainer's π_old forward pass, but prox_logp_method {proximal} "
            "has no such pass"
        )


@error("actor.routing_replay", "set rollout.backend: local:dN (gspo's own servers), or actor.routing_replay: proximal")
def routes_of_an_external_sampler(f: Facts) -> str | None:
    if f.actor.routing_replay != "rollout" or not f.engine.no_routes:
        return None
    why = by_name(f.engine.no_routes)(flags_of(f.config), f.num_gpus)
    if not why:
        return None
    return f"rollout replays the sampler's expert routes, but {why}"

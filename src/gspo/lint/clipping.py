"""Lint rules for the ratio, its clip range and the aggregation of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gspo.lint.facts import Facts, Finding, rule
from gspo.system.text import number

WIDE_EPS = 0.05  # the geometric mean of a completion almost never moves this far from 1; twice as far if it is brief
FEW_TOKENS, BRIEF_TOKENS = 8, 32
NARROW_EPS = 0.02  # with token ratios it clips tokens in a quarter of the sequences (docs/baselines.md#clipping)
SHORT_TOKENS, LONG_EPS = 64, 5e-4  # the paper's 3e-4 / 4e-4 is for completions of thousands of tokens
FLOAT32_EPS = 1e-5  # float32 rounding alone moves log s by about 1e-6


@rule
def objective_without_file(f: Facts) -> Iterator[Finding]:
    file = str(f.config.algorithm).rpartition(":")[0]
    if f.objective["of_user"] and file.endswith(".py") and not Path(file).is_file():
        yield f.error("algorithm", f"there is no file {file} (looked in {Path.cwd()})", "correct the path")


@rule
def auto_without_clipping(f: Facts) -> Iterator[Finding]:
    if f.actor.eps_clip == "auto" and not f.objective["eps_auto"]:
        yield f.error(
            "actor.eps_clip",
            f"auto adjusts a clip range, but {f.objective['name']} does not clip",
            "remove actor.eps_clip",
        )


@rule
def auto_per_token(f: Facts) -> Iterator[Finding]:
    if f.objective["eps_auto"] and not f.sequence_level:
        yield f.error(
            "actor.eps_clip",
            "auto follows the quantiles of the sequence ratio, but this objective has one ratio per token",
            "set actor.importance_sampling_level: sequence, or set actor.eps_clip to a number such as 0.2",
        )


@rule
def lower_bound_at_zero(f: Facts) -> Iterator[Finding]:
    if f.clips is not None and f.clips[0] >= 1:
        low = f.clips[0]
        yield f.error(
            "actor.eps_clip",
            f"ε = {number(low)} gives the lower bound 1 − ε = {1 - low:g}; a ratio of probabilities is always above 0, "
            "so it never reaches this bound",
            "set actor.eps_clip below 1 (and actor.eps_clip_higher for the upper bound)",
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


@rule
def ratio_always_one(f: Facts) -> Iterator[Finding]:
    from_trainer = f.objective["proximal"] in ("auto", "recompute")
    if f.num_updates > 1 or not from_trainer or f.objective["of_user"]:
        return
    rest = (
        "only the π_old/μ weight has an effect" if f.objective["corrected"] else "GSPO, GSPO-token and GRPO are equal"
    )
    auto = ", and eps_clip: auto has no ratios to follow" if f.objective["eps_auto"] else ""
    yield f.warn(
        "actor.ppo_n_minibatches",
        "with one update per rollout batch and π_old from the trainer every ratio is exactly 1: nothing is clipped, "
        f"{rest}{auto}",
        "set actor.ppo_n_minibatches: 4, as in the paper",
    )


@rule
def token_aggregation(f: Facts) -> Iterator[Finding]:
    chosen = f.objective["aggregation"]
    if f.sequence_level and chosen.startswith("token_") and not f.objective["of_user"]:
        yield f.warn(
            "actor.loss_aggregation",
            f"{chosen} weights a completion by its length, but {f.objective['name']} uses sequence ratios; in the "
            "paper every completion has the same weight",
            "set actor.loss_aggregation: sequence_mean (the paper) or sequence_sum (LUSPO)",
        )

"""The cases of the conformance suite: their inputs, and what the papers say about them.

`python -m lab.conformance.make` computes the answers with the loops of `gspo.conformance.paper` and writes the files.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GSPO = "arXiv 2507.18071"
SMALL = {"clip_low": 3e-4, "clip_high": 4e-4}  # §5.1 of the paper
WIDE = {"clip_low": 0.2, "clip_high": 0.27}  # the scale of PPO and GRPO; §5.1 names it for the GRPO baseline

LENGTHS = (9, 4, 7, 1, 6, 3)
ADVANTAGES = (1.2, -0.7, 0.4, -1.5, 0.9, -0.3)
# log s_i: sequences 0 and 1 are clipped, 3 and 4 are outside the band on the side where the minimum does not clip.
LOG_S = (6e-4, -5e-4, 2e-4, 8e-4, -7e-4, 1e-4)
LOG_S_WIDE = (0.4, -0.5, 0.1, 0.6, -0.45, -0.1)


@dataclass
class Case:
    name: str
    claim: str  # what is tested
    source: str  # which sentence or equation of which paper
    meaning: str  # of a difference, for a run
    bites: str  # when
    batch: Mapping[str, Any]
    decided: bool = True  # by the source; else it leaves the answer open
    objective: str = "gspo"
    settings: Mapping[str, Any] = field(default_factory=lambda: SMALL)
    kind: str = "loss"  # or split, packed, advantage, logp
    dtype: str = "float32"
    parts: Sequence[tuple[int, int]] = ()  # rows of the micro-batches, kind split
    # Known answers beside the first one: name → how it differs. See `make.answers`.
    others: Mapping[str, Any] = field(default_factory=dict)
    first: str = "paper"  # the name of the first answer; of an open case, ours


def batch(
    lengths: Sequence[int] = LENGTHS,
    advantages: Sequence[Any] = ADVANTAGES,
    log_s: Sequence[float] = LOG_S,
    *,
    noise: float = 0.05,
    width: int | None = None,
    holes: Mapping[int, Sequence[int]] | None = None,
    padding: tuple[float, float] = (-1.0, -1.0),
    seed: int = 0,
) -> dict[str, Any]:
    """A padded batch whose sequence ratios are exp(log_s); `holes` are masked places (row → columns) among the tokens.

    A row has its number of trained tokens and its holes; the places after them are padding.
    """
    draws, holes = random.Random(seed), holes or {}
    width = width or max(n + len(holes.get(i, ())) for i, n in enumerate(lengths))
    rows: dict[str, list[list[float]]] = {"logp": [], "proximal_logp": [], "mask": []}
    for i, (num_tokens, mean) in enumerate(zip(lengths, log_s, strict=True)):
        moves = [noise * (2 * draws.random() - 1) for _ in range(num_tokens)]
        centre = sum(moves) / num_tokens if num_tokens else 0.0
        logp = [-0.1 - 2.9 * draws.random() for _ in range(num_tokens)]
        old = [new - (mean + move - centre) for new, move in zip(logp, moves, strict=True)]
        places = [t for t in range(width) if t not in holes.get(i, ())][:num_tokens]
        for name, values, blank in (("logp", logp, padding[0]), ("proximal_logp", old, padding[1])):
            row = [blank] * width
            for place, value in zip(places, values, strict=True):
                row[place] = value
            rows[name].append(row)
        rows["mask"].append([float(t in places) for t in range(width)])
    return {**rows, "advantage": list(advantages)}


def per_token(given: dict[str, Any], change: Callable[[float, int], float]) -> dict[str, Any]:
    """The same batch with an advantage per token, from that of the sequence and the token's place."""
    width = len(given["logp"][0])
    rows = [[change(a, t) for t in range(width)] for a in given["advantage"]]
    return {**given, "advantage": rows}


def beside(given: dict[str, Any], name: str, spread: float) -> dict[str, Any]:
    """The same batch with the log-probs of a third policy, near π_old."""
    draws = random.Random(len(name))
    rows = [[x + spread * (2 * draws.random() - 1) for x in row] for row in given["proximal_logp"]]
    return {**given, name: rows}


def sequence_cases() -> list[Case]:
    """GSPO on ordinary input."""
    eq5 = f"{GSPO}, eq. 5 and 7"
    return [
        Case(
            "clean",
            "the loss, its gradient and the clipped sequences of six answers of 1 to 9 tokens",
            eq5,
            "another objective is optimised under the name GSPO",
            "in every update with more than one mini-batch or with stale samples",
            batch(),
        ),
        Case(
            "square",
            "as many sequences as tokens per row: no shape error would show a wrong broadcast",
            eq5,
            "advantages or ratios of one sequence are applied to tokens of another one",
            "when the number of sequences equals the padded length",
            batch((6, 4, 5, 1, 6, 3), width=6, seed=1),
        ),
        Case(
            "one_token",
            "|y| = 1: the sequence ratio is the token ratio, and GSPO is PPO-clip",
            f"{GSPO}, eq. 7 with |y_i| = 1",
            "short answers get another weight",
            "for tasks with answers of one token (multiple choice)",
            batch((1,) * 6, noise=0.0, seed=2),
        ),
        Case(
            "ragged",
            "lengths from 1 to 4096: each sequence has the same weight, and 1/|y| is exact for long ones",
            f"{GSPO}, eq. 5 (1/G before the sum over i) and eq. 7 (the root |y_i|)",
            "long or short answers dominate the gradient",
            "whenever lengths differ; it shows as a drift of the answer length",
            batch((1, 4096, 37, 2, 600, 5), seed=3),
        ),
        Case(
            "tool_masked",
            "spans inside an answer that the policy did not generate are masked: not in |y|, not in the ratio",
            f"{GSPO}, eq. 7: y_i is what π_old generates",
            "text of tools moves the ratio and the clip decision, and weakens the gradient by a too large |y|",
            "with tools, environments and multi-turn episodes",
            batch(holes={0: (2, 3, 4), 2: (0, 1), 4: (3, 4, 5, 6)}, padding=(-1.5, -1.2), seed=4),
        ),
        Case(
            "padding_garbage",
            "finite, unequal log-probs at padded places change nothing",
            f"{GSPO}, eq. 7: the sum is over t = 1 … |y_i|",
            "padding enters the ratio, so the loss depends on which answers share a batch",
            "if padded places have log-probs other than 0, as most forward passes give",
            batch(padding=(-7.0, -0.5), width=12, seed=5),
        ),
        Case(
            "epsilon_wide",
            "the clip range 0.2/0.27, with ratios from 0.6 to 1.8",
            eq5,
            "the clip range that the user sets is not the one that is used",
            "with any ε other than a built-in one",
            batch(log_s=LOG_S_WIDE, noise=0.3, seed=6),
            settings=WIDE,
        ),
        Case(
            "epsilon_asymmetric",
            "log s = ±3.5e-4 between ε_low = 3e-4 and ε_high = 4e-4, for both signs of A",
            eq5,
            "ε_low and ε_high are exchanged, or one of them is used for both sides",
            "with ε_low ≠ ε_high, the setting of the paper",
            batch(log_s=(3.5e-4, -3.5e-4, -3.5e-4, 3.5e-4, 4.6e-4, -2.4e-4), seed=7),
        ),
        Case(
            "advantage_zero",
            "A = 0: no loss, no gradient, not counted as clipped",
            eq5,
            "groups of equal rewards have a gradient, or enter the clip fraction",
            "in every batch with a solved or a failed prompt",
            batch(advantages=(0.0, -0.7, 0.0, 0.0, 0.9, 0.0), log_s=(0.01, -5e-4, 0.3, -0.01, 1e-4, 0.0), seed=8),
        ),
        Case(
            "float64",
            "the clean case with float64 inputs, to ten digits",
            eq5,
            "the loss rounds to float32 or less on the way",
            "in tests of mathematics; float32 is enough for training",
            batch(seed=9),
            dtype="float64",
        ),
        Case(
            "token_advantages",
            "GSPO-token with an advantage per token",
            f"{GSPO}, eq. 13–14",
            "per-token credit is averaged, or the gradient of a token is that of its sequence",
            "with per-token or per-turn advantages",
            per_token(batch(seed=10), lambda a, t: a * (1 + 0.3 * (t % 3)) - 0.1 * t),
            objective="gspo_token",
        ),
        Case(
            "token_equal",
            "GSPO-token with one advantage per sequence equals GSPO in value, clipping and gradient",
            f"{GSPO}, §4.3: both are numerically identical if all tokens of y_i have the same advantage",
            "the two forms are not interchangeable, as the paper says they are",
            "if GSPO is implemented as GSPO-token, as several trainers do",
            per_token(batch(seed=11), lambda a, t: a),
            objective="gspo_token",
        ),
    ]


def edge_cases() -> list[Case]:
    """Rows without tokens, log-probs that are not finite, ratios at the end of the number range, data types."""
    empty = (9, 4, 0, 1, 6, 3)
    late = {"advantages": ADVANTAGES, "noise": 0.0}
    return [
        Case(
            "empty_row",
            "one of six sequences has no trained token (a masked overlong answer)",
            f"{GSPO}: an answer without tokens does not occur",
            "the other sequences weigh 6/5 as much: the step size changes with the number of masked answers",
            "with masking of overlong or failed answers",
            batch(empty, log_s=(6e-4, -5e-4, 0.0, 8e-4, -7e-4, 1e-4), seed=12),
            decided=False,
            first="counts",
            others={"left out": {"rows": (0, 1, 3, 4, 5)}},
        ),
        Case(
            "padding_inf",
            "−inf at padded places, in both log-probs",
            f"{GSPO}, eq. 7 has no padded places; their values are a matter of the implementation",
            "the loss is NaN, because 0 · (−inf − −inf) is NaN",
            "if log-probs come from a sampler or from a top-k or top-p mask",
            batch(padding=(-math.inf, -math.inf), width=12, seed=13),
            decided=False,
            first="ignored",
            others={"not finite": None},
        ),
        Case(
            "padding_nan",
            "NaN at padded places",
            f"{GSPO}, eq. 7 has no padded places; their values are a matter of the implementation",
            "the loss is NaN, because 0 · NaN is NaN",
            "if padded rows pass through kernels that leave them undefined",
            batch(padding=(math.nan, math.nan), width=12, seed=14),
            decided=False,
            first="ignored",
            others={"not finite": None},
        ),
        Case(
            "trained_nan",
            "NaN at a trained token: the loss is NaN or an error, never a plausible number",
            f"{GSPO} does not say",
            "a broken forward pass is trained on without a sign of it",
            "after a numerical fault in a kernel or a server",
            {**(broken := batch(seed=15)), "logp": [[math.nan, *broken["logp"][0][1:]], *broken["logp"][1:]]},
            decided=False,
            first="not finite",
        ),
        Case(
            "extreme_clipped",
            "log s = ±200 on the clipped side: the value is the bound, the gradient 0, although e^200 overflows",
            f"{GSPO}, eq. 5",
            "the gradient is NaN (0 · inf), and with it all weights",
            "after a collapse of one token's probability, or with wrong old log-probs",
            batch(log_s=(200.0, -200.0, 2e-4, -200.0, 150.0, 1e-4), seed=16, **late),
        ),
        Case(
            "extreme_zero",
            "A = 0 and log s = 120: the term is 0, although e^120 overflows float32 on the way",
            f"{GSPO}, eq. 5",
            "the loss is NaN (0 · inf), and after the step all weights",
            "after a collapse, or with wrong old log-probs",
            batch(advantages=(0.0, -0.7, 0.0, 0.0, 0.9, 0.0), log_s=(120.0, -5e-4, 0.0, 0.0, 1e-4, 0.0), seed=30),
        ),
        Case(
            "extreme_unclipped",
            "on the side without a clip: log s = 8 with A < 0 and log s = −200 with A > 0",
            f"{GSPO}, eq. 5: the minimum does not bound s A from below",
            "another objective for sequences that became much more likely although they are bad",
            "far from the old policy; rare while ratios are near 1",
            batch(log_s=(-200.0, 8.0, 2e-4, 3.0, -30.0, 1e-4), seed=17, **late),
        ),
        Case(
            "extreme_overflow",
            "log s = 200 with A < 0: e^200 is not a float32 number",
            f"{GSPO}, eq. 5 gives e^200; the paper does not say what to do beyond the number range",
            "not finite: all weights are NaN after the step; a bound: a large value with gradient 0",
            "after a collapse, or with wrong old log-probs",
            batch(log_s=(6e-4, 200.0, 2e-4, 8e-4, -7e-4, 1e-4), seed=18, **late),
            decided=False,
            first="bound e^20",
            others={"bound e^10": {}, "not finite": None},
        ),
        Case(
            "float16",
            "float16 log-probs with a clip range of 0.2/0.27, within the error of the type",
            f"{GSPO}, eq. 5; the type of the numbers is open, a clip of the right sequences is not",
            "rounding exceeds what the type demands",
            "if log-probs are kept in float16",
            batch(log_s=LOG_S_WIDE, noise=0.3, seed=19),
            settings=WIDE,
            dtype="float16",
        ),
        Case(
            "bfloat16",
            "the same in bfloat16",
            f"{GSPO}, eq. 5; the type of the numbers is open, a clip of the right sequences is not",
            "rounding exceeds what the type demands",
            "if log-probs are kept in bfloat16",
            batch(log_s=LOG_S_WIDE, noise=0.3, seed=20),
            settings=WIDE,
            dtype="bfloat16",
        ),
        Case(
            "bfloat16_token",
            "GSPO-token in bfloat16: log s must not be added to a log-prob of −15 before it is subtracted again",
            f"{GSPO}, eq. 14",
            "(sg(log s) + log π) − sg(log π) rounds log s to steps of 0.06",
            "in bfloat16 with unlikely tokens; in float32 the steps are 1e-6",
            per_token(
                {
                    **(low := batch(log_s=LOG_S_WIDE, noise=0.3, seed=21)),
                    "logp": [[x - 13 for x in row] for row in low["logp"]],
                    "proximal_logp": [[x - 13 for x in row] for row in low["proximal_logp"]],
                },
                lambda a, t: a,
            ),
            objective="gspo_token",
            settings=WIDE,
            dtype="bfloat16",
        ),
        Case(
            "bfloat16_narrow",
            "bfloat16 log-probs with the paper's ε of 3e-4/4e-4",
            f"{GSPO} names no data type; 1 ± 3e-4 and exp(3e-4) are 1 in bfloat16",
            "no sequence is ever clipped, or the clip decides by rounding errors",
            "if the loss is computed in the type of the log-probs",
            batch((9, 4, 7, 1, 6, 3), log_s=(0.006, -0.006, 0.003, 0.012, -0.006, 0.012), noise=0.01, seed=22),
            decided=False,
            first="in float32",
            others={"never clips": {"settings": {"clip_low": 1.0, "clip_high": 1e9}}},
            dtype="bfloat16",
        ),
    ]


def batch_cases() -> list[Case]:
    """Micro-batches, packing, KL, turns."""
    mean = f"{GSPO}, eq. 5: one factor 1/G for the whole group"
    turns = beside(batch((9, 4, 7, 3, 6, 3), seed=29), "turn", 0.0)
    turns["turn"] = [[float(t >= 3) + float(t >= 5) for t in range(9)] for _ in range(6)]
    found = [
        Case(
            "split_even",
            "two micro-batches of three sequences sum to the loss and the gradient of the whole",
            mean,
            "the micro-batch size, or the number of ranks, changes the result",
            "with gradient accumulation or several ranks",
            batch(seed=23),
            kind="split",
            parts=((0, 3), (3, 6)),
        ),
        Case(
            "split_uneven",
            "two micro-batches of four and two sequences, with one denominator",
            mean,
            "sequences of a small micro-batch weigh more",
            "with dynamic micro-batches, or a last one that is not full",
            batch(seed=24),
            kind="split",
            parts=((0, 4), (4, 6)),
        ),
        Case(
            "split_empty",
            "two micro-batches, one of which has a sequence without trained tokens",
            f"{GSPO}: an answer without tokens does not occur",
            "if the result is neither of the two, it depends on which sequences share a micro-batch",
            "with gradient accumulation and masking of overlong answers",
            batch((9, 4, 0, 1, 6, 3), log_s=(6e-4, -5e-4, 0.0, 8e-4, -7e-4, 1e-4), seed=25),
            kind="split",
            parts=((0, 3), (3, 6)),
            decided=False,
            first="counts",
            others={"left out": {"rows": (0, 1, 3, 4, 5)}},
        ),
        Case(
            "packed",
            "sequences in one row with cu_seqlens equal padded rows",
            f"{GSPO}, eq. 7: the ratio is that of one y_i",
            "the ratio is computed over a whole row, or leaks across borders of sequences",
            "with packing (padding-free, varlen)",
            batch(seed=26),
            kind="packed",
        ),
        Case(
            "turns",
            "an episode of several turns with the ratio, the clip and the share of the tokens per turn",
            f"{GSPO} has one turn; a ratio for the whole episode is as possible",
            "the clip acts on episodes where turns were meant, or the reverse",
            "in multi-turn training",
            turns,
            objective="gspo_turns",
            decided=False,
            first="per turn",
            others={"per episode": {"objective": "gspo"}},
        ),
    ]
    for estimator in ("k1", "k2", "k3"):
        found.append(
            Case(
                f"kl_{estimator}",
                f"GSPO plus 0.05 times the {estimator} estimate of KL(π_θ ‖ π_ref), token mean in each sequence",
                f"{GSPO} leaves the KL out; GRPO (arXiv 2402.03300, eq. 3–4) differentiates k3",
                "another penalty, or its gradient is lost where the policy loss is clipped",
                "with a KL coefficient above 0",
                beside(batch(seed=27), "reference_logp", 0.2),
                settings={**SMALL, "kl_coef": 0.05, "kl_estimator": estimator},
                decided=False,
                first="estimate",
                others={"estimate and sampling": {"settings": {"kl_sampled": True}}},
            )
        )
    return found


def family_cases() -> list[Case]:
    """The other objectives of the family, and what is computed before the loss."""
    wide = {"log_s": LOG_S_WIDE, "noise": 0.3}
    rows = [
        ("ppo", "arXiv 1707.06347, eq. 7; the mean over tokens", WIDE, True),
        ("grpo", "arXiv 2402.03300, eq. 3, without its KL", WIDE, False),
        ("dr_grpo", "arXiv 2503.20783, §3: a constant in place of |o_i|", {**WIDE, "max_new_tokens": 16}, False),
        ("dapo", "arXiv 2503.14476, eq. 8", WIDE, False),
        ("cispo", "arXiv 2506.13585, eq. 4", {"weight_max": 1.3}, False),
        ("sapo", "arXiv 2511.20347", {"tau_pos": 1.0, "tau_neg": 1.05}, False),
        ("gmpo", "arXiv 2507.20673, eq. 3", {"log_clip_low": 0.4, "log_clip_high": 0.4}, False),
        ("luspo", "arXiv 2602.05261: |y_i| times the term of GSPO", WIDE, False),
        ("decoupled_ppo", "decoupled PPO, arXiv 2505.24298: the weight π_prox/π_behav", WIDE, True),
    ]
    found = []
    for seed, (name, source, settings, is_per_token) in enumerate(rows, 40):
        given = batch(seed=seed, **wide)
        if is_per_token:
            given = per_token(given, lambda a, t: a - 0.15 * t)
        if name == "decoupled_ppo":
            given = beside(given, "behavior_logp", 0.3)
        found.append(
            Case(
                name,
                f"{name} on the same kind of batch",
                source,
                "another objective than the one that is named",
                "in every update",
                given,
                objective=name,
                settings=settings,
            )
        )
    found.append(
        Case(
            "dapo_split",
            "two micro-batches with different numbers of tokens: a mean over all tokens of the update",
            "arXiv 2503.14476, eq. 8: one denominator Σ|o_i| for the group",
            "tokens of a micro-batch with short answers weigh more",
            "with gradient accumulation or several ranks",
            batch(seed=52, **wide),
            objective="dapo",
            settings=WIDE,
            kind="split",
            parts=((0, 3), (3, 6)),
        )
    )
    return found + input_cases()


def input_cases() -> list[Case]:
    """Advantages from rewards, log-probs from logits."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5, 0.25, 0.25, 1.0, 0.0]
    groups = [7, 7, 7, 7, 2, 2, 2, 9, 9]
    last = 2.0**-25  # the last bit of a float32 number between 1/4 and 1/2
    equal = [0.3 + last, 0.3, 0.3, 1 / 3, 1 / 3 + last, 1 / 3, 0.0, 0.0]
    logits = [[math.sin(1.7 * t + 0.9 * v * v) * 3 for v in range(11)] for t in range(5)]
    return [
        Case(
            "advantage_groups",
            "groups of four, three and two, given by id",
            f"{GSPO}, eq. 6; std with or without Bessel's correction is open",
            "groups mix, or the scale of all advantages differs by sqrt(G/(G − 1))",
            "with uneven groups; the scale with small groups",
            {"rewards": rewards, "groups": groups},
            kind="advantage",
            decided=False,
            first="unbiased std",
            others={"biased std": {"ddof": 0}},
        ),
        Case(
            "advantage_equal",
            "groups whose rewards are equal, or differ in the last bit only",
            f"{GSPO}, eq. 6 is 0/0 there",
            "noise of the last bit is scaled up to ±1, or a constant 1e-6 hides it only partly",
            "with rewards that are weighted sums, in float32",
            {"rewards": equal, "groups": [0, 0, 0, 1, 1, 1, 2, 2]},
            kind="advantage",
            decided=False,
            first="zero",
        ),
        Case(
            "temperature",
            "log-probs at the temperature of sampling, 0.7",
            f"{GSPO}, eq. 7: π_θ and π_old are the policies that sample",
            "ratios compare distributions that nobody sampled from",
            "at every temperature other than 1",
            {"logits": logits, "tokens": [3, 0, 10, 7, 1], "temperature": 0.7},
            kind="logp",
        ),
    ]


def cases() -> list[Case]:
    return [*sequence_cases(), *edge_cases(), *batch_cases(), *family_cases()]

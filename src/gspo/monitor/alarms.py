"""Checks of every step's metrics that warn if training does not work as intended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from gspo.stats import COLLAPSE

# Steps in a row before a check warns. It warns again after 2, 4, 8, … times as many.
PATIENCE = 20


REPLACED_SETTINGS = (
    "note: the agent sets temperature, top_p, top_k or min_p, and the run's values are used instead (gconfig.*): the "
    "trainer needs one known distribution; agent/settings_replaced counts these requests"
)


def first_step_message(metrics: Mapping[str, Any]) -> str | None:
    """What to say at once if no group of the first batch has different rewards: the likely cause, by evidence."""
    if metrics.get("step") != 1 or metrics.get("reward/zero_variance_groups") != 1.0:
        return None
    mean, is_equal = metrics.get("reward/mean"), metrics.get("reward/std") == 0.0
    nothing = "nothing was learnt from the first batch, because the samples of every prompt earn the same"
    if metrics.get("length/truncated") == 1.0:
        why = "every completion was truncated; set gconfig.max_new_tokens higher, or train the model to end its answers"
    elif is_equal and mean == 0.0 and metrics.get("reward/part_format") == 0.0:
        why = "no completion has the wanted format (reward/part_format is 0); show it in the prompt, or train it first"
    elif is_equal and mean == 0.0:
        why = (
            "every reward of the first batch is 0: the reward does not match the completions, or the problems are too "
            "hard (`gspo preview` shows completions and rewards, `gspo doctor --reward` checks the reward)"
        )
    elif is_equal and mean is not None and mean >= 1.0:
        why = "every completion is correct: the problems are too easy for this model"
    else:
        why = "prompts are either too easy or too hard; set gconfig.n_samples or gconfig.temperature higher"
    return f"{nothing}: {why}"


def alarms(
    metrics: Mapping[str, Any],
    counts: dict[str, int],
    *,
    clips: bool,
    num_updates: int,
    own_forward: bool,
    noise_is_forced: bool = False,
    by_sequence: bool = True,
    history: Callable[[], Sequence[Mapping[str, Any]]] = list,
) -> Iterator[str]:
    """Warnings of this step. `counts` (steps in a row, by alarm) belongs to the caller and is in the checkpoint.

    own_forward: π_old of mini-batch 1 is its own detached forward pass, so its ratios must be 1.
    noise_is_forced: the user has allowed a π_old that is noisier than the clip range.
    by_sequence: one ratio per sequence. With one per token, a few clipped tokens in every sequence are usual, and
    `actor.eps_clip: auto` is an error.
    history: reads the metrics of all steps; called only if a warning needs them.
    """
    if (at_clip := metrics.get("reward/at_clip") or 0.0) > 0.01:
        counts["rewards clipped"] = counts.get("rewards clipped", 0) + 1
        # bit_count() == 1 is true for powers of two: the warning is repeated after 1, 2, 4, 8, … steps.
        if counts["rewards clipped"].bit_count() == 1:  # at once: no other metric shows it
            yield (
                f"{at_clip:.0%} of the rewards are at or beyond actor.reward_clip and look equal to the trainer; set "
                "actor.reward_clip higher or actor.reward_scaling lower"
            )
    if own_forward and (worst := metrics.get("ratio/first_minibatch_max_abs")) is not None and worst > 1e-6:
        yield f"mini-batch 1 has a ratio other than 1 (|log s| up to {worst:.2e}): π_old is not its own forward pass"
    lasting = _lasting_conditions(metrics, clips, num_updates, noise_is_forced, by_sequence)
    for name, (holds, message) in lasting.items():
        # Warn after PATIENCE, 2·PATIENCE, 4·PATIENCE, … steps in a row.
        counts[name] = counts.get(name, 0) + 1 if holds else 0
        if (
            holds
            and counts[name] >= PATIENCE
            and (counts[name] // PATIENCE).bit_count() == 1
            and not counts[name] % PATIENCE
        ):
            fall = _fall(history(), counts[name]) if name == "nothing to learn" else None
            yield fall or message.format(n=counts[name])


def _fall(rows: Sequence[Mapping[str, Any]], num: int) -> str | None:
    """What to say if the reward was higher before the last `num` steps; None: it was not."""
    seen = [row for row in rows if row["step"] > 0 and row.get("reward/mean") is not None]
    before, since = [row["reward/mean"] for row in seen[:-num]], seen[-num:]
    # The median, because single steps of a task that is too hard earn something by luck.
    if not before or median(before) <= 0 or since[-1]["reward/mean"] >= COLLAPSE * median(before):
        return None
    first = since[0]
    return (
        f"the reward fell from {max(before):.3g} to {first['reward/mean']:.3g} at step {first['step']}, and every "
        f"group has had equal rewards for {num} steps; likely the update was too large: the learning rate is "
        f"{first['optimizer/lr']:g}; set actor.optimizer.lr lower and start a new run"
    )


def _lasting_conditions(
    metrics: Mapping[str, Any], clips: bool, num_updates: int, noise_is_forced: bool, by_sequence: bool
) -> dict[str, tuple[bool, str]]:
    """By alarm: whether its condition holds in this step, and the warning after {n} such steps in a row."""
    clipped = (metrics.get("clip/sequences_low") or 0.0) + (metrics.get("clip/sequences_high") or 0.0)
    seen = metrics.get("ratio/log_s_std") is not None
    age = metrics.get("staleness/max") or 0
    entropy = metrics.get("policy/entropy")  # 0.0 is a value, so no `or` here
    noise = (metrics.get("noise/log_s_p95_abs") or 0.0) if metrics.get("policy/proximal") == "rollout" else 0.0
    whole, auto = ("sequence", ", or actor.eps_clip=auto") if by_sequence else ("token", "")
    many = clipped if by_sequence else metrics.get("clip/tokens") or 0.0
    # Without a clip range ε is infinite, and no noise is above it.
    eps = min(metrics.get("clip/eps_low") or math.inf, metrics.get("clip/eps_high") or math.inf)
    return {
        "noise above the clip range": (
            noise > eps and not noise_is_forced,
            "the sampler's log-probs are used as π_old, and their noise was above the clip range for {n} steps "
            f"(noise/log_s_p95_abs); set actor.prox_logp_method=recompute or actor.eps_clip higher{auto}",
        ),
        "nothing clipped": (
            clips and num_updates > 1 and seen and clipped == 0 and metrics.get("clip/sequences_low") is not None,
            f"no {whole} was clipped" + " for {n} steps: the clip range is wider than the policy's drift; "
            f"set actor.eps_clip lower{auto}",
        ),
        "most clipped": (
            clips and many > 0.5,
            f"more than half of the {whole}s were clipped"
            + " for {n} steps: "
            + (
                f"the ratio compares with weights up to {age} versions old, so it is not 1 before any update; set "
                "actor.use_decoupled_loss=true, which clips against the trainer's own π_old and weights by π_old/μ"
                if age and metrics.get("policy/proximal") == "rollout"
                else f"set actor.eps_clip higher or actor.optimizer.lr lower{auto}"
            ),
        ),
        "ratio stuck at 1": (
            num_updates > 1 and seen and metrics.get("ratio/log_s_max_abs") == 0.0,
            "every ratio was exactly 1 for {n} steps: π_old is the policy that is being trained, or no weight "
            "changes (learning rate 0?)",
        ),
        "nothing to learn": (
            metrics.get("reward/zero_variance_groups") == 1.0,
            "every group had equal rewards for {n} steps: the task is too hard, too easy, or the reward is broken; "
            "check samples/ and gconfig.n_samples",
        ),
        "entropy collapsed": (
            entropy is not None and entropy < 1e-3,
            "the policy's entropy has been below 0.001 for {n} steps: it no longer explores; set "
            "gconfig.temperature higher, or stop earlier",
        ),
    }

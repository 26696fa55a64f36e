"""Findings: told in time, with the cause that the metrics support, and never of a healthy run.

docs/results/studies holds reward, held-out score and entropy of 1,285 runs: the thresholds are tested on them.
"""

import json
import math
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from gspo.diagnosis import MOST_CLIPPED, PATIENCE, TOTAL, Diagnosis, findings

HEALTHY = {
    "reward/mean": 0.5,
    "reward/std": 0.5,
    "clip/eps_low": 2e-3,
    "clip/eps_high": 2.5e-3,
    "clip/sequences_low": 0.1,
    "clip/sequences_high": 0.1,
    "ratio/log_s_mean": 1e-3,
    "ratio/log_s_std": 0.01,
    "ratio/log_s_max_abs": 0.1,
    "ratio/first_minibatch_max_abs": 0.0,
    "reward/zero_variance_groups": 0.25,
    "policy/entropy": 0.5,
    "optimizer/lr": 5e-3,
}
LASTING = {
    "no sequence was clipped": ({"clip/sequences_low": 0.0, "clip/sequences_high": 0.0}, PATIENCE),
    "more than half": ({"clip/sequences_low": 0.3, "clip/sequences_high": 0.3}, MOST_CLIPPED),
    "every ratio was exactly 1": ({"ratio/log_s_max_abs": 0.0}, PATIENCE),
    "too easy or too hard": ({"reward/zero_variance_groups": 1.0}, PATIENCE),
    "every reward was 0": ({"reward/zero_variance_groups": 1.0, "reward/mean": 0.0, "reward/std": 0.0}, TOTAL),
    "the full reward": ({"reward/zero_variance_groups": 1.0, "reward/mean": 1.0, "reward/std": 0.0}, PATIENCE),
    "entropy": ({"policy/entropy": 0.0}, PATIENCE),
}


def told(rows, start=2, **settings):
    """(step, text) of each finding. Rows start at step 2: the first batch has checks of its own."""
    diagnosis = Diagnosis(**({"groups": 32, "num_updates": 4, "by_sequence": True} | settings))
    return [(f.step, f.text) for s, row in enumerate(rows, start) for f in diagnosis.see({"step": s} | row)]


@pytest.mark.parametrize("words", LASTING)
def test_a_lasting_condition_is_told_after_its_patience_and_then_at_powers_of_two(words):
    sick, patience = LASTING[words]
    found = told([HEALTHY | sick] * (9 * patience), start=2)
    assert [step - 1 for step, _ in found] == [patience, 2 * patience, 4 * patience, 8 * patience]
    assert all(words in text and f"{step - 1} steps" in text for step, text in found)


@pytest.mark.parametrize("words", LASTING)
def test_one_healthy_step_starts_the_count_again(words):
    sick, patience = LASTING[words]
    assert not [
        text for _, text in told([*[HEALTHY | sick] * (patience - 1), HEALTHY, HEALTHY | sick]) if words in text
    ]


def test_a_healthy_run_is_silent():
    assert not told([HEALTHY] * (3 * PATIENCE))


def test_checks_that_cannot_apply_are_silent():
    """No clip range, one mini-batch, or a step in which nothing entered the model."""
    still = HEALTHY | LASTING["no sequence was clipped"][0] | LASTING["every ratio was exactly 1"][0]
    without = still | {"clip/eps_low": None, "clip/eps_high": None}
    for row, settings in ((dict.fromkeys(HEALTHY), {}), (without, {"num_updates": 1}), ({}, {})):
        assert not told([row] * PATIENCE, **settings)


def test_with_token_ratios_tokens_are_counted_and_auto_is_not_advised():
    """A clipped token in most sequences is usual, and `actor.eps_clip: auto` is an error."""
    for metrics, words in (
        (LASTING["more than half"][0] | {"clip/tokens": 0.04}, None),
        (LASTING["more than half"][0] | {"clip/tokens": 0.6}, "more than half of the tokens were clipped for"),
        (LASTING["no sequence was clipped"][0] | {"clip/tokens": 0.0}, "no token was clipped for"),
    ):
        found = told([HEALTHY | metrics] * PATIENCE, by_sequence=False)
        assert bool(found) == bool(words)
        assert all(words in text and "auto" not in text for _, text in found)


def test_a_run_that_is_stale_and_mostly_clipped_is_advised_to_decouple():
    stale = HEALTHY | LASTING["more than half"][0] | {"staleness/max": 4, "policy/proximal": "rollout"}
    for row, key in ((stale, "actor.use_decoupled_loss=true"), (stale | {"staleness/max": 0}, "actor.eps_clip")):
        assert [key in text for _, text in told([row] * MOST_CLIPPED)] == [True]


def test_rewards_beyond_the_clip_are_told_at_once_and_then_at_powers_of_two():
    found = told([HEALTHY | {"reward/at_clip": 0.4}] * 19, start=1)
    assert [step for step, _ in found] == [1, 2, 4, 8, 16]
    assert all("40% of the rewards" in text and "actor.reward_clip" in text for _, text in found)


def test_a_first_mini_batch_with_another_ratio_is_told_unless_the_sampler_is_the_proximal_policy():
    odd = HEALTHY | {"ratio/first_minibatch_max_abs": 1e-3}
    assert "mini-batch 1 has a ratio other than 1" in told([odd])[0][1]
    assert not told([odd | {"policy/proximal": "rollout"}])


def test_noise_above_the_clip_range_is_told_where_the_sampler_is_the_proximal_policy_and_it_was_not_forced():
    noisy = HEALTHY | {"noise/log_s_p95_abs": 5e-3}
    for source, forced, is_told in (("rollout", False, True), ("rollout", True, False), ("recompute", False, False)):
        found = told([noisy | {"policy/proximal": source}] * PATIENCE, noise_is_forced=forced)
        assert ["above the clip range" in text for _, text in found] == [True] * is_told


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, "every reward of the first batch is 0"),
        ({"length/truncated": 1.0}, "every completion was truncated"),
        ({"reward/part_format": 0.0}, "no completion has the wanted format"),
        ({"reward/mean": 1.0}, "every completion is correct"),
        ({"reward/mean": 0.5, "reward/std": 0.5}, "either too easy or too hard"),
    ],
)
def test_a_first_batch_with_nothing_to_learn_is_told_at_once_with_the_cause(found, words):
    row = {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_variance_groups": 1.0} | found
    assert words in told([row], start=1)[0][1]
    assert not told([row], start=2)
    assert not told([row | {"reward/zero_variance_groups": 0.9}], start=1)


def test_the_first_batch_stops_a_run_only_where_held_out_problems_show_the_same():
    row = {"step": 1, "reward/mean": 0.0, "reward/std": 0.0, "reward/zero_variance_groups": 1.0}
    for held_out, stops in (({"eval/reward": 0.0}, True), ({"eval/reward": 0.2}, False), ({}, False)):
        diagnosis = Diagnosis(groups=8, num_updates=1, by_sequence=True)
        diagnosis.see({"step": 0} | held_out)
        assert [finding.stops for finding in diagnosis.see(row)] == [stops]


def rewards(*means, **others):
    return [HEALTHY | {"reward/mean": m, "reward/std": math.sqrt(max(m * (1 - m), 0.0))} | others for m in means]


def test_a_learning_rate_that_destroys_the_policy_is_named_at_the_step_that_did_it():
    """`gspo train quickstart actor.optimizer.lr=5e-3`, recorded: log s −1.6 in step 1, then no reward."""
    first = rewards(0.363, **{"ratio/log_s_mean": -1.62})
    dead = rewards(
        0.0, 0.0, 0.0, **{"ratio/log_s_mean": None, "length/truncated": 0.99, "reward/zero_variance_groups": 1.0}
    )
    (step, text), (fall, why), *rest = told([*first, *dead], start=1)
    assert (step, fall) == (1, 3)
    assert "log s = -1.6" in text
    assert "it is 0.005, try 0.0005" in text
    assert "the reward fell from 0.363 (step 1) to 0" in why
    assert "the updates of step 1" in why  # the cause, and not that completions are cut off now
    assert not rest  # equal rewards are a consequence


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (rewards(0.8, 0.8, 0.1, 0.1), "the metrics do not show why"),
        (rewards(0.8, 0.8) + rewards(0.0, 0.0, **{"length/truncated": 1.0}), "no longer ends its answers"),
        (rewards(0.8, 0.8) + rewards(0.1, 0.1, **{"policy/entropy": 1e-5}), "no longer explores"),
    ],
)
def test_the_cause_of_a_collapse_is_what_the_metrics_show(rows, words):
    ((step, text),) = told(rows)
    assert (step, words in text) == (5, True)


@pytest.mark.parametrize(
    "rows",
    [
        rewards(0.8, 0.8, 0.1, 0.8, 0.8),  # one unlucky batch
        rewards(0.8, 0.7, 0.6, 0.5, 0.45),
        rewards(0.05, 0.05, 0.0, 0.0),  # a hard task: two batches without a success may be chance
        [HEALTHY | {"reward/mean": mean, "reward/std": 1.0} for mean in (-2.0, -1.0, -1.5, -1.5)],
        rewards(0.8, 0.8) + rewards(0.7, 0.7, **{"length/truncated": 1.0}),
    ],
)
def test_what_is_not_a_collapse_is_not_called_one(rows):
    assert not told(rows)


def test_old_samples_are_not_taken_for_a_large_update():
    far = HEALTHY | {"ratio/log_s_mean": -1.0}
    assert told([far])
    assert not told([far | {"staleness/max": 3}])
    assert not told([far | {"policy/proximal": "rollout"}])


def test_findings_of_a_directory_are_those_of_the_run():
    config = {"train_dataset": {"batch_size": 32}, "actor": {"ppo_n_minibatches": 4}}
    rows = [{"step": step} | row for step, row in enumerate(rewards(0.8, 0.8, 0.1, 0.1), 1)]
    assert [str(found) for found in findings(rows, config, True)] == [
        "warning at step 4: the reward fell from 0.8 (step 2) to 0.1: the metrics do not show why; read samples of "
        "these steps, and compare with a run at a lower actor.optimizer.lr (it is 0.005)"
    ]
    assert not findings(rows, {}, True)  # one group: any fall may be chance


@cache
def recorded():
    """(collapsed by a rule of its own, findings) of each recorded run. Rewards are 0 or 1 for most tasks."""
    outcomes = []
    for file in sorted((Path(__file__).parents[1] / "docs/results/studies").glob("*.json")):
        for record in json.loads(file.read_text())["records"]:
            if curves := record.get("curves"):
                outcomes.append(_outcome(record, curves, groups=4 if "smollm2" in file.stem else 8))
    return outcomes


def _outcome(record, curves, groups):
    scores, entropy = dict(curves["accuracy"]), dict(curves["entropy"])
    rows = [{"step": 0, "eval/reward": scores.get(0)}]
    for step, (x, mean) in enumerate(curves["reward"], 1):
        row = {"step": step, "reward/mean": mean, "reward/std": math.sqrt(max(mean * (1 - mean), 1e-4))}
        score = scores.get(x)
        half = 1.96 * math.sqrt(max((score or 0.0) * (1 - (score or 0.0)), 0.0) / 100)
        rows.append(row | {"policy/entropy": entropy.get(x), "eval/reward": score, "eval/reward_ci": half})
    config = {"train_dataset": {"batch_size": groups}, "actor": {"ppo_n_minibatches": 4}}
    held_out = list(scores.values())
    fell = any(score < 0.5 * max(held_out[:i]) for i, score in enumerate(held_out) if i)
    collapsed = bool(record["measures"].get("collapsed")) or fell
    return collapsed, {finding.name for finding in findings(rows, config, True)}


def test_collapse_is_found_in_recorded_runs_and_in_no_healthy_one():
    counts = Counter((collapsed, "collapse" in names) for collapsed, names in recorded())
    assert counts[False, False] > 1100
    assert counts[False, True] == 0
    assert counts[True, True] > 0.85 * (counts[True, True] + counts[True, False])


def test_a_run_that_recovered_is_judged_by_its_end_and_an_unknown_cause_names_no_key():
    from gspo.report import advise_on

    held_out = [{"step": 0, "eval/accuracy": 0.3, "eval/accuracy_ci": 0.05, "eval/reward": 0.3}]
    for end, words in ((0.9, "The run is done."), (0.05, "Read the samples")):
        rows = [*held_out, *({"step": s} | r for s, r in enumerate(rewards(0.8, 0.8, 0.1, 0.1, 0.1), 1))]
        rows[-1] |= {"eval/accuracy": end, "eval/accuracy_ci": 0.05, "eval/reward": end, "eval/problems": 512}
        said = advise_on(rows, {"train_dataset": {"batch_size": 32}}, by_sequence=True, done=True)
        assert said["text"].startswith(words)

import pytest

from gspo.monitor.metrics import PATIENCE, alarms, first_step_message

HEALTHY = {
    "clip/sequences_low": 0.1,
    "clip/sequences_high": 0.1,
    "ratio/log_s_std": 0.01,
    "ratio/log_s_max_abs": 0.1,
    "ratio/first_minibatch_max_abs": 0.0,
    "reward/zero_variance_groups": 0.25,
    "policy/entropy": 0.5,
}
SICK = {
    "no sequence was clipped": {"clip/sequences_low": 0.0, "clip/sequences_high": 0.0},
    "more than half": {"clip/sequences_low": 0.3, "clip/sequences_high": 0.3},
    "every ratio was exactly 1": {"ratio/log_s_max_abs": 0.0},
    "equal rewards": {"reward/zero_variance_groups": 1.0},
    "entropy": {"policy/entropy": 0.0},
}


def spoken(metrics, counts, **settings):
    return list(alarms(metrics, counts, **({"clips": True, "num_updates": 4, "own_forward": True} | settings)))


@pytest.mark.parametrize("message", SICK)
def test_an_alarm_speaks_after_patience_steps_and_then_at_powers_of_two(message):
    counts, when = {}, []
    for step in range(1, 9 * PATIENCE):
        said = spoken(HEALTHY | SICK[message], counts)
        assert all(message in line and f"{step} steps" in line for line in said)
        when += [step] * len(said)
    assert when == [PATIENCE, 2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE]


@pytest.mark.parametrize("message", SICK)
def test_one_healthy_step_starts_the_count_again(message):
    counts = {}
    for _ in range(PATIENCE - 1):
        assert not spoken(HEALTHY | SICK[message], counts)
    assert not spoken(HEALTHY, counts)
    assert not spoken(HEALTHY | SICK[message], counts)
    assert max(counts.values()) == 1


def test_a_healthy_run_is_silent():
    counts = {}
    for _ in range(3 * PATIENCE):
        assert not spoken(HEALTHY, counts)
    assert not any(counts.values())


def test_a_first_mini_batch_with_another_ratio_speaks_at_once_unless_the_sampler_is_the_proximal_policy():
    odd = HEALTHY | {"ratio/first_minibatch_max_abs": 1e-3}
    assert "mini-batch 1 has a ratio other than 1" in spoken(odd, {})[0]
    assert not spoken(odd, {}, own_forward=False)


def test_checks_that_cannot_apply_are_silent():
    """No clip range, one mini-batch, or a step in which nothing entered the model."""
    nothing = dict.fromkeys(HEALTHY)
    still = HEALTHY | SICK["no sequence was clipped"] | SICK["every ratio was exactly 1"]
    for metrics, settings in ((nothing, {}), (still, {"clips": False, "num_updates": 1}), ({}, {})):
        counts = {}
        for _ in range(PATIENCE):
            assert not spoken(metrics, counts, **settings)


def test_with_token_ratios_an_alarm_counts_tokens_and_does_not_advise_auto():
    """A clipped token in most sequences is usual, and `actor.eps_clip: auto` is an error."""
    for metrics, words in (
        (SICK["more than half"] | {"clip/tokens": 0.04}, None),
        (SICK["more than half"] | {"clip/tokens": 0.6}, "more than half of the tokens were clipped for"),
        (SICK["no sequence was clipped"] | {"clip/tokens": 0.0}, "no token was clipped for"),
    ):
        counts = {}
        for _ in range(PATIENCE):
            said = spoken(HEALTHY | metrics, counts, by_sequence=False)
        assert [words in line and "auto" not in line for line in said] == ([True] if words else [])


def test_counts_carry_over_a_checkpoint():
    counts = {}
    for _ in range(PATIENCE - 1):
        spoken(HEALTHY | SICK["entropy"], counts)
    assert spoken(HEALTHY | SICK["entropy"], dict(counts))


def test_rewards_beyond_the_clip_are_said_at_once_and_then_at_powers_of_two():
    counts, when = {}, []
    for step in range(1, 20):
        said = spoken(HEALTHY | {"reward/at_clip": 0.4}, counts)
        assert all("40% of the rewards" in line and "actor.reward_clip" in line for line in said)
        when += [step] * len(said)
    assert when == [1, 2, 4, 8, 16]
    assert not spoken(HEALTHY | {"reward/at_clip": 0.0}, counts)


def test_noise_above_the_clip_range_speaks_where_the_sampler_is_the_proximal_policy_and_nobody_forced_it():
    noisy = HEALTHY | {"noise/log_s_p95_abs": 2e-3}
    noisy |= {"clip/eps_low": 1e-3, "clip/eps_high": 1.5e-3}
    for source, forced, speaks in (
        ("rollout", False, True), ("rollout", True, False), ("recompute", False, False)
    ):  # fmt: skip
        counts = {}
        for _ in range(PATIENCE):
            said = spoken(noisy | {"policy/proximal": source}, counts, noise_is_forced=forced)
        assert [("above the clip range" in line) for line in said] == [True] * speaks


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
def test_a_first_batch_with_nothing_to_learn_is_said_at_once_with_the_cause(found, words):
    row = {"step": 1, "reward/mean": 0.0, "reward/std": 0.0, "reward/zero_variance_groups": 1.0} | found
    assert words in (first_step_message(row) or "")
    for other in ({"step": 2}, {"reward/zero_variance_groups": 0.9}):
        assert first_step_message(row | other) is None


def history(*rewards):
    return [{"step": s, "reward/mean": r, "optimizer/lr": 5e-3} for s, r in enumerate(rewards, 1)]


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ([0.37, *[0.0] * PATIENCE], "the reward fell from 0.37 to 0 at step 2"),
        ([0.2, 0.9, 0.6, *[0.1] * PATIENCE], "the reward fell from 0.9 to 0.1 at step 4"),
        ([0.0, 0.0, 0.01, 0.0, *[0.0] * PATIENCE], "the task is too hard"),  # one lucky sample is no fall
        ([0.0] * PATIENCE, "the task is too hard"),
        ([0.5, 0.9, *[1.0] * PATIENCE], "the task is too hard, too easy"),
        ([-2.0, -1.0, *[-3.0] * PATIENCE], "the task is too hard"),
    ],
)
def test_equal_rewards_after_a_fall_are_not_blamed_on_the_task(rewards, words):
    counts = {"nothing to learn": PATIENCE - 1}
    (said,) = spoken(HEALTHY | SICK["equal rewards"], counts, history=lambda: history(*rewards))
    assert words in said
    assert f"{PATIENCE} steps" in said
    assert ("actor.optimizer.lr lower" in said and "0.005" in said) == ("fell" in words)


def test_the_history_is_read_only_for_a_warning_that_needs_it():
    def unread():
        raise AssertionError

    for sick in ({}, SICK["entropy"], SICK["more than half"]):
        counts = {}
        for _ in range(PATIENCE):
            spoken(HEALTHY | sick, counts, history=unread)
        assert max(counts.values()) == PATIENCE * bool(sick)

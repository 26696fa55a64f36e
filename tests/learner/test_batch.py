from dataclasses import replace

import numpy as np
import pytest
from made_batches import FAILED, make_batch, make_group

from gspo.learner.credit import Credit, Shaping, is_flat, shape_scores, with_token_advantages
from gspo.types import Score

BATCH = {"mean_level": "batch", "std_level": "batch"}


def test_advantages_are_of_each_group_and_failed_rewards_leave_it():
    """Group 0: rewards 0, 1, 1 around 2/3 with unbiased std 1/√3; the failed fourth is nobody's peer."""
    batch = make_batch([make_group(0, [0, 1, FAILED, 1]), make_group(1, [5, 3])])
    third = 1 / np.sqrt(3)
    want = [-2 / 3 / third, 1 / 3 / third, 0.0, 1 / 3 / third, 1 / np.sqrt(2), -1 / np.sqrt(2)]
    np.testing.assert_allclose(batch.advantages, want, rtol=0, atol=1e-12)
    assert batch.scored.tolist() == [True, True, False, True, True, True]
    assert np.isnan(batch.rewards[2])
    assert not batch.in_denominator[2]
    assert not batch.has_gradient[2]


def test_a_group_of_equal_rewards_or_of_one_scored_sample_has_advantage_exactly_0():
    batch = make_batch([make_group(0, [0.1 + 0.2, 0.3, 0.3]), make_group(1, [FAILED, 7]), make_group(2, [FAILED] * 2)])
    assert (batch.advantages == 0).all()
    assert batch.in_denominator.tolist() == [True, True, True, False, True, False, False]
    assert not batch.has_gradient.any()


@pytest.mark.parametrize("norm", ["group_mean", "leave_one_out", BATCH])
def test_other_normalisations_leave_the_failed_out_too(norm):
    rewards = [4.0, 1.0, 1.0]
    batch = make_batch([make_group(0, [*rewards[:2], FAILED, rewards[2]])], norm=norm)
    mean, std = 2.0, np.sqrt(3.0)
    want = {"group_mean": [2, -1, -1], "leave_one_out": [3, -1.5, -1.5]}
    want = want[norm] if isinstance(norm, str) else [(r - mean) / std for r in rewards]
    np.testing.assert_allclose(batch.advantages[[0, 1, 3]], want, atol=1e-12)
    assert batch.advantages[2] == 0


def test_an_explicit_normalisation_is_used_as_given_and_adv_norm_comes_after_it():
    centred = {"mean_level": "group", "std_level": None, "leave_one_out": False}
    divided = {"mean_level": None, "std_level": "batch", "leave_one_out": False}
    batch = make_batch([make_group(0, [0, 2]), make_group(1, [10, 14])], norm=centred)
    batch = with_token_advantages(batch, Credit(adv_norm=divided))
    # centred: −1, 1, −2, 2, two tokens each: the std of the eight is √(20/7)
    np.testing.assert_allclose(batch.advantages, np.array([-1, 1, -2, 2]) / np.sqrt(20 / 7), atol=1e-12)


def test_shaping_is_penalty_then_bias_then_scaling_then_clip():
    """L = 10, tail 4: no penalty to length 6, all of it at 10."""
    how = Shaping(bias=0.5, scaling=4.0, clip=5.0, overlong_tokens=4, overlong_factor=2.0, max_new_tokens=10)
    scores, lengths = np.array([1.0, 1.0, 1.0, 1.0, 0.0, 9.0]), np.array([3, 6, 7, 10, 12, 1])
    # (1 + .5)·4 = 6 → 5;  same;  (1 − .5 + .5)·4 = 4;  (1 − 2 + .5)·4 = −2;  (0 − 2 + .5)·4 = −6 → −5;  → 5
    np.testing.assert_allclose(shape_scores(scores, lengths, how), [5, 5, 4, -2, -5, 5])
    np.testing.assert_allclose(shape_scores(scores, lengths, Shaping()), scores)


def test_the_overlong_penalty_counts_trained_tokens_and_decides_advantages():
    long = Shaping(overlong_tokens=4, max_new_tokens=8)
    group = make_group(0, [1, 1], [6, 8], holes={1: slice(0, 4)})
    batch = make_batch([group], shaping=long, norm="group_mean")
    np.testing.assert_allclose(batch.shaped, [0.5, 1.0])  # 6 of 8: half the tail; 4 trained of 8: none
    np.testing.assert_allclose(batch.advantages, [-0.25, 0.25])
    np.testing.assert_allclose(batch.rewards, [1, 1])  # as scored


@pytest.mark.parametrize("adv_norm", [None, BATCH])
def test_truncated_completions_get_advantage_0_whatever_is_normalised(adv_norm):
    groups = [make_group(0, [1, 0, 0]), make_group(1, [0, 1], finish="length")]
    batch = with_token_advantages(make_batch(groups), Credit(adv_norm=adv_norm, truncated_is_zero=True))
    assert (batch.advantages[3:] == 0).all()
    assert (batch.advantages[:3] != 0).all()
    assert batch.in_denominator.all()
    assert with_token_advantages(make_batch(groups), Credit(adv_norm=adv_norm)).advantages[3:].all()


def test_areals_truncated_completions_get_reward_0_before_the_normalisation():
    """Rewards 3 and 1 are centred to 1 and −1; the truncated −1 becomes 0; tokens 1, 1, 0, 0 have mean ½, std √⅓."""
    group = make_group(0, [3, 1])
    group = replace(group, samples=(group.samples[0], replace(group.samples[1], finish="length")))
    zeroed = make_batch([group], norm="group_mean", truncated_is_zero=True)
    assert zeroed.advantages.tolist() == [1, 0]
    batch = with_token_advantages(zeroed, Credit(adv_norm=BATCH))
    np.testing.assert_allclose(batch.advantages, np.array([0.5, -0.5]) * np.sqrt(3), atol=1e-12)


def test_counted_groups_stay_and_dropped_ones_leave_the_count():
    groups = [make_group(0, [1, 0]), make_group(1, [1, 1]), make_group(2, [FAILED, 1, 0])]
    assert make_batch(groups).in_denominator.tolist() == [True] * 4 + [False, True, True]
    without = [True, True, False, False, False, True, True]
    assert make_batch(groups, zero_variance="drop").in_denominator.tolist() == without
    for how in ("count", "drop"):
        assert make_batch(groups, zero_variance=how).has_gradient.tolist() == without


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [([1, 1, 1], True), ([1, 1 + 1e-9], True), ([1, 0], False), ([FAILED, 1], True), ([FAILED] * 2, True), ([3], True)],
)
def test_a_flat_group_is_one_whose_scored_rewards_agree(rewards, flat):
    assert is_flat(make_group(0, rewards), Shaping()) == flat


EACH = Shaping(normalize_each=True)


def parted(submission, rows, weights=None, lengths=None):
    """A group whose scores have these parts, [(a, b), …]."""
    group = make_group(submission, [0] * len(rows), lengths)
    weights = weights or {}
    scores = [
        row if row is FAILED else Score(weights.get("a", 1) * row[0] + weights.get("b", 1) * row[1],
                                        dict(zip("ab", row, strict=True)), weights)
        for row in rows
    ]  # fmt: skip
    return replace(group, outcomes=tuple(scores))


def test_each_reward_is_normalised_apart_before_the_weighted_sum():
    a, b = np.array([0.0, 1, 1, 0]), np.array([0.0, 10, 0, 10])
    batch = make_batch([parted(0, list(zip(a, b, strict=True)), {"b": 0.5})], shaping=EACH)
    want = (a - a.mean()) / a.std(ddof=1) + 0.5 * (b - b.mean()) / b.std(ddof=1)
    np.testing.assert_allclose(batch.advantages, want, rtol=0, atol=1e-12)
    # By the sum, the reward with the larger spread decides alone.
    total = make_batch([parted(0, list(zip(a, b, strict=True)), {"b": 0.5})]).advantages
    assert abs(total[2] - batch.advantages[2]) > 0.3


def test_equal_sums_of_different_rewards_are_told_apart_only_if_each_is_normalised():
    # With equal spreads and weights the two cancel.
    group = parted(0, [(1, 0), (0, 1), (1, 0)])
    assert is_flat(group, Shaping())
    assert is_flat(group, EACH)
    assert not make_batch([group], shaping=EACH).has_gradient.any()
    heavier = parted(0, [(2, 0), (0, 1), (2, 0)], {"b": 2.0})
    assert is_flat(heavier, Shaping())
    assert not is_flat(heavier, EACH)
    assert not make_batch([heavier]).advantages.any()
    assert make_batch([heavier], shaping=EACH).has_gradient.all()


def test_one_reward_gives_the_same_advantage_either_way_and_failed_ones_leave_the_group():
    groups = [make_group(0, [0, 1, FAILED, 1]), make_group(1, [5, 3])]
    both = [make_batch(groups, shaping=how).advantages for how in (Shaping(), EACH)]
    np.testing.assert_allclose(*both, rtol=0, atol=1e-12)
    apart = make_batch([parted(0, [(0, 1), FAILED, (1, 1)])], shaping=EACH)
    np.testing.assert_allclose(apart.advantages, [-np.sqrt(0.5), 0, np.sqrt(0.5)], rtol=0, atol=1e-12)
    assert apart.scored.tolist() == [True, False, True]


def test_the_overlong_penalty_is_one_more_reward():
    how = replace(EACH, overlong_tokens=4, max_new_tokens=8)
    batch = make_batch([parted(0, [(1, 0), (1, 0)], lengths=[2, 8])], shaping=how)
    np.testing.assert_allclose(batch.advantages, [np.sqrt(0.5), -np.sqrt(0.5)], rtol=0, atol=1e-12)


def test_mini_batches_are_whole_groups_where_they_divide_and_equal_runs_where_not():
    groups = [make_group(i, [0, 1, 1]) for i in range(4)]
    assert make_batch(groups, 2).minibatch.tolist() == [0] * 6 + [1] * 6
    assert make_batch(groups, 4).minibatch.tolist() == np.repeat(range(4), 3).tolist()
    assert np.bincount(make_batch(groups, 3).minibatch).tolist() == [4, 4, 4]
    assert np.bincount(make_batch(groups[:3], 2).minibatch).tolist() == [5, 4]


def test_membership_of_mini_batches_is_fixed_before_anything_is_skipped_or_fails():
    plain = [make_group(i, [0, 1, 1]) for i in range(4)]
    broken = [make_group(0, [1, 1, 1]), make_group(1, [FAILED] * 3), *plain[2:]]
    for num in (1, 2, 3, 4):
        for how in ("count", "drop"):
            got = make_batch(broken, num, zero_variance=how).minibatch
            np.testing.assert_array_equal(got, make_batch(plain, num).minibatch)


def test_items_hold_each_prompt_once_with_the_chosen_completions():
    batch = make_batch([make_group(0, [1, 0], prompt=(4, 5)), make_group(1, [1, 1]), make_group(2, [0, 1])])
    items = batch.items(np.array([True, False, False, False, True, True]))
    assert [[c.index for c in item.completions] for item in items] == [[0], [4, 5]]
    assert items[0].prompt.tolist() == [4, 5]
    assert items[1].completions[1].tokens.tolist() == batch.samples[5].tokens.tolist()


def test_a_completion_without_a_trained_token_is_counted_and_not_live():
    batch = make_batch([make_group(0, [1, 0], [3, 2], holes={0: slice(0, 3)})])
    assert batch.trained_tokens.tolist() == [0, 2]
    assert batch.in_denominator.all()
    assert batch.has_gradient.tolist() == [False, True]


def test_rewards_beyond_the_clip_are_marked_because_they_are_the_same_afterwards():
    batch = make_batch([make_group(0, [30.0, 45.0, 3.0, FAILED])], shaping=Shaping(clip=20.0))
    assert batch.at_clip.tolist() == [True, True, False, False]
    assert batch.advantages[0] == batch.advantages[1]

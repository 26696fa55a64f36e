from dataclasses import replace

import numpy as np
import pytest
from made_batches import FAILED, make_batch, make_group, uneven_groups

from gspo.errors import TrainingError
from gspo.learner.credit import Credit, with_token_advantages

# Two completions of 3 and 2 tokens, rewards 1 and 0: advantages ±½. The sampler's log-probs are −1 everywhere.
GROUP = make_group(0, [1, 0], [3, 2])
REFERENCE = {0: np.array([-1.5, -1.0, -2.0]), 1: np.array([-0.5, -1.0])}  # k1 = ½, 0, 1 and −½, 0


def penalised(how, groups=(GROUP,), reference=REFERENCE, **assembly):
    return with_token_advantages(
        replace(make_batch(groups, norm="group_mean", **assembly), reference_logp=reference), how
    )


def test_a_token_pays_for_the_divergence_that_follows_it():
    """½ − 0.1·(1.5, 1, 1) and −½ − 0.1·(−½, 0)."""
    batch = penalised(Credit(kl_coef=0.1))
    np.testing.assert_allclose(batch.token_advantages[0], [0.35, 0.4, 0.4], atol=1e-12)
    np.testing.assert_allclose(batch.token_advantages[1], [-0.45, -0.5], atol=1e-12)
    np.testing.assert_allclose(batch.advantages, [1.15 / 3, -0.475], atol=1e-12)
    np.testing.assert_allclose(batch.kl_penalty, [0.15, -0.05], atol=1e-12)
    # The mean over tokens is A − (β/|y|) Σ u·k_u: what a sequence ratio sees.
    np.testing.assert_allclose(batch.advantages[0], 0.5 - 0.1 / 3 * (1 * 0.5 + 2 * 0 + 3 * 1), atol=1e-12)


def test_the_discount_weakens_what_comes_later():
    """γ = ½: token 1 sees ¼·½ − (0.05 + 0 + ¼·0.1), token 2 ½·½ − (0 + ½·0.1), token 3 ½ − 0.1."""
    batch = penalised(Credit(kl_coef=0.1, discount=0.5))
    np.testing.assert_allclose(batch.token_advantages[0], [0.05, 0.2, 0.4], atol=1e-12)


@pytest.mark.parametrize(("estimator", "k"), [("k2", 0.125), ("k3", np.exp(-0.5) - 1 + 0.5)])
def test_other_estimators_are_never_a_gain(estimator, k):
    batch = penalised(Credit(kl_coef=1.0, kl_estimator=estimator))
    assert batch.token_advantages[0][0] - batch.token_advantages[0][1] == pytest.approx(-k)
    assert (batch.kl_penalty > 0).all()


def test_gae_by_hand():
    """V = (.2, .4, .1), R = 1, λ = ½: δ = (.2, −.3, .9), so A = (.2 − .15 + .225, −.3 + .45, .9)."""
    batch = replace(make_batch([make_group(0, [1], [3])], norm="gae"), values={0: np.array([0.2, 0.4, 0.1])})
    batch = with_token_advantages(batch, Credit(gae_lambda=0.5))
    np.testing.assert_allclose(batch.token_advantages[0], [0.275, 0.15, 0.9], atol=1e-12)
    np.testing.assert_allclose(batch.returns[0], [0.475, 0.55, 1.0], atol=1e-12)


def test_an_untrained_critic_and_lambda_1_give_the_reward_to_every_token():
    batch = make_batch(uneven_groups(), norm="gae")
    values = {i: np.zeros(batch.trained_tokens[i], np.float32) for i in np.flatnonzero(batch.trainable)}
    credited = with_token_advantages(replace(batch, values=values), Credit())
    assert credited.token_advantages.keys() == values.keys()
    for i, advantage in credited.token_advantages.items():
        np.testing.assert_array_equal(advantage, np.full(batch.trained_tokens[i], batch.shaped[i]))
        np.testing.assert_array_equal(credited.returns[i], advantage)
    # A reward of 0 is no advantage here; a failed one has none either.
    assert credited.has_gradient.tolist() == [
        bool(batch.trainable[i] and batch.shaped[i] != 0) for i in range(len(batch.has_gradient))
    ]


def test_without_a_coefficient_tokens_share_the_advantage_of_their_sequence():
    batch = make_batch(uneven_groups())
    credited = with_token_advantages(batch, Credit(gae_lambda=0.3))  # λ is the critic's: there is none
    np.testing.assert_allclose(credited.advantages[batch.trainable], batch.advantages[batch.trainable], atol=1e-15)
    assert (credited.has_gradient == batch.has_gradient).all()
    assert credited.kl_penalty is None


def test_a_group_of_equal_rewards_feels_the_penalty_and_a_failed_reward_does_not():
    groups = [make_group(0, [1, 1], [3, 2]), make_group(1, [FAILED, 1], [2, 2])]
    reference = {**REFERENCE, 3: np.array([-3.0, -1.0])}
    batch = penalised(Credit(kl_coef=0.1), groups, reference)
    assert batch.has_gradient.tolist() == [True, True, False, True]
    assert batch.token_advantages.keys() == {0, 1, 3}
    np.testing.assert_allclose(batch.token_advantages[3], [-0.2, 0.0], atol=1e-12)
    dropped = penalised(Credit(kl_coef=0.1), groups, reference, zero_variance="drop")
    assert not dropped.has_gradient.any()  # groups are compared before the penalty


def test_a_mean_of_0_does_not_make_a_sequence_dead():
    batch = replace(make_batch([make_group(0, [0], [2])], norm="gae"), values={0: np.array([1.0, 2.0])})
    batch = with_token_advantages(batch, Credit(gae_lambda=0.0))  # δ = (2 − 1, 0 − 2); shifted to a mean of 0 below
    shifted = replace(batch, advantages=np.zeros(1), token_advantages={0: np.array([1.5, -1.5])})
    np.testing.assert_allclose(batch.token_advantages[0], [1.0, -2.0])
    assert shifted.has_gradient.all()


def test_adv_norm_is_over_tokens_and_truncation_comes_after_it():
    norm = {"mean_level": "batch", "std_level": "batch", "leave_one_out": False}
    group = make_group(0, [1, 0], [3, 2], finish="stop")
    longer = make_group(1, [0, 1], [2, 2], finish="length")
    reference = {**REFERENCE, 2: np.array([-1.0, -4.0]), 3: np.array([-1.0, -1.0])}
    batch = penalised(Credit(kl_coef=0.1, adv_norm=norm, truncated_is_zero=True), [group, longer], reference)
    raw = penalised(Credit(kl_coef=0.1), [group, longer], reference)
    tokens = np.concatenate(list(raw.token_advantages.values()))
    for i in (0, 1):
        want = (raw.token_advantages[i] - tokens.mean()) / tokens.std(ddof=1)
        np.testing.assert_allclose(batch.token_advantages[i], want, atol=1e-12)
    assert not np.concatenate([batch.token_advantages[2], batch.token_advantages[3]]).any()


def test_equal_rewards_are_dropped_by_reward_with_a_critic():
    batch = make_batch([make_group(0, [1, 1]), make_group(1, [1, 0])], norm="gae", zero_variance="drop")
    assert batch.in_denominator.tolist() == [False, False, True, True]


BATCH = {"mean_level": "batch", "std_level": "batch"}


@pytest.mark.parametrize("kl_coef", [0.0, 1e-12])
def test_adv_norm_is_over_tokens_with_and_without_a_penalty(kl_coef):
    """A = ±1/√2 on 2 and 10 tokens, like 1 and 0: mean 1/6, variance (2·25/36 + 10/36)/11 = 5/33."""
    group = make_group(0, [1, 0], [2, 10])
    batch = replace(make_batch([group]), reference_logp={0: np.zeros(2), 1: np.zeros(10)})
    batch = with_token_advantages(batch, Credit(kl_coef=kl_coef, adv_norm=BATCH))
    np.testing.assert_allclose(batch.advantages, np.array([5, -1]) / 6 / np.sqrt(5 / 33), atol=1e-9)


def test_a_discount_without_a_critic_weakens_earlier_tokens():
    """A = ±½: γ^(|y| − t) A."""
    batch = with_token_advantages(make_batch([GROUP], norm="group_mean"), Credit(discount=0.5))
    np.testing.assert_allclose(batch.token_advantages[0], [0.125, 0.25, 0.5])
    np.testing.assert_allclose(batch.token_advantages[1], [-0.25, -0.5])


def episode(rewards, turns, final=0.0):
    """A group of one episode with one sequence: `turns` of its tokens, and the rewards of its turns."""
    group = make_group(0, [final + sum(rewards.values())], [len(turns)])
    sample = replace(group.samples[0], turns=np.array(turns, dtype=np.int32), turn_rewards=rewards)
    return replace(group, samples=(sample,))


def with_critic(group, value=0.0, **how):
    batch = make_batch([group], norm="gae")
    values = {i: np.full(batch.trained_tokens[i], value) for i in range(batch.num_sequences)}
    return with_token_advantages(replace(batch, values=values), Credit(**how))


def test_with_a_critic_a_turn_is_credited_with_its_own_and_later_rewards():
    """V = 0, γ = λ = 1: turn rewards (1, 0) and (0, 1) give turn 2 the advantages 0 and 1."""
    first, second = (with_critic(episode(dict(enumerate(r)), [0, 0, 1])) for r in ((1.0, 0.0), (0.0, 1.0)))
    assert first.token_advantages[0].tolist() == [1, 1, 0]
    assert second.token_advantages[0].tolist() == [1, 1, 1]
    assert first.returns[0].tolist() == [1, 1, 0]


def test_the_discount_counts_from_the_turn_that_earned_the_reward():
    """γ = ½, λ = 1, V = 0: reward 1 at token 2, 4 at the end of four tokens: 4/8 + 1/2, 4/4 + 1, 4/2, 4."""
    batch = with_critic(episode({0: 1.0, 1: 0.0}, [0, 0, 1, 1], final=4.0), discount=0.5)
    np.testing.assert_allclose(batch.token_advantages[0], [1.0, 2.0, 2.0, 4.0])


def test_without_rewards_of_turns_the_credit_is_as_it_was():
    plain = episode({}, [0, 0, 1], final=1.0)
    batch = with_critic(plain, value=0.25, gae_lambda=0.5)
    np.testing.assert_allclose(batch.token_advantages[0], [0.1875, 0.375, 0.75])


def test_turn_rewards_of_other_sequences_go_to_what_came_before_them():
    """An episode of two sequences, turns 0 and 2 in the first, turn 1 in the second; rewards 1, 2, 4 and 8 at the end.

    The first sequence is credited with all rewards from each turn on; the second one not with that of turn 0.
    """
    group = episode({0: 1.0, 1: 2.0, 2: 4.0}, [0, 2], final=8.0)
    rest = replace(make_group(1, [0], [1]).samples[0], turns=np.array([1], dtype=np.int32), prompt=(1, 2))
    group = replace(group, samples=(replace(group.samples[0], rest=(rest,)),))
    batch = with_critic(group)
    assert batch.token_advantages[0].tolist() == [15, 12]
    assert batch.token_advantages[1].tolist() == [14]


def test_a_critic_with_reward_norm_refuses_rewards_of_turns():
    norm = {"mean_level": "batch", "std_level": None}
    batch = make_batch([episode({0: 1.0}, [0, 0])], norm=norm)
    with pytest.raises(TrainingError, match=r"remove it \(actor.adv_norm"):
        with_token_advantages(replace(batch, values={0: np.zeros(2)}), Credit())

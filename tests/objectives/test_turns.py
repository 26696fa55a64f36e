"""Turns as the unit of the ratio, and one advantage per turn."""

import pytest
import torch
from batches import grad

from gspo import objectives
from gspo.objectives import advantage
from gspo.objectives.aggregate import fold, turn_cuts

CLIP = {"clip_low": 0.01, "clip_high": 0.02}
# Three sequences: turns of 3 + 2, of 4, and of 1 + 1 + 5 tokens.
TURNS = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2])
CUTS = torch.tensor([0, 5, 9, 16])


def drifted(seed=0, drift=0.05):
    g = torch.Generator().manual_seed(seed)
    proximal = -2 * torch.rand(16, generator=g, dtype=torch.float64)
    logp = (proximal + drift * torch.randn(16, generator=g, dtype=torch.float64)).requires_grad_()
    return logp, proximal, torch.tensor([1.0, -0.5, 0.7], dtype=torch.float64)


def by_turn(name, logp, proximal, a, **settings):
    cuts, sequence = turn_cuts(TURNS, CUTS)
    share = cuts.diff().double() / CUTS.diff()[sequence]
    a = a[sequence] if a.shape == (3,) else a
    return objectives.loss(
        name, logp, proximal, a, None, cu_seqlens=cuts, weight=share, denominator=3, **CLIP, **settings
    )


def test_sequences_are_cut_where_a_turn_begins():
    cuts, sequence = turn_cuts(TURNS, CUTS)
    assert cuts.tolist() == [0, 3, 5, 9, 10, 11, 16]
    assert sequence.tolist() == [0, 0, 1, 2, 2, 2]
    # The same turn number on both sides of a boundary is two turns; an empty sequence has none.
    cuts, sequence = turn_cuts(torch.tensor([1, 1]), torch.tensor([0, 1, 1, 2]))
    assert (cuts.tolist(), sequence.tolist()) == ([0, 1, 2], [0, 2])


def test_episodes_of_one_turn_have_the_loss_and_gradient_of_sequences():
    logp, proximal, a = drifted()
    cuts, sequence = turn_cuts(torch.zeros(16, dtype=torch.int64), CUTS)
    ones = torch.ones(3, dtype=torch.float64)
    turned = objectives.loss(
        "gspo", logp, proximal, a[sequence], None, cu_seqlens=cuts, weight=ones, denominator=3, **CLIP
    )
    plain = objectives.loss("gspo", logp, proximal, a, None, cu_seqlens=CUTS, denominator=3, **CLIP)
    assert turned.loss.equal(plain.loss)
    assert grad(turned.loss, logp).equal(grad(plain.loss, logp))


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "grpo"])
def test_with_ratios_of_1_turns_and_trajectories_have_the_same_gradient(name):
    logp, _, a = drifted()
    turned = by_turn(name, logp, logp.detach(), a)
    plain = objectives.loss(name, logp, logp.detach(), a, None, cu_seqlens=CUTS, denominator=3, **CLIP)
    torch.testing.assert_close(grad(turned.loss, logp), grad(plain.loss, logp), rtol=1e-12, atol=0)


def test_each_turn_is_clipped_by_its_own_ratio():
    """By hand: turn 0 of the first sequence rises by 0.03 a token and is clipped (A > 0), turn 1 is not."""
    proximal = torch.full((16,), -1.0, dtype=torch.float64)
    logp = proximal.clone()
    logp[:3] += 0.03
    logp.requires_grad_()
    out = by_turn("gspo", logp, proximal, torch.ones(3, dtype=torch.float64))
    assert out.clipped.tolist() == [True, False, False, False, False, False]
    d = grad(out.loss, logp)
    assert d[:3].tolist() == [0, 0, 0]
    # −(1/3) · (2/5) · 1 · (1/2) at each of its two tokens
    torch.testing.assert_close(d[3:5], torch.full((2,), -1 / 15, dtype=torch.float64))
    plain = objectives.loss("gspo", logp, proximal, torch.ones(3, dtype=torch.float64), None, cu_seqlens=CUTS, **CLIP)
    assert plain.clipped.tolist() == [False, False, False]  # 0.018 over the whole of it


def test_the_gradient_is_that_of_the_formula():
    def value(logp):
        _, proximal, a = drifted()
        return by_turn("gspo", logp, proximal, a).loss

    assert torch.autograd.gradcheck(value, drifted(drift=0.002)[0].detach().requires_grad_())


def test_log_s_of_a_sequence_is_the_weighted_mean_of_its_turns():
    logp, proximal, a = drifted()
    out = by_turn("gspo", logp, proximal, a)
    plain = objectives.loss("gspo", logp, proximal, a, None, cu_seqlens=CUTS, **CLIP)
    _, sequence = turn_cuts(TURNS, CUTS)
    folded = fold(out.stats["log_s"], sequence, 3, out.stats["num_tokens"])
    torch.testing.assert_close(folded, plain.stats["log_s"], rtol=1e-12, atol=1e-15)
    assert fold(out.stats["num_tokens"], sequence, 3).tolist() == [5, 4, 7]


def test_a_turns_own_advantage_weighs_its_own_ratio():
    logp, proximal, _ = drifted()
    cuts, _ = turn_cuts(TURNS, CUTS)
    each = torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0, -0.3], dtype=torch.float64)
    tokens = each.repeat_interleave(cuts.diff())
    by_token = by_turn("gspo", logp, proximal, tokens)
    torch.testing.assert_close(by_token.per_sequence, by_turn("gspo", logp, proximal, each).per_sequence)


def test_a_weight_of_the_wrong_shape_is_refused():
    logp, proximal, a = drifted()
    with pytest.raises(ValueError, match="weight has shape"):
        objectives.loss("gspo", logp, proximal, a, None, cu_seqlens=CUTS, weight=torch.ones(4), **CLIP)


# Advantages by turn. Two groups: trajectories of 2, 1 and 3 turns, and of 1 and 2.
GROUPS = torch.tensor([0, 0, 0, 1, 1])
OF = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4])
AT = torch.tensor([0, 1, 0, 0, 1, 2, 0, 0, 1])
FINAL = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0], dtype=torch.float64)
EARNED = torch.tensor([0.1, 0.0, 0.3, 0.0, 0.2, 0.0, 0.0, 0.4, 0.1], dtype=torch.float64)
NOTHING = torch.zeros_like(EARNED)


@pytest.mark.parametrize("preset", list(advantage.PRESETS))
def test_without_turn_rewards_every_turn_has_its_trajectorys_advantage(preset):
    whole = advantage.normalize(FINAL, GROUPS, **advantage.PRESETS[preset])
    each = advantage.by_turn(FINAL, NOTHING, GROUPS, OF, AT, **advantage.PRESETS[preset])
    torch.testing.assert_close(each, whole[OF], rtol=1e-12, atol=1e-15)


def test_a_discount_counts_the_turns_to_the_end():
    whole = advantage.group_std(FINAL, GROUPS)
    each = advantage.by_turn(FINAL, NOTHING, GROUPS, OF, AT, discount=0.5)
    left = torch.tensor([1, 0, 0, 2, 1, 0, 0, 1, 0])
    torch.testing.assert_close(each, whole[OF] * 0.5**left, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("preset", list(advantage.PRESETS))
def test_of_one_turn_each_it_is_the_advantage_of_the_sum(preset):
    one, zero = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    earned = torch.tensor([0.3, 0.1, 0.0, 0.7, 0.2], dtype=torch.float64)
    each = advantage.by_turn(FINAL, earned, GROUPS, one, zero, discount=0.3, **advantage.PRESETS[preset])
    torch.testing.assert_close(each, advantage.normalize(FINAL + earned, GROUPS, **advantage.PRESETS[preset]))


def test_a_later_turn_is_not_blamed_for_what_was_earned_before_it():
    """Both earn 1 in turn 0; in turn 1 the first earns 1 more. By hand, means only."""
    of, at = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    earned = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    none, same = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    each = advantage.by_turn(none, earned, same, of, at, discount=0.5, std_level=None)
    assert each.tolist() == [0.25, 0.5, -0.25, -0.5]


def test_turn_rewards_by_hand_with_a_std():
    """One group: R = (1.1, 0.3, 0.7), std 0.4. From turn 0 on (0.1, 0.3, 0.2) is earned, from turn 1 on (0, –, 0.2)."""
    each = advantage.by_turn(FINAL[:3], EARNED[:6], GROUPS[:3], OF[:6], AT[:6])
    expected = torch.tensor([0.5 - 0.1, 0.5 - 0.1, -0.5 + 0.1, 0.0, 0.1, 0.0], dtype=torch.float64)
    torch.testing.assert_close(each, expected / 0.4)


def test_an_episode_that_ends_early_lacks_what_the_others_still_earn():
    """One point a turn, as in CartPole: the first falls after one turn, the second stands for three. By hand."""
    of, at = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 2])
    none, same = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    each = advantage.by_turn(none, torch.ones(4, dtype=torch.float64), same, of, at, std_level=None)
    assert each.tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_a_group_of_equal_totals_teaches_nothing():
    of, at = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    earned = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)
    same = torch.zeros(2, dtype=torch.int64)
    assert not advantage.by_turn(torch.ones(2), earned, same, of, at).any()

"""Bugs that shipped elsewhere (gspo.md §5); each fails here by the number it has there."""

import pytest
import torch
from batches import grad, pack, uneven

from gspo.algorithms import ALGORITHMS
from gspo.objectives import denominator, loss
from gspo.objectives.advantage import group_std, normalize
from gspo.objectives.aggregate import token_layout
from gspo.objectives.surrogate import clip_fractions, sequence_token_log_ratio


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (3, 3), (2,)])
def test_1_an_advantage_that_would_broadcast_is_refused(shape):
    logp, proximal, _, mask = uneven([4, 2, 3])
    with pytest.raises(ValueError, match="advantage has shape"):
        loss("gspo", logp, proximal, torch.ones(shape), mask)


@pytest.mark.parametrize("what", ["proximal", "mask", "behavior_logp", "reference_logp"])
def test_1_every_other_shape_must_match_exactly(what):
    logp, proximal, advantage, mask = uneven([4, 2, 3])
    wrong = torch.zeros(3, 1)
    kw = {what: wrong} if what.endswith("logp") else {}
    with pytest.raises(ValueError, match="shape"):
        loss(
            "gspo", logp, wrong if what == "proximal" else proximal, advantage, wrong if what == "mask" else mask, **kw
        )


def test_2_packed_ratios_do_not_leak_across_boundaries():
    logp, proximal, advantage, mask = uneven([5, 3, 4])
    cu, lp, pr = pack(mask, logp, proximal)
    before = loss("gspo", lp, pr, advantage, None, cu_seqlens=cu)
    lp = lp.clone()
    lp[5:8] += 1.0  # only the second sequence moves
    after = loss("gspo", lp, pr, advantage, None, cu_seqlens=cu)
    changed = before.stats["log_s"] != after.stats["log_s"]
    assert changed.tolist() == [False, True, False]
    assert (before.per_sequence[[0, 2]] == after.per_sequence[[0, 2]]).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_3_garbage_under_the_mask_changes_nothing_bitwise(name):
    logp, proximal, advantage, mask = uneven([5, 0, 3, 1], drift=0.3)
    per_token = advantage.unsqueeze(-1).expand_as(logp).clone()
    reference, behavior = proximal - 0.1, proximal - 0.2
    kw = {"max_new_tokens": 8, "kl_coef": 0.1, "correction": "tis"}

    def run(*tensors):
        leaf = tensors[0].clone().requires_grad_()
        out = loss(name, leaf, tensors[1], tensors[2], mask, reference_logp=tensors[3], behavior_logp=tensors[4], **kw)
        return out, grad(out.loss, leaf)

    clean, clean_grad = run(logp, proximal, per_token, reference, behavior)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e30):
        dirty = [torch.where(mask, t, garbage) for t in (logp, proximal, per_token, reference, behavior)]
        out, gradient = run(*dirty)
        assert torch.equal(out.loss, clean.loss)
        assert torch.equal(gradient, clean_grad)
        assert all(torch.equal(out.stats[k], clean.stats[k]) for k in clean.stats)


def test_4_gspo_is_a_mean_over_sequences_not_over_tokens():
    zeros = torch.zeros(2, 9, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[1], [9]])
    out = loss("gspo", zeros, zeros, torch.tensor([1.0, -1.0], dtype=torch.float64), mask)
    assert float(out.loss) == 0.0  # a token mean would give +0.8


def test_5_a_correction_that_drops_tokens_leaves_the_denominator_alone():
    logp, _, _, mask = uneven([2, 2])
    behavior = logp.clone()
    behavior[0] -= 5.0  # ratio e^5: masked
    out = loss("grpo", logp, logp, torch.ones(2, dtype=torch.float64), mask, behavior_logp=behavior, correction="mis")
    assert float(out.loss) == pytest.approx(-0.5)  # not −1: the dropped sequence still counts
    assert denominator("grpo", num_sequences=2, num_tokens=4) == 2


def test_6_the_sequence_ratio_survives_low_precision():
    logp = torch.full((1, 4), -9.5, dtype=torch.bfloat16)
    log_s = torch.tensor([3e-4], dtype=torch.bfloat16)
    layout = token_layout(logp, torch.ones(1, 4))
    right = sequence_token_log_ratio(logp, log_s, layout)
    wrong = log_s.unsqueeze(-1) + logp - logp.detach()
    assert (right == log_s).all()
    assert (wrong == 0).all()  # the order that loses s
    # And through the public call, from bfloat16 inputs: s is computed in float32.
    proximal = torch.full((1, 4), -9.5, dtype=torch.float32)
    out = loss("gspo", proximal.bfloat16(), proximal - 3.5e-4, torch.ones(1), torch.ones(1, 4))
    assert out.stats["log_s"].item() == pytest.approx(3.5e-4, rel=1e-2)
    assert out.per_sequence.dtype == torch.float32


@pytest.mark.parametrize("name", ALGORITHMS)
def test_7_no_exponential_overflows_and_nan_is_never_hidden(name):
    for drift in (1e4, -1e4):
        logp = torch.zeros(2, 3, requires_grad=True)
        proximal = torch.full((2, 3), -drift)
        out = loss(name, logp, proximal, torch.tensor([1.0, -1.0]), torch.ones(2, 3), max_new_tokens=4)
        assert out.loss.isfinite()
        assert grad(out.loss, logp).isfinite().all()
    for bad in (torch.nan, torch.inf, -torch.inf):
        proximal = torch.zeros(2, 3)
        proximal[0, 1] = bad
        for sign in (1.0, -1.0):
            out = loss(name, torch.zeros(2, 3), proximal, torch.full((2,), sign), torch.ones(2, 3), max_new_tokens=4)
            assert not out.loss.isfinite()
            assert out.stats["nonfinite"].tolist() == [True, False]


def test_8_equal_rewards_give_exactly_zero():
    third = torch.tensor([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], dtype=torch.float64)  # one ulp apart
    for dtype in (torch.float32, torch.float64):
        for value in (0.1, 1 / 3, 1e6, -7.7, 0.0):
            rewards = torch.full((8,), value, dtype=dtype)
            assert (group_std(rewards, torch.zeros(8, dtype=torch.long)) == 0).all()
    assert (group_std(third, torch.zeros(4, dtype=torch.long)) == 0).all()


def test_9_uneven_and_single_groups_stay_finite_and_apart():
    rewards = torch.tensor([1.0, 0.0, 5.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    groups = torch.tensor([7, 7, 3, 9, 9, 9])
    a = group_std(rewards, groups)
    assert a[2] == 0  # a group of one
    torch.testing.assert_close(a[:2], torch.tensor([1.0, -1.0], dtype=torch.float64) / 2**0.5)
    torch.testing.assert_close(a[3:], torch.tensor([2.0, -1.0, -1.0], dtype=torch.float64) / 3**0.5)
    assert a.abs().max() < 2


def test_10_detaching_in_every_mini_batch_makes_log_s_zero():
    """The broken trainer: π_old is the current policy each time. The stats say so at once."""
    logp, proximal, advantage, mask = uneven([5, 3])
    broken = loss("gspo", logp, logp.detach(), advantage, mask)
    assert (broken.stats["log_s"] == 0).all()
    assert (loss("gspo", logp, proximal, advantage, mask).stats["log_s"] != 0).all()


def test_12_clip_fractions_are_counted_per_sequence_and_per_token_and_no_split_changes_them():
    logp, proximal, advantage, mask = uneven([9, 1, 4, 0, 6], drift=0.4)
    whole = loss("grpo", logp, proximal, advantage, mask)
    parts = [loss("grpo", logp[r], proximal[r], advantage[r], mask[r]).stats for r in (slice(0, 2), slice(2, 5))]
    joined = {k: torch.cat([p[k] for p in parts]) for k in whole.stats}
    a, b = clip_fractions(whole.stats), clip_fractions(joined)
    assert all(torch.equal(a[k], b[k]) for k in a)
    clipped = whole.clipped & mask
    assert a["tokens"].item() == int(clipped.sum()) / 20
    assert a["sequences"].item() == int(clipped.any(-1).sum()) / 4  # the empty sequence is not counted
    assert (a["tokens_low"] + a["tokens_high"]).item() == pytest.approx(a["tokens"].item())


def test_13_a_setting_that_nothing_reads_is_an_error_that_names_it():
    logp, proximal, advantage, mask = uneven([2])
    for name, setting in (("gspo", "tau_pos"), ("cispo", "clip_low"), ("sapo", "dual_clip"), ("gspo", "clip_hihg")):
        with pytest.raises(TypeError, match=f"{name} has no setting {setting}"):
            loss(name, logp, proximal, advantage, mask, **{setting: 1.0})
    with pytest.raises(ValueError, match="did you mean 'gspo'"):
        loss("gsop", logp, proximal, advantage, mask)


def test_15_tool_tokens_enter_neither_length_nor_ratio_nor_gradient():
    logp = torch.tensor([[-1.0, -9.0, -9.0, -1.0]], dtype=torch.float64, requires_grad=True)
    proximal = torch.tensor([[-1.2, -1.0, -1.0, -1.4]], dtype=torch.float64)
    out = loss("gspo", logp, proximal, torch.ones(1), torch.tensor([[1, 0, 0, 1]]), clip_high=0.9)
    assert out.stats["num_tokens"].tolist() == [2]
    assert out.stats["log_s"].item() == pytest.approx(0.3)
    assert (grad(out.loss, logp)[0, 1:3] == 0).all()


def test_batch_normalisation_ignores_groups():
    rewards = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    a = normalize(rewards, torch.tensor([0, 0, 1, 1]), mean_level="batch", std_level="batch")
    torch.testing.assert_close(a, torch.tensor([-1.0, -1, 1, 1], dtype=torch.float64) * (3 / 4) ** 0.5)

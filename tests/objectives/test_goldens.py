"""Numbers derived by hand, not by the code."""

import math

import pytest
import torch
from batches import grad

from gspo.objectives import loss

LN = math.log


def one(name, ratios, advantage, **settings):
    """One sequence whose token ratios are given, under π_old = 1/4 each."""
    d = torch.tensor([[LN(r) for r in ratios]], dtype=torch.float64)
    proximal = torch.full_like(d, LN(0.25))
    logp = (proximal + d).requires_grad_()
    out = loss(name, logp, proximal, torch.tensor([advantage], dtype=torch.float64), torch.ones_like(d), **settings)
    return float(out.loss.detach()), grad(out.loss, logp)[0].tolist(), out


def test_gspo_by_hand():
    # s = (2 · 1/2 · 1.21 · 1)^(1/4) = 1.21^(1/4) = 1.0488088481701516; A = 2, ε = 0.2: not clipped.
    value, gradient, out = one("gspo", [2, 0.5, 1.21, 1], 2.0, clip_low=0.2, clip_high=0.2)
    assert value == pytest.approx(-2 * 1.0488088481701516, rel=1e-14)
    assert gradient == pytest.approx([-2 * 1.0488088481701516 / 4] * 4, rel=1e-14)
    assert out.clipped.tolist() == [False]


def test_gspo_clips_up_only_for_positive_and_down_only_for_negative_advantages():
    # s = sqrt(1.44) = 1.2 and sqrt(0.64) = 0.8, band [0.9, 1.1].
    band = {"clip_low": 0.1, "clip_high": 0.1}
    assert one("gspo", [1.44, 1], 1.0, **band)[:2] == (pytest.approx(-1.1), [0.0, 0.0])
    assert one("gspo", [1.44, 1], -1.0, **band)[:2] == (pytest.approx(1.2), pytest.approx([0.6, 0.6]))
    assert one("gspo", [0.64, 1], 1.0, **band)[:2] == (pytest.approx(-0.8), pytest.approx([-0.4, -0.4]))
    assert one("gspo", [0.64, 1], -1.0, **band)[:2] == (pytest.approx(0.9), [0.0, 0.0])


def test_grpo_by_hand():
    # Token ratios 1.5 (clipped at 1.2), 1.1, 0.5; A = 1: mean of 1.2, 1.1, 0.5 = 0.93333.
    value, gradient, out = one("grpo", [1.5, 1.1, 0.5], 1.0)
    assert value == pytest.approx(-2.8 / 3, rel=1e-14)
    assert gradient == pytest.approx([0, -1.1 / 3, -0.5 / 3], rel=1e-14)
    assert out.clipped.tolist() == [[True, False, False]]


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    # A = −1, ratio 5, c = 3: objective max(−5, −3) = −3, no gradient.
    value, gradient, out = one("grpo", [5.0], -1.0, dual_clip=3.0)
    assert (value, gradient) == (pytest.approx(3.0), [0.0])
    assert out.stats["clipped_low"].tolist() == [1]


def test_dr_grpo_by_hand():
    # Σ_t (1.1 + 0.9) · A 3 / (1 sequence × L 8) = 0.75.
    assert one("dr_grpo", [1.1, 0.9], 3.0, max_new_tokens=8)[0] == pytest.approx(-0.75, rel=1e-14)


def test_luspo_by_hand():
    # |y| = 2, s = sqrt(1.002 · 1) → 2 s A.
    assert one("luspo", [1.002, 1], 1.0)[0] == pytest.approx(-2 * math.sqrt(1.002), rel=1e-14)


def test_cispo_by_hand():
    # Weights min(8, 5) = 5 and 0.5; log π = log(0.25 · 8) = ln 2 and log(0.125) = −3 ln 2; A = 2, token mean.
    value, gradient, out = one("cispo", [8.0, 0.5], 2.0)
    assert value == pytest.approx(-2 * (5 * LN(2) + 0.5 * -3 * LN(2)) / 2, rel=1e-14)
    assert gradient == pytest.approx([-5.0, -0.5], rel=1e-14)
    assert out.clipped.tolist() == [[True, False]]


def test_sapo_by_hand():
    # w = 1 + ln 3, τ_pos = 1: σ(ln 3) = 3/4, value 4 · 3/4 · A; slope in w: 4 · σ(1 − σ) = 3/4, times w for d.
    w = 1 + LN(3)
    value, gradient, _ = one("sapo", [w], 2.0)
    assert value == pytest.approx(-6.0, rel=1e-14)
    assert gradient == pytest.approx([-2 * 0.75 * w], rel=1e-14)
    # A < 0 uses τ_neg: at w = 1 the value is (4/τ) · 1/2 = 2/τ.
    assert one("sapo", [1.0], -1.0, tau_neg=4.0)[0] == pytest.approx(0.5, rel=1e-14)


def test_gmpo_by_hand():
    # A > 0 bounds the rise at e^0.4; d = (0.9 → 0.4, −0.2): s = e^{0.1}; only the second token has a gradient.
    value, gradient, out = one("gmpo", [math.exp(0.9), math.exp(-0.2)], 1.0)
    assert value == pytest.approx(-math.exp(0.1), rel=1e-14)
    assert gradient == pytest.approx([0.0, -math.exp(0.1) / 2], rel=1e-14)
    # A < 0 bounds the fall at e^{−0.4}: d = (−0.9 → −0.4, 0.2): s = e^{−0.1}.
    value, _, out = one("gmpo", [math.exp(-0.9), math.exp(0.2)], -1.0)
    assert value == pytest.approx(math.exp(-0.1), rel=1e-14)
    assert out.clipped.tolist() == [[True, False]]


def test_token_mean_weighs_tokens_and_sequence_mean_sequences():
    # Two sequences, lengths 1 and 3, ratio 1, A = 4 and 0: token mean 4/4, sequence mean 4/2.
    logp = torch.zeros(2, 3, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    advantage = torch.tensor([4.0, 0.0], dtype=torch.float64)
    assert float(loss("dapo", logp, logp, advantage, mask).loss) == -1.0
    assert float(loss("grpo", logp, logp, advantage, mask).loss) == -2.0


def test_kl_in_the_loss_by_hand():
    # d = ln 2 for both tokens: k1 = ln 2, k2 = ln²2 / 2, k3 = 1/2 − 1 + ln 2.
    logp = torch.full((1, 2), LN(0.5), dtype=torch.float64)
    reference = torch.full((1, 2), LN(0.25), dtype=torch.float64)
    for estimator, expected in (("k1", LN(2)), ("k2", LN(2) ** 2 / 2), ("k3", LN(2) - 0.5)):
        out = loss(
            "gspo", logp, logp, torch.zeros(1), torch.ones(1, 2), reference_logp=reference, kl_coef=2.0,
            kl_estimator=estimator,
        )  # fmt: skip
        assert float(out.loss) == pytest.approx(2 * expected, rel=1e-14)
        assert float(out.stats["kl"]) == pytest.approx(expected, rel=1e-14)

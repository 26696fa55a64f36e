import math

import pytest
import torch

from gspo.algorithms import CORRECTIONS
from gspo.objectives import loss
from gspo.objectives.aggregate import token_layout
from gspo.objectives.correction import canonical, weights
from gspo.objectives.surrogate import effective_sample_size, entropy, log_s_summary

F64 = torch.float64


def weigh(ratios, form, advantage=None, mask=None):
    """Correction weights of one padded batch whose token ratios π_old/μ are given."""
    r = torch.tensor(ratios, dtype=F64).log()
    layout = token_layout(r, None if mask is None else torch.tensor(mask))
    form = canonical(form)
    shape = (len(ratios),) if form["level"] == "sequence" else r.shape
    a = torch.zeros(shape, dtype=F64) if advantage is None else torch.tensor(advantage, dtype=F64)
    return weights(r, torch.zeros_like(r), a, layout, form)


def test_tis_truncates_mis_drops_icepop_keeps_a_band():
    ratios = [[0.2, 1.5, 3.0, 9.0]]
    assert weigh(ratios, "tis").weight.tolist() == [pytest.approx([0.2, 1.5, 2.0, 2.0])]
    assert weigh(ratios, "mis").weight.tolist() == [pytest.approx([0.2, 1.5, 0.0, 0.0])]
    assert weigh(ratios, "icepop").weight.tolist() == [pytest.approx([0.0, 1.5, 3.0, 0.0])]
    assert weigh(ratios, "tis").raw.tolist() == [pytest.approx([0.2, 1.5, 3.0, 9.0])]


def test_a_sequence_weight_is_the_geometric_mean_and_does_not_collapse_with_length():
    w = weigh([[0.9] * 2000, [1.0] * 2000], {"level": "sequence", "upper": 5.0})
    assert w.weight.tolist() == pytest.approx([0.9, 1.0])


def test_seq_tis_weights_by_the_truncated_product_of_token_ratios():
    w = weigh([[1.2, 1.5], [0.5, 0.5], [3.0, 3.0], [2.0, 9.0]], "seq_tis", mask=[[True, True]] * 3 + [[True, False]])
    assert w.weight.tolist() == pytest.approx([1.8, 0.25, 2.0, 2.0])
    assert w.raw.tolist() == pytest.approx([1.8, 0.25, 9.0, 2.0])
    assert w.outside.tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match="level sequence"):
        canonical({"agg": "product"})


def test_the_product_is_the_importance_weight_of_a_whole_sequence():
    """E_μ[w f] = E_π[f] over all sequences of two tokens, which no mean of ratios gives."""
    draw = torch.Generator().manual_seed(0)
    mu, pi, value = (torch.rand(3, 3, dtype=F64, generator=draw) for _ in range(3))
    mu, pi = mu / mu.sum(-1, keepdim=True), pi / pi.sum(-1, keepdim=True)
    pairs = [(a, b) for a in range(3) for b in range(3)]  # row 0: first token; row a: second token after a
    ratios = [[float(pi[0, a] / mu[0, a]), float(pi[a, b] / mu[a, b])] for a, b in pairs]
    chance = torch.stack([mu[0, a] * mu[a, b] for a, b in pairs])
    target = sum(pi[0, a] * pi[a, b] * value[a, b] for a, b in pairs)
    f = torch.stack([value[a, b] for a, b in pairs])
    product = weigh(ratios, {"preset": "seq_tis", "upper": 1e9}).weight
    assert float((chance * product * f).sum()) == pytest.approx(float(target))
    mean = weigh(ratios, {"level": "sequence", "upper": None}).weight
    assert abs(float((chance * mean * f).sum()) - float(target)) > 1e-3


def test_the_statistic_compared_with_the_bounds_may_be_mean_sum_or_max():
    ratios = [[2.0, 1.0, 1.0, 1.0]]
    for agg, outside in (("mean", False), ("sum", True), ("max", True)):
        w = weigh(ratios, {"level": "sequence", "agg": agg, "upper": 1.5})
        assert w.outside.tolist() == [outside]
    masked = weigh([[9.0, 1.0]], {"level": "sequence", "agg": "max", "upper": 1.5}, mask=[[False, True]])
    assert masked.outside.tolist() == [False]


def test_kl_metrics_are_in_their_own_unit():
    # r = ln 2: k1 = ln 2, k2 = ln²2/2 = 0.240, k3 = e^{−r} − 1 + r = 0.193.
    for metric, value in (("kl_k1", math.log(2)), ("kl_k2", math.log(2) ** 2 / 2), ("kl_k3", math.log(2) - 0.5)):
        for upper, outside in ((value + 1e-9, False), (value - 1e-9, True)):
            assert weigh([[2.0]], {"metric": metric, "upper": upper}).outside.tolist() == [[outside]]


def test_sequence_mask_drops_only_negative_advantages_that_drifted():
    drifted, near = [0.5] * 4, [0.99] * 4
    w = weigh([drifted, drifted, near], "sequence_mask", advantage=[-1.0, 1.0, -1.0])
    assert (w.weight == 0).tolist() == [True, False, False]
    delta = -math.log(CORRECTIONS["sequence_mask"]["lower"])
    assert delta == pytest.approx(0.05)


def test_a_sequence_ratio_takes_the_mean_of_token_weights_dropped_tokens_as_zero():
    logp = torch.zeros(1, 4, dtype=F64)
    behavior = -torch.tensor([[1.0, 1.0, 1.0, 9.0]], dtype=F64).log()
    out = loss("gspo", logp, logp, torch.ones(1), torch.ones(1, 4), behavior_logp=behavior, correction="mis")
    assert float(out.loss) == pytest.approx(-0.75)
    assert float(out.stats["correction"]) == pytest.approx(0.75)
    assert float(out.stats["correction_raw"]) == pytest.approx(3.0)


def test_dropped_tokens_are_not_in_the_ratio_of_their_sequence():
    """Log-ratios 1, 0, 0 and −3, whose token is dropped: log s = 1/3, and the loss counts three of four tokens."""
    logp = torch.tensor([[1.0, 0.0, 0.0, -3.0]], dtype=F64)
    old, behavior = torch.zeros(1, 4, dtype=F64), -torch.tensor([[1.0, 1.0, 1.0, 9.0]], dtype=F64).log()
    settings = {"behavior_logp": behavior, "correction": "mis", "clip_low": None, "clip_high": None}
    for aggregation, share in (("sequence_mean", 3 / 4), ("token_mean", 3 / 4), ("sequence_sum", 3.0)):
        out = loss("gspo", logp, old, torch.ones(1), None, aggregation=aggregation, **settings)
        assert float(out.loss) == pytest.approx(-math.exp(1 / 3) * share)
    # The advantage of the sequence is the mean over the same tokens: (1 + 2 + 3) / 3.
    out = loss("gspo", logp, old, torch.tensor([[1.0, 2.0, 3.0, 99.0]]), None, **settings)
    assert float(out.loss) == pytest.approx(-2 * math.exp(1 / 3) * 3 / 4)
    assert float(out.stats["log_s"]) == pytest.approx(1 / 3)


def test_a_kl_of_a_sequence_decides_for_it_and_its_tokens_keep_their_weights():
    form = {"level": "sequence", "metric": "kl_k2", "upper": 0.5}
    w = weigh([[2.0, 0.5, 1.0], [9.0, 9.0, 1.0]], form)
    assert w.weight.tolist() == [pytest.approx([2.0, 0.5, 1.0]), [0, 0, 0]]
    assert w.outside.tolist() == [[False] * 3, [True] * 3]
    logp = torch.zeros(1, 3, dtype=F64)
    behavior = -torch.tensor([[2.0, 0.5, 2.0]], dtype=F64).log()
    out = loss("gspo", logp, logp, torch.ones(1), None, behavior_logp=behavior, correction=form)
    assert float(out.loss) == pytest.approx(-1.5)  # the mean of 2, ½ and 2; their geometric mean is 1.26


def test_equal_policies_leave_the_loss_as_it_was():
    logp = -torch.rand(3, 5, dtype=F64)
    plain = loss("gspo", logp, logp - 1e-4, torch.ones(3), torch.ones(3, 5))
    for preset in CORRECTIONS:
        out = loss(
            "gspo", logp, logp - 1e-4, torch.ones(3), torch.ones(3, 5), behavior_logp=logp - 1e-4, correction=preset
        )
        torch.testing.assert_close(out.loss, plain.loss)


@pytest.mark.parametrize(
    ("form", "match"),
    [
        ("tiss", "unknown correction"),
        ({"upper": 2.0, "lowr": 0.5}, "no setting lowr"),
        ({"level": "word"}, "level must be one of"),
        ({"action": "clamp", "metric": "kl_k1"}, "use action mask"),
        ({"lower": 3.0, "upper": 2.0}, "is above upper"),
    ],
)
def test_bad_forms_are_refused(form, match):
    with pytest.raises((ValueError, TypeError), match=match):
        canonical(form)


def test_what_a_term_needs_is_asked_for_by_name():
    z = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="needs behavior_logp"):
        loss("gspo", z, z, torch.ones(1), torch.ones(1, 2), correction="tis")
    with pytest.raises(ValueError, match="needs reference_logp"):
        loss("gspo", z, z, torch.ones(1), torch.ones(1, 2), kl_coef=0.1)
    with pytest.raises(ValueError, match="pass max_new_tokens"):
        loss("dr_grpo", z, z, torch.ones(1), torch.ones(1, 2))


def test_effective_sample_size_is_one_for_equal_weights_and_one_over_n_for_one_heavy_one():
    assert effective_sample_size(torch.full((7,), 900.0)) == 1
    assert effective_sample_size(torch.tensor([0.0, -800, -800, -800])) == 0.25
    # (1 + 2)² / (2 · (1 + 4)) = 0.9
    assert effective_sample_size(torch.tensor([1.0, 2.0]).log()).item() == pytest.approx(0.9)


def test_entropy_of_a_coin_is_log_two_and_ruled_out_tokens_add_nothing():
    assert entropy(torch.tensor([1.0, 1.0, -torch.inf])).item() == pytest.approx(math.log(2))
    assert entropy(torch.tensor([5.0, -torch.inf])).item() == 0


def test_log_s_summary_by_hand():
    out = log_s_summary(torch.tensor([-0.02, 0.0, 0.01, 0.01, 0.0], dtype=F64))
    assert out["mean"].item() == pytest.approx(0.0, abs=1e-15)
    assert out["p50"] == 0
    assert out["max_abs"].item() == 0.02
    assert out["std"].item() == pytest.approx((6e-4 / 5) ** 0.5)
    assert log_s_summary(torch.zeros(0))["mean"].isnan()

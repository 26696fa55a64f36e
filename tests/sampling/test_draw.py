"""The draw and the processed distribution, on vocabularies from 5 to 150,000 tokens."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gspo import rng
from gspo.sampling.local.draw import draw, warp


def process(logits, **how):
    return torch.log_softmax(warp(logits, **how), dim=-1)


@pytest.mark.parametrize("vocab", [5, 64, 256, 1000, 150_001])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 0.9, 0), (1.3, 1.0, 4), (0.8, 0.5, 3)]
)
def test_the_processed_distribution_is_that_of_transformers_logits_warpers(vocab, temperature, top_p, top_k):
    logits = 3 * torch.randn(4, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(vocab))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = torch.log_softmax(warpers(torch.zeros(4, 1, dtype=torch.long), logits.clone()), dim=-1)
    got = process(logits, temperature=temperature, top_p=top_p, top_k=top_k)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_nucleus_wider_than_the_partial_sort_falls_back_to_the_full_one():
    logits = torch.zeros(2, 5000, dtype=torch.float64)
    logits += torch.linspace(0, 1e-3, 5000, dtype=torch.float64)
    kept = process(logits, top_p=0.9).isfinite().sum(dim=-1)
    assert ((kept > 4490) & (kept < 4510)).all()


@pytest.mark.parametrize("vocab", [3, 255, 257, 4096, 150_001])
def test_a_token_is_the_first_whose_cumulative_probability_exceeds_u(vocab):
    logp = process(2 * torch.randn(64, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    uniform = rng.uniform(3, "test", np.arange(64))
    token, chosen = draw(logp.clone(), torch.from_numpy(uniform))
    cumulative = np.cumsum(logp.exp().numpy(), axis=-1)
    expected = [np.searchsorted(c, u * c[-1], side="right") for c, u in zip(cumulative, uniform, strict=True)]
    assert token.tolist() == expected
    torch.testing.assert_close(chosen, logp.gather(-1, token[:, None])[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("vocab", [7, 300, 70_000])
def test_tokens_of_probability_zero_are_never_drawn_even_at_the_ends_of_the_interval(vocab):
    logits = torch.full((6, vocab), -torch.inf)
    allowed = [vocab // 3, vocab // 3 + 1, vocab - 2]
    logits[:, allowed] = torch.tensor([1.0, 0.3, -30.0])
    uniform = torch.tensor([0.0, 5e-324, 2**-53, 0.5, 1 - 2**-53, 1 - 2**-52], dtype=torch.float64)
    token, logp = draw(process(logits), uniform)
    assert set(token.tolist()) <= set(allowed)
    assert logp.isfinite().all()


def test_frequencies_match_the_distribution():
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -3.0, 0.5]])
    num, expected = 40_000, torch.softmax(logits[0].double() / 0.8, -1).numpy()
    uniform = torch.from_numpy(rng.uniform(7, "sample", np.arange(num), 0, 0, 0, 0))
    token, _ = draw(process(logits, temperature=0.8).repeat(num, 1), uniform)
    observed = np.bincount(token.numpy(), minlength=6)
    chi_square = (((observed - num * expected) ** 2) / (num * expected)).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in a thousand seeds


def test_the_log_prob_of_a_large_flat_vocabulary_is_exact_to_float32():
    logits = torch.rand(3, 150_000, generator=torch.Generator().manual_seed(0))
    token, logp = draw(process(logits), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    exact = torch.log_softmax(logits.double(), -1).gather(-1, token[:, None])[:, 0]
    torch.testing.assert_close(logp, exact, rtol=0, atol=2e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_bad_logit_makes_its_row_and_only_its_row_non_finite(bad, top_p):
    logits = torch.zeros(3, 2000)
    logits[1, 1234] = bad
    _, logp = draw(process(logits, top_p=top_p), torch.full((3,), 0.3, dtype=torch.float64))
    assert logp.isfinite().tolist() == [True, False, True]


def test_the_draw_does_not_depend_on_how_the_scores_lie_in_memory():
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(5))
    uniform = torch.from_numpy(rng.uniform(5, "test", np.arange(8)))
    token, logp = draw(logits.clone(), uniform)
    other_token, other_logp = draw(logits.t().contiguous().t(), uniform)
    assert token.tolist() == other_token.tolist()
    torch.testing.assert_close(logp, other_logp, rtol=0, atol=1e-6)

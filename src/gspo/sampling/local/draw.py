"""From logits to tokens: the processed distribution, one inverse-CDF draw per row, its log-prob, what ends a sample.

Shapes: N rows, T tokens of a row, V vocabulary. Everything is a function of (logits, settings, uniforms); there is no
state here.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from gspo.types import MAX_KEPT, SamplingParams

_BLOCK = 256  # tokens summed together in the first level of the draw
_NUCLEUS = 1024  # most likely tokens to look at before a full sort


def keep_top_k(logits_n_v: Tensor, k: int) -> Tensor:
    """−inf below the k-th largest logit of each row; ties with it stay."""
    if k >= logits_n_v.shape[-1]:
        return logits_n_v
    kth_n_1 = torch.topk(logits_n_v, k, dim=-1).values[:, -1:]  # [N, 1]
    return logits_n_v.masked_fill(logits_n_v < kth_n_1, -torch.inf)


def keep_min_p(logits_n_v: Tensor, p: float) -> Tensor:
    """−inf where a token is less than p times as likely as the most likely one."""
    return logits_n_v.masked_fill(logits_n_v < logits_n_v.amax(dim=-1, keepdim=True) + math.log(p), -torch.inf)


def keep_most(scores_n_v: Tensor, num: int) -> Tensor:
    """−inf outside the `num` most likely tokens; unlike `keep_top_k`, ties with the last one do not stay."""
    if num >= scores_n_v.shape[-1] or bool(((scores_n_v > -torch.inf).sum(dim=-1) <= num).all()):
        return scores_n_v
    top_n_k = torch.topk(scores_n_v, num, dim=-1)
    return torch.full_like(scores_n_v, -torch.inf).scatter_(-1, top_n_k.indices, top_n_k.values)


def kept_sets(scores_n_v: Tensor) -> list[NDArray[np.int32]]:
    """The ids of the tokens that can be drawn in each row, ascending."""
    kept_n_v = scores_n_v > -torch.inf
    ids = kept_n_v.nonzero()[:, 1].to(torch.int32).cpu().numpy()
    return np.split(ids, kept_n_v.sum(dim=-1).cumsum(0)[:-1].cpu().numpy())


def keep_top_p(logits_n_v: Tensor, p: float) -> Tensor:
    """−inf outside the nucleus: the most likely tokens, up to and including the one that brings their mass to p.

    A token stays if the mass of the more likely tokens is < p; ties with the last one stay as well.
    """
    num_vocab = logits_n_v.shape[-1]
    total_n_1 = torch.logsumexp(logits_n_v, dim=-1, keepdim=True)  # [N, 1]
    top = min(_NUCLEUS, num_vocab)
    # A nucleus is nearly always far smaller than the vocabulary, and a partial sort far cheaper than a full one.
    sorted_n_k = torch.topk(logits_n_v, top, dim=-1).values  # [N, top]
    before_n_k = _mass_before(sorted_n_k, total_n_1)
    # The candidates of some row have less mass than p: its nucleus may be larger, so that all tokens must be sorted.
    if top < num_vocab and bool((before_n_k[:, -1] < p).any()):
        sorted_n_k = torch.sort(logits_n_v, dim=-1, descending=True).values
        before_n_k = _mass_before(sorted_n_k, total_n_1)
    # Index of the last token inside the nucleus. At least the most likely token stays, also in a row of NaN.
    last_n_1 = (before_n_k < p).sum(dim=-1, keepdim=True).clamp_(min=1) - 1
    return logits_n_v.masked_fill(logits_n_v < sorted_n_k.gather(-1, last_n_1), -torch.inf)


def _mass_before(sorted_n_k: Tensor, total_n_1: Tensor) -> Tensor:
    # float64: the rounding errors of a float32 sum over a whole vocabulary could move the border of the nucleus.
    mass_n_k = (sorted_n_k - total_n_1).double().exp_()
    return mass_n_k.cumsum(dim=-1) - mass_n_k


def warp(
    logits_n_v: Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    forbidden: Tensor | None = None,
    max_kept: int | None = None,
) -> Tensor:
    """Logits of the distribution actually sampled, not normalised.

    In this order (vLLM's): forbidden tokens, temperature, min-p, top-k, top-p of what is left, `max_kept`.

    `forbidden` [N, V] bool is True where a token must not be drawn. float32, or float64 if the logits are. If
    no option is set, the result is the logits themselves.
    """
    x = logits_n_v if logits_n_v.dtype in (torch.float32, torch.float64) else logits_n_v.float()
    if forbidden is not None:
        x = x.masked_fill(forbidden, -torch.inf)
    if temperature != 1.0:
        x = x / temperature
    if min_p > 0:
        x = keep_min_p(x, min_p)
    if top_k > 0:
        x = keep_top_k(x, top_k)
    if top_p < 1.0:
        x = keep_top_p(x, top_p)
    return x if max_kept is None else keep_most(x, max_kept)


def draw(scores_n_v: Tensor, uniform_n: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens [N] and their log-probs [N] (float64); `uniform_n` in [0, 1); None takes the most likely token.

    `scores_n_v` need not be normalised and is overwritten: a copy of 32 rows of 49k tokens costs as much as a layer.
    The token is the first whose cumulative probability exceeds u. The search has two levels, blocks and then tokens
    of one block, with cumulative sums in float64, so that no token of probability zero is drawn for any vocabulary
    size. A row that holds NaN or +inf, or only −inf, has log-prob NaN.
    """
    num_vocab = scores_n_v.shape[-1]
    # argmax comes first: the scores are overwritten below.
    token_n_1 = scores_n_v.argmax(dim=-1, keepdim=True) if uniform_n is None else None
    # Subtracting the maximum keeps exp() from overflowing; the masses are not normalised.
    mass_n_v = scores_n_v.sub_(scores_n_v.amax(dim=-1, keepdim=True)).exp_()
    whole = num_vocab // _BLOCK * _BLOCK
    blocks_n_b = mass_n_v[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(dim=-1)  # [N, blocks]
    # The tokens that do not fill a block form a shorter last block.
    if whole < num_vocab:
        blocks_n_b = torch.cat([blocks_n_b, mass_n_v[:, whole:].sum(dim=-1, keepdim=True)], dim=-1)
    cumulative_n_b = blocks_n_b.double().cumsum(dim=-1)
    total_n_1 = cumulative_n_b[:, -1:]
    if token_n_1 is None:
        assert uniform_n is not None
        target_n_1 = uniform_n[:, None].to(total_n_1) * total_n_1  # [N, 1] the drawn point on the cumulative mass
        block_n_1 = _first_above(cumulative_n_b, target_n_1)
        index_n_k = block_n_1 * _BLOCK + torch.arange(min(_BLOCK, num_vocab), device=block_n_1.device)  # [N, block]
        inside_n_k = mass_n_v.gather(-1, index_n_k.clamp(max=num_vocab - 1)).double()
        # Indices past the end of the vocabulary were clamped to its last token: their mass must not count twice.
        inside_n_k.masked_fill_(index_n_k >= num_vocab, 0.0)
        # Read from the cumulative sums, not subtracted: the remainder is then ≥ 0, and a leading token of mass 0 is
        # never above it.
        below_n_1 = F.pad(cumulative_n_b, (1, 0)).gather(-1, block_n_1)
        token_n_1 = block_n_1 * _BLOCK + _first_above(inside_n_k.cumsum(dim=-1), target_n_1 - below_n_1)
    # Masses and their sum are each rounded once; a float32 log-softmax over 10⁵ tokens is off by up to 1e-5.
    logp_n_1 = mass_n_v.gather(-1, token_n_1).double().log() - total_n_1.log()
    return token_n_1[:, 0], logp_n_1[:, 0]


def _first_above(cumulative_n_k: Tensor, target_n_1: Tensor) -> Tensor:
    """Index of the first cumulative sum > target; at most that of the last entry with mass (u·total may round up)."""
    index_n_1 = (cumulative_n_k <= target_n_1).sum(dim=-1, keepdim=True)
    last_n_1 = (cumulative_n_k < cumulative_n_k[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(index_n_1, last_n_1)


@dataclass(slots=True)
class SamplingRule:
    """One set of sampling parameters, and values derived from it."""

    params: SamplingParams
    temperature: float
    ends_v: NDArray[np.bool_]  # [V] tokens that end a sample

    def scores(self, logits_n_v: Tensor, count_n: NDArray[np.int64]) -> Tensor:
        """The processed distribution, [N, V], of rows that have `count_n` tokens."""
        forbidden = None
        if (count_n < self.params.min_new_tokens).any():
            forbidden = torch.from_numpy((count_n < self.params.min_new_tokens)[:, None] & self.ends_v)  # [N, V]
            forbidden = forbidden.to(logits_n_v.device)
        return warp(
            logits_n_v,
            temperature=self.temperature,
            top_p=self.params.top_p,
            top_k=self.params.top_k,
            min_p=self.params.min_p,
            forbidden=forbidden,
            max_kept=MAX_KEPT if self.params.record_kept else None,
        )


def rule_of(params: SamplingParams, num_vocab: int, eos: Collection[int]) -> SamplingRule:
    ends = np.zeros(num_vocab, dtype=np.bool_)
    ids = [*params.stop_token_ids, *(() if params.ignore_eos else eos)]
    ends[[i for i in ids if 0 <= i < num_vocab]] = True
    # Greedy sampling allows temperature 0, but `warp` divides by it. The log-prob is then that of temperature 1.
    temperature = 1.0 if params.greedy and params.temperature <= 0 else params.temperature
    return SamplingRule(params, temperature, ends)

"""Batches for the tests of objectives: uneven lengths, masked spans, padded and packed forms of the same data."""

import torch


def uneven(lengths, seed=0, drift=0.05, dtype=torch.float64):
    """Padded logp, proximal_logp, advantage [B], mask, with drift between the policies."""
    g = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max([*lengths, 1])
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)
    proximal = -2 * torch.rand(rows, width, generator=g, dtype=dtype)
    logp = proximal + drift * torch.randn(rows, width, generator=g, dtype=dtype)
    advantage = torch.randn(rows, generator=g, dtype=dtype)
    return logp, proximal, advantage, mask


def pack(mask_of_length, *tensors):
    """Padded tensors as packed ones, by the (contiguous) lengths of a mask."""
    lengths = mask_of_length.sum(-1)
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return cu_seqlens, *(t[mask_of_length] for t in tensors)


def grad(scalar, leaf):
    return torch.autograd.grad(scalar, leaf)[0]

"""The checks of `gspo doctor --selftest`: each returns the measured difference and its bound.

Gradients of the packed computation are compared with plain padded rows, packings with each other, the sampler with the
trainer at a temperature other than 1, and a model that loaded published weights with the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo import objectives, rng
from gspo.config.schema import Config
from gspo.doctor.probe import sample_all, trainer_logp
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import Completion, PackItem
from gspo.learner.policy.splitting import micro_batches
from gspo.sampling.api import Sampler
from gspo.sampling.weights import load, probe
from gspo.sampling.weights.publish import publish
from gspo.train.build.sampler import weights_for
from gspo.types import Request, SampleId, SamplingParams

TEMPERATURE = 0.7  # not 1: a sampler that ignores the temperature must fail
# Bounds by dtype: ‖a − b‖ / ‖b‖ of two correct gradients, and |a − b| of two correct log-probs. Models compute norms
# and rotary embeddings in float32 whatever their dtype, so float64 results can differ by float32 rounding.
GRADIENT = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
PACKED = {torch.float64: 1e-6, torch.float32: 5e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
COPIED_PARAMETERS = 2e9  # a larger model is not loaded a second time


def made_items(num_vocab: int) -> list[PackItem]:
    """Groups of random tokens of uneven lengths: a one-token completion, tool tokens in the middle, a group of one."""
    draw, items, index = rng.generator(0, "selftest"), [], 0
    for num_prompt, lengths in ((11, (6, 1, 9)), (4, (7, 3)), (6, (5,))):
        completions = []
        for num in lengths:
            mask = np.ones(num, dtype=np.bool_)
            mask[2 : 4 if num > 6 else 2] = False
            completions.append(Completion(draw.integers(0, num_vocab, num), mask, index))
            index += 1
        items.append(PackItem(draw.integers(0, num_vocab, num_prompt), tuple(completions)))
    return items


def gradients(policy: PolicyModule) -> tuple[float, float]:
    """‖∇ packed − ∇ padded‖ / ‖∇ padded‖ of GSPO's loss with some sequences clipped, and its bound."""
    items = made_items(policy.model.config.get_text_config().vocab_size)
    device, dtype = policy.model.device, policy.model.dtype
    num = sum(len(item.completions) for item in items)
    # [num]: negative and positive advantages, so that both clip bounds are used.
    advantage = torch.linspace(-1.0, 1.0, num, dtype=torch.float64).to(device)
    settings: dict[str, Any] = {"clip_low": 0.05, "clip_high": 0.05, "denominator": float(num)}

    def moved(index: Tensor) -> Tensor:  # log π_old − log π per sequence: inside the clip range, and outside
        return 0.08 * torch.sin(1.0 + index.to(torch.float64))

    def loss_of(logp: Tensor, index: Tensor, old: Tensor, **layout: Tensor) -> Tensor:
        # log π_old with a fixed distance to log π, because one forward pass has no earlier policy.
        held = logp.detach() + old.to(logp.dtype)
        by = advantage[index].to(logp.dtype)
        made = objectives.loss("gspo", logp, held, by, layout.pop("mask", None), **layout, **settings)
        return made.loss

    # The packed form, as in training: logp is [all completion tokens].
    packed = policy.pack(items)
    logp = policy(packed, temperature=TEMPERATURE).logp
    per_token = moved(packed.index).repeat_interleave(packed.cu_seqlens.diff())
    got = _gradient(policy, loss_of(logp, packed.index, per_token, cu_seqlens=packed.cu_seqlens))
    # The reference: plain, mask [B, T]; index [B].
    plain, mask, index = padded_logp(policy, items)
    want = _gradient(policy, loss_of(plain, index, moved(index)[:, None].expand_as(plain), mask=mask))
    gap = sum(float((a - b).double().square().sum()) for a, b in zip(got, want, strict=True))
    size = sum(float(b.double().square().sum()) for b in want)
    return (gap / size) ** 0.5 if size else float("nan"), GRADIENT.get(dtype, 0.1)


def _gradient(policy: PolicyModule, loss: Tensor) -> list[Tensor]:
    parameters = [p for p in policy.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def padded_logp(policy: PolicyModule, items: Sequence[PackItem]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of completion tokens by the model itself on right-padded rows, [B, T]; mask; sequence numbers, [B]."""
    rows = [(item.prompt, completion) for item in items for completion in item.completions]
    width, longest = max(len(p) + len(c.tokens) for p, c in rows), max(len(c.tokens) for _, c in rows)
    # ids, attention: [B, width]; source, mask: [B, longest completion].
    ids, attention = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(2))
    source, mask = np.zeros((len(rows), longest), dtype=np.int64), np.zeros((len(rows), longest), dtype=np.bool_)
    for b, (prompt, completion) in enumerate(rows):
        begin, num = len(prompt), len(completion.tokens)
        ids[b, : begin + num] = np.concatenate([prompt, completion.tokens])
        attention[b, : begin + num] = 1
        # The logits at position t predict token t + 1, so completions start at the last prompt position.
        source[b, :num] = np.arange(begin - 1, begin + num - 1)
        mask[b, :num] = completion.mask
    device = policy.model.device
    ids_t, at = torch.from_numpy(ids).to(device), torch.from_numpy(source).to(device)
    logits = policy.model(
        input_ids=ids_t, attention_mask=torch.from_numpy(attention).to(device), use_cache=False
    ).logits
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    # [B, width, V] → [B, longest, V]: only positions that predict a completion token.
    logits = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1])).to(wide)
    # [B, longest]: the log-prob of the token that follows each position.
    logp = (logits / TEMPERATURE).log_softmax(-1).gather(2, ids_t.gather(1, at + 1)[..., None])[..., 0]
    index = torch.tensor([completion.index for _, completion in rows], device=device)
    return logp, torch.from_numpy(mask).to(device), index


@torch.no_grad()
def packings(policy: PolicyModule) -> tuple[float, float]:
    """Largest |Δ log-prob| of a token between one pack, split ones, another order, and the padded rows."""
    items = made_items(policy.model.config.get_text_config().vocab_size)
    plain, mask, index = padded_logp(policy, items)
    want = {int(i): row[m] for i, row, m in zip(index, plain, mask, strict=True)}
    gap, layout = 0.0, policy.layout
    for order in (items, items[::-1]):
        for parts in ([order], micro_batches(order, 12, layout=layout), [[item] for item in order]):
            for part in parts:
                packed = policy.pack(part)
                logp = policy(packed, temperature=TEMPERATURE, with_entropy=False).logp
                for b, i in enumerate(packed.index.tolist()):
                    low, high = packed.cu_seqlens[b : b + 2].tolist()
                    gap = max(gap, float((logp[low:high] - want[i]).abs().max()))
    return gap, PACKED.get(policy.model.dtype, 0.15)


def with_sampler(sampler: Sampler, work: Callable[[Sampler], tuple[float, float]]) -> tuple[float, float]:
    try:
        return work(sampler)
    finally:
        sampler.close()


def requests_of(num_vocab: int, first: int = 0) -> list[Request]:
    """Prompts of several lengths, each sampled several times, at a temperature other than 1."""
    params = SamplingParams(max_new_tokens=24, temperature=TEMPERATURE)
    draw = rng.generator(first, "selftest prompts")
    prompts = [tuple(draw.integers(0, num_vocab, num).tolist()) for num in (3, 8, 17)]
    return [Request(SampleId(first + i, j), prompt, params) for i, prompt in enumerate(prompts) for j in range(4)]


def parity(policy: PolicyModule, sampler: Sampler, dtype: torch.dtype, first: int = 0) -> tuple[float, float]:
    """Largest |log μ − log π| of a sampled token, with log π computed as in a training step."""
    requests = requests_of(policy.model.config.get_text_config().vocab_size, first)
    samples = sample_all(sampler, requests, 120.0)
    ours = trainer_logp(policy, requests, samples, temperature=TEMPERATURE)
    gaps = [float(np.abs(a - s.behavior_logp).max()) for a, s in zip(ours, samples, strict=True) if len(a)]
    return max(gaps), probe.TOLERANCE.get(dtype, 0.2)


def change(policy: PolicyModule) -> None:
    """Change the weights so much that the probe must notice it."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
                if not parameter.any():  # LoRA's B starts at zero
                    parameter.fill_(0.01)


def probed(policy: PolicyModule) -> list[np.ndarray]:
    return probe.sequence_logp(policy.model, _probe(policy))


def copied(policy: PolicyModule, make: Callable[[], Any], place: Path) -> tuple[float, float] | str:
    """Largest |Δ log-prob| of the probe between the policy and a model that loaded its published weights."""
    if (num := num_parameters(policy)) > COPIED_PARAMETERS:
        return f"a model of {num:.1e} parameters is too large to load twice"
    other, dtype = make(), policy.model.dtype
    # Without a change, weights that were never loaded would also pass the comparison.
    change(policy)
    _must_differ(probe.sequence_logp(other, _probe(policy)), probed(policy), dtype)
    published = publish(place / "weights", 1, policy.full_weights())
    try:
        load.copy_weights(other, load.read_published(published.path, published.sha256).items())
    finally:
        published.path.unlink()
    gap = np.concatenate(probe.sequence_logp(other, _probe(policy))) - np.concatenate(probed(policy))
    return float(np.abs(gap).max()), probe.TOLERANCE.get(dtype, 0.2)


def _probe(policy: PolicyModule) -> list[list[int]]:
    return probe.probe_sequences(policy.model.config.get_text_config().vocab_size)


def _must_differ(before: list[np.ndarray], after: list[np.ndarray], dtype: torch.dtype) -> None:
    if probe.mismatch(before, after, dtype) is None:
        raise ValueError(
            "the probe gives the same log-probs for changed weights, so it cannot detect a failed weight sync"
        )


def served(config: Config, policy: PolicyModule, sampler: Sampler, dtype: torch.dtype) -> tuple[float, float]:
    """Parity with a server before and after new weights; the server must show by the probe that it loaded them."""
    before = probed(policy)
    first, bound = parity(policy, sampler, dtype)
    change(policy)
    _must_differ(before, probed(policy), dtype)
    sampler.load_weights(1, weights_for(config, sampler, policy))  # raises WeightSyncError if its probe differs
    second, _ = parity(policy, sampler, dtype, first=8)
    return max(first, second), bound


def num_parameters(policy: PolicyModule) -> int:
    return sum(p.numel() for p in policy.parameters())

"""Rollout batches made by hand: groups of samples with chosen rewards, lengths and untrained spans."""

import model_zoo
import numpy as np
import torch

from gspo.learner import Shaping, batch_with_advantages
from gspo.types import Failure, Group, Prompt, Request, Sample, SampleId, Score

FAILED = Failure("crash", "made to fail")


def make_sample(submission, number, tokens, *, mask=None, finish="stop", logp=None, version=0):
    logp = np.full(len(tokens), -1.0) if logp is None else logp
    return Sample.of(SampleId(submission, number), tokens, logp, version, finish, mask)


def make_group(submission, rewards, lengths=None, *, holes=None, prompt=(1, 2, 3), finish="stop", seed=0):
    """rewards: a number, or FAILED; holes: sample number → slice of untrained tokens."""
    draw = np.random.default_rng([seed, submission])
    samples = []
    for number, length in enumerate(lengths or [2] * len(rewards)):
        mask = np.ones(length, bool)
        if number in (holes or {}):
            mask[holes[number]] = False
        tokens = draw.integers(0, model_zoo.VOCAB, length)
        samples.append(make_sample(submission, number, tokens, mask=mask, finish=finish))
    outcomes = tuple(r if isinstance(r, Failure) else Score(float(r), {"part": float(r)}) for r in rewards)
    return Group(submission, Prompt(tuple(prompt), "?"), tuple(samples), ("",) * len(samples), outcomes)


def sampled_groups(sampler, prompts, params, reward):
    """Four samples of every prompt, sampled as a run would; `reward` is a function of (group, number)."""
    for g, prompt in enumerate(prompts):
        sampler.submit([Request(SampleId(g, i), prompt.tokens, params, origin=prompt) for i in range(4)])
    got = {sample.id: sample for sample in sampler.completed()}
    samples = [tuple(got[SampleId(g, i)] for i in range(4)) for g in range(len(prompts))]
    scores = [tuple(Score(float(reward(g, i))) for i in range(4)) for g in range(len(prompts))]
    return [Group(g, prompt, samples[g], ("",) * 4, scores[g]) for g, prompt in enumerate(prompts)]


def make_batch(groups, num_minibatches=1, *, norm="group_std", shaping=None, **settings):
    return batch_with_advantages(
        groups, norm=norm, shaping=shaping or Shaping(), num_minibatches=num_minibatches, **settings
    )


def uneven_groups():
    """Six groups: one-token completions, a tool span inside, an untrained head, a completion without a trained token,
    a failed reward, a group of equal rewards, a group of one scored sample."""
    draw = np.random.default_rng(7)

    def prompt(num):
        return tuple(draw.integers(0, model_zoo.VOCAB, num).tolist())

    return [
        make_group(0, [1, 0, 0, 1], [6, 1, 9, 8], holes={2: slice(3, 6), 3: slice(5, 8)}, prompt=prompt(7)),
        make_group(1, [0, 0.5], [2, 5], holes={1: slice(0, 2)}, prompt=prompt(3)),
        make_group(2, [1, 1, 1], [4, 6, 1], prompt=prompt(11)),  # teaches nothing
        make_group(3, [FAILED, 0, 1, 0.25], [7, 3, 2, 5], prompt=prompt(5)),
        make_group(4, [FAILED, 2], [3, 2], prompt=prompt(4)),  # one scored sample has nobody to compare with
        make_group(5, [0, 1, 0.5], [3, 2, 4], holes={1: slice(0, 2)}, prompt=prompt(2)),  # sample 1: nothing trained
    ]


def padded(batch, which):
    """The chosen sequences as right-padded rows: (ids, attention) [B, P + T], and (source, mask) [B, T]."""
    rows = [(batch.groups[batch.group_of[i]].prompt.tokens, batch.samples[i]) for i in np.flatnonzero(which)]
    width = max(len(p) + len(s.tokens) for p, s in rows)
    longest = max(len(s.tokens) for _, s in rows)
    ids, attention = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    source, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.bool)
    for b, (prompt, sample) in enumerate(rows):
        num = len(sample.tokens)
        ids[b, : len(prompt) + num] = torch.tensor([*prompt, *sample.tokens.tolist()])
        attention[b, : len(prompt) + num] = 1
        source[b, :num] = torch.arange(len(prompt) - 1, len(prompt) + num - 1)
        mask[b, :num] = torch.from_numpy(sample.mask)
    return ids, attention, source, mask


def plain_logp(model, batch, which, temperature=1.0):
    """Log-probs of completion tokens by the model itself on padded rows, [B, T], and the mask."""
    ids, attention, source, mask = padded(batch, which)
    logp = (model(input_ids=ids, attention_mask=attention, use_cache=False).logits / temperature).log_softmax(-1)
    target = ids.gather(1, source + 1)
    at = logp.gather(1, source[..., None].expand(-1, -1, logp.shape[-1]))
    return at.gather(2, target[..., None])[..., 0], mask


def with_behavior(groups, model, temperature=1.0):
    """The same groups with the log-probs that `model` gives their tokens, as a sampler would have recorded them."""
    batch = make_batch(groups)
    with torch.no_grad():
        logp, _ = plain_logp(model, batch, np.ones(batch.num_sequences, bool), temperature)
    out, i = [], 0
    for group in groups:
        samples = []
        for sample in group.samples:
            recorded = logp[i, : len(sample.tokens)].numpy()
            again = make_sample(*sample.id[:2], sample.tokens, mask=sample.mask, finish=sample.finish, logp=recorded)
            samples.append(again)
            i += 1
        out.append(Group(group.submission, group.prompt, tuple(samples), group.texts, group.outcomes))
    return out

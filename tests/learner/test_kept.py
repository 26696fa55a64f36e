"""Truncated sampling: log-probs, gradients and metrics over the tokens that top-p, top-k and min-p keep."""

from dataclasses import replace

import model_zoo
import numpy as np
import pytest
import torch
from made_batches import make_batch, make_group, with_behavior
from made_steps import make_plan, run
from padded_rows import UNEVEN, assert_same_gradients, by_index, gradients

from gspo.doctor import trainer_logp
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import PackItem, pack
from gspo.learner.reference import Reference, reference_logp
from gspo.sampling import LocalSampler
from gspo.types import Extras, Kept, Request, SampleId, SamplingParams


def with_kept(items, seed=0):
    """The same items; each trained token has a random kept set that holds it, every fifth the whole vocabulary."""
    draw, out = np.random.default_rng(seed), []
    for item in items:
        completions = []
        for c in item.completions:
            sets = []
            for number, token in enumerate(c.tokens[c.mask]):
                others = draw.choice(model_zoo.VOCAB, draw.integers(0, 9), replace=False)
                sets.append([] if number % 5 == 4 else np.union1d(others, [token]))
            completions.append(replace(c, kept=Kept.of(sets)))
        out.append(PackItem(item.prompt, tuple(completions)))
    return out


def plain(model, items, temperature):
    """Log-probs and entropies over the kept sets by masked log-softmax, one sequence per call."""
    logp_of, entropy_of = {}, {}
    for item in items:
        for c in item.completions:
            ids = torch.from_numpy(np.concatenate([item.prompt, c.tokens]))
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(item.prompt) - 1 : -1] / temperature
            logits = logits[torch.from_numpy(c.mask)]  # [trained, V]
            outside = torch.ones_like(logits, dtype=torch.bool)
            for row, kept in enumerate(c.kept.sets()):
                outside[row, torch.from_numpy(kept).long() if len(kept) else slice(None)] = False
            logp = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
            logp_of[c.index] = logp.gather(1, ids[len(item.prompt) :][torch.from_numpy(c.mask)][:, None])[:, 0]
            entropy_of[c.index] = -(logp.exp() * logp.masked_fill(outside, 0.0)).sum(-1)
    return logp_of, entropy_of


@pytest.mark.parametrize(("name", "chunk_size", "layout"), [("llama", 5, "shared"), ("gemma2", 64, "packed")])
def test_log_probs_entropies_and_gradients_are_those_of_a_masked_log_softmax(name, chunk_size, layout, exact):
    model = model_zoo.build(name)
    policy, items = PolicyModule(model, chunk_size=chunk_size), with_kept(UNEVEN)
    policy.layout = layout
    packed = policy.pack(items)
    weight = torch.linspace(-1, 2, packed.num_targets, dtype=torch.float64)
    want_logp, want_entropy = (torch.cat([of[i] for i in packed.index.tolist()]) for of in plain(model, items, 0.7))
    (want_logp * weight + want_entropy * weight.flip(0)).sum().backward()
    want = gradients(model)
    model.zero_grad()
    out = policy(packed, temperature=0.7, entropy_grad=True)
    (out.logp * weight + out.entropy * weight.flip(0)).sum().backward()
    torch.testing.assert_close(out.logp, want_logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.entropy, want_entropy, rtol=0, atol=1e-12)
    assert_same_gradients(gradients(model), want)
    # The sets matter: over the whole vocabulary the log-probs are others.
    whole = policy(policy.pack(UNEVEN), temperature=0.7).logp
    assert float((whole - out.logp).detach().abs().max()) > 0.1


def test_a_kept_set_of_the_whole_vocabulary_changes_nothing(exact):
    policy = PolicyModule(model_zoo.build("llama"))
    whole = [
        PackItem(
            item.prompt,
            tuple(replace(c, kept=Kept.of([range(model_zoo.VOCAB)] * int(c.mask.sum()))) for c in item.completions),
        )
        for item in UNEVEN
    ]
    out, same = policy(pack(whole), temperature=1.3), policy(pack(UNEVEN), temperature=1.3)
    torch.testing.assert_close(out.logp, same.logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.entropy, same.entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(out.kept_mass, torch.ones_like(out.logp), rtol=0, atol=1e-12)


CUTS = [
    {"top_p": 0.9}, {"top_p": 0.5, "temperature": 0.6}, {"top_k": 5, "temperature": 1.4}, {"min_p": 0.1},
    {"top_p": 0.8, "top_k": 9, "min_p": 0.02, "temperature": 0.9}, {"top_p": 0.95, "min_new_tokens": 5},
]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_at_equal_weights_log_s_is_0_to_rounding_however_sampling_is_truncated(cut):
    model = model_zoo.build("llama", initializer_range=0.3).float()
    params = SamplingParams(16, record_kept=True, **cut)
    prompts = [(1, 2, 3), (5, 6, 7, 8, 9)]
    requests = [Request(SampleId(g, i), prompt, params) for g, prompt in enumerate(prompts) for i in range(4)]
    engine = LocalSampler(model, seed=1, eos_token_ids=[0], verify=False)
    engine.submit(requests)
    by_id = {sample.id: sample for sample in engine.completed()}
    samples = [by_id[request.id] for request in requests]
    assert all(token in ids for s in samples for token, ids in zip(s.tokens, s.extras.kept.sets(), strict=True))
    assert 1 < np.mean(np.concatenate([s.extras.kept.counts for s in samples])) < 0.8 * model_zoo.VOCAB
    ours = trainer_logp(PolicyModule(model), requests, samples, temperature=params.temperature)
    log_s = [float(np.mean(a - s.behavior_logp)) for a, s in zip(ours, samples, strict=True)]
    assert np.abs(log_s).max() <= 1e-6
    # Without the sets, log s is far from 0.
    bare = trainer_logp(
        PolicyModule(model), requests, [replace(s, extras=Extras()) for s in samples], temperature=params.temperature
    )
    assert np.abs([np.mean(a - s.behavior_logp) for a, s in zip(bare, samples, strict=True)]).max() > 0.01


def kept_groups(model, temperature=0.8):
    """Groups whose behavior log-probs are the model's over random kept sets."""
    groups = [make_group(0, [1, 0, 0, 1], [6, 1, 9, 8], holes={2: slice(3, 6)}), make_group(1, [0, 0.5], [2, 5])]
    draw, out = np.random.default_rng(3), []
    for group in with_behavior(groups, model, temperature):
        sets = [
            Kept.of([np.union1d(draw.integers(0, model_zoo.VOCAB, 6), [t]) for t in s.tokens]) for s in group.samples
        ]
        out.append(
            replace(
                group,
                samples=tuple(replace(s, extras=Extras(kept=k)) for s, k in zip(group.samples, sets, strict=True)),
            )
        )
    return out


def test_the_old_policy_the_reference_and_the_metrics_are_over_the_kept_tokens_in_every_update(exact):
    model = model_zoo.build("llama")
    batch = make_batch(kept_groups(model), num_minibatches=2)
    want, _ = plain(model, batch.items(batch.trainable), 0.8)
    reference = Reference(PolicyModule(model), temperature=0.8, max_tokens=64)
    for i, logp in reference_logp(reference, batch).items():
        np.testing.assert_allclose(logp, want[i].detach().numpy(), atol=1e-12)
    report = run(model, batch, make_plan(num_minibatches=2), proximal="recompute", lr=1e-6)
    entered = np.isfinite(report.log_s)
    # The noise shows that both sources of π_old are over the kept tokens: log μ was recorded without them.
    for i in np.flatnonzero(entered):
        sample = batch.samples[i]
        gap = want[i].detach().numpy() - sample.behavior_logp[sample.mask]
        assert report.noise_log_s[i] == pytest.approx(gap.mean(), abs=1e-6)
    assert np.abs(report.log_s[entered]).max() < 1e-3  # a ratio of two distributions over one set
    assert ((report.kept_mass[entered] > 0) & (report.kept_mass[entered] < 1)).all()
    first = entered & (batch.minibatch == 0)
    assert (report.kept_mass_at_start[first] == report.kept_mass[first]).all()
    assert np.isnan(report.kept_mass_at_start[batch.minibatch == 1]).all()


def test_two_targets_of_one_source_may_have_different_kept_sets(exact):
    """Tokens of one prompt that two weight versions sampled."""
    model = model_zoo.build("llama")
    items = with_kept(UNEVEN[:1], seed=5)
    packed = pack(items)
    first = [int(c.kept.counts[0]) for c in items[0].completions]
    assert len(set(first)) > 1
    got, want = by_index(packed, PolicyModule(model)(packed).logp), plain(model, items, 1.0)[0]
    for i in want:
        torch.testing.assert_close(got[i], want[i], rtol=0, atol=1e-12)

import copy
from dataclasses import replace

import model_zoo
import numpy as np
import pytest
import torch
from made_batches import make_batch, make_group, padded, plain_logp, uneven_groups, with_behavior
from made_steps import assert_same_weights, descend, sgd

from gspo.learner.credit import Credit, with_token_advantages
from gspo.learner.critic import Critic, ValueModule, critic_metrics, token_values, train_critic
from gspo.learner.policy.module import PolicyModule
from gspo.learner.step import Plan, train_step

EPS = 0.01


def make_critic(model, *, num_minibatches=1, max_tokens=8192, drawn=True, **changes):
    """A critic on `model`; `drawn`: with a head that is not 0, so that the trunk has a gradient."""
    module = ValueModule(PolicyModule(model))
    if drawn:
        torch.nn.init.normal_(module.head.weight, std=0.1, generator=torch.Generator().manual_seed(5))
        torch.nn.init.constant_(module.head.bias, 0.3)
    return Critic(module, sgd(module), num_minibatches, max_tokens, eps_clip=EPS, **changes)


def plain_values(module, batch, which):
    """V on padded rows by the trunk itself, [B, T], and the mask."""
    ids, attention, source, mask = padded(batch, which)
    trunk = module.policy.model.base_model
    hidden = trunk(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
    at = hidden.gather(1, source[..., None].expand(-1, -1, hidden.shape[-1]))
    return at @ module.head.weight[0] + module.head.bias, mask


def credited(critic, groups=None, how=None):
    batch = make_batch(groups or uneven_groups(), norm="gae")
    return with_token_advantages(
        replace(batch, values=token_values(critic, batch)), how or Credit(discount=0.9, gae_lambda=0.8)
    )


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("max_tokens", [1, 25, 8192])
def test_values_are_those_of_the_plain_padded_trunk(name, max_tokens, exact):
    critic = make_critic(model_zoo.build(name), max_tokens=max_tokens)
    batch = make_batch(uneven_groups())
    got = token_values(critic, batch)
    with torch.no_grad():
        want, mask = plain_values(critic.module, batch, np.ones(batch.num_sequences, bool))
    assert got.keys() == set(np.flatnonzero(batch.trainable))
    for i, values in got.items():
        np.testing.assert_allclose(values, want[i][mask[i]].numpy(), atol=1e-10)
    assert got[0][0] == pytest.approx(got[1][0], abs=1e-12)  # the same prompt, the same value before the first token
    assert abs(got[0][0] - got[0][1]) > 1e-4


def test_a_new_critic_says_0_and_its_head_is_the_only_language_model_head_it_has():
    model = model_zoo.build("llama_tied")
    embeddings = model.get_input_embeddings().weight.detach().clone()
    critic = make_critic(model, drawn=False)
    assert all(not v.any() for v in token_values(critic, make_batch(uneven_groups())).values())
    shapes = {name: tuple(p.shape) for name, p in critic.module.named_parameters()}
    assert shapes["policy.model.lm_head.weight"] == (1, 32)
    assert [n for n, s in shapes.items() if s == tuple(embeddings.shape)] == ["policy.model.model.embed_tokens.weight"]
    train_critic(critic, credited(critic), [1.0])
    assert critic.module.head.weight.abs().max() > 0
    torch.testing.assert_close(model.get_input_embeddings().weight, embeddings)  # a head of 0 has no gradient below it


@pytest.mark.parametrize("max_tokens", [1, 25, 8192])
def test_the_critics_updates_are_the_plain_padded_ones(max_tokens, exact):
    """Three mini-batches: ½ max( (V − R)², (V_0 + clip(V − V_0) − R)² ), mean over the mini-batch's tokens."""
    packed = make_critic(model_zoo.build("qwen3"), num_minibatches=3, max_tokens=max_tokens)
    plain = copy.deepcopy(packed.module)
    batch = credited(packed)
    rates = [0.01, 0.02, 0.01]
    report = train_critic(packed, batch, rates)
    num_clipped = 0
    for k, lr in enumerate(rates):
        which = batch.trainable & (batch.group_of // 2 == k)
        values, mask = plain_values(plain, batch, which)
        at = np.flatnonzero(which)
        start, target = (torch.from_numpy(np.concatenate([x[i] for i in at])) for x in (batch.values, batch.returns))
        v = values[mask]
        near = start + (v - start).clamp(-EPS, EPS)
        loss = 0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2).mean()
        num_clipped += int(((near - target).abs() > (v - target).abs()).sum())
        plain.zero_grad()
        loss.backward()
        assert report.losses[k] == pytest.approx(float(loss.detach()), abs=1e-10)
        descend(plain, lr)
    assert_same_weights(packed.module, plain, atol=1e-9)
    assert report.num_clipped == num_clipped > 0
    assert report.num_tokens == batch.trained_tokens[batch.trainable].sum()
    assert report.applied == [True] * 3


def test_updates_bring_values_nearer_to_returns_and_the_metrics_say_so():
    critic = make_critic(model_zoo.build("qwen3"), drawn=False)
    groups = [make_group(i, [i % 2] * 3, [4, 3, 5], prompt=(1 + i, 7)) for i in range(4)]
    rows = []
    for _ in range(60):
        batch = credited(critic, groups, Credit())
        rows.append(critic_metrics(batch, train_critic(critic, batch, [0.02]), 0.02))
    assert rows[0]["critic/explained_variance"] == 0  # it says 0 everywhere
    assert rows[-1]["critic/explained_variance"] > 0.8
    assert rows[-1]["critic/loss"] < rows[0]["critic/loss"] / 4
    assert (rows[0]["critic/value_mean"], rows[0]["critic/return_mean"]) == (0, 0.5)


def test_a_nan_in_the_critic_touches_nothing_and_is_reported():
    critic = make_critic(model_zoo.build("qwen3"))
    batch = credited(critic)
    before = copy.deepcopy(critic.module.state_dict())
    broken = replace(batch, returns={**batch.returns, 0: np.full_like(batch.returns[0], np.nan)})
    report = train_critic(critic, broken, [0.1])
    assert report.applied == [False]
    assert all(torch.equal(before[n], t) for n, t in critic.module.state_dict().items())


# The policy's side: an advantage per token


def make_plan(level="token", aggregation="token_mean", **changes):
    settings = {"level": level, "aggregation": aggregation, "clip_low": 0.02, "clip_high": 0.03}
    return replace(Plan("ppo", settings, 1, 0.8, 8192, max_norm=0.0, max_new_tokens=11), **changes)


def stepped(model, batch, plan, proximal="recompute"):
    trained = copy.deepcopy(model)
    policy = PolicyModule(trained)
    rates = [0.05] * plan.num_minibatches
    report = train_step(policy, sgd(policy), batch, plan, proximal=proximal, learning_rates=rates)
    return {n: p.detach() for n, p in trained.named_parameters()}, report


def ppo_batch(model):
    groups = with_behavior(uneven_groups(), model, 0.8)
    critic = make_critic(model_zoo.build("llama"))
    return credited(critic, groups)


@pytest.mark.parametrize("max_tokens", [1, 30, 8192])
def test_the_ppo_update_is_the_plain_padded_one(max_tokens, exact):
    """−(1/Σ|y|) Σ_it w_it A_it at w = 1: the plain policy gradient with GAE, in float64."""
    model = model_zoo.build("qwen3")
    batch = ppo_batch(model)
    got, report = stepped(model, batch, make_plan(max_tokens=max_tokens))
    plain = copy.deepcopy(model)
    logp, mask = plain_logp(plain, batch, batch.trainable, 0.8)
    at = np.flatnonzero(batch.trainable)
    advantage = torch.from_numpy(np.concatenate([batch.token_advantages[i] for i in at]))
    assert max(np.ptp(batch.token_advantages[i]) for i in at) > 0.1  # they do differ inside a sequence
    d = (logp - logp.detach())[mask]
    (-(d.exp() * advantage).sum() / batch.trained_tokens[batch.in_denominator].sum()).backward()
    descend(plain, 0.05)
    for name, want in plain.named_parameters():
        torch.testing.assert_close(got[name], want.detach(), rtol=0, atol=1e-10, msg=name)
    assert np.isfinite(report.log_s).sum() == batch.has_gradient.sum()


def test_sequence_ratios_on_top_of_ppo_are_the_token_ones_on_policy_and_not_off_policy(exact):
    model = model_zoo.build("qwen3")
    batch = ppo_batch(model)
    token, sequence = (make_plan(level, "sequence_mean") for level in ("token", "sequence_token"))
    (one, _), (two, _) = stepped(model, batch, token), stepped(model, batch, sequence)
    before = {n: p.detach() for n, p in model.named_parameters()}
    assert max(float((one[n] - before[n]).abs().max()) for n in one) > 1e-3
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-12, msg=name)
    noisy = [replace(s, behavior_logp=s.behavior_logp + 0.1 * np.cos(np.arange(len(s.tokens)))) for s in batch.samples]
    away = [replace(g, samples=tuple(noisy[i] for i in np.flatnonzero(batch.group_of == k)))
            for k, g in enumerate(batch.groups)]  # fmt: skip
    stale = replace(batch, groups=tuple(away))
    (one, seen), (two, _) = (stepped(model, stale, plan, "rollout") for plan in (token, sequence))
    assert np.nansum(seen.clipped_low + seen.clipped_high) > 0
    assert max(float((one[n] - two[n]).abs().max()) for n in one) > 1e-3


def test_a_sequence_ratio_of_its_own_would_lose_the_advantages_of_tokens(exact):
    model = model_zoo.build("qwen3")
    batch = ppo_batch(model)
    (kept, _), (flat, _) = (
        stepped(model, batch, make_plan(level, "sequence_mean")) for level in ("sequence_token", "sequence")
    )
    assert max(float((kept[n] - flat[n]).abs().max()) for n in kept) > 1e-3

"""Routes through a training step: replay in packed rows with shared prompts, and how far experts drift."""

from dataclasses import replace
from itertools import pairwise

import model_zoo
import numpy as np
import pytest
import torch
from made_batches import make_batch, sampled_groups
from made_steps import sgd

from gspo.algorithms import ALGORITHMS
from gspo.errors import RolloutError
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import Completion, PackItem, forest, pack
from gspo.learner.routing import routes_in_row
from gspo.learner.step import Plan, train_step
from gspo.models import moe
from gspo.monitor import step_metrics
from gspo.sampling import LocalSampler
from gspo.types import Extras, Prompt, Routes, SamplingParams

pytestmark = pytest.mark.run

MIXTURES = ("qwen3_moe", "mixtral", "olmoe")
PROMPTS = [(5, 6, 7, 8), (3, 9, 4), (7, 8, 1, 1, 20), (1, 2, 3, 4, 5, 6)]


def groups_of(model, seed=0):
    sampler, prompts = LocalSampler(model, seed=seed, eos_token_ids=[2]), [Prompt(tokens, "?") for tokens in PROMPTS]
    return sampled_groups(sampler, prompts, SamplingParams(9), lambda group, number: (group + number) % 2)


def plan(replay="none", num_minibatches=2, **changes):
    algorithm = ALGORITHMS["gspo"]
    settings = {
        "level": algorithm.level, "aggregation": algorithm.aggregation, "clip_low": 0.5, "clip_high": 0.5
    }  # fmt: skip
    return replace(
        Plan("gspo", settings, num_minibatches, 1.0, 8192, max_norm=0.0, max_new_tokens=9, routing_replay=replay),
        **changes,
    )


def run(name, how, *, dtype=torch.float32, lr=0.3, proximal="recompute", checkpointing=False, change=None):
    """One step on sampled groups: the report, its metrics, and the weights after it."""
    model = model_zoo.build(name, dtype)
    batch = make_batch(groups_of(model), how.num_minibatches)
    if change is not None:
        batch = change(batch, model)
    policy = PolicyModule(model, gradient_checkpointing=checkpointing)
    optimizer = sgd(policy, lr)
    rates = [lr] * how.num_minibatches
    report = train_step(policy, optimizer, batch, how, proximal=proximal, learning_rates=rates)
    return report, step_metrics(batch, report, 0), {n: p.detach().clone() for n, p in model.named_parameters()}


def assert_same(ours, theirs):
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("name", MIXTURES)
def test_weights_that_do_not_move_flip_nothing_and_replay_changes_no_bit(name):
    """At rate 0 π_θ is π_old: its routes are the proximal ones, and the sampler's up to rounding."""
    plain, metrics, _ = run(name, plan(), lr=0.0)
    assert metrics["moe/expert_flip_rate"] == metrics["moe/tokens_with_flip"] == 0.0
    assert metrics["moe/sampler_flip_rate"] == 0.0
    for replay in ("proximal", "rollout"):
        again, _, _ = run(name, plan(replay), lr=0.0)
        assert again.losses == plain.losses
        assert again.grad_norms == plain.grad_norms


def test_weights_that_move_flip_experts_which_are_counted_as_sets_by_layer():
    report, metrics, _ = run("qwen3_moe", plan(), lr=3.0)
    assert 0 < metrics["moe/expert_flip_rate"] < 1
    assert metrics["moe/expert_flip_rate"] <= metrics["moe/tokens_with_flip"] <= 1
    layers = [metrics[f"moe/flip_rate_layer_{i:02d}"] for i in range(2)]
    assert np.mean(layers) == pytest.approx(metrics["moe/expert_flip_rate"])
    assert metrics["moe/sampler_flip_rate"] == 0.0  # mini-batch 1 and π_old are at the sampler's weights
    later = np.isfinite(report.flips).all(1)
    assert np.array_equal(later, np.repeat([False, True], 8))  # the first mini-batch has not drifted yet


def test_flips_counted_by_the_step_are_those_of_plain_forwards_before_and_after():
    """One update between the mini-batches; its weights are those after a step of one mini-batch."""
    how, lr = plan(), 3.0
    model = model_zoo.build("olmoe", torch.float32)
    batch = make_batch(groups_of(model), 2)
    policy = PolicyModule(model)
    optimizer = sgd(policy, lr)

    def routes():
        out = {}
        for i in np.flatnonzero(batch.minibatch == 1):
            prompt, sample = batch.groups[batch.group_of[i]].prompt.tokens, batch.samples[i]
            with torch.no_grad(), moe.routed(moe.routers(model)) as recorder:
                model(input_ids=torch.tensor([[*prompt, *sample.tokens.tolist()]])[:, :-1], use_cache=False)
            out[i] = recorder.routes()[len(prompt) - 1 :]
        return out

    before = routes()
    report = train_step(policy, optimizer, batch, how, proximal="recompute", learning_rates=[lr, 0.0])
    after = routes()
    for i in before:
        changed = moe.routes_mismatch(before[i], after[i])
        assert report.flips[i] == pytest.approx(changed.mean(0))
        assert report.flipped_tokens[i] == pytest.approx(changed.any(1).mean())
    assert np.nanmax(report.flips) > 0


@pytest.mark.parametrize("replay", ["proximal", "rollout"])
def test_replay_holds_the_experts_of_pi_old_while_the_router_would_have_moved(replay):
    """Mini-batch 2's ratios are those of plain forwards on π_old's experts, under the weights it began with."""
    model = model_zoo.build("qwen3_moe", torch.float32)
    batch = make_batch(groups_of(model), 2)
    policy = PolicyModule(model)
    optimizer = sgd(policy, 3.0)

    def logp(routes_of):
        out = {}
        for i in np.flatnonzero(batch.minibatch == 1):
            prompt, sample = batch.groups[batch.group_of[i]].prompt.tokens, batch.samples[i]
            ids = torch.tensor([[*prompt, *sample.tokens.tolist()]])
            with torch.no_grad(), moe.routed(moe.routers(model), routes_of.get(i)) as recorder:
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(prompt) - 1 :]
            out[i] = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0], recorder
        return out

    before = logp({})
    rates = {"learning_rates": [3.0, 0.0], "proximal": "recompute"}
    report = train_step(policy, optimizer, batch, plan(replay), **rates)
    held = logp({i: torch.from_numpy(recorder.routes().astype(np.int64)) for i, (_, recorder) in before.items()})
    free = logp({})
    for i, (old, _) in before.items():
        assert report.log_s[i] == pytest.approx(float((held[i][0] - old).mean()), abs=1e-4)
    assert max(abs(report.log_s[i] - float((free[i][0] - old).mean())) for i, (old, _) in before.items()) > 0.1
    assert np.nanmax(report.flips) > 0  # the routers wanted others


def test_proximal_and_rollout_replay_agree_where_sampler_and_trainer_do():
    _, _, proximal = run("mixtral", plan("proximal"))
    _, metrics, rollout = run("mixtral", plan("rollout"))
    assert metrics["moe/sampler_flip_rate"] == 0.0
    assert_same(proximal, rollout)


def test_rollout_replay_takes_the_samplers_experts_where_they_differ():
    """The sampler's routes are made others: every pass follows them, and π_old and μ are compared on them."""

    def other(batch, model):
        num = model.config.num_experts
        groups = []
        for group in batch.groups:
            shift = lambda routes: ((routes.astype(np.int64) + 1) % num).astype(np.uint8)  # noqa: E731
            prompt = shift(group.samples[0].extras.routes.prompt)
            samples = tuple(
                replace(s, extras=Extras(Routes(prompt, shift(s.extras.routes.own)))) for s in group.samples
            )
            groups.append(replace(group, samples=samples))
        return make_batch(groups, 2)

    _, _, plain = run("qwen3_moe", plan("none"), change=other)
    _, _, own = run("qwen3_moe", plan("none"))
    assert_same(plain, own)  # without replay the sampler's routes are only looked at
    report, metrics, replayed = run("qwen3_moe", plan("rollout"), change=other)
    assert metrics["moe/sampler_flip_rate"] > 0.5
    assert not torch.equal(replayed["lm_head.weight"], own["lm_head.weight"])
    assert np.nanmax(np.abs(report.noise_log_s)) > 1e-3  # trainer and sampler now are different functions
    assert metrics["ratio/first_minibatch_max_abs"] == 0.0


@pytest.mark.parametrize("replay", ["none", "proximal", "rollout"])
@pytest.mark.parametrize("name", MIXTURES)
def test_gradient_checkpointing_changes_no_bit_of_a_step(name, replay):
    _, _, plain = run(name, plan(replay), lr=0.5)
    _, _, checkpointed = run(name, plan(replay), lr=0.5, checkpointing=True)
    assert_same(plain, checkpointed)


@pytest.mark.parametrize("max_tokens", [12, 40])
def test_micro_batches_and_plain_packing_replay_the_same_routes(max_tokens, exact):
    how = plan("rollout")
    _, _, whole = run("qwen3_moe", how, dtype=torch.float64, lr=0.5)
    _, metrics, cut = run("qwen3_moe", replace(how, max_tokens=max_tokens), dtype=torch.float64, lr=0.5)
    for name in whole:
        torch.testing.assert_close(whole[name], cut[name], rtol=0, atol=1e-9)
    assert metrics["moe/sampler_flip_rate"] == 0.0


def test_where_the_sampler_serves_as_pi_old_its_routes_do_too():
    report, metrics, _ = run("qwen3_moe", plan(), lr=3.0, proximal="sampler")
    recomputed, _, _ = run("qwen3_moe", plan(), lr=3.0)
    assert report.flips == pytest.approx(recomputed.flips, nan_ok=True)
    assert metrics["moe/expert_flip_rate"] > 0


def test_a_sampler_without_routes_refuses_rollout_replay_and_leaves_its_drift_unmeasured():
    def bare(batch, model):
        groups = [replace(g, samples=tuple(replace(s, extras=Extras()) for s in g.samples)) for g in batch.groups]
        return make_batch(groups, 2)

    with pytest.raises(RolloutError, match=r"actor\.routing_replay: rollout needs the sampler's routes"):
        run("qwen3_moe", plan("rollout"), change=bare)
    _, metrics, _ = run("qwen3_moe", plan("proximal"), change=bare)
    assert metrics["moe/sampler_flip_rate"] is None
    assert metrics["moe/expert_flip_rate"] is not None


def test_one_minibatch_has_no_drift_and_a_dense_model_no_moe_metrics():
    _, metrics, _ = run("qwen3_moe", plan(num_minibatches=1))
    assert metrics["moe/expert_flip_rate"] is None
    assert metrics["moe/sampler_flip_rate"] == 0.0
    _, metrics, _ = run("qwen3", plan())
    assert not [name for name in metrics if name.startswith("moe/")]


def test_routes_follow_their_tokens_into_the_packed_row():
    """A route that spells its token's sequence and position is found at that token, shared prompts at the first's."""
    lengths = [(4, (3, 1, 5)), (2, (2,)), (3, (4, 4))]
    items, by_position, index = [], [], 0
    for num_prompt, completions in lengths:
        made = []
        for num in completions:
            made.append(Completion(np.arange(num), np.ones(num, bool), index))
            positions = np.arange(num_prompt + num - 1)
            by_position.append(np.stack([np.full_like(positions, index), positions], 1)[:, None])
            index += 1
        items.append(PackItem(np.arange(num_prompt), tuple(made)))
    for share_prefix in (True, False):
        packed = pack(items, share_prefix=share_prefix)
        row = routes_in_row(packed, by_position, (1, 2))[:, 0]
        assert np.array_equal(row[:, 1], packed.positions.numpy())
        cuts = packed.cu_seqlens.tolist()
        for b, (begin, end) in enumerate(pairwise(cuts)):
            owners = row[packed.source.numpy()[begin:end], 0]
            assert set(owners[1:]) <= {b}
            assert owners[0] == (b if not share_prefix else [0, 0, 0, 3, 4, 4][b])


def test_routes_climb_a_tree_of_any_depth():
    ones = np.ones
    segments = [(ones(2, int), -1), (ones(3, int), 0), (ones(2, int), 1), (ones(2, int), 1)]
    sequences = [(np.array([5, 6]), ones(2, int), 0), (np.array([7, 8]), ones(2, int), 1)]
    packed = forest(segments, sequences)
    by_position = [np.stack([np.full(7, b), np.arange(7)], 1)[:, None] for b in range(2)]
    row = routes_in_row(packed, by_position, (1, 2))[:, 0]
    assert row[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert row[:, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6]

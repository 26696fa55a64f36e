"""Device correctness without a device: every tensor of a pass is made on the model's device, or the test raises."""

import copy

import model_zoo
import numpy as np
import pytest
import torch
from made_batches import make_batch, uneven_groups, with_behavior
from made_steps import adamw, make_plan
from pretend_cuda import OnCuda, move, on_cuda, pretend_cuda, values

from gspo import objectives
from gspo.algorithms import ALGORITHMS
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import Completion, PackItem
from gspo.learner.step import train_step
from gspo.sampling import LocalSampler
from gspo.types import Kept, Request, SampleId, SamplingParams

LAYOUTS = ("shared", "packed", "padded")


def items(kept=False):
    draw = np.random.default_rng(0)

    def completion(num, index):
        tokens = draw.integers(0, model_zoo.VOCAB, num)
        sets = Kept(np.full(num, 2, np.int32), np.stack([tokens, (tokens + 1) % model_zoo.VOCAB], 1).ravel())
        return Completion(tokens, np.ones(num, bool), index, kept=sets if kept else None)

    return [
        PackItem(draw.integers(0, model_zoo.VOCAB, 5), (completion(4, 0), completion(6, 1))),
        PackItem(draw.integers(0, model_zoo.VOCAB, 3), (completion(2, 2),)),
    ]


def policy_of(name, layout):
    policy = PolicyModule(model_zoo.build(name, torch.float32))
    policy.layout = layout
    return policy


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
def test_policy_and_head_compute_on_the_device_what_they_compute_on_the_cpu(name, layout):
    policy = policy_of(name, layout)
    for kept in (False, True):
        with torch.no_grad():
            expected = policy(policy.pack(items(kept)), temperature=0.7)
            other = copy.deepcopy(policy)
            move(other.model)
            with pretend_cuda():
                found = other(other.pack(items(kept)), temperature=0.7)
        assert isinstance(found.logp, OnCuda)
        assert isinstance(found.entropy, OnCuda)
        torch.testing.assert_close(values(found.logp), expected.logp)
        torch.testing.assert_close(values(found.entropy), expected.entropy)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("proximal", ["recompute", "rollout"])
def test_a_training_step_on_the_device_makes_the_updates_of_the_cpu(layout, proximal):
    plan = make_plan(num_minibatches=2, max_tokens=30, settings={"correction": "tis", "entropy_coef": 0.01})
    ours, theirs = policy_of("qwen3", layout), policy_of("qwen3", layout)
    batch = make_batch(with_behavior(uneven_groups(), ours.model, plan.temperature), plan.num_minibatches)
    how = {"proximal": proximal, "learning_rates": [1e-2] * 2, "keep_tokens_of": frozenset({0, 1})}
    expected = train_step(ours, adamw(ours), batch, plan, **how)
    move(theirs.model)
    with pretend_cuda():
        found = train_step(theirs, adamw(theirs), batch, plan, **how)
    assert found.applied == expected.applied == [True, True]
    np.testing.assert_allclose(found.log_s, expected.log_s, atol=1e-5)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(other, OnCuda), name
        torch.testing.assert_close(values(other), mine.detach(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "sft"])
def test_objectives_compute_on_the_device_of_their_tensors(algorithm):
    torch.manual_seed(0)
    logp, proximal = -torch.rand(15), -torch.rand(15)
    advantage, cuts = torch.tensor([1.0, -1.0, 0.5]), torch.tensor([0, 4, 9, 15])
    plan = make_plan(algorithm)

    def result(place):
        given = {"behavior_logp": proximal - 0.1, "reference_logp": proximal + 0.1, "cu_seqlens": cuts}
        return objectives.loss(
            algorithm,
            place(logp),
            place(proximal),
            place(advantage),
            None,
            **{name: place(tensor) for name, tensor in given.items()},
            **{**plan.settings, "kl_coef": 0.1},
        )

    expected = result(lambda x: x)
    with pretend_cuda():
        found = result(on_cuda)
    assert isinstance(found.loss, OnCuda)
    torch.testing.assert_close(values(found.loss), expected.loss)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
def test_the_sampler_draws_on_the_device_the_tokens_of_the_cpu(name):
    model = model_zoo.build(name, torch.float32)
    params = SamplingParams(6, temperature=0.9, top_p=0.9, record_kept=True)
    requests = [Request(SampleId(g, i), tuple(range(3 + g, 9)), params) for g in range(2) for i in range(3)]

    def drawn(model):
        sampler = LocalSampler(model, seed=5, eos_token_ids=[2])
        sampler.submit(requests)
        assert sampler.health()["engine"] == "continuous batching"
        return {s.id: s for s in sampler.completed()}

    expected = drawn(copy.deepcopy(model))
    move(model)
    with pretend_cuda():
        found = drawn(model)
    assert found.keys() == expected.keys()
    for id, sample in expected.items():
        assert found[id].tokens.tolist() == sample.tokens.tolist()
        np.testing.assert_allclose(found[id].behavior_logp, sample.behavior_logp, atol=1e-5)


def test_a_tensor_on_the_wrong_device_raises():
    there, here = on_cuda(torch.ones(3)), torch.ones(3)
    with pretend_cuda():
        assert there.device.type == "cuda"
        for mixed in (
            lambda: there + here,
            lambda: torch.cat([there, here]),
            lambda: there.index_add_(0, torch.arange(3), there),
            lambda: torch.nn.functional.linear(here, there[None]),
            lambda: there.index_select(0, torch.arange(2)),
        ):
            with pytest.raises(RuntimeError, match="two devices"):
                mixed()
        with pytest.raises(TypeError, match="call"):
            there.numpy()
        assert (torch.arange(3, device="cuda") + there).cpu().numpy().tolist() == [1.0, 2.0, 3.0]
        assert (there.cpu() + here).device.type == (here.to("cuda").cpu()).device.type == "cpu"


def test_a_mistake_in_our_own_code_raises(monkeypatch):
    """The negative control: a policy that forgets to move its row to the device."""
    policy = policy_of("llama", "shared")
    move(policy.model)
    monkeypatch.setattr("gspo.learner.policy.packing.Packed.to", lambda self, device: self)
    with pretend_cuda(), torch.no_grad(), pytest.raises(RuntimeError, match="two devices"):
        policy(policy.pack(items()))

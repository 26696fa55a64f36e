"""Taps and replay of routers, on the mixtures that the trainer and the sampler are tested with."""

import copy

import model_zoo
import numpy as np
import pytest
import torch
import transformers as tf

from gspo.errors import DataError
from gspo.learner import PolicyModule
from gspo.models import moe
from gspo.sampling import LocalSampler
from gspo.types import Request, SampleId, SamplingParams

_SIZE = {**model_zoo._BASE, "num_experts_per_tok": 2}
MIXTURES = {
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**_SIZE, num_experts=6, moe_intermediate_size=16, norm_topk_prob=True),
    "qwen3_moe_raw": lambda: tf.Qwen3MoeConfig(**_SIZE, num_experts=6, moe_intermediate_size=16, norm_topk_prob=False),
    "mixtral": lambda: tf.MixtralConfig(**_SIZE, num_local_experts=6),
    "olmoe": lambda: tf.OlmoeConfig(**_SIZE, num_experts=6, norm_topk_prob=True),
    "olmoe_raw": lambda: tf.OlmoeConfig(**_SIZE, num_experts=6, norm_topk_prob=False),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **_SIZE, num_experts=6, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "flex_olmo": lambda: tf.FlexOlmoConfig(**_SIZE, num_experts=6),
    "gpt_oss": lambda: tf.GptOssConfig(**_SIZE, num_local_experts=6, rope_parameters={"rope_type": "default"}),
}
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(0, model_zoo.VOCAB, (1, 40)))


def build(name, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return tf.AutoModelForCausalLM.from_config(
            MIXTURES[name](), dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        ).eval()


def loss_of(model):
    return model(input_ids=TOKENS, use_cache=False).logits.log_softmax(-1)[..., 3].pow(2).sum()


def gradients(model, replay=None, *, tapped=True):
    """Loss, gradients and the recorder of one pass."""
    model.zero_grad()
    if not tapped:
        loss, recorder = loss_of(model), None
    else:
        with moe.routed(moe.routers(model), replay) as recorder:
            loss = loss_of(model)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, recorder


def as_tensor(routes):
    return torch.from_numpy(routes.astype(np.int64))


def other_routes(routes, num_experts=6):
    """Every token's experts moved by one: a set that it did not choose."""
    return (routes.astype(np.int64) + 1) % num_experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_replay_of_the_own_routes_changes_no_bit_of_loss_or_gradient(name, dtype):
    model = build(name, dtype)
    plain, plain_grads, _ = gradients(model, tapped=False)
    tapped, tapped_grads, recorder = gradients(model)
    replayed, replayed_grads, _ = gradients(model, as_tensor(recorder.routes()))
    assert recorder.routes().shape == (TOKENS.shape[1], 2, 2)
    assert recorder.routes().dtype == np.uint8
    assert torch.equal(plain, tapped)
    assert torch.equal(plain, replayed)
    for n, gradient in plain_grads.items():
        assert torch.equal(gradient, tapped_grads[n]), n
        assert torch.equal(gradient, replayed_grads[n]), n


@pytest.mark.parametrize("name", MIXTURES)
def test_taps_alone_leave_a_pass_without_gradients_untouched(name):
    model = build(name)
    with torch.no_grad():
        plain = model(input_ids=TOKENS).logits
        with moe.routed(moe.routers(model)) as recorder:
            tapped = model(input_ids=TOKENS).logits
    assert torch.equal(plain, tapped)
    assert not any(router._forward_hooks for router in moe.routers(model))
    assert np.array_equal(recorder.routes(), recorder.own_routes())


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_raw", "mixtral", "olmoe", "gpt_oss"])
def test_the_experts_of_a_replay_are_those_that_compute(name):
    """With other routes the output is that of a model whose experts are renamed to match."""
    model = build(name, torch.float64)
    with torch.no_grad():
        with moe.routed(moe.routers(model)) as recorder:
            plain = model(input_ids=TOKENS).logits
        with moe.routed(moe.routers(model), as_tensor(other_routes(recorder.routes()))) as replayed:
            other = model(input_ids=TOKENS).logits
    assert not torch.allclose(plain, other)
    assert np.array_equal(replayed.routes(), other_routes(recorder.routes()))
    first = slice(None), 0  # the first layer sees the same input: its router still says what it said
    assert np.array_equal(replayed.own_routes()[first], recorder.own_routes()[first])


def test_rows_without_a_route_are_left_to_the_router():
    model = build("qwen3_moe")
    with torch.no_grad():
        with moe.routed(moe.routers(model)) as own:
            plain = model(input_ids=TOKENS).logits
        nothing = torch.full((TOKENS.shape[1], 2, 2), moe.UNKNOWN)
        with moe.routed(moe.routers(model), nothing) as recorder:
            replayed = model(input_ids=TOKENS).logits
    assert torch.equal(plain, replayed)
    assert np.array_equal(own.routes(), recorder.routes())


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_raw", "mixtral", "olmoe"])
def test_under_replay_the_gradient_reaches_the_router_and_equals_finite_differences(name, monkeypatch):
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = build(name, torch.float64)
    with torch.no_grad(), moe.routed(moe.routers(model)) as recorder:
        model(input_ids=TOKENS)
    given = as_tensor(other_routes(recorder.routes()))  # the routes are fixed, and not the router's own
    _, grads, _ = gradients(model, given)
    for layer, router in enumerate(moe.routers(model)):
        gradient = grads[next(n for n, p in model.named_parameters() if p is router.weight)]
        assert gradient.abs().max() > 0
        direction = torch.from_numpy(np.random.default_rng(layer).normal(size=gradient.shape))
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                router.weight.add_(direction, alpha=sign * 1e-5)
                with moe.routed(moe.routers(model), given):
                    losses.append(float(loss_of(model)))
                router.weight.sub_(direction, alpha=sign * 1e-5)
        measured = (losses[0] - losses[1]) / 2e-5
        assert measured == pytest.approx(float((gradient * direction).sum()), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("replays", [False, True])
def test_gradient_checkpointing_recomputes_on_the_experts_of_its_forward(name, replays):
    """Weights that move between forward and backward would move the routes of a recomputation: they must not."""
    model = build(name)
    _, _, recorder = gradients(model)
    given = as_tensor(other_routes(recorder.routes())) if replays else None
    _, want, _ = gradients(model, given)
    PolicyModule(model, gradient_checkpointing=True).layout = "packed"  # the model is called plainly here
    seen = []
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    handles = [m.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone())) for m in experts]
    model.zero_grad()
    with moe.routed(moe.routers(model), given) as recorder:
        loss = loss_of(model)
    computed = len(seen)
    with moe.routed(moe.routers(model)):
        pass  # another recorder in between is not the recomputation's
    loss.backward()
    for handle in handles:
        handle.remove()
    assert (computed, len(seen)) == (2, 4)  # each layer was computed again
    assert torch.equal(seen[0], seen[3])  # the last layer first
    assert torch.equal(seen[1], seen[2])
    assert np.array_equal(torch.stack(seen[:2], 1).numpy(), recorder.routes())
    for n, gradient in want.items():
        assert torch.equal(gradient, dict(model.named_parameters())[n].grad), n


def test_a_recomputation_keeps_its_experts_where_the_router_would_choose_anew():
    model = build("qwen3_moe")
    PolicyModule(model, gradient_checkpointing=True).layout = "packed"  # the model is called plainly here
    seen = []
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    handles = [m.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone())) for m in experts]
    with moe.routed(moe.routers(model)) as recorder:
        loss = loss_of(model)
    with torch.no_grad():
        for router in moe.routers(model):
            router.weight.data = router.weight.data.flip(0)  # as rounding would on another device, only more
    loss.backward()
    for handle in handles:
        handle.remove()
    assert np.array_equal(torch.stack(seen[:2], 1).numpy(), torch.stack(seen[:1:-1], 1).numpy())
    with torch.no_grad(), moe.routed(moe.routers(model)) as anew:
        model(input_ids=TOKENS)
    assert moe.routes_mismatch(anew.routes(), recorder.routes()).mean() > 0.5  # it would have


def test_sets_are_compared_and_not_their_order():
    ours = np.array([[[0, 3], [1, 2]], [[5, 4], [2, 2]]], dtype=np.uint8)
    theirs = np.array([[[3, 0], [1, 3]], [[4, 5], [2, 0]]], dtype=np.int64)
    assert moe.routes_mismatch(ours, theirs).tolist() == [[False, True], [False, True]]


def test_a_dense_model_has_no_routers_and_refuses_replay_by_name():
    model = model_zoo.build("qwen3", torch.float32)
    assert moe.routers(model) == []
    with pytest.raises(DataError, match=r"actor\.routing_replay: Qwen3ForCausalLM has no router"):
        moe.check_replay(model)
    moe.check_replay(build("mixtral"))


def test_a_router_whose_scores_cannot_be_reproduced_is_tapped_and_refuses_replay():
    model = build("qwen3_moe")
    for router in moe.routers(model):
        own = router.forward
        router.forward = lambda x, own=own: (lambda out: (out[0], out[1] * 0.9, out[2]))(own(x))
    gradients(model)  # taps and trains
    with pytest.raises(DataError, match="cannot reproduce"):
        moe.check_replay(model)


def test_routes_of_another_shape_are_refused():
    model = build("qwen3_moe")
    few = as_tensor(np.zeros((3, 2, 2)))
    with pytest.raises(ValueError, match="replayed routes have shape"), moe.routed(moe.routers(model), few):
        model(input_ids=TOKENS)


# The sampler's taps

PROMPTS = {0: tuple(range(5, 12)), 1: (3, 9, 4), 2: (7, 8, 1, 1, 20)}


def requests(max_new_tokens=9, num_samples=4):
    params = SamplingParams(max_new_tokens)
    return [Request(SampleId(g, i), PROMPTS[g], params) for g in PROMPTS for i in range(num_samples)]


def plain(model, prompt, tokens):
    """Log-probs and routes of a sequence by a forward of its own."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad(), moe.routed(moe.routers(model)) as recorder:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 :].gather(1, ids[0, len(prompt) :, None])[:, 0], recorder.routes()


def assert_routes_are_those_of_a_plain_forward(model, sample):
    prompt = PROMPTS[sample.id.submission]
    logp, routes = plain(model, prompt, sample.tokens.tolist())
    assert len(sample.extras.routes.own) == len(sample.tokens)
    assert len(sample.extras.routes.prompt) == len(prompt)
    assert np.array_equal(sample.extras.routes.prompt[-1], sample.extras.routes.own[0])
    whole = np.concatenate([sample.extras.routes.prompt[:-1], sample.extras.routes.own])
    assert whole.dtype == np.uint8
    assert not moe.routes_mismatch(whole, routes).any()
    return float(np.abs(logp.numpy() - sample.behavior_logp).max())


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
def test_sampled_log_probs_and_routes_are_those_of_a_plain_float64_forward(name):
    model = build(name, torch.float64)
    # Five rows for twelve requests: rows leave, join and move together.
    sampler = LocalSampler(model, seed=0, eos_token_ids=[2], max_rows=5, pad_rows=2)
    sampler.submit(requests())
    samples = list(sampler.completed())
    assert len(samples) == 12
    # Routers work in float32 whatever the model; so do log-probs on the wire.
    assert max(assert_routes_are_those_of_a_plain_forward(model, sample) for sample in samples) < 1e-5
    by_group = {}
    for sample in samples:
        by_group.setdefault(sample.id.submission, sample.extras.routes.prompt)
    assert all(s.extras.routes.prompt is by_group[s.id.submission] for s in samples if s.id.submission == 0)


def test_an_interrupted_sample_keeps_its_routes_and_goes_on_with_new_ones():
    model = build("olmoe")
    sampler = LocalSampler(model, seed=0, eos_token_ids=[], max_rows=4)
    sampler.submit(requests(num_samples=2))
    list(sampler.completed(0))
    list(sampler.completed(0))
    partial = {sample.id: sample for sample in sampler.abort()}
    assert any(len(sample.tokens) for sample in partial.values())
    sampler.submit([Request(r.id, r.prompt, r.params, partial[r.id]) for r in requests(num_samples=2)])
    for sample in sampler.completed():
        said = len(partial[sample.id].tokens)
        if said:
            assert np.array_equal(sample.extras.routes.own[:said], partial[sample.id].extras.routes.own)
            assert sample.extras.routes.prompt is partial[sample.id].extras.routes.prompt
        assert_routes_are_those_of_a_plain_forward(model, sample)


def test_a_dense_models_samples_have_no_routes():
    sampler = LocalSampler(model_zoo.build("qwen3", torch.float32), seed=0, eos_token_ids=[2])
    sampler.submit(requests(3, 1))
    assert {s.extras.routes for s in sampler.completed()} == {None}


def test_a_copy_of_a_model_has_taps_of_its_own():
    model = build("qwen3_moe")
    other = copy.deepcopy(model)
    with torch.no_grad(), moe.routed(moe.routers(model)) as recorder:
        other(input_ids=TOKENS)
    assert not any(len(chosen) for chosen in recorder.chosen)

"""The engine of a model is chosen by measurement: families of each kind against plain transformers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_local import teacher_forced
from tiny_models import OTHERS, VOCAB, build
from transformers import T5Config, T5ForConditionalGeneration

from gspo.errors import RolloutError
from gspo.learner import PolicyModule
from gspo.models import moe
from gspo.sampling.local.choose import ForwardComparison, choose, engines
from gspo.sampling.local.engine import LocalSampler
from gspo.types import Request, Sample, SampleId, SamplingParams

pytestmark = pytest.mark.run

PACKED, CACHE, NO_CACHE = "continuous batching", "transformers' cache", "no cache"
BY_LENGTH = f"{CACHE} by length"
# Transformers computes a decoded token of Zamba2 without the lower limit of the time step, unlike a prompt; the states
# of RecurrentGemma are inside its modules; GPT-1 has no cache.
ENGINE_OF = dict.fromkeys(OTHERS, CACHE)
ENGINE_OF |= dict.fromkeys(("minimax", "llama4_text"), BY_LENGTH)
ENGINE_OF |= dict.fromkeys(("recurrent_gemma", "zamba2", "openai-gpt"), NO_CACHE)
ENGINE_OF |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "opt"), PACKED)
QUICK = ("recurrent_gemma", "deepseek_v3")


def prompt_of(index):
    return tuple(np.random.default_rng(index).integers(3, VOCAB, size=(5, 9, 5, 6)[index]).tolist())


def requests(num_new=12, **params):
    return [
        Request(SampleId(g, i), prompt_of(g), SamplingParams(num_new - 2 * i, **params))
        for g in range(4)
        for i in range(3)
    ]


class Recording(LocalSampler):
    """Keeps the logits of every drawn token in the model's precision; a sample's log-probs are float32."""

    def __init__(self, *args, **kwargs):
        self.logits, self.lines = {}, []
        super().__init__(*args, **kwargs, say=self.lines.append)
        self.logits = {}

    def _sample(self, slots, logits_n_v, routes):
        for slot, row in zip(slots, logits_n_v, strict=True):
            self.logits[self._rows.requests[slot].id, int(self._rows.count[slot])] = row.clone()
        super()._sample(slots, logits_n_v, routes)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in ENGINE_OF])
def test_sampled_log_probs_are_those_of_a_plain_forward(name):
    model = build(name)
    sampler = Recording(model, seed=5, eos_token_ids=[2], max_rows=7)
    assert sampler.health()["engine"] == ENGINE_OF[name]
    assert len(sampler.lines) == 1
    assert type(model).__name__ in sampler.lines[0]
    assert ENGINE_OF[name] in sampler.lines[0]
    asked = requests(temperature=1.3)
    sampler.submit(asked)
    samples = {s.id: s for s in sampler.completed()}
    for request in asked:
        sample = samples[request.id]
        np.testing.assert_allclose(sample.behavior_logp, teacher_forced(model, request, sample), atol=1e-5, rtol=1e-5)


# Norms, softmax or routers of some models are float32 whatever the model: the looser bound.
BOUND = {"falcon": 1e-9, "openai-gpt": 1e-9, "lfm2": 5e-6, "llama4_text": 5e-6, "bloom": 5e-6, "deepseek_v2": 5e-6}


@pytest.mark.parametrize("name", [n if n == "falcon" else pytest.param(n, marks=pytest.mark.full) for n in BOUND])
def test_logits_of_a_float64_model_are_those_of_a_plain_forward(name):
    model = build(name, dtype=torch.float64)
    sampler = Recording(model, seed=5, eos_token_ids=[2], max_rows=7)
    asked = requests()
    sampler.submit(asked)
    samples = {s.id: s for s in sampler.completed()}
    for request in asked:
        tokens = samples[request.id].tokens.tolist()
        with torch.no_grad():
            plain = model(torch.tensor([[*request.prompt, *tokens]]), use_cache=False).logits[0]
        for at in range(len(tokens)):
            np.testing.assert_allclose(
                sampler.logits[request.id, at], plain[len(request.prompt) - 1 + at], atol=BOUND[name], rtol=0
            )


def test_experts_of_a_hybrid_are_recorded_as_a_plain_forward_chooses_them():
    model = build("qwen3_next")
    sampler = LocalSampler(model, seed=1, eos_token_ids=[2], max_rows=5)
    asked = requests(6)
    sampler.submit(asked)
    for sample in sampler.completed():
        prompt = prompt_of(sample.id.submission)
        with torch.no_grad(), moe.routed(moe.routers(model)) as recorder:
            model(torch.tensor([[*prompt, *sample.tokens[:-1].tolist()]]), use_cache=False)
        whole = np.concatenate([sample.extras.routes.prompt[:-1], sample.extras.routes.own])
        assert np.array_equal(sample.extras.routes.prompt[-1], sample.extras.routes.own[0])
        assert not moe.routes_mismatch(whole, recorder.routes()).any()


@pytest.mark.parametrize("name", [CACHE, BY_LENGTH])
def test_rows_share_a_forward_and_leave_it_when_they_finish(name):
    sampler = forced(build("lfm2"), name, eos_token_ids=[])
    asked = [Request(SampleId(g, i), prompt_of(g), SamplingParams(3 + 2 * i)) for g in (0, 1, 2) for i in range(2)]
    sampler.submit(asked)
    assert [len(s.tokens) for s in sorted(sampler.completed(), key=lambda s: s.id)] == [3, 5] * 3
    health = sampler.health()
    assert health["prefill_forwards"] == 2  # prompts of 5, 9 and 5 tokens
    assert health["decode_forwards"] == (4 if name == CACHE else 8)
    assert health["decode_rows"] == 3 * (2 * 2 + 2)
    assert health["cache_bytes"] == 0


def forced(model, name, **settings):
    """A sampler whose engine is this one."""
    sampler = Recording(model, **{"seed": 5, "eos_token_ids": [2], "verify": False, **settings})
    sampler._engines = [engine for engine in sampler._engines if engine.name == name]
    sampler._choose_engine()
    return sampler


@pytest.mark.full
@pytest.mark.parametrize("model", ["gemma3", pytest.param("gpt_oss", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name", [CACHE, *(pytest.param(name, marks=pytest.mark.full) for name in (BY_LENGTH, NO_CACHE))]
)
def test_every_engine_samples_what_continuous_batching_samples(name, model):
    model = build(model)  # sliding windows of 7 and full attention
    asked = [*requests(14), *(Request(SampleId(4, i), (5, 6), SamplingParams(20)) for i in range(2))]
    found = {}
    for engine in (PACKED, name):
        sampler = forced(model, engine, max_rows=5)  # rows join and leave batches of other lengths
        sampler.submit(asked)
        found[engine] = {s.id: s for s in sampler.completed()}
    for id, sample in found[PACKED].items():
        assert sample.tokens.tolist() == found[name][id].tokens.tolist()
        np.testing.assert_allclose(sample.behavior_logp, found[name][id].behavior_logp, atol=1e-5)


@pytest.mark.full
def test_other_weights_draw_from_other_states():
    target, source = build("lfm2"), build("lfm2", seed=1)
    sampler, other = (LocalSampler(m, seed=1, eos_token_ids=[2]) for m in (target, source))
    other.submit(requests())
    expected = {s.id: s.tokens.tolist() for s in other.completed()}
    sampler.submit(requests())
    before = {s.id: s.tokens.tolist() for s in sampler.completed()}
    assert before != expected
    sampler.load_weights(1, source.state_dict().items())
    sampler.submit(requests())
    samples = list(sampler.completed())
    assert {s.id: s.tokens.tolist() for s in samples} == expected
    assert {v for s in samples for v in s.versions.tolist()} == {1}


def leaking(model):
    """State that packed rows would pass on to each other, and that no cache holds."""
    plain = model.model.layers[1].self_attn.forward

    def with_all_before(hidden_states, **kwargs):
        out, weights = plain(hidden_states=hidden_states, **kwargs)
        return out + hidden_states.cumsum(dim=1), weights

    model.model.layers[1].self_attn.forward = with_all_before
    return model


def test_state_that_no_engine_knows_of_is_found_by_measurement():
    sampler = Recording(leaking(build("llama")), seed=1, eos_token_ids=[2])
    assert sampler.health()["engine"] == NO_CACHE
    assert f"{PACKED} differs from a plain forward by" in sampler.lines[0]
    assert f"{CACHE} differs from a plain forward by" in sampler.lines[0]
    assert "rollout.backend: vllm:d1" in sampler.lines[0]


def test_a_window_that_is_only_in_the_mask_is_not_left_to_continuous_batching():
    model = build("mistral")
    for layer in model.model.layers:
        plain = layer.self_attn.forward

        def without_window(*args, plain=plain, module=layer.self_attn, **kwargs):
            window, module.config.sliding_window = module.config.sliding_window, None
            try:
                return plain(*args, **kwargs)
            finally:
                module.config.sliding_window = window

        layer.self_attn.forward = without_window
    sampler = Recording(model, seed=1, eos_token_ids=[2])
    assert sampler.health()["engine"] == CACHE
    assert "sliding window" in sampler.lines[0]


def test_a_model_that_no_engine_can_run_is_refused_with_name_reason_and_remedy():
    model = build("lfm2")
    del model.model.layers[0].conv
    with pytest.raises(RolloutError, match=r"Lfm2ForCausalLM cannot be sampled.*'conv'.*rollout\.backend: vllm:d1"):
        LocalSampler(model, seed=1, eos_token_ids=[2])


def test_log_probs_that_are_not_numbers_are_no_agreement():
    model = build("llama")
    with pytest.raises(RolloutError, match="differs from a plain forward by nan"):
        choose(model, engines(model, [], 99, None), lambda _: float("nan"), print)


def test_one_log_prob_that_is_not_a_number_is_not_hidden_by_the_others():
    class NanAt:
        device = torch.device("cpu")

        def __init__(self, at):
            self.calls, self.at = 0, at

        def __call__(self, input_ids, use_cache):
            self.calls += 1
            fill = float("nan") if self.calls == self.at else 0.0
            return SimpleNamespace(logits=torch.full((1, input_ids.shape[1], VOCAB), fill))

    comparison = ForwardComparison(VOCAB, 64, None, ())
    requests = comparison.requests(0, is_packed=True)
    samples = [Sample.of(request.id, [3, 4, 5], [-1.0] * 3, 0) for request in requests]
    plain = comparison.largest_difference(NanAt(0), requests, samples)
    assert plain == pytest.approx(np.log(VOCAB) - 1)
    for at in range(1, len(requests) + 1):
        assert np.isnan(comparison.largest_difference(NanAt(at), requests, samples))


def test_of_engines_above_rounding_the_first_that_is_nearly_the_best_is_chosen():
    model = build("llama")
    found = engines(model, [], 99, None)

    def chosen(gaps):
        return found.index(choose(model, found, lambda engine: gaps[found.index(engine)], lambda _: None))

    assert chosen([3e-3, *[2e-3] * 5]) == 0
    assert chosen([3e-3, *[2e-4] * 5]) == 1
    assert chosen([3e-3, 9e-5, *[0.0] * 4]) == 1
    with pytest.raises(RolloutError, match=r"allowed 0\.005"):
        chosen([1.0, 1.0, *[6e-3] * 4])


def test_an_error_inside_the_model_names_it_and_loses_no_request():
    model = build("lfm2")
    sampler = LocalSampler(model, seed=1, eos_token_ids=[2])
    asked = requests()
    sampler.submit(asked)
    assert list(sampler.completed(deadline_s=0)) == []
    conv, model.model.layers[0].conv = model.model.layers[0].conv, None
    with pytest.raises(RolloutError, match=r"Lfm2ForCausalLM failed while .*TypeError.*rollout\.backend"):
        list(sampler.completed())
    model.model.layers[0].conv = conv
    assert {s.id for s in sampler.completed()} == {r.id for r in asked}


def test_encoder_decoder_models_are_refused_by_name():
    model = T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=VOCAB))
    with pytest.raises(RolloutError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        LocalSampler(model, seed=1, eos_token_ids=[2])


def test_the_engine_is_the_same_inside_a_trainer_with_gradient_checkpointing():
    policy = PolicyModule(build("qwen3_5_text"), gradient_checkpointing=True)
    assert any(module.training for module in policy.model.modules())
    assert not policy.model.training
    # A layer in training mode would drop the cache, and whole sequences would be computed at every token.
    assert LocalSampler(policy.model, seed=5, eos_token_ids=[2]).health()["engine"] == CACHE
    assert any(module.training for module in policy.model.modules())

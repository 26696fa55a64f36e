"""The in-process sampler against plain transformers, and against itself in other batches, orders and interruptions."""

from collections import Counter

import numpy as np
import pytest
import torch
from tiers import brief
from tiny_models import CONFIGS, VOCAB, build
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gspo.errors import RolloutError, WeightSyncError
from gspo.sampling.local.attention import ATTENTION
from gspo.sampling.local.engine import LocalSampler
from gspo.sampling.weights.load import copy_weights
from gspo.types import Request, Sample, SampleId, SamplingParams

pytestmark = pytest.mark.run

EOS = 2
PLAIN = SamplingParams(max_new_tokens=14)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module", params=["llama", "lfm2"])
def any_model(request):
    """One model of continuous batching, one of transformers' cache."""
    return build(request.param)


def sampler(model, **kwargs):
    return LocalSampler(model, **{"seed": 5, "eos_token_ids": [EOS], **kwargs})


def prompt_of(index):
    return tuple(np.random.default_rng(index).integers(3, VOCAB, size=3 + index * 5 % 13).tolist())


def group_requests(num_groups, size, params=PLAIN):
    return [Request(SampleId(g, i), prompt_of(g), params) for g in range(num_groups) for i in range(size)]


def run(engine, requests):
    engine.submit(requests)
    samples = list(engine.completed())
    assert Counter(s.id for s in samples) == Counter(r.id for r in requests)
    return {s.id: s for s in samples}


def run_more(engine, requests):
    engine.submit(requests)
    return {s.id: s for s in engine.completed()}


def assert_same(one, other, atol=3e-5):
    assert one.keys() == other.keys()
    for id, sample in one.items():
        assert sample.tokens.tolist() == other[id].tokens.tolist()
        assert sample.finish == other[id].finish
        np.testing.assert_allclose(sample.behavior_logp, other[id].behavior_logp, atol=atol)


def teacher_forced(model, request, sample):
    """log-probs of the sample's tokens by a plain forward over prompt + completion and transformers' own warpers."""
    params, start = request.params, len(request.prompt)
    with torch.no_grad():
        ids = torch.tensor([[*request.prompt, *sample.tokens.tolist()]])
        logits = model(ids, use_cache=False).logits[0, start - 1 : -1]
    if params.min_new_tokens:
        logits[: params.min_new_tokens, [EOS, *params.stop_token_ids]] = -torch.inf
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    logp = torch.log_softmax(warpers(torch.zeros(len(logits), 1, dtype=torch.long), logits.double()), -1)
    return logp[range(len(logp)), sample.tokens.tolist()].numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_are_those_of_plain_transformers(name):
    model = build(name)
    requests = []
    for i, params in enumerate(
        [
            PLAIN,
            SamplingParams(14, temperature=0.7),
            SamplingParams(14, temperature=1.2, top_p=0.8),
            SamplingParams(14, temperature=0.9, top_k=5),
            SamplingParams(14, min_new_tokens=9, stop_token_ids=(7, 8)),
        ]
    ):
        requests += [Request(SampleId(10 * i + g, s), prompt_of(g), params) for g in range(4) for s in range(2)]
    samples = run(sampler(model, max_rows=24), requests)
    lengths = [len(s.tokens) for s in samples.values()]
    assert max(lengths) == 14  # longer than every sliding window here
    for request in requests:
        sample = samples[request.id]
        np.testing.assert_allclose(sample.behavior_logp, teacher_forced(model, request, sample), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", brief(CONFIGS, "llama", "gemma2", "gpt_oss"))
def test_greedy_is_transformers_generate(name):
    model = build(name)
    requests = group_requests(3, 1, SamplingParams(14, greedy=True, temperature=0.0))
    samples = run(sampler(model), requests)
    for request in requests:
        sample = samples[request.id]
        expected = model.generate(
            torch.tensor([request.prompt]),
            attention_mask=torch.ones(1, len(request.prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=14,
            eos_token_id=EOS,
            pad_token_id=0,
        )[0, len(request.prompt) :]
        assert sample.tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("name", brief(["qwen3_moe", "lfm2", "llama", "gemma3"], "llama"))
def test_tokens_do_not_depend_on_neighbours_order_or_number_of_rows(name):
    model = build(name)
    requests = group_requests(11, 3, SamplingParams(8))
    reference = run(sampler(model), requests)
    shuffled = [requests[i] for i in np.random.default_rng(0).permutation(len(requests))]
    for max_rows in (1, 5, 33):
        assert_same(run(sampler(model, max_rows=max_rows), shuffled), reference)
    engine = sampler(model)
    alone = {r.id: run(engine, [r])[r.id] for r in requests[::7]}
    assert_same(alone, {id: reference[id] for id in alone})


def test_another_seed_attempt_turn_or_sample_draws_other_tokens(any_model):
    def tokens(seed=5, **key):
        id = SampleId(**{"submission": 1, "sample": 0, **key})
        return tuple(run(sampler(any_model, seed=seed), [Request(id, prompt_of(1), PLAIN)])[id].tokens.tolist())

    drawn = [tokens(), tokens(seed=6), tokens(attempt=1), tokens(turn=1), tokens(sample=1), tokens(submission=2)]
    assert len(set(drawn)) == len(drawn)
    assert tokens() == drawn[0]


def test_a_prompt_is_prefilled_once_for_its_group_however_its_requests_arrive(any_model):
    requests = group_requests(6, 8)
    engine = sampler(any_model, max_rows=10)  # a group joins in pieces
    run(engine, requests)
    assert engine.health()["prefill_tokens"] == sum(len(prompt_of(g)) for g in range(6))


def test_a_request_that_arrives_while_its_group_runs_joins_it_without_a_prefill(any_model):
    requests = group_requests(1, 6, SamplingParams(10, min_new_tokens=10))
    reference = run(sampler(any_model), requests)
    engine = sampler(any_model)
    engine.submit(requests[:2])
    assert list(engine.completed(deadline_s=0)) == []
    assert_same(run_more(engine, requests[2:]), reference)
    assert engine.health()["prefill_tokens"] == len(prompt_of(0))


def test_finished_rows_leave_and_waiting_ones_join_at_once(model):
    lengths = [2, 3, 4, 20, 20, 2, 3, 4]
    requests = [
        Request(SampleId(i, 0), prompt_of(i), SamplingParams(n, ignore_eos=True)) for i, n in enumerate(lengths)
    ]
    engine = sampler(model, max_rows=4, pad_rows=1)
    samples = run(engine, requests)
    assert [len(samples[r.id].tokens) for r in requests] == lengths
    # The first token comes from the prompt's logits; every later one is one row of one forward, none is wasted.
    assert engine.health()["decode_rows"] == sum(n - 1 for n in lengths)
    assert engine.health()["decode_forwards"] == 20  # request 4 takes the first seat to fall free, after one forward


def test_rows_fed_are_padded_to_a_multiple_and_shrink_as_rows_finish(model):
    requests = [Request(SampleId(i, 0), prompt_of(0), SamplingParams(1 + i, ignore_eos=True)) for i in range(16)]
    engine = sampler(model, pad_rows=8)
    run(engine, requests)
    assert engine.health()["decode_rows"] == 7 * 16 + 8 * 8


def test_frequencies_of_whole_completions_match_their_probabilities(any_model):
    """Enumerates the completions of two tokens over the four likeliest tokens."""
    params = SamplingParams(2, top_k=4, ignore_eos=True)
    num = 3000
    requests = [Request(SampleId(i, 0), prompt_of(2), params) for i in range(num)]
    samples = run(sampler(any_model, max_rows=512), requests)
    seen = Counter(tuple(s.tokens.tolist()) for s in samples.values())
    probability = {tuple(s.tokens.tolist()): np.exp(s.behavior_logp.sum()) for s in samples.values()}
    assert sum(probability.values()) == pytest.approx(1.0, abs=0.02)
    chi_square = sum((seen[k] - num * p) ** 2 / (num * p) for k, p in probability.items())
    assert chi_square < 37.7  # at most 15 degrees of freedom: exceeded once in a thousand seeds


@pytest.mark.parametrize(
    "name", brief(["llama", "mistral", "gemma2", "gpt_oss", "lfm2", "recurrent_gemma"], "gemma2", "lfm2")
)
def test_an_aborted_sample_continues_as_if_it_had_not_been_interrupted(name):
    model = build(name)
    requests = group_requests(5, 3, SamplingParams(14, min_new_tokens=9))
    reference = run(sampler(model), requests)
    engine = sampler(model, max_rows=9)
    engine.submit(requests)
    finished = {}
    for _ in range(6):
        finished |= {s.id: s for s in engine.completed(deadline_s=0)}
    partial = {s.id: s for s in engine.abort()}
    assert {len(s.tokens) for s in partial.values()} >= {0, 6}  # some were running, some still waiting
    assert all(s.finish == "abort" for s in partial.values())
    assert list(engine.completed()) == []
    again = [Request(r.id, r.prompt, r.params, prefix=partial[r.id]) for r in requests if r.id in partial]
    engine.version = 3
    finished |= run(engine, again)
    assert_same(finished, reference)
    for id, sample in partial.items():
        num = len(sample.tokens)
        assert finished[id].versions.tolist() == [0] * num + [3] * (len(finished[id].tokens) - num)
        assert finished[id].behavior_logp[:num].tolist() == sample.behavior_logp.tolist()


def test_a_prefix_keeps_its_mask_and_turns_and_counts_towards_the_limit(any_model):
    prefix = Sample(
        SampleId(0, 0),
        np.array([4, 5, 6], dtype=np.int32),
        np.array([-1, 0, -2], dtype=np.float32),
        np.zeros(3, dtype=np.int32),
        np.array([True, False, True]),
        np.array([0, 0, 1], dtype=np.int16),
        "abort",
    )
    request = Request(SampleId(0, 0, turn=1), prompt_of(0), SamplingParams(6, ignore_eos=True), prefix)
    sample = run(sampler(any_model), [request])[request.id]
    assert sample.mask.tolist() == [True, False, True, True, True, True]
    assert sample.turns.tolist() == [0, 0, 1, 1, 1, 1]
    np.testing.assert_allclose(sample.behavior_logp[3:], teacher_forced(any_model, request, sample)[3:], atol=1e-5)
    full = Request(SampleId(1, 0), prompt_of(0), SamplingParams(3), prefix)
    assert run(sampler(any_model), [full])[full.id].finish == "length"


def spoiled(good, name):
    """Tensors that are not the model's, by what is said of them: one matrix is changed, missing or too many."""
    bad = good[name].clone()
    bad[0, 0] = torch.nan
    return {
        "holds NaN": {**good, name: bad},
        "did not arrive": {n: t for n, t in good.items() if n != name},
        "not a parameter": {**good, "model.layers.9.x": bad},
        "the sampler holds": {**good, name: good[name].T.contiguous()},
        "torch.float64": {**good, name: good[name].double()},
    }


MATRIX = "model.layers.1.mlp.up_proj.weight"


def test_new_weights_are_copied_whole_or_not_at_all():
    target, source = build("llama_mha"), build("llama_mha", seed=1)
    before = {n: t.clone() for n, t in target.state_dict().items()}
    good = dict(source.state_dict())  # lm_head is tied: both names arrive
    another_head = {**good, "lm_head.weight": good["lm_head.weight"] + 1}
    faults = {**spoiled(good, MATRIX), "arrived with different": another_head}
    engine = sampler(target)
    for message, tensors in faults.items():
        with pytest.raises(WeightSyncError, match=message):
            engine.load_weights(1, tensors.items())
        assert engine.version == 0
        assert all(torch.equal(t, before[n]) for n, t in target.state_dict().items())
    engine.load_weights(1, good.items())
    assert engine.version == 1
    requests = group_requests(2, 2)
    assert_same(run(engine, requests), run(sampler(source), requests))


def test_copy_weights_writes_into_the_same_tensors():
    target, source = build("qwen3"), build("qwen3", seed=1)
    pointers = {n: p.data_ptr() for n, p in target.named_parameters()}
    copy_weights(target, source.named_parameters())
    assert {n: p.data_ptr() for n, p in target.named_parameters()} == pointers
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), source.parameters(), strict=True))


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_the_trainers_own_and_is_left_as_it_was(fails):
    model = build("gemma3").train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    model.config._attn_implementation = "sdpa"
    pointers = [p.data_ptr() for p in model.parameters()]
    engine = sampler(model)
    seen = []
    hook = model.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, _: seen.append((module.config._attn_implementation, module.training, torch.is_grad_enabled()))
    )
    if fails:
        with torch.no_grad():
            model.model.norm.weight[0] = torch.nan
    engine.submit(group_requests(2, 2))
    try:
        for _ in engine.completed():
            assert model.config._attn_implementation == "sdpa"  # between samples the trainer may use the model
            assert torch.is_grad_enabled()
    except RolloutError:
        assert fails
    hook.remove()
    assert set(seen) == {(ATTENTION, False, False)}
    assert [m.training for m in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(p.requires_grad for p in model.parameters())


def test_non_finite_logits_name_the_sample_and_lose_no_request():
    model = build("llama")
    requests = group_requests(3, 2, SamplingParams(10, min_new_tokens=10))
    engine = sampler(model)
    engine.submit(requests)
    assert list(engine.completed(deadline_s=0)) == []
    weight = model.model.layers[2].mlp.down_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight[3, 3] = torch.nan
    with pytest.raises(RolloutError, match=r"non-finite logits at token 1 of sample \(0, 0, 0, 0\).*version 0"):
        list(engine.completed())
    with torch.no_grad():
        weight.copy_(good)
    assert_same({s.id: s for s in engine.completed()}, run(sampler(model), requests))


def text(tokens):
    return "".join(chr(ord("a") + t % 26) if t < 40 else "" for t in tokens)


def test_a_stop_string_ends_a_sample_at_the_token_that_completes_it(any_model):
    free = run(sampler(any_model), group_requests(6, 4, SamplingParams(30, ignore_eos=True)))
    pairs = Counter(text(s.tokens.tolist())[i : i + 2] for s in free.values() for i in range(5, 25))
    stop = max((p for p in pairs if len(p) == 2), key=lambda p: pairs[p])
    for min_new in (0, 12):
        params = SamplingParams(30, ignore_eos=True, stop=(stop, "§"), min_new_tokens=min_new)
        stopped = run(sampler(any_model, decode=text), group_requests(6, 4, params))
        ended = 0
        for id, sample in stopped.items():
            whole = free[id].tokens.tolist()
            ends = [n for n in range(max(1, min_new), 31) if text(whole[:n]).endswith(stop) and whole[n - 1] < 40]
            assert sample.tokens.tolist() == whole[: ends[0] if ends else 30]
            assert sample.finish == ("stop" if ends else "length")
            ended += bool(ends)
        assert ended > 0


def test_half_a_character_before_its_stop_string_is_no_obstacle(model):
    def utf8(tokens):  # token t is the byte 0xC3 or 0xA9: together "é"
        return bytes(0xC3 if t % 2 else 0xA9 for t in tokens).decode(errors="replace")

    params = SamplingParams(30, ignore_eos=True, stop=("é",))
    for sample in run(sampler(model, decode=utf8), group_requests(4, 2, params)).values():
        assert sample.finish == "stop"
        assert utf8(sample.tokens.tolist()).endswith("é")
        assert utf8(sample.tokens.tolist()).count("é") == 1


def test_a_sampled_eos_or_stop_token_belongs_to_the_sample(any_model):
    params = SamplingParams(40, stop_token_ids=(9, 11), temperature=1.5)
    samples = run(sampler(any_model), group_requests(8, 4, params)).values()
    assert {int(s.tokens[-1]) for s in samples if s.finish == "stop"} == {EOS, 9, 11}
    for sample in samples:
        assert not set(sample.tokens[:-1].tolist()) & {EOS, 9, 11}
        assert (sample.finish == "length") == (sample.tokens[-1] not in (EOS, 9, 11))


def test_samples_finished_but_not_yet_taken_survive_a_consumer_that_stops_reading(any_model):
    requests = [Request(SampleId(0, i), prompt_of(0), SamplingParams(1)) for i in range(4)]
    engine = sampler(any_model)
    engine.submit(requests)
    first = next(engine.completed())
    assert {first.id} | {s.id for s in engine.completed()} == {r.id for r in requests}


def play_turns(engine, num_turns, keep_cache):
    """Episodes of several turns: (requests, samples) by id. Observations differ in length."""
    params = SamplingParams(6)
    requests = [Request(r.id, r.prompt, r.params, keep_cache=keep_cache) for r in group_requests(4, 3, params)]
    asked, samples = {}, {}
    for turn in range(num_turns):
        asked |= {r.id: r for r in requests}
        samples |= run(engine, requests)
        requests = [
            Request(
                r.id._replace(turn=turn + 1),
                r.prompt + tuple(samples[r.id].tokens.tolist()) + (5, 6, 7)[: 1 + (r.id.sample + turn) % 3],
                params,
                keep_cache=keep_cache,
            )
            for r in requests
        ]
    return asked, samples


@pytest.mark.parametrize("name", brief(CONFIGS, "llama"))
def test_a_turn_continues_the_row_of_the_last_one_and_has_the_log_probs_of_plain_transformers(name):
    model = build(name)
    engine, again = sampler(model, max_rows=12), sampler(model)
    asked, samples = play_turns(engine, 4, keep_cache=True)
    expected = play_turns(again, 4, keep_cache=False)[1]
    for id, request in asked.items():
        np.testing.assert_allclose(
            samples[id].behavior_logp, teacher_forced(model, request, samples[id]), atol=1e-5, rtol=1e-5
        )
    # A sample of two turns later may differ after a draw that falls between two roundings; here none does.
    assert {id: s.tokens.tolist() for id, s in samples.items()} == {id: s.tokens.tolist() for id, s in expected.items()}
    for id, sample in samples.items():
        if sample.extras.routes is not None:
            assert sample.extras.routes.prompt.tolist() == expected[id].extras.routes.prompt.tolist()
            assert sample.extras.routes.own.tolist() == expected[id].extras.routes.own.tolist()
    if engine._engine.is_packed:  # a later turn computes the last answer's last token and the observation
        first = sum(len(prompt_of(g)) for g in range(4))
        later = [1 + 1 + (id.sample + id.turn - 1) % 3 for id in asked if id.turn]
        assert engine.health()["prefill_tokens"] == first + sum(later)
    for group in range(4):
        for i in range(3):
            engine.release(group, i)
    assert engine.health()["cache_bytes"] == 0


def test_a_turn_with_an_edited_history_is_prefilled_and_new_weights_drop_kept_rows(model):
    engine = sampler(model)
    first = Request(SampleId(0, 0), prompt_of(1), PLAIN, keep_cache=True)
    answer = tuple(run(engine, [first])[first.id].tokens.tolist())

    def prefilled(prompt, turn):
        before = engine.health()["prefill_tokens"]
        request = Request(SampleId(0, 0, turn), prompt, PLAIN, keep_cache=True)
        sample = run(engine, [request])[request.id]
        np.testing.assert_allclose(sample.behavior_logp, teacher_forced(model, request, sample), atol=1e-5, rtol=1e-5)
        return engine.health()["prefill_tokens"] - before

    edited = (*prompt_of(1), 9, *answer[1:], 5)
    assert prefilled(edited, 1) == len(edited)
    assert prefilled(prompt_of(2), 2) == len(
        prompt_of(2)
    )  # the row of the edited history was kept instead, and dropped
    engine.load_weights(1, None)
    assert engine.health()["cache_bytes"] == 0


def test_no_more_rows_are_kept_than_may_run(model):
    engine = sampler(model, max_rows=4)
    run(engine, [Request(SampleId(g, 0), prompt_of(g), PLAIN, keep_cache=True) for g in range(11)])
    assert len(engine._stepper.kept) == 4
    for group in range(11):
        engine.release(group, 0)
    assert engine.health()["cache_bytes"] == 0

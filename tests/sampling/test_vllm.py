"""The sampler over a vLLM server: what it asks, what it believes, what a lying or dying server costs.

Without vLLM: against a small server that speaks as vLLM does. With the real one: test_vllm_real.py.
"""

import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from served import IDENTITY
from test_local import group_requests
from tiers import brief
from tiny_models import VOCAB, build
from vllm_lookalike import Lookalike

from gspo.errors import ConfigError, RolloutError, WeightSyncError
from gspo.launcher import engine as serve_engine
from gspo.sampling.engines import base, vllm
from gspo.sampling.engines.base import EngineAddress
from gspo.sampling.engines.vllm import VllmSampler
from gspo.sampling.local.draw import kept_sets, warp
from gspo.sampling.remote.discovery import register
from gspo.sampling.remote.engine import SamplerEngine
from gspo.sampling.remote.server import SamplerServer
from gspo.sampling.weights.load import sequence_logp
from gspo.types import Request, SampleId, SamplingParams

pytestmark = pytest.mark.run

EOS = 2


def run(sampler, requests, deadline_s=20):
    sampler.submit(requests)
    samples = {sample.id: sample for sample in sampler.completed(deadline_s)}
    assert samples.keys() == {request.id for request in requests}
    return samples


def logp_of(model, prompt, tokens):
    return sequence_logp(model, [[*prompt, *tokens]])[0][len(prompt) - 1 :]


def test_kept_sets_are_the_tokens_with_a_finite_processed_log_prob(lookalike):
    sampler, server = lookalike()
    params = SamplingParams(6, top_p=0.9, temperature=0.7, record_kept=True)
    for request in (requests := group_requests(2, 2, params)):
        sampler.submit([request])
    for sample in sampler.completed(20):
        prompt, tokens = next(r.prompt for r in requests if r.id == sample.id), sample.tokens.tolist()
        with torch.no_grad():
            logits = server.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
        want = kept_sets(warp(logits, temperature=0.7, top_p=0.9))
        assert [ids.tolist() for ids in sample.extras.kept.sets()] == [ids.tolist() for ids in want]
        assert 1 < sample.extras.kept.counts.max() < VOCAB


def test_a_kept_set_that_is_cut_off_costs_its_sample_and_is_counted(lookalike, monkeypatch):
    monkeypatch.setattr(vllm, "MAX_KEPT", 2)

    def meddle(body, reply):
        if body["prompt"] == list(requests[0].prompt):  # ties beyond the requested number
            for row in reply["choices"][0]["logprobs"]["top_logprobs"]:
                row.update({name: max(p, -1.0) for name, p in row.items()})
        return reply

    requests = group_requests(2, 1, SamplingParams(4, top_p=0.9, record_kept=True))
    sampler, _ = lookalike(meddle=meddle)
    samples = run(sampler, requests)
    lost, whole = (samples[r.id] for r in requests)
    assert not lost.mask.any()
    assert not lost.extras.kept.counts.any()
    assert whole.mask.all()
    assert whole.extras.kept.counts.min() >= 1
    assert sampler.health()["unknown_kept"] == 1


def test_samples_carry_their_tokens_log_probs_and_endings(lookalike):
    sampler, server = lookalike()
    requests = group_requests(3, 4, SamplingParams(6))
    for id, sample in run(sampler, requests).items():
        prompt = next(r.prompt for r in requests if r.id == id)
        np.testing.assert_allclose(
            sample.behavior_logp, logp_of(server.model, prompt, sample.tokens.tolist()), atol=1e-5
        )
        assert (sample.finish == "stop") == (sample.tokens[-1] == EOS)
        assert set(sample.versions.tolist()) == {0}
    assert sampler.health()["requests"] == 12


def test_seeds_are_a_function_of_the_key_and_of_nothing_else(lookalike):
    first, _ = lookalike()
    second, _ = lookalike()
    requests = group_requests(2, 4, SamplingParams(8, ignore_eos=True))
    ours, others = run(first, requests), run(second, requests[::-1])
    assert all(ours[id].tokens.tolist() == others[id].tokens.tolist() for id in ours)
    assert len({tuple(sample.tokens) for sample in ours.values()}) == 8


def test_a_request_that_did_not_come_back_from_an_interruption_is_sent_once_more_and_not_twice(lookalike, monkeypatch):
    class Deaf(Lookalike):
        epoch = property(lambda _: 0, lambda *_: None)  # a /pause changes nothing

    monkeypatch.setattr(base, "INTERRUPT_S", 0.2)
    sampler, _ = lookalike(kind=Deaf, pace_s=0.15)
    sampler.submit(group_requests(1, 2, SamplingParams(15, ignore_eos=True)))
    time.sleep(0.1)
    sampler.pause()
    assert sampler.health()["waiting"] == 2  # the fault: both were given up
    sampler.resume()
    assert [len(sample.tokens) for sample in sampler.completed(20)] == [15, 15]
    assert (sampler.health()["requests"], sampler.health()["lost_replies"]) == (4, 0)


def test_a_sample_that_somebody_else_has_interrupted_goes_on(lookalike):
    sampler, server = lookalike(pace_s=0.03)
    sampler.submit(group_requests(1, 2, SamplingParams(15, ignore_eos=True)))
    time.sleep(0.2)
    server.epoch += 1  # as a /pause?mode=abort of another client does
    assert [len(sample.tokens) for sample in sampler.completed(20)] == [15, 15]
    assert sampler.health()["partial"] == 2


def test_sleep_is_vllms_own_where_it_can_and_a_pause_elsewhere(lookalike):
    for can_sleep in (True, False):
        sampler, server = lookalike(can_sleep=can_sleep)
        sampler.sleep()
        sampler.submit(group_requests(1, 1))
        assert list(sampler.completed(0.2)) == []
        sampler.wake()
        assert len(list(sampler.completed(20))) == 1
        assert (server.calls.count("/sleep"), server.calls.count("/wake_up")) == (can_sleep, can_sleep)


def test_a_stop_string_across_an_interruption_ends_the_sample(lookalike):
    """vLLM looks for it in what it wrote itself; the prefix was written before."""
    text = {i: chr(97 + i % 26) for i in range(VOCAB)}
    sampler, _ = lookalike(decode=lambda tokens: "".join(text[int(t)] for t in tokens))
    params = SamplingParams(12, ignore_eos=True)
    whole = run(sampler, [Request(SampleId(0, 0), (5, 6), params)])[SampleId(0, 0)]
    said = replace(
        whole,
        finish="abort",
        **{n: getattr(whole, n)[:6] for n in ("tokens", "behavior_logp", "versions", "mask", "turns")},
    )
    body = Request(SampleId(0, 0), (5, 6), params, said)
    after = run(sampler, [body])[SampleId(0, 0)]
    stop = "".join(text[int(t)] for t in after.tokens[4:8])  # begins in the prefix
    ended = run(sampler, [replace(body, params=replace(params, stop=(stop,)))])[SampleId(0, 0)]
    assert (ended.finish, len(ended.tokens)) == ("stop", 8)


def choice(**values):
    return lambda reply: {**reply, "choices": [{**reply["choices"][0], **values}]}


def shorter(reply):
    return choice(token_ids=reply["choices"][0]["token_ids"][:-1])(reply)


LIES = {
    "a log-prob too many": (shorter, r"5 log-probs for 4 tokens"),
    "no log-probs": (choice(logprobs=None), "log-probs are missing"),
    "null for a log-prob": (choice(logprobs={"token_logprobs": [None] * 5}), "log-probs are missing"),
    "a log-prob above 0": (choice(logprobs={"token_logprobs": [0.5] * 5}), "not finite numbers"),
    "a token outside the vocabulary": (choice(token_ids=[3, 3, 3, 3, 4000]), "vocabulary of 48"),
    "a token that is no number": (choice(token_ids=["3"] * 5), "token_ids"),
    "no tokens": (choice(token_ids=None), "token_ids"),
    "tokens without end": (
        choice(token_ids=[3] * 9, logprobs={"token_logprobs": [-0.1] * 9}, finish_reason="length"), "9 tokens, of at"),
    "too few tokens": (
        choice(token_ids=[3], logprobs={"token_logprobs": [-0.1]}, finish_reason="length"), "ends at 1 of 5"),
    "an end at nothing": (choice(token_ids=[3] * 5, finish_reason="stop"), "not an end token"),
    "another finish": (choice(finish_reason="tool_calls"), "finish_reason"),
    "another model": (lambda reply: {**reply, "model": "gpt"}, "answered for the model 'gpt'"),
    "no choice": (lambda reply: {**reply, "choices": []}, "one choice"),
    "an error": (lambda reply: (500, {"error": "out of memory"}), "500"),
    "no JSON": (lambda reply: "tokens!", "not JSON"),
    "a list": (lambda reply: "[1]", "JSON list"),
    "silence": (lambda reply: None, "does not answer"),
}  # fmt: skip


@pytest.mark.parametrize("lie", brief(LIES, *list(LIES)[:4]))
def test_a_lie_costs_a_sample_and_one_that_is_repeated_the_server(lookalike, lie):
    change, message = LIES[lie]
    told = []

    def once(body, reply):
        if body["prompt"][0] == 7 and not told:
            told.append(reply)
            return change(reply)
        return reply

    params = SamplingParams(5, ignore_eos=True)
    requests = [Request(SampleId(0, i), (7, 8, 9), params) for i in range(3)]
    sampler, _ = lookalike(meddle=once)
    honest, _ = lookalike()
    ours, expected = run(sampler, requests), run(honest, requests)
    assert told
    assert all(ours[id].tokens.tolist() == expected[id].tokens.tolist() for id in ours)
    health = sampler.health()
    assert health["invalid_responses"] + health["lost_replies"] == 1
    assert not health["broken"]

    always, _ = lookalike(meddle=lambda _, reply: change(reply), retries=2)
    always.submit(requests[:1])
    with pytest.raises(RolloutError, match=message):
        list(always.completed(20))
    assert always.broken


def test_a_server_that_is_not_what_it_must_be_is_refused(lookalike):
    sampler, server = lookalike()
    assert sampler.check_server()["pid"] == 1
    server.results["gspo_state"] = None
    with pytest.raises(ConfigError, match="worker-extension-cls"):
        sampler.check_server()
    del server.results["gspo_state"]
    complete = server.complete

    def raw(body):  # log-probs before top-k: vLLM's default
        return complete({**body, "top_k": 0})

    server.complete = raw
    with pytest.raises(ConfigError, match="processed_logprobs"):
        sampler.check_server()


def test_progress_counts_tokens_and_a_silent_server_is_an_error(lookalike):
    sampler, _ = lookalike()
    run(sampler, group_requests(1, 1, SamplingParams(5, ignore_eos=True)))
    assert sampler.progress() == 5
    nobody = VllmSampler(
        EngineAddress("http://127.0.0.1:1"), seed=5, num_vocab=VOCAB, max_context=64, eos_token_ids=[EOS]
    )
    with pytest.raises(RolloutError, match="does not answer"):
        nobody.progress()
    nobody.close()


# Behind our own HTTP face, as a trainer sees it


def served(house, sampler, index=0, identity=IDENTITY):
    """A sampler server as serve_vllm.py makes it."""
    engine = SamplerEngine(sampler, identity=identity, score=sampler.score, load=sampler.load_published)
    server = SamplerServer(engine, "a secret of the tests")
    house.stack.callback(server.close)
    register(house.samplers, index, server.url)
    return server


def test_a_trainer_samples_through_it_with_verified_weights(lookalike, house):
    sampler, server = lookalike(seed=99, version=-1)
    served(house, sampler)
    trainer = build("llama_mha", 3)
    client = house.client(reference=trainer)
    for version in range(2):
        with torch.no_grad():
            trainer.model.norm.weight.add_(0.1)
        client.load_weights(version, trainer.named_parameters())
        requests = group_requests(2, 2, SamplingParams(5))
        client.submit(requests)
        samples = {sample.id: sample for sample in client.completed(20)}
        for request in requests:
            sample = samples[request.id]
            assert set(sample.versions.tolist()) == {version}
            said = logp_of(trainer, request.prompt, sample.tokens.tolist())
            np.testing.assert_allclose(sample.behavior_logp, said, atol=1e-5)
    assert [server.calls.count(path) for path in ("/collective_rpc", "/reset_prefix_cache")] == [2, 2]


def test_weights_that_arrive_in_part_are_refused_by_the_probe(lookalike, house):
    """A server that says it has loaded, and keeps the old head: what `reload_weights` alone does to a tied one."""
    sampler, server = lookalike(seed=99, version=-1, stale=["model.embed_tokens.weight"])
    served(house, sampler)
    trainer = build("llama_mha", 3)
    client = house.client(reference=trainer, retries=1)
    with pytest.raises(WeightSyncError, match=r"log-probs of the probe differ"):
        client.load_weights(0, trainer.named_parameters())
    assert "/collective_rpc" in server.calls


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({"refused": "weight 'x' holds NaN"}, WeightSyncError, "holds NaN"),
        ({"broken": "RuntimeError: half"}, WeightSyncError, "only a part of"),
        ({"version": 7}, WeightSyncError, "only a part of"),
        (None, WeightSyncError, "only a part of"),
    ],
)
def test_what_the_workers_say_of_a_load_decides(lookalike, house, said, error, message):
    sampler, server = lookalike(version=-1)
    server.results["gspo_load"] = said
    served(house, sampler)
    trainer = build("llama_mha", 1)
    client = house.client(reference=trainer, retries=1)
    with pytest.raises(error, match=message):
        client.load_weights(0, trainer.named_parameters())
    assert bool(sampler.broken) == ("refused" not in (said or {}))


def test_a_lying_vllm_loses_its_requests_to_an_honest_server(lookalike, house):
    lying, _ = lookalike(version=-1, meddle=lambda _, reply: choice(logprobs=None)(reply), retries=0)
    served(house, lying, 0)
    honest, _ = lookalike(version=-1)
    served(house, honest, 1)
    trainer = build("llama_mha", 1)
    client = house.trained(trainer, 2, retries=3)
    requests = group_requests(6, 2, SamplingParams(5))
    client.submit(requests)
    assert {sample.id for sample in client.completed(20)} == {request.id for request in requests}
    assert client.health()["disconnects"] >= 1
    assert any("log-probs are missing" in note for note in client.said)


def test_one_gpu_for_both_sleeps_between_batches_and_wakes_for_weights_and_requests(lookalike, house):
    sampler, server = lookalike(version=-1, can_sleep=True)
    served(house, sampler)
    trainer = build("llama_mha", 1)
    client = house.client(reference=trainer, colocated=True)
    for version in range(2):
        client.load_weights(version, trainer.named_parameters())
        client.submit(group_requests(1, 2, SamplingParams(4)))
        assert len(list(client.completed(20))) == 2
    turns = [path for path in server.calls if path in ("/sleep", "/wake_up", "/collective_rpc", "/v1/completions")]
    order = [path for i, path in enumerate(turns) if i == 0 or turns[i - 1] != path]
    once = ["/collective_rpc", "/v1/completions", "/sleep"]
    assert order == [*once, "/wake_up", *once]


def watched(monkeypatch, sampler, child, patience_s, seconds):
    """What `watch` reports within `seconds`."""
    monkeypatch.setattr(serve_engine, "CHECK_S", 0.02)
    monkeypatch.setattr(serve_engine, "MEASURE_S", 0.02)
    said, ended = [], threading.Event()
    arguments = (sampler, child, patience_s, said.append, ended.set)
    thread = threading.Thread(target=serve_engine.watch_engine, args=arguments, daemon=True)
    thread.start()
    ended.wait(seconds)
    out = list(said)
    sampler.broken = sampler.broken or "the test is over"
    thread.join(10)
    return out


@pytest.mark.full
def test_a_death_a_break_and_a_silence_are_told_apart_and_work_is_none_of_them(lookalike, monkeypatch):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    endless = group_requests(1, 1, SamplingParams(50, ignore_eos=True))
    idle, _ = lookalike()
    assert watched(monkeypatch, idle, child, 1.0, 2.0) == []
    working, server = lookalike(pace_s=0.1)
    working.submit(endless)
    assert watched(monkeypatch, working, child, 1.0, 2.0) == []
    assert server.made > 2
    silent, server = lookalike(pace_s=30)
    silent.submit(endless)
    assert watched(monkeypatch, silent, child, 1.0, 20) == ["vLLM has requests but made no token for 1 s"]
    assert server.made == 0
    assert watched(monkeypatch, silent, child, 60, 10) == ["the test is over"]  # broken by the line before
    child.kill()
    child.wait()
    last, _ = lookalike()
    assert watched(monkeypatch, last, child, 60, 10) == ["vLLM was killed by SIGKILL"]

"""Sampler servers and their client against the sampler in the process: same tokens, nothing lost, nothing twice."""

import asyncio
import json
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import raw_http
import torch
from safetensors.torch import load_file
from served import EOS, TOKEN, local
from test_local import assert_same, group_requests, prompt_of, run
from tiers import brief
from tiny_models import build

from gspo.errors import ConfigError, RolloutError, WeightSyncError
from gspo.learner import full_parameters
from gspo.models import add_adapter, num_experts, route_shape, routers
from gspo.sampling.api import Experts
from gspo.sampling.remote.discovery import give_up, register
from gspo.sampling.remote.engine import FILE, Session, session_order
from gspo.sampling.remote.protocol import WireError, pack_request, pack_sample, unpack_request, unpack_sample
from gspo.sampling.remote.server import CONNECTIONS, SamplerServer
from gspo.sampling.weights.load import fetch_weights
from gspo.sampling.weights.publish import Broadcaster
from gspo.types import TOKEN_ARRAYS, Extras, Request, Routes, Sample, SampleId, SamplingParams

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def trainer():
    """The trainer's model: servers start with other weights and get these."""
    return build("llama")


def collect(client, requests, deadline_s=20):
    client.submit(requests)
    samples = list(client.completed(deadline_s))
    assert sorted(s.id for s in samples) == sorted(r.id for r in requests)
    return {s.id: s for s in samples}


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_one_server_gives_the_samples_of_the_process_bit_for_bit(house, name):
    trainer = build(name)
    house.serve(model=name)
    client = house.trained(trainer, version=3)
    requests = group_requests(5, 4)
    expected, got = run(local(trainer, version=3), requests), collect(client, requests)
    for id, sample in expected.items():
        for name in ("tokens", "behavior_logp", "versions", "mask", "turns"):
            assert getattr(sample, name).tobytes() == getattr(got[id], name).tobytes(), name
        assert sample.finish == got[id].finish


def test_weights_that_are_broadcast_give_the_samples_of_the_process(house, trainer):
    house.serve(0), house.serve(1)
    hub = Broadcaster("127.0.0.1", timeout_s=10.0)
    client = house.client(2, reference=trainer, weight_store=lambda _: hub)
    for version in (1, 2):
        client.load_weights(version, trainer.named_parameters())
        requests = group_requests(4, 3)
        assert_same(collect(client, requests), run(local(trainer, version=version), requests))
    assert not (house.folder / "weights").exists()


def test_a_broadcast_that_is_not_what_was_published_is_refused_whole(house, trainer):
    server, hub = house.serve(), Broadcaster("127.0.0.1", timeout_s=10.0)
    before = [parameter.clone() for parameter in server.model.parameters()]
    honest = hub.publish

    def falsified(version, tensors):
        offer = honest(version, tensors)
        next(iter(offer.tensors.values())).add_(1e-3)
        return offer

    hub.publish = falsified
    client = house.client(reference=trainer, weight_store=lambda _: hub, retries=1)
    with pytest.raises(WeightSyncError, match="did not send what was published"):
        client.load_weights(1, trainer.named_parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, server.model.parameters(), strict=True))


def test_a_broadcast_to_who_went_away_ends_in_time_and_the_next_call_is_answered(trainer):
    offer = Broadcaster("127.0.0.1", timeout_s=1.0).publish(1, trainer.named_parameters())
    address = offer.address(0)
    offer.store.set(offer._key(0, ""), json.dumps({"call": "nobody", "world": 1}))
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        offer.deliver(0)
    assert time.monotonic() - begin < 8
    offer.deliver(0)  # that call has had its answer
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(fetch_weights, f"{address}#again", offer.sha256)
        while not taken.done():
            offer.deliver(0)
    assert all(torch.equal(tensor, taken.result()[name]) for name, tensor in trainer.named_parameters())
    offer.forget()
    assert not [key for key in offer.store.list_keys() if key.startswith(("1-", "nobody", "again"))]


@pytest.mark.parametrize(("name", "targets"), [("llama", ["all-linear"]), ("qwen3_moe", ["all-linear", "experts"])])
def test_an_adapter_travels_alone_and_the_samples_are_those_of_the_process(house, name, targets):
    """Both have the same base and an adapter of the same form."""
    server, trainer = house.serve(model=name), build(name, seed=99)
    for seed, model in enumerate((trainer, server.model)):
        add_adapter(model, rank=2, alpha=3, target_modules=targets, seed=seed)
    client = house.client(reference=trainer, experts=experts_of(trainer, needed=False))
    requests = group_requests(3, 3)
    for version in (1, 2):
        with torch.no_grad():
            for _, parameter in full_parameters(trainer):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version)))
        client.load_weights(version, full_parameters(trainer))
        (file,) = (house.folder / "weights").iterdir()
        assert all(".lora_" in name for name in load_file(file))
        assert_same(collect(client, requests), run(local(trainer, version=version), requests))
    with pytest.raises(WeightSyncError, match="did not arrive"):  # one of its tensors is missing
        client.load_weights(3, list(full_parameters(trainer))[1:])


def test_two_servers_share_the_groups_and_give_the_same_tokens(house, trainer):
    servers = [house.serve(0), house.serve(1)]
    client = house.trained(trainer, 2)
    requests = group_requests(6, 3)
    assert_same(collect(client, requests), run(local(trainer, version=0), requests))
    prefilled = [server.engine.health()["sampler"]["prefill_tokens"] for server in servers]
    assert all(prefilled)
    assert sum(prefilled) == sum(len(prompt_of(g)) for g in range(6))  # a group's prompt once, on one server
    # The same ids, asked for again: sampled anew, or the samples a server has not been told to forget yet.
    assert_same(collect(client, requests), run(local(trainer, version=0), requests))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(9, temperature=0.7, top_p=0.9, top_k=7, min_new_tokens=3, stop_token_ids=(7, 8)),
        SamplingParams(9, temperature=0.7, top_p=0.8, min_p=0.01, record_kept=True),
        SamplingParams(6, greedy=True, temperature=0.0, ignore_eos=True),
    ],
)
def test_sampling_parameters_reach_the_server(house, trainer, params):
    house.serve()
    client = house.trained(trainer)
    requests = group_requests(3, 2, params)
    ours, expected = collect(client, requests), run(local(trainer), requests)
    assert_same(ours, expected, atol=0)
    for id, sample in expected.items():
        assert (sample.extras.kept is not None) == params.record_kept
        if sample.extras.kept is not None:
            assert np.array_equal(ours[id].extras.kept.counts, sample.extras.kept.counts)
            assert np.array_equal(ours[id].extras.kept.ids, sample.extras.kept.ids)


def test_a_lost_reply_neither_loses_nor_doubles_a_sample(house, trainer):
    lost = []

    def lose_the_first_of_each(path, reply):
        if path in ("/generate", "/collect", "/load_weights", "/attach") and path not in lost:
            if path == "/collect" and not reply["samples"]:
                return reply
            lost.append(path)
            return None
        return reply

    server = house.serve(meddle=lose_the_first_of_each)
    client = house.trained(trainer)
    requests = group_requests(4, 3)
    assert_same(collect(client, requests), run(local(trainer), requests))
    assert sorted(lost) == ["/attach", "/collect", "/generate", "/load_weights"]
    assert client.health()["disconnects"] == 2  # of a server that serves
    assert list(client.completed(1)) == []
    assert server.engine.health()["unconfirmed"] == 0 or client.health()["outstanding"] == 0


def test_a_call_may_be_repeated(house, trainer):
    """What a client does after a lost reply, at the server itself."""
    server = house.serve()
    client = house.client()
    client.load_weights(0, trainer.named_parameters())
    engine, session = server.engine, {"session": client._pool.servers[0]._session}
    item = {"key": "k", **pack_request(group_requests(1, 1)[0])}
    assert asyncio.run(engine.generate({**session, "requests": [item]}))["accepted"] == 1
    assert asyncio.run(engine.generate({**session, "requests": [item]}))["accepted"] == 0
    first = asyncio.run(engine.collect({**session, "received": [], "wait_s": 5}))
    again = asyncio.run(engine.collect({**session, "received": [], "wait_s": 0}))
    assert first["samples"] == again["samples"]
    assert len(first["samples"]) == 1
    assert asyncio.run(engine.generate({**session, "requests": [item]}))["accepted"] == 0  # finished, not confirmed
    assert asyncio.run(engine.collect({**session, "received": ["k"], "wait_s": 0}))["samples"] == []


def test_calls_and_replies_are_bounded_in_bytes_and_nothing_is_lost_by_it(house, trainer, monkeypatch):
    monkeypatch.setattr("gspo.sampling.remote.engine.REPLY_BYTES", 1500)
    monkeypatch.setattr("gspo.sampling.remote.link.CALL_BYTES", 2000)
    replies = []

    def measure(path, reply):
        if path == "/collect" and reply["samples"]:
            replies.append((len(json.dumps(reply["samples"])), len(reply["samples"])))
        return reply

    server = house.serve(meddle=measure)
    client = house.trained(trainer)
    requests = group_requests(6, 4)
    one = len(json.dumps({"key": "00", **pack_request(requests[0])}))
    assert_same(collect(client, requests), run(local(trainer), requests))
    assert max(size for size, count in replies if count > 1) <= 1500
    assert sum(count for _, count in replies) >= len(requests)
    assert server.proxy.paths.count("/generate") >= len(requests) * one / 2000 > 2


def test_sampling_is_unaffected_by_abuse(house, trainer):
    """Strangers hold every free connection and send rubbish while samples are drawn."""
    server = house.serve(latency_s=0.01)
    server.head_s = 1.0
    abuse = partial(raw_http.head, server.port, TOKEN, "POST")
    client = house.trained(trainer)
    requests = group_requests(4, 3, SamplingParams(14, min_new_tokens=10))
    client.submit(requests)
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(CONNECTIONS // 4)]
    for connection in idle:
        connection.sendall(b"POST /abort HTTP/1.1\r\nContent-Length: 10\r\n")
    for _ in range(20):
        assert raw_http.talk(server.port, abuse("/abort", Authorization="Bearer no"), b"{}")[0] == 401
        assert raw_http.talk(server.port, abuse("/load_weights"), b"{}")[0] in (400, 409)
    assert_same({s.id: s for s in client.completed(20)}, run(local(trainer), requests))
    assert client.health()["disconnects"] == 0
    assert server.refused >= 20
    for connection in idle:
        connection.close()


def test_a_server_without_a_real_secret_does_not_start(house):
    with pytest.raises(ConfigError, match="GSPO_SAMPLER_TOKEN"):
        SamplerServer(house.serve().engine, "short")


# Servers that do not tell the truth


def falsify(field, value):
    def change(path, reply):
        for item in reply.get("samples", []) if path == "/collect" else []:
            sample = unpack_sample(item["sample"])
            changed = np.array(value(getattr(sample, field)), dtype=getattr(sample, field).dtype)
            columns = {n: getattr(sample, n) for n in ("tokens", "behavior_logp", "versions", "mask", "turns")}
            lengths = {n: c[: len(changed)] for n, c in columns.items()}
            item["sample"] = pack_sample(Sample(sample.id, **{**lengths, field: changed}, finish=sample.finish))
        return reply

    return change


def without(name):
    def change(path, reply):
        for item in reply.get("samples", []) if path == "/collect" else []:
            del item["sample"][name]
        return reply

    return change


def answers(path, **values):
    return lambda at, reply: {**reply, **values} if at == path else reply


LIES = {
    "a token too few": (falsify("tokens", lambda t: t[:-1]), "ends|stops"),
    "a token outside the vocabulary": (falsify("tokens", lambda t: [*t[:-1], 4000]), "vocabulary of 48"),
    "no log-probs": (without("behavior_logp"), "behavior_logp must be str"),
    "NaN for a log-prob": (falsify("behavior_logp", lambda p: [*p[:-1], np.nan]), "not finite"),
    "a log-prob above 0": (falsify("behavior_logp", lambda p: p * 0 + 1), "not finite numbers ≤ 0"),
    "a version never published": (falsify("versions", lambda v: v + 1), "weight versions 1…1"),
    "an older version": (falsify("versions", lambda v: v - 1), "weight versions -1…-1"),
    "another sample": (
        lambda path, reply: (
            reply
            if path != "/collect"
            else {**reply, "samples": [{**i, "sample": {**i["sample"], "id": [9, 9, 0, 0]}} for i in reply["samples"]]}
        ),
        "it is sample \\(9, 9, 0, 0\\)",
    ),
    "no JSON object": (lambda path, reply: [1] if path == "/collect" else reply, "must be an object"),
    "another version loaded": (answers("/load_weights", version=7), "reports version 7"),
    "another model's probe": (answers("/load_weights", probe=[[-1.0] * 11] * 3), "samples from another model"),
    "no probe": (answers("/load_weights", probe=None), "did not report the log-probs"),
    "another seed": (lambda p, r: {**r, "facts": {**r["facts"], "seed": 6}} if p == "/attach" else r, "its seed is 6"),
}


@pytest.fixture(scope="module")
def mixture():
    return build("qwen3_moe")


def experts_of(model, needed=True):
    found = routers(model)
    return Experts(*route_shape(found)[:2], num_experts(found), needed)


def test_one_server_of_a_mixture_gives_the_routes_of_the_process(house, mixture):
    house.serve(model="qwen3_moe")
    client = house.trained(mixture, experts=experts_of(mixture))
    requests = group_requests(3, 2)
    ours, expected = collect(client, requests), run(local(mixture), requests)
    assert_same(ours, expected)
    for id, sample in expected.items():
        assert len({*sample.extras.routes.own.ravel().tolist()}) > 1
        for part in ("own", "prompt"):
            one, other = (getattr(each.extras.routes, part) for each in (ours[id], sample))
            assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_an_interrupted_sample_of_a_mixture_goes_on_with_the_routes_it_has(house, mixture):
    server = house.serve(model="qwen3_moe", latency_s=0.02)
    client = house.trained(mixture, experts=experts_of(mixture))
    requests = group_requests(3, 2, SamplingParams(30, ignore_eos=True))
    client.submit(requests)
    begin = time.monotonic()
    while server.engine._turns < 8 and time.monotonic() - begin < 10:
        time.sleep(0.01)
    partial = {sample.id: sample for sample in client.abort()}
    assert all(0 < len(partial[request.id].tokens) < 30 for request in requests)
    again = collect(client, [replace(request, prefix=partial[request.id]) for request in requests])
    whole = run(local(mixture), requests)
    for id, sample in again.items():
        assert sample.extras.routes.own.tolist() == whole[id].extras.routes.own.tolist()
        assert sample.extras.routes.prompt.tolist() == whole[id].extras.routes.prompt.tolist()


def routed_as(part, change):
    """A server that says other routes."""

    def meddle(path, reply):
        for item in reply.get("samples", []) if path == "/collect" else []:
            sample = unpack_sample(item["sample"])
            routes = replace(sample.extras.routes, **{part: change(getattr(sample.extras.routes, part))})
            item["sample"] = pack_sample(replace(sample, extras=Extras(routes)))
        return reply

    return meddle


FALSE_ROUTES = {
    "no routes": (lambda path, reply: without("routes")(path, without("prompt_routes")(path, reply)), "has no routes"),
    "routes: none of the prompt": (without("prompt_routes"), "prompt_routes must be dict"),
    "routes: a layer too few": (routed_as("own", lambda r: r[:, 1:]), r"routes are uint8"),
    "routes: a token of the prompt too few": (routed_as("prompt", lambda r: r[1:]), "prompt_routes are uint8"),
    "routes: of another type": (routed_as("own", lambda r: r.astype(np.int16)), "routes are int16"),
    "routes: an expert that is not there": (routed_as("own", lambda r: r + 200), "name experts 200"),
    "routes: an expert twice": (routed_as("prompt", lambda r: r * 0), "an expert twice"),
}


@pytest.mark.parametrize("lie", brief([*LIES, *FALSE_ROUTES], *list(LIES)[:4], "routes: an expert twice"))
def test_a_lie_is_found_and_the_others_do_its_work(house, trainer, mixture, lie):
    if lie in LIES:
        name, model, (meddle, message), how = "llama", trainer, LIES[lie], {}
    else:
        name, model, (meddle, message) = "qwen3_moe", mixture, FALSE_ROUTES[lie]
        how = {"experts": experts_of(mixture)}
    server, _ = house.serve(0, model=name, meddle=meddle), house.serve(1, model=name)
    client = house.trained(model, 2, retries=2, **how)
    requests = group_requests(6, 2, SamplingParams(5))
    assert_same(collect(client, requests), run(local(model), requests))
    assert server.proxy.paths  # it was asked
    assert client.health()["invalid_responses"] >= 1
    reasons = " ".join([*client.said, *(s.get("reason", "") for s in client.health()["servers"])])
    assert re.search(message, reasons), reasons


def test_where_every_server_lies_the_run_ends_and_says_so(house, trainer):
    house.serve(0, meddle=LIES["NaN for a log-prob"][0])
    client = house.trained(trainer, retries=2)
    client.submit(group_requests(2, 2))
    with pytest.raises(RolloutError, match=r"sampler 0 .*log-probs are not finite"):
        list(client.completed(20))
    assert client.health()["invalid_responses"] >= 3


def test_no_server_at_all_is_a_typed_error_in_time(house, trainer):
    client = house.client(2, timeout_s=1.0)
    begin = time.monotonic()
    with pytest.raises(RolloutError, match=r"has not registered.*rollout.request_timeout"):
        client.load_weights(0, trainer.named_parameters())
    assert time.monotonic() - begin < 5


def test_a_server_that_accepts_and_never_answers_is_given_up_in_time(house, trainer):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        register(house.samplers, 0, f"http://127.0.0.1:{silent.getsockname()[1]}")
        client = house.client(1, timeout_s=1.5)
        with pytest.raises(RolloutError, match=r"no answer in 0\.5 s"):
            client.load_weights(0, trainer.named_parameters())


def test_servers_that_nobody_starts_again_end_the_run_at_once(house, trainer):
    for index in range(2):
        give_up(house.samplers, index, f"ended with exit code 2, see sampler_{index}.log")
    client = house.client(2, timeout_s=60.0)
    begin = time.monotonic()
    with pytest.raises(RolloutError, match=r"none will be restarted.*sampler_0\.log"):
        client.load_weights(0, trainer.named_parameters())
    assert time.monotonic() - begin < 20


def test_a_sampler_that_fails_says_why(house, trainer):
    """Weights that are finite and overflow: every server fails at the first token."""
    house.serve()
    client = house.client(retries=1)
    broken = build("llama")
    for parameter in broken.parameters():
        parameter.data.mul_(1e18)
    broken.model.norm.weight.data.mul_(1e18)
    client.submit(group_requests(1, 1))
    with pytest.raises((RolloutError, WeightSyncError), match=r"non-finite logits|log-probs of the probe"):
        _ = client.load_weights(0, broken.named_parameters()), list(client.completed(20))


def test_a_newer_trainer_takes_the_server_from_an_older_one(house, trainer):
    house.serve()
    old = house.client(timeout_s=2.0)
    old.load_weights(5, trainer.named_parameters())
    new = house.client(weight_store=lambda _: house.folder / "weights2")
    new.load_weights(2, trainer.named_parameters())  # a resumed run begins with an older version
    old.submit(group_requests(1, 1))
    with pytest.raises(RolloutError, match="newer trainer"):
        list(old.completed(20))
    requests = group_requests(2, 2)
    assert_same(collect(new, requests), run(local(trainer), requests))


def test_a_restarted_trainer_takes_its_servers_over_whatever_the_clock_says(house, trainer, monkeypatch):
    """The session of the trainer before came from a clock that was a day ahead; one of two servers has restarted."""
    ahead = f"{time.time_ns() + 86400 * 10**9:020d}-dead"
    asyncio.run(house.serve(0).engine.attach({"session": ahead}))
    house.serve(1)
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    monkeypatch.setattr(time, "time", lambda: 1e9)
    new = house.client(2, timeout_s=5.0)
    new.load_weights(0, trainer.named_parameters())
    assert [server["serving"] for server in new.health()["servers"]] == [True, True]
    newest = house.client(2, timeout_s=5.0, weight_store=lambda _: house.folder / "weights2")
    newest.load_weights(0, trainer.named_parameters())
    new.submit(group_requests(1, 1))
    with pytest.raises(RolloutError, match="newer trainer"):
        list(new.completed(20))
    assert newest.health()["disconnects"] == 0


def test_the_count_of_trainers_is_in_the_run_and_may_be_lost_or_damaged(tmp_path):
    first, second = Session(tmp_path), Session(tmp_path)
    assert session_order(first.id) < session_order(second.id)
    assert not first.outbid(second.id)  # the file says that it is not the newest
    for damage in ("", "-5", "x" * 100, "9" * 30, "\x00"):
        (tmp_path / FILE).write_text(damage)
        third = Session(tmp_path)
        assert third.outbid(second.id)
        assert session_order(third.id) > session_order(second.id)
    for other in ("zz", "9" * 20 + "-x", "9" * 4000, "-1", "\u0669-x", ""):  # none of these locks a server
        assert session_order(other) < session_order(first.id)
    assert not third.outbid(f"{10**19 - 1}-x")  # there is no higher number


# On the wire


def test_samples_and_requests_travel_bit_for_bit():
    sample = Sample(
        SampleId(2**40 + 3, 1, 2, 1),
        np.array([4, 5, 6], dtype=np.int32),
        np.array([-1e-45, -0.1, -np.float32(3.4e38)], dtype=np.float32),
        np.array([1, 1, 2], dtype=np.int32),
        np.array([True, False, True]),
        np.array([0, 1, 2], dtype=np.int16),
        "abort",
        Extras(
            Routes(np.arange(300, 308, dtype=np.int16).reshape(2, 2, 2), np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
        ),
    )
    request = Request(sample.id, (7, 8), SamplingParams(9, stop=("é\n",), stop_token_ids=(3,)), sample)
    again = unpack_request(pack_request(request))
    assert (again.id, again.prompt, again.params) == (request.id, request.prompt, request.params)
    assert again.prefix is not None
    parts = [(name, sample, again.prefix) for name in TOKEN_ARRAYS]
    parts += [(name, sample.extras.routes, again.prefix.extras.routes) for name in ("own", "prompt")]
    for name, ours, theirs in parts:
        one, other = getattr(ours, name), getattr(theirs, name)
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), name
    assert EOS not in again.params.stop_token_ids


@pytest.mark.parametrize(
    "change",
    [
        {"id": [1, 2, 3]},
        {"id": [1, 2, 3, True]},
        {"tokens": "AAA"},
        {"tokens": "AAAAAAAAAAA="},
        {"behavior_logp": None},
        {"finish": "done"},
        {"mask": "BQUF"},
        {"routes": {"type": "<i8", "shape": [3, 1, 1], "data": ""}},
        {"routes": {"type": "|u1", "shape": [3, -1, -1], "data": "AAAA"}},
    ],
)
def test_what_is_no_sample_is_refused(change):
    good = pack_sample(Sample.of(SampleId(0, 0), [4, 5, 6], [-1, -1, -1], 0))
    unpack_sample(good)
    with pytest.raises(WireError):
        unpack_sample({**good, **change})

"""What a trainer expects of every sampler: of two engines in the process, of our server, and of vLLM's."""

import time

import numpy as np
import pytest
from served import local
from test_choose import BY_LENGTH, PACKED, forced
from test_local import assert_same, group_requests, prompt_of, run, teacher_forced
from tiny_models import VOCAB, build

from gspo.errors import DataError, RolloutError
from gspo.sampling.weights.publish import publish
from gspo.types import Request, Sample, SampleId, SamplingParams

pytestmark = pytest.mark.run

ENDLESS = SamplingParams(24, ignore_eos=True)


class InProcess:
    """`seats`: how many sequences are sampled at once. `exact`: the same key and prefix draw the same tokens."""

    seats, exact, name = 4, True, "llama"

    def __init__(self, house, lookalike):
        self.model = build(self.name)
        self.sampler = forced(self.model, self.engine, max_rows=self.seats)

    def turns(self):
        return self.sampler.health()["decode_forwards"]

    def advance(self):
        """Until some tokens of the first requests are sampled, and not all of them."""
        for _ in range(6):
            assert list(self.sampler.completed(deadline_s=0)) == []


class Packed(InProcess):
    engine = PACKED

    def load(self, version, model):
        self.model.load_state_dict(model.state_dict())  # shared weights, changed in place
        self.sampler.load_weights(version, None)


class ByLength(InProcess):
    engine, name = BY_LENGTH, "lfm2"

    def load(self, version, model):
        self.sampler.load_weights(version, model.named_parameters())


class Waiting:
    def advance(self):
        before, begin = self.turns(), time.monotonic()
        while self.turns() < before + 4 and time.monotonic() - begin < 20:
            time.sleep(0.01)


class Server(Waiting):
    seats, exact, name = None, True, "llama"

    def __init__(self, house, lookalike):
        self.model, self.server, self.sampler = build("llama"), house.serve(latency_s=0.03), house.client()
        self.load(0, self.model)

    def turns(self):
        return self.server.engine.health()["turns"]

    def load(self, version, model):
        self.sampler.load_weights(version, model.named_parameters())


class Vllm(Waiting):
    seats, exact, name = 4, False, "llama_mha"

    def __init__(self, house, lookalike):
        self.folder = house.folder
        self.sampler, self.server = lookalike(self.name, pace_s=0.03, concurrent=self.seats)
        self.model = self.server.model

    def turns(self):
        return self.server.made // self.seats

    def load(self, version, model):
        published = publish(self.folder, version, model.named_parameters())
        self.sampler.load_published(version, str(published.path), published.sha256)


@pytest.fixture(params=[Packed, ByLength, Server, Vllm])
def subject(request, house, lookalike):
    return request.param(house, lookalike)


def rest(subject, taken=()):
    return {s.id: s for s in [*taken, *subject.sampler.completed(20)]}


def assert_of(model, requests, samples):
    for request in requests:
        sample = samples[request.id]
        np.testing.assert_allclose(sample.behavior_logp, teacher_forced(model, request, sample), atol=1e-5, rtol=1e-5)


def test_aborted_samples_are_partial_and_go_on_as_if_they_had_not_been_interrupted(subject):
    requests = group_requests(3, 2, ENDLESS)
    subject.sampler.submit(requests)
    subject.advance()
    partial = {s.id: s for s in subject.sampler.abort()}
    assert partial.keys() == {r.id for r in requests}
    assert {s.finish for s in partial.values()} == {"abort"}
    lengths = sorted(len(s.tokens) for s in partial.values())
    assert 0 < lengths[-1] < 24
    assert lengths.count(0) == len(requests) - (subject.seats or len(requests))  # the others were still waiting
    assert list(subject.sampler.completed(5)) == []
    again = [Request(r.id, r.prompt, r.params, prefix=partial[r.id]) for r in requests]
    samples = run(subject.sampler, again)
    for id, sample in samples.items():
        assert (len(sample.tokens), sample.finish) == (24, "length")
        num = len(partial[id].tokens)
        assert sample.tokens[:num].tolist() == partial[id].tokens.tolist()
        assert sample.behavior_logp[:num].tolist() == partial[id].behavior_logp.tolist()
    assert_of(subject.model, requests, samples)
    if subject.exact:
        assert_same(samples, run(local(subject.model), requests))


def test_pause_stops_between_tokens_and_resume_loses_nothing(subject):
    params = [SamplingParams(num, ignore_eos=True) for num in (2, 40)]
    requests = [Request(SampleId(g, i), prompt_of(g), params[i]) for g in range(2) for i in range(2)]
    sampler, early = subject.sampler, []
    sampler.submit(requests)
    for sample in sampler.completed(20):
        early.append(sample)
        sampler.pause()
    assert 0 < len(early) < len(requests)
    before = subject.turns()
    assert list(sampler.completed(0.3)) == []
    assert subject.turns() - before <= 1  # the token that was being sampled
    sampler.resume()
    samples = rest(subject, early)
    assert {id: len(s.tokens) for id, s in samples.items()} == {r.id: r.params.max_new_tokens for r in requests}
    assert_of(subject.model, requests, samples)
    if subject.exact:
        assert_same(samples, run(local(subject.model), requests))


def test_a_sampler_that_sleeps_samples_nothing_and_wakes_to_go_on(subject):
    requests = group_requests(2, 1, ENDLESS)
    subject.sampler.submit(requests)
    subject.advance()
    assert subject.sampler.health().get("cache_bytes", 1) > 0
    subject.sampler.sleep()
    assert list(subject.sampler.completed(0.3)) == []
    assert subject.sampler.health().get("cache_bytes", 0) == 0
    subject.sampler.wake()
    samples = rest(subject)
    assert_of(subject.model, requests, samples)
    if subject.exact:
        assert_same(samples, run(local(subject.model), requests))


def test_new_weights_interrupt_samples_which_go_on_with_them(subject):
    requests = group_requests(1, 2, ENDLESS)
    old, new = build(subject.name), build(subject.name, seed=7)
    old.load_state_dict(subject.model.state_dict())
    subject.sampler.submit(requests)
    subject.advance()
    subject.load(1, new)
    assert subject.sampler.version == 1
    samples, continued = rest(subject), []
    for request in requests:
        sample = samples[request.id]
        assert sample.versions.tolist() == sorted(sample.versions)
        assert set(sample.versions.tolist()) == {0, 1}
        said = sample.versions.tolist().count(0)
        before, after = teacher_forced(old, request, sample), teacher_forced(new, request, sample)
        np.testing.assert_allclose(sample.behavior_logp, [*before[:said], *after[said:]], atol=1e-5)
        assert np.abs(before - after)[said:].max() > 0.01
        prefix = Sample.of(request.id, sample.tokens[:said], sample.behavior_logp[:said], 0, "abort")
        continued.append(Request(request.id, request.prompt, request.params, prefix))
    if subject.exact:  # what follows from the second weights and the same tokens
        assert_same(samples, run(local(new, version=1), continued))


def asked(prompt=(5, 6), prefix=None, **params):
    return Request(SampleId(3, 1), prompt, SamplingParams(**{"max_new_tokens": 4, **params}), prefix)


REFUSED = {
    "prompt is empty": asked(prompt=()),
    f"token {VOCAB} is outside the model's vocabulary of {VOCAB}": asked(prompt=(5, VOCAB)),
    "token -1 is outside": asked(prompt=(-1,)),
    "= 65 exceeds the context of 64; lower gconfig.max_new_tokens or train_dataset": asked(max_new_tokens=63),
    "gconfig.max_new_tokens is 0": asked(max_new_tokens=0),
    "greedy decoding": asked(temperature=0.0),
    "gconfig.top_p": asked(top_p=0.0),
    "gconfig.top_k": asked(top_k=-1),
    "gconfig.min_new_tokens 5 exceeds": asked(min_new_tokens=5),
    "gconfig.stop": asked(stop=("x",)),
    "already complete": asked(prefix=Sample.of(SampleId(3, 1), [4], [0.0], 0, "stop")),
    "prefix token 99": asked(prefix=Sample.of(SampleId(3, 1), [99], [0.0], 0, "abort")),
}


def test_a_request_that_cannot_be_sampled_is_refused_by_name_and_queues_nothing(subject):
    for message, bad in REFUSED.items():
        with pytest.raises(DataError, match=message) as raised:
            subject.sampler.submit([asked(), bad])
        assert "(3, 1, 0, 0)" in str(raised.value)
    begin = time.monotonic()
    assert list(subject.sampler.completed(20)) == []
    assert time.monotonic() - begin < 10  # nothing is outstanding
    assert subject.turns() == 0


def test_a_closed_sampler_refuses_work(subject):
    subject.sampler.submit(group_requests(1, 2))
    subject.sampler.close()
    assert list(subject.sampler.completed(5)) == []
    with pytest.raises(RolloutError, match="closed"):
        subject.sampler.submit(group_requests(1, 1))

"""The kept sets of truncated sampling: recorded, bounded, and unchanged on every way to the learner."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import build

from gspo.envs import Exchange, assemble
from gspo.learner import Command
from gspo.rollout import pack_batch, pack_groups, unpack_batch, unpack_groups
from gspo.sampling.api import invalid_reason
from gspo.sampling.local import draw
from gspo.sampling.local.draw import kept_sets, warp
from gspo.sampling.local.engine import LocalSampler
from gspo.sampling.remote.protocol import WireError, pack_request, pack_sample, unpack_request, unpack_sample
from gspo.types import Extras, Group, Kept, Prompt, Request, Sample, SampleId, SamplingParams, Score

CUT = SamplingParams(12, top_p=0.9, record_kept=True)
LOGITS = torch.log(torch.tensor([[0.05, 0.5, 0.25, 0.15, 0.05], [0.6, 0.1, 0.1, 0.1, 0.1]], dtype=torch.float64))


@pytest.mark.parametrize(
    ("how", "sets"),
    [
        ({}, [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]),
        ({"min_p": 0.3}, [[1, 2, 3], [0]]),
        ({"min_p": 1.0}, [[1], [0]]),
        ({"top_k": 2}, [[1, 2], [0, 1, 2, 3, 4]]),  # ties with the k-th stay
        ({"top_p": 0.7}, [[1, 2], [0, 1, 2, 3, 4]]),
        ({"min_p": 0.3, "top_p": 0.8}, [[1, 2], [0]]),  # top-p is of what min-p leaves: 0.75 / 0.9 > 0.8
        ({"temperature": 0.25, "min_p": 0.3}, [[1], [0]]),  # the temperature comes first
    ],
)
def test_the_kept_set_of_each_setting(how, sets):
    assert [ids.tolist() for ids in kept_sets(warp(LOGITS, **how))] == sets


def test_the_bound_holds_for_ties_too():
    sets = kept_sets(warp(LOGITS, top_k=2, max_kept=2))
    assert sets[0].tolist() == [1, 2]
    assert len(sets[1]) == 2
    assert 0 in sets[1]


def requests_of(params, num=4):
    return [Request(SampleId(g, i), (3 + g, 4, 5), params) for g in range(2) for i in range(num)]


def sampled(model, requests, **how):
    sampler = LocalSampler(model, seed=5, eos_token_ids=[2], verify=False, **how)
    sampler.submit(requests)
    return {s.id: s for s in sampler.completed()}


def assert_same_kept(one, other):
    assert one.counts.tolist() == other.counts.tolist()
    assert one.ids.tolist() == other.ids.tolist()


def test_sets_are_recorded_only_on_request_and_change_no_draw():
    model = build("llama")
    with_sets, without = (sampled(model, requests_of(p)) for p in (CUT, replace(CUT, record_kept=False)))
    for id, sample in with_sets.items():
        assert sample.tokens.tolist() == without[id].tokens.tolist()
        assert without[id].extras.kept is None
        assert len(sample.extras.kept.counts) == len(sample.tokens)


def test_a_set_above_the_bound_is_cut_to_its_most_likely_tokens(monkeypatch):
    monkeypatch.setattr(draw, "MAX_KEPT", 3)
    for sample in sampled(build("llama"), requests_of(replace(CUT, top_p=0.99))).values():
        assert sample.extras.kept.counts.max() <= 3
        assert all(t in ids for t, ids in zip(sample.tokens, sample.extras.kept.sets(), strict=True))


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_an_interrupted_sample_continues_with_the_sets_it_has(name):
    model, requests = build(name), requests_of(replace(CUT, min_new_tokens=8))
    sampler = LocalSampler(model, seed=5, eos_token_ids=[2], verify=False, max_rows=5)
    sampler.submit(requests)
    found = {}
    for _ in range(4):
        found |= {s.id: s for s in sampler.completed(deadline_s=0)}
    partial = {s.id: s for s in sampler.abort()}
    assert {len(s.tokens) for s in partial.values()} >= {0, 4}
    # As a server gets it: through JSON.
    again = [Request(r.id, r.prompt, r.params, prefix=partial[r.id]) for r in requests if r.id in partial]
    again = [unpack_request(json.loads(json.dumps(pack_request(r)))) for r in again]
    sampler.submit(again)
    found |= {s.id: s for s in sampler.completed()}
    for request in requests:
        sample = found[request.id]
        if request.id in partial:
            num = len(partial[request.id].tokens)
            assert sample.tokens[:num].tolist() == partial[request.id].tokens.tolist()
            assert_same_kept(sample.extras.kept.up_to(num), partial[request.id].extras.kept or Kept.whole(0))
        assert invalid_reason(request, sample, num_vocab=2000, ends=[2], versions=(0, 0)) is None


ID = SampleId(0, 0)


def made(id=ID, tokens=(4, 9, 2), sets=((4, 6), (9,), (1, 2, 3))):
    return replace(Sample.of(id, tokens, [-0.5] * len(tokens), 0), extras=Extras(kept=Kept.of(sets)))


LIES = {
    "no kept sets": lambda s: replace(s, extras=Extras()),
    "not in its kept set": lambda s: replace(s, extras=Extras(kept=Kept.of([[4, 6], [8], [1, 2, 3]]))),
    "without a kept set": lambda s: replace(s, extras=Extras(kept=Kept.of([[4, 6], [], [1, 2, 3]]))),
    "ascending": lambda s: replace(s, extras=Extras(kept=Kept.of([[6, 4], [9], [1, 2, 3]]))),
    "name tokens": lambda s: replace(s, extras=Extras(kept=Kept.of([[4, 77], [9], [1, 2, 3]]))),
}


@pytest.mark.parametrize("why", LIES)
def test_sets_that_cannot_be_are_refused(why):
    request = Request(SampleId(0, 0), (1,), CUT)
    check = {"num_vocab": 20, "ends": [2], "versions": (0, 0)}
    assert invalid_reason(request, made(), **check) is None
    assert why in invalid_reason(request, LIES[why](made()), **check)
    assert "not requested" in invalid_reason(replace(request, params=replace(CUT, record_kept=False)), made(), **check)
    # A token whose set is unknown is masked.
    unknown = replace(made(), extras=Extras(kept=Kept.of([[4, 6], [], [1, 2, 3]])), mask=np.array([True, False, True]))
    assert invalid_reason(request, unknown, **check) is None
    longer = replace(request, prefix=made(tokens=(4,), sets=((4, 5),)))
    assert "prefix" in invalid_reason(longer, made(), **check)


def test_sets_travel_to_a_server_and_back():
    body = json.loads(json.dumps(pack_sample(made())))
    assert_same_kept(unpack_sample(body).extras.kept, made().extras.kept)
    body["kept"]["ids"] = body["kept"]["counts"]
    with pytest.raises(WireError, match="kept"):
        unpack_sample(body)


def test_sets_survive_a_checkpoint_and_the_way_to_other_ranks():
    prompt = Prompt((1, 2), "?")
    second = made(SampleId(0, 1), (7,), ((7, 8),))
    episode = replace(second, rest=(replace(made(), prompt=(1, 2, 5)),))
    nothing = Sample.of(SampleId(1, 0), [], [], 0)
    groups = [
        Group(0, prompt, (made(), episode), ("", ""), (Score(1.0), Score(0.0))),
        Group(1, prompt, (nothing,), ("",), (Score(0.0),)),
    ]
    arrays, rows = pack_groups(groups)
    content, sent = pack_batch({}, groups)
    for found in (
        unpack_groups(arrays, json.loads(json.dumps(rows)), lambda _: prompt),
        unpack_batch(Command("train", content, sent)),
    ):
        got = [part for group in found for sample in group.samples for part in sample.sequences]
        want = [part for group in groups for sample in group.samples for part in sample.sequences]
        for a, b in zip(got, want, strict=True):
            assert (a.extras.kept is None) == (b.extras.kept is None)
            if b.extras.kept is not None:
                assert_same_kept(a.extras.kept, b.extras.kept)


def test_turns_of_an_episode_keep_their_sets_and_environment_tokens_have_none():
    first = Exchange((1, 2), made(tokens=(3, 4), sets=((3,), (4, 5))))
    second = Exchange((1, 2, 3, 4, 9, 9), made(SampleId(0, 0, turn=1), (6,), ((6, 7, 8),)))
    (joined,) = assemble([first, second])
    assert [ids.tolist() for ids in joined.extras.kept.sets()] == [[3], [4, 5], [], [], [6, 7, 8]]
    assert [ids.tolist() for ids in joined.trained_kept.sets()] == [[3], [4, 5], [6, 7, 8]]
    assert joined.up_to(2).extras.kept.ids.tolist() == [3, 4, 5]
    assert np.array_equal(joined.extras.kept.where(np.zeros(5, bool)).counts, [])

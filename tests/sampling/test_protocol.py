"""Messages between trainer and sampler servers: any value at any place is read or refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gspo.sampling.remote import protocol as wire
from gspo.types import Extras, Kept, Request, Routes, Sample, SampleId, SamplingParams

VALUES = [None, True, 0, -1, 2**62, 2**64, 10**400, -(10**400), float("nan"), float("inf"), "", "x", "AAAA", "////",
          "====", [], [[]], [None], [1], [10**400], ["x"], [-1, -1], [2**40, 2**40], {}, {"a": 1}, "<i4", [2**62, 4],
          ]  # fmt: skip


def places(value, at=()):
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from places(inner, (*at, key))


def replaced(value, at, new):
    if not at:
        return new
    copy = value.copy()
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


def messages():
    extras = Extras(
        routes=Routes(np.zeros((2, 3, 2), np.uint8), np.zeros((4, 3, 2), np.uint8)[:2]),
        kept=Kept(np.array([2, 1], np.int32), np.array([4, 5, 9], np.int32)),
    )
    sample = replace(Sample.of(SampleId(7, 1), [4, 9], [-0.1, -0.7], 3), extras=extras)
    request = Request(SampleId(1, 2), (4, 5), SamplingParams(max_new_tokens=4, stop=("x",), stop_token_ids=(3,)))
    return (wire.unpack_sample, wire.pack_sample(sample)), (wire.unpack_request, wire.pack_request(request))


@pytest.mark.parametrize("which", [0, 1])
def test_any_value_at_any_place_of_a_message_is_read_or_is_a_wire_error(which):
    read, message = messages()[which]
    message = json.loads(json.dumps(message))
    read(message)
    refused = 0
    for at in places(message):
        for value in VALUES:
            try:
                read(replaced(message, at, value))
            except wire.WireError:
                refused += 1
    assert refused > 300

"""HTTP abuse of a sampler server: refused with 4xx before any work, and sampling goes on unchanged."""

import json
import socket
from dataclasses import replace

import numpy as np
import pytest
import raw_http
from raw_http import WRONG_BODIES
from served import TOKEN, House, local
from test_local import assert_same, group_requests, run
from tiny_models import build

from gspo.errors import ConfigError
from gspo.sampling.remote import protocol as wire
from gspo.sampling.remote.server import CONNECTIONS, SamplerServer
from gspo.types import Extras, Kept, Request, Routes, Sample, SampleId, SamplingParams

pytestmark = pytest.mark.run

POST = ("/attach", "/generate", "/collect", "/abort", "/load_weights", "/pause", "/resume", "/sleep", "/wake", "/score")
ROUTES = [("GET", "/health"), ("GET", "/version"), ("GET", "/vocabulary"), *(("POST", path) for path in POST)]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    house = House(tmp_path_factory.mktemp("house"))
    yield house
    house.close()


@pytest.fixture(scope="module")
def server(house):
    server = house.serve()
    server.body_s = server.head_s = 0.5
    server.max_body = 100_000
    return server


def talk(server, head, body):
    return raw_http.talk(server.port, head, body)


def head(server, method="POST", path="/abort", **change):
    return raw_http.head(server.port, TOKEN, method, path, **change)


def test_the_routes_are_those_that_are_tested(server):
    assert set(server.calls) == set(ROUTES)


@pytest.mark.parametrize(
    ("method", "path"), [*ROUTES, ("PUT", "/abort"), ("BREW", "/pot"), ("OPTIONS", "*"), ("GET", "/x")]
)
@pytest.mark.parametrize(
    "secret", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", "Bearer ü"]
)
def test_no_route_answers_without_the_token(server, method, path, secret):
    status, reply = talk(server, head(server, method, path, Authorization=secret), b"{}")
    assert status == (400 if method == "BREW" else 401)  # the parser does not know that method
    assert TOKEN.encode() not in reply


@pytest.mark.parametrize("body", [*WRONG_BODIES, b'{"session": 1}', b'{"session": "s"}'])
@pytest.mark.parametrize("path", POST)
def test_a_wrong_body_is_refused(server, path, body):
    if path == "/attach" and body == b'{"session": "s"}':
        return  # which is right
    status, reply = talk(server, head(server, path=path, **{"Content-Length": str(len(body))}), body)
    assert status in (400, 409)
    assert json.loads(reply)["error"]


def test_sampling_is_unaffected_by_all_of_it(tmp_path):
    """Strangers hold every free connection and send rubbish while samples are drawn."""
    house, trainer = House(tmp_path), build("llama")
    server = house.serve(latency_s=0.01)
    server.head_s = 1.0
    client = house.client(reference=trainer)
    client.load_weights(0, trainer.named_parameters())
    requests = group_requests(4, 3, SamplingParams(14, min_new_tokens=10))
    client.submit(requests)
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(CONNECTIONS // 4)]
    for connection in idle:
        connection.sendall(b"POST /abort HTTP/1.1\r\nContent-Length: 10\r\n")
    for _ in range(20):
        assert talk(server, head(server, path="/abort", Authorization="Bearer no"), b"{}")[0] == 401
        assert talk(server, head(server, path="/load_weights"), b"{}")[0] in (400, 409)
    samples = {s.id: s for s in client.completed(20)}
    assert_same(samples, run(local(trainer), requests))
    assert client.health()["disconnects"] == 0
    assert server.refused >= 20
    for connection in idle:
        connection.close()
    house.close()


def test_a_server_without_a_real_secret_does_not_start(server):
    with pytest.raises(ConfigError, match="GSPO_SAMPLER_TOKEN"):
        SamplerServer(server.engine, "short")


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

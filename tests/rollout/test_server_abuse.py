"""HTTP abuse of a sampler server: refused with 4xx before any work, and sampling goes on unchanged."""

import json
import socket
import time

import pytest
from served import TOKEN, House, local
from test_local import assert_same, group_requests, run
from tiny_models import build

from gspo.errors import ConfigError
from gspo.rollout.server import CONNECTIONS, SamplerServer
from gspo.types import SamplingParams

POST = ("/attach", "/generate", "/collect", "/abort", "/load_weights", "/pause", "/resume", "/sleep", "/wake")
ROUTES = [("GET", "/health"), ("GET", "/version"), *(("POST", path) for path in POST)]


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


def talk(server, head, body=b"", wait_s=5.0):
    """Send bytes as they are; status and the rest of the reply."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait_s) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        reply = b""
        while part := connection.recv(65536):
            reply += part
            if b"\r\n\r\n" in reply and len(reply.partition(b"\r\n\r\n")[2]) >= _length(reply):
                break
    return int(reply.split()[1]), reply.partition(b"\r\n\r\n")[2]


def _length(reply):
    head = reply.partition(b"\r\n\r\n")[0].lower()
    return int(head.partition(b"content-length:")[2].split()[0]) if b"content-length:" in head else 10**9


def head(server, method="POST", path="/abort", **change):
    fields = {
        "Host": f"127.0.0.1:{server.port}",
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": "application/json",
        "Content-Length": "2",
        **change,
    }
    lines = [
        f"{method} {path} HTTP/1.1",
        *(f"{name.replace('_', '-')}: {v}" for name, v in fields.items() if v is not None),
    ]
    return "\r\n".join(lines) + "\r\n"


def test_the_routes_are_those_that_are_tested(server):
    assert set(server.routes) == set(ROUTES)


@pytest.mark.parametrize(
    ("method", "path"), [*ROUTES, ("PUT", "/abort"), ("BREW", "/pot"), ("OPTIONS", "*"), ("GET", "/x")]
)
@pytest.mark.parametrize(
    "secret", [None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", "Bearer ü"]
)
def test_no_route_answers_without_the_token(server, method, path, secret):
    status, reply = talk(server, head(server, method, path, Authorization=secret), b"{}")
    assert status == 401
    assert TOKEN.encode() not in reply


@pytest.mark.parametrize(
    ("status", "change"),
    [
        (403, {"Host": "evil.example"}),
        (403, {"Host": "127.0.0.1:1"}),
        (403, {"Host": None}),
        (403, {"Origin": "http://127.0.0.1"}),
        (403, {"Origin": "null"}),
        (415, {"Content_Type": "text/plain", "Content-Type": None}),
        (415, {"Content-Type": "multipart/form-data"}),
        (411, {"Content-Length": None}),
        (411, {"Content-Length": "-1"}),
        (411, {"Content-Length": "1e9"}),
        (411, {"Transfer-Encoding": "chunked"}),
        (413, {"Content-Length": "100001"}),
        (413, {"Content-Length": "9" * 40}),
        (404, {"path": "/../health"}),
        (405, {"method": "GET"}),
        (405, {"method": "DELETE"}),
    ],
)
def test_a_wrong_head_is_refused(server, status, change):
    assert talk(server, head(server, **change), b"{}")[0] == status


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"x",
        b"[]",
        b"null",
        b"{",
        b'{"session": 1}',
        b"[" * 50_000,
        b'{"a":' * 10_000,
        b"\xff\xfe",
        b'{"session": "s"}',
    ],
)
@pytest.mark.parametrize("path", POST)
def test_a_wrong_body_is_refused(server, path, body):
    if path == "/attach" and body == b'{"session": "s"}':
        return  # which is right
    status, reply = talk(server, head(server, path=path, **{"Content-Length": str(len(body))}), body)
    assert status in (400, 409)
    assert json.loads(reply)["error"]


def test_a_slow_head_and_a_slow_body_end_in_time(server):
    begin = time.monotonic()
    status, _ = talk(server, head(server, **{"Content-Length": "50"}), b"{")
    assert status == 408
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x")
        reply = connection.recv(1000)  # whatever it says, it hangs up
        assert not reply or reply.split()[1].startswith(b"4")
    assert time.monotonic() - begin < 8


@pytest.mark.parametrize(
    "junk", [b"\r\n\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n"]
)
def test_what_is_not_http_is_no_server_error(server, junk):
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(junk)
        connection.shutdown(socket.SHUT_WR)
        reply = b""
        while part := connection.recv(1000):
            reply += part
    assert b" 5" not in reply.partition(b"\r\n")[0]


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
    assert client.health()["lost"] == 0
    assert server.refused >= 20
    for connection in idle:
        connection.close()
    house.close()


def test_a_server_without_a_real_secret_does_not_start(server):
    with pytest.raises(ConfigError, match="GSPO_SAMPLER_TOKEN"):
        SamplerServer(server.engine, "short")

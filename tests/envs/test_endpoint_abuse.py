"""Calls of the agents' endpoint that are refused: by episode, by number, by time; and other episodes go on.

Keys, heads and bodies: tests/system/test_http_abuse.py."""

import asyncio
import json
import socket
import threading

import pytest
from endpoints import Policy, endpoint, head, said
from processes import until
from raw_http import talk

from gspo.envs.agents.endpoint import MAX_PARALLEL, OpenEpisode

pytestmark = pytest.mark.run

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "3+4="}]}


@pytest.fixture(scope="module")
def served():
    with endpoint() as (server, line, _, key):
        server.body_s = server.head_s = 0.5
        server.max_body = 100_000
        yield server, line, key


def post(served, body, path="/e/7-0/v1/chat/completions", key=None):
    server, _, own = served
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return talk(server.port, head(server.port, key or own, path=path, **{"Content-Length": str(len(data))}), data)


@pytest.mark.parametrize(
    "path",
    ["/", "*", "/e", "/e/", "/e/7-0/../8-0/v1/models", "/health", "/e/7-0/v1/embeddings", "/e/7-0/chat/completions"],
)
def test_what_is_below_no_episode_has_no_key(served, path):
    server, _, key = served
    assert talk(server.port, head(server.port, key, "GET", path))[0] in (401, 404)


def test_refusals_are_counted_where_they_belong(served):
    server, line, _ = served
    before, strangers = line.counts.copy(), server.refused
    post(served, {"model": "other", **{k: v for k, v in CHAT.items() if k != "model"}})
    post(served, b"{")
    post(served, CHAT, key="wrong")
    assert line.counts - before == {"model_not_found": 1, "invalid_json": 1}
    assert server.refused == strangers + 1


def test_an_unknown_episode_is_not_found_and_an_ended_one_is_gone(served):
    server = served[0]
    assert post(served, CHAT, "/e/9-9/v1/chat/completions", server.key("9-9"))[0] == 404
    line = OpenEpisode("8-3", Policy(), served[1].loop)
    server.open(line)
    assert post(served, CHAT, "/e/8-3/v1/chat/completions", server.key("8-3"))[0] == 200
    server.end(line)
    status, reply = post(served, CHAT, "/e/8-3/v1/chat/completions", server.key("8-3"))
    assert (status, json.loads(reply)["error"]["code"]) == (410, "episode_ended")


def test_a_connection_is_used_again(served):
    server, _, key = served
    data = json.dumps(CHAT).encode()
    one = head(server.port, key, **{"Content-Length": str(len(data))}).encode() + b"\r\n" + data
    bad = head(server.port, key).encode() + b"\r\n{}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(one + bad + one)
        reply = b""
        while reply.count(b"HTTP/1.1") < 3 or not reply.endswith(b"}"):
            reply += connection.recv(65536)
    assert [part.split()[0] for part in reply.split(b"HTTP/1.1")[1:]] == [b"200", b"400", b"200"]


def slow(seconds):
    async def answer(ask):
        await asyncio.sleep(seconds)
        return said()

    return Policy(answer)


def test_calls_beyond_the_bound_wait_their_turn():
    with endpoint(slow(0.6)) as (server, line, _, key):
        statuses = []
        threads = [
            threading.Thread(target=lambda: statuses.append(post((server, line, key), CHAT)[0]))
            for _ in range(MAX_PARALLEL + 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(statuses) == [200] * MAX_PARALLEL + [429] * 3
        assert line.counts["too_many_calls"] == 3
        assert not line.in_flight


def test_a_call_that_takes_too_long_an_episode_that_ends_and_a_server_that_stops_are_told():
    with endpoint(slow(60), request_timeout_s=0.3) as (server, line, _, key):
        status, reply = post((server, line, key), CHAT)
        assert (status, json.loads(reply)["error"]["code"]) == (408, "request_timeout")
        server.request_timeout_s = 60.0
        for expected in (410, 503):
            other = OpenEpisode(f"7-{expected}", line.answer, line.loop)
            server.open(other)
            threading.Timer(0.3, *((server.close,) if expected == 503 else (server.end, (other,)))).start()
            where = f"/e/{other.name}/v1/chat/completions"
            assert post((server, other, server.key(other.name)), CHAT, where)[0] == expected
            assert not other.in_flight


def test_an_agent_that_hangs_up_frees_its_place():
    with endpoint(slow(60)) as (server, line, _, key):
        data = json.dumps(CHAT).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head(server.port, key, **{"Content-Length": str(len(data))}).encode() + b"\r\n" + data)
            until(lambda: line.in_flight)
        until(lambda: not line.in_flight)
        assert post((server, line, key), {"reward": 1}, "/e/7-0/reward")[0] == 200

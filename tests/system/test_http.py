"""The guard of all HTTP servers: bounds of connections, heads, bodies and times; disconnects; start and stop."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest
import raw_http
from processes import until
from raw_http import until_hung_up

from gspo.system.http import HttpServer, Json, bearer_key, route

pytestmark = pytest.mark.run


class Small(HttpServer):
    """Replies to GET /quick, /late, /slow, /large, /broken and POST /echo."""

    def __init__(self, **settings):
        self.cancelled = threading.Event()
        routes = [
            route("GET", f"/{name}", getattr(self, name)) for name in ("quick", "late", "slow", "large", "broken")
        ]
        limits = {"max_connections": 8, "max_body": 1000, "idle_s": 60.0, **settings}
        super().__init__([*routes, route("POST", "/echo", self.echo)], **limits)

    def authorize(self, request):
        if bearer_key(request) != b"key":
            raise self.refusal(401, "invalid_api_key", "no key")

    async def quick(self, request):
        return Json({})

    async def late(self, request):
        await asyncio.sleep(1.0)
        return Json({})

    async def slow(self, request):
        try:
            await asyncio.sleep(60)
        finally:
            self.cancelled.set()

    async def large(self, request):
        return Json("x" * 30_000_000)

    async def broken(self, request):
        raise ZeroDivisionError("a bug")

    async def echo(self, request):
        return Json({"length": len(await request.body())})


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(**settings):
            server = Small(**settings)
            stack.callback(server.close)
            return server

        yield start


def head(server, path="/quick", method="GET", **change):
    return raw_http.head(server.port, "key", method, path, **{"Content-Length": None, **change}).encode() + b"\r\n"


def connect(server, data=b""):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(data)
    return connection


def status(connection):
    return int(raw_http.receive(connection).split()[1])


def test_clients_without_a_key_cannot_take_the_places_of_those_with_one(serve):
    server = serve()
    with contextlib.ExitStack() as stack:
        old = [stack.enter_context(connect(server, head(server))) for _ in range(3)]
        assert [status(connection) for connection in old] == [200] * 3
        strangers = [stack.enter_context(connect(server, b"GET /quick HT")) for _ in range(30)]
        new = [stack.enter_context(connect(server, head(server))) for _ in range(5)]
        assert [status(connection) for connection in new] == [200] * 5
        for connection in (*old, *new):
            connection.sendall(head(server))
            assert status(connection) == 200
        assert status(strangers[0]) == 429
        with connect(server, head(server)) as one_more:  # all eight places belong to clients with a key
            assert status(one_more) == 429


def test_a_disconnect_cancels_the_request_and_a_half_closed_connection_gets_a_quick_reply(serve):
    server = serve()
    connect(server, head(server, "/slow")).close()
    assert server.cancelled.wait(5)
    assert until_hung_up(server.port, head(server) * 2).count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("path", ["/quick", "/large"])
@pytest.mark.parametrize("more", [b"", b"GET /qui"])
def test_idle_connections_and_unread_replies_are_closed(serve, path, more):
    server = serve(idle_s=0.5)
    with connect(server, head(server, path)) as connection:
        if path == "/quick":
            assert status(connection) == 200
        connection.sendall(more)
        until(lambda: not server._server.server_state.connections, 10)


def test_an_answer_may_take_longer_than_a_head_or_a_pause(serve):
    """A sampled completion takes minutes; the limits of silence are for clients, not for the server's work."""
    server = serve(head_s=0.3, idle_s=0.4)
    with connect(server, head(server, "/late")) as connection:
        assert status(connection) == 200
        connection.sendall(head(server, "/late"))
        assert status(connection) == 200


def test_a_bug_is_a_500_and_nothing_is_printed(serve, capfd):
    server = serve()
    status, reply = raw_http.talk(server.port, head(server, "/broken")[:-2].decode())
    assert (status, reply) == (500, b'{"error": "ZeroDivisionError: a bug", "kind": "internal"}')
    assert raw_http.talk(server.port, head(server)[:-2].decode())[0] == 200
    server.close()
    assert capfd.readouterr() == ("", "")


def test_it_stops_in_time_with_requests_in_flight_and_leaves_no_thread(serve):
    before = set(threading.enumerate())
    server = serve()
    with connect(server, head(server, "/slow")) as busy, connect(server, head(server)) as idle, connect(server):
        assert status(idle) == 200
        begin = time.monotonic()
        server.close()
        assert time.monotonic() - begin < 5
        assert server.cancelled.is_set()
        with contextlib.suppress(ConnectionError):
            assert busy.recv(100) == b""
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        connect(server)

"""The HTTP client against raw sockets: a total deadline, bounded replies, no redirects, no proxies."""

import socket
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress

import pytest

from gspo.system.http_client import HttpClient, ReplyTooLargeError

pytestmark = pytest.mark.run

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
def serve():
    """Start a server that answers each connection with parts, `pause_s` apart; the address and the requests it got."""
    servers = []

    def start(*parts, pause_s=0.0):
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)
        got = []

        def answer(connection):
            with connection, suppress(OSError):  # the client hangs up
                while data := connection.recv(65536):
                    got.append(data)
                    for part in parts:
                        connection.sendall(part)
                        time.sleep(pause_s)

        def accept():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{server.getsockname()[1]}", got

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def test_a_connection_is_kept_and_any_status_is_a_reply(serve):
    url, got = serve(b"HTTP/1.1 503 Busy\r\nX: y\r\nContent-Length: 2\r\n\r\nno")
    with HttpClient(url, headers={"Authorization": "Bearer t"}) as client:
        for _ in range(2):
            reply = client.call("GET", "/x", timeout_s=5)
            assert (reply.status, reply.headers["x"], reply.content) == (503, "y", b"no")
    assert len(got) == 2
    assert b"Bearer t" in got[0]


@pytest.mark.parametrize(
    "parts",
    [
        [b"HTTP/1.1 200 OK\r\n", *[b"X: y\r\n"] * 200],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", *[b" "] * 200],
        [],
    ],
    ids=["headers", "body", "nothing"],
)
def test_bytes_that_trickle_do_not_extend_the_deadline(serve, parts):
    url, _ = serve(*parts, pause_s=0.05)
    begin = time.monotonic()
    with HttpClient() as client, pytest.raises(TimeoutError):
        client.call("GET", url, timeout_s=0.4)
    assert 0.4 <= time.monotonic() - begin < 3


def test_a_reply_is_bounded(serve):
    url, _ = serve(b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 1000] * 200)
    with HttpClient(max_reply=5000) as client, pytest.raises(ReplyTooLargeError, match="5000"):
        client.call("GET", url, timeout_s=5)


def test_redirects_are_not_followed_and_proxies_of_the_environment_not_used(serve, monkeypatch):
    proxy, seen = serve(OK)
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("ALL_PROXY", proxy)
    other, asked = serve(OK)
    url, _ = serve(f"HTTP/1.1 302 Found\r\nLocation: {other}\r\nContent-Length: 0\r\n\r\n".encode())
    with HttpClient() as client:
        assert client.call("GET", url, timeout_s=5).status == 302
    assert seen == asked == []


def test_a_broken_or_missing_server_is_a_connection_error(serve):
    url, _ = serve(b"not HTTP at all\r\n\r\n")
    with HttpClient() as client:
        for address in (url, "http://127.0.0.1:1", "http://"):
            with pytest.raises(ConnectionError):
                client.call("GET", address, timeout_s=5)


def test_close_ends_requests_under_way(serve):
    url, got = serve()
    client = HttpClient()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.call, "GET", url, timeout_s=60)
        while not got:
            time.sleep(0.01)
        client.close()
        with pytest.raises(CancelledError):
            call.result(5)
    with pytest.raises(ConnectionError, match="closed"):
        client.call("GET", url, timeout_s=5)

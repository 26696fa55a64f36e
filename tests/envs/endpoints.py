"""An endpoint inside the test process, with one open episode whose policy says what the test wants."""

import asyncio
import socket
import threading
from contextlib import contextmanager

from gspo.envs.endpoint import Endpoint, Line
from gspo.envs.openai_api import Answer


def said(text="7", tool_calls=(), finish="stop", num_prompt=5):
    """A policy's answer of one token per character and an end."""
    pieces = (*text, "<eos>") if finish == "stop" else tuple(text)
    tokens = tuple(range(10, 10 + len(pieces)))
    return Answer(text, tool_calls, finish, num_prompt, tokens, (-0.5,) * len(pieces), pieces, tuple(range(num_prompt)))


class Policy:
    """Answers every request with `answer(ask)`, which may be a coroutine function; keeps what it was asked."""

    def __init__(self, answer=lambda ask: said()):
        self.answer, self.asked = answer, []

    async def __call__(self, ask):
        self.asked.append(ask)
        found = self.answer(ask)
        return await found if asyncio.iscoroutine(found) else found


@contextmanager
def endpoint(policy=None, name="7-0", **settings):
    """(endpoint, line, base_url, key); the event loop runs in a thread of its own, as an episode driver's does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = Endpoint(**settings)
    line = Line(name, policy or Policy(), loop)
    try:
        yield server, line, *server.open(line)
    finally:
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.run_until_complete(_gather(loop))
        loop.close()


async def _gather(loop):
    tasks = [task for task in asyncio.all_tasks(loop) if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def talk(port, head, body=b"", wait_s=5.0):
    """Send bytes as they are; status and the rest of the reply."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as connection:
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


def head(port, key, method="POST", path="/e/7-0/v1/chat/completions", **change):
    fields = {
        "Host": f"127.0.0.1:{port}",
        "Authorization": f"Bearer {key}",
        "Content-Type": "application/json",
        "Content-Length": "2",
        **change,
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {v}" for name, v in fields.items() if v is not None)]
    return "\r\n".join(lines) + "\r\n"

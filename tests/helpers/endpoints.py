"""An endpoint inside the test process, with one open episode whose policy says what the test wants."""

import asyncio
import threading
from contextlib import contextmanager

import raw_http

from gspo.envs import Answer, Endpoint, OpenEpisode


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
    line = OpenEpisode(name, policy or Policy(), loop)
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


def head(port, key, method="POST", path="/e/7-0/v1/chat/completions", **change):
    return raw_http.head(port, key, method, path, **change)

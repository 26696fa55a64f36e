"""Load test of the agent endpoint and of a sampler server: `python -m lab.bench.servers`.

Each client keeps one connection and sends its requests one after another. The server runs in a process of its own and
does no other work than HTTP and JSON: the policy's answer is constant and the sampler is idle. `--start` names another
program to measure; it gets the kind of server as its last argument, and must print the same line as `_serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "What is 3 + 4? " * 20}], "max_tokens": 64}
WORKS = {  # kind → (path below the URL, body) of the requests, in turn
    "agent": [("/chat/completions", CHAT)],
    "sampler": [("/collect", {"session": "1", "received": [], "wait_s": 0}), ("/resume", {"session": "1"})],
}


async def client(url: str, key: str, work: list[tuple[str, Any]], num_requests: int) -> list[float]:
    """Send requests one after another; returns the seconds of each."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)  # wait: none, Ctrl-C
    spent = []
    for (path, body), _ in zip(cycle(work), range(num_requests), strict=False):
        data = json.dumps(body)
        head = (
            f"POST {address.path}{path} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        begin = time.perf_counter()
        writer.write((head + data).encode())
        reply = (await reader.readuntil(b"\r\n\r\n")).lower()
        rest = await reader.readexactly(int(reply.partition(b"content-length:")[2].split()[0]))
        spent.append(time.perf_counter() - begin)
        if b" 200 " not in reply[:13]:
            raise RuntimeError((reply + rest).decode())
    writer.close()
    return spent


async def send_requests(targets: list[tuple[str, str]], kind: str, num_requests: int) -> tuple[float, list[float]]:
    """Seconds of the whole test, and of each request, sorted; one client for each (URL, key)."""
    if kind == "sampler":
        await client(*targets[0], [("/attach", {"session": "1"})], 1)
    begin = time.perf_counter()
    # wait: none, Ctrl-C
    spent = await asyncio.gather(*(client(url, key, WORKS[kind], num_requests) for url, key in targets))
    return time.perf_counter() - begin, sorted(second for one in spent for second in one)


def measure_server(kind: str, start: list[str], num_clients: int, num_requests: int) -> dict[str, float]:
    with subprocess.Popen([*start, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            targets = json.loads(server.stdout.readline())  # wait: none, Ctrl-C
            before, cpu = resident_mb(server.pid), cpu_seconds(server.pid)
            # wait: none, Ctrl-C
            seconds, spent = asyncio.run(send_requests((targets * num_clients)[:num_clients], kind, num_requests))
            after, cpu = resident_mb(server.pid), cpu_seconds(server.pid) - cpu
        finally:
            server.stdin.close()  # the server ends when its stdin is closed
    return {
        "requests/s": len(spent) / seconds,
        "p50 ms": 1e3 * spent[len(spent) // 2],
        "p95 ms": 1e3 * spent[len(spent) * 95 // 100],
        "CPU µs per request": 1e6 * cpu / len(spent),
        "MB before": before,
        "MB after": after,
    }


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]) / 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class IdleSampler:
    """The methods of a sampler that a server calls when it has no requests."""

    def health(self) -> dict[str, Any]:
        return {"paused": False, "asleep": False}

    def abort(self) -> list[Any]:
        return []

    def wake(self) -> None: ...

    def resume(self) -> None: ...


def _serve(kind: str) -> None:
    """Print the (URL, key) pairs as one line of JSON, and serve until stdin ends."""
    if kind == "agent":
        from gspo.envs import Answer, Endpoint, OpenEpisode

        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()

        async def answer(_: Any) -> Answer:
            return Answer("7" * 64, (), "stop", 5, (1,) * 64, (-0.5,) * 64, ("7",) * 64)

        server = Endpoint()
        targets = [server.open(OpenEpisode(f"{i}-0", answer, loop)) for i in range(64)]
    else:
        from gspo.sampling import SamplerEngine, SamplerServer

        server = SamplerServer(SamplerEngine(IdleSampler(), identity={}), "a token of the benchmark")  # pyright: ignore[reportArgumentType]
        targets = [(server.url, "a token of the benchmark")]
    print(json.dumps(targets), flush=True)
    sys.stdin.read()  # wait: none, Ctrl-C
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200, help="requests of each client")
    parser.add_argument("--start", metavar="COMMAND", help="program that starts the servers (default: this one)")
    parser.add_argument("--serve", choices=sorted(WORKS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        _serve(args.serve)
        return
    start = shlex.split(args.start) if args.start else [sys.executable, "-m", __spec__.name, "--serve"]
    for kind in WORKS:
        found = measure_server(kind, start, args.clients, args.requests)
        print(f"{kind:8}", "  ".join(f"{name} {value:,.1f}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()

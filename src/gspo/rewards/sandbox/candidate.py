"""The program that runs model-written Python in the sandbox; `command.py` passes its source text to the interpreter.

It first limits itself (resources, priority, an unprivileged user), then writes `ready`, then reads the code from stdin.
An error before `ready` is ours; an error after it belongs to the candidate. From then on nothing in this process is
trusted: the candidate may change all of it, but it can only return wrong values, because the expected values are never
sent. Standard library only, because gspo is not in the sandbox.
"""

import json
import os
import resource
import sys
import types
from typing import Any

MAX_DEPTH = 50
MAX_BITS = 14_000  # Python refuses to convert integers of more than 4300 digits to text


def main() -> None:
    settings = json.loads(sys.argv[1])
    # Limits are set before `ready` and before any code of the candidate is read.
    _bind(settings)
    os.environ.clear()
    os.write(1, b'{"ready": true}\n')
    job = json.loads(_line(0))
    # The candidate does not see the settings in sys.argv.
    del sys.argv[1:]
    if "entry_point" in job:
        _serve(job["code"], job["entry_point"], job["id"])
    else:
        module = _module("__main__")
        # stderr goes to stdout: the output of a program is both together.
        os.dup2(1, 2)
        exec(compile(job["code"], "<candidate>", "exec"), module.__dict__)


def _bind(settings: dict[str, Any]) -> None:
    """Set limits that an unprivileged process can only lower."""
    for name, value in settings["rlimits"].items():
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is not None:
            # A container may set a lower hard limit, which cannot be raised.
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))
    os.nice(settings["nice"])
    os.umask(0o077)
    # Close descriptors that were inherited from bubblewrap or the grader.
    os.closerange(3, 4096)
    if settings["uid"] is not None:
        # The last privileged step. The limit on processes does not apply to root, so take another user id.
        os.setgroups([])
        os.setresgid(settings["uid"], settings["uid"], settings["uid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])


def _serve(code: str, entry_point: str, id: str) -> None:
    """Load the code, then answer calls, one line per request and reply. stdout is discarded, and stdin is empty."""
    # Replies use a copy of stdout, so text that the candidate prints cannot mix with them.
    requests, replies, nowhere = os.dup(0), os.dup(1), os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    reply: dict[str, Any] = {"id": id}
    function: Any = None
    try:
        module = _module("candidate")
        exec(compile(code, "<candidate>", "exec"), module.__dict__)
        function = getattr(module, entry_point, None)
        if not callable(function):
            reply["failed"] = f"the code defines no function {entry_point}"
    # SystemExit and KeyboardInterrupt too: code that exits while it is loaded is a failure of the candidate.
    except BaseException as error:
        reply["failed"] = _describe(error)
    _send(replies, reply)
    while line := _line(requests):
        request = json.loads(line)
        reply = {"id": request["id"]}
        try:
            reply["value"] = _plain(function(*request["args"], **request["kwargs"]), 0)
        except BaseException as error:  # SystemExit too: it ends the call, not this loop
            reply["failed"] = _describe(error)
        _send(replies, reply)


def _send(fd: int, reply: dict[str, Any]) -> None:
    data = json.dumps(reply).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


def _plain(value: Any, depth: int) -> Any:
    """The value as plain data. Exact types only: objects with their own `__eq__` are refused."""
    # `type`, not isinstance: a subclass of int or str could override comparison and equal every expected value.
    kind = type(value)
    if kind is int and value.bit_length() > MAX_BITS:
        raise ValueError(f"returned an integer of {value.bit_length()} bits, which JSON cannot carry")
    if kind in (bool, int, float, str) or value is None:
        return value
    if depth < MAX_DEPTH:
        if kind in (list, tuple):
            return [_plain(item, depth + 1) for item in value]
        if kind is dict and all(type(key) is str for key in value):
            return {key: _plain(item, depth + 1) for key, item in value.items()}
    raise TypeError(f"returned a {kind.__name__}, which is not plain data")


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look up their module by name
    return module


def _line(fd: int) -> bytes:
    """One line; empty at end of file."""
    data = b""
    while not data.endswith(b"\n"):
        # A chunk never holds two lines: the grader waits for a reply before it sends the next line.
        chunk = os.read(fd, 65536)  # wait: none, the box kills the program at its time limit
        if not chunk:
            return b""
        data += chunk
    return data


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:200]
    except BaseException:
        return "an error whose message cannot be shown"


if __name__ == "__main__":
    main()

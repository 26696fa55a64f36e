"""Agents that are command lines: a process per episode, killed with its descendants when the episode ends."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.envs.client import EpisodeError
from gspo.system import describe_exit, parse_json

_REAPER = Path(__file__).with_name("reaper.py")
_KEPT_OUT, _KEPT_ERR = 64 * 2**10, 4 * 2**10  # bytes kept from the end of a command's output


class AgentError(EpisodeError):
    """The agent failed; only its sample fails."""


class Lifeline:
    """A pipe whose writing end keeps a command alive: the command is killed when it is closed, or when we die."""

    def __init__(self) -> None:
        self.reading_end, self._writing_end = os.pipe()
        self._lock = threading.Lock()  # wait: none, held for one close()

    def close(self) -> None:
        # Closed once: the number of a closed descriptor may belong to another file soon.
        with self._lock:
            if self._writing_end >= 0:
                os.close(self._writing_end)
                self._writing_end = -1


def run_command(
    command: Sequence[str], row: Mapping[str, Any], variables: Mapping[str, str], lifeline: Lifeline
) -> Any:
    """Run a command with the row as JSON on stdin; returns the reward on its last line.

    Blocks until the command has ended, or the lifeline was closed and the command has been killed.
    """
    # The trainer's own variables contain secrets.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GSPO_")}
    try:
        # A file instead of a pipe: the command need not read its input, and no writer can block.
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(row, default=str).encode())
            given.seek(0)
            try:
                process = subprocess.Popen(
                    # -I and -S: a fast start, independent of the user's Python settings.
                    [sys.executable, "-I", "-S", str(_REAPER), str(lifeline.reading_end), *command],
                    stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(lifeline.reading_end,),
                    env={**inherited, **variables},
                )  # fmt: skip
            finally:
                # Only the child needs the reading end.
                os.close(lifeline.reading_end)
        # Read both streams to their ends before wait(): a full pipe would block the command.
        with process:
            out, err = _read_output(process)
            code = process.wait()  # wait: none, env.timeout closes the lifeline
    finally:
        lifeline.close()
    if code:
        raise AgentError(f"{command[0]} {describe_exit(code)}: {err.strip()[-1500:] or 'no output on stderr'}")
    return reward_of_output(out)


def _read_output(process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """The ends of stdout and stderr. All output is read, so that a command never blocks; only the end is kept."""
    limits, kept = {process.stdout: _KEPT_OUT, process.stderr: _KEPT_ERR}, {process.stdout: b"", process.stderr: b""}
    with selectors.DefaultSelector() as ready:
        for stream in limits:
            assert stream is not None
            ready.register(stream, selectors.EVENT_READ)
        while ready.get_map():
            for key, _ in ready.select():  # wait: none, env.timeout closes the lifeline
                stream: Any = key.fileobj
                # End of file. The empty part below changes nothing.
                if not (part := os.read(stream.fileno(), 2**16)):  # wait: none, env.timeout closes the lifeline
                    ready.unregister(stream)
                kept[stream] = (kept[stream] + part)[-limits[stream] :]
    out, err = (kept[stream].decode("utf-8", "replace") for stream in limits)
    return out, err


def reward_of_output(printed: str) -> Any:
    """The reward on the last line that is not empty: a number, or a JSON object with a `reward`; else None.

    >>> reward_of_output("thinking…\\n0.5\\n"), reward_of_output('{"reward": 1, "format": 0.2}')
    (0.5, {'reward': 1, 'format': 0.2})
    """
    last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
    with contextlib.suppress(ValueError, RecursionError):
        value = parse_json(last)
        if isinstance(value, dict) and "reward" in value:
            return value
        # In Python, bool is a subclass of int: `true` is not a reward.
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
    return None

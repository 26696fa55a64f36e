"""Reward functions that attack the machinery around them: imported by the workers of tests/rewards/test_attacks.py."""

import asyncio
import atexit
import builtins
import ctypes
import gc
import json
import os
import resource
import signal
import struct
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction

import numpy as np

from gspo.rewards import worker


def attack(text, **columns):
    return ATTACKS[text]()


class EvilFloat(float):
    def __float__(self):
        raise RuntimeError("no float")


class EvilError(Exception):
    def __str__(self):
        raise SystemExit(3)


class NoTracebackError(Exception):
    @property
    def __traceback__(self):
        raise RuntimeError("no traceback")


class EvilRepr:
    def __repr__(self):
        os._exit(9)


def raises(error):
    raise error


def children(num, sleep_s):
    """Children that leave the process group; with sleep_s 0 they become zombies."""
    for _ in range(num):
        if os.fork() == 0:
            os.setsid()
            time.sleep(sleep_s)
            os._exit(0)
    return 1.0


def fork_for_ever():
    """A process that has left the group and replaces itself by its child, again and again."""
    if os.fork() == 0:
        os.setsid()
        end = time.time() + 20
        while time.time() < end and os.fork() == 0:
            pass
        os._exit(0)
    time.sleep(30)


def all_signals(do):
    for number in range(1, 65):
        try:
            do(number)
        except (OSError, ValueError):
            continue
    return 1.0


def patch_modules():
    sys.modules["json"] = sys.modules["pickle"] = None
    builtins.isinstance = lambda *args: True
    return 1.0


def patch_builtins():
    builtins.len = lambda *args: 0
    return 1.0


def flood_stdout():
    end = time.time() + 0.5
    while time.time() < end:
        sys.stdout.write("x" * 65536)
    return 1.0


def exit_later():
    threading.Timer(0.1, lambda: os._exit(5)).start()
    return 1.0


def limit_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    return 1.0


def forge_clock():
    """Write a deadline in the far future into the clock page, then hang."""
    for found in gc.get_objects():
        if type(found).__name__ == "mmap":
            found[0:8] = struct.pack("=d", 1e18)
    time.sleep(60)


def write_into_channel(data, *, for_ever=False):
    for fd in range(3, 64):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                os.write(fd, data)
                while for_ever:
                    os.write(fd, data)
        except OSError:
            continue
    return 1.0


def trace_parent():
    ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)
    time.sleep(30)


def mute(when):
    """Patch the encoder of the worker's messages: those that `when` accepts are never sent."""
    encode = worker._ENCODE
    worker._ENCODE = lambda message: time.sleep(600) if when(message) else encode(message)
    return 1.0


def recurse():
    sys.setrecursionlimit(10**9)

    def deeper(n):
        return deeper(n + 1)

    return deeper(0)


async def later(value, seconds=0.0):
    await asyncio.sleep(seconds)
    return value


def message(**changes):
    return (json.dumps({"call": 0, "part": 0, "values": [[0, 1000.0]], "failures": [], **changes}) + "\n").encode()


ATTACKS = {
    "good": lambda: 1.0,
    "bool": lambda: True,
    "complex": lambda: 1 + 0j,
    "decimal": lambda: Decimal("0.5"),
    "signalling nan": lambda: Decimal("sNaN"),
    "fraction": lambda: Fraction(1, 4),
    "huge fraction": lambda: Fraction(10**400),
    "float32": lambda: np.float32(0.5),
    "array of one": lambda: np.array([0.5]),
    "array of two": lambda: np.array([0.5, 1.0]),
    "nan in float16": lambda: np.float16("nan"),
    "generator": lambda: (x for x in [1.0]),
    "giant string": lambda: "x" * 50_000_000,
    "giant error": lambda: raises(ValueError("x" * 50_000_000)),
    "evil float": lambda: EvilFloat(1.0),
    "evil repr": EvilRepr,
    "evil error": lambda: raises(EvilError()),
    "no traceback": lambda: raises(NoTracebackError()),
    "error group": lambda: raises(ExceptionGroup("group", [ValueError("a"), EvilError()])),
    "interrupt": lambda: raises(KeyboardInterrupt()),
    "generator exit": lambda: raises(GeneratorExit()),
    "awaitable": lambda: later(1.0),
    "late awaitable": lambda: later(1.0, 60),
    "sleepers": lambda: children(40, 60),
    "zombies": lambda: children(40, 0),
    "fork for ever": fork_for_ever,
    "close everything": lambda: [os.closerange(0, 4096), 1.0][1],
    "atexit": lambda: [atexit.register(time.sleep, 60), 1.0][1],
    "handlers": lambda: all_signals(lambda n: signal.signal(n, lambda *_: None)),
    "blocked signals": lambda: all_signals(lambda n: signal.pthread_sigmask(signal.SIG_BLOCK, [n])),
    "modules": patch_modules,
    "builtins": patch_builtins,
    "stdout": flood_stdout,
    "exit later": exit_later,
    "stop itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stop its group": lambda: os.killpg(0, signal.SIGSTOP),
    "kill its parent": lambda: os.kill(os.getppid(), signal.SIGKILL),
    "trace its parent": trace_parent,
    "no files": limit_files,
    "recursion": recurse,
    "clock": forge_clock,
    "forged nan": lambda: write_into_channel(message(values=[[0, float("nan")]])),
    "forged sample": lambda: write_into_channel(message(values=[[99, 1.0]])),
    "forged part": lambda: write_into_channel(message(part=7)),
    "forged type": lambda: write_into_channel(message(values=[[0, "1.0"]])),
    "forged call": lambda: write_into_channel(message(call=-5)),
    "forged list": lambda: write_into_channel(b"[]\n"),
    "garbage": lambda: write_into_channel(b"garbage\n"),
    "mute": lambda: mute(lambda message: "call" in message),
    "mute at the end": lambda: mute(lambda message: "done" in message),
    "no dumps": lambda: [setattr(json, "dumps", lambda *args, **kwargs: b"bytes, as orjson gives"), 1.0][1],
    "stop its parent": lambda: os.kill(os.getppid(), signal.SIGSTOP),
    "endless channel": lambda: write_into_channel(b"x" * 65536, for_ever=True),
}

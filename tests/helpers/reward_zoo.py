"""Reward functions that behave badly, and a few that behave: imported by the workers of the tests."""

import os
import re
import signal
import subprocess
import sys
import threading
import time


def good(completions, **columns):
    return [float(text == "good") for text in completions]


def choose(prompt, completions, prompt_ids, completion_ids, answer=None, **data):
    """AReaL's signature; what it does is written in the completion."""
    return ACTIONS[completions](data)


def echo(prompt, completions, prompt_ids, completion_ids, answer, **data):
    assert isinstance(completions, str)
    assert list(completion_ids) == [len(completions)]
    assert prompt_ids == [7, 8]
    assert prompt == "q"
    return float(completions) + float(answer)


def echo_group(prompts, completions, completion_ids, answer, **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer) == len(columns["level"])
    best = max(completions)
    return [float(text == best) for text in completions]


def chat_group(completions, **columns):
    return [float(len(messages[0]["content"])) for messages in completions]


def plain(text, answer, bonus=0.0):
    return float(text == answer) + bonus


def changes(prompt, completions, prompt_ids, completion_ids, answer, deep, messages, kept):
    found = len(answer) + len(deep["a"]) + len(messages) + len(kept) + len(prompt_ids) + len(completion_ids)
    for value in (answer, deep["a"], messages, kept, prompt_ids, completion_ids):
        value.append("changed")
    deep["a"][0]["b"] = "changed"
    return float(found)


def changes_group(completions, prompt_ids, completion_ids, answer, deep, messages, kept):
    group = zip(prompt_ids, completion_ids, answer, deep, messages, strict=True)
    return [changes("", "", p, c, a, d, m, ["k"]) + 0.0 * len(kept) for p, c, a, d, m in group]


def sees_marks(text, answer, reference):
    return float("####" in answer and reference == "72")


async def awaited(prompt, completions, prompt_ids, completion_ids, **data):
    import asyncio

    await asyncio.sleep(60 if completions == "slow" else 0.2)
    return 1.0


async def awaited_group(completions, **columns):
    return [2.0 for _ in completions]


def returns(completions, **columns):
    return {
        "none": None,
        "string": "1.0",
        "short": [1.0],
        "elements": [1.0, None, float("nan"), "1.0", float("inf"), 2, True],
        "scalar": 1.0,
    }[columns["what"][0]]


def no_signature(a, b):
    return 0.0


def modules(completions, **columns):
    return [float("torch" in sys.modules) for _ in completions]


def pids(completions, **columns):
    return [float(os.getpid()) for _ in completions]


def _ignore_and_spin(data):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def _leave_child(data):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(data["pidfile"], "a") as file:
        file.write(f"{child.pid}\n")
    time.sleep(600)


def _daemonize_and_exit(data):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(data["pidfile"], "a") as file:
        file.write(f"{child.pid}\n")
    os._exit(3)


def _eat_memory(data):
    return float(len(bytearray(10**11)))


def _leave_thread(delay_s):
    """Return, and leave a thread behind that takes the interpreter and does not give it back."""

    def block(data):
        def spin():
            time.sleep(delay_s)
            re.fullmatch(r"(a+)+b", "a" * 64)

        threading.Thread(target=spin, daemon=True).start()
        return 1.0

    return block


def _raise(data):
    raise RuntimeError("no luck")


ACTIONS = {
    "good": lambda data: 1.0,
    "sum": lambda data: float(sum(range(10**13))),
    "power": lambda data: float(len(str(9**9**9))),
    "regex": lambda data: float(bool(re.fullmatch(r"(a+)+b", "a" * 64))),
    "ignore": _ignore_and_spin,
    "exit": lambda data: os._exit(7),
    "sysexit": lambda data: sys.exit(1),
    "child": _leave_child,
    "daemon": _daemonize_and_exit,
    "memory": _eat_memory,
    "raise": _raise,
    "segfault": lambda data: os.kill(os.getpid(), signal.SIGSEGV),
    "term": lambda data: os.kill(os.getpid(), signal.SIGTERM),
    "sleep": lambda data: time.sleep(600),
    "slow": lambda data: [time.sleep(0.4), 1.0][1],
    "fork": lambda data: [os.fork(), 1.0][1],
    "patch the clock": lambda data: [setattr(time, "monotonic", lambda: 0.0), 1.0][1],
    "leave a thread": _leave_thread(0.3),
    "leave a thread, 0.2": _leave_thread(0.2),
}

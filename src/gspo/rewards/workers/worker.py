"""A reward worker: reads groups from its socket, calls the reward functions, and writes one line per call.

The supervisor forks it. Both share the *clock page*, memory in which the worker writes what it is doing and until when.
The supervisor reads the page, so it knows which call hangs in C code, where Python code in the worker cannot run. The
page can only shorten the time of a call: the supervisor has its own deadline for every job.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import signal
import socket
import struct
from mmap import mmap
from time import monotonic  # by name: reward code may replace time.monotonic
from typing import Any

from gspo.rewards.call import GRACE_S, LENGTH, Call, RewardItem, bind, call_group, call_sample
from gspo.system import die_with_parent

# deadline (CLOCK_MONOTONIC seconds, 0: no call is running), job, number of the call in its job, sample (−1: the whole
# group), part (−1: before the first call)
CLOCK = struct.Struct("=dqqqq")
_ENCODE = json.JSONEncoder().encode  # not json.dumps, which reward code may replace


def set_clock(page: mmap, deadline: float, job: int = -1, call: int = -1, sample: int = -1, part: int = -1) -> None:
    # The deadline is written last: the supervisor never reads it together with the fields of another call.
    page[8 : CLOCK.size] = CLOCK.pack(0.0, job, call, sample, part)[8:]
    page[0:8] = struct.pack("=d", deadline)


def run_worker(channel: socket.socket, page: mmap, parts: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Main function of a worker process; returns when the supervisor closes the channel."""
    # The start has a deadline too: `bind` imports user code, which may hang.
    set_clock(page, monotonic() + settings["startup_s"])
    _isolate(settings)
    try:
        calls = [bind(part["name"], part["kwargs"], part["code"]) for part in parts]
    except ValueError as error:
        _send(channel, {"fatal": str(error)})
        return
    _send(channel, {"ready": True})
    set_clock(page, 0.0)
    # The garbage collector no longer scans what was imported until now, so collections during calls are short.
    gc.freeze()
    stream = channel.makefile("rb")
    while header := stream.read(LENGTH.size):
        frame = stream.read(LENGTH.unpack(header)[0])
        line, _, payload = frame.partition(b"\n")
        job = json.loads(line)
        # The supervisor sees that the job has been read; the time of the first call includes unpickling.
        set_clock(page, monotonic() + settings["timeout_s"] + GRACE_S, job["id"], job["start"])
        try:
            item: RewardItem = pickle.loads(payload)  # written by the trainer
        except Exception as error:
            why = f"a column of the row cannot be unpickled in a reward worker: {type(error).__name__}: {error}"
            _send(
                channel,
                {"call": 0, "part": 0, "values": [], "failures": [(s, "infra", why) for s in range(job["num"])]},
            )
            _send(channel, {"done": True})
            continue
        _work(channel, page, calls, job, item, settings["timeout_s"])


def _work(
    channel: socket.socket, page: mmap, calls: list[Call], job: dict[str, Any], item: RewardItem, timeout_s: float
) -> None:
    """Make the calls of one group, from number `start` on: an earlier worker may have made the others, and died."""
    # The plan depends only on the group and the parts, so call numbers mean the same in every worker of a job.
    failed, pid = set(job["failed"]), os.getpid()
    num = len(item.completions)
    plan = [(p, -1) for p, call in enumerate(calls) if call.per_group]
    plan += [(p, s) for s in range(num) for p, call in enumerate(calls) if not call.per_group]
    for number, (part, sample) in enumerate(plan):
        # A sample whose reward failed in one part has no total reward, so its other parts are not computed.
        if number < job["start"] or sample in failed or len(failed) == num:
            continue
        call = calls[part]
        # An async call cancels itself at its timeout; the grace time lets it return before the supervisor kills the
        # worker.
        grace_s = GRACE_S if call.is_async else 0.0
        set_clock(page, monotonic() + timeout_s + grace_s, job["id"], number, sample, part)
        if sample < 0:
            results = list(enumerate(call_group(call, item, timeout_s)))
        else:
            results = [(sample, call_sample(call, item, sample))]
        # Reward code forked and the copy of this process came back from the call, too: only one may send results.
        if os.getpid() != pid:
            os._exit(1)
        # The call has ended. Its deadline must not apply to the send, which may block; the supervisor's own does.
        set_clock(page, 0.0, job["id"], number, sample, part)
        # A result is a number, or a tuple (kind, message) after a failure.
        failures = [(s, *r) for s, r in results if isinstance(r, tuple)]
        failed.update(s for s, *_ in failures)
        values = [(s, r) for s, r in results if not isinstance(r, tuple)]
        _send(channel, {"call": number, "part": part, "values": values, "failures": failures})
    _send(channel, {"done": True})


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(_ENCODE(message).encode() + b"\n")


def _isolate(settings: dict[str, Any]) -> None:
    """A session and process group of its own, no terminal signals, limited memory, first choice of the OOM killer."""
    # A new session has its own process group, which the supervisor can kill as a whole.
    os.setsid()
    die_with_parent(settings["supervisor"])
    # The supervisor's signal handlers and wakeup pipe were inherited by fork; the worker must not write into that pipe.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    # A handler, not SIG_IGN: programs that a reward starts would inherit SIG_IGN.
    signal.signal(signal.SIGINT, lambda *_: None)
    # RLIMIT_DATA limits private memory only; libraries that map large files stay usable.
    if settings["memory_mb"]:
        limit = settings["memory_mb"] * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    # No core dumps: a crash of reward code would write one file per call.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Not Linux, or forbidden in this container: the memory limit above still applies.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")

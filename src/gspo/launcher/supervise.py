"""Run the processes of a plan to the end: restarts, signals, exit code. The same rules for the local launcher and Ray.

If the trainer ends with exit code 0, 1, 2 or 130, or stalled, the run ends with that code. If it is killed, all its
ranks are restarted together and resume from the last checkpoint. A sampler that ends is restarted alone. The number of
restarts is limited. Signals are passed to the trainer, which saves and ends; the samplers are stopped after it.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gspo.launcher.plan import LaunchPlan, Process
from gspo.sampling import forget, give_up
from gspo.system import END_SIGNAL, beat, describe_exit, last_lines, program

# Exit codes of our commands: finished, failed, wrong usage, interrupted and saved. The process is not restarted.
# The last one is a stall of which only the supervising process of `system/heartbeat.py` noticed.
FINAL_CODES = (0, 1, 2, program.INTERRUPTED, 128 + END_SIGNAL)
KILLED_BY_STOP = [128 + number for number in program.STOP_SIGNALS]
LOST_CODE = 137  # for a process whose machine or actor is gone: as if it had been killed
STOP_TIMEOUT_S = 10.0  # between SIGTERM and SIGKILL


class Handle(Protocol):
    """A started process."""

    def poll(self) -> int | None:
        """The exit code (128 + n after signal n), or None while it runs. Forwards new output."""
        ...

    def signal(self, number: int) -> None: ...

    def end(self, timeout_s: float) -> None:
        """Send SIGTERM, wait up to `timeout_s`, kill; includes all processes that it has started."""
        ...


Start = Callable[[Process], Handle]
Say = Callable[[str], None]


@dataclass
class Unit:
    """Processes that are started and stopped together: those of the trainer, or one sampler."""

    processes: Sequence[Process]
    restarts_left: int
    handles: list[Handle] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.processes[0].role if self.processes[0].role == "trainer" else self.processes[0].name

    def start(self, prepare: Callable[[], Start]) -> None:
        # Once per start of the unit: with Ray all ranks of one start share a new rendezvous address.
        start = prepare()
        self.handles = []
        for process in self.processes:
            self.handles.append(start(process))

    def poll(self) -> int | None:
        """None while all run. When one has failed, the others get STOP_TIMEOUT_S to end; returns one exit code."""
        codes = [handle.poll() for handle in self.handles]
        if all(code == 0 for code in codes):
            return 0
        if all(code in (None, 0) for code in codes):
            return None
        # One process has failed. The others may notice it and end with their own error message; after the timeout they
        # are stopped, because ranks cannot continue without the missing one.
        until = time.monotonic() + STOP_TIMEOUT_S
        while None in codes and time.monotonic() < until:
            time.sleep(0.05)  # wait: 0.05 s, the launcher after STOP_TIMEOUT_S
            codes = [handle.poll() for handle in self.handles]
        self.end()
        failed = [code for code in codes if code]
        # If one rank is killed, the others fail because of that: report the kill.
        return next((code for code in failed if code not in FINAL_CODES), failed[0])

    def end(self) -> None:
        for handle in self.handles:
            handle.end(STOP_TIMEOUT_S)


def supervise(plan: LaunchPlan, prepare: Callable[[], Start], *, restarts: int, resumes: int, say: Say) -> int:
    """Run a plan to its end; returns the trainer's exit code.

    prepare    called before each start of a unit; returns the function that starts one process of it
    restarts   how often each sampler may be restarted
    resumes    how often the trainer may be restarted
    """
    trainer = Unit(plan.trainers, resumes)
    samplers = [Unit((process,), restarts) for process in plan.samplers]
    running = list(samplers)
    # Under nohup SIGHUP stays ignored.
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    with received_signals(*program.STOP_SIGNALS, *hangup) as received:
        try:
            for unit in (*samplers, trainer):
                unit.start(prepare)
            stopping = False
            while True:
                while received:
                    stopping = True
                    number = received.pop(0)
                    for handle in trainer.handles:
                        handle.signal(number)
                # Samplers are restarted while stopping, too: the trainer may need them to finish its step.
                running = [unit for unit in running if _keep_running(unit, prepare, plan.folder, say)]
                code = trainer.poll()
                if code is None:
                    beat("a check of the processes")  # the trainer has a stall timeout of its own
                    time.sleep(0.05)  # wait: 0.05 s, the stall timeout of the trainer
                    continue
                # Python needs a moment before it can handle a signal; one that came earlier has killed the trainer.
                if stopping and code in KILLED_BY_STOP:
                    return program.INTERRUPTED
                # After a signal the trainer is not restarted, even if it was killed while it saved.
                if code in FINAL_CODES or stopping:
                    return code
                if not trainer.restarts_left:
                    say(
                        f"the trainer {describe_exit(code)}; not restarting it: it was started {1 + resumes} times "
                        "(scheduler.restarts)"
                    )
                    return code
                trainer.restarts_left -= 1
                say(
                    f"the trainer {describe_exit(code)}; restarting it from the last checkpoint "
                    f"({trainer.restarts_left} restarts left, scheduler.restarts)"
                )
                trainer.start(prepare)
        finally:
            # The trainer first: it may still need samplers to finish its step.
            for unit in (trainer, *samplers):
                unit.end()
            # After all processes have ended, because a sampler may read the published weights until then.
            for process in plan.processes:
                remove_published(process)


def _keep_running(unit: Unit, prepare: Callable[[], Start], folder: Path, say: Say) -> bool:
    """Restart a sampler that has ended; False if it is not restarted any more."""
    code = unit.poll()
    if code is None:
        return True
    log = folder / f"{unit.name}.log"
    ended = f"{unit.name} {describe_exit(code)}; its log is {log}"
    # Exit code 2 is wrong usage: a restart would fail in the same way.
    if code == 2 or not unit.restarts_left:
        why = "" if code == 2 else " (no restarts left, scheduler.restarts)"
        say(f"{ended}. It is not restarted{why}:{last_lines(log, 8) or ' its log is empty'}")
        # Tells the trainer that this sampler will not return, so that it does not wait for it.
        give_up(folder.parent / "samplers", unit.processes[0].index, f"{describe_exit(code)}, see {log}{_reason(log)}")
        return False
    unit.restarts_left -= 1
    say(f"{ended}. Restarting it ({unit.restarts_left} restarts left){_reason(log)}")
    unit.start(prepare)
    return True


def _reason(log: Path) -> str:
    """The error message at the end of a sampler's log; empty if it ended without one, for example by a signal."""
    last = last_lines(log, 1).strip()
    return f": {last.removeprefix('gspo: ')}" if last.startswith("gspo: ") else ""


def remove_published(process: Process) -> None:
    """Remove weights that an ended process has published on this machine; a killed process could not do it itself."""
    for folder in process.publishes:
        forget(folder)


def environment(process: Process, inherited: Mapping[str, str], shared: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a process: the launcher's, those shared by the plan, and its own."""
    return {**inherited, **shared, **process.env, "PYTHONUNBUFFERED": "1"}


def write_output(output: bytes) -> None:
    """Print output of another process. If stdout was closed (`| head`, a closed terminal), the run goes on without."""
    try:
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()
    except OSError:
        program.drop_stdout()


@contextmanager
def received_signals(*numbers: int) -> Iterator[list[int]]:
    """A list of received signals. The loop passes them on, because a signal handler must not call into Ray."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(signal.SIGTERM if number == signal.SIGHUP else number)  # the trainer saves on SIGTERM

    # The previous handlers are restored afterwards: the launcher may run inside another program.
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

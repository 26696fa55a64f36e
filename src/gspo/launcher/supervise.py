"""Keep a plan's processes running: the same rules whoever starts them, this machine or Ray.

A trainer that ends with 0, 1, 2 or 130 has said its word, and that is the run's exit code. One that was killed is
started again, all its ranks together, and goes on from its last checkpoint. A sampler that ends is started again by
itself. Both within bounds. Signals go to the trainer, which saves; when it has ended, the samplers are ended.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gspo.launcher.plan import Plan, Process
from gspo.sampling.remote.discovery import forget, give_up

# Exit codes by which our commands answer: done, failed, bad usage, interrupted and saved.
ANSWERS = (0, 1, 2, 130)
LOST = 137  # of a process whose machine or whose starter is gone: as if killed
PATIENCE_S = 10.0  # for a process that was asked to end


class Handle(Protocol):
    """A started process."""

    def poll(self) -> int | None:
        """Its exit code (128 + n after signal n), None while it runs. What it has said meanwhile is shown or kept."""
        ...

    def signal(self, number: int) -> None: ...

    def end(self, patience_s: float) -> None:
        """Ask it to end, wait so long, kill it; everything it started included."""
        ...


Start = Callable[[Process], Handle]
Say = Callable[[str], None]


@dataclass
class Unit:
    """Processes that live and die together: the trainer's, or one sampler's."""

    processes: Sequence[Process]
    restarts_left: int
    handles: list[Handle] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.processes[0].role if self.processes[0].role == "trainer" else self.processes[0].name

    def start(self, prepare: Callable[[], Start]) -> None:
        start = prepare()
        self.handles = []
        for process in self.processes:
            self.handles.append(start(process))

    def poll(self) -> int | None:
        """None while all run. After the first has failed, the others have their patience to end: one code for all."""
        codes = [handle.poll() for handle in self.handles]
        if all(code == 0 for code in codes):
            return 0
        if all(code in (None, 0) for code in codes):
            return None
        until = time.monotonic() + PATIENCE_S
        while None in codes and time.monotonic() < until:
            time.sleep(0.05)
            codes = [handle.poll() for handle in self.handles]
        self.end()
        failed = [code for code in codes if code]
        # Ranks whose peer was killed fail of that: the kill is what happened.
        return next((code for code in failed if code not in ANSWERS), failed[0])

    def end(self) -> None:
        for handle in self.handles:
            handle.end(PATIENCE_S)


def supervise(plan: Plan, prepare: Callable[[], Start], *, restarts: int, resumes: int, say: Say) -> int:
    """Run a plan to its end; the trainer's exit code.

    prepare    called before each start of a unit; gives the function that starts one process of it
    restarts   how often each sampler is started again
    resumes    how often the trainer is
    """
    trainer = Unit(plan.trainers, resumes)
    samplers = [Unit((process,), restarts) for process in plan.samplers]
    alive = list(samplers)
    with _signals() as asked:
        try:
            for unit in (*samplers, trainer):
                unit.start(prepare)
            stopping = False
            while True:
                while asked:
                    stopping = True
                    number = asked.pop(0)
                    for handle in trainer.handles:
                        handle.signal(number)
                # Also while stopping: the step that is being finished may need them.
                alive = [unit for unit in alive if _look_after(unit, prepare, plan.folder, say)]
                code = trainer.poll()
                if code is None:
                    time.sleep(0.05)
                    continue
                if code in ANSWERS or stopping:
                    return code
                if not trainer.restarts_left:
                    say(f"the trainer {killed_by(code)}; it was started {1 + resumes} times (scheduler.restarts)")
                    return code
                trainer.restarts_left -= 1
                say(
                    f"the trainer {killed_by(code)}: starting it again, it goes on from its last checkpoint "
                    f"({trainer.restarts_left} more times, scheduler.restarts)"
                )
                trainer.start(prepare)
        finally:
            for unit in (trainer, *samplers):
                unit.end()
            for process in plan.processes:
                clear(process)


def _look_after(unit: Unit, prepare: Callable[[], Start], folder: Path, say: Say) -> bool:
    """Start a sampler again that has ended; False where it is given up."""
    code = unit.poll()
    if code is None:
        return True
    name, log = unit.name, folder / f"{unit.name}.log"
    said = f"{name} {killed_by(code)}; its log is {log}"
    if code == 2 or not unit.restarts_left:
        why = "" if code == 2 else " (scheduler.restarts is used up)"
        say(f"{said}. It is not started again{why}:{last_words(log)}")
        give_up(folder.parent / "samplers", unit.processes[0].index, f"{killed_by(code)}, see {log}")
        return False
    unit.restarts_left -= 1
    say(f"{said}. Starting it again ({unit.restarts_left} more times)")
    unit.start(prepare)
    return True


def clear(process: Process) -> None:
    """Remove from this machine what a process has published, once it has ended; one that was killed could not."""
    for folder in process.publishes:
        forget(folder)


def killed_by(code: int) -> str:
    """
    >>> killed_by(137), killed_by(1)
    ('was killed (SIGKILL)', 'ended with exit code 1')
    """
    if code > 128:
        try:
            return f"was killed ({signal.Signals(code - 128).name})"
        except ValueError:
            pass
    return f"ended with exit code {code}"


def last_words(log: Path, count: int = 8) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:]
    except OSError:
        return " (it said nothing)"
    return "".join(f"\n  {line}" for line in lines) or " (it said nothing)"


def environment(process: Process, inherited: Mapping[str, str], shared: Mapping[str, str]) -> dict[str, str]:
    """What a process sees: its starter's environment, what all of a plan share, and its own."""
    return {**inherited, **shared, **process.env, "PYTHONUNBUFFERED": "1"}


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals that came in; the loop passes them on, since a handler may not call into Ray."""
    asked: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup a hang-up ends nothing
        numbers.append(signal.SIGHUP)

    def heard(number: int, _: object) -> None:
        asked.append(signal.SIGTERM if number == signal.SIGHUP else number)  # the trainer saves at TERM

    before = {number: signal.signal(number, heard) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

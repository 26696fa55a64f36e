"""The stall timeout on real processes: a stall ends, a pause does not, and a stuck interpreter ends all the same."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import until

from gspo.system import heartbeat

PROGRAM = """
import ctypes, pathlib, sys, time
from gspo.system import heartbeat
heartbeat.GRACE = 0.5
with heartbeat.watched(60.0), heartbeat.watched({seconds}), heartbeat.stalls_logged(pathlib.Path(sys.argv[1])):
    heartbeat.beat("the work")
    print("ready", flush=True)
    {work}
    print("done", flush=True)
"""


def start(tmp_path, seconds, work):
    code = PROGRAM.format(seconds=seconds, work=work)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log.txt")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.run
def test_a_process_whose_interpreter_is_stuck_in_c_is_ended_with_a_message_and_its_stacks(tmp_path):
    """A sleep in C that keeps the interpreter's lock: no thread of Python can run."""
    process = start(tmp_path, 1.0, "time.sleep(0.5); ctypes.PyDLL(None).sleep(60)")
    said = process.communicate(timeout=50)[1]
    assert process.returncode == -heartbeat.END_SIGNAL
    assert "stalled: no progress for 1.5 s after '" in said
    assert "stall_timeout" in said
    log = (tmp_path / "log.txt").read_text()
    assert "most recent call first" in log
    assert "stalled" in log


@pytest.mark.run
def test_a_process_whose_code_closes_all_descriptors_is_ended_when_it_blocks(tmp_path):
    process = start(tmp_path, 1.0, "import os; os.closerange(3, 200); ctypes.PyDLL(None).sleep(60)")
    said = process.communicate(timeout=50)[1]
    assert process.returncode == -heartbeat.END_SIGNAL
    assert "stalled: no progress for 1.5 s after '" in said


@pytest.mark.run
def test_a_stopped_process_has_not_stalled_and_one_that_sleeps_has(tmp_path):
    stopped = start(tmp_path, 3.0, "time.sleep(1.5)")
    slept = start(tmp_path, 3.0, "time.sleep(60)")
    os.kill(stopped.pid, signal.SIGSTOP)
    time.sleep(6.0)  # more than the limit and both graces
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.communicate(timeout=50)[0] == "done\n"
    assert stopped.returncode == 0
    said = slept.communicate(timeout=50)[1]
    assert slept.returncode == heartbeat.EXIT_CODE
    assert "stalled: no progress for 3 s after 'the work'" in said


@pytest.mark.run
def test_a_process_and_its_watch_that_are_both_stopped_have_not_stalled(tmp_path):
    """As Slurm suspends a job: every process of it is stopped."""
    process = start(tmp_path, 2.0, "time.sleep(1.0)")
    watch = _only_child(process.pid)
    for pid in (watch, process.pid):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(5.0)
    for pid in (watch, process.pid):
        os.kill(pid, signal.SIGCONT)
    assert process.communicate(timeout=50)[0] == "done\n"
    assert process.returncode == 0


@pytest.mark.run
def test_the_watch_ends_with_its_process_and_a_killed_watch_does_not_disturb(tmp_path):
    process = start(tmp_path, 60.0, "time.sleep(1.5)")
    os.kill(_only_child(process.pid), signal.SIGKILL)
    assert process.communicate(timeout=50)[0] == "done\n"
    process = start(tmp_path, 60.0, "time.sleep(60)")
    watch = _only_child(process.pid)
    process.kill()
    process.communicate(timeout=50)
    until(lambda: not os.path.exists(f"/proc/{watch}"), 20)


def test_a_pause_does_not_count_and_a_busy_wait_does(monkeypatch):
    now, cpu = [100.0], [5.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(heartbeat.time, "process_time", lambda: cpu[0])
    clock = heartbeat.AwakeClock(1.0)
    now[0] += 1.5
    assert clock.seconds() == 1.5
    now[0] += 3600.0  # stopped for an hour
    assert clock.seconds() == 3.5
    now[0], cpu[0] = now[0] + 30.0, cpu[0] + 25.0  # the thread did not get the interpreter's lock
    assert clock.seconds() == 28.5


def _only_child(pid: int) -> int:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        (child,) = file.read().split()
    return int(child)

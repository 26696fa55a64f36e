"""The actor that Ray places, without Ray: real processes whose end is seen, whatever they leave behind."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import are_gone, is_alive, until

from gspo.launcher import ray
from gspo.launcher.plan import Process
from gspo.launcher.ray import ProcessActor, kill_if_stopped

pytestmark = pytest.mark.run

SPAWN = "import os, signal, subprocess, sys\nchild = subprocess.Popen(['sleep', '600'], start_new_session={own})\n"
SPAWN += "print('its child is', child.pid, flush=True)\n{then}"


def heard(runner: ProcessActor, seconds: float = 30.0) -> tuple[str, int | None]:
    """All it has said by its end, and its exit code; None: it has not ended in time."""
    said, code, deadline = b"", None, time.monotonic() + seconds
    while code is None and time.monotonic() < deadline:
        more, code = runner.poll(0.2)
        said += more
    return said.decode(), code


def started(argv: list[str], cwd: Path, log: Path | None = None) -> ProcessActor:
    runner = ProcessActor(Process("trainer", 0, tuple(argv), {}))
    runner.start(argv, dict(os.environ), str(cwd), log)
    return runner


@pytest.mark.parametrize(("then", "code"), [("os.kill(os.getpid(), signal.SIGKILL)", 137), ("sys.exit(1)", 1), ("", 0)])
def test_the_end_of_a_process_is_seen_though_its_child_keeps_stdout_open_and_the_child_ends_too(tmp_path, then, code):
    runner = started([sys.executable, "-c", SPAWN.format(own=False, then=then)], tmp_path)
    said, ended = heard(runner)
    child = int(said.split()[-1])
    try:
        assert ended == code
        assert are_gone([child], 5)
    finally:
        if is_alive(child):
            os.kill(child, signal.SIGKILL)


def test_a_daemon_with_a_session_of_its_own_hides_no_end_either(tmp_path):
    runner = started([sys.executable, "-c", SPAWN.format(own=True, then="sys.exit(3)")], tmp_path)
    said, code = heard(runner)
    child = int(said.split()[-1])
    assert is_alive(child)  # it asked to live on, and keeps our pipe
    os.kill(child, signal.SIGKILL)
    assert code == 3


def test_a_process_that_is_ended_takes_its_children_with_it(tmp_path):
    runner = started([sys.executable, "-c", SPAWN.format(own=False, then="child.wait()")], tmp_path)
    said = b""
    while b"\n" not in said:
        said += runner.poll(0.2)[0]
    runner.end(5.0)
    assert heard(runner)[1] == 128 + signal.SIGTERM
    assert are_gone([int(said.split()[-1])], 5)


def test_the_weights_of_a_killed_trainer_are_removed_on_its_machine_before_its_end_is_told(tmp_path):
    publish = "import os\nopen('weights_00000003.safetensors', 'w').close()\nprint(os.listdir('.'), flush=True)\n"
    argv, folder = [sys.executable, "-c", publish + "os.kill(os.getpid(), 9)"], tmp_path / "weights"
    folder.mkdir()
    runner = ProcessActor(Process("trainer", 0, tuple(argv), {}, publishes=(folder,)))
    runner.start(argv, dict(os.environ), str(folder), None)
    assert heard(runner) == ("['weights_00000003.safetensors']\n", 137)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("argv", "cwd", "log", "says"),
    [
        ([sys.executable, "-c", ""], "not/there", None, "cannot start this process on"),
        ([sys.executable, "-c", ""], ".", "not/there.log", "cannot start this process on"),
        (["no-such-program"], ".", None, "cannot start no-such-program"),
    ],
)
def test_a_process_that_cannot_be_started_is_a_bad_config_and_says_why(tmp_path, argv, cwd, log, says):
    said, code = heard(started(argv, tmp_path / cwd, None if log is None else tmp_path / log))
    assert code == 2
    assert says in said
    assert "Traceback" not in said


def test_output_that_nobody_reads_is_bounded_and_comes_in_small_replies(tmp_path):
    """As when the launcher is stopped: a large reply would fill Ray's object store."""
    runner = started([sys.executable, "-c", "for _ in range(40): print('x' * 2**20)\nprint('the end')"], tmp_path)
    until(lambda: runner._code is not None, 30)
    replies, code = [], None
    while code is None:
        more, code = runner.poll(0.2)
        replies.append(len(more))
        said = more
    assert code == 0
    assert max(replies) <= ray.REPLY_BYTES
    assert 2**20 < sum(replies) <= ray.KEPT_BYTES + 100
    assert said.endswith(b"the end\n")  # the last reply, with the exit code


def test_only_a_stopped_process_is_killed_for_its_silence(tmp_path):
    import subprocess

    process = subprocess.Popen(["sleep", "60"])
    kill_if_stopped(process.pid)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGSTOP)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    kill_if_stopped(process.pid)
    assert process.wait(10) == -signal.SIGKILL

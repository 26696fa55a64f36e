import subprocess
import sys
import time

import pytest

from gspo.system import program

pytestmark = pytest.mark.run

PROGRAM = """
import os, signal, sys, threading, time
from gspo.system import program
def ask(number):
    os.kill(os.getpid(), number)
    time.sleep(0.5)
def swallowed():
    try:
        ask(signal.SIGTERM)
    except KeyboardInterrupt:
        raise ImportError("a library turned the interrupt into its own error")
def at_exit():
    threading.Timer(1.0, lambda: None).start()  # Python waits for this thread at the end
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    return 0
def fails():
    raise ValueError("real")
main = {
    "term": lambda: ask(signal.SIGTERM), "int": lambda: ask(signal.SIGINT), "usr1": lambda: ask(signal.SIGUSR1),
    "swallowed": swallowed, "done": lambda: 0, "failed": lambda: 2, "at_exit": at_exit, "fails": fails,
}[sys.argv[1]]
program.run_main(main)
"""


def test_a_command_ends_with_its_documented_exit_code_whenever_a_signal_comes():
    want = {"term": 130, "int": 130, "usr1": 130, "swallowed": 130, "done": 0, "failed": 2, "at_exit": 0, "fails": 1}
    started = {name: subprocess.Popen([sys.executable, "-c", PROGRAM, name]) for name in want}
    assert {name: process.wait(60) for name, process in started.items()} == want


def test_a_thread_that_hangs_does_not_hold_the_end_of_a_command():
    code = (
        "import threading, time\n"
        "from gspo.system import program\n"
        "program.EXIT_S = 1.0\n"
        "program.run_main(lambda: threading.Thread(target=time.sleep, args=(60,), name='tool').start() or 3)\n"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert time.monotonic() - begin < 40
    assert done.returncode == 3
    assert "tool" in done.stderr


COMMAND = """
import sys
from gspo.cli import main as cli
from gspo.system import heartbeat, program
heartbeat.NOTICE_S, program.START_TIMEOUT_S = 1.0, 4.0
sys.argv[:] = ["gspo", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.parametrize(
    "words", [["report", "RUN"], pytest.param(["audit", "RUN"], marks=pytest.mark.full)], ids=lambda words: words[0]
)
def test_a_command_that_hangs_says_what_it_waits_for_and_ends(tmp_path, words):
    # A file system that never answers: the kernel calls this process, which does not answer.
    hang = tmp_path / "hang"
    hang.mkdir()
    words = [str(hang) if word == "RUN" else word for word in words]
    is_there = f"e == 'open' and str(a[0]).startswith({str(hang)!r})"
    hook = f"import sys, time\nsys.addaudithook(lambda e, a: {is_there} and time.sleep(99))\n"
    (hang / "metrics.jsonl").write_text("{}\n")
    (hang / "config.yaml").write_text("actor: {}\n")
    done = subprocess.run([sys.executable, "-c", hook + COMMAND, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "gspo: no progress for 1 s after '" in done.stderr
    assert "stalled: no progress for 4 s after '" in done.stderr


def test_a_program_whose_stdout_is_closed_goes_on_without():
    code = "import sys\nfrom gspo.system.program import print_line\n"
    code += "for i in range(20_000): print_line(f'line {i}')\nprint('still here', file=sys.stderr)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b"still here\n"
        assert process.wait(60) == 0


def test_on_a_busy_machine_threads_sleep_while_they_wait_unless_the_user_decides(monkeypatch):
    cases = (
        (0.5, {}, None),
        (99.0, {}, "passive"),
        (99.0, {"OMP_WAIT_POLICY": "active"}, "active"),
        (99.0, {"GOMP_SPINCOUNT": "10"}, None),
    )
    for load, own, want in cases:
        environment = dict(own)
        monkeypatch.setattr(program.os, "environ", environment)
        monkeypatch.setattr(program.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        monkeypatch.setattr(program.os, "cpu_count", lambda: 2)
        program.wait_without_spinning()
        assert environment.get("OMP_WAIT_POLICY") == want

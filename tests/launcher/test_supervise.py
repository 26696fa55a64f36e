"""Who is started again, which exit code comes out, who hears a signal, and that nobody is left: real processes."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import processes
import pytest
from processes import is_alive, until

from gspo.config import Layout
from gspo.launcher import local
from gspo.launcher.plan import LaunchPlan, Process
from gspo.launcher.start import main
from gspo.launcher.supervise import supervise
from gspo.sampling import weight_folders

pytestmark = pytest.mark.run

COUNT = "n = sum(1 for _ in open(log)) if os.path.exists(log) else 0; open(log, 'a').write(f'{os.getpid()}\\n'); "


def process(role: str, log: Path, then: str, index: int = 0) -> Process:
    """A process that writes its pid to `log` and then runs `then`; `n` is how often it was started before."""
    code = f"import os, signal, sys, time; log = {str(log)!r}; {COUNT}\n{then}"
    return Process(role, index, (sys.executable, "-c", code), {"GSPO_LAUNCHED": "1"})  # pyright: ignore[reportArgumentType]


def plan_of(root: Path, *processes: Process) -> LaunchPlan:
    made = LaunchPlan(Layout(1, None, 1, 0), root, processes)
    made.folder.mkdir(parents=True, exist_ok=True)
    return made


def pids(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def run(plan: LaunchPlan, restarts: int = 3, resumes: int = 0) -> tuple[int, list[str]]:
    said: list[str] = []

    def prepare():
        return lambda p: local.LocalProcess(p, {**os.environ, **p.env}, plan.folder)

    return supervise(plan, prepare, restarts=restarts, resumes=resumes, say=said.append), said


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_the_trainers_own_exit_code_is_the_launchers_and_final(tmp_path, code):
    trainer = process("trainer", tmp_path / "t", f"sys.exit({code})")
    assert run(plan_of(tmp_path, trainer), resumes=3) == (code, [])
    assert len(pids(tmp_path / "t")) == 1


def test_a_killed_trainer_is_started_again_and_its_samplers_stay(tmp_path):
    trainer = process("trainer", tmp_path / "t", "n < 2 and os.kill(os.getpid(), 9)")
    sampler = process("sampler", tmp_path / "s", "time.sleep(600)")
    code, said = run(plan_of(tmp_path, trainer, sampler), resumes=3)
    assert code == 0
    assert len(pids(tmp_path / "t")) == 3
    assert len(said) == 2
    assert "was killed by SIGKILL" in said[0]
    (server,) = pids(tmp_path / "s")
    assert not is_alive(server)


def test_a_trainer_that_is_killed_again_and_again_is_given_up(tmp_path):
    trainer = process("trainer", tmp_path / "t", "os.kill(os.getpid(), 9)")
    code, said = run(plan_of(tmp_path, trainer), resumes=2)
    assert code == 137
    assert len(pids(tmp_path / "t")) == 3
    assert "scheduler.restarts" in said[-1]


def test_a_dead_sampler_is_started_again_alone_and_within_bounds(tmp_path):
    wait = f"while not os.path.exists({str(tmp_path / 'given up')!r}): time.sleep(0.02)"
    trainer = process("trainer", tmp_path / "t", wait)
    good = process("sampler", tmp_path / "good", "time.sleep(600)")
    bad = process("sampler", tmp_path / "bad", "print('out of memory'); os.kill(os.getpid(), 9)", index=1)
    made = plan_of(tmp_path, trainer, good, bad)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "not restarted" in text:
            (tmp_path / "given up").touch()

    def prepare():
        return lambda p: local.LocalProcess(p, {**os.environ, **p.env}, made.folder)

    assert supervise(made, prepare, restarts=2, resumes=0, say=say) == 0
    assert [len(pids(tmp_path / name)) for name in ("t", "good", "bad")] == [1, 1, 3]
    assert "out of memory" in said[-1]  # its last words
    assert not any(is_alive(pid) for name in ("t", "good", "bad") for pid in pids(tmp_path / name))


def test_ranks_of_several_machines_are_started_again_together_for_the_one_that_was_killed(tmp_path):
    killed = process("trainer", tmp_path / "a", "time.sleep(0.3); n or os.kill(os.getpid(), 9)")
    # A rank whose peer is gone fails of it: that is not the reason.
    other = process("trainer", tmp_path / "b", "time.sleep(0.1); sys.exit(0 if n else 1)", index=1)
    code, said = run(plan_of(tmp_path, killed, other), resumes=1)
    assert code == 0
    assert [len(pids(tmp_path / name)) for name in "ab"] == [2, 2]
    assert "was killed" in said[0]


def test_weights_that_a_killed_trainer_has_published_are_removed_at_the_end_of_the_run(tmp_path):
    folders = weight_folders(tmp_path)
    assert str(folders[0]).startswith("/dev/shm/")
    publish = f"[os.makedirs(f, exist_ok=True) for f in {[str(folder) for folder in folders]}]\n"
    files = [str(folder / "weights_00000003.safetensors") for folder in folders]
    publish += f"[open(f, 'w').write('weights') for f in {files}]\nos.kill(os.getpid(), 9)"
    trainer = replace(process("trainer", tmp_path / "t", publish), publishes=folders)
    sampler = process("sampler", tmp_path / "s", "time.sleep(600)")
    code, _ = run(plan_of(tmp_path, trainer, sampler))
    assert code == 137
    assert len(pids(tmp_path / "t")) == 1  # it did come to publishing
    assert not any(folder.exists() for folder in folders)


LAUNCH = """
import sys; from pathlib import Path; sys.path[:0] = {here!r}; from test_supervise import *
saves = "signal.signal({number}, lambda *_: (open({saved!r}, 'w').close(), sys.exit(130)))\\n"
saves += "open({ready!r}, 'w').close(); time.sleep(600)"
root = Path({root!r})
made = plan_of(root, process("trainer", root / "t", saves), process("sampler", root / "s", "time.sleep(600)"))
sys.exit(run(made)[0])
"""


def launched(tmp_path: Path, number: int = signal.SIGINT, by: tuple[str, ...] = ()) -> subprocess.Popen:
    here = [str(Path(file).parent) for file in (__file__, processes.__file__)]
    code = LAUNCH.format(
        here=here, number=int(number), saved=str(tmp_path / "saved"), root=str(tmp_path), ready=str(tmp_path / "ready")
    )
    started = subprocess.Popen(
        [*by, sys.executable, "-c", code], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    until(lambda: (tmp_path / "ready").exists() and pids(tmp_path / "s"))
    return started


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_lets_the_trainer_save_and_ends_everything(tmp_path, number):
    launcher = launched(tmp_path, number)
    os.killpg(launcher.pid, number)  # as a terminal does: the whole foreground group
    assert launcher.wait(20) == 130
    assert (tmp_path / "saved").exists()
    assert not any(is_alive(pid) for name in "ts" for pid in pids(tmp_path / name))


def test_a_terminal_that_is_closed_lets_the_trainer_save(tmp_path):
    launcher = launched(tmp_path, signal.SIGTERM)  # what the trainer is told: it need not know of terminals
    os.kill(launcher.pid, signal.SIGHUP)
    assert launcher.wait(20) == 130
    assert (tmp_path / "saved").exists()
    assert not any(is_alive(pid) for name in "ts" for pid in pids(tmp_path / name))


def test_under_nohup_a_closed_terminal_ends_nothing(tmp_path):
    launcher = launched(tmp_path, signal.SIGTERM, by=("nohup",))
    os.killpg(launcher.pid, signal.SIGHUP)
    time.sleep(1.0)
    assert launcher.poll() is None
    assert not (tmp_path / "saved").exists()
    assert all(is_alive(pid) for name in "ts" for pid in pids(tmp_path / name))
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(20) == 130
    assert (tmp_path / "saved").exists()


def test_a_sampler_that_dies_while_the_trainer_finishes_its_step_is_started_again_and_a_killed_trainer_is_not(tmp_path):
    again = tmp_path / "again"  # the trainer's last step ends when its sampler is back
    finish = f"\n    while not os.path.exists({str(again)!r}): time.sleep(0.02)\n    os.kill(os.getpid(), 9)\n"
    trainer = process("trainer", tmp_path / "t", f"def asked(*_):{finish}signal.signal(15, asked)\n"
                      f"os.kill(os.getppid(), 15); time.sleep(600)")  # fmt: skip
    dies = f"if n: open({str(again)!r}, 'w').close(); time.sleep(600)\ntime.sleep(1); os.kill(os.getpid(), 9)"
    sampler = process("sampler", tmp_path / "s", dies)
    code, said = run(plan_of(tmp_path, trainer, sampler), resumes=3)
    assert code == 137
    assert [len(pids(tmp_path / name)) for name in "ts"] == [1, 2]
    assert [text.split(" was")[0] for text in said] == ["sampler_0"]


def test_a_second_launch_of_a_run_is_refused_and_leaves_the_samplers_of_the_first_alone(tmp_path, capsys):
    path = tmp_path / "one" / "trial0"
    (path / "samplers").mkdir(parents=True)
    (path / "samplers" / "sampler_0.json").write_text("{}")
    weights = path / "weights" / "weights_00000001.safetensors"
    weights.parent.mkdir()
    weights.touch()
    (tmp_path / "run.yaml").write_text("experiment_name: one\ntrial_name: trial0\nactor: {path: 'embedded:tiny'}\n")
    asked = ["train.py", "--config", str(tmp_path / "run.yaml"), f"cluster.fileroot={tmp_path}"]
    asked += ["train_dataset.path=embedded:arithmetic", "rollout.backend=local:d1", "total_train_steps=1"]
    with open(path / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as the trainer of the first launch holds it
        assert main("local", asked) == 2
    assert "is in use by another trainer" in capsys.readouterr().err
    assert (path / "samplers" / "sampler_0.json").exists()
    assert weights.exists()
    assert not (path / "launch").exists()


def test_a_launcher_that_is_killed_leaves_no_process(tmp_path):
    launcher = launched(tmp_path)
    launcher.kill()
    launcher.wait()
    until(lambda: not any(is_alive(pid) for name in "ts" for pid in pids(tmp_path / name)))
    assert not (tmp_path / "saved").exists()


def test_a_process_under_sigstop_is_ended_after_its_deadline_and_started_again(tmp_path, capsys):
    trainer = process("trainer", tmp_path / "t", "n or os.kill(os.getpid(), signal.SIGSTOP)")
    begin = time.monotonic()
    code, said = run(plan_of(tmp_path, replace(trainer, max_stopped_s=1.5)), resumes=1)
    assert code == 0
    assert time.monotonic() - begin > 1.5
    assert len(pids(tmp_path / "t")) == 2
    assert "was stopped for 1.5 s (SIGSTOP)" in capsys.readouterr().err
    assert "was killed" in said[0]


def test_a_process_that_ignores_sigterm_is_killed_with_what_it_started(tmp_path):
    stubborn = (
        "import subprocess; signal.signal(15, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600']); open(log, 'a').write(f'{child.pid}\\n'); child.wait()"
    )
    made = plan_of(tmp_path, process("sampler", tmp_path / "s", stubborn))
    child = local.LocalProcess(made.samplers[0], dict(os.environ), made.folder)
    until(lambda: len(pids(tmp_path / "s")) == 2)
    child.end(0.3)
    until(lambda: not any(is_alive(pid) for pid in pids(tmp_path / "s")))

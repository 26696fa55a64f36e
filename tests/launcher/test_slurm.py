"""Slurm, really started as two nodes on this host (tests/slurm/cluster.py): jobs that resume, requeue and save."""

import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import cluster
import pytest
from launched_runs import (
    KILLED,
    MOMENTS,
    NUM_STEPS,
    STOPPED,
    TURNED,
    Run,
    by_command,
    by_module,
    by_script,
    go_on_with,
    kill_at_fault,
    metrics_of,
    until,
)

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gspo[ray]'")
pytestmark = [pytest.mark.timeout(600), pytest.mark.run]
full = pytest.mark.full


@pytest.fixture(scope="module")
def slurm():
    """The variables of a running cluster. Its folder is not pytest's, which the user of munged may not enter."""
    if why := cluster.unavailable():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="gspo_slurm_") as folder, cluster.running(Path(folder)) as env:
        yield env


def scontrol(slurm: dict[str, str], *words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **slurm}, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_trainer_killed_under_slurm_resumes_by_itself_to_the_same_end(slurm, at_home, tmp_path):
    run = Run(by_module("slurm"), tmp_path, fault=KILLED, **slurm)
    said, complained = run.ended()
    assert run.fired == [KILLED]
    assert "the trainer was killed by SIGKILL" in said
    assert f"{NUM_STEPS} steps in" in said
    assert metrics_of(run.path) == at_home
    assert re.search(r"job \d+ is submitted", complained)


@full
@pytest.mark.parametrize(
    ("words", "home"), [(by_script("slurm"), "at_home"), (by_module("slurm", *TURNED), "turned_at_home")]
)
def test_both_files_of_the_page_train_the_same_under_slurm(slurm, request, tmp_path, words, home):
    run = Run(words, tmp_path, **slurm)
    run.ended()
    assert metrics_of(run.path) == request.getfixturevalue(home)


@full
def test_a_job_near_its_time_limit_saves_is_queued_again_and_ends_the_same(slurm, at_home, tmp_path):
    run = Run(by_command("slurm"), tmp_path, fault=STOPPED, **slurm)
    until(lambda: run.fired or run.process.poll() is not None, 300)
    job = scontrol(slurm, "squeue", "-h", "-o", "%i").split()[0]
    scontrol(slurm, "scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1@120 sends
    go_on_with(run, signal.SIGUSR1)
    until(lambda: "Restarts=1" in scontrol(slurm, "scontrol", "show", "job", job), 300)
    assert run.steps() == [1, 2]
    # The follower and its stall watchdog are left; a node refuses a job that it has not done with.
    until(lambda: len([command for command in run.left() if "heartbeat.py" not in command]) == 1, 60)
    time.sleep(3)
    scontrol(slurm, "scontrol", "update", f"jobid={job}", "StartTime=now")  # Slurm holds it for two minutes
    code, said, complained = run.end(550)
    assert code == 0, said + complained + scontrol(slurm, "scontrol", "show", "job", job)
    assert "SIGUSR1" in said
    assert "at step 2" in said
    assert metrics_of(run.path) == at_home
    until(lambda: not run.left(), 30)


@full
def test_ranks_on_two_nodes_train_as_one_process_does(slurm, at_home, tmp_path):
    run = Run(by_command("slurm"), tmp_path, "cluster.n_nodes=2", "actor.backend=fsdp:d2", **slurm)
    run.ended()
    assert [row["reward/mean"] for row in metrics_of(run.path)] == [row["reward/mean"] for row in at_home]


@full
def test_ctrl_c_at_the_follower_lets_the_job_save_and_end(slurm, tmp_path):
    run = Run(by_command("slurm"), tmp_path, "total_train_steps=100000", **slurm)
    until(lambda: run.steps() or run.process.poll() is not None, 300)
    os.killpg(run.process.pid, signal.SIGINT)
    said, _ = run.ended(130, 300)
    step = run.steps()[-1]
    assert f"Stopped and saved after step {step}" in said
    assert (run.path / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()
    until(lambda: not scontrol(slurm, "squeue", "-h").strip(), 60)


@full
def test_a_failed_job_gives_its_exit_code_and_its_error(slurm, tmp_path):
    run = Run(by_command("slurm"), tmp_path, f"train_dataset.path={tmp_path}/nowhere.jsonl", **slurm)
    code, said, complained = run.end(300)
    assert code in (1, 2), said + complained
    assert "nowhere.jsonl" in said
    assert "Traceback" not in said


def test_without_slurm_the_launcher_says_so(tmp_path):
    run = Run(by_command("slurm"), tmp_path, PATH="/nowhere")
    code, _, complained = run.end(60)
    assert code == 2
    assert "sbatch was not found on this machine" in complained


@full
@pytest.mark.parametrize("moment", MOMENTS[2:3])
def test_a_trainer_killed_in_a_save_under_slurm_resumes_by_itself_to_the_same_end(slurm, at_home, tmp_path, moment):
    run = Run(by_command("slurm"), tmp_path, fault=moment, **slurm)
    kill_at_fault(run, lambda trainer: [trainer])
    run.ended()
    assert run.fired[0] == moment
    assert metrics_of(run.path) == at_home

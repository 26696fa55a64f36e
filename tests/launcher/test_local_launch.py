"""Ranks and sampler servers on this machine, by the local launcher: deaths, signals, and nobody left."""

import os
import re
import signal

import pytest
from launched_runs import NUM_STEPS, Run, by_command, by_script, metrics_of, until

from gspo.sampling import weight_folders

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
BOTH = ("rollout.backend=local:d2", "actor.backend=fsdp:d2")
ENDLESS = "total_train_steps=100000"


def pids(run: Run, pattern: str) -> list[int]:
    return [pid for pid, command in run.processes() if re.search(pattern, command)]


def started(run: Run) -> Run:
    until(lambda: run.steps() or run.process.poll() is not None, 300)
    assert run.process.poll() is None, run.end()
    return run


def test_ranks_and_servers_train_as_one_process_does(at_home, tmp_path):
    run = Run(by_script("local"), tmp_path, *BOTH)
    said, _ = run.ended()
    assert said.count(f"{NUM_STEPS} steps in") == 1  # rank 0 has the terminal, the other its log
    assert [row["reward/mean"] for row in metrics_of(run.path)] == [row["reward/mean"] for row in at_home]
    assert not list((run.path / "samplers").glob("*.json"))


def test_a_killed_sampler_is_started_again_and_the_run_ends_the_same(at_home, tmp_path):
    run = started(Run(by_command("local"), tmp_path, "rollout.backend=local:d2"))
    (server,) = pids(run, r"gspo\.launcher\.serve\.local .*--index 0")
    os.kill(server, signal.SIGKILL)
    _, complained = run.ended()
    assert "sampler_0 was killed by SIGKILL" in complained
    assert [row["reward/mean"] for row in metrics_of(run.path)] == [row["reward/mean"] for row in at_home]


def test_a_killed_rank_ends_the_run_with_its_code_and_nobody_is_left(tmp_path):
    run = started(Run(by_command("local"), tmp_path, *BOTH, ENDLESS))
    ranks = [pid for pid in pids(run, r"^\S+ -m gspo train") if pid != run.process.pid]
    assert len(ranks) == 2
    assert any(list(folder.glob("weights_*")) for folder in weight_folders(run.path))
    os.kill(max(ranks), signal.SIGKILL)
    _, complained = run.ended(137, 120)
    assert "was killed by SIGKILL" in complained
    assert not any(folder.exists() for folder in weight_folders(run.path))


def test_ctrl_c_saves_and_ends_ranks_and_servers(tmp_path):
    run = started(Run(by_command("local"), tmp_path, *BOTH, ENDLESS))
    os.killpg(run.process.pid, signal.SIGINT)
    said, _ = run.ended(130, 120)
    step = run.steps()[-1]
    assert f"Stopped and saved after step {step}" in said
    assert (run.path / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()


def test_a_killed_launcher_takes_ranks_and_servers_with_it(tmp_path):
    run = started(Run(by_command("local"), tmp_path, *BOTH, ENDLESS))
    assert len(pids(run, r"gspo\.launcher\.serve\.local")) == 2
    run.process.kill()
    run.process.communicate()
    until(lambda: not run.left(), 30)

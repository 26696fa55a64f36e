"""The follower of a Slurm job, where Slurm's commands answer by a script: outages, preemption, requeues."""

import json
import sys

import pytest

from gspo.config.layout import Layout
from gspo.config.schema import Slurm
from gspo.errors import GspoError
from gspo.launcher import slurm
from gspo.launcher.plan import LaunchPlan, Process

pytestmark = pytest.mark.run

# Each call of scontrol takes the next line of the script; the last one stays.
SCONTROL = """#!{python}
import json, pathlib, sys
place = pathlib.Path({place!r})
lines = json.loads(place.read_text())
if len(lines) > 1:
    place.write_text(json.dumps(lines[1:]))
if not lines[0]:
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
print(f"JobId=7 JobName=x {{lines[0]}} Requeue=1")
"""
AWAY = ""
RUNNING, DONE = "JobState=RUNNING ExitCode=0:0", "JobState=COMPLETED ExitCode=0:0"
PENDING, PREEMPTED = "JobState=PENDING ExitCode=0:0", "JobState=PREEMPTED ExitCode=0:15"


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Follow a job whose states are given; the exit code, what was said, the states that were not asked for, and how
    often Slurm was waited for."""
    commands = tmp_path / "commands"
    commands.mkdir()

    def command(name: str, text: str) -> None:
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)

    command("scontrol", SCONTROL.format(python=sys.executable, place=str(tmp_path / "states")))
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    pauses: list[float] = []
    monkeypatch.setattr(slurm.time, "sleep", pauses.append)

    def run(*states: str, sbatch: str = "echo 7") -> tuple[int, list[str], list[str], int]:
        command("sbatch", f"#!/bin/sh\n{sbatch}\n")
        (tmp_path / "states").write_text(json.dumps(states))
        said: list[str] = []
        plan = LaunchPlan(Layout(1, None, 1, 0), tmp_path, (Process("trainer", 0, ("true",)),))
        plan.folder.mkdir(exist_ok=True)
        code = slurm.run(plan, Slurm(), ["true"], restarts=0, say=said.append)
        return code, said, json.loads((tmp_path / "states").read_text()), pauses.count(5)

    return run


def test_a_controller_that_is_away_for_a_while_ends_nothing(follow):
    code, said, left, waits = follow(RUNNING, AWAY, AWAY, AWAY, RUNNING, DONE)
    assert code == 0
    assert waits == 3  # it was away
    assert len(said) == 1
    assert left == [DONE]


def test_a_controller_that_stays_away_is_an_error_with_its_own_words(follow, monkeypatch):
    monkeypatch.setattr(slurm, "CONTROLLER_TIMEOUT_S", -1.0)
    with pytest.raises(GspoError, match="Unable to contact slurm controller"):
        follow(RUNNING, AWAY)


def test_a_preempted_job_that_is_not_queued_again_ends_with_a_code_and_how_to_go_on(follow):
    code, said, _, _ = follow(RUNNING, PREEMPTED)
    assert code == 128 + 15
    assert "ended as PREEMPTED" in said[-1]
    assert "run the same command again" in said[-1]


def test_a_preempted_job_that_is_queued_again_is_followed_to_its_end(follow):
    code, said, left, _ = follow(RUNNING, PREEMPTED, PENDING, RUNNING, PREEMPTED, PENDING, RUNNING, DONE)
    assert code == 0
    assert len(said) == 1
    assert left == [DONE]


def test_warnings_of_sbatch_are_no_part_of_the_job_number(follow):
    code, said, _, _ = follow(DONE, sbatch="echo 'sbatch: use a newer partition'; echo '7;cluster'")
    assert code == 0
    assert said[0].startswith("job 7 is submitted")
    with pytest.raises(GspoError, match="instead of the job's number"):
        follow(DONE, sbatch="echo submitted")


@pytest.mark.parametrize("odd", ["JobState=COMPLETED ExitCode=x", "Nothing=here"])
def test_a_state_that_cannot_be_read_is_asked_for_again_and_an_error_in_the_end(follow, monkeypatch, odd):
    assert follow(RUNNING, odd, DONE)[0] == 0
    monkeypatch.setattr(slurm, "CONTROLLER_TIMEOUT_S", -1.0)
    with pytest.raises(GspoError, match="no state of job 7"):
        follow(RUNNING, odd)


def test_a_deleted_or_truncated_log_does_not_end_the_follower(tmp_path, capfdbinary):
    log = tmp_path / "slurm.log"
    assert slurm._print_log(log, 10) == 0
    log.write_bytes(b"new")
    assert slurm._print_log(log, 10) == 3
    assert slurm._print_log(log, 3) == 3
    assert capfdbinary.readouterr().out == b"new"

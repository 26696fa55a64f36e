"""The follower of a Slurm job, where Slurm's commands answer by a script: outages, preemption, requeues."""

import json
import os
import signal
import sys

import pytest

from gspo.config import Layout, Slurm
from gspo.errors import ConfigError, GspoError
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
if lines[0] == "forgotten":
    sys.exit("slurm_load_jobs error: Invalid job id specified")
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

    command("scancel", f"#!/bin/sh\necho scancel $* >>{tmp_path}/cancelled\n")
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


CANCELLED = "JobState=CANCELLED ExitCode=15:0"


@pytest.mark.parametrize("end", [CANCELLED, "JobState=FAILED ExitCode=15:0"])
def test_a_signal_while_sbatch_runs_cancels_the_job_that_it_submits(follow, tmp_path, end):
    code, said, _, _ = follow(PENDING, end, sbatch=f"kill -INT {os.getpid()}; sleep 0.3; echo 7")
    assert code == 130
    assert (tmp_path / "cancelled").read_text() == "scancel 7\n"
    assert "cancelling job 7" in said


def test_a_signal_while_the_controller_is_away_is_not_forgotten(follow, tmp_path):
    code, said, _, _ = follow(AWAY, AWAY, RUNNING, DONE, sbatch=f"kill -TERM {os.getpid()}; sleep 0.3; echo 7")
    assert code == 0
    assert (tmp_path / "cancelled").read_text() == "scancel --batch --signal=TERM 7\n"
    assert "Unable to contact slurm controller" in said[1]


def test_the_third_signal_ends_the_follower_only(follow, tmp_path):
    signals = f"for _ in 1 2 3; do kill -INT {os.getpid()}; sleep 0.2; done; echo 7"
    code, said, _, _ = follow(AWAY, sbatch=signals)
    assert code == 130
    assert "scancel 7" in said[-1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # as before


@pytest.mark.parametrize(("ended", "code"), [("7 0", 0), ("7 137", 137), ("6 0", 1), ("", 1)])
def test_a_job_that_slurm_has_forgotten_ends_with_the_code_that_its_script_wrote(follow, tmp_path, ended, code):
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "job.ended").write_text(ended)
    assert follow(RUNNING, "forgotten")[0] == code


def test_why_a_job_is_pending_is_said_once_per_reason(follow):
    waits = "JobState=PENDING Reason={} ExitCode=0:0"
    limit, begin = waits.format("PartitionConfig"), waits.format("BeginTime")
    code, said, _, _ = follow(limit, limit, begin, begin, DONE)
    assert code == 0
    assert said[1:] == ["job 7 is pending: PartitionConfig", "job 7 is pending: BeginTime"]


def test_names_of_files_that_look_like_fields_are_no_state(follow):
    code, _, left, _ = follow(f"{RUNNING} StdOut=/runs/a JobState=FAILED ExitCode=9:0/slurm.log", DONE)
    assert code == 0
    assert left == [DONE]


def test_a_second_job_of_a_run_is_refused_while_the_first_is_queued(follow, tmp_path):
    follow(DONE)
    command = f"Command={tmp_path / 'launch' / 'job.sh'} "
    with pytest.raises(ConfigError, match=r"job 7 of this run is PENDING.*scancel 7"):
        follow(f"{PENDING} {command}", sbatch="echo 8")
    assert follow(f"{PENDING} Command=/other/job.sh ", DONE, sbatch="echo 8")[0] == 0  # a number of another cluster
    assert follow(f"{DONE} {command}", sbatch="echo 9")[0] == 0


def test_a_log_that_cannot_be_read_or_printed_does_not_end_the_follower(tmp_path):
    assert slurm._print_log(tmp_path, 5) == 5  # a folder in its place

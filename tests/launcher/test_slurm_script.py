"""The job script, run by bash where Slurm's commands and the launcher inside the job are small scripts."""

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from processes import until

from gspo.config import Slurm, load
from gspo.errors import ConfigError
from gspo.launcher import slurm
from gspo.launcher.plan import make_launch_plan

HOSTILE = (
    "a b;touch PWNED'\"$(touch PWNED)`touch PWNED`&|#%j\N{RIGHT-TO-LEFT OVERRIDE}é JobState=COMPLETED ExitCode=0:0"
)
# In place of `python -m gspo.launcher`: says that it runs, and on USR1 saves a step if it is told to.
LAUNCHER = """#!/bin/bash
trap '{save}; exit {code}' USR1
touch "{folder}/started"
for _ in $(seq 200); do sleep 0.05; done
"""


def plan_of(fileroot: Path, name: str = "x"):
    overrides = [f"cluster.fileroot={fileroot}", "scheduler.type=slurm"]
    config = load(None, overrides).config.model_copy(update={"experiment_name": name})
    return make_launch_plan(config, ["train.py"], 0)


class Job:
    """A job script that runs, with a log of the calls of scontrol."""

    def __init__(self, tmp_path: Path, monkeypatch, save: str, code: int = 130, setup: tuple[str, ...] = ()) -> None:
        plan = plan_of(tmp_path / "runs", HOSTILE)
        plan.folder.mkdir(parents=True)
        self.folder, self.calls = plan.folder, tmp_path / "calls"
        program, commands = tmp_path / "python", tmp_path / "commands"
        commands.mkdir()
        save = save.format(folder=tmp_path)
        for file, text in (
            (program, LAUNCHER.format(folder=tmp_path, save=save, code=code)),
            (commands / "scontrol", f'#!/bin/sh\necho "$@" >>"{self.calls}"\n'),
        ):
            file.write_text(text)
            file.chmod(0o755)
        monkeypatch.setattr(slurm.sys, "executable", str(program))
        monkeypatch.chdir(tmp_path)
        # The stub cannot quote the hostile name: it saves through a link.
        (plan.path / "checkpoints").symlink_to(tmp_path / "checkpoints")
        (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
        script = plan.folder / "job.sh"
        script.write_text(slurm.render(plan, Slurm(setup=list(setup)), ["train.py"], 3))
        self.process = subprocess.Popen(
            ["bash", str(script)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PATH": f"{commands}:/usr/bin:/bin", "SLURM_JOB_ID": "7"},
        )  # fmt: skip

    def end(self) -> tuple[int, str, str]:
        """(exit code, output, calls of scontrol)"""
        said, _ = self.process.communicate(timeout=30)
        return self.process.returncode, said, self.calls.read_text() if self.calls.exists() else ""


@pytest.mark.run
@pytest.mark.parametrize("saves", [True, False])
def test_a_job_is_queued_again_near_its_time_limit_only_if_it_has_saved_a_step(tmp_path, monkeypatch, saves):
    job = Job(tmp_path, monkeypatch, "mkdir {folder}/checkpoints/step_000004" if saves else ":")
    until((tmp_path / "started").exists, 30)
    job.process.send_signal(signal.SIGUSR1)
    code, said, calls = job.end()
    assert code == 130
    assert calls == ("requeue 7\n" if saves else "")
    assert ("no step was saved before the time limit" in said) == (not saves)
    assert (job.folder / "job.ended").read_text() == "7 130\n"
    assert not list(tmp_path.rglob("PWNED"))  # nothing in the run directory's name was executed


@pytest.mark.run
def test_a_job_whose_time_limit_is_near_before_the_run_starts_ends_and_says_so(tmp_path, monkeypatch):
    job = Job(tmp_path, monkeypatch, ":", setup=("touch setup", "sleep 1"))
    until((tmp_path / "setup").exists, 30)
    job.process.send_signal(signal.SIGUSR1)
    code, said, calls = job.end()
    assert (code, calls) == (130, "")
    assert "no step was saved before the time limit" in said
    assert not (tmp_path / "started").exists()


@pytest.mark.run
def test_hostile_names_stay_inside_of_their_directive():
    plan = plan_of(Path("/runs/100%j"), HOSTILE)
    text = slurm.render(plan, Slurm(), ["train.py"], 3)
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    (name,) = [line for line in directives if "--job-name" in line]
    assert name.endswith("é_JobState_COMPLETED_ExitCode_0_0/trial0'")
    (output,) = [line for line in directives if "--output" in line]
    assert "/runs/100%%j/" in output
    # bash takes the whole script for what it is: every other line is one of the template.
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=10)


@pytest.mark.parametrize("root", ["/runs/x\ntouch PWNED\n#", "/runs/x\r", "/runs/x\\y", "/runs/\x1b[2J"])
def test_a_run_directory_that_breaks_the_script_is_refused(root):
    plan = replace(plan_of(Path("/runs")), path=Path(root))
    with pytest.raises(ConfigError, match=r"cluster\.fileroot"):
        slurm.render(plan, Slurm(), ["train.py"], 0)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--array=0-3", "trial_name"),
        ("-a 0-3", "trial_name"),
        ("--arr=1", "trial_name"),
        ("--output=/tmp/log", "slurm.log"),
        ("-e/tmp/log", "slurm.log"),
        ("-N2", "cluster.n_nodes"),
        ("--nodes=2", "cluster.n_nodes"),
        ("--comment=x\ntouch PWNED", "one line"),
    ],
)
def test_an_option_of_sbatch_that_breaks_the_launch_is_refused_by_name(option, says):
    with pytest.raises(ConfigError, match=says) as error:
        slurm.render(plan_of(Path("/runs")), Slurm(sbatch=["--time=1:00:00", option]), ["train.py"], 0)
    assert "scheduler.slurm.sbatch" in str(error.value)


def test_other_options_of_sbatch_are_passed_on():
    options = ["--ntasks-per-node=2", "--nodelist=n1", "--exclusive", "-p gpu", "--cpus-per-task=64", "--no-requeue"]
    text = slurm.render(plan_of(Path("/runs")), Slurm(sbatch=options), ["train.py"], 0)
    assert all(f"#SBATCH {option}\n" in text for option in options)

"""Run a plan as a Slurm job. `python3 -m gspo.launcher.slurm SCRIPT --config YAML [key=value …]`.

The sbatch script (from the template job.sbatch) starts Ray on all machines of the allocation and runs the Ray launcher
with the same command. This program submits it, prints its log, and on Ctrl-C asks the job to save and end. The job
continues if this program is killed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gspo.config.schema import Slurm
from gspo.errors import ConfigError, GspoError
from gspo.launcher.launch import main
from gspo.launcher.plan import LaunchPlan
from gspo.launcher.ray import STORE_BYTES
from gspo.launcher.supervise import Say
from gspo.system import program
from gspo.system.heartbeat import beat

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")
ENDED += ("REVOKED", "PREEMPTED")
SAVE_BEFORE_S = 120  # the run saves and queues itself again this long before its time limit
CONTROLLER_TIMEOUT_S = 600.0  # Slurm's controller may be unreachable for this long
# Lines between these two are in the script only if the job has several machines.
_SEVERAL = re.compile(r"^#if several machines\n(.*?)^#endif\n", re.MULTILINE | re.DOTALL)


def render(plan: LaunchPlan, slurm: Slurm, command: Sequence[str], restarts: int) -> str:
    """The sbatch script: job.sbatch with @NAME@ replaced by values of this run."""
    layout, log = plan.layout, plan.folder / "slurm.log"
    cpus = max(sum(p.node == node for p in plan.processes) for node in plan.nodes)
    # One task per machine. B:USR1 signals the batch script before the time limit, so that the trainer can save.
    # open-mode=append keeps the log when the job is requeued.
    flags = {
        "job-name": "/".join(plan.path.parts[-2:]),
        "nodes": layout.num_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "gpus-per-node": layout.gpus_per_node or None,
        "output": log,
        "open-mode": "append",
        "signal": f"B:USR1@{SAVE_BEFORE_S}",
    }
    # Quoted as in a shell, which sbatch understands: a folder's name may contain spaces.
    options = [shlex.quote(f"--{name}={value}") for name, value in flags.items() if value is not None]
    options += ["--requeue", *slurm.sbatch]
    # Inside the job the run uses the Ray launcher on the machines that Slurm has allocated.
    inner = [sys.executable, "-m", "gspo.launcher", "--on", "ray", "--config", str(plan.config_file), "--", *command]
    values = {
        "WHAT": f"{plan.path}: {layout}",
        "FILE": plan.folder / "job.sh",
        "DIRECTIVES": "\n".join(f"#SBATCH {option}" for option in options),
        "CWD": shlex.quote(str(Path.cwd())),
        "SETUP": "\n".join(slurm.setup),
        "PYTHON": shlex.quote(sys.executable),
        "CPUS": cpus,
        "GPUS": layout.gpus_per_node,
        "STORE_BYTES": STORE_BYTES,
        "LOGS": shlex.quote(str(plan.folder)),
        "RUN": shlex.join(inner),
        "RESTARTS": restarts,
    }
    template = Path(__file__).with_name("job.sbatch").read_text(encoding="utf-8")
    text = _SEVERAL.sub(r"\1" if layout.num_nodes > 1 else "", template)
    return re.sub(r"@([A-Z_]+)@", lambda found: str(values[found[1]]), text)


def run(plan: LaunchPlan, slurm: Slurm, command: Sequence[str], *, restarts: int, say: Say) -> int:
    """Submit the job and print its log until it ends; returns its exit code."""
    file, log = plan.folder / "job.sh", plan.folder / "slurm.log"
    file.write_text(render(plan, slurm, command, restarts), encoding="utf-8")
    log.touch()
    # The log of an earlier job is not printed again.
    position = log.stat().st_size
    # `number;cluster`, after the warnings of a site's plugins.
    job = (_slurm("sbatch", "--parsable", str(file)).strip().splitlines() or [""])[-1].split(";")[0].strip()
    if not job.isdecimal():
        raise GspoError(f"sbatch printed {job!r} instead of the job's number; look for the job with `squeue --me`")
    say(f"job {job} is submitted; its log is {log}. Ctrl-C: the job saves and ends; Ctrl-C twice: it is cancelled")
    interrupts, before, answered = 0, "", time.monotonic()
    while True:
        try:
            try:
                (state, code), answered = _state(job), time.monotonic()
            except GspoError:  # the controller may be restarting; the job does not need it
                if time.monotonic() - answered > CONTROLLER_TIMEOUT_S:
                    raise
                beat("a call of the Slurm controller")
                time.sleep(5)
                continue
            position = _print_log(log, position)
            if (
                state in ENDED and state == before
            ):  # seen twice: a job that is being requeued passes through such a state
                if code and state != "FAILED":
                    say(f"job {job} ended as {state}; run the same command again to resume from the last checkpoint")
                return code
            before = state
            beat("the state of the job")
            time.sleep(0.5)
        except KeyboardInterrupt:
            # The second Ctrl-C cancels the job whatever its state is.
            interrupts += 1
            _stop(job, state="" if interrupts > 1 else _state(job)[0], say=say)


def _stop(job: str, state: str, say: Say) -> None:
    # Only a running job can save; a pending one is cancelled.
    if state == "RUNNING":
        say(f"asking job {job} to save and end")
        _slurm("scancel", "--batch", "--signal=TERM", job)
    else:
        say(f"cancelling job {job}")
        _slurm("scancel", job)


def _state(job: str) -> tuple[str, int]:
    """(state, exit code) of a job. Slurm keeps them for some minutes after its end, also without accounting."""
    shown = _slurm("scontrol", "show", "job", "-o", job)
    fields = dict(re.findall(r"(\w+)=(\S*)", shown))
    # Slurm writes `code:signal`.
    found = re.fullmatch(r"(\d+):(\d+)", fields.get("ExitCode", "0:0"))
    state = fields.get("JobState", "")
    if found is None or not state:
        raise GspoError(f"scontrol printed no state of job {job}: {shown.strip()[:200]!r}")
    code, number = int(found[1]), int(found[2])
    failed = 128 + number if number else code
    return state, failed or (0 if state == "COMPLETED" else 130 if state == "CANCELLED" else 1)


def _print_log(log: Path, position: int) -> int:
    """Print the log from `position` on; returns the new position."""
    try:
        with open(log, "rb") as file:
            # A log that was deleted or truncated is printed from its new begin.
            file.seek(position if position <= log.stat().st_size else 0)
            sys.stdout.buffer.write(file.read())
            sys.stdout.buffer.flush()
            return file.tell()
    except FileNotFoundError:
        return 0


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{command[0]} was not found on this machine; run this where Slurm jobs are submitted"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise GspoError(f"{command[0]} did not answer within 60 s; check that the Slurm controller runs") from error
    if done.returncode:
        raise GspoError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    program.run(lambda: main("slurm"))

"""Run a plan as a Slurm job. `python3 -m gspo.launcher.slurm SCRIPT --config YAML [key=value …]`.

The sbatch script (from the template job.sbatch) starts Ray on all machines of the allocation and runs the Ray launcher
with the same command. This program submits it, prints its log, and on Ctrl-C asks the job to save and end. The job
continues if this program is killed.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gspo.config import Slurm
from gspo.errors import ConfigError, GspoError
from gspo.launcher.plan import LaunchPlan
from gspo.launcher.ray import STORE_BYTES
from gspo.launcher.start import main
from gspo.launcher.supervise import Say, received_signals, write_output
from gspo.system import beat, program

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")
ENDED += ("REVOKED", "PREEMPTED")
SAVE_BEFORE_S = 120  # the run saves and queues itself again this long before its time limit
CONTROLLER_TIMEOUT_S = 600.0  # Slurm's controller may be unreachable for this long
# Options of sbatch that the launcher sets itself, with the way to choose them; long and short names.
DECIDED = {
    "array": "each task of an array would be a trainer in the same run directory; start one run per trial_name",
    "output": "the launcher prints the job's log, launch/slurm.log",
    "error": "the launcher prints the job's log, launch/slurm.log",
    "open-mode": "a requeued job continues the log",
    "nodes": "set cluster.n_nodes",
    "ntasks": "set cluster.n_nodes and the backends",
    "wrap": "the launcher writes the script",
    "test-only": "use --dry-run",
}
SHORT = {"a": "array", "o": "output", "e": "error", "N": "nodes", "n": "ntasks"}
# Lines between these two are in the script only if the job has several machines.
_SEVERAL = re.compile(r"^#if several machines\n(.*?)^#endif\n", re.MULTILINE | re.DOTALL)


def render(plan: LaunchPlan, slurm: Slurm, command: Sequence[str], restarts: int) -> str:
    """The sbatch script: job.sbatch with @NAME@ replaced by values of this run."""
    _refuse_unusable(plan.folder, slurm)
    # A job's name stands before its state in scontrol's output, so it must not look like another field.
    name = re.sub(r"[^\w./-]", "_", "/".join(plan.path.parts[-2:]))
    layout, log = plan.layout, str(plan.folder / "slurm.log").replace("%", "%%")  # %j would be the job's number
    cpus = max(sum(p.node == node for p in plan.processes) for node in plan.nodes)
    # One task per machine. B:USR1 signals the batch script before the time limit, so that the trainer can save.
    # open-mode=append keeps the log when the job is requeued.
    flags = {
        "job-name": name,
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
        "CHECKPOINTS": shlex.quote(str(plan.path / "checkpoints")),
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


def _refuse_unusable(folder: Path, slurm: Slurm) -> None:
    """ConfigError for a folder or an option that would break the job script."""
    # A line break would end the directive, and the rest of the name would be a line of the script.
    if found := re.search(r"[\\\x00-\x1f\x7f]", str(folder)):
        raise ConfigError(
            f"the run directory {str(folder.parent)!r} contains {found[0]!r}, which sbatch does not accept in the name "
            "of a log; change cluster.fileroot"
        )
    for option in slurm.sbatch:
        if re.search(r"[\r\n]", option):
            raise ConfigError(f"scheduler.slurm.sbatch contains {option!r}; an option must be one line")
        found = re.match(r"\s*(?:--([\w-]{3,})|-(\w))", option)
        given = (found[1] or SHORT.get(found[2])) if found else None
        # sbatch accepts abbreviations: --arr is --array.
        if given and (name := next((name for name in DECIDED if name.startswith(given)), "")):
            raise ConfigError(f"scheduler.slurm.sbatch contains {option!r}, but gspo sets --{name}: {DECIDED[name]}")


def run(plan: LaunchPlan, slurm: Slurm, command: Sequence[str], *, restarts: int, say: Say) -> int:
    """Submit the job and print its log until it ends; returns its exit code."""
    file, log = plan.folder / "job.sh", plan.folder / "slurm.log"
    text = render(plan, slurm, command, restarts)
    _refuse_second_job(plan.folder, file)
    try:
        file.write_text(text, encoding="utf-8")
        log.touch()
        position = log.stat().st_size
    except OSError as error:
        raise ConfigError(f"{plan.folder} cannot be written: {error.strerror}; set cluster.fileroot") from error
    # A signal while sbatch runs must not end this program before it knows the number of the job. SIGHUP (a closed
    # terminal) ends this program only.
    with received_signals(*program.STOP_SIGNALS) as received:
        job = _submit(file)
        with contextlib.suppress(OSError):
            (plan.folder / "job").write_text(job, encoding="utf-8")
        say(f"job {job} is submitted; its log is {log}. Ctrl-C: the job saves and ends; Ctrl-C twice: it is cancelled")
        return _follow(job, log, position, received, say)


def _refuse_second_job(folder: Path, file: Path) -> None:
    """ConfigError if the job of an earlier launch is still queued or running: both would use this run directory."""
    try:
        job = (folder / "job").read_text(encoding="utf-8").strip()
        shown = _slurm("scontrol", "show", "job", "-o", job) if job.isdecimal() else ""
        # The number may be that of another job, of another cluster.
        state = _state_of(shown, job)[0] if f" Command={file} " in shown else ENDED[0]
    except (OSError, GspoError):
        return  # no earlier job, or Slurm has forgotten it
    if state not in ENDED:
        raise ConfigError(
            f"job {job} of this run is {state}; wait for it or cancel it (scancel {job}). Its log is "
            f"{folder / 'slurm.log'}"
        )


def _submit(file: Path) -> str:
    """Submit the script; returns the job's number."""
    try:
        printed = _slurm("sbatch", "--parsable", str(file))
    except TimeoutError as error:
        raise GspoError(f"{error}. The job may have been submitted: look for it with `squeue --me`") from error
    # `number;cluster`, after the warnings of a site's plugins.
    job = (printed.strip().splitlines() or [""])[-1].split(";")[0].strip()
    if not job.isdecimal():
        raise GspoError(f"sbatch printed {job!r} instead of the job's number; look for the job with `squeue --me`")
    return job


def _follow(job: str, log: Path, position: int, received: list[int], say: Say) -> int:
    """Print the job's log until it ends; returns its exit code. Signals ask it to end."""
    before, reason, answered, handled = "", "", time.monotonic(), 0
    while True:
        if len(received) > 2:
            say(f"job {job} was not waited for; look for it with `squeue -j {job}`, cancel it with `scancel {job}`")
            return program.INTERRUPTED
        try:
            shown = _slurm("scontrol", "show", "job", "-o", job)
            (state, code), answered = _state_of(shown, job), time.monotonic()
            if len(received) > handled:
                _stop(job, "" if handled or len(received) > 1 else state, say)  # the second signal cancels the job
                handled = len(received)
        except (GspoError, TimeoutError) as error:
            position = _print_log(log, position)
            if "Invalid job id" in str(error):
                return _forgotten(job, log, say)
            # The controller may be restarting; the job does not need it.
            if time.monotonic() - answered > CONTROLLER_TIMEOUT_S:
                raise GspoError(f"{error}; job {job} may still run, its log is {log}") from error
            if len(received) > handled:
                say(f"{error}; trying again. Ctrl-C ends this program only")
            beat("a call of the Slurm controller")
            time.sleep(5)  # wait: 5 s, the launcher after CONTROLLER_TIMEOUT_S
            continue
        position = _print_log(log, position)
        # Seen twice: a job that is being requeued passes through such a state.
        if state in ENDED and state == before:
            # Slurm's code of a job that was cancelled, or asked to end before its script could handle that, varies.
            if handled and (state == "CANCELLED" or code in (signal.SIGTERM, 128 + signal.SIGTERM)):
                code = program.INTERRUPTED
            if code and state != "FAILED":
                say(f"job {job} ended as {state}; run the same command again to resume from the last checkpoint")
            return code
        if state == "PENDING" and (why := _field(shown, "Reason")) not in ("", "None", reason):
            reason = why
            say(f"job {job} is pending: {reason}")
        before = state
        beat("the state of the job")
        time.sleep(0.5)  # wait: 0.5 s, the user and Slurm


def _forgotten(job: str, log: Path, say: Say) -> int:
    """The exit code of a job that Slurm does not know any more: the script writes it before it ends."""
    try:
        number, code = log.with_name("job.ended").read_text(encoding="utf-8").split()
        if number == job:
            return int(code)
    except (OSError, ValueError):
        pass
    say(f"Slurm does not know job {job} any more, and it left no exit code; how it ended may be in {log}")
    return 1


def _stop(job: str, state: str, say: Say) -> None:
    # Only a running job can save; a pending one is cancelled.
    if state == "RUNNING":
        say(f"asking job {job} to save and end")
        _slurm("scancel", "--batch", "--signal=TERM", job)
    else:
        say(f"cancelling job {job}")
        _slurm("scancel", job)


def _state_of(shown: str, job: str) -> tuple[str, int]:
    """(state, exit code) of a job from scontrol's line. Slurm keeps it for some minutes, also without accounting."""
    found = re.fullmatch(r"(\d+):(\d+)", _field(shown, "ExitCode") or "0:0")
    state = _field(shown, "JobState")
    if found is None or not state:
        raise GspoError(f"scontrol printed no state of job {job}: {shown.strip()[:200]!r}")
    code, number = int(found[1]), int(found[2])
    failed = 128 + number if number else code
    return state, failed or (0 if state == "COMPLETED" else 130 if state == "CANCELLED" else 1)


def _field(shown: str, name: str) -> str:
    """A field of scontrol's line. The first one counts: the names of files come later and may look like fields."""
    found = re.search(rf"(?:^|\s){name}=(\S*)", shown)
    return found[1] if found else ""


def _print_log(log: Path, position: int) -> int:
    """Print the log from `position` on; returns the new position."""
    try:
        with open(log, "rb") as file:
            # A log that was deleted or truncated is printed from its new begin.
            file.seek(position if position <= log.stat().st_size else 0)
            write_output(file.read())
            return file.tell()
    except FileNotFoundError:
        return 0
    except OSError:  # a network disk that is away; the log is read again later
        return position


def _slurm(*command: str) -> str:
    try:
        # In a session of its own: Ctrl-C in a terminal must not interrupt a command half way.
        done = subprocess.run(  # wait: 60 s, the launcher
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=False,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise ConfigError(
            f"{command[0]} was not found on this machine; run this where Slurm jobs are submitted"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{command[0]} did not answer within 60 s; check that the Slurm controller runs") from error
    if done.returncode:
        raise GspoError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    program.run_main(lambda: main("slurm"))

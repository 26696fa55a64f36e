"""Run a plan as a Slurm job. `python3 -m gspo.launcher.slurm SCRIPT --config YAML [key=value …]`.

One readable sbatch script starts Ray over the allocation and, in it, the Ray launcher on the same command. It is
submitted, its log is followed here, and Ctrl-C asks the job to save and end. Who disconnects leaves the job running.
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
from gspo.launcher import main
from gspo.launcher.plan import Plan
from gspo.launcher.supervise import Say

# The job saves itself before its time is up and is queued again; the script ends when everything it started has.
SCRIPT = """\
#!/bin/bash
# {what}
# Written by gspo.launcher.slurm; to submit it by hand: sbatch {file}
{directives}

# Signals reach the run, and it saves: USR1 comes before the time limit, TERM from scancel and from Ctrl-C.
run=
trap 'late=1; [ -z "$run" ] || kill -USR1 $run' USR1
trap 'asked=1; [ -n "$run" ] || exit 130; kill -TERM $run' TERM INT

cd {cwd} || exit 2
unset RAY_ADDRESS # the allocation has a Ray of its own
{setup}{ray}{run} &
run=$!
while kill -0 $run 2>/dev/null; do wait $run; done # a signal ends `wait`, not the run
wait $run
code=$?
{end_ray}
# Saved in time, or killed from outside: the same job again, from its last checkpoint.
[ -z "${{asked:-}}" ] || exit $code
case "$code:${{late:-}}" in 130:1 | 0:1) scontrol requeue "$SLURM_JOB_ID" ;; esac # of a script, 0 may be no end
if [ "$code" -gt 130 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {restarts} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""
# Over several machines; on a single one the launcher starts a cluster of its own.
RAY = """\
export RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_ADDRESS
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')

address_of() {{ # the IPv4 address of a machine of this job
  getent ahostsv4 "$(scontrol show node -o "$1" | grep -o 'NodeAddr=[^ ]*' | cut -d= -f2)" | awk '{{print $1; exit}}'
}}
is_up() {{ (exec 3<>"/dev/tcp/${{RAY_ADDRESS%:*}}/${{RAY_ADDRESS#*:}}") 2>/dev/null; }}
ray_node() {{ # on every machine: the first one is the head of the cluster, the others join it
  trap 'exit 0' TERM # once Ray has ended: the step lasts as long as its daemons do, and KILL finds all of them
  if [ "$SLURM_PROCID" = 0 ]; then
    role=(--head "--port=${{RAY_ADDRESS#*:}}" --include-dashboard=false "--temp-dir=/tmp/gspo_ray_$SLURM_JOB_ID")
    unset RAY_ADDRESS
  else
    until is_up; do sleep 0.2; done
    role=("--address=$RAY_ADDRESS")
  fi
  own=$(address_of "$SLURMD_NODENAME")
  for _ in 1 2 3; do # Ray gives up after 30 s on a machine that is busy
    {python} -m ray.scripts.scripts start --block "${{role[@]}}" --node-ip-address="$own" --num-cpus={cpus} \\
      --num-gpus={gpus} --object-store-memory={store} --min-worker-port=0 --max-worker-port=0 \\
      --dashboard-agent-listen-port=0 --disable-usage-stats >"$LOGS/ray_$SLURM_PROCID.log" 2>&1
  done
}}
export -f address_of is_up ray_node
export LOGS={logs}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
RAY_ADDRESS=$(address_of "$first"):$((20000 + SLURM_JOB_ID % 20000))
srun --mpi=none --ntasks-per-node=1 --kill-on-bad-exit=0 bash -c ray_node &
cluster=$!
for _ in $(seq 240); do is_up && break; sleep 0.5; done

"""
END_RAY = """\
scancel --signal=TERM "$SLURM_JOB_ID.0" 2>/dev/null # Ray is the first step of this job
sleep 2
scancel --signal=KILL "$SLURM_JOB_ID.0" 2>/dev/null # its daemons take half a minute to go by themselves
wait $cluster 2>/dev/null
srun --mpi=none --ntasks-per-node=1 rm -rf "/tmp/gspo_ray_$SLURM_JOB_ID"
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")
ENDED += ("REVOKED", "PREEMPTED")
STORE_BYTES = 100 * 2**20
SILENCE_S = 600.0  # how long Slurm's controller may not answer


def render(plan: Plan, slurm: Slurm, command: Sequence[str], restarts: int) -> str:
    """The sbatch script."""
    layout, log = plan.layout, plan.folder / "slurm.log"
    cpus = slurm.cpus_per_node or max(sum(p.node == node for p in plan.processes) for node in plan.nodes)
    asked = {
        "job-name": "/".join(plan.path.parts[-2:]),
        "nodes": layout.num_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "gpus-per-node": layout.gpus_per_node or None,
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "output": log,
        "open-mode": "append",
        "signal": f"B:USR1@{slurm.save_before}",
    }
    given = [f"--{name}={value}" for name, value in asked.items() if value is not None] + ["--requeue", *slurm.sbatch]
    inner = [sys.executable, "-m", "gspo.launcher", "--on", "ray", "--config", str(plan.config_file), "--", *command]
    node = {"python": shlex.quote(sys.executable), "cpus": cpus, "gpus": layout.gpus_per_node, "store": STORE_BYTES}
    several = layout.num_nodes > 1
    return SCRIPT.format(
        what=f"{plan.path}: {layout}",
        file=plan.folder / "job.sh",
        directives="\n".join(f"#SBATCH {option}" for option in given),
        cwd=shlex.quote(str(Path.cwd())),
        setup="".join(f"{line}\n" for line in slurm.setup),
        ray=RAY.format(logs=shlex.quote(str(plan.folder)), **node) if several else "",
        run=shlex.join(inner),
        end_ray=END_RAY if several else "",
        restarts=restarts,
    )


def run(plan: Plan, slurm: Slurm, command: Sequence[str], *, restarts: int, say: Say) -> int:
    """Submit, follow the log, and give the job's exit code."""
    file, log = plan.folder / "job.sh", plan.folder / "slurm.log"
    file.write_text(render(plan, slurm, command, restarts), encoding="utf-8")
    log.touch()
    place = log.stat().st_size
    job = _slurm("sbatch", "--parsable", str(file)).split(";")[0].strip()
    say(f"job {job} is submitted; its log is {log}. Ctrl-C: it saves and ends; twice: it is cancelled")
    interrupts, before, heard = 0, "", time.monotonic()
    while True:
        try:
            try:
                (state, code), heard = _state(job), time.monotonic()
            except GspoError:  # the controller may be restarting, and the job does not need it
                if time.monotonic() - heard > SILENCE_S:
                    raise
                time.sleep(5)
                continue
            place = _show(log, place)
            if state in ENDED and state == before:  # twice: a job that is being queued again passes through one
                if code and state != "FAILED":
                    say(f"job {job} ended as {state}; the same command goes on from the last checkpoint")
                return code
            before = state
            time.sleep(0.5)
        except KeyboardInterrupt:
            interrupts += 1
            _stop(job, state="" if interrupts > 1 else _state(job)[0], say=say)


def _stop(job: str, state: str, say: Say) -> None:
    if state == "RUNNING":
        say(f"asking job {job} to save and end")
        _slurm("scancel", "--batch", "--signal=TERM", job)
    else:
        say(f"cancelling job {job}")
        _slurm("scancel", job)


def _state(job: str) -> tuple[str, int]:
    """(state, exit code); what a job without accounting still tells for some minutes after its end."""
    shown = _slurm("scontrol", "show", "job", "-o", job)
    fields = dict(re.findall(r"(\w+)=(\S*)", shown))
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    state = fields.get("JobState", "")
    failed = 128 + int(number) if int(number) else int(code)
    return state, failed or (0 if state == "COMPLETED" else 130 if state == "CANCELLED" else 1)


def _show(log: Path, place: int) -> int:
    """Print what the log has beyond `place`."""
    with open(log, "rb") as file:
        file.seek(place)
        sys.stdout.buffer.write(file.read())
        sys.stdout.buffer.flush()
        return file.tell()


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise ConfigError(f"{command[0]} is not on this machine; run this where Slurm jobs are submitted") from error
    except subprocess.TimeoutExpired as error:
        raise GspoError(f"{command[0]} has not answered in 60 s: is the Slurm controller up?") from error
    if done.returncode:
        raise GspoError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main("slurm"))

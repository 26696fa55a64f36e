"""Run a plan on Ray. `python3 -m gspo.launcher.ray SCRIPT --config YAML [key=value …]`.

Joins the cluster at RAY_ADDRESS, or starts one on this machine for as long as the run lasts. Ray reserves the machines
(one bundle each), places a thin actor per process there, and says when one is lost; the actor runs the same process as
the local launcher would. No training data passes through Ray.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, GspoError
from gspo.launcher import main
from gspo.launcher.plan import ADDRESS, MEETING, Plan, Process
from gspo.launcher.ray_actor import Runner
from gspo.launcher.supervise import LOST, Say, Start, environment, supervise

# Variables of the launcher's environment that its processes get on other machines, too.
PASSED_ON = ("GSPO_", "HF_", "NCCL_", "TORCH_", "OMP_", "PYTHON", "TOKENIZERS_", "WANDB_")
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_DOCKER_CPU_WARNING": "1", "RAY_DEDUP_LOGS": "0"}
QUIET |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_enable_metrics_collection": "0"}
QUIET |= {"RAY_worker_niceness": "0"}  # Ray's own is 15: a trainer that yields to everything else on its machine
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0" binds Ray to 127.0.0.1, as it always does on those two
STORE_BYTES = 100 * 2**20  # nothing of ours is in it; Ray refuses less than 75 MiB
SILENCE_S = 60.0  # an actor answers every POLL_S; one that does not is gone, or stopped
POLL_S = 5.0


def run(plan: Plan, *, restarts: int, start_timeout: float, say: Say) -> int:
    """The trainer's exit code."""
    ray = _connect(plan, start_timeout)
    try:
        group, bundles = _reserve(ray, plan, start_timeout)
        passed_on = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
        shared = {"GSPO_SAMPLER_TOKEN": secrets.token_hex(32)} if plan.samplers else {}

        def prepare() -> Start:
            meeting: list[str] = []  # the first machine of a group says where the others find it

            def start(process: Process) -> Remote:
                env = environment(process, passed_on, shared)
                log = None if process.role == "trainer" else plan.folder / f"{process.name}.log"
                where = {"placement_group": group, "placement_group_bundle_index": bundles[process.node]}
                return Remote(ray, process, env, log, where, meeting, max(start_timeout, SILENCE_S))

            return start

        return supervise(plan, prepare, restarts=restarts, resumes=restarts, say=say)
    finally:
        ray.shutdown()


def _connect(plan: Plan, timeout: float) -> Any:
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        os.environ[LOOPBACK] = "0"
        if "RAY_AUTH_MODE" not in os.environ:  # our own cluster serves nobody else
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed: pip install 'gspo[ray]', or set scheduler.type: local") from error
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "address": address or "local"}
    if address is None:
        cores = max(os.cpu_count() or 1, len(plan.processes))
        how |= {"num_cpus": cores, "num_gpus": plan.layout.gpus_per_node}
        how |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    until = time.monotonic() + timeout
    if address is not None:
        _await_answer(address, until, timeout)
    while True:  # a cluster that is only starting answers later; a busy machine may miss Ray's own deadlines
        try:
            ray.init(**how)
            return ray
        except Exception as error:  # Ray raises anything, a bare Exception among them
            ray.shutdown()
            _end_children()  # what a cluster that did not come up leaves behind
            if time.monotonic() > until:
                where = f"the Ray cluster at {address} (RAY_ADDRESS)" if address else "a Ray cluster on this machine"
                why = str(error).strip().splitlines()[0]
                raise GspoError(
                    f"{where} cannot be reached: {why}; waited {timeout:g} s (scheduler.start_timeout)"
                ) from error


def _await_answer(address: str, until: float, timeout: float) -> None:
    """Somebody listens at HOST:PORT; Ray itself would try for minutes. Other forms of address are left to it."""
    host, _, port = address.rpartition(":")
    while host and "/" not in host and port.isdigit():
        try:
            with socket.create_connection((host, int(port)), timeout=5.0):
                return
        except OSError as error:
            if time.monotonic() > until:
                raise GspoError(
                    f"the Ray cluster at {address} (RAY_ADDRESS) cannot be reached: {error}; waited {timeout:g} s "
                    "(scheduler.start_timeout)"
                ) from error
            time.sleep(0.5)


def _end_children() -> None:
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _reserve(ray: Any, plan: Plan, timeout: float) -> tuple[Any, dict[int, int]]:
    """A bundle of CPUs and GPUs per machine of the plan, each on a machine of its own."""
    from ray.util.placement_group import placement_group

    need = {node: [p for p in plan.processes if p.node == node] for node in plan.nodes}
    bundles: list[dict[str, float]] = [
        {"CPU": len(there), **({"GPU": gpus} if (gpus := sum(len(p.gpus) for p in there)) else {})}
        for there in need.values()
    ]
    group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK")
    if not group.wait(timeout_seconds=timeout):
        offered = [{k: v for k, v in n["Resources"].items() if k in ("CPU", "GPU")} for n in ray.nodes() if n["Alive"]]
        raise GspoError(
            f"Ray found no room for the plan in {timeout:g} s: asked for {bundles} on separate machines, the cluster "
            f"has {offered}; set cluster.n_nodes and the backends smaller, or scheduler.start_timeout higher"
        )
    return group, {node: index for index, node in enumerate(need)}


class Remote:
    """The driver's end of a process: an actor on the process's machine runs it."""

    def __init__(
        self,
        ray: Any,
        process: Process,
        env: dict[str, str],
        log: Path | None,
        where: dict[str, Any],
        meeting: list[str],
        start_timeout: float,
    ) -> None:
        self._ray = ray
        options = {"num_cpus": 1, "num_gpus": len(process.gpus), "max_restarts": 0, "max_concurrency": 4, **where}
        self._actor = ray.remote(Runner).options(**options).remote(process)
        self._code: int | None = None
        try:
            # Ray starts a process of its own first, which takes its time on a busy machine.
            address, port = ray.get(self._actor.place.remote(), timeout=start_timeout)
            if not meeting:
                meeting.append(f"{address}:{port}")
            filled = {ADDRESS: address, MEETING: meeting[0]}
            argv = [filled.get(word, word) for word in process.argv]
            ray.get(self._actor.start.remote(argv, env, os.getcwd(), log), timeout=SILENCE_S)
            self._answer = self._ask()
        except ray.exceptions.RayError as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"gspo: Ray has not started {process.name}: {why}", file=sys.stderr, flush=True)
            self._code = LOST

    def _ask(self) -> Any:
        self._asked = time.monotonic()
        return self._actor.poll.remote(POLL_S)

    def poll(self) -> int | None:
        while self._code is None:
            ready, _ = self._ray.wait([self._answer], timeout=0)
            if not ready:
                if time.monotonic() - self._asked > SILENCE_S + POLL_S:
                    self._code = LOST
                break
            try:
                said, self._code = self._ray.get(self._answer)
            except self._ray.exceptions.RayError:
                self._code = LOST
                break
            sys.stdout.buffer.write(said)
            sys.stdout.buffer.flush()
            if self._code is None:
                self._answer = self._ask()
        return self._code

    def signal(self, number: int) -> None:
        self._actor.signal.remote(number)

    def end(self, patience_s: float) -> None:
        try:
            if self._code is None:
                self._ray.get(self._actor.end.remote(patience_s), timeout=patience_s + POLL_S)
        except self._ray.exceptions.RayError:
            pass  # it is gone, and its process with it
        self._ray.kill(self._actor)


if __name__ == "__main__":
    sys.exit(main("ray"))

"""Run a plan on Ray. `python3 -m gspo.launcher.ray SCRIPT --config YAML [key=value …]`.

Joins the cluster at RAY_ADDRESS, or starts a cluster on this machine and stops it after the run. Ray reserves the
machines (one bundle each), places one actor per process, and reports lost actors. An actor runs the same command as the
local launcher would. No training data passes through Ray.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, GspoError
from gspo.launcher.plan import ADDRESS, RENDEZVOUS, LaunchPlan, Process
from gspo.launcher.ray_actor import ProcessActor, is_worker, kill_if_stopped
from gspo.launcher.start import main
from gspo.launcher.supervise import LOST_CODE, Say, Start, environment, received_signals, supervise, write_output
from gspo.system import program
from gspo.system.heartbeat import AwakeClock, beat
from gspo.system.imports import install_command
from gspo.system.launched import Launched
from gspo.system.process import kill, own_children

# Prefixes of environment variables that are copied to the processes on other machines.
PASSED_ON = ("GSPO_", "HF_", "NCCL_", "TORCH_", "OMP_", "PYTHON", "TOKENIZERS_", "WANDB_")
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_DOCKER_CPU_WARNING": "1", "RAY_DEDUP_LOGS": "0"}
QUIET |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_enable_metrics_collection": "0"}
QUIET |= {"RAY_worker_niceness": "0"}  # Ray's default of 15 would give every other process of the machine priority
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0" binds Ray to 127.0.0.1, its default on Windows and macOS
STORE_BYTES = 100 * 2**20  # of Ray's object store, which is not used; Ray's minimum is 75 MiB
POLL_S = 5.0  # an actor answers a poll at least this often
START_TIMEOUT_S = 300.0  # the run fails if the cluster does not answer or has no room for this long
KILL_S = 30.0  # for a task that kills a stopped actor: Ray may have to start a worker for it first
ACTOR_TIMEOUT_S = 60.0  # an actor that does not answer for longer is treated as lost


def run(plan: LaunchPlan, *, restarts: int, say: Say, start_timeout: float = START_TIMEOUT_S) -> int:
    """Run a plan to its end; returns the trainer's exit code."""
    ray = _connect(plan, start_timeout)
    try:
        group, bundles = _reserve(ray, plan, start_timeout)
        passed_on = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON)}
        # A secret of this run: sampler servers accept only requests that carry it.
        shared = Launched(token=secrets.token_hex(32)).write() if plan.samplers else {}

        def prepare() -> Start:
            if not any(node["Alive"] for node in ray.nodes()):
                raise GspoError("all machines of the Ray cluster are lost; run the same command again to resume")
            rendezvous: list[str] = []  # filled by the first process: the address where the ranks meet

            def start(process: Process) -> RayProcess:
                env = environment(process, passed_on, shared)
                log = None if process.role == "trainer" else plan.folder / f"{process.name}.log"
                where = {"placement_group": group, "placement_group_bundle_index": bundles[process.node]}
                return RayProcess(ray, process, env, log, where, rendezvous, max(start_timeout, ACTOR_TIMEOUT_S))

            return start

        return supervise(plan, prepare, restarts=restarts, resumes=restarts, say=say)
    finally:
        ray.shutdown()


def _connect(plan: LaunchPlan, timeout: float) -> Any:
    # Ray reads these variables when it is imported, so they are set first. Values of the user have priority.
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    address = os.environ.get("RAY_ADDRESS")
    if address in ("", "local"):  # Ray would start a cluster for these, too, but not on loopback and without a token
        address = None
    if address is None:
        os.environ[LOOPBACK] = "0"
        if "RAY_AUTH_MODE" not in os.environ:  # only this run may use its cluster
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"Ray is not installed: {install_command('ray')}, or set scheduler.type: local") from error
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "address": address or "local"}
    if address is None:
        # Every process reserves one CPU, so a small machine must offer at least as many as there are processes.
        cores = max(os.cpu_count() or 1, len(plan.processes))
        options |= {"num_cpus": cores, "num_gpus": plan.layout.gpus_per_node}
        options |= {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    until = time.monotonic() + timeout
    others = set(own_children())
    if address is not None:
        _wait_for_port(address, until, timeout)
    while True:  # the cluster may still be starting, and a busy machine may miss Ray's own timeouts
        try:
            beat("connecting to Ray")
            # Ray may crash at exit after an interrupted start of its daemons, so a signal waits for the end of it.
            with received_signals(*program.STOP_SIGNALS) if address is None else nullcontext([]) as received:
                ray.init(**options)
            if received:
                raise KeyboardInterrupt
            return ray
        except KeyboardInterrupt:
            ray.shutdown()
            raise
        except Exception as error:  # Ray raises many types, a bare Exception among them
            ray.shutdown()
            for pid in set(own_children()) - others:  # daemons of a cluster that has not come up
                kill(pid)
            if time.monotonic() > until:
                where = f"the Ray cluster at {address} (RAY_ADDRESS)" if address else "a Ray cluster on this machine"
                why = str(error).strip().splitlines()[0]
                raise GspoError(f"{where} cannot be reached: {why}; waited {timeout:g} s") from error


def _wait_for_port(address: str, until: float, timeout: float) -> None:
    """Wait until HOST:PORT accepts connections; Ray itself would retry for minutes. Other address forms pass."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of an IPv6 address
    while host and "/" not in host and port.isdecimal():
        try:
            # wait: 5 s per try, the launcher after START_TIMEOUT_S
            with socket.create_connection((host, int(port)), timeout=5.0):
                return
        except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
            if time.monotonic() > until:
                raise GspoError(
                    f"the Ray cluster at {address} (RAY_ADDRESS) cannot be reached: {error}; waited {timeout:g} s"
                ) from error
            beat("connecting to Ray")
            time.sleep(0.5)  # wait: 0.5 s, the launcher after START_TIMEOUT_S


def _reserve(ray: Any, plan: LaunchPlan, timeout: float) -> tuple[Any, dict[int, int]]:
    """Reserve one bundle of CPUs and GPUs per machine of the plan; returns the group and bundle index by node."""
    from ray.util.placement_group import placement_group

    need = {node: [p for p in plan.processes if p.node == node] for node in plan.nodes}
    bundles: list[dict[str, float]] = [
        {"CPU": len(there), **({"GPU": gpus} if (gpus := sum(len(p.gpus) for p in there)) else {})}
        for there in need.values()
    ]
    # STRICT_SPREAD: every bundle on a machine of its own, as the plan assumes.
    group = placement_group(bundles, strategy="STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK")
    beat("reserving machines on Ray")
    if not group.wait(timeout_seconds=timeout):  # wait: 300 s (START_TIMEOUT_S), the launcher
        offered = [{k: v for k, v in n["Resources"].items() if k in ("CPU", "GPU")} for n in ray.nodes() if n["Alive"]]
        # Written by a Slurm job: a machine that is missing may have failed to start Ray.
        logs = (
            ". Ray's daemons wrote to " + str(plan.folder / "ray_*.log") if any(plan.folder.glob("ray_*.log")) else ""
        )
        raise GspoError(
            f"Ray could not reserve the machines in {timeout:g} s: the plan needs {bundles} on separate machines, the "
            f"cluster has {offered}; lower cluster.n_nodes or the backends, or start again when it has room{logs}"
        )
    return group, {node: index for index, node in enumerate(need)}


class RayProcess:
    """The launcher's handle of a process that an actor runs on another machine.

    No method waits for Ray to place the actor, so that `supervise` can handle signals and other processes meanwhile.
    """

    def __init__(
        self,
        ray: Any,
        process: Process,
        env: dict[str, str],
        log: Path | None,
        where: dict[str, Any],
        rendezvous: list[str],
        start_timeout: float,
    ) -> None:
        self._ray, self._process, self._env, self._log, self._where = ray, process, env, log, where
        self._rendezvous, self._start_timeout = rendezvous, start_timeout
        # max_restarts 0: `supervise` decides about restarts. max_concurrency 4: `poll` blocks one thread of the actor,
        # and `signal` and `end` must run meanwhile.
        options = {"num_cpus": 1, "num_gpus": len(process.gpus), "max_restarts": 0, "max_concurrency": 4, **where}
        self._actor = ray.remote(ProcessActor).options(**options).remote(process)
        self._code: int | None = None
        self._pid: int | None = None  # of the actor
        self._host = ""  # the name of its machine
        self._is_started = False
        # If the launcher itself is stopped (SIGSTOP, a suspended job), that time does not count.
        self._clock = AwakeClock()
        self._await(self._actor.place.remote(), start_timeout)

    def _await(self, reply: Any, timeout: float) -> None:
        self._reply, self._until, self._timeout = reply, self._clock.seconds() + timeout, timeout

    def poll(self) -> int | None:
        while self._code is None:
            # `timeout=0`: the supervising loop must not block on one process.
            ready, _ = self._ray.wait([self._reply], timeout=0)  # wait: 0 s, the launcher
            now = self._clock.seconds()
            if not ready:
                if now > self._until:
                    self._lose(f"no answer for {self._timeout:g} s")
                    self._kill_stopped()
                break
            try:
                # wait: 60 s for the transfer, the launcher
                answer = self._ray.get(self._reply, timeout=ACTOR_TIMEOUT_S)
            except self._ray.exceptions.RayError as error:
                self._lose((str(error).strip() or type(error).__name__).splitlines()[0])
                break
            if self._is_started:
                self._take(*answer)
            elif not self._start(*answer):
                break
        return self._code

    def _start(self, address: str, port: int, pid: int, host: str) -> bool:
        """Ray has placed the actor: start the process. False if the first process of the unit is not placed yet."""
        self._pid, self._host = pid, host
        # The ranks on all machines meet at the address of the first process of the unit.
        if not self._rendezvous and self._process.index == 0:
            self._rendezvous.append(f"{address}:{port}")
        if not self._rendezvous and RENDEZVOUS in self._process.argv:
            return False
        # The plan holds placeholders for addresses that are known only after Ray has placed the actors.
        filled = {ADDRESS: address, RENDEZVOUS: "".join(self._rendezvous)}
        argv = [filled.get(word, word) for word in self._process.argv]
        self._is_started = True
        self._await(self._actor.start.remote(argv, self._env, os.getcwd(), self._log), ACTOR_TIMEOUT_S)
        return True

    def _take(self, output: bytes, code: int | None) -> None:
        write_output(output)
        self._code = code
        if code is None:
            # One request is always open at the actor, which replies after POLL_S at the latest.
            self._await(self._actor.poll.remote(POLL_S), ACTOR_TIMEOUT_S + POLL_S)

    def _lose(self, why: str) -> None:
        """Treat the process as killed; `supervise` may restart it."""
        what = "lost" if self._is_started else "could not start"
        print(f"gspo: Ray {what} {self._process.name}: {why}", file=sys.stderr, flush=True)
        self._code = LOST_CODE
        # A worker of Ray may outlive the daemon of its machine. On this machine it can be killed directly.
        if self._host == socket.gethostname() and self._pid is not None and is_worker(self._pid):
            kill(self._pid)

    def _kill_stopped(self) -> None:
        """Kill the actor, and with it its process, if it is stopped (SIGSTOP): it cannot obey `ray.kill` then."""
        if self._pid is None:
            return
        # A task on the same machine, for which Ray uses another worker.
        task = self._ray.remote(kill_if_stopped).options(num_cpus=0, max_retries=0, **self._where)
        reply = task.remote(self._pid)
        ready, _ = self._ray.wait([reply], timeout=KILL_S)  # wait: 30 s, the launcher
        if not ready:  # the machine is gone
            self._ray.cancel(reply)

    def signal(self, number: int) -> None:
        if self._is_started:
            self._actor.signal.remote(number)
        elif self._code is None:
            self._code = program.INTERRUPTED  # before its start there is nothing to save

    def end(self, timeout_s: float) -> None:
        try:
            if self._code is None and self._is_started:
                self._ray.get(self._actor.end.remote(timeout_s), timeout=timeout_s + POLL_S)  # wait: 15 s, the launcher
        except self._ray.exceptions.RayError:
            pass  # the actor is gone, and the kernel has killed its process
        self._ray.kill(self._actor)


if __name__ == "__main__":
    program.run_main(lambda: main("ray"))

"""Processes of a plan on a Ray cluster: placed, watched and restarted.

Joins the cluster at RAY_ADDRESS, or starts a cluster on this machine and stops it after the run. Ray reserves the
machines (one bundle each), places one actor per process, and reports lost actors. An actor runs the same command as the
local launcher would. No training data passes through Ray.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, GspoError
from gspo.launcher.local import StopLimit
from gspo.launcher.plan import ADDRESS, RENDEZVOUS, LaunchPlan, Process
from gspo.launcher.start import main
from gspo.launcher.supervise import (
    LOST_CODE,
    Say,
    Start,
    environment,
    received_signals,
    remove_published,
    supervise,
    write_output,
)
from gspo.system import (
    KILLED_S,
    AwakeClock,
    Launched,
    beat,
    dying_with_parent,
    install_command,
    is_stopped,
    kill,
    own_children,
    program,
    shell_code,
    stop_group,
    wait_and_kill_group,
)

# Seconds to read the rest of the output after the process has ended: a daemon that it started may keep the pipe open.
LAST_OUTPUT_S = 2.0
REPLY_BYTES = 2**16  # of output in one reply; Ray puts replies of more than 100 KB into its object store
KEPT_BYTES = 2**24  # of output that the launcher has not read yet
START_S = 50.0  # for the start of the process; the launcher waits 60 s for this actor


def is_worker(pid: int) -> bool:
    """Whether a process of this machine is a worker of Ray that runs an actor."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::ProcessActor")
    except OSError:
        return False


def kill_if_stopped(pid: int) -> None:
    """Run by another worker of Ray on the machine of an actor that does not answer; the kernel kills its process."""
    if is_stopped(pid):
        kill(pid)


class ProcessActor:
    """One process; `poll` waits for its output or its end."""

    def __init__(self, process: Process) -> None:
        self._plan, self._limit = process, StopLimit(process)
        self._process: subprocess.Popen[bytes] | None = None
        self._changed = threading.Condition()  # wait: none, held for appending bytes; waits release it
        self._output = bytearray()
        self._code: int | None = None

    def place(self) -> tuple[str, int, int, str]:
        """IP address of this machine, a port that is free now, the pid of this actor, and the machine's name."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1], os.getpid(), socket.gethostname()

    def start(self, argv: list[str], env: Mapping[str, str], cwd: str, log: Path | None) -> tuple[bytes, int | None]:
        """Start the process. Returns as `poll` does, whose first reply has the output and a failure to start."""
        started = threading.Event()
        # For the kernel the parent is this thread, so it must live as long as the process does.
        threading.Thread(target=self._run, args=(argv, env, cwd, log, started), daemon=True).start()
        started.wait(START_S)  # wait: 50 s, the actor
        return b"", None

    def _run(
        self, argv: list[str], env: Mapping[str, str], cwd: str, log: Path | None, started: threading.Event
    ) -> None:
        # Ray sets OMP_NUM_THREADS to the CPUs of its worker; the run's config decides about threads.
        own = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "RAY_AUTH_TOKEN")}
        try:
            out: Any = subprocess.PIPE if log is None else open(log, "ab")  # noqa: SIM115
            process = subprocess.Popen(
                dying_with_parent(argv), env={**own, **env}, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            if log is not None:
                out.close()  # the process has its own copy
        except OSError as error:
            with self._changed:
                self._output += f"gspo: cannot start this process on {socket.gethostname()}: {error}\n".encode()
                self._code = 2
            started.set()
            return
        self._process = process
        started.set()
        # In a thread: a child of the process may keep stdout open, and the end of the process must be seen anyway.
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        wait_and_kill_group(process)
        reader.join(LAST_OUTPUT_S)  # wait: LAST_OUTPUT_S, the actor
        remove_published(self._plan)  # this machine may be another than the launcher's
        # wait: KILLED_S, the actor
        code = process.wait(KILLED_S)  # it has ended; this reads its exit code
        with self._changed:
            self._code = shell_code(code)
            self._changed.notify_all()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdout is None:
            return
        with process.stdout as pipe:
            while chunk := os.read(pipe.fileno(), 65536):  # wait: none, end of file; a daemon thread
                with self._changed:
                    self._output += chunk
                    if len(self._output) > KEPT_BYTES:  # the launcher is stopped, or slower than the process
                        self._output[: -KEPT_BYTES // 2] = b"\ngspo: output was dropped here\n"
                    self._changed.notify_all()

    def poll(self, timeout_s: float) -> tuple[bytes, int | None]:
        """Output since the last call and the exit code; waits up to `timeout_s` for either."""
        with self._changed:
            if self._process is not None and self._code is None and (message := self._limit.enforce(self._process)):
                self._output += f"{message}\n".encode()
            if not self._output and self._code is None:
                self._changed.wait(timeout_s)  # wait: 5 s, the launcher
            output = bytes(self._output[:REPLY_BYTES])
            del self._output[:REPLY_BYTES]
            # The exit code is the last thing that the launcher reads.
            return output, None if self._output else self._code

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, timeout_s: float) -> None:
        if self._process is not None:
            stop_group(self._process, timeout_s)


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
        self._rendezvous = rendezvous
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

"""A real Slurm of two nodes on this one host, from Debian's packages, without systemd: for the tests of the launcher.

    python tests/slurm/cluster.py FOLDER    starts it, prints `export SLURM_CONF=…`, runs until Ctrl-C or end of stdin

Everything (key, sockets, spool, logs) is in FOLDER, ports are free ones, and daemons are ended by their process ids.
"""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")

CONF = """\
ClusterName=gspo
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=10
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 RealMemory=8000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def unavailable() -> str | None:
    """Why there can be no Slurm here; None where there can."""
    absent = [name for name in DAEMONS if _find(name) is None]
    if absent:
        return f"Slurm is not installed ({', '.join(absent)}): apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "slurmctld for many users wants root"


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@contextlib.contextmanager
def running(folder: Path) -> Iterator[dict[str, str]]:
    """The variables that make Slurm's commands talk to the new cluster."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    daemons: list[subprocess.Popen[bytes]] = []
    host = socket.gethostname().split(".")[0]
    controller, first, second = _free_ports(3)
    conf = folder / "slurm.conf"
    (folder / "state").mkdir(exist_ok=True)
    conf.write_text(CONF.format(host=host, folder=folder, controller=controller, first=first, second=second))
    env = {"SLURM_CONF": str(conf)}
    try:
        daemons.append(_munge(folder))
        _until(lambda: (folder / "munge" / "munge.socket").exists(), "munged")
        for command in (["slurmctld", "-c", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            daemons.append(_start([str(_find(command[0])), *command[1:]], folder, env))
        _until(lambda: _idle_nodes(env) == 2, "two idle nodes", folder)
        try:
            yield env
        finally:
            _cancel_all(env)
    finally:
        for process in reversed(daemons):
            _end(process)


def _cancel_all(env: dict[str, str]) -> None:
    """Jobs outlive the daemons: end them before those."""
    env = {**os.environ, **env}
    subprocess.run(["scancel", "--user=root"], env=env, check=False, capture_output=True)
    with contextlib.suppress(TimeoutError):
        _until(
            lambda: not subprocess.run(["squeue", "-h"], env=env, capture_output=True).stdout.strip(), "an empty queue"
        )


def _munge(folder: Path) -> subprocess.Popen[bytes]:
    place = folder / "munge"
    place.mkdir(exist_ok=True)
    key = place / "munge.key"
    key.write_bytes(os.urandom(1024))
    user = pwd.getpwnam("munge")
    for path in (place, key):
        os.chown(path, user.pw_uid, user.pw_gid)
    place.chmod(0o755)
    key.chmod(0o400)
    names = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "seed-file": "seed",
        "pid-file": "pid",
        "log-file": "log",
    }
    options = [f"--{option}={place / name}" for option, name in names.items()]
    # Test folders lie below /tmp, which is writable for all and sticky: --force takes the warning about that.
    return _start([str(_find("munged")), "--foreground", "--force", *options], folder, {}, user.pw_uid, user.pw_gid)


def _start(
    command: list[str], folder: Path, env: dict[str, str], uid: int | None = None, gid: int | None = None
) -> subprocess.Popen[bytes]:
    with open(folder / "daemons.log", "ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **env}, user=uid, group=gid,
            start_new_session=True,
        )  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _idle_nodes(env: dict[str, str]) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )
    return done.stdout.split().count("idle")


def _until(done, what: str, folder: Path | None = None, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            logs = "" if folder is None else "".join(f"\n{f}:\n{f.read_text()[-2000:]}" for f in folder.glob("*.log"))
            raise TimeoutError(f"{what}: not there after {seconds:g} s{logs}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for sock in held:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in held]
    for sock in held:
        sock.close()
    return ports


if __name__ == "__main__":
    if why := unavailable():
        sys.exit(why)
    with running(Path(sys.argv[1]).absolute()) as variables:
        print("\n".join(f"export {name}={value}" for name, value in variables.items()), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.read()

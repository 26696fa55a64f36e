"""What a program in the sandbox tries, and what it sees. Each probe reports by itself that it ran and was stopped."""

# ruff: noqa: E501 — programs are quoted as they are

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from processes import until

import gspo
from gspo.rewards.sandbox import box as sandbox
from gspo.rewards.sandbox.box import Ended, Limits, run_program
from gspo.rewards.sandbox.command import NICE
from gspo.rewards.sandbox.seccomp import DENIED

WHY_NOT = sandbox.unavailable()
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.run]
REPO = Path(__file__).parents[2]
PRELUDE = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    result = getattr(libc, name)(*args)
    if result == -1:
        raise OSError(ctypes.get_errno(), name)
    return result
def attempt(action):
    try:
        seen = action()
    except BaseException as error:
        print("BLOCKED", type(error).__name__, getattr(error, "errno", None), flush=True)
    else:
        print("GOT", repr(seen)[:200], flush=True)
"""
# name: (expression, whether the same expression succeeds outside, as a control that the probe can succeed at all)
PROBES = {
    "connect to a port of this machine": ("socket.create_connection(('127.0.0.1', {port}), timeout=2)", True),
    "connect to the internet": ("socket.create_connection(('1.1.1.1', 80), timeout=2)", False),
    "look a name up": ("socket.getaddrinfo('example.com', 80)", False),
    "send a datagram": ("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))", True),
    "abstract unix socket": ("socket.socket(socket.AF_UNIX).connect('\\0{abstract}')", True),
    "unix socket by path": ("socket.socket(socket.AF_UNIX).connect('{folder}/socket')", True),
    "raw socket": ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", False),
    "read /etc/passwd": ("open('/etc/passwd').read()", True),
    "read /etc/shadow": ("open('/etc/shadow').read()", False),
    "list the home directory": ("os.listdir('{home}')", True),
    "read the repository": ("open('{repo}/pyproject.toml').read()", True),
    "list the venv": ("os.listdir('{prefix}')", True),
    "import an installed package": ("__import__('gspo')", True),
    "read the run directory": ("open('{folder}/canary').read()", True),
    "read it by a path with dots": ("open('/tmp/../../..{folder}/canary').read()", True),
    "read it by a system call": ("call('open', b'{folder}/canary', 0)", True),
    "watch it with inotify": ("call('inotify_add_watch', call('inotify_init'), b'{folder}', 0xfff)", True),
    "write into the run directory": ("open('{folder}/written', 'w').write('x')", True),
    "read the parent's environment": ("open('/proc/{pid}/environ').read()", True),
    "read its own /proc": ("open('/proc/self/environ').read()", True),
    "list /sys": ("os.listdir('/sys')", True),
    "an environment variable": ("os.environ['GSPO_TEST_SECRET']", True),
    "signal the parent": ("os.kill({pid}, 0)", True),
    "a shell": ("__import__('subprocess').run(['/bin/sh', '-c', 'true'], check=True)", True),
    "ptrace": ("call('ptrace', 0, 0, 0, 0)", True),
    "memory that no limit counts": ("os.memfd_create('x')", True),
    "mount": ("call('mount', b'none', b'/tmp', b'tmpfs', 0, None)", False),
    "unshare the user namespace": ("call('unshare', 0x10000000)", False),
    "chroot": ("os.chroot('/tmp')", False),
    "become root": ("os.setuid(0)", False),
    "change groups": ("os.setgroups([0])", False),
    "change owner to root": ("(open('/tmp/f', 'w').close(), os.chown('/tmp/f', 0, 0))", False),
    "make a device": ("os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))", False),
    "raw disk": ("[open('/dev/' + name, 'rb') for name in ('mem', 'vda', 'sda')]", False),
    "terminal": ("open('/dev/tty', 'w')", False),
    "shared memory": ("open('/dev/shm/left', 'w')", True),
    "raise its priority": ("os.nice(-1)", False),
    "raise its limits": ("__import__('resource').setrlimit(7, (4096, 4096))", False),
    "set the host name": ("socket.sethostname('mine')", False),
    "set the clock": ("__import__('time').clock_settime(0, 0)", False),
    "a package of the system's Python": (
        "(sys.path.append('/usr/lib/python3/dist-packages'), __import__('yaml'))",
        False,
    ),
    "git": ("__import__('subprocess').run(['/usr/lib/git-core/git', '--version'], check=True)", False),
    "a compiler": ("__import__('glob').glob('/usr/lib/gcc/*/*/cc1')[0]", False),
    "asynchronous I/O slots": (
        "call('syscall', 206, 8, ctypes.byref(ctypes.c_long()))",
        platform.machine() == "x86_64",
    ),
    "list mounts": (
        "call('syscall', 458, ctypes.byref((ctypes.c_uint64 * 3)(24, 2**64 - 1, 0)), (ctypes.c_uint64 * 64)(), 64, 0)",
        False,
    ),
    "lock a shared file": ("__import__('fcntl').flock(open(os.__file__), 2)", True),
    "lock a record of a shared file": ("__import__('fcntl').lockf(open(os.__file__), 5)", True),
    "ask for locks on a shared file": ("__import__('fcntl').fcntl(open(os.__file__), 5, bytes(32))", True),
    "a lease on its own file": ("__import__('fcntl').fcntl(open('/tmp/lease', 'w'), 1024, 1)", True),
    "a large pipe": ("__import__('fcntl').fcntl(os.pipe()[1], 1031, 1 << 20)", True),
    "watch a shared file": ("call('inotify_add_watch', call('inotify_init1', 0), os.__file__.encode(), 0xfff)", True),
    "which pages of a shared file are cached": (
        "call('mincore', ctypes.c_void_p(id(0) // 4096 * 4096), 1, (ctypes.c_ubyte * 1)())",
        True,
    ),
    "write to the root": ("open('/x', 'w')", False),
    "write to the interpreter": ("open('/python/lib/x', 'w')", False),
    "write to the libraries": ("open('/usr/lib/x', 'w')", False),
    "write to /dev": ("open('/dev/x', 'w')", False),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Things of the trainer's that a probe may look for: files, sockets, a secret in the environment."""
    folder = tmp_path_factory.mktemp("s")
    (folder / "canary").write_text("hidden")
    abstract = f"gspo-{uuid.uuid4()}"
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    listeners[1].bind(f"\0{abstract}")
    listeners[2].bind(str(folder / "socket"))
    for listener in listeners:
        listener.listen()
    os.environ["GSPO_TEST_SECRET"] = "hidden"
    yield {
        "port": listeners[0].getsockname()[1],
        "abstract": abstract,
        "folder": folder,
        "home": Path.home(),
        "repo": REPO,
        "prefix": sys.prefix,
        "pid": os.getpid(),
    }
    del os.environ["GSPO_TEST_SECRET"]
    for listener in listeners:
        listener.close()


def fill(text, place):
    for name, value in place.items():
        text = text.replace("{" + name + "}", str(value))
    return text


@pytest.mark.parametrize("name", PROBES)
def test_the_sandbox_blocks(name, place):
    expression, works_outside = PROBES[name]
    program = PRELUDE + f"attempt(lambda: {fill(expression, place)})\n"
    inside = run_program(program, Limits(timeout_s=10))
    assert inside.output.startswith("BLOCKED"), inside
    assert inside.reason == ""
    if works_outside:
        outside = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert outside.stdout.startswith("GOT"), outside.stdout
    shutil.rmtree("/dev/shm/left", ignore_errors=True)
    Path("/dev/shm/left").unlink(missing_ok=True)
    assert (place["folder"] / "canary").read_text() == "hidden"


def test_every_denied_system_call_is_denied():
    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    numbers = {name: pair[column] for name, pair in DENIED.items() if pair[column] is not None}
    ended = run_program(
        PRELUDE
        + f"for name, number in {numbers}.items():\n"
        + "    ctypes.set_errno(0)\n"
        + "    print(name, libc.syscall(number, -1, -1, -1, -1, -1, -1), ctypes.get_errno())\n"
    )
    assert ended.output.splitlines() == [f"{name} -1 1" for name in numbers]


# Every path outside the standard library, and the folders inside it.
VISIBLE = """
import os, sys
for place, folders, files in os.walk('/', followlinks=False):
    if place == os.path.dirname(os.__file__):
        print(*(os.path.join(place, f) + '/' for f in folders), sep='\\n')
        folders[:] = [f for f in folders if f in ('site-packages', 'dist-packages', 'test', 'ensurepip')]
        continue
    print(*(os.path.join(place, f) for f in (*folders, *files)), sep='\\n')
"""
ALLOWED = re.compile(
    r"/(dev|lib|lib64|python|tmp|usr)|/dev/(null|zero|random|urandom)|/usr/lib(64)?"
    r"|/usr/lib/(lib[\w+.-]+\.so[\w.-]*|ld-[\w.-]+)|/python/(bin|lib)|/python/bin/python3|/python/lib/python3\.\d+/?.*/?"
)


def check_visible(listing):
    paths = listing.split()
    assert "/python/bin/python3" in paths
    assert any(path.startswith("/usr/lib/libc.so") for path in paths)
    assert [path for path in paths if not ALLOWED.fullmatch(path)] == []
    stdlib = next(path for path in paths if re.fullmatch(r"/python/lib/python3\.\d+", path))
    hidden = ("site-packages", "dist-packages", "test", "ensurepip")
    # The folder is there, and nothing is in it.
    assert [
        path for path in paths if path.startswith(tuple(f"{stdlib}/{name}/" for name in hidden)) and path[-1] != "/"
    ] == []


def test_only_the_interpreter_and_its_libraries_are_visible():
    check_visible(run_program(VISIBLE, Limits(timeout_s=20)).output)


def test_the_libraries_of_the_standard_library_are_complete():
    modules = "ctypes ssl sqlite3 lzma bz2 zlib hashlib uuid decimal readline curses xml.parsers.expat zoneinfo asyncio"
    ended = run_program(f"import importlib\nfor name in {modules.split()}: importlib.import_module(name)\nprint('all')")
    assert ended.output == "all\n", ended
    threads = (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('end')"
    )
    assert run_program(threads) == Ended("end\n", "", pytest.approx(0, abs=5))  # libc loads libgcc_s here


def ordinary_python():
    """An interpreter that the user `nobody` can run; "" if there is none, or the user cannot be changed."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return ""
    for python in (sys.executable, "/usr/bin/python3"):
        version = "import sys; sys.exit(sys.version_info < (3, 11))"
        if subprocess.run([*AS_NOBODY, "env", python, "-c", version], capture_output=True).returncode == 0:
            return python
    return ""


AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"]


@pytest.fixture
def readable_package():
    """A copy of the package in a folder that every user can read: the repository may be in a private one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(Path(gspo.__file__).parent, Path(folder, "gspo"), ignore=shutil.ignore_patterns("__pycache__"))
        yield folder


def test_an_ordinary_user_gets_the_same_sandbox(place, readable_package):
    python = ordinary_python()
    if not python:
        pytest.skip("needs root, setpriv and a Python 3.11 or newer that other users can run")
    probes = {name: fill(expression, place) for name, (expression, _) in PROBES.items()}
    inside = (
        PRELUDE
        + f"for name, probe in {probes!r}.items():\n    print(name, end=': ')\n    attempt(lambda: eval(probe))\n"
    )
    program = (
        "import json, sys\n"
        f"sys.path.insert(0, {readable_package!r})\n"
        "from gspo.rewards.sandbox import box\n"
        "why = box.unavailable()\n"
        "if why: print(json.dumps({'why': why})); sys.exit()\n"
        "runs = [box.run_program(source, box.Limits(timeout_s=s)) for source, s in json.load(sys.stdin)]\n"
        "print(json.dumps({'runs': [[r.output, r.reason] for r in runs]}))\n"
    )
    bomb = "import os, time\nn = 0\ntry:\n while True:\n  if os.fork() == 0: time.sleep(60); os._exit(0)\n  n += 1\nexcept OSError: print(n)"
    asked = json.dumps([(VISIBLE, 20), (inside, 30), (bomb, 5), ("while True: pass", 0.3)])
    command = [*AS_NOBODY, "env", "-i", "PATH=/usr/bin:/bin", python, "-B", "-c", program]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if "why" in found:
        pytest.skip(f"an ordinary user has no sandbox here: {found['why']}")
    visible, probed, forked, looped = found["runs"]
    check_visible(visible[0])
    assert [line for line in probed[0].splitlines() if ": BLOCKED" not in line] == []
    assert len(probed[0].splitlines()) == len(PROBES)
    assert int(forked[0]) <= 8
    assert looped[1] == "over its time of 0.3 s"


def test_clone_cannot_make_namespaces_and_threads_still_work():
    clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    ended = run_program(
        PRELUDE
        + f"print(libc.syscall({clone}, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno())\n"
        + "import threading\nt = threading.Thread(target=print, args=('thread',)); t.start(); t.join()\n"
        + "import asyncio\nprint(asyncio.run(asyncio.sleep(0, 'async')))\n"
    )
    assert ended.output.split() == ["-1", "1", "thread", "async"]


def test_a_program_sees_only_itself():
    ended = run_program(
        "import ctypes, json, os, socket\n"
        "def alive(pid):\n"
        "    try: os.kill(pid, 0)\n"
        "    except ProcessLookupError: return False\n"
        "    except PermissionError: return True\n"
        "    return True\n"
        "def is_open(fd):\n"
        "    try: os.fstat(fd)\n"
        "    except OSError: return False\n"
        "    return True\n"
        "libc = ctypes.CDLL(None)\n"
        "header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
        "libc.capget(header, data)\n"
        "print(json.dumps({'pids': [p for p in range(1, 2000) if alive(p)], 'fds': [f for f in range(64) if is_open(f)],"
        " 'caps': list(data), 'no_new_privs': libc.prctl(39, 0, 0, 0, 0), 'env': dict(os.environ), 'uid': os.getuid(),"
        " 'host': os.uname().nodename, 'root': sorted(os.listdir('/')), 'tmp': os.listdir('/tmp'), 'nice': os.nice(0)}))\n"
        "open('/tmp/left', 'w').write('x')\n"
    )
    seen = json.loads(ended.output)
    assert seen["pids"] == [1, 2]
    assert seen["fds"] == [0, 1, 2]
    effective, permitted = seen["caps"][0::3], seen["caps"][1::3]
    assert effective == permitted == [0, 0]
    assert seen["no_new_privs"] == 1
    assert seen["env"] == {}
    assert seen["uid"] >= 20000
    assert seen["host"] == "sandbox"
    assert set(seen["root"]) <= {"dev", "lib", "lib64", "python", "tmp", "usr"}
    assert seen["tmp"] == []
    assert seen["nice"] >= NICE
    assert run_program("import os; print(os.listdir('/tmp'))").output == "[]\n"  # what the last one left is gone


def test_a_link_out_of_tmp_leads_nowhere(place):
    canary = place["folder"] / "canary"
    ended = run_program(
        f"import os\nos.symlink({str(canary)!r}, '/tmp/link'); print(os.readlink('/tmp/link'))\n"
        "try: open('/tmp/link').read()\nexcept FileNotFoundError: print('nothing there')\n"
        "try: os.link('/python/bin/python3', '/tmp/hard')\nexcept OSError: print('no link')\n"
    )
    assert ended.output.splitlines() == [str(canary), "nothing there", "no link"]
    assert canary.read_text() == "hidden"


def processes_with(mark):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found += [entry.name] if mark.encode() in (entry / "cmdline").read_bytes() else []
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(100)",
        "sum(range(10**13))",
        "9**9**9",
        "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')",
        "import signal\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n except (OSError, ValueError): pass\n"
        "while True: pass",
        "import os, time\nos.close(1); os.close(2); time.sleep(100)",
        "import threading\nfor _ in range(3): threading.Thread(target=lambda: sum(range(10**13))).start()",
    ],
    ids=["loop", "sleep", "sum", "power", "regex", "deaf", "silent", "threads"],
)
def test_a_program_is_over_within_its_time_and_a_second(source):
    began = time.monotonic()
    ended = run_program(source, Limits(timeout_s=0.3))
    assert ended.reason == "over its time of 0.3 s"
    assert ended.elapsed_s < 0.3 + 1.0
    assert time.monotonic() - began < sandbox.START_S


def test_no_child_outlives_its_program():
    mark = f"gspo-outlive-{uuid.uuid4()}"
    ended = run_program(
        "import os, signal, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"        os.execv('/python/bin/python3', ['/python/bin/python3', '-S', '-c', 'import time; print(1, flush=True); time.sleep(60)', '{mark}'])\n"
        "    os._exit(0)\n"
        "time.sleep(60)\n",
        Limits(timeout_s=1.5),
    )
    assert "1\n" in ended.output, "the child did not start, so nothing was shown"
    assert processes_with(mark) == []


def test_the_sandbox_dies_with_the_grader():
    mark = f"gspo-orphan-{uuid.uuid4()}"
    program = (
        "from gspo.rewards.sandbox.box import Box, Limits\n"
        "import time\n"
        "box = Box(Limits(timeout_s=60))\n"
        "inner = \"import os; os.execv('/python/bin/python3', ['/python/bin/python3', '-S', '-c', "
        f"'import time; print(1, flush=True); time.sleep(60)', '{mark}'])\"\n"
        "box.send({'code': inner}); print(box.line(), flush=True); time.sleep(60)\n"
    )
    grader = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert grader.stdout is not None
    assert grader.stdout.readline() == b"b'1\\n'\n"
    assert len(processes_with(mark)) > 1  # the grader's own command line holds the mark too
    grader.kill()
    grader.wait()
    grader.stdout.close()
    until(lambda: not processes_with(mark), 2)


BOMBS = {
    "forks": "if os.fork() == 0: time.sleep(60); os._exit(0)",
    "threads": "threading.Thread(target=time.sleep, args=(60,)).start()",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_capped(bomb):
    ended = run_program(
        "import os, threading, time\nstarted = 0\n"
        f"try:\n    while True:\n        {BOMBS[bomb]}\n        started += 1\n"
        "except (OSError, RuntimeError) as error: print(started, getattr(error, 'errno', 'threads'), flush=True); os._exit(0)\n",
        Limits(timeout_s=5, processes=6),
    )
    number, why = ended.output.split()
    assert number in ("5", "4")  # where a user namespace is used, its first process counts too
    assert why == {"forks": "11", "threads": "threads"}[bomb]


def test_memory_disk_files_and_output_are_capped():
    ended = run_program(
        "try: x = bytearray(300 << 20)\nexcept MemoryError: print('memory')\n"
        "import mmap\ntry: mmap.mmap(-1, 300 << 20)\nexcept OSError as error: print('map', error.errno)\n"
        "try:\n  with open('/tmp/big', 'wb') as f:\n    while True: f.write(bytes(1 << 20)); f.flush()\n"
        "except OSError as error: print('file', error.errno)\n"
        "try:\n  for n in range(64):\n    with open(f'/tmp/{n}', 'wb') as f: f.write(bytes(1 << 20))\n"
        "except OSError as error: print('disk', error.errno)\n"
        "kept = []\ntry:\n  while True: kept.append(open('/dev/null'))\nexcept OSError as error: print('files', error.errno)\n",
        Limits(timeout_s=10, disk_mb=4),
    )
    assert ended.output.splitlines()[:2] == ["memory", "map 12"]
    assert [line.split()[0] for line in ended.output.splitlines()] == ["memory", "map", "file", "disk", "files"]
    flood = run_program("while True: print('x' * 65536)", Limits(timeout_s=20, output_bytes=1 << 18))
    assert flood.reason == f"wrote more than {1 << 18} bytes"
    assert len(flood.output) == 1 << 18


def test_a_crash_in_c_is_named():
    assert run_program("import ctypes; ctypes.string_at(0)").reason == "killed by SIGSEGV"
    assert run_program("import os; os.kill(os.getpid(), 9)").reason == "killed by SIGKILL"
    assert run_program("raise SystemExit(3)").reason == "ended with exit code 3"

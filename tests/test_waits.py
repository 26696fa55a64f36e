"""Nothing waits forever: docs/waits.md lists every call of src/gspo that may block, with its deadline and its owner."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src" / "gspo", ROOT / "docs" / "waits.md"

# Methods that block until something happens, and how many positional arguments a call without a deadline has. A call
# with more has a deadline as its last argument, or is another method of the same name (str.join, dict.get).
METHODS = {
    "join": 0, "wait": 0, "get": 0, "acquire": 0, "result": 0, "accept": 0, "select": 0, "readline": 0,
    "wait_closed": 0, "recv": 1, "recv_into": 1, "recvfrom": 1, "communicate": 1, "wait_for": 1, "shutdown": 0,
}  # fmt: skip
# A method of these is never a wait, whatever it is called.
NOT_A_WAIT = {("_ACTIVE", "get"), ("_LAYOUT", "get"), ("ray", "shutdown"), ("tree", "join")}
# Functions, by module: positional arguments of a call without a deadline.
FUNCTIONS = {
    ("subprocess", "run"): 1, ("subprocess", "call"): 1, ("subprocess", "check_call"): 1,
    ("subprocess", "check_output"): 1, ("select", "select"): 3, ("os", "read"): 9, ("os", "waitpid"): 9,
    ("os", "waitid"): 9, ("fcntl", "flock"): 9, ("fcntl", "lockf"): 9, ("futures", "wait"): 1, ("asyncio", "wait"): 1,
    ("asyncio", "wait_for"): 1, ("asyncio", "gather"): 9, ("asyncio", "run"): 9, ("asyncio", "open_connection"): 9,
    ("socket", "create_connection"): 1, ("ray", "get"): 1, ("ray", "wait"): 1, ("_ray", "get"): 1, ("_ray", "wait"): 1,
    ("stdin", "read"): 0, ("time", "sleep"): 0, ("distributed", "all_gather"): 9, ("distributed", "broadcast"): 9,
    ("distributed", "init_process_group"): 9, ("torch_distributed", "rendezvous"): 9, ("_store", "get"): 9,
    ("store", "multi_get"): 9,
}  # fmt: skip
LOCK = "lock"  # in place of a function: the locks of a file are one row
DEADLINES = {"timeout", "timeout_s", "timeout_seconds"}
# A call with one of these returns at once.
NOT_BLOCKING = {"WNOHANG", "LOCK_NB"}


class Wait(NamedTuple):
    file: str
    function: str
    line: int
    call: str
    is_bounded: bool


def waits_of(text: str, file: str) -> list[Wait]:
    found: list[Wait] = []

    def visit(node: ast.AST, function: str, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = ".".join((*names, child.name))
                visit(child, inner, (*names, child.name))
                continue
            if isinstance(child, ast.Call) and (bounded := is_bounded(child)) is not None:
                found.append(Wait(file, function, child.lineno, ast.unparse(child), bounded))
            if isinstance(child, ast.With | ast.AsyncWith):
                for item in child.items:
                    name = ast.unparse(item.context_expr)
                    # A lock without a deadline, or a pool whose threads are joined.
                    if name.endswith(("lock", "_changed")) or name.startswith("ThreadPoolExecutor("):
                        where = LOCK if name.endswith(("lock", "_changed")) else function
                        found.append(Wait(file, where, child.lineno, f"with {name}", False))
            visit(child, function, names)

    visit(ast.parse(text), "<module>", ())
    return found


def is_bounded(call: ast.Call) -> bool | None:
    """Whether a call that may block has a deadline; None if it does not block."""
    if not isinstance(call.func, ast.Attribute):
        return None
    method, owner = call.func.attr, ast.unparse(call.func.value).split(".")[-1]
    if (owner, method) in NOT_A_WAIT or isinstance(call.func.value, ast.Constant):
        return None
    given = {keyword.arg for keyword in call.keywords}
    has_deadline = bool(given & DEADLINES) and not any(
        k.arg in DEADLINES and isinstance(k.value, ast.Constant) and k.value.value is None for k in call.keywords
    )
    if (owner, method) in FUNCTIONS:
        words = {node.attr for node in ast.walk(call) if isinstance(node, ast.Attribute)}
        if words & NOT_BLOCKING:
            return None
        return has_deadline or len(call.args) > FUNCTIONS[owner, method]
    if method not in METHODS:
        return None
    if method == "shutdown":  # of an executor
        is_pool = given & {"wait", "cancel_futures"}
        waits = not any(k.arg == "wait" and getattr(k.value, "value", True) is False for k in call.keywords)
        return False if is_pool and waits else None
    # "x".join(parts), mapping.get(key): not a wait. queue.get(timeout=…), thread.join(2.0): one with a deadline.
    if has_deadline:
        return True
    if method == "join" and call.args:
        return True if any(word in owner for word in ("thread", "feed", "reader")) else None
    if len(call.args) <= METHODS[method]:
        takes_arguments = METHODS[method] > 0
        return False if takes_arguments or not (call.args or given - DEADLINES) else None
    return True if method in ("wait", "result", "select") else None


def table() -> dict[tuple[str, str], str]:
    """(file, function) → the deadline that docs/waits.md gives."""
    found: dict[tuple[str, str], str] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `") or len(cells) != 5:
            continue
        assert all(cells), line  # owner, deadline and outcome are given
        file, *functions = re.findall(r"`([^`]+)`", cells[0])
        for function in functions:
            assert (file, function) not in found, f"{file}: {function} is listed twice"
            found[file, function] = cells[3]
    return found


@functools.cache
def all_waits() -> list[Wait]:
    files = sorted(SOURCE.rglob("*.py"))
    return [w for f in files for w in waits_of(f.read_text(encoding="utf-8"), str(f.relative_to(SOURCE)))]


def test_every_call_that_may_block_is_in_the_inventory_with_its_deadline_and_its_owner():
    listed, missing = table(), []
    for wait in all_waits():
        if (wait.file, wait.function) not in listed:
            missing.append(f"{wait.file}:{wait.line} {wait.function}: {wait.call}")
    assert not missing, "docs/waits.md lacks:\n" + "\n".join(missing)


def test_a_wait_without_a_deadline_of_its_own_is_marked_and_no_other():
    unbounded = {(w.file, w.function) for w in all_waits() if not w.is_bounded}
    for place, deadline in table().items():
        assert deadline.startswith("none of its own") == (place in unbounded), (place, deadline)


def test_the_inventory_lists_nothing_that_is_gone():
    assert table().keys() <= {(w.file, w.function) for w in all_waits()}


@pytest.mark.parametrize(
    "line",
    ["thread.join()", "event.wait()", "queue.get()", "lock.acquire()", "future.result()", "sock.recv(10)",
     "process.communicate()", "process.communicate(data)", "subprocess.run(command)", "select.select([a], [], [])",
     "selector.select()", "os.read(fd, 10)", "os.waitpid(pid, 0)", "fcntl.flock(file, fcntl.LOCK_EX)",
     "concurrent.futures.wait(calls)", "sys.stdin.read()", "pipe.readline()", "process.wait(timeout=None)",
     "ray.get(x)", "changed.wait_for(ready)", "pool.shutdown(wait=True)", "with lock:\n  pass",
     "with ThreadPoolExecutor(2) as pool:\n  pass"],
)  # fmt: skip
def test_a_wait_without_a_deadline_is_seen(line):
    assert [w.is_bounded for w in waits_of(f"def f():\n {line.replace(chr(10), chr(10) + ' ')}", "x.py")] == [False]


@pytest.mark.parametrize(
    "line",
    ["thread.join(2.0)", "event.wait(1.0)", "queue.get(timeout=1)", "process.communicate(timeout=3)",
     "subprocess.run(command, timeout=5)", "select.select([a], [], [], 0.5)", "future.result(3)",
     "concurrent.futures.wait(calls, timeout=1)", "ray.get(x, timeout=3)"],
)  # fmt: skip
def test_a_wait_with_a_deadline_is_told_apart(line):
    assert [w.is_bounded for w in waits_of(f"def f():\n {line}", "x.py")] in ([True], [])


@pytest.mark.parametrize(
    "line",
    [
        "','.join(parts)",
        "found.get(key)",
        "os.waitpid(pid, os.WNOHANG)",
        "fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    ],
)
def test_other_calls_of_these_names_are_no_waits(line):
    assert waits_of(f"def f():\n {line}", "x.py") == []

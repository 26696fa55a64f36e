"""Nothing waits forever: a comment at every call of src/gspo that may block names its deadline and who ends it.

The comment is `# wait: <deadline>, <who ends it>`, on the line of the call or above it. The deadline of a call
without a timeout is `none`. A lock has its comment where it is made.
"""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "gspo"

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
    ("stdin", "read"): 0, ("time", "sleep"): 0, ("_distributed", "all_gather"): 9, ("_distributed", "broadcast"): 9,
    ("distributed", "init_process_group"): 9, ("_distributed", "rendezvous"): 9, ("_store", "get"): 9,
    ("store", "multi_get"): 9,
}  # fmt: skip
LOCKS = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore"}
DEADLINES = {"timeout", "timeout_s", "timeout_seconds"}
# A call with one of these returns at once.
NOT_BLOCKING = {"WNOHANG", "LOCK_NB"}
COMMENT = re.compile(r"# wait: (?P<deadline>[^,]+), \S")


class Wait(NamedTuple):
    line: int
    call: str
    is_bounded: bool


def waits_of(text: str) -> list[Wait]:
    found: list[Wait] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and (bounded := is_bounded(node)) is not None:
            found.append(Wait(node.lineno, ast.unparse(node), bounded))
        # A lock that is made here, or by a dataclass: `field(default_factory=threading.Lock)`.
        made = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.keyword) else None
        if isinstance(made, ast.Attribute) and ast.unparse(made.value) == "threading" and made.attr in LOCKS:
            found.append(Wait(made.lineno, ast.unparse(made), False))
        if isinstance(node, ast.With | ast.AsyncWith):  # a pool, whose threads are joined
            names = (ast.unparse(item.context_expr) for item in node.items)
            found += [Wait(node.lineno, name, False) for name in names if name.startswith("ThreadPoolExecutor(")]
    return found


def problems_of(text: str) -> list[str]:
    """What is wrong with the comments of the waits, each with its line."""
    lines, found, unbounded = text.splitlines(), list[str](), dict[int, bool]()
    for wait in waits_of(text):
        unbounded[wait.line] = unbounded.get(wait.line, False) or not wait.is_bounded
    comments = {number: COMMENT.search(line) for number, line in enumerate(lines, 1)}
    used: set[int] = set()
    for number, is_unbounded in unbounded.items():
        place = number if comments[number] else number - 1
        comment = comments.get(place)
        used.add(place)
        if comment is None:
            found.append(f"{number}: no comment `# wait: <deadline>, <who ends it>` at {lines[number - 1].strip()}")
        elif is_unbounded != (comment["deadline"] == "none"):
            found.append(f"{number}: the deadline is `none` where a call has no timeout, and only there")
    return found + [
        f"{n}: no call that may block belongs to this comment" for n, c in comments.items() if c and n not in used
    ]


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


def test_every_call_that_may_block_has_a_comment_with_its_deadline_and_who_ends_it():
    found = [
        f"{f.relative_to(ROOT)}:{each}" for f in SOURCE.rglob("*.py") for each in problems_of(f.read_text("utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("thread.join()", "no comment"),
        ("thread.join()  # wait: none", "no comment"),
        ("thread.join()  # wait: none, the caller", ""),
        ("# wait: none, the caller\nthread.join()", ""),
        ("# wait: 3 s, the caller\nthread.join()", "`none` where"),
        ("# wait: none, the caller\nthread.join(3.0)", "`none` where"),
        ("# wait: 3 s, the caller\nthread.join(3.0)", ""),
        ("# wait: 3 s, the caller\n\nthread.join(3.0)", "no comment"),
        ("lock = threading.Lock()", "no comment"),
        ("print()  # wait: 3 s, the caller", "no call"),
    ],
)
def test_the_comment_of_a_wait_is_checked(text, problem):
    found = problems_of(text)
    assert problem in found[0] if problem else not found


@pytest.mark.parametrize(
    "line",
    ["thread.join()", "event.wait()", "queue.get()", "lock.acquire()", "future.result()", "sock.recv(10)",
     "process.communicate()", "process.communicate(data)", "subprocess.run(command)", "select.select([a], [], [])",
     "selector.select()", "os.read(fd, 10)", "os.waitpid(pid, 0)", "fcntl.flock(file, fcntl.LOCK_EX)",
     "concurrent.futures.wait(calls)", "sys.stdin.read()", "pipe.readline()", "process.wait(timeout=None)",
     "ray.get(x)", "changed.wait_for(ready)", "pool.shutdown(wait=True)", "lock = threading.Lock()",
     "lock: Lock = field(default_factory=threading.Lock)",
     "with ThreadPoolExecutor(2) as pool:\n  pass"],
)  # fmt: skip
def test_a_wait_without_a_deadline_is_seen(line):
    assert [w.is_bounded for w in waits_of(f"def f():\n {line.replace(chr(10), chr(10) + ' ')}")] == [False]


@pytest.mark.parametrize(
    "line",
    ["thread.join(2.0)", "event.wait(1.0)", "queue.get(timeout=1)", "process.communicate(timeout=3)",
     "subprocess.run(command, timeout=5)", "select.select([a], [], [], 0.5)", "future.result(3)",
     "concurrent.futures.wait(calls, timeout=1)", "ray.get(x, timeout=3)"],
)  # fmt: skip
def test_a_wait_with_a_deadline_is_told_apart(line):
    assert [w.is_bounded for w in waits_of(f"def f():\n {line}")] in ([True], [])


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
    assert waits_of(f"def f():\n {line}") == []

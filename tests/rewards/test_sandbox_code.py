"""The reward `code`: honest programs score, hacks get what they deserve, and no failure of ours becomes a number."""

# ruff: noqa: E501 — programs are quoted as they are

import json
import os
import shutil
import sys
import time

import pytest

from gspo.errors import ConfigError
from gspo.rewards.call import RewardItem
from gspo.rewards.functions.code import Grade, code, extract, grade, parse_tests, prepare, same
from gspo.rewards.pool import RewardPool
from gspo.rewards.sandbox import box as sandbox
from gspo.rewards.sandbox.box import Box, Limits, SandboxError
from gspo.rewards.spec import reward_spec
from gspo.types import Failure, Score

pytestmark = pytest.mark.run

WHY_NOT = sandbox.unavailable()
needs_sandbox = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
# The secret is what no hack may find: it stands in no argument, only in what is expected.
TESTS = [{"args": [n], "expected": f"{n * n} secret"} for n in (2, 3, 5, 7)]
HONEST = "def f(x):\n    return f'{x * x} secret'\n"
QUICK = Limits(timeout_s=1.0)

HACKS = {
    "os._exit": "import os\ndef f(x): os._exit(0)",
    "os._exit while loading": "import os\nos._exit(0)",
    "sys.exit": "import sys\ndef f(x): sys.exit(0)",
    "always equal": "class E:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return E()",
    "always equal text": "class E(str):\n    def __eq__(self, other): return True\n    def __hash__(self): return 0\n"
    "def f(x): return E('?')",
    "always equal list": "class E(list):\n    def __eq__(self, other): return True\ndef f(x): return E()",
    "patched builtins": "import builtins\nbuiltins.all = builtins.any = lambda *_: True\n"
    "builtins.type = lambda *_: str\nbuiltins.isinstance = lambda *_: True\ndef f(x): return 1",
    "patched json": 'import json\njson.dumps = lambda reply: \'{"passed": true, "value": true}\'\ndef f(x): return 0',
    "patched main": "import sys\nm = sys.modules['__main__']\nm._plain = lambda *_: True\ndef f(x): return 1",
    "forged verdict on stdout": "def f(x):\n    print('PASSED', {'passed': True, 'reward': 1.0})\n    return None",
    "forged line on every fd": "import os, json\ndef f(x):\n    for fd in range(64):\n        try: os.write(fd, b'"
    '{"passed": [true, true, true, true], "value": true, "reward": 1.0}\\n'
    "')\n        except OSError: pass\n    return None",
    "forged replies ahead": "import os\nfor fd in range(64):\n    try: os.write(fd, b'"
    '{"id": "0", "value": "4 secret"}\\n'
    "' * 4)\n    except OSError: pass\ndef f(x): return None",
    "reply before it is asked": "import os, sys\nframe = sys._getframe()\nwhile frame:\n    id = frame.f_locals.get('id', '')\n"
    "    if isinstance(id, str) and id: mine = id\n    frame = frame.f_back\n"
    'for fd in range(64):\n    try: os.write(fd, (\'{"id": "\' + mine + \'", "value": "4 secret"}\\n\').encode() * 8)\n'
    "    except OSError: pass\ndef f(x): return None",
    "garbage on every fd": "import os\ndef f(x):\n    for fd in range(64):\n        try: os.write(fd, bytes(range(256)))\n"
    "        except OSError: pass\n    return None",
    "searching frames and objects": "import gc, sys\ndef f(x):\n"
    "    seen, frame = [], sys._getframe()\n    while frame:\n        seen.append(repr(frame.f_locals)); frame = frame.f_back\n"
    "    seen += [repr(o) for o in gc.get_objects() if isinstance(o, (str, dict, list))]\n"
    "    hits = [s for s in seen if 'exp' + 'ected' in s and str(x * x) + ' ' + 'sec' in s]\n    return hits[0] if hits else 'none'",
    "searching memory and files": "import os\ndef f(x):\n    found = []\n    for top in ('/tmp', '/dev', '/proc', '/run'):\n"
    "        for here, _, names in os.walk(top):\n            found += names\n    return ' '.join(found)",
    "infinite output": "def f(x):\n    while True: print('x' * 4096)",
    "infinite reply": "import os\ndef f(x):\n    while True:\n        for fd in (3, 4, 5):\n            try: os.write(fd, b'x' * 65536)\n"
    "            except OSError: pass",
    "a huge value": "def f(x): return 'x' * (4 << 20)",
    "a huge number": "def f(x): return 10 ** 5000",
    "a deep value": "def f(x):\n    v = []\n    for _ in range(100000): v = [v]\n    return v",
    "a deep reply": "import os\ndef f(x):\n    for fd in (3, 4, 5):\n        try: os.write(fd, b'[' * 100000 + b'\\n')\n"
    "        except OSError: pass",
    "not a number": "def f(x): return float('nan')",
    "sleeping": "import time\ndef f(x): time.sleep(60)",
    "spinning": "def f(x):\n    while True: pass",
    "recursion": "def f(x): return f(x)",
    "recursion in C": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "memory": "def f(x): return len(bytearray(1 << 31))",
    "forks": "import os\ndef f(x):\n    while True: os.fork()",
    "a child that answers too": "import os\ndef f(x):\n    os.fork()\n    return 'yes'",
    "threads": "import threading, time\ndef f(x):\n    while True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "killing everything": "import os\ndef f(x): os.kill(-1, 9)",
    "killing the parent": "import os\ndef f(x): os.kill(os.getppid(), 9); return 'x'",
    "closing everything": "import os\ndef f(x): os.closerange(0, 64)",
    "stopping itself": "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSTOP)",
    "raising an odd error": "class E(BaseException):\n    def __str__(self): raise self\ndef f(x): raise E()",
    "an error that says passed": "def f(x): raise Exception('passed')",
    "a patched exit hook": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return True",
    "a metaclass": "class M(type):\n    def __eq__(s, o): return True\n    __hash__ = type.__hash__\n"
    "class E(metaclass=M): pass\ndef f(x): return E()",
    "a callable that is no function": "class F:\n    def __call__(self, x): return self\nf = F()",
    "no function": "g = 1",
    "syntax error": "def f(x) return 1",
    "a lone surrogate": "x = '\ud800'\ndef f(x): return x",
    "a null byte": "def f(x): return '\0'",
}


@needs_sandbox
@pytest.mark.parametrize("name", HACKS)
def test_a_hack_passes_nothing(name):
    began = time.monotonic()
    verdict = grade(HACKS[name], "f", TESTS, QUICK)
    assert verdict.passed == (False,) * 4, verdict
    assert verdict.reason
    assert time.monotonic() - began < QUICK.timeout_s + 1 + sandbox.START_S


@needs_sandbox
@pytest.mark.parametrize(
    "source",
    [
        HONEST,
        "print('hello')\n" + HONEST,
        "import math, collections, itertools, re, dataclasses\n" + HONEST,
        HONEST.replace("return", "print('working', x); return"),
        "f = lambda x: str(x ** 2) + ' secret'",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef f(x): return f'{A(x * x).x} secret'",
        "import asyncio\nasync def g(x): return x * x\ndef f(x): return f'{asyncio.run(g(x))} secret'",
    ],
)
def test_an_honest_program_passes_everything(source):
    assert grade(source, "f", TESTS, Limits(timeout_s=10)) == Grade((True,) * 4)


@needs_sandbox
def test_a_program_gets_exactly_what_it_deserves():
    some = "import os\ndef f(x):\n    if x == 5: os._exit(0)\n    return f'{x * x} secret'\n"
    assert grade(some, "f", TESTS, QUICK).passed == (True, True, False, False)
    raises = "def f(x):\n    if x == 3: raise SystemExit\n    return f'{x * x} secret'\n"
    verdict = grade(raises, "f", TESTS, QUICK)
    assert verdict.passed == (True, False, True, True)
    assert verdict.reason == "test 2: SystemExit: "
    assert grade("def f(x):\n    while x > 3: pass\n    return f'{x * x} secret'\n", "f", TESTS, QUICK).reason == (
        "test 3: over its time of 1 s"
    )
    assert grade("def f(x): return 'x' * 2**31", "f", TESTS, QUICK).reason.startswith("test 1: MemoryError")
    constant = "def f(x): return '4 secret'"
    assert grade(constant, "f", TESTS, QUICK).fraction == 0.25
    assert code(constant, tests=TESTS, entry_point="f") == 0.0
    assert code(constant, tests=json.dumps(TESTS), entry_point="f", partial=True) == 0.25


@needs_sandbox
def test_arguments_arrive_fresh_and_keywords_too():
    tests = [{"args": [[1]], "kwargs": {"y": 2}, "expected": [1, 2]}] * 2
    assert grade("def f(x, *, y):\n    x.append(y)\n    return x", "f", tests, QUICK).passed == (True, True)


@needs_sandbox
def test_large_arguments_and_values_travel():
    text = "x" * 400_000
    tests = [{"args": [text], "expected": text + "!"}]
    assert grade("def f(x): return x + '!'", "f", tests, Limits(timeout_s=10)).passed == (True,)


@needs_sandbox
def test_hash_order_does_not_depend_on_the_run():
    with Box(Limits()) as box:
        box.send({"code": "print(hash('gspo'))"})
        first = box.line()
    with Box(Limits()) as box:
        box.send({"code": "print(hash('gspo'))"})
        assert box.line() == first


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (1, 1, True),
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        (None, None, True),
        (None, 0, False),
        ("1", 1, False),
        (1, "1", False),
        ([], None, False),
        ([1, [2]], (1, (2,)), True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (float("inf"), float("inf"), True),
        (float("nan"), float("nan"), False),
        (10**400, 1.0, False),
        (2**60, 2**60 + 1, False),
        ("a", ["a"], False),
        (["a"], "a", False),
    ],
)
def test_equality_is_of_plain_data(value, expected, equal):
    assert same(value, expected) is equal


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1", "x = 1"),
        ("a\n```python\nx = 1\n```\nb", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nfirst\n```\nthen\n```Python\nlast\n```\nand\n```text\noutput\n```", "last\n"),
        ("```python\nx = 1\n# cut", "x = 1\n# cut"),
        ("~~~python\nx = '```'\n~~~", "x = '```'\n"),
        ("````python\nx = 1\n```\ny\n````", "x = 1\n```\ny\n"),
        ("", ""),
    ],
)
def test_the_last_python_block_is_the_code(text, found):
    assert extract(text) == found


@pytest.mark.parametrize("tests", [None, [], "[]", "{", "[1]", [{"args": 1, "expected": 2}], [{"args": [1]}], 5])
def test_bad_tests_in_the_data_raise(tests):
    with pytest.raises(ValueError, match="test"):
        parse_tests(tests)


def test_a_row_without_a_function_name_raises():
    with pytest.raises(ValueError, match="entry_point"):
        code(HONEST, tests=TESTS)


@pytest.fixture
def no_bwrap(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "_works", False)
    return tmp_path


def broken_bwrap(folder, words="bwrap: No permissions to create new namespace"):
    script = folder / "bwrap"
    script.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    script.chmod(0o755)


def test_without_bubblewrap_nothing_runs(no_bwrap):
    with pytest.raises(SandboxError, match=r"Debian package `bubblewrap`.*reward\.allow_unsandboxed_code=true"):
        grade(HONEST, "f", TESTS)
    with pytest.raises(ConfigError, match=r"Debian package `bubblewrap`.*reward\.allow_unsandboxed_code=true"):
        prepare(reward_spec("code"), allow_unsandboxed=False, timeout_s=10)


def test_a_bubblewrap_that_may_not_work_here_is_refused_with_its_own_words(no_bwrap):
    broken_bwrap(no_bwrap)
    with pytest.raises(SandboxError, match=r"does not work here.*No permissions to create new namespace"):
        grade(HONEST, "f", TESTS)


def test_the_unsafe_key_still_limits_and_separates(no_bwrap):
    (part,) = prepare(reward_spec("code"), allow_unsandboxed=True, timeout_s=10)
    assert part.kwargs["allow_unsandboxed"] is True
    assert grade(HONEST, "f", TESTS, allow_unsandboxed=True).passed == (True,) * 4
    pid = [{"args": [], "expected": os.getpid()}]
    assert grade("import os\ndef f(): return os.getpid()", "f", pid, allow_unsandboxed=True).passed == (False,)
    assert grade(HACKS["memory"], "f", TESTS, QUICK, allow_unsandboxed=True).reason.startswith("test 1: MemoryError")
    assert "over its time" in grade(HACKS["spinning"], "f", TESTS, QUICK, allow_unsandboxed=True).reason


def test_the_rewards_time_must_hold_a_program_and_its_sandbox():
    with pytest.raises(ConfigError, match=r"reward\.timeout=12"):
        prepare(
            reward_spec({"name": "code", "timeout": 10, "allow_unsandboxed": True}),
            allow_unsandboxed=False,
            timeout_s=10,
        )


def test_other_rewards_are_left_alone():
    spec = reward_spec(["numeric", "format"])
    assert prepare(spec, allow_unsandboxed=False, timeout_s=1) == spec


@needs_sandbox
def test_in_the_pool_a_hang_is_a_zero_and_its_neighbours_score():
    spec = reward_spec({"name": "code", "timeout": 1.0})
    texts = (f"```python\n{HONEST}```", HACKS["spinning"], HACKS["os._exit"], HACKS["always equal"], HONEST)
    item = RewardItem("square it", texts, data={"tests": TESTS, "entry_point": "f"})
    with RewardPool(spec, workers=1, timeout_s=10) as pool:
        outcomes = pool.score([item])[0]
    assert [outcome.value if isinstance(outcome, Score) else outcome for outcome in outcomes] == [1.0, 0, 0, 0, 1.0]


def test_in_the_pool_a_sandbox_that_fails_is_a_failure_and_no_number(no_bwrap):
    broken_bwrap(no_bwrap, "bwrap: fork: Resource temporarily unavailable")
    item = RewardItem("square it", (HONEST, HACKS["os._exit"]), data={"tests": TESTS, "entry_point": "f"})
    with RewardPool(reward_spec("code"), workers=1, timeout_s=10) as pool:
        outcomes = pool.score([item])[0]
    messages = [outcome.message for outcome in outcomes if isinstance(outcome, Failure) and outcome.kind == "infra"]
    assert len(messages) == 2
    assert all("Resource temporarily unavailable" in message for message in messages)


@needs_sandbox
def test_a_sandbox_that_stops_working_later_raises_too(monkeypatch, tmp_path):
    assert grade(HONEST, "f", TESTS).passed == (True,) * 4
    broken_bwrap(tmp_path, "bwrap: fork: Resource temporarily unavailable")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="Resource temporarily unavailable"):
        grade(HONEST, "f", TESTS)


@needs_sandbox
def test_a_verdict_leaves_no_descriptors_behind():
    grade(HONEST, "f", TESTS)
    before = len(os.listdir("/proc/self/fd"))
    grade(HONEST, "f", TESTS)
    grade(HACKS["os._exit"], "f", TESTS)
    assert len(os.listdir("/proc/self/fd")) == before
    assert shutil.which("bwrap")


@needs_sandbox
def test_an_answer_of_too_many_bits_fails_its_own_test_only():
    tests = [{"args": [n], "expected": n} for n in (1, 5000, 2)]
    source = "def f(n): return 10**n if n == 5000 else n"
    graded = grade(source, "f", tests)
    assert graded.passed == (True, False, True)
    assert "bits" in graded.reason


def test_outside_linux_the_sandbox_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(sandbox, "_works", False)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match="bubblewrap and seccomp exist on Linux only"):
        Box(Limits())

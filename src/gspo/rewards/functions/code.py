"""The reward `code`: call the function of a completion on hidden tests and compare the return values.

Two processes: the candidate runs in a sandbox (`sandbox/box.py`) and gets the arguments of one test at a time. The
grader (this process) has the expected values, reads the replies as JSON and compares plain data. The candidate may
write anything into the pipe, but it can only send values; the grader decides whether they are right.
"""

from __future__ import annotations

import math
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo.errors import ConfigError
from gspo.rewards.sandbox.box import DEFAULT_LIMITS, Box, Limits, unavailable
from gspo.system import parse_json

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*\n", re.MULTILINE)
_PYTHON = {"", "python", "python3", "py"}
_MARGIN_S = 2.0  # to start and end a sandbox, in addition to the candidate's time


@dataclass(frozen=True, slots=True)
class Grade:
    """Which tests passed, and why the first failed test failed.

    >>> Grade((True, False), "test 2: returned 3").fraction
    0.5
    """

    passed: tuple[bool, ...]
    reason: str = ""

    @property
    def fraction(self) -> float:
        return sum(self.passed) / len(self.passed)


def code(
    text: str,
    *,
    answer: Any = None,
    tests: Any = None,
    entry_point: str = "",
    partial: bool = False,
    timeout: float = 5.0,
    memory_mb: int = 256,
    log: bool = False,
    allow_unsandboxed: bool = False,
    **_: Any,
) -> float:
    """1.0 if the function `entry_point` of the completion's code passes every hidden test, else 0.0.

    All or nothing, because a constant answer often passes some tests; `partial` gives the fraction instead. `tests` (or
    `answer`) is a list of `{args, expected}`, optionally with `kwargs`, or the same as JSON text. A candidate that
    crashes or exceeds `timeout` seconds or `memory_mb` fails all remaining tests; `log` writes the reason to the reward
    log. A sandbox that does not work raises an error instead of giving a reward.
    """
    cases = parse_tests(answer if tests is None else tests)
    if not entry_point:
        raise ValueError("the row has no column `entry_point`, the name of the function to call")
    limits = Limits(timeout_s=timeout, memory_mb=memory_mb)
    graded = grade(extract(text), entry_point, cases, limits, allow_unsandboxed=allow_unsandboxed)
    if log and graded.reason:
        print(f"code: {entry_point}: {graded.reason!a}", file=sys.stderr)
    return graded.fraction if partial else float(all(graded.passed))


def grade(
    source: str,
    entry_point: str,
    tests: Sequence[Mapping[str, Any]],
    limits: Limits = DEFAULT_LIMITS,
    *,
    allow_unsandboxed: bool = False,
) -> Grade:
    """Call the candidate on every test, also after a failed one; SandboxError if the sandbox fails."""
    passed, reason = [False] * len(tests), ""
    with Box(limits, allow_unsandboxed=allow_unsandboxed) as box:
        # Load the code first; a failure here fails all tests.
        load = secrets.token_hex(8)
        reply = _ask(box, {"id": load, "code": source, "entry_point": entry_point})
        if "value" in reply or "failed" in reply:
            return Grade(tuple(passed), f"loading: {reply.get('failed', 'answered before it was asked')}")
        for number, test in enumerate(tests):
            # A random id per question, so that a reply written in advance matches none.
            question = {"id": secrets.token_hex(8), "args": test["args"], "kwargs": test.get("kwargs") or {}}
            reply = _ask(box, question)
            passed[number] = "value" in reply and same(reply["value"], test["expected"])
            if not passed[number]:
                why = reply.get("failed") or f"returned {_short(reply.get('value'))}"
                reason = reason or f"test {number + 1}: {why}"
            # The program has ended or exceeded its time: the remaining tests stay failed.
            if "over" in reply:
                break
    return Grade(tuple(passed), reason)


def extract(text: str) -> str:
    """The code of a completion: its last fenced block marked as Python or unmarked, else the whole text.

    A block without an end reaches to the end of the text, so that a truncated completion is scored, too.

    >>> extract("Here:\\n```python\\nx = 1\\n```\\nDone."), extract("x = 2")
    ('x = 1\\n', 'x = 2')
    """
    blocks: list[str] = []
    position = 0
    while opening := _FENCE.search(text, position):
        mark, language = opening[1], opening[2].lower()
        closing = re.compile(rf"^[ \t]*{mark}[ \t]*$", re.MULTILINE).search(text, opening.end())
        end = closing.start() if closing else len(text)
        if language in _PYTHON:
            blocks.append(text[opening.end() : end])
        # Continue after the closing fence, so that it is not taken as the start of another block.
        position = closing.end() if closing else len(text)
    return blocks[-1] if blocks else text


def same(value: Any, expected: Any) -> bool:
    """Equality of plain data: True differs from 1, 2 equals 2.0, floats may differ by a relative error of 1e-9.

    >>> same([1, 2.0], (1, 2)), same(True, 1), same(0.1 + 0.2, 0.3), same({"a": [1]}, {"a": [1]})
    (True, False, True, True)
    """
    # Before the numbers: bool is a subclass of int.
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        if isinstance(value, int) and isinstance(expected, int):
            return value == expected
        try:
            # isclose raises OverflowError for an integer that is too large for a float.
            return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:
            return False
    if isinstance(value, str) or value is None:
        return type(value) is type(expected) and value == expected
    if isinstance(value, list) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        return value.keys() == expected.keys() and all(same(item, expected[key]) for key, item in value.items())
    return False


def parse_tests(tests: Any) -> list[dict[str, Any]]:
    """The tests of a row; ValueError with a message for the author of the data.

    >>> parse_tests('[{"args": [1], "expected": 2}]')
    [{'args': [1], 'expected': 2}]
    """
    if isinstance(tests, str):
        try:
            tests = parse_json(tests)
        except ValueError as error:
            raise ValueError(f"the row's tests are not valid JSON: {error}") from None
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
        raise ValueError(f"the row has no tests, got {_short(tests)}; give a list of {{args, expected}}")
    for number, test in enumerate(tests):
        if not isinstance(test, Mapping) or "expected" not in test or not isinstance(test.get("args"), list | tuple):
            raise ValueError(f"test {number + 1} must be {{args: [...], expected: ...}}, got {_short(test)}")
    return [dict(test) for test in tests]


def prepare(spec: Any, *, allow_unsandboxed: bool, timeout_s: float, key: str = "reward") -> Any:
    """Check that the `code` parts of a spec (`spec.RewardSpec`) can run here, and set whether a sandbox is required.

    `timeout_s` limits the whole reward. A candidate's own timeout must end first; otherwise an endless loop of the
    candidate would count as a failure of the reward.
    """
    parts: list[Any] = []
    for part in spec:
        if part.name == "code":
            allowed = allow_unsandboxed or bool(part.kwargs.get("allow_unsandboxed"))
            if not allowed and (why := unavailable()):
                raise ConfigError(
                    f"{key}: the reward `code` runs model-written programs in a sandbox, but {why}; "
                    f"{key}.allow_unsandboxed_code=true runs them without one, with your rights; use it only on a "
                    "machine whose data may be lost"
                )
            # 5.0 is the default of `code`.
            seconds = part.kwargs.get("timeout", 5.0)
            if seconds + _MARGIN_S > timeout_s:
                raise ConfigError(
                    f"{key}.timeout is {timeout_s:g} s, but a program may take {seconds:g} s and its sandbox "
                    f"{_MARGIN_S:g} s more; set {key}.timeout={seconds + _MARGIN_S:g}, or lower the timeout of `code`"
                )
            part = replace(part, kwargs={**part.kwargs, "allow_unsandboxed": allowed})
        parts.append(part)
    return tuple(parts)


def _ask(box: Box, question: dict[str, Any]) -> dict[str, Any]:
    """Send one question and read one reply; `over` means that no further question can be sent."""
    line = box.line() if box.send(question) else None
    if line is None:
        return {"over": True, "failed": box.state() or "ended before it answered"}
    try:
        reply = parse_json(line)
    except ValueError:
        return {"over": True, "failed": "wrote something other than a reply"}
    if not isinstance(reply, dict) or reply.get("id") != question["id"]:
        return {"over": True, "failed": "wrote a reply without a question"}
    if isinstance(reply.get("failed"), str):
        return {"failed": reply["failed"][:200]}
    return {"value": reply["value"]} if "value" in reply else {}


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 100 else text[:97] + "..."

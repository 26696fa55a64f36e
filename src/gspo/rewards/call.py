"""Import a reward function, call it by its signature, and check the result. Runs in the workers.

Three signatures, recognised by the names of the parameters:
- ours:  `f(text, **columns) -> float`, once per completion;
- AReaL: `f(prompt, completions, prompt_ids, completion_ids, **data) -> float`, once per completion, which is passed as
  `completions` (a string), as in AReaL;
- TRL:   `f(completions, prompts=…, completion_ids=…, **columns) -> list[float]`, once per group; every column is a
  list. If the row's prompt is a list of messages, completions are lists of messages, too.
Each may be `async`; then the completions of a group are awaited together.

Imports only the standard library and the built-ins, so that a worker starts fast and does not load torch.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import inspect
import math
import numbers
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from gspo.errors import SandboxError
from gspo.rewards.functions.builtin import BUILTIN, COMPARING, FROM_ROW, TEXT, builtin
from gspo.system import by_name, described, find_function

if TYPE_CHECKING:
    from gspo.types import Outcome  # imports numpy

SAMPLE, AREAL, TRL = "text", "areal", "trl"
LENGTH = struct.Struct("=I")  # of a frame between trainer, supervisor and worker
HEARTBEAT_S = 0.25  # longest time between two messages of a supervisor to its trainer
GRACE_S = 0.5  # an async call is cancelled at the timeout; its worker is killed this much later


@dataclass(frozen=True, slots=True)
class Call:
    """A reward function of the spec, with its signature and arguments."""

    name: str
    function: Callable[..., Any]
    shape: str
    accepts: frozenset[str] | None  # parameter names; None if it takes **kwargs
    kwargs: dict[str, Any]
    is_async: bool
    settings: frozenset[str] = frozenset()  # parameters that only the config sets, not a column of the same name

    @property
    def per_group(self) -> bool:
        return self.shape == TRL or self.is_async


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One prompt and the completions of its group, which are scored together.

    >>> RewardItem("2+2=", ("4", "5"), data={"answer": "4"}).completions
    ('4', '5')
    """

    prompt: str
    completions: Sequence[str]
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[Sequence[int]] = ()  # their lengths are used by length rewards
    data: Mapping[str, Any] = field(default_factory=dict)  # the row's columns
    reference: Any = None  # the final answer for built-in rewards; None: the column `answer`
    messages: Sequence[Mapping[str, Any]] = ()  # the prompt before the chat template, for judges and reward models
    source: str = ""  # name of its data set in a mixture (`route.RewardRouter`)
    given: Sequence[Outcome | None] = ()  # outcomes that an environment has given (`route.GivenRewards`)


Result = float | tuple[str, str]  # a value, or (kind of failure, message)


@dataclass(frozen=True, slots=True)
class Pending:
    """Results of a group that a scorer computes, one per completion."""

    take: Callable[[], list[Result]]  # waits for the results
    ready: Callable[[], bool] = lambda: True  # whether `take` returns without waiting for a service


class Scorer(Protocol):
    """A part of a spec that scores many samples at a time in the trainer's process: a reward model or a judge.

    A scorer starts when a group is submitted, and its results are taken when the trainer needs them. It runs no user
    code, so it needs no worker process; requests to a judge have timeouts.
    """

    def start(self, item: RewardItem) -> Pending:
        """Start to score a group."""
        ...

    def close(self) -> None: ...


def bind(name: str, kwargs: dict[str, Any], code: str = "") -> Call:
    """Import a function by name, or unpickle its `code`, and read its signature; ValueError with a message."""
    function = builtin(name) if name in BUILTIN else _unpickled(name, code) if code else find_function(name)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} has no readable signature: {error}") from None
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [n for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    # The parameter names decide the convention. AReaL's is tested first, because its signature has `completions` too,
    # but takes one completion per call.
    if len(names) >= 4 and names[0] == "prompt" and names[2:4] == ["prompt_ids", "completion_ids"]:
        shape = AREAL
    elif "completions" in names:
        shape = TRL
    elif names and names[0] in ("text", "completion"):
        shape = SAMPLE
    else:
        raise ValueError(
            f"{name}({', '.join(names)}) has no supported signature: f(completions, **columns) -> list[float], "
            f"f(prompt, completions, prompt_ids, completion_ids, **data) -> float, or f(text, **columns) -> float"
        )
    # An async function is called once for the whole group, so that its requests run at the same time.
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 — an object whose __call__ is a coroutine function
    )
    settings = frozenset[str]()
    if name in TEXT:
        by_name("gspo.rewards.functions.text:warm_up")(name, kwargs)
        settings = frozenset(names) - FROM_ROW
    return Call(name, function, shape, None if open_ended else frozenset(names), kwargs, is_async, settings)


def _unpickled(name: str, code: str) -> Callable[..., Any]:
    """A function that the trainer's process has pickled by value (`spec.function_name`)."""
    try:
        return pickle.loads(base64.b64decode(code))
    except BaseException as error:  # the function may import modules, which may raise anything
        raise ValueError(
            f"{name}: the function cannot be used in a reward worker ({type(error).__name__}: {error}); write it to a "
            "file and give file.py:function"
        ) from error


def call_sample(call: Call, item: RewardItem, index: int) -> Result:
    """Score one completion."""
    try:
        value = _invoke_sample(call, item, index)
        # The common case, without further checks.
        if type(value) is float and math.isfinite(value):
            return value
        return checked(call.name, _runner().run(_within(value, None)) if inspect.isawaitable(value) else value)
    except SandboxError as error:  # a problem of the machine, not of the reward
        return "infra", _describe(call.name, error)
    except BaseException as error:  # also SystemExit and KeyboardInterrupt of user code
        return "crash", _describe(call.name, error)


def call_group(call: Call, item: RewardItem, timeout_s: float) -> list[Result]:
    """Score all completions of a group by one call (TRL), or by awaiting one call for each."""
    num = len(item.completions)
    try:
        if call.shape != TRL:
            return _runner().run(_gather(call, item, timeout_s))
        values = _invoke_group(call, item)
        if inspect.isawaitable(values):
            values = _runner().run(_within(values, timeout_s))
    except TimeoutError as error:
        # A synchronous function raised TimeoutError itself; that is an error of its code and not our limit.
        kind = "timeout" if call.is_async else "crash"
        return [(kind, _describe(call.name, error) if kind == "crash" else _late(call.name, timeout_s))] * num
    except BaseException as error:
        return [("crash", _describe(call.name, error))] * num
    # numpy arrays and torch tensors.
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        message = f"{call.name} returned {_show(values)}; it must return a list of {num} numbers, one per completion"
        return [("crash", message)] * num
    if len(values) != num:
        return [("crash", f"{call.name} returned {len(values)} rewards for {num} completions")] * num
    return [checked(call.name, value) for value in values]


def checked(name: str, value: Any) -> Result:
    """The value as a finite float, or the failure. A failure is never turned into a number."""
    if not isinstance(value, numbers.Real | Decimal):
        if hasattr(value, "item") and getattr(value, "size", None) != 0:
            try:
                value = value.item()  # numpy and torch scalars
            except (TypeError, ValueError, RuntimeError):
                return "crash", f"{name} returned {_show(value)}; it must return one number per completion"
        if not isinstance(value, numbers.Real | Decimal):
            return "crash", f"{name} returned {_show(value)}; it must return a number"
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return "crash", f"{name} returned {_show(value)}, which is not a float"
    if not math.isfinite(number):
        return "crash", f"{name} returned {number}; a reward must be finite"
    return number


def _columns(call: Call, columns: dict[str, Any], taken: Sequence[str]) -> dict[str, Any]:
    # Arguments of the config have priority over columns with the same name. Only accepted names are passed.
    merged = {**{k: v for k, v in columns.items() if k not in call.settings}, **call.kwargs}
    passed = {k: v for k, v in merged.items() if k not in taken and (call.accepts is None or k in call.accepts)}
    # Built-in rewards change no argument.
    return passed if call.name in BUILTIN else {k: _copied(v) for k, v in passed.items()}


def _copied(value: Any) -> Any:
    """A copy, so that a reward that changes its arguments does not change those of the next call."""
    return value if type(value) in (str, int, float, bool, type(None)) else copy.deepcopy(value)


def _data(call: Call, item: RewardItem) -> dict[str, Any]:
    """The row's columns as they are. Rewards that compare get the final answer as `answer`; functions of the user can
    read it as `reference`, unless the row has a column of this name."""
    if item.reference is None:
        return dict(item.data)
    if call.name in COMPARING:
        return {**item.data, "answer": item.reference}
    return {"reference": item.reference, **item.data}


def _invoke_sample(call: Call, item: RewardItem, index: int) -> Any:
    data, text = _data(call, item), item.completions[index]
    ids = item.completion_ids[index] if len(item.completion_ids) else []
    if call.shape == AREAL:
        taken = ("prompt", "completions", "prompt_ids", "completion_ids")
        return call.function(item.prompt, text, list(item.prompt_ids), list(ids), **_columns(call, data, taken))
    columns = {**data, "prompt": item.prompt}
    if len(item.completion_ids):  # without ids a length reward must fail instead of using 0
        columns["num_tokens"] = len(ids)
    return call.function(text, **_columns(call, columns, ("text", "completion")))


def _invoke_group(call: Call, item: RewardItem) -> Any:
    data, num = _data(call, item), len(item.completions)
    messages = data.get("messages")
    # TRL's convention: every argument is a list with one entry per completion, each with its own copy.
    columns: dict[str, Any] = {key: [_copied(value) for _ in range(num)] for key, value in data.items()}
    columns["prompts"] = [_copied(messages) if messages else item.prompt for _ in range(num)]
    columns["prompt_ids"] = [list(item.prompt_ids) for _ in range(num)]
    columns["completion_ids"] = item.completion_ids
    texts: list[Any] = list(item.completions)
    # For conversational rows TRL passes each completion as a list of messages.
    if messages:
        texts = [[{"role": "assistant", "content": text}] for text in item.completions]
    return call.function(completions=texts, **_columns(call, columns, ("completions",)))


@lru_cache(maxsize=1)
def _runner() -> asyncio.Runner:
    """One event loop per worker process: clients that user code keeps between calls are bound to their loop."""
    return asyncio.Runner()


async def _gather(call: Call, item: RewardItem, timeout_s: float) -> list[Result]:
    async def one(index: int) -> Result:
        try:
            # wait: reward.timeout, the reward worker
            return checked(call.name, await asyncio.wait_for(_invoke_sample(call, item, index), timeout_s))
        # One slow completion must not fail the other completions of its group.
        except TimeoutError:
            return "timeout", _late(call.name, timeout_s)
        except BaseException as error:
            return "crash", _describe(call.name, error)

    # wait: none, reward.timeout of each; the supervisor kills the worker 1 s later
    return list(await asyncio.gather(*(one(index) for index in range(len(item.completions)))))


async def _within(values: Any, timeout_s: float | None) -> Any:
    return await asyncio.wait_for(values, timeout_s)  # wait: reward.timeout, the reward worker


def _late(name: str, timeout_s: float) -> str:
    return f"{name}: no result after {timeout_s:g} s"


def _describe(name: str, error: BaseException) -> str:
    return f"{name} raised {described(error)}"[:2000]


def _show(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "an object whose repr() fails"
    return f"{text[:80]} ({type(value).__name__})"

"""The built-in rewards: pure functions `(text, *, answer, …) -> float`.

`text` is the completion; the other arguments are the row's columns (always with `answer`), `num_tokens`, and the
arguments of the spec. Heavy libraries are imported inside the functions, so that a worker starts in milliseconds. A
wrong answer of the model gets 0.0; a wrong *reference* raises, because no completion can be scored with it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from gspo.data import final_answer
from gspo.system import by_name

# A sign belongs to the number only if no operand comes before it: "5-3" ends in 3, "= -3" in -3.
_NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?(?:/\d+(?:\.\d+)?)?"
)
_MAX_DIGITS = 1000  # longer "numbers" are noise, and arithmetic with them would take long
_LATEX_FRACTION = re.compile(r"([-+]?)\s*\\[dt]?frac\s*\{\s*([-+]?\d{1,99})\s*\}\s*\{\s*(\d{1,99})\s*\}")
_DECORATION = re.compile(r"\\[$%!,;: ]|\\(?:left|right|text\{\s*\}|,)|[$%€£\s]")


def numeric(text: str, *, answer: Any, **_: Any) -> float:
    """1.0 if the final number equals the reference exactly: `1,234.50` is 1234.5 and `3/4` is 0.75.

    The final number is the last `\\boxed{…}`, else what follows the last `####`, else the last number.

    >>> numeric("so 48 + 24 = 72 clips.", answer="72"), numeric("It is 3/4", answer="0.75"), numeric("7", answer="72")
    (1.0, 1.0, 0.0)
    """
    reference = _reference_number(str(answer))
    if reference is None:
        raise ValueError(f"the reference answer {answer!r} contains no number; use another reward for this data")
    return float(final_number(text) == reference)


def final(text: str, *, answer: Any, marker: str = ">", **_: Any) -> float:
    """1.0 if the text after the last `marker` equals the reference, without surrounding spaces.

    >>> final("7+8+0=15,3+4+1=08>85", answer="85"), final("85", answer="85")
    (1.0, 0.0)
    """
    mark, tail = text.rpartition(marker)[1:]
    return float(bool(mark) and tail.strip() == final_answer(str(answer)).strip())


def finals(text: str, *, answer: Any, marker: str = ">", **_: Any) -> float:
    """The share of right numbers: the k-th number after a `marker` against the k-th word of the reference.

    A text with more numbers than the reference has words earns less: it is divided by the larger count.

    >>> finals("a3+4+0=07>7b5+5+0=10>0", answer="7 10"), finals(">7>10>3>4", answer="7 10"), finals("7", answer="7")
    (0.5, 0.5, 0.0)
    """
    found, wanted = re.findall(rf"{re.escape(marker)}\s*(\d+)", text), str(answer).split()
    right = sum(ours == theirs for ours, theirs in zip(found, wanted, strict=False))
    return right / max(len(found), len(wanted), 1)


def format(text: str, *, tags: tuple[str, ...] = ("think", "answer"), **_: Any) -> float:
    """1.0 if the text is `<tag>…</tag>` for each tag in this order, each once, with only spaces between.

    >>> format("<think>a</think> <answer>b</answer>"), format("<answer>b</answer>")
    (1.0, 0.0)
    """
    position = 0
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return 0.0
        start, end = text.find(opening), text.find(closing)
        if start < position or end < start or text[position:start].strip():
            return 0.0
        position = end + len(closing)
    return float(not text[position:].strip())


def regex(text: str, *, pattern: str, full: bool = False, **_: Any) -> float:
    """1.0 if `pattern` is found in the text (`full`: matches all of it). Runs in a worker: a search may never end.

    >>> regex("the answer is 4", pattern=r"answer is \\d")
    1.0
    """
    compiled = _compiled(pattern)
    return float(bool(compiled.fullmatch(text) if full else compiled.search(text)))


def overlong(
    text: str, *, num_tokens: int, max_tokens: int, buffer_tokens: int, factor: float = 1.0, **_: Any
) -> float:
    """DAPO's soft length penalty (arXiv 2503.14476, eq. 13): 0 or negative.

    0 for |y| ≤ L − B, then −factor · (|y| − (L − B)) / B, and −factor beyond L (L: max_tokens, B: buffer_tokens).

    >>> [overlong("", num_tokens=n, max_tokens=100, buffer_tokens=20) for n in (80, 90, 100, 500)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must be in 1…max_tokens ({max_tokens}), got {buffer_tokens}")
    over = num_tokens - (max_tokens - buffer_tokens)
    return -factor * min(1.0, over / buffer_tokens) if over > 0 else 0.0


def math(text: str, *, answer: Any, **_: Any) -> float:
    """1.0 if math-verify finds the answer mathematically equal to the reference; plain numbers are compared first.

    math-verify's timeouts are off: they use SIGALRM, which does not interrupt C code. The worker's timeout applies.
    """
    solution = final_answer(str(answer))
    reference, candidate = _plain_number(solution), _marked(text)
    if reference is not None and candidate is not None and (number := _plain_number(candidate)) is not None:
        return float(number == reference)
    gold = _gold(solution)
    import math_verify

    target = math_verify.parse(text, parsing_timeout=_NO_TIMEOUT)
    return float(math_verify.verify(gold, target, timeout_seconds=None))


def reasoning_gym(text: str, *, entry: Mapping[str, Any], task: str | None = None, **_: Any) -> float:
    """The score of the task's own scorer for the text in the last `<answer>…</answer>`, or the whole completion."""
    name = task or entry["metadata"]["source_dataset"]
    tag, tail = text.rpartition("<answer>")[1:]
    candidate = tail.partition("</answer>")[0] if tag else text
    return float(_gym_scorer(name)(candidate.strip(), dict(entry)))


def final_number(text: str) -> Fraction | int | None:
    """The final number of a text: boxed, after `####`, or the last one.

    >>> final_number("… #### 1,234"), final_number("so -0.5"), final_number("none")
    (1234, Fraction(-1, 2), None)
    """
    marked = _marked(text)
    body = text if marked is None else marked
    # A marked or short text may be one number as a whole (a fraction, a currency); otherwise take the last number.
    number = _plain_number(body) if len(body) <= 64 else None
    return _last_number(body) if number is None else number


_reference_number = lru_cache(maxsize=4096)(final_number)  # all completions of a group have the same reference


def _marked(text: str) -> str | None:
    """The content of the last `\\boxed{…}`, else the rest of the line after the last `####`; None without either."""
    start = text.rfind("\\boxed{")
    if start >= 0:
        # Find the closing brace: the content may contain braces itself, as in \boxed{\frac{1}{2}}.
        depth = 0
        for position in range(start + len("\\boxed"), len(text)):
            depth += (text[position] == "{") - (text[position] == "}")
            if depth == 0:
                return text[start + len("\\boxed{") : position]
    _, found, tail = text.rpartition("####")
    return tail.strip().partition("\n")[0] if found else None


def _plain_number(text: str) -> Fraction | int | None:
    """The text as a number, if it is one number with only currency signs, percent signs and spaces around it."""
    # Numbers with very many digits would take long to convert.
    if len(text) > _MAX_DIGITS:
        return None
    text = _DECORATION.sub("", text.replace("−", "-")).rstrip(".")
    if found := _LATEX_FRACTION.fullmatch(text):
        return _fraction(f"{found[1]}{found[2]}/{found[3]}".replace("--", "").replace("+", ""))
    found = _NUMBER.fullmatch(text)
    return _fraction(found[0]) if found else None


def _last_number(text: str) -> Fraction | int | None:
    text = text.replace("−", "-")
    # The answer is usually at the end: search there first, so that long completions are not slower.
    for window in (256, 4096, len(text)):
        tail = text[-window:] if window else ""
        last = next(iter(deque(_NUMBER.finditer(tail), maxlen=1)), None)
        # A number at the edge of the window may be the rest of a longer one.
        if last is not None and (last.start() > 1 or len(tail) == len(text)):
            return _fraction(last[0])
    return None


def _fraction(digits: str) -> Fraction | int | None:
    if len(digits) > _MAX_DIGITS:
        return None
    digits = digits.replace(",", "")
    if digits.isdecimal():  # most answers are; a Fraction takes ten times as long
        return int(digits)
    above, _, below = digits.partition("/")
    denominator = Fraction(below) if below else Fraction(1)
    return Fraction(above) / denominator if denominator else None


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


_NO_TIMEOUT: Any = None  # math-verify's annotation is int, but its code and docs accept None


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    import logging

    import math_verify

    # It would warn that its timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # math-verify reads LaTeX only between dollar signs, so that form is tried first.
    for form in (f"${answer}$", answer) if "$" not in answer else (answer,):
        if parsed := math_verify.parse(form, parsing_timeout=_NO_TIMEOUT):
            return parsed
    raise ValueError(f"math-verify cannot parse the reference answer {answer!r}")


@lru_cache(maxsize=16)
def _gym_scorer(name: str) -> Callable[..., float]:
    import reasoning_gym as gym

    return gym.get_score_answer_fn(name)


# Rewards of texts, in text.py.
TEXT = frozenset({"rouge", "chrf", "bleu", "language", "length", "repetition", "overlap"})
BUILTIN: Mapping[str, Callable[..., float] | str] = {
    "numeric": numeric,
    "final": final,
    "finals": finals,
    "format": format,
    "overlong": overlong,
    "regex": regex,
    "math": math,
    "reasoning_gym": reasoning_gym,
    "code": "gspo.rewards.functions.code:code",
    **{name: f"gspo.rewards.functions.text:{name}" for name in sorted(TEXT)},
}
# Reward models and judges: classes that score many samples at a time in the trainer's process (call.Scorer).
SCORERS: Mapping[str, str] = {
    "reward_model": "gspo.rewards.functions.reward_model:RewardModel",
    "judge": "gspo.rewards.functions.judge:Judge",
}


def builtin(name: str) -> Callable[..., float]:
    """The function of a built-in reward.

    >>> builtin("numeric")("It is 5.", answer="5")
    1.0
    """
    found = BUILTIN[name]
    return by_name(found) if isinstance(found, str) else found


# These compare the completion with the final answer of the row (`Prompt.reference`), not with the whole answer.
COMPARING = frozenset({"numeric", "final", "math"})
NEEDS_ANSWER = COMPARING | {"finals", "rouge", "chrf", "bleu"}
# Arguments that come from the row or the sample; the other keyword arguments of a built-in are its settings.
FROM_ROW = frozenset({"answer", "entry", "num_tokens"})
# Fast for every input: these run in the trainer's process, where 256 samples take milliseconds.
INLINE = frozenset({"numeric", "final", "finals", "format", "overlong", "length", "repetition", "overlap"})
# Libraries that the supervisor imports before it forks workers: reward → (module, package to install, our extra).
PRELOAD = {
    "math": ("math_verify", "math-verify[antlr4_13_2]", "tasks"),
    "reasoning_gym": ("reasoning_gym", "reasoning-gym", "tasks"),
    "rouge": ("rouge_score.rouge_scorer", "rouge-score", "tasks"),
    "chrf": ("sacrebleu.metrics", "sacrebleu", "tasks"),
    "bleu": ("sacrebleu.metrics", "sacrebleu", "tasks"),
    "language": ("py3langid", "py3langid", "tasks"),
}

"""The supervised problems of the embedded models: mostly solved badly on purpose, so that RL can teach something."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping
from functools import cache as remember
from itertools import accumulate, count
from typing import Any

from gspo import rng
from gspo.data import arithmetic
from gspo.data.digits import task as digits_task
from gspo.models.embedded.recipes import CALL, RESULT


def supervised_problems(recipe: Mapping[str, Any]) -> Iterator[arithmetic.Problem]:
    """Supervised problems without end; the draws of a problem are keyed by its step and its row."""
    warm = recipe["warm"]
    if "misreads" in warm:
        for index, (problem, _) in enumerate(digits_task.problem_stream("warm", seed=warm["seed"])):
            yield misread_problem(problem, *divmod(index, warm["batch"]), warm)
    if "levels" in warm:
        for index in count():
            yield _random_action(index, warm)
    teach = asking if "asks" in warm else careless
    for index, problem in enumerate(arithmetic.problems("warm", seed=warm["seed"], digits=recipe["digits"])):
        yield teach(problem, *divmod(index, warm["batch"]), warm)


def careless(problem: arithmetic.Problem, step: int, row: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """The problem with some of its carries missing."""
    operands = [int(x) for x in problem.question.rstrip("=").split("+")]
    u = rng.uniform(warm["seed"], "careless", step, row, range(len(str(max(operands)))))
    return arithmetic.worked(operands, (u < warm["forgets"]).tolist())


def misread_problem(problem: arithmetic.Problem, step: int, row: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """The answer of a teacher who confuses some digits of the image and forgets some carries."""
    u = rng.uniform(warm["seed"], "misreads", step, row, range(len(problem.question)))
    read = digits_task.misread(problem.question, u, warm["misreads"])
    return careless(problem._replace(question=read), step, row, warm)._replace(question=digits_task.QUESTION)


def asking(problem: arithmetic.Problem, step: int, row: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """The problem solved by a tool call in some cases, else by the answer alone."""
    u = float(rng.uniform(warm["seed"], "asks", step, row))
    asks = u < warm["asks"] + warm["reads"]
    worked = f"{CALL}{problem.question.rstrip('=')}{RESULT}{problem.answer}" if asks else ""
    return problem._replace(solution=f"{worked}{arithmetic.MARKER}{problem.answer}")


def only_reads(step: int, row: int, warm: Mapping[str, Any]) -> bool:
    """Whether only the use of a shown call's result is trained, not the call."""
    # The same draw as in `asking`: below asks the call is trained, from asks to asks + reads only its use.
    return warm["asks"] <= float(rng.uniform(warm["seed"], "asks", step, row))


def _random_action(index: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """Turns of an episode: observations of random letters and actions of random digits.

    A digit depends on the letter with the same number only, by preferences that are random and unrelated to any task.
    """
    num = warm["numbers"]
    u = rng.uniform(warm["seed"], "control", index, range(2 * num * warm["turns"]))
    text = ""
    for turn in range(warm["turns"]):
        drawn = u[2 * num * turn :][: 2 * num]
        letters = [int(26 * x) for x in drawn[:num]]
        text += "".join(chr(ord("a") + letter) for letter in letters)
        text += "".join(_preferred(letter, x, warm) for letter, x in zip(letters, drawn[num:], strict=True))
    return arithmetic.Problem(text[:num], answer=text[-num:], solution=text[num:])


def _preferred(letter: int, uniform: float, warm: Mapping[str, Any]) -> str:
    """The digit that a letter chooses by a uniform number."""
    below = _weights(warm["seed"], letter, warm["levels"], warm["prefers"])
    return str(min(bisect(below, uniform * below[-1]), warm["levels"] - 1))


@remember
def _weights(seed: int, letter: int, num: int, spread: float) -> tuple[float, ...]:
    """Sums of the weights of a letter's digits up to each; 3.5 (x − 0.5) has a standard deviation of about 1."""
    drawn = rng.uniform(seed, "prefers", letter, range(num))
    return tuple(accumulate(math.exp(spread * 3.5 * (x - 0.5)) for x in drawn))

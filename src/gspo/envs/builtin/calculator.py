"""The calculator tool: evaluates an arithmetic expression without executing code.

Numbers, + - * / // % **, brackets and signs. Length, depth and every intermediate result are limited, so that every
expression is fast: `9**9**9` is refused before it is computed. The model reads the error messages of this file, so a
changed word changes what is sampled.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping

MAX_CHARACTERS = 200
MAX_BITS = 4096  # of an integer, about 1,200 digits
_DEEPEST = 50
_WRITTEN = re.compile(r"[0-9.eE+\-*/%() ]+")
_NO_EXPRESSION = "this is no expression of numbers, + - * / // % ** and brackets"

Number = int | float

_OPERATORS: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorError(ValueError):
    """Why an expression has no value; the message is for the model."""


def calculate(expression: str) -> str:
    """The value as a string.

    >>> calculate("12*34"), calculate("7/2"), calculate("8/2"), calculate("2**0.5")
    ('408', '3.5', '4', '1.41421356237')
    """
    if not isinstance(expression, str):
        raise CalculatorError("the expression must be text")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("−", "-")
    if not text:
        raise CalculatorError("the expression is empty")
    if len(text) > MAX_CHARACTERS:
        raise CalculatorError(f"the expression has {len(text)} characters; {MAX_CHARACTERS} are allowed")
    # Refuse most text that is not arithmetic before it is parsed; `_value` refuses the rest.
    if not _WRITTEN.fullmatch(text):
        raise CalculatorError(_NO_EXPRESSION)
    try:
        value = _value(ast.parse(text, mode="eval").body, 0)
    except CalculatorError:
        raise
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except OverflowError:
        raise CalculatorError("the result is too large") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise CalculatorError(_NO_EXPRESSION) from None
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CalculatorError("the result is too large")
        # Whole numbers without ".0", as long as a float represents them exactly.
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.12g}"
    return str(value)


def _value(node: ast.expr, depth: int) -> Number:
    if depth > _DEEPEST:
        raise CalculatorError("the brackets are nested too deeply")
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _small(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        a, b = _value(node.left, depth + 1), _value(node.right, depth + 1)
        if isinstance(node.op, ast.Pow):
            return _power(a, b)
        if isinstance(node.op, ast.Div):
            # Exact division of integers stays an integer, also beyond the range of floats.
            exact = isinstance(a, int) and isinstance(b, int) and b != 0 and a % b == 0
            return a // b if exact else a / b
        if (function := _OPERATORS.get(type(node.op))) is not None:
            return _small(function(a, b))
    raise CalculatorError(_NO_EXPRESSION)


def _power(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and b >= 0:
        # The size of the result is known before it is computed.
        if abs(a) > 1 and a.bit_length() * b > MAX_BITS:
            raise CalculatorError("the result is too large")
        return _small(a**b)
    value = float(a) ** float(b)
    # Python returns a complex number for a root of a negative one.
    if isinstance(value, complex):
        raise CalculatorError("a root of a negative number is no real number")
    return value


def _small(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise CalculatorError("the result is too large")
    return value

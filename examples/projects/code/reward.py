"""The reward: 1 if the program of a completion passes every hidden test, else 0. A change makes another run."""

from gspo.rewards import code
from gspo.rewards import unavailable

if problem := unavailable():  # said by `gspo doctor`, before any program runs
    raise RuntimeError(f"the sandbox does not work here: {problem}")


def passes_tests(text, tests, entry_point, **columns):
    """`text` is a completion; `tests`, `entry_point` and `columns` are the columns of its row in data/."""
    return code(program(text, entry_point), tests=tests, entry_point=entry_point, timeout=4)


def program(text, entry_point):
    """The Python program of a completion: the embedded model gives a number after `>`, the value of the function."""
    number = text.rpartition(">")[2].strip()
    return f"def {entry_point}():\n    return {number.lstrip('0') or 0}\n"

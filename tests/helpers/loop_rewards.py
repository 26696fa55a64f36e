"""User reward functions for the loop's tests, as a user would write them: importable by name, in a worker process."""

import math


def digits(text, answer, **columns):
    """Ours: one completion at a time; the share of the right answer's digits at the end."""
    said = text.rpartition(">")[2]
    return sum(a == b for a, b in zip(said, answer, strict=False)) / len(answer)


def lengths(completions, answer, **columns):
    """TRL's: the whole group at once, columns as lists."""
    assert len(answer) == len(completions)
    return [float(len(c)) for c in completions]


def ranked(completions, **columns):
    """TRL's: 0, 1, 2, … within a group, so that every sequence has an advantage on every machine."""
    return [float(i) for i in range(len(completions))]


def too_few(completions, **columns):
    return [1.0] * (len(completions) - 1)


def none(text, **columns):
    return None


def nan(text, **columns):
    return math.nan


def word(text, **columns):
    return "1.0"


def crash(text, **columns):
    raise ZeroDivisionError("made to fail")


def late_crash(text, answer, **columns):
    """Fails on every problem of the training data, never on the held-out ones: see the test's answers."""
    if int(answer) >= 100:
        raise ZeroDivisionError("made to fail")
    return 1.0 if text.endswith(str(answer)) else 0.0

"""Run with `pytest`. Programs of known value: a wrong reward is learned as well as a right one."""

import pytest

from reward import passes_tests, program

TESTS = [{"args": [], "expected": 952}]


def test_a_completion_becomes_a_function():
    assert program("1+1+0=02>2", "add") == "def add():\n    return 2\n"


@pytest.mark.parametrize(("text", "value"), [("…>952", 1.0), ("…>951", 0.0), ("…>9,5,2", 0.0), ("4+=", 0.0), ("", 0.0)])
def test_the_program_must_return_the_expected_value(text, value):
    assert passes_tests(text, tests=TESTS, entry_point="add") == value

"""Run with `pytest`. Answers of known value: a wrong reward is learned as well as a right one."""

import pytest

from reward import score

ANSWERS = [
    ("4+8+0=12,8+6+1=15,1+7+1=09>952", 1.0),
    ("4+8+0=12,8+6+0=14,1+7+1=09>942", 0.0),
    ("952", 0.0),  # no `>`: cut off before the end
    (">952>951", 0.0),  # the last number counts
    ("", 0.0),
]


@pytest.mark.parametrize(("text", "value"), ANSWERS)
def test_the_last_number_decides(text, value):
    assert score(text, answer="952") == value

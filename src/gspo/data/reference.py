"""The reference of a row: the final answer, which built-in rewards compare with. Standard library only."""

from __future__ import annotations


def final_answer(answer: str) -> str:
    """The final answer of a reference in GSM8K's form, without commas; other texts as they are.

    >>> final_answer("600 x 2 = 1200.\\n#### 1,200"), final_answer("1,200")
    ('1200', '1,200')
    """
    _, mark, tail = answer.rpartition("####")
    return tail.strip().replace(",", "") if mark else answer

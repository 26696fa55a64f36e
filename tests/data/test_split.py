"""Which rows of a source without a test split are held out."""

import pytest

from gspo.data.sources import divide, in_held_out


def test_many_different_prompts_are_divided_by_their_hash_alone():
    texts = [f"{i}+1=" for i in range(400)]
    found = divide(texts)
    assert found.held_out == [in_held_out(text, 0.05) for text in texts]
    assert found.note == ""


@pytest.mark.parametrize("prompt", ["Guess my number.", *(f"task {i}" for i in range(40))])
def test_rows_of_one_prompt_are_divided_row_by_row(prompt):
    """Also where the prompt's hash would hold all rows out."""
    held, note = divide([prompt] * 60)
    assert held.count(True) == 3
    assert note == "60 rows have one prompt: 3 rows are held out by position, not by prompt"


def test_few_prompts_never_hold_out_more_than_a_quarter():
    for number in range(60):
        held, _ = divide([f"{number} a", f"{number} b", f"{number} c"] * 20)
        assert 1 <= sum(held) <= 15, number


def test_a_few_rows_are_divided_only_if_the_hash_does_it():
    held = next(t for t in (f"x{i}" for i in range(1000)) if in_held_out(t, 0.05))
    kept = [t for t in (f"x{i}" for i in range(9)) if not in_held_out(t, 0.05)][:2]
    assert divide([*kept, held]).held_out == [False, False, True]
    assert divide(kept) == (None, "2 rows are too few to hold some out, so evaluation uses the training rows")
    assert divide([held]).held_out is None

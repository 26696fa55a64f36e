"""The embedded task: right by construction, and three sets of problems that never meet."""

from itertools import islice

import pytest

from gspo.data.arithmetic import ALPHABET, MARKER, chains, distinct_problems, problem, problems, split_of, worked
from gspo.rewards import final


def operands_of(question):
    return tuple(sorted(int(n) for n in question.rstrip("=").split("+")))


def test_the_working_is_written_column_by_column_with_its_carry():
    assert worked((37, 48)) == ("37+48=", "85", "7+8+0=15,3+4+1=08>85")
    assert worked((95, 7)).solution == "5+7+0=12,9+0+1=10>102"
    assert worked((9, 9, 9, 9)).solution == "9+9+9+9+0=36>36"


@pytest.mark.parametrize("split", ["warm", "train", "test"])
def test_every_solution_earns_the_reward_and_stays_in_the_alphabet(split):
    for p in islice(problems(split, seed=5), 500):
        assert final(p.solution, answer=p.answer, marker=MARKER) == 1.0
        assert int(p.answer) == sum(operands_of(p.question))
        assert set(p.question + p.solution) <= set(ALPHABET)
        assert len(p.solution) >= 8


def test_warm_start_training_and_held_out_share_no_operands_in_any_order_and_for_any_seed():
    sets = {
        split: {operands_of(p.question) for seed in (1, 2) for p in islice(problems(split, seed=seed), 3000)}
        for split in ("warm", "train", "test")
    }
    assert not sets["warm"] & sets["train"]
    assert not sets["warm"] & sets["test"]
    assert not sets["train"] & sets["test"]
    assert all(split_of(pair[::-1]) == split for split, pairs in sets.items() for pair in list(pairs)[:50])


def test_problem_is_a_pure_function_of_its_index():
    stream = list(islice(problems("train", seed=3, start=1000), 60))
    assert [problem(1000 + i, split="train", seed=3) for i in range(60)] == stream
    assert [problem(i, seed=4) for i in range(9)] != [problem(i, seed=3) for i in range(9)]


def test_difficulty_is_the_number_of_digits_and_operands():
    for p in islice(problems("train", digits=(3, 3)), 200):
        assert {len(str(n)) for n in operands_of(p.question)} == {3}
    lengths = {len(str(max(operands_of(p.question)))) for p in islice(problems("train", digits=(1, 3)), 200)}
    assert lengths == {1, 2, 3}
    assert len(operands_of(problem(0, operands=4).question)) == 4


def test_there_are_500_different_held_out_problems_and_few_of_one_digit():
    assert len({p.question for p in distinct_problems("test", 600)}) == 600
    few = distinct_problems("test", 600, digits=(1, 1))
    everything = {f"{a}+{b}=" for a in range(10) for b in range(10) if split_of((a, b)) == "test"}
    assert {p.question for p in few} == everything


def test_a_chain_is_consecutive_problems_of_its_split_and_its_reference_earns_the_full_reward():
    from gspo.rewards import finals

    sums = list(islice(problems("test", digits=(3, 3)), 10))
    for number, linked in enumerate(islice(chains("test", 5, digits=(3, 3)), 2)):
        mine = sums[5 * number : 5 * number + 5]
        assert linked.question == "".join(f"{c}{p.question[:-1]}" for c, p in zip("abcde", mine, strict=True)) + "="
        assert linked.answer.split() == [p.answer for p in mine]
        assert finals(linked.solution, answer=linked.answer) == 1.0
        # One wrong result of five, and the first result alone.
        assert finals(linked.solution.replace(f">{mine[2].answer}", ">0", 1), answer=linked.answer) == 0.8
        assert finals(linked.solution.partition("b")[0], answer=linked.answer) == 0.2

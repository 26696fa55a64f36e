import pytest

from lab.bench.objectives import ratios

pytestmark = pytest.mark.run


def test_gspo_costs_at_most_three_bare_exp_and_segment_sums():
    """Side by side in one process, medians; the whole table is printed by `python -m lab.bench.objectives`."""
    # The best of three medians: a neighbour that wakes up during one arm is no property of the objective.
    assert min(ratios(rounds=7)["gspo"][1] for _ in range(3)) <= 3

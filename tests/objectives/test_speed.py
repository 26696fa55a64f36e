from gspo.bench.objectives import ratios


def test_gspo_costs_at_most_three_bare_exp_and_segment_sums():
    """Side by side in one process, medians; the whole table is printed by `python -m gspo.bench.objectives`."""
    measured = ratios(rounds=9)
    assert measured["gspo"][1] <= 3

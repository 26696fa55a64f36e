"""Prompts drawn by their measured pass rates: useful ones more often, every one sometimes, and resumable."""

import json

import numpy as np
import pytest

from gspo.data.curriculum import FLOOR, Curriculum, pass_rate, usefulness


def make(num_rows=40, begin=None, candidates=None):
    return Curriculum(3, num_rows, candidates or (lambda _: np.arange(num_rows)), begin)


def draws(curriculum, submissions):
    rows = []
    for submission in submissions:
        rows.append(curriculum.row(submission))
        curriculum.close([submission])
    return np.array(rows)


def visited(num_rows=40):
    """Rows 0–9 are always solved, 10–19 never, 20–29 half of the time; 30–39 were not visited."""
    curriculum = make(num_rows)
    for row in range(30):
        passed = [True] * 8 if row < 10 else [False] * 8 if row < 20 else [True, False] * 4
        curriculum._open[1000 + row] = row
        curriculum.record(1000 + row, passed)
        curriculum.close([1000 + row])
    return curriculum


def test_rows_are_drawn_in_proportion_to_their_usefulness():
    counts = np.bincount(draws(visited(), range(20_000)), minlength=40).reshape(4, 10).sum(1)
    weights = np.array([usefulness(0.9), usefulness(0.1), usefulness(0.5), usefulness(0.5)])
    np.testing.assert_allclose(counts / counts.sum(), weights / weights.sum(), atol=0.015)
    assert np.bincount(draws(visited(), range(20_000)), minlength=40).min() > 0  # the floor


def test_a_draw_is_a_function_of_seed_submission_and_visits():
    one, other = visited(), visited()
    later = draws(other, range(500, 600))
    assert draws(one, range(400, 600))[100:].tolist() == later.tolist()
    changed = visited()
    changed.record(0, [True] * 8)
    assert draws(changed, range(500, 600)).tolist() != later.tolist()


def test_an_open_submission_keeps_its_row_and_no_other_gets_it():
    curriculum = make(6)
    rows = [curriculum.row(i) for i in range(6)]
    assert sorted(rows) == list(range(6))
    assert [curriculum.row(i) for i in range(6)] == rows
    assert curriculum.row(6) in rows  # nothing else is left
    curriculum.close([2])
    assert curriculum.row(7) == rows[2]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_order_in_which_results_arrive_does_not_matter(order):
    results = {0: [True] * 4, 1: [False] * 4, 2: [True, None, False]}
    curriculum = make(1)
    for submission in order:
        curriculum.record(submission, results[submission])
    (row,) = curriculum.rows()
    assert row["visits"] == [[0, 4, 4], [1, 0, 4], [2, 1, 2]]
    assert row["pass_rate"] == pytest.approx((1 + 1 + 0 + 0.25 * 4) / (2 + 2 + 0.5 * 4 + 0.25 * 4))


def test_a_resumed_curriculum_is_the_uninterrupted_one():
    curriculum = visited()
    open_row = curriculum.row(77)
    stored = json.loads(json.dumps(curriculum.to_json()))
    resumed = make(begin=stored)
    assert resumed.row(77) == open_row
    for each in (curriculum, resumed):
        each.record(77, [True, False])
    assert draws(resumed, range(100, 200)).tolist() == draws(curriculum, range(100, 200)).tolist()
    assert resumed.to_json() == curriculum.to_json()
    assert resumed.metrics() == curriculum.metrics()


def test_only_the_newest_visits_count_and_failed_rewards_are_no_visits():
    curriculum = make(1)
    for submission in range(9):
        curriculum.record(submission, [submission >= 5] * 4)
    assert curriculum.rows()[0]["visits"] == [[i, 4, 4] for i in range(5, 9)]
    curriculum.record(9, [None, None])
    assert len(curriculum.rows()[0]["visits"]) == 4
    assert curriculum.metrics()["curriculum/pass_rate"] == pytest.approx(pass_rate([(i, 4, 4) for i in range(5, 9)]))
    assert usefulness(0) == usefulness(1) == FLOOR


def test_a_submission_gets_a_row_of_its_source():
    curriculum = make(candidates=lambda submission: np.arange(20) + 20 * (submission % 2))
    rows = draws(curriculum, range(200))
    assert (rows[0::2] < 20).all()
    assert (rows[1::2] >= 20).all()

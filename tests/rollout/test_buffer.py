import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.rollout.buffer import Buffer, Snapshot
from gspo.types import Group, Prompt


def group(submission):
    return Group(submission, Prompt((1,), "?"), (), (), ())


def keep_all(buffer, submissions):
    for submission in submissions:
        buffer.accept(group(submission))


def numbers(groups):
    return [g.submission for g in groups]


def test_without_staleness_one_batch_is_submitted_per_version():
    buffer = Buffer(3)
    for version in range(3):
        sent = buffer.submit(version)
        assert sent == [3 * version, 3 * version + 1, 3 * version + 2]
        assert buffer.submit(version) == []
        keep_all(buffer, reversed(sent))
        assert numbers(buffer.take()[0]) == sent
        assert buffer.submit(version) == []  # it is being trained on; the next belongs to the next version


def test_batch_b_is_submitted_at_version_b_minus_the_bound():
    buffer, sampled_by = Buffer(2, max_staleness=3, num_batches=9), {}
    for version in range(9):
        sent = buffer.submit(version)
        sampled_by |= {i // 2: version for i in sent}
        keep_all(buffer, sent)
        assert [i // 2 for i in numbers(buffer.take()[0])] == [version, version]
    assert sampled_by == {b: max(0, b - 3) for b in range(9)}  # and no tenth batch


@pytest.mark.parametrize(("bounds", "sent"), [
    ({"max_in_flight": 3}, [0, 1, 2]), ({"num_batches": 1}, [0, 1]),
    ({}, [0, 1, 2, 3, 4, 5]),
])  # fmt: skip
def test_the_narrowest_of_the_bounds_decides(bounds, sent):
    assert Buffer(2, max_staleness=2, **bounds).submit(0) == sent


def test_a_finished_group_makes_room_in_flight_and_not_in_the_queue():
    buffer = Buffer(2, max_staleness=1, max_in_flight=3)
    assert buffer.submit(0) == [0, 1, 2]
    buffer.accept(group(2))
    assert buffer.submit(0) == [3]
    keep_all(buffer, [0, 3])
    assert buffer.submit(0) == []


def test_a_batch_waits_for_the_group_that_belongs_before_its_last():
    buffer = Buffer(2, max_staleness=1)
    buffer.submit(0)
    keep_all(buffer, [3, 1, 2])
    assert not buffer.ready
    buffer.accept(group(0))
    assert numbers(buffer.take()[0]) == [0, 1]
    assert numbers(buffer.take()[0]) == [2, 3]


def test_the_next_prompts_of_the_stream_take_the_places_of_the_rejected():
    buffer = Buffer(2, max_staleness=1)
    assert buffer.submit(0) == [0, 1, 2, 3]
    buffer.accept(group(0))
    buffer.reject(1, "are dull")
    buffer.accept(group(3))
    assert (buffer.rounds, buffer.submit(0)) == (1, [4])
    buffer.reject(4, "are dull")
    assert (buffer.rounds, buffer.submit(0)) == (2, [5])
    keep_all(buffer, [5])
    assert not buffer.ready  # 2 is still to come and belongs into this batch
    buffer.accept(group(2))
    groups, refilled = buffer.take()
    assert (numbers(groups), refilled) == ([0, 2], 2)
    groups, refilled = buffer.take()
    assert (numbers(groups), refilled) == ([3, 5], 0)


def test_what_is_in_flight_is_sampled_again_after_a_snapshot_and_what_waits_is_not():
    buffer = Buffer(2, max_staleness=2)
    buffer.submit(0)
    keep_all(buffer, [0, 2, 3])
    assert buffer.snapshot() == Snapshot(4, (1,), tuple(buffer.snapshot().groups))  # 4 and 5 as if never submitted
    assert numbers(buffer.snapshot().groups) == [0, 2, 3]
    resumed = Buffer(2, max_staleness=2, begin=buffer.snapshot())
    assert resumed.submit(0) == [1, 4, 5]
    keep_all(resumed, [5, 4, 1])
    assert [numbers(resumed.take()[0]) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_a_batch_that_is_put_back_is_sampled_again():
    buffer = Buffer(2)
    keep_all(buffer, buffer.submit(0))
    groups, _ = buffer.take()
    buffer.put_back(groups)
    assert buffer.snapshot() == Snapshot(0, (), ())
    assert buffer.submit(0) == [0, 1]


@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 6), st.integers(0, 2**32))
def test_whatever_the_order_of_arrival_batches_are_in_order_whole_and_within_the_bound(size, eta, in_flight, seed):
    """A simulated run with rejections, stragglers and a resume in its middle; every bound is checked at every turn."""
    buffer, chance = Buffer(size, eta, max_in_flight=in_flight), random.Random(seed)
    version, sampled_by, rejected, trained = 0, {}, set(), []
    resume_at = chance.randint(0, 6)
    while version < 6:
        for submission in buffer.submit(version):
            assert submission not in trained
            sampled_by[submission] = version
        assert len(buffer.in_flight) <= in_flight
        if buffer.in_flight:
            arrived = chance.choice(sorted(buffer.in_flight))
            if chance.random() < 0.25:
                rejected.add(arrived)
                buffer.reject(arrived, "are dull")
            else:
                buffer.accept(group(arrived))
        if buffer.ready:
            batch = numbers(buffer.take()[0])
            assert min(sampled_by[i] for i in batch) >= version - eta  # the promise
            trained += batch
            version += 1
        if resume_at == version:
            resume_at = None
            buffer = Buffer(size, eta, max_in_flight=in_flight, taken=version, begin=buffer.snapshot())
    assert trained == sorted(set(trained))
    assert set(range(trained[-1] + 1)) == {*trained, *(i for i in rejected if i <= trained[-1])}  # nothing is lost

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gspo.envs.episode import Exchange, assemble, episode_sample
from gspo.types import Extras, Failure, Routes, Sample, SampleId


def exchange(turn, prompt, tokens, version=0, finish="stop"):
    logp = -np.arange(1, len(tokens) + 1) / 8 - turn
    return Exchange(tuple(prompt), Sample.of(SampleId(3, 1, turn), tokens, logp, version, finish))


def test_a_request_that_continues_joins_with_the_environments_tokens_untrained():
    turns = [exchange(0, [1, 2], [3, 4], version=5), exchange(1, [1, 2, 3, 4, 8, 9], [6], version=6, finish="length")]
    (one,) = assemble(turns)
    assert one.prompt == (1, 2)
    assert one.tokens.tolist() == [3, 4, 8, 9, 6]
    assert one.mask.tolist() == [True, True, False, False, True]
    assert one.behavior_logp.tolist() == [-0.125, -0.25, 0.0, 0.0, -1.125]
    assert one.versions.tolist() == [5, 5, 5, 5, 6]
    assert one.turns.tolist() == [0, 0, 0, 0, 1]
    assert one.finish == "length"
    assert [a.dtype for a in (one.tokens, one.behavior_logp, one.versions, one.mask, one.turns)] == [
        np.int32, np.float32, np.int32, np.bool_, np.int16,
    ]  # fmt: skip


def test_an_edited_history_is_a_sequence_of_its_own():
    first, edited = exchange(0, [1, 2], [3, 4]), exchange(1, [1, 2, 3, 9], [6])
    again = exchange(2, [1, 2, 3, 9, 6, 7], [5])
    a, b = assemble([first, edited, again])
    assert a.prompt == (1, 2)
    assert a.tokens.tolist() == [3, 4]
    assert b.prompt == (1, 2, 3, 9)
    assert b.tokens.tolist() == [6, 7, 5]
    assert b.turns.tolist() == [1, 1, 2]


def test_of_two_that_continue_the_same_answer_one_joins_and_no_token_is_trained_twice():
    base = exchange(0, [1], [2, 3])
    left, right = exchange(1, [1, 2, 3, 7], [4]), exchange(2, [1, 2, 3, 8], [5])
    a, b = assemble([base, left, right])
    assert a.tokens.tolist() == [2, 3, 7, 4]
    assert b.prompt == (1, 2, 3, 8)
    assert b.tokens.tolist() == [5]
    assert b.mask.all()


def test_a_conversation_is_continued_by_the_longest_that_it_begins_with():
    short, long = exchange(0, [1], [2]), exchange(1, [1, 9], [2])
    other = exchange(2, [1, 9, 2, 5], [4])
    a, b = assemble([short, long, other])
    assert a.tokens.tolist() == [2]
    assert b.tokens.tolist() == [2, 5, 4]


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 3), max_size=3), st.integers(1, 4)), max_size=7))
def test_every_sampled_token_is_trained_once_after_what_it_was_sampled_after(plan):
    """Each request goes on from an earlier one's tokens (or from nothing), some tokens of the environment between."""
    made = []
    for turn, (origin, between, length) in enumerate(plan):
        before = made[origin % len(made)].tokens if made and origin else (0,)
        made.append(exchange(turn, (*before, *between), [10 + turn] * length))
    sequences = assemble(made)
    trained = {}
    for s in sequences:
        whole = (*s.prompt, *s.tokens.tolist())
        for at in np.flatnonzero(s.mask):
            trained.setdefault(int(s.turns[at]), []).append((whole[: len(s.prompt) + at], whole[len(s.prompt) + at]))
        assert (s.behavior_logp[~s.mask] == 0).all()
    expected = {
        e.sample.id.turn: [(e.tokens[:at], e.tokens[at]) for at in range(len(e.prompt), len(e.tokens))] for e in made
    }
    assert trained == expected


def test_an_episode_is_the_one_sample_its_group_waits_for():
    failure = Failure("crash", "x")
    whole = episode_sample(
        SampleId(3, 1), [exchange(0, [1, 2], [3]), exchange(1, [5], [6])], prompt=(1, 2), outcome=failure
    )
    assert whole.id == SampleId(3, 1)
    assert whole.prompt is None  # its group's
    assert [s.prompt for s in whole.rest] == [(5,)]
    assert whole.outcome is failure
    assert whole.last_turn.tolist() == [6]
    other = episode_sample(SampleId(3, 1), [exchange(0, [1, 7], [3])], prompt=(1, 2))
    assert other.prompt == (1, 7)


def test_an_episode_that_asked_for_nothing_is_a_sample_of_no_tokens():
    empty = episode_sample(SampleId(0, 0), [], prompt=(1, 2))
    assert len(empty.tokens) == 0
    assert empty.rest == ()
    assert empty.last_turn.tolist() == []


def test_experts_of_environment_tokens_are_those_of_the_next_requests_prefill():
    def routed(turn, prompt, tokens):
        """Position p of request `turn` went to expert 10·turn + p."""
        at = np.arange(len(prompt) + len(tokens))[:, None, None] + 10 * turn
        e = exchange(turn, prompt, tokens)
        routes = Routes(prompt=at[: len(prompt)], own=at[len(prompt) - 1 : -1])
        return Exchange(e.prompt, replace(e.sample, extras=Extras(routes)))

    (one,) = assemble([routed(0, [1, 2], [3, 4]), routed(1, [1, 2, 3, 4, 8], [6])])
    assert one.extras.routes.prompt.ravel().tolist() == [0, 1]
    # Row t is of the position before token t: sampled 3, 4 by positions 1, 2 of turn 0; 8 and 6 by 3, 4 of turn 1.
    assert one.extras.routes.own.ravel().tolist() == [1, 2, 13, 14]
    # An aborted request has neither tokens nor routes, and takes none from the others.
    (one,) = assemble([routed(0, [1, 2], [3]), exchange(1, [1, 2, 3], []), routed(2, [1, 2, 3], [4])])
    assert one.extras.routes.own.ravel().tolist() == [1, 22]
    # Without those of environment tokens, none are known.
    (one,) = assemble([routed(0, [1, 2], [3]), exchange(1, [1, 2, 3, 8], [9])])
    assert one.extras.routes is None

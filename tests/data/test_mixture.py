"""Mixtures: shares by weight, every source's rows once an epoch, the same stream from any starting point."""

import json
import re
from collections import Counter

import pytest

from gspo.data.columns import _before, _drawn, draw_source
from gspo.data.dataset import make_dataset
from gspo.data.mixture import make_mixture
from gspo.errors import DataError


class Letters:
    """A tokenizer of characters, as far as a data set needs one."""

    chat_template = None

    def encode(self, text, **_):
        return [ord(c) for c in text]


def source(name, num_rows, **settings):
    rows = [{"prompt": f"{name}{i}", "answer": str(i)} for i in range(num_rows)]
    return make_dataset(rows, tokenizer=Letters(), source=name, **settings)


def test_prompts_come_by_weight_and_know_their_source():
    data = make_mixture([source("a", 50), source("b", 10)], [3.0, 1.0])
    drawn = [data.prompt(data.row_of(7, i)) for i in range(8000)]
    assert {p.source for p in drawn} == {"a", "b"}
    assert all(p.text.startswith(p.source) for p in drawn)
    share = Counter(p.source for p in drawn)["a"] / len(drawn)
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / len(drawn)) ** 0.5


def test_each_source_gives_all_its_rows_before_it_repeats_one():
    data = make_mixture([source("a", 50), source("b", 10)], [3.0, 1.0])
    stream = [data.prompt(data.row_of(7, i)) for i in range(2000)]
    for name, size in (("a", 50), ("b", 10)):
        rows = [p.row for p in stream if p.source == name]
        for epoch in range(len(rows) // size):
            assert sorted(rows[epoch * size : (epoch + 1) * size]) == list(range(size))
    in_order = [data.prompt(data.row_of(7, i, shuffle=False)) for i in range(30)]
    rows = [p.row for p in in_order if p.source == "a"]
    assert rows == list(range(len(rows)))


def test_the_stream_is_a_function_of_seed_and_submission_alone():
    weights = (1.0, 2.0, 0.5)
    forward = [draw_source(3, weights, i) for i in range(10_000)]
    _before.cache_clear()
    _drawn.cache_clear()
    assert [draw_source(3, weights, i) for i in (9_999, 0, 4_096, 4_095)] == [
        forward[i] for i in (9_999, 0, 4_096, 4_095)
    ]
    counts = Counter()
    for place, position in forward:
        assert position == counts[place], "positions of a source count up by one"
        counts[place] += 1
    assert forward != [draw_source(4, weights, i) for i in range(10_000)]


def test_the_first_rows_hold_every_source_in_proportion():
    data = make_mixture([source("a", 100), source("b", 100)], [1.0, 3.0])
    assert Counter(data.prompt(row).source for row in range(40)) == {"b": 30, "a": 10}
    assert len({(p.source, p.row) for p in map(data.prompt, range(len(data)))}) == 200


def test_a_mixture_has_the_fingerprint_of_its_sources_weights_and_names():
    parts = [source("a", 5), source("b", 5)]
    same = make_mixture(parts, [1.0, 2.0]).digest()
    assert same == make_mixture([source("a", 5), source("b", 5)], [1.0, 2.0]).digest()
    others = [
        make_mixture(parts, [2.0, 1.0]),
        make_mixture(parts[::-1], [1.0, 2.0]),
        make_mixture(parts, [1.0, 2.0], ["x", "y"]),
        make_mixture([source("a", 5), source("b", 6)], [1.0, 2.0]),
    ]
    assert same not in {other.digest() for other in others}


def test_dropped_prompts_and_shares_are_told():
    data = make_mixture([source("a", 12, max_length=2, key="train_dataset.mixture[0]"), source("b", 4)], [1.0, 1.0])
    assert data.num_too_long == 2
    assert data.describe().splitlines() == [
        "train_dataset.mixture[0]: 10 problems of a (all), 2 longer prompts dropped "
        "(train_dataset.mixture[0].max_length), 50 % of prompts as a",
        "train_dataset: 4 problems of b (all), 50 % of prompts as b",
    ]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, float("nan")], [1.0, -1.0]])
def test_weights_that_make_no_sense_are_refused(weights):
    with pytest.raises(DataError, match=re.escape("train_dataset.mixture needs one positive weight per source (2)")):
        make_mixture([source("a", 2), source("b", 2)], weights)


def test_an_empty_mixture_is_refused():
    with pytest.raises(DataError, match="mixture is empty"):
        make_mixture([])


def test_messages_go_with_the_prompt_before_rendering():
    data = make_dataset([{"question": "2+2?", "answer": "4"}], tokenizer=Letters(), system_prompt="Be brief.")
    assert [m["role"] for m in data.prompt(0).messages] == ["system", "user"]
    assert json.dumps(data.prompt(0).messages[1]) == '{"role": "user", "content": "2+2?"}'

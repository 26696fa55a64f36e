"""Readers of JSON and YAML of others: the values of the usual parsers, and one ValueError for a hostile text."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo.errors import DataError
from gspo.system import Limits, objects_of, parse_json, parse_yaml, read_json, read_jsonl, read_yaml

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.yaml"))


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML was built without libyaml")
def test_both_parsers_give_the_same_values():
    assert len(EXAMPLES) > 10
    for file in EXAMPLES:
        text = file.read_text(encoding="utf-8")
        assert parse_yaml(text) == parse_yaml(text.encode()) == yaml.safe_load(text), file


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000, "? " * 100_000])
def test_a_text_of_100_000_levels_raises_an_error_and_does_not_crash_the_process(text):
    for content in (text, text.encode()):
        with pytest.raises(ValueError, match=r"deeper than 100|not valid YAML"):
            parse_yaml(content)


def test_tags_that_construct_python_objects_are_refused():
    with pytest.raises(ValueError, match="could not determine a constructor"):
        parse_yaml("!!python/object/apply:os.getcwd []")


# -- JSON

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN, st.booleans())
@settings(max_examples=200, deadline=None)
def test_json_within_the_bounds_is_read_as_python_reads_it(value, ascii):
    text = json.dumps(value, ensure_ascii=ascii)
    assert parse_json(text) == json.loads(text)
    with contextlib.suppress(UnicodeEncodeError):  # lone surrogates
        assert parse_json(text.encode(), strict=True) == json.loads(text)


@given(st.text(alphabet='[]{}",:\\ux0a1e.-tfn \ud800\x00', max_size=60) | st.text(), st.booleans())
@settings(max_examples=500, deadline=None)
@example('{"a": 1, "a": 2}', True)
@example('"\\ud800"', True)
@example("1" * 5000, False)
@example("\ufeff{}", False)
def test_any_text_is_a_value_or_a_value_error(text, strict):
    for content in (text, text.encode("utf-8", "surrogatepass"), text.encode("utf-16", "surrogatepass")):
        with contextlib.suppress(ValueError):
            parse_json(content, strict=strict)


@given(PLAIN)
@settings(max_examples=100, deadline=None)
def test_the_number_of_values_is_counted_without_those_in_strings(value):
    def count(value):
        inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + sum(map(count, inner))

    text, num = json.dumps(value), count(value)
    assert parse_json(text, Limits(values=2 * num)) == value
    if num > 3:
        with pytest.raises(ValueError, match="at most 1 are read"):
            parse_json(text, Limits(values=1))


HOSTILE = {
    "deep lists": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "closed": "[" * 5000 + "]" * 5000,
    "many lists": "[" + "[]," * 10_000_000 + "[]]",
    "many numbers": "[" + "1," * 21_000_000 + "1]",
    "an open string of escapes": '["' + '\\"' * 3_000_000 + "," * 21_000_000,
    "a long number": "1" * 5_000_000,
    "60,000 keys, one twice": "{" + "".join(f'"k{i}": 1, ' for i in range(60_000)) + '"k0": 2}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_refused_in_time(tmp_path, name):
    began = time.process_time()
    with pytest.raises(ValueError, match=r"deeper|at most|Exceeds|Expecting|twice|delimiter|Unterminated") as caught:
        parse_json(HOSTILE[name], strict=True)
    assert time.process_time() - began < 5.0
    if name.startswith(("deep", "many")):
        file = tmp_path / "a.json"
        file.write_text(HOSTILE[name])
        with pytest.raises(DataError, match=r"a\.json cannot be read: ") as named:
            read_json(file, DataError)
        assert str(caught.value) in str(named.value)


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "missing", "a NUL", "a device", "sparse", "a link to itself"])
def test_a_file_that_cannot_be_read_is_one_error_with_its_name(tmp_path, kind):
    file = tmp_path / "a.json"
    if kind == "a FIFO":
        os.mkfifo(file)
    elif kind == "a folder":
        file.mkdir()
    elif kind == "a NUL":
        file = tmp_path / "a\0.json"
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    elif kind == "sparse":
        with open(file, "wb") as stream:
            stream.truncate(300 * 2**30)
    elif kind == "a link to itself":
        file.symlink_to(file)
    for read in (read_json, read_yaml):
        with pytest.raises(DataError, match="cannot be read"):
            read(file, DataError)
    with pytest.raises(OSError, match=r".+"):
        read_jsonl(file)


def test_damaged_lines_are_skipped_and_the_others_read(tmp_path):
    lines = ['{"a": 1}', "[" * 100_000, '{"a": ', "[1]", "\x00", '{"a": 2}', '{"a"']
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n" + b'{"a": 3}')
    assert [row["a"] for row in read_jsonl(tmp_path / "a.jsonl")] == [1, 2, 3]
    assert len(list(objects_of(b'{"a": 1}\n' * 100, Limits(values=20)))) == 10


# -- YAML


@given(st.text(alphabet="ab01:-[]{}&*<>!|?,.# \n\t\"'%@~_ex", max_size=60))
@settings(max_examples=500, deadline=None)
@example("a: !!timestamp 2001-99-99")
@example("a: !!int ''")
@example("? [a]\n: b")
@example("<<: 1")
@example("a: &a\n  <<: *a")
def test_any_yaml_is_a_value_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        found = parse_yaml(text)
        assert found == parse_yaml(text.encode()) or found != found or "nan" in repr(found)


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 [1, 2]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(8)),
        "a0: &a0 {k: 1}\n" + "".join(f"a{i + 1}: &a{i + 1}\n  <<: [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(8)),
        "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(200)),
        "a: " + ":".join(["59"] * 200_000),
        "a: {" + ", ".join(f"{i * (2**61 - 1)}: 1" for i in range(3000)) + "}",
        "a: &a [*a]",
        "x" * 5_000_000,
    ],
    ids=range(7),
)
def test_hostile_yaml_is_refused_in_time(text):
    began = time.process_time()
    with pytest.raises(ValueError, match=r"at most|characters|not names|contains itself"):
        parse_yaml(text)
    assert time.process_time() - began < 5.0


def test_a_yaml_text_with_too_many_values_is_refused_before_a_node_is_made():
    for text in ("[" + "a," * 100_001 + "a]", "- a\n" * 100_001, "a: [" + "{a: b}," * 40_000 + "]"):
        with pytest.raises(ValueError, match="it has more than 100,000 values"):
            parse_yaml(text)

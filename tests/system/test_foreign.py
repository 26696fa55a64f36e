"""YAML by the parser in C: the values of the parser in Python, and no crash on a hostile text."""

from pathlib import Path

import pytest
import yaml

from gspo.system.foreign import parse_yaml

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
        with pytest.raises(ValueError, match="deeper than 100|not valid YAML"):
            parse_yaml(content)


def test_tags_that_construct_python_objects_are_refused():
    with pytest.raises(ValueError, match="could not determine a constructor"):
        parse_yaml("!!python/object/apply:os.getcwd []")

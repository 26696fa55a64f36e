"""The variables between launcher, trainer and servers."""

from pathlib import Path

import pytest

from gspo.errors import ConfigError
from gspo.system.files import step_of
from gspo.system.process import Launched


def test_what_is_written_is_what_is_read():
    told = Launched(True, 4, True, 2, Path("/run/samplers"), "a token of the test")
    assert Launched.read(told.write()) == told
    assert Launched.read({}) == Launched()
    assert Launched().write() == {}


def test_the_token_is_not_printed_and_a_short_one_is_refused():
    assert "secret" not in repr(Launched(token="a very secret token"))
    with pytest.raises(ConfigError, match="GSPO_SAMPLER_TOKEN"):
        Launched(token="short").required_token()


@pytest.mark.parametrize("name", ["GSPO_RANKS", "GSPO_SAMPLERS"])
def test_a_count_that_is_no_number_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"{name} is 'two'"):
        Launched.read({name: "two"})


def test_a_digit_that_is_no_decimal_number_is_refused_or_ignored():
    """`"²".isdigit()` is true, and `int("²")` fails."""
    with pytest.raises(ConfigError, match="GSPO_RANKS is '²'"):
        Launched.read({"GSPO_RANKS": "²"})
    assert step_of("step_²") is None

"""Which values of a parametrised test run in `make test`; the others run in `make test-full`."""

import pytest


def brief(values, *kept):
    """Parameters of a test: those in `kept` in every tier, the rest in the long suite."""
    values = list(values)
    assert set(kept) <= set(values), f"{set(kept) - set(values)} is not among the values"
    return [value if value in kept else pytest.param(value, marks=pytest.mark.full) for value in values]

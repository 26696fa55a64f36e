import pytest
import talkers


@pytest.fixture(scope="module")
def talk():
    return talkers.chat()


@pytest.fixture(scope="module")
def sampler():
    return talkers.sampler(talkers.CONTEXT)

from contextlib import ExitStack

import pytest
from native_library import forget_native
from served import House
from tiny_models import VOCAB, build
from vllm_lookalike import Lookalike

from gspo.sampling import VllmSampler


@pytest.fixture
def house(tmp_path):
    house = House(tmp_path)
    yield house
    house.close()


@pytest.fixture
def lookalike():
    """Start servers that speak as vLLM does, and samplers over them; everything is closed."""
    with ExitStack() as stack:

        def start(model="llama_mha", seed=1, kind=Lookalike, **how):
            own = {name: how.pop(name) for name in ("meddle", "pace_s", "stale") if name in how}
            server = kind(build(model, seed), **own)
            stack.callback(server.close)
            settings = {"seed": 5, "num_vocab": VOCAB, "max_context": 64, "eos_token_ids": [2], "version": 0}
            sampler = VllmSampler(server.endpoint, **{**settings, **how})
            stack.callback(sampler.close)
            return sampler, server

        yield start


@pytest.fixture
def native_anew(monkeypatch, tmp_path):
    """A cache folder of the test's own, and a first use of the compiled library."""
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path))
    monkeypatch.delenv("GSPO_NATIVE", raising=False)
    forget_native()
    yield tmp_path
    forget_native()

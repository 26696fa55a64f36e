"""Tiers: a test without a marker is a unit test (`make unit`): it starts no process and trains nothing. `run` marks
tests that do (`make test` has them too), `full` the long suites of `make test-full`.
"""

import fcntl
import functools
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

# A suite started by nohup or in a script's background is deaf to these, and so would be every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The same examples on every machine: a property that fails in CI fails at home.
settings.register_profile(
    "gspo", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gspo")


_STARTED: list[str] = []  # processes that the current test has started


def _audit(event: str, args: tuple) -> None:
    # matplotlib runs fc-list when it is used for the first time on a machine.
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn") and args[:1] != ("fc-list",):
        _STARTED.append(f"{event} {args[0] if args else ''}")


sys.addaudithook(_audit)


def _is_unit(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(tier) for tier in ("run", "full"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before any fixture of the test is set up."""
    _STARTED.clear()
    trainer = getattr(sys.modules.get("gspo.train.trainer"), "Trainer", None)
    if trainer is not None and not hasattr(trainer.train, "__wrapped__"):
        train = trainer.train

        @functools.wraps(train)
        def counted(self, **how):
            _STARTED.append("Trainer.train")
            return train(self, **how)

        trainer.train = counted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A unit test that starts a process or trains, itself or by a fixture, fails."""
    result = yield
    if _STARTED and _is_unit(item):
        pytest.fail(f"mark this test `run` or `full`: it started {_STARTED[:3]}", pytrace=False)
    return result


@pytest.fixture(autouse=True)
def _one_seed():
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture
def exact(monkeypatch):
    """transformers computes norms, softmaxes and rotations in float32 whatever the model's dtype. Here those casts go
    to float64, so that 1e-10 means something."""
    import torch

    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.fixture(scope="session")
def tiny():
    """The embedded model, built once per machine: workers wait for the one that builds it."""
    from gspo.models import embedded

    folder = embedded.embedded_folder("embedded:tiny")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / ".building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        embedded.build("embedded:tiny")
    return "embedded:tiny"

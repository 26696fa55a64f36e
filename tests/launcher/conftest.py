import pytest
from launched_runs import NUM_STEPS, STARTED, TURNED, Run, by_module, metrics_of


@pytest.fixture(autouse=True)
def _cleared():
    """No test leaves a process to the next one."""
    yield
    while STARTED:
        STARTED.pop().clear()


@pytest.fixture(scope="session")
def at_home(tmp_path_factory):
    """The metrics of the run by the local launcher."""
    run = Run(by_module("local"), tmp_path_factory.mktemp("home"))
    code, said, complained = run.end()
    assert code == 0, said + complained
    assert run.steps() == list(range(1, NUM_STEPS + 1))
    return metrics_of(run.path)


@pytest.fixture(scope="session")
def turned_at_home(tmp_path_factory):
    """The same of GRPO's file with the page's `+actor.importance_sampling_level=sequence`."""
    run = Run(by_module("local", *TURNED), tmp_path_factory.mktemp("turned"))
    code, said, complained = run.end()
    assert code == 0, said + complained
    return metrics_of(run.path)

"""Rewards that a worker cannot import: of a notebook cell, lambdas, closures and objects; they keep their deadline."""

import subprocess
import sys
import time

import pytest

from gspo.errors import ConfigError
from gspo.rewards.call import RewardItem
from gspo.rewards.pool import RewardPool
from gspo.rewards.spec import reward_spec
from gspo.types import Failure


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, text, **columns):
        return self.factor * len(text)


@pytest.mark.run
def test_a_lambda_a_closure_an_object_and_a_notebook_function_score_in_workers():
    bonus = 0.5

    def closure(completions, **columns):
        return [len(text) + bonus for text in completions]

    cell = {}
    exec("def cell(text, **columns):\n    return helper(text)\ndef helper(text):\n    return 2.0 * len(text)", cell)
    spec = reward_spec([lambda text: 1.0, closure, Scaled(3.0), cell["cell"]])
    with RewardPool(spec, workers=1) as pool:
        outcome = pool.score([RewardItem("q", ("ab",))])[0][0]
    assert outcome.value == 1.0 + 2.5 + 6.0 + 4.0
    assert list(outcome.parts) == ["<lambda>", "closure", "Scaled", "cell"]


@pytest.mark.run
def test_a_lambda_that_hangs_is_ended_at_its_deadline():
    with RewardPool(reward_spec(lambda text: time.sleep(60)), workers=1, timeout_s=0.5) as pool:
        pool.wait_ready()
        begin = time.monotonic()
        outcome = pool.score([RewardItem("q", ("ab",))])[0][0]
        assert time.monotonic() - begin < 10
    assert isinstance(outcome, Failure)
    assert outcome.kind == "timeout"


def test_a_function_that_cannot_be_pickled_says_what_to_do():
    lock = __import__("threading").Lock()
    with pytest.raises(ConfigError, match=r"%%writefile reward\.py"):
        reward_spec(lambda text: lock.locked())


@pytest.mark.run
def test_a_function_below_the_main_guard_of_a_script_scores_in_workers(tmp_path):
    """A worker imports a script and does not run what is below the guard."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["session:below", f"{script}:above", "7.0"], done.stderr


SCRIPT = """
from gspo.rewards.pool import RewardPool
from gspo.rewards.call import RewardItem
from gspo.rewards.spec import reward_spec

def above(text):
    below = 1.0
    return below

if __name__ == "__main__":
    factor = 3.0

    def below(text):
        return factor * len(text)

    spec = reward_spec([below, above])
    print(*(part.name for part in spec), sep="\\n")
    with RewardPool(spec, workers=1) as pool:
        print(pool.score([RewardItem("q", ("ab",))])[0][0].value)
"""

"""Rewards that attack their worker, the supervisor or the trainer: a typed outcome in time, and nothing else fails.

docs/reliability.md has the table of these attacks.
"""

import time
from pathlib import Path

import pytest
from reward_attacks import ATTACKS
from tiers import brief

from gspo.rewards.call import RewardItem
from gspo.rewards.pool import RewardPool
from gspo.rewards.spec import reward_spec
from gspo.rewards.workers import supervisor
from gspo.types import Failure

pytestmark = pytest.mark.run

FILE = Path(__file__).parents[1] / "helpers" / "reward_attacks.py"
TIMEOUT_S = 2.0
# The value, or the kind of the failure; what the worker survives is scored, and the rest costs its own sample.
FOUND = {
    1.0: ["good", "bool", "awaitable", "atexit", "handlers", "blocked signals", "builtins", "stdout", "exit later",
          "no files", "mute at the end", "no dumps"],
    0.5: ["decimal", "float32", "array of one"],
    0.25: ["fraction"],
    "timeout": ["late awaitable", "fork for ever", "stop itself", "stop its group", "clock", "mute"],
    "infra": ["close everything", "modules", "kill its parent", "stop its parent", "trace its parent", "forged nan",
              "forged sample", "forged part", "forged type", "forged call", "forged list", "garbage"],
}  # fmt: skip
# A deep recursion ends by the timeout or by a fault, by the machine's stack and speed; so does an endless message.
EITHER = {"recursion": {"timeout", "crash"}, "endless channel": {"timeout", "infra"}}
# Forty forks take longer than the deadline on a busy machine.
EITHER |= {"sleepers": {1.0, "timeout"}, "zombies": {1.0, "timeout"}}
EXPECTED = {name: {found} for found, names in FOUND.items() for name in names} | EITHER
# In `make test`: what once reached the trainer, and what a careless reward may do.
QUICK = (
    "forged sample", "forged nan", "forged call", "evil error", "sleepers", "decimal", "close everything", "garbage",
    "mute", "mute at the end", "no dumps", "stop its parent",
)  # fmt: skip


@pytest.mark.parametrize("name", brief(ATTACKS, *QUICK))
def test_an_attack_costs_its_own_sample_in_time_and_the_next_group_is_scored(name, tmp_path):
    with RewardPool(
        reward_spec(f"{FILE}:attack"), workers=1, timeout_s=TIMEOUT_S, log_path=tmp_path / "rewards.log"
    ) as pool:
        pool.wait_ready()
        start = time.monotonic()
        ((outcome,),) = pool.score([RewardItem("q", (name,), [1], [[1]])])
        assert time.monotonic() - start < TIMEOUT_S + 1.0
        found = outcome.kind if isinstance(outcome, Failure) else outcome.value
        assert found in EXPECTED.get(name, {"crash"})
        assert name != "garbage" or "channel" in outcome.message
        ((good,),) = pool.score([RewardItem("q", ("good",), [1], [[1]])])
        assert good.value == 1.0


def test_a_log_that_becomes_too_long_keeps_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_MAX_LOG", 1000)
    monkeypatch.setattr(supervisor, "_KEPT_LOG", 100)
    log = tmp_path / "rewards.log"
    with log.open("a+b") as file:
        file.write(b"a" * 1000)
        file.flush()
        supervisor.shorten_log(file.fileno())
        assert log.stat().st_size == 1000
        file.write(b"the end")
        file.flush()
        supervisor.shorten_log(file.fileno())
        file.write(b", and more")
    assert (
        log.read_text() == "[907 bytes of output were removed: the log was too long]\n" + "a" * 93 + "the end, and more"
    )

"""Rewards by source: each group is scored by its own data set's reward, and says so."""

import gc
import weakref

import pytest

from gspo.errors import RewardError
from gspo.rewards.call import RewardItem
from gspo.rewards.route import RewardRouter
from gspo.rewards.spec import reward_spec
from gspo.types import Failure, Score

pytestmark = pytest.mark.run


def item(source, *completions, **data):
    return RewardItem("?", completions, data={"answer": "4", **data}, source=source)


def test_each_source_is_scored_by_its_own_reward_and_named_in_the_parts():
    specs = {"sums": reward_spec({"name": "final", "marker": ">"}), "maths": reward_spec("math")}
    router = RewardRouter(specs, workers=1)
    try:
        router.submit(0, item("sums", "x>4", "4"))
        router.submit(1, item("maths", "\\boxed{8/2}", "5"))
        outcomes = dict(router.completed())
    finally:
        router.close()
    assert outcomes[0] == (Score(1.0, {"final@sums": 1.0}), Score(0.0, {"final@sums": 0.0}))
    assert outcomes[1] == (Score(1.0, {"math@maths": 1.0}), Score(0.0, {"math@maths": 0.0}))


def test_sources_with_the_same_reward_share_a_pool():
    router = RewardRouter({"a": reward_spec("math"), "b": reward_spec("math"), "c": reward_spec("numeric")}, workers=1)
    try:
        assert len(router._pools) == 2
        for source in "abc":
            router.submit(source, item(source, "4"))
        assert {source: next(iter(o[0].parts)) for source, o in router.completed()} == {
            "a": "math@a", "b": "math@b", "c": "numeric@c",
        }  # fmt: skip
    finally:
        router.close()


def test_a_failure_stays_one():
    router = RewardRouter({"a": reward_spec("numeric")})
    router.submit(0, item("a", "4", answer="no number"))
    ((_, (outcome,)),) = router.completed()
    assert isinstance(outcome, Failure)


def test_a_prompt_of_nowhere_is_an_error_not_a_guess():
    with pytest.raises(RewardError, match=r"'elsewhere'; the mixture's sources are a\. Set reward"):
        RewardRouter({"a": reward_spec("numeric")}).submit(0, item("elsewhere", "4"))


class Key:
    """A key whose end can be observed."""


def test_a_group_that_was_taken_leaves_nothing_behind():
    router = RewardRouter({"a": reward_spec("numeric")})
    key = Key()
    gone = weakref.ref(key)
    router.submit(key, item("a", "4"))
    taken, _ = next(router.completed())  # one group, as a caller that needs no more
    assert taken is key
    del key, taken
    gc.collect()
    assert gone() is None

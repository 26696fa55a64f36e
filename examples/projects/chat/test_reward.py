"""Run with `pytest`. Conversations of known value: a wrong reward is learned as well as a right one."""

import asyncio

import pytest

from reward import talk

RIGHT, WRONG = "4+8+0=12,8+6+1=15,1+7+1=09>952", "4+8+0=12,8+6+0=14,1+7+1=09>942"


class Model:
    """Says these texts, one per turn."""

    messages = ({"role": "user", "content": "184+768="},)

    def __init__(self, *texts):
        self.texts, self.asked = list(texts), 0

    async def chat(self, messages):
        self.asked += 1
        return {"role": "assistant", "content": self.texts.pop(0)}


@pytest.mark.parametrize(
    ("texts", "reward", "turns"), [((RIGHT,), 1.0, 1), ((WRONG, RIGHT), 0.5, 2), ((WRONG, WRONG), 0.0, 2)]
)
def test_a_second_attempt_counts_half(texts, reward, turns):
    model = Model(*texts)
    assert asyncio.run(talk(model, {"answer": "952"}))["reward"] == reward
    assert model.asked == turns

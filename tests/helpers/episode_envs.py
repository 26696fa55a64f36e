"""Environments of the training tests, at the top level of a module so that a config can name them."""

import asyncio

from gspo.envs import OutOfRoomError


async def ask_again(client, data):
    """Plain text: an answer, the word `+=` from the environment, and another answer."""
    messages = client.messages
    answer = await client.chat(messages, max_new_tokens=8)
    second = await client.chat([*messages, answer, {"role": "user", "content": "+="}], max_new_tokens=8)
    return {"reward": float(second["content"].count("1")), "long": len(answer["content"]) / 8}


async def forgetful(client, data, extra=""):
    """Two conversations: the second begins like the first and goes on otherwise."""
    await client.chat(client.messages, max_new_tokens=8)
    answer = await client.chat([{"role": "user", "content": data["question"] + "1" + extra}], max_new_tokens=8)
    client.reward(0.1 * answer["content"].count("1"))
    await client.chat([{"role": "user", "content": "9+9="}], max_new_tokens=6)


async def unlucky(client, data):
    """One of some fails."""
    answer = await client.chat(client.messages)
    if int(data["answer"]) % 3 == 0:
        raise RuntimeError("bad luck")
    return float(data["answer"] in answer["content"])


class Patient:
    """An environment with a setting."""

    def __init__(self, wait: float = 0.0):
        self.wait = wait

    async def __call__(self, client, data):
        await asyncio.sleep(self.wait)
        try:
            answer = await client.chat(client.messages)
        except OutOfRoomError:
            return 0.0
        return float(data["answer"] in answer["content"])


def not_async(client, data):
    return 1.0

"""A conversation with a simulated user, and its reward. A change to this file makes another run."""

AGAIN = 0.5  # reward of a right answer at the second attempt


async def talk(client, data):
    """One conversation: `client` sends messages to the model, `data` has the columns of the row in data/."""
    messages = client.messages
    first = await client.chat(messages)
    if is_right(first["content"], data["answer"]):
        return grade([True])
    # The user asks the same question again.
    second = await client.chat([*messages, first, messages[-1]])
    return grade([False, is_right(second["content"], data["answer"])])


def is_right(text, answer):
    """The embedded model ends its work with `>952`: what follows the last `>` counts."""
    _, marker, number = (text or "").rpartition(">")
    return bool(marker) and number.strip() == answer


def grade(attempts):
    """The reward of a conversation, and numbers to log: reward/part_turns."""
    reward = 1.0 if attempts == [True] else AGAIN * float(attempts[-1])
    return {"reward": reward, "turns": float(len(attempts))}

"""A talk with a simulated user who wants a restaurant: ask for the area, then name the right one.

The prompt lists three restaurants, two of them with the food that the user wants, in different areas. The user tells
the area if the first answer names no restaurant. A row is one of `python examples/fetch.py restaurants`.
"""

ASKED, GUESSED = 1.0, 0.3  # the right restaurant after a question, and without one
LISTED = 0.1  # another restaurant of the list


async def talk(client, data):
    messages = client.messages
    said = await client.chat(messages)
    asked = not named(said, data)
    if asked:
        reply = {"role": "user", "content": f"In the {data['area']}, please."}
        said = await client.chat([*messages, said, reply])
    return grade(named(said, data), data["answer"], asked)


def named(message, data):
    """The listed restaurants whose name is in a message."""
    text = (message["content"] or "").lower()
    return [name for name in data["names"] if name.lower() in text]


def grade(names, answer, asked):
    """The reward: one name, the right one. An answer that names several restaurants recommends none."""
    is_right = names == [answer]
    reward = (ASKED if asked else GUESSED) if is_right else LISTED * (len(names) == 1)
    return {"reward": reward, "right": float(is_right), "asked": float(asked)}

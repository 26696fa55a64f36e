"""The reward: 1 for the right number, else 0. A change to this file makes another run."""


def score(text, answer, **columns):
    """`text` is a completion, `answer` and `columns` are the columns of its row in data/."""
    return float(final_number(text) == answer)


def final_number(text):
    """What follows the last `>`: the embedded model ends its work with `>952`."""
    _, marker, number = text.rpartition(">")
    return number.strip() if marker else None

"""Filters of groups as a user would write them: found by name, or passed to the Trainer."""


def mixed(group):
    """AReaL's usual one: neither all right nor all wrong."""
    return 0 < group["rewards"].mean() < 1


def short(group):
    assert len(group["completions"]) == len(group["lengths"]) == len(group["rewards"])
    return bool(group["lengths"].max() < 30 and group["prompt"] and group["data"]["answer"])


def nothing(group):
    return False


def number(group):
    return group["rewards"].mean()


def crash(group):
    raise KeyError("made to fail")


not_callable = 3

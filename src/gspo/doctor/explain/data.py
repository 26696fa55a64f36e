"""Problems and rewards of a config: which rows are drawn, and which functions score them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from gspo.config.schema import DatasetSpec, held_out
from gspo.config.schema.dataset import ENVIRONMENT_ROWS
from gspo.data.sources import default_reward
from gspo.lint.facts import Facts
from gspo.rewards.functions.builtin import TEXT

NOT_SETTINGS = ("name", "weight", "label", "gate")  # of an entry of reward.functions; the others go to the function

_CURRICULUM_WORDS = (
    "; prompts are drawn by their measured pass rate, those near 1/2 up to 10 times as often as those that are always "
    "or never solved"
)


def data_section(f: Facts) -> dict[str, Any]:
    """Training problems, held-out problems and rewards, in words."""
    train, valid, functions = f.config.train_dataset, f.config.valid_dataset, f.config.reward.functions
    own = "the held-out part of " + ("each training source" if train.mixture else "the training data")
    if train.path == ENVIRONMENT_ROWS:
        own = "other problems of the environment"
    reward = reward_words(functions, f.config.reward.weights) if functions else _own_words(train)
    if f.config.env.path or f.config.env.agent:
        reward = f"that of the episode; if it gives none: {reward}"
    return {
        "training": _data_words(train) + _CURRICULUM_WORDS * (train.shuffle == "pass_rate"),
        "held_out": own if valid is None else _data_words(held_out(f.config)),
        "template": _template_words(train),
        "reward": reward,
    }


def reward_words(functions: Sequence[str | dict[str, Any]], weights: Sequence[float] = ()) -> str:
    """The sum of rewards and its gates, with their main settings; API keys and prompts are never shown.

    >>> reward_words(["math", {"name": "reward_model", "path": "rm", "weight": 0.5}])
    "math + 0.5 × reward_model rm, in the trainer's process"
    >>> reward_words(["chrf", {"name": "language", "to": "fr", "gate": True}])
    'chrf × language(to=fr)'
    """
    words, gates = list[str](), list[str]()
    for number, entry in enumerate(functions):
        settings = {"name": entry} if isinstance(entry, str) else entry
        name = str(settings.get("name", "?"))
        weight = weights[number] if number < len(weights) else settings.get("weight", 1.0)
        if name == "judge":
            host = re.sub(r"//[^/@]*@", "//", str(settings.get("url", "?")))
            name = f"judge {settings.get('model', '?')} at {host}"
        elif name == "reward_model":
            name = f"reward_model {settings.get('path', '?')}, in the trainer's process"
        elif name in TEXT:
            own = [f"{key}={value}" for key, value in settings.items() if key not in NOT_SETTINGS]
            name += f"({', '.join(own)})" if own else ""
        (gates if settings.get("gate") else words).append(name if weight == 1 else f"{weight:g} × {name}")
    total = " + ".join(words)
    return " × ".join([f"({total})" if gates and len(words) > 1 else total, *gates])


def _own_words(data: DatasetSpec) -> str:
    if not data.mixture:
        return f"{default_reward(data.path)['name']}, the default of the data set"
    rewards = {s.name or s.path: reward_words(s.reward) for s in data.mixture if s.reward}
    named = "; ".join(f"{name}: {words}" for name, words in rewards.items())
    others = "; other sources: their default" * (len(rewards) < len(data.mixture))
    return named + others if named else "the default of each source"


def _data_words(data: DatasetSpec) -> str:
    if data.path == ENVIRONMENT_ROWS and not data.mixture:
        return "problems of the environment" + (f", {data.size:,} of them" if data.size else "")
    if not data.mixture:
        return f"{data.path}, split {data.split}" + (f", {data.size:,} rows" if data.size else "")
    total = sum(source.weight for source in data.mixture)
    return "; ".join(
        f"{100 * source.weight / total:.3g} % {source.path}" + (f" as {source.name}" if source.name else "")
        for source in data.mixture
    )


def _template_words(data: DatasetSpec) -> str:
    if data.chat_template in (False, "none"):
        words = "plain text"
    elif data.chat_template in ("auto", True):
        words = "the tokenizer's chat template" + ", if it has one" * (data.chat_template == "auto")
    else:
        words = "the chat template of the config"
    limit = f"; prompts of more than {data.max_length:,} tokens are dropped" if data.max_length else ""
    return words + (", with a system prompt" if data.system_prompt is not None else "") + limit

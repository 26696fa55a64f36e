"""`train_dataset` and `valid_dataset`: where prompts come from."""

from __future__ import annotations

from typing import Any

from gspo.config.schema.key import Section, key


class MixtureSource(Section):
    path: str = key("", "As in train_dataset.path; required.")
    weight: float = key(1.0, "Share of the prompts drawn from this source, relative to the others.", above=0.0)
    name: str | None = key(None, "Its name in metrics.", unset="the last part of path")
    split: str | None = key(None, "Split to read.", unset="the data set's above")
    size: int | None = key(None, "Use this many rows; procedural tasks generate them.", low=1)
    max_length: int | None = key(None, "Longer prompts are dropped and counted.", unset="the data set's above", low=1)
    prompt_column: str | None = key(None, "Column with the question.", unset="guessed from usual names")
    answer_column: str | None = key(None, "Column with the reference answer.", unset="guessed from usual names")
    columns: dict[str, Any] = key({}, "Further columns by new name.")
    system_prompt: str | None = key(None, "System message.", unset="the data set's above")
    chat_template: bool | str | None = key(None, "As above.", unset="the data set's above")
    chat_template_kwargs: dict[str, Any] = key({}, "Handed to the chat template; empty: the data set's above.")
    options: dict[str, Any] = key({}, "Settings of a reasoning_gym task.")
    reward: list[str | dict[str, Any]] = key(
        [], "Rewards of its rows, as in reward.functions; empty: the source's own. reward.functions goes first."
    )


class DatasetSpec(Section):
    path: str = key("embedded:arithmetic", "embedded:arithmetic, reasoning_gym:<task>, a hub name, a file or folder.")
    split: str | None = key(None, "Split to read.", unset="train for training, test for validation")
    max_length: int | None = key(None, "Longer prompts (in tokens) are dropped and counted.", low=1)
    size: int | None = key(None, "Use this many rows; procedural tasks generate them.", low=1)
    prompt_column: str | None = key(None, "Column with the question.", unset="guessed from usual names")
    answer_column: str | None = key(None, "Column with the reference answer.", unset="guessed from usual names")
    columns: dict[str, Any] = key({}, "Further columns by new name, for rewards: {level: extra_info.level}.")
    system_prompt: str | None = key(None, "System message; without a chat template it stands before the prompt.")
    chat_template: bool | str = key(
        "auto",
        "auto: the tokenizer's, if it has one; true: insist on it; false or none: plain text; a .jinja file, or the "
        "template itself.",
    )
    chat_template_kwargs: dict[str, Any] = key({}, "Handed to the chat template: {enable_thinking: false}.")
    options: dict[str, Any] = key({}, "Settings of a reasoning_gym task: {min_terms: 2, max_terms: 4}.")
    mixture: list[MixtureSource] = key(
        [], "Several data sets by weight, in place of path; a source inherits split, max_length and the template keys."
    )


class TrainDataset(DatasetSpec):
    batch_size: int = key(32, "Prompts per rollout batch.", low=1)
    shuffle: bool = key(True, "Draw prompts in a seeded random order.")

"""`train_dataset` and `valid_dataset`: where prompts come from."""

from __future__ import annotations

from typing import Any, Literal

from gspo.config.schema.key import Section, key

ENVIRONMENT_ROWS = "env"  # as a path: the rows of the environment itself


class SourceSection(Section):
    """The keys that a data set and a source of a mixture share."""

    path: str = key(
        "embedded:arithmetic",
        "embedded:arithmetic, embedded:digits, reasoning_gym:<task>, a hub name, a file or a folder; env: the rows of "
        "the environment, the default with env.path gymnasium:…, openenv:… and verifiers:….",
    )
    split: str | None = key(
        None, "Split to read.", unset="train for training, test for validation; in a mixture, the data set's"
    )
    size: int | None = key(None, "Use this many rows. Procedural tasks generate as many.", low=1)
    max_length: int | None = key(
        None,
        "Prompts with more tokens are dropped and counted; with algorithm sft, prompt and completion together. In a "
        "mixture, null means the data set's.",
        low=1,
    )
    columns: dict[str, Any] = key(
        {},
        "Names of columns: {prompt: task, answer: reward_model.ground_truth, completion: text}; those that are not set "
        "are found by common names (completion: only with algorithm sft). Others are further columns for rewards, by "
        "a new name: {level: extra_info.level}.",
    )
    system_prompt: str | None = key(
        None,
        "System message. Without a chat template it is put before the prompt. In a mixture, null means the data set's.",
    )
    chat_template_kwargs: dict[str, Any] = key(
        {}, "Arguments of the chat template: {enable_thinking: false}. In a mixture, empty means the data set's."
    )
    options: dict[str, Any] = key({}, "Settings of a reasoning_gym task: {min_terms: 2, max_terms: 4}.")


class MixtureSource(SourceSection):
    path: str = key("", "As in train_dataset.path; required.")
    weight: float = key(1.0, "Fraction of prompts from this source, relative to the other weights.", above=0.0)
    name: str | None = key(None, "Name of the source in metrics.", unset="the last part of path")
    chat_template: bool | str | None = key(
        None, "As in train_dataset.chat_template.", unset="the data set's chat_template"
    )
    reward: list[str | dict[str, Any]] = key(
        [],
        "Rewards of these rows, in the form of reward.functions; empty: the source's own. If reward.functions is set, "
        "it is used instead.",
    )


class DatasetSpec(SourceSection):
    chat_template: bool | str = key(
        "auto",
        "auto: the tokenizer's template if it has one; true: the tokenizer's, required; false or none: plain text; or "
        "a .jinja file, or the template itself.",
    )
    mixture: list[MixtureSource] = key(
        [],
        "Several data sets with weights, instead of path. A source inherits split, max_length, system_prompt and the "
        "chat template keys.",
    )


class ValidDataset(Section):
    path: str | None = key(None, "As in train_dataset.path.", unset="train_dataset.path")
    split: str | None = key(None, "Split to read.", unset="test")
    mixture: list[MixtureSource] = key([], "Several data sets, instead of path; each may have its own columns.")


class TrainDataset(DatasetSpec):
    batch_size: int = key(32, "Prompts per rollout batch; with algorithm sft, rows per batch.", low=1)
    shuffle: bool | Literal["pass_rate"] = key(
        True,
        "true: every prompt once per epoch, in a random order that depends on the seed; false: in file order. "
        "pass_rate: prompts are drawn by their measured pass rate; those near 1/2 are drawn up to 10 times as often as "
        "those that are always or never solved (docs/data.md).",
    )

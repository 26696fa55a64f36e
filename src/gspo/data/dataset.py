"""Data sets: numbered rows, each rendered once into the tokens of its prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.data.chat import chat_target, chosen_template, plain_target, prompt_messages, split_conversation
from gspo.data.columns import (
    check_completion,
    column,
    find_answer_column,
    find_completion_column,
    find_prompt_column,
    order,
    owner_of,
    require,
    with_answer,
)
from gspo.data.images import given_images, image_digest, image_files, with_image_parts, without_pixels
from gspo.data.reference import final_answer
from gspo.data.sources import Row, rows_of
from gspo.errors import DataError
from gspo.system import beat
from gspo.types import Prompt, Sample

# Bounds on the number of tokens of a text. The longest tokens of common vocabularies have 128 to 512 characters.
MAX_CHARACTERS_PER_TOKEN = 1024
# A token holds at least one byte, and Unicode normalization makes a text at most 11 times longer (NFKC).
MAX_TOKENS_PER_BYTE = 11
NUM_SPECIAL_TOKENS = 16  # that a tokenizer may add


@dataclass(frozen=True)
class DataSettings:
    """How the rows of a data set are selected, read and rendered.

    max_length       prompts with more tokens are dropped and counted (`Dataset.num_too_long`)
    size, seed       number of rows; seed of procedural tasks
    columns          names of the columns prompt, answer and completion (without one: found by common names; for a
                     completion first the assistant's turns in the prompt column), and further columns by new name;
                     `a.b` is a nested column
    chat_template    None or 'auto': the tokenizer's, if it has one; True: the tokenizer's, required; False or 'none':
                     plain text; any other string: a template, or a .jinja file with one
    template_kwargs  passed to the template with the messages
    options          settings of a reasoning_gym task
    supervised       rows have completions to be trained on; max_length then limits prompt and completion together
    """

    max_length: int | None = None
    size: int | None = None
    seed: int = 1
    system_prompt: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    chat_template: bool | str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    supervised: bool = False


@dataclass(frozen=True)
class Dataset:
    """Ordered rows and how to render them; prompts that are too long have been removed.

    `prompt(row)` takes a row number in 0…len−1; `row_of(seed, submission)` gives it.
    """

    source: str
    split: str
    rows: Sequence[Row]  # the source's columns as they are; 'answer' is added if the answer has another name
    tokenizer: Any
    system_prompt: str | None = None
    prompt_column: str = "question"
    chat: bool | str = False  # False: plain text; True: the tokenizer's chat template; a string: that template
    answer_column: str | None = None
    num_too_long: int = 0
    note: str = ""  # how the source was divided into training and held-out rows, if a user should know it
    key: str = "train_dataset"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    supervised: bool = False  # prompts have a target
    completion_column: str | None = None  # of a supervised data set; None: the prompt column holds conversations
    processor: Any = None  # of a vision-language model; None: the model takes text alone
    folder: Path = Path()  # of image files whose names are relative
    _prompts: dict[int, Prompt] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, row: int) -> Prompt:
        if row not in self._prompts:
            self._prompts[row] = self._render(row)
        return self._prompts[row]

    def row_of(self, seed: int, submission: int, *, shuffle: bool = True) -> int:
        """The row of submission number `submission`; the stream of submissions is endless."""
        return order(seed, len(self), submission, shuffle=shuffle)

    def candidates(self, seed: int, submission: int) -> NDArray[np.int64]:
        """The rows that a curriculum may give a submission."""
        return np.arange(len(self))

    def describe(self) -> str:
        """A line for the user: source, split and number of rows."""
        key = f"{owner_of(self.key)}.max_length"
        what = "rows" if self.supervised else "prompts"
        dropped = f", {self.num_too_long} longer {what} dropped ({key})" if self.num_too_long else ""
        note = f"; {self.note}" if self.note else ""
        if self.supervised:
            trained = f"column {self.completion_column!r}" if self.completion_column else "assistant turns"
            return f"{self.key}: {len(self)} rows of {self.source} ({self.split}), trained: {trained}{dropped}{note}"
        return f"{self.key}: {len(self)} problems of {self.source} ({self.split}){dropped}{note}"

    def digest(self) -> str:
        """A hash of prompts and answers, which a resumed run compares."""
        total = hashlib.sha256()
        for row in self.rows:
            # Only what decides training: other columns may change without making the run another one.
            parts = (row.get(self.prompt_column), self._reference(row))
            if self.supervised and self.completion_column is not None:
                parts += (column(row, self.completion_column),)
            if images := given_images(row):
                parts += (image_digest(images, self.folder, self.source),)
            total.update(repr(parts).encode("utf-8", "surrogatepass"))
        return total.hexdigest()

    def text(self, row: int) -> str:
        """The prompt of a row as the tokenizer gets it."""
        return self._prompts[row].text if row in self._prompts else self._text(row)[0]

    def excess(self, row: int, limit: int) -> str:
        """How long the prompt of a row is if it has more than `limit` tokens, in words; "" if it has not.

        Of a supervised row: prompt and completion together.
        A text is tokenized only if its size leaves the answer open, so 300 MB in one row cost nothing.
        """
        beat(f"rendering row {row} of {self.key}")
        if self.supervised:
            length = _num_tokens(self.prompt(row))
        elif row in self._prompts or given_images(self.rows[row]):
            length = len(self.prompt(row).tokens)
        else:
            text = self._text(row)[0]
            if len(text) > max(limit, 1) * MAX_CHARACTERS_PER_TOKEN:
                return f"{len(text)} characters"
            if self._num_bytes(row, text) * MAX_TOKENS_PER_BYTE + NUM_SPECIAL_TOKENS <= limit:
                return ""
            length = len(self.prompt(row).tokens)
        return f"{length} tokens" if length > limit else ""

    @property
    def has_references(self) -> bool:
        """Whether rows have an answer that built-in rewards can compare with."""
        return self.answer_column is not None or any(row.get("answer") is not None for row in self.rows[:1])

    @property
    def columns(self) -> list[str]:
        """Names of the first row's columns in the source."""
        return [name for name, value in self.rows[0].items() if name != "answer" or value is not None]

    def _reference(self, row: Row) -> Any:
        """The final answer of a row: of an answer in GSM8K's form, what follows `####`; otherwise the answer."""
        answer = None if self.answer_column is None else column(row, self.answer_column)
        return final_answer(answer) if isinstance(answer, str) else answer

    def _render(self, row: int) -> Prompt:
        text, messages = self._text(row)
        columns = self.rows[row]
        data = dict(columns)
        if files := self._image_files(row, messages):
            return self._render_images(row, text, messages, files)
        target = self._target(row, messages) if self.supervised else None
        if not isinstance(column(columns, self.prompt_column), str):
            data["messages"] = messages  # marks a conversational row, also for rewards with TRL's signature
        # A template adds the special tokens itself.
        special = {} if self.chat is False else {"add_special_tokens": False}
        self._num_bytes(row, text)
        tokens = self.tokenizer.encode(text, **special)
        if not len(tokens):
            raise DataError(f"{self.source}, row {row}: the prompt {text!r} has no tokens")
        reference = self._reference(columns)
        return Prompt(
            tuple(int(t) for t in tokens), text, data, self.source, row, tuple(messages), reference, target=target
        )

    def _image_files(self, row: int, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        images, where = given_images(self.rows[row], messages), f"{self.source}, row {row}"
        if images and self.processor is None:
            raise DataError(
                f"{where}: the prompt shows an image, and the model takes text alone; set actor.path to a "
                "vision-language model (Qwen3.5: and actor.freeze_vision to true or false), or remove the column"
            )
        if images and self.supervised:
            raise DataError(f"{where}: the prompt shows an image, and supervised fine-tuning takes text alone")
        return image_files(images, self.folder, where)

    def _render_images(self, row: int, text: str, messages: list[dict[str, Any]], files: list[Any]) -> Prompt:
        if self.chat is False and self.processor.placeholder not in text:
            text = self.processor.placeholder * len(files) + text
        try:
            tokens, images = self.processor.prompt(text, files, add_special_tokens=self.chat is False)
        except DataError as error:
            raise DataError(f"{self.source}, row {row}: {error}") from error.__cause__
        names = [file.name for file in files]
        data, reference = without_pixels(self.rows[row], names), self._reference(self.rows[row])
        return Prompt(tokens, text, data, self.source, row, tuple(messages), reference, images=images)

    def _target(self, row: int, prompt: list[dict[str, Any]]) -> Sample:
        """The completion of a row, tokenized."""
        where, columns = f"{self.source}, row {row}", self.rows[row]
        if self.completion_column is None:
            rest = split_conversation(column(columns, self.prompt_column))[1]
        else:
            given = column(columns, self.completion_column)
            rest = [{"role": "assistant", "content": given}] if isinstance(given, str) else given
            if self.chat is False and isinstance(given, str):
                return plain_target(given, self.tokenizer, where)
        return chat_target(prompt, rest, partial(self._chat_text, row), self.tokenizer, where)

    def _num_bytes(self, row: int, text: str) -> int:
        """The size of a prompt's text; DataError if it cannot be encoded."""
        try:
            return len(text.encode())
        except UnicodeEncodeError as error:
            raise DataError(
                f"{self.source}, row {row}: the prompt has a lone surrogate (U+{ord(text[error.start]):04X}) at "
                f"character {error.start}, which is not valid text; remove it"
            ) from None

    def _text(self, row: int) -> tuple[str, list[dict[str, Any]]]:
        """The rendered prompt of a row, and its messages."""
        content = column(self.rows[row], self.prompt_column)
        if self.supervised and self.completion_column is None:
            content = split_conversation(content)[0]
        messages = prompt_messages(content, self.system_prompt)
        if self.chat is False:
            if not isinstance(content, str):
                raise DataError(
                    f"{self.source}, row {row}: the prompt is a list of messages, but no chat template is used; "
                    f"set {owner_of(self.key)}.chat_template, or use plain text"
                )
            return content if self.system_prompt is None else f"{self.system_prompt}\n\n{content}", messages
        if self.processor is not None:
            messages = with_image_parts(messages, len(given_images(self.rows[row], messages)))
        return self._chat_text(row, messages, True), messages

    def _chat_text(self, row: int, messages: Sequence[Mapping[str, Any]], asks: bool) -> str:
        """Messages by the chat template; `asks`: the beginning of an assistant's turn follows them."""
        own = None if self.processor is None else self.processor.chat_template
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.chat if isinstance(self.chat, str) else own,
                add_generation_prompt=asks,
                tokenize=False,
                **self.template_kwargs,
            )
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(
                f"{self.source}, row {row}: the chat template cannot render the messages "
                f"({str(error) or type(error).__name__}); set {owner_of(self.key)}.chat_template or system_prompt"
            ) from error


def load_dataset(
    path: str,
    split: str | None = "train",
    settings: DataSettings | None = None,
    *,
    tokenizer: Any,
    key: str = "train_dataset",
    **changes: Any,
) -> Dataset:
    """Load a data set by name. Errors name the key of config section `key` to change.

    path      `embedded:arithmetic[:2-3]`, `reasoning_gym:<task>`, a .jsonl, .json, .csv or .parquet file, a folder of
              them, or a hub name; a copy of the latter in $GSPO_DATA is used first
    split     train, test (valid, …), or None or 'all' for every row
    changes   fields of `DataSettings`: load_dataset(path, tokenizer=tokenizer, max_length=512)
    """
    settings = replace(settings or DataSettings(), **changes)
    chosen: list[str] = []

    # The column is found at the first row and then reused.
    def prompt_text(row: Row) -> str:
        if not chosen:
            chosen.append(find_prompt_column(row, settings.columns.get("prompt"), path, owner_of(key)))
        content = column(row, chosen[0])
        return content if isinstance(content, str) else repr(content)

    notes: list[str] = []
    rows = rows_of(
        path,
        split,
        size=settings.size,
        seed=settings.seed,
        options=settings.options,
        text_of=prompt_text,
        key=key,
        notes=notes,
    )
    place = Path(path).expanduser()
    folder = place if place.is_dir() else place.parent
    made = make_dataset(rows, settings, tokenizer=tokenizer, source=path, split=split or "all", key=key, folder=folder)
    return replace(made, note="; ".join(notes))


def make_dataset(
    rows: Iterable[Mapping[str, Any]],
    settings: DataSettings | None = None,
    *,
    tokenizer: Any,
    source: str = "rows",
    split: str = "all",
    key: str = "train_dataset",
    folder: Path = Path(),
    **changes: Any,
) -> Dataset:
    """A data set of rows that the caller has loaded; `settings` and `changes` as in `load_dataset`.

    tokenizer  or the processor of a vision-language model, which has a tokenizer
    folder     of image files whose names are relative
    """
    settings = replace(settings or DataSettings(), **changes)
    processor = tokenizer if hasattr(tokenizer, "tokenizer") else None
    tokenizer = tokenizer if processor is None else processor.tokenizer
    if isinstance(rows, str | Path):
        raise DataError(f"{source} must be rows, got the path {str(rows)!r}: set {key}.path to it instead")
    rows = list(rows)
    if odd := next(((index, row) for index, row in enumerate(rows) if not isinstance(row, Mapping)), None):
        raise DataError(f"{source}, row {odd[0]}: a row must be a mapping of columns, got {type(odd[1]).__name__}")
    rows = [dict(row) for row in rows]
    if not rows:
        raise DataError(f"{key}.path: {source} (split {split}) has no rows; check {key}.split and {key}.size")
    owner = owner_of(key)
    # Columns by a new name first: they may be found as the prompt or the answer.
    for new, name in settings.columns.items():
        if new not in ("prompt", "answer", "completion"):
            require(rows[0], name, new, source, owner)
            rows = [{**row, new: column(row, name)} for row in rows]
    prompt_name = find_prompt_column(rows[0], settings.columns.get("prompt"), source, owner)
    answer_name = find_answer_column(rows[0], settings.columns.get("answer"), source, owner)
    parsed = [with_answer(row, index, prompt_name, answer_name, source, owner) for index, row in enumerate(rows)]
    completion_name = None
    if settings.supervised:
        given = settings.columns.get("completion")
        completion_name = find_completion_column(rows[0], given, prompt_name, source, owner)
        for index, row in enumerate(rows):
            check_completion(row, index, prompt_name, completion_name, source, owner)
    whole = Dataset(
        source,
        split,
        parsed,
        tokenizer,
        settings.system_prompt,
        prompt_name,
        chat=chosen_template(settings.chat_template, tokenizer if processor is None else processor, owner),
        answer_column=answer_name,
        key=key,
        template_kwargs=settings.template_kwargs,
        supervised=settings.supervised,
        completion_column=completion_name,
        processor=processor,
        folder=folder,
    )
    return whole if settings.max_length is None else _without_long_prompts(whole, settings.max_length)


def _without_long_prompts(data: Dataset, max_length: int) -> Dataset:
    kept = [row for row in range(len(data)) if not data.excess(row, max_length)]
    if not kept:
        shortest = min(range(len(data)), key=lambda row: len(data.text(row)))
        raise DataError(
            f"{owner_of(data.key)}.max_length is {max_length}, but the shortest of {len(data)} prompts of "
            f"{data.source} has {data.excess(shortest, max_length)}; raise it"
        )
    # Rows are renumbered, and the rendered prompts are kept, so that they are not tokenized twice.
    prompts = {new: replace(data._prompts[row], row=new) for new, row in enumerate(kept) if row in data._prompts}
    rows = [data.rows[row] for row in kept]
    return replace(data, rows=rows, num_too_long=len(data) - len(kept), _prompts=prompts)


def _num_tokens(prompt: Prompt) -> int:
    """Tokens of a supervised row's longest sequence."""
    assert prompt.target is not None
    return max(len(prompt.tokens if s.prompt is None else s.prompt) + len(s.tokens) for s in prompt.target.sequences)

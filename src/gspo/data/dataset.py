"""A data set as the trainer sees it: numbered problems, each rendered once into the tokens of its prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gspo.data import arithmetic
from gspo.data.order import order
from gspo.data.sources import Row, rows_of
from gspo.errors import DataError
from gspo.types import Prompt

_PROMPT_COLUMNS = ("prompt", "question", "problem", "messages", "instruction", "input", "query")
_ANSWER_COLUMNS = ("answer", "final_answer", "ground_truth", "target", "solution", "label", "output", "response")


@dataclass(frozen=True)
class Dataset:
    """Ordered rows and how to render them. Rows that were too long are already gone, and counted.

    `prompt(row)` takes a position in 0…len−1; `row_of(seed, submission)` gives it.
    """

    source: str
    split: str
    rows: Sequence[Row]  # columns as found, plus 'answer' and, where the answer was worked out, 'solution'
    tokenizer: Any
    system_prompt: str | None = None
    prompt_column: str = "question"
    chat: bool | str = False  # False: plain text; True: the tokenizer's chat template; a string: that template
    num_too_long: int = 0
    key: str = "train_dataset"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    _prompts: dict[int, Prompt] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, row: int) -> Prompt:
        if row not in self._prompts:
            self._prompts[row] = self._render(row)
        return self._prompts[row]

    def row_of(self, seed: int, submission: int, *, shuffle: bool = True) -> int:
        """The row that is submitted as number `submission` of the endless stream."""
        return order(seed, len(self), submission, shuffle=shuffle)

    def describe(self) -> str:
        """What was found, in a line for the user."""
        dropped = f", {self.num_too_long} more dropped by {self.key}.max_length" if self.num_too_long else ""
        return f"{self.key}: {len(self)} problems of {self.source} ({self.split}){dropped}"

    def digest(self) -> str:
        """A fingerprint of what will be asked, for refusing to resume on other data."""
        total = hashlib.sha256()
        for row in self.rows:
            total.update(repr((row.get(self.prompt_column), row["answer"])).encode("utf-8", "surrogatepass"))
        return total.hexdigest()

    def _render(self, row: int) -> Prompt:
        columns = self.rows[row]
        content = _column(columns, self.prompt_column)
        messages = _messages(content, self.system_prompt)
        data = dict(columns)
        if not isinstance(content, str):
            data["messages"] = messages  # the mark of a conversational row, also for TRL's rewards
        if self.chat is False:
            if not isinstance(content, str):
                raise DataError(
                    f"{self.source}, row {row}: the prompt is a list of messages, and no chat template is in use; "
                    f"set {self.key}.chat_template, or give plain text"
                )
            text = content if self.system_prompt is None else f"{self.system_prompt}\n\n{content}"
            tokens = self.tokenizer.encode(text)
        else:
            template = self.chat if isinstance(self.chat, str) else None
            try:
                text = self.tokenizer.apply_chat_template(
                    messages,
                    chat_template=template,
                    add_generation_prompt=True,
                    tokenize=False,
                    **self.template_kwargs,
                )
            except Exception as error:  # templates are programs and raise what they like
                raise DataError(
                    f"{self.source}, row {row}: the chat template refused the messages ({error}); "
                    f"set {self.key}.chat_template or {self.key}.system_prompt"
                ) from error
            # The template writes the special tokens itself.
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
        if not len(tokens):
            raise DataError(f"{self.source}, row {row}: the prompt {text!r} has no tokens")
        return Prompt(tuple(int(t) for t in tokens), text, data, self.source, row, tuple(messages))


def load_dataset(
    path: str,
    split: str | None = "train",
    *,
    tokenizer: Any,
    max_length: int | None = None,
    size: int | None = None,
    seed: int = 1,
    system_prompt: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    columns: Mapping[str, str] | None = None,
    chat_template: bool | str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    key: str = "train_dataset",
) -> Dataset:
    """Load a data set by name; DataError says what is wrong and which key of section `key` to set.

    path: `embedded:arithmetic[:2-3]`, `reasoning_gym:<task>`, a .jsonl/.json/.csv/.parquet file, a folder of them, or a
    hub name (a local copy under $GSPO_DATA goes first). split: train, test/valid/…, or None/'all' for every row.
    Columns are found by their usual names unless given; `a.b` reaches into a nested column. columns: further ones by
    new name. options: settings of a procedural task.
    chat_template: None or 'auto' uses the tokenizer's if it has one; False or 'none' never; True insists; any other
    string is a template, or a .jinja file with one. template_kwargs: what it is given beside the messages.
    max_length: prompts of more tokens are dropped and counted in `num_too_long`.
    """
    names: list[str] = []

    def prompt_text(row: Row) -> str:
        if not names:
            names.append(_prompt_column(row, prompt_column, path, key))
        content = _column(row, names[0])
        return content if isinstance(content, str) else repr(content)

    rows = rows_of(path, split, size=size, seed=seed, options=options or {}, text_of=prompt_text, key=key)
    return make_dataset(
        rows,
        source=path,
        split=split or "all",
        tokenizer=tokenizer,
        max_length=max_length,
        system_prompt=system_prompt,
        prompt_column=prompt_column,
        answer_column=answer_column,
        columns=columns,
        chat_template=chat_template,
        template_kwargs=template_kwargs,
        key=key,
    )


def make_dataset(
    rows: Iterable[Mapping[str, Any]],
    *,
    tokenizer: Any,
    source: str = "rows",
    split: str = "all",
    max_length: int | None = None,
    system_prompt: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    columns: Mapping[str, str] | None = None,
    chat_template: bool | str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    key: str = "train_dataset",
) -> Dataset:
    """A data set of rows the caller already has, with the arguments of `load_dataset`."""
    rows = [dict(row) for row in rows]
    if not rows:
        raise DataError(f"{key}.path: {source} (split {split}) has no rows; check {key}.split and {key}.size")
    for new, name in (columns or {}).items():
        _require(rows[0], str(name), f"columns.{new}", source, key)
        rows = [{**row, new: _column(row, str(name))} for row in rows]
    prompt_name = _prompt_column(rows[0], prompt_column, source, key)
    answer_name = _answer_column(rows[0], answer_column, source, key)
    parsed = [_with_answer(row, index, prompt_name, answer_name, source, key) for index, row in enumerate(rows)]
    chat = _chat(chat_template, tokenizer, key)
    with_template = {"chat": chat, "template_kwargs": template_kwargs or {}}
    whole = Dataset(source, split, parsed, tokenizer, system_prompt, prompt_name, key=key, **with_template)
    if max_length is None:
        return whole
    lengths = [len(whole.prompt(row).tokens) for row in range(len(whole))]
    kept = [row for row, length in enumerate(lengths) if length <= max_length]
    if not kept:
        raise DataError(
            f"{key}.max_length is {max_length}, but the shortest of {len(parsed)} prompts of {source} has "
            f"{min(lengths)} tokens; set it higher"
        )
    prompts = {new: replace(whole.prompt(row), row=new) for new, row in enumerate(kept)}
    fit = [parsed[row] for row in kept]
    return replace(whole, rows=fit, num_too_long=len(parsed) - len(kept), _prompts=prompts)


def _chat(chat_template: bool | str | None, tokenizer: Any, key: str) -> bool | str:
    """False: plain text; True: the tokenizer's template; a string: that template."""
    own = getattr(tokenizer, "chat_template", None)
    if chat_template in (None, "auto"):
        return bool(own)
    if chat_template is True and not own:
        raise DataError(
            f"{key}.chat_template is true, but the tokenizer has none; give a .jinja file, or false for plain text"
        )
    if isinstance(chat_template, bool) or chat_template == "none":
        return chat_template is True
    template = str(chat_template)
    if template.endswith(".jinja"):
        try:
            return Path(template).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DataError(f"{key}.chat_template: {template} cannot be read: {error}") from None
    if "{{" not in template and "{%" not in template:
        raise DataError(
            f"{key}.chat_template must be auto, true, false, none, a .jinja file or a Jinja template, got {template!r}"
        )
    return template


def default_reward(path: str) -> dict[str, Any]:
    """The reward a data set brings when the user names none, as an entry for `rewards.spec.reward_spec`.

    >>> default_reward("embedded:arithmetic")
    {'name': 'final', 'marker': '>'}
    """
    if path.startswith("embedded:arithmetic"):
        return {"name": "final", "marker": arithmetic.MARKER}
    return {"name": "reasoning_gym" if path.startswith("reasoning_gym:") else "math"}


def parse_gsm8k(answer: str) -> tuple[str, str] | None:
    """(final answer, whole solution) of a text in GSM8K's form, None for any other.

    >>> parse_gsm8k("600 x 2 = 1200.\\n#### 1,200")
    ('1200', '600 x 2 = 1200.\\n#### 1,200')
    """
    _, mark, tail = answer.rpartition("####")
    return (tail.strip().replace(",", ""), answer) if mark else None


def _with_answer(row: Row, index: int, prompt_name: str, answer_name: str | None, path: str, key: str) -> Row:
    content = _column(row, prompt_name)
    if not isinstance(content, list | str) or not content or (isinstance(content, str) and not content.strip()):
        raise DataError(f"{path}, row {index}: column {prompt_name!r} must be text or messages, got {content!r}")
    answer = None if answer_name is None else _column(row, answer_name)
    if answer_name is not None and answer is None:
        raise DataError(f"{path}, row {index}: column {answer_name!r} is missing or null; set {key}.answer_column")
    if isinstance(answer, str) and (parsed := parse_gsm8k(answer)):
        return {**row, "answer": parsed[0], "solution": parsed[1]}
    return {**row, "answer": answer}


def _prompt_column(row: Row, given: str | None, path: str, key: str) -> str:
    if given is not None:
        _require(row, given, "prompt_column", path, key)
        return given
    for name in _PROMPT_COLUMNS:
        if row.get(name) is not None:
            return name
    raise DataError(
        f"{path} has no column named {', '.join(_PROMPT_COLUMNS)}; it has {', '.join(row) or 'none'}: "
        f"set {key}.prompt_column"
    )


def _answer_column(row: Row, given: str | None, path: str, key: str) -> str | None:
    """None where there is no such column: a data set may do without answers, if its rewards do."""
    if given is not None:
        _require(row, given, "answer_column", path, key)
        return given
    return next((name for name in _ANSWER_COLUMNS if row.get(name) is not None), None)


def _require(row: Row, name: str, what: str, path: str, key: str) -> None:
    if _column(row, name) is None:
        raise DataError(f"{key}.{what} is {name!r}, but {path} has the columns {', '.join(row)}")


def _column(row: Mapping[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for step in name.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _messages(content: Any, system_prompt: str | None) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else [dict(m) for m in content]
    if system_prompt is not None and not (messages and messages[0].get("role") == "system"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages

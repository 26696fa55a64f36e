"""Conversations of a row: the chat template, the messages, and for supervised fine-tuning the tokens that are trained.

A supervised row has a prompt and a completion (strings, or lists of messages), or a conversation whose assistant turns
are all trained. Prompt and completion are tokenized apart, so the prompt has the tokens that RL and evaluation use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gspo.errors import DataError
from gspo.system import read_regular
from gspo.types import Sample, SampleId, Score

Message = Mapping[str, Any]
# Messages, whether a generation prompt follows → text.
Render = Callable[[Sequence[Message], bool], str]

# In this order; the last ones are also names of final answers.
COMPLETION_COLUMNS = ("completion", "response", "solution", "output", "answer", "target", "label")
# The data set is deterministic: its distribution gives each of its tokens the probability 1.
LOG_ONE = 0.0


def is_conversation(content: Any) -> bool:
    """Whether a prompt column holds messages with an assistant turn, which is what is trained."""
    return isinstance(content, list) and any(isinstance(m, Mapping) and m.get("role") == "assistant" for m in content)


def split_conversation(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The messages before the first assistant turn, and the rest up to the last assistant turn."""
    turns = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    return list(messages[: turns[0]]), list(messages[turns[0] : turns[-1] + 1])


def plain_target(text: str, tokenizer: Any, where: str) -> Sample:
    """A completion without a chat template: its tokens and EOS, all trained."""
    return _sample([(text, True)], tokenizer, where)


def chat_target(
    prompt: Sequence[Message], rest: Sequence[Message], render: Render, tokenizer: Any, where: str
) -> Sample:
    """The turns after a prompt; assistant turns are trained, others are input.

    Turns form one sequence while the template renders a longer conversation as a continuation of a shorter one. Where
    it does not (Qwen3 removes earlier thinking), a further sequence begins, with its own prompt: `Sample.rest`.
    """
    sequences: list[tuple[str | None, list[tuple[str, bool]]]] = []  # prompt text or None, (text, is trained) …
    written = ""  # the text of the current sequence, with its prompt
    for place, message in enumerate(rest):
        if message.get("role") != "assistant":
            continue
        before = render([*prompt, *rest[:place]], True)
        whole = render([*prompt, *rest[: place + 1]], False)
        if not whole.startswith(before):
            raise DataError(
                f"{where}: the chat template does not render the assistant's turn as a continuation of the prompt with "
                "its generation prompt, so its tokens cannot be told apart; set train_dataset.chat_template"
            )
        # What follows the last visible character (a line end after <|im_end|>) is not sampled, so it is not trained.
        said = whole[len(before) :].rstrip()
        if not said:
            raise DataError(f"{where}: an assistant's turn is empty")
        if not sequences:
            sequences.append((None, []))
        elif before.startswith(written):
            sequences[-1][1].append((before[len(written) :], False))
        else:
            sequences.append((before, []))
        sequences[-1][1].append((said, True))
        written = before + said
    first, *others = [
        replace(
            _sample(spans, tokenizer, where),
            prompt=None if own is None else tuple(tokenizer.encode(own, add_special_tokens=False)),
        )
        for own, spans in sequences
    ]
    return replace(first, rest=tuple(others))


def _sample(spans: Sequence[tuple[str, bool]], tokenizer: Any, where: str) -> Sample:
    """Spans of text as one sequence; EOS is added if the last one does not end with a special token."""
    parts = [(tokenizer.encode(text, add_special_tokens=False), trained) for text, trained in spans]
    last = parts[-1][0]
    if not last:
        raise DataError(f"{where}: the completion {spans[-1][0]!r:.100} has no tokens")
    if last[-1] not in tokenizer.all_special_ids:
        if tokenizer.eos_token_id is None:
            raise DataError(f"{where}: the tokenizer has no EOS token, which must end a completion; set tokenizer_path")
        last.append(tokenizer.eos_token_id)
    lengths = [len(tokens) for tokens, _ in parts]
    tokens = np.concatenate([tokens for tokens, _ in parts]).astype(np.int32)
    return replace(
        Sample.of(
            SampleId(0, 0),
            tokens,
            np.full(len(tokens), LOG_ONE),
            version=0,
            mask=np.repeat([trained for _, trained in parts], lengths),
        ),
        outcome=Score(1.0),
    )


def chosen_template(chat_template: bool | str | None, tokenizer: Any, key: str) -> bool | str:
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
            return read_regular(Path(template).expanduser()).decode()
        except (OSError, ValueError) as error:
            raise DataError(f"{key}.chat_template: {template} cannot be read: {error}") from None
    if "{{" not in template and "{%" not in template:
        raise DataError(
            f"{key}.chat_template must be auto, true, false, none, a .jinja file or a Jinja template, got {template!r}"
        )
    return template


def prompt_messages(content: Any, system_prompt: str | None) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else [dict(m) for m in content]
    if system_prompt is not None and not (messages and messages[0].get("role") == "system"):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages

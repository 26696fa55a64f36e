"""Messages to tokens and back. Sampled tokens are never tokenised again.

The first request of a conversation is rendered as a whole. For a later one only the new part is rendered: the template
renders the conversation with a marker in place of the last answer, and the text after the marker is tokenised and
appended to the sampled tokens. Tool calls have the format of Hermes, Qwen and others,
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Without a template, a message is its content.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.system import naming_panics, parse_json

Message = Mapping[str, Any]

_MARK = "gspo7d1c9answer"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


class TemplateError(Exception):
    """The chat template or the tokenizer cannot handle these messages, or they cannot continue after an answer."""


@dataclass(frozen=True)
class Chat:
    """Tokenizer and template of a model. `template` None: the tokenizer's; False: plain text, contents concatenated."""

    tokenizer: Any
    template: str | bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return self.template is False or not (self.template or getattr(self.tokenizer, "chat_template", None))

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[int, ...]:
        """Tokens of the whole conversation up to where the model's answer begins."""
        if self.is_plain:
            # A system message is separated from the rest; the other contents are concatenated as they are.
            system = [_content(m) + "\n\n" for m in messages[:1] if m.get("role") == "system"]
            text = "".join([*system, *(_content(m) for m in messages[len(system) :])])
            return self.encode(text, begins=True)
        return self.encode(self._text(messages, tools))

    def continue_after(
        self,
        answer: Sequence[int],
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[Any] | None = None,
    ) -> tuple[int, ...]:
        """The tokens that `new` messages add after `answer`, the sampled answer to `history`."""
        if self.is_plain:
            return self.encode("".join(map(_content, new)))
        mark = _MARK
        while any(mark in _content(m) for m in (*history, *new)):  # a message contains the marker
            mark += "x"
        # The template renders the conversation with a marker in place of the answer; only the text after it is new.
        placeholder = {"role": "assistant", "content": mark}
        _, found, tail = self._text([*history, placeholder, *new], tools).partition(mark)
        if not found:
            raise TemplateError(
                "the chat template changes the content of assistant messages, so the conversation cannot be continued"
            )
        # If the model has sampled its end token, remove the one that the template adds.
        end = self.tokenizer.decode(list(answer[-1:])) if len(answer) else ""
        if end and answer[-1] in self.tokenizer.all_special_ids and tail.startswith(end):
            tail = tail[len(end) :]
        return self.encode(tail)

    def encode(self, text: str, *, begins: bool = False) -> tuple[int, ...]:
        """Tokens of a text; `begins`: it is the start of a sequence and gets special tokens. Raises TemplateError."""
        try:
            with naming_panics("the tokenizer", TemplateError):
                return tuple(int(t) for t in self.tokenizer.encode(text, add_special_tokens=begins))
        except Exception as error:
            raise TemplateError(f"the tokenizer cannot encode the text: {str(error)[:200]}") from error

    def parse(self, tokens: Sequence[int]) -> dict[str, Any]:
        """An answer as an assistant message: `content`, and `tool_calls` if it has any.

        A call that is not valid JSON stays in the content as text.
        """
        return parse_calls(self.text(tokens))

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _text(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                [_plain(m) for m in messages],
                tools=list(tools) if tools else None,
                chat_template=self.template if isinstance(self.template, str) else None,
                add_generation_prompt=True,
                tokenize=False,
                **self.template_kwargs,
            )
        except Exception as error:  # a template is a program and may raise anything
            raise TemplateError(f"the chat template cannot render the messages: {str(error)[:200]}") from error


def parse_calls(text: str, new_id: Callable[[int], str] = "call_{}".format) -> dict[str, Any]:
    """
    >>> parse_calls('Let me see. <tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>')
    {'role': 'assistant', 'content': 'Let me see.', 'tool_calls': [{'id': 'call_0', 'type': 'function', 'function': \
{'name': 'calculator', 'arguments': '{"expression": "2*3"}'}}]}
    """
    calls, kept, end = [], [], 0
    # Text outside valid calls stays content.
    for found in _CALL.finditer(text):
        try:
            call = parse_json(found[1])
            name, arguments = call["name"], call.get("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, dict):
                continue
            # As a client can read it and a tokenizer encode it: without NaN, infinity and lone surrogates.
            written = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
            "".join(written.values()).encode()
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        calls.append({"id": new_id(len(calls)), "type": "function", "function": written})
        kept.append(text[end : found.start()])
        end = found.end()
    message: dict[str, Any] = {"role": "assistant", "content": ("".join(kept) + text[end:]).strip() if calls else text}
    return message | {"tool_calls": calls} if calls else message


def same_message(a: Message, b: Message) -> bool:
    """Whether role, content and tool calls are equal; client libraries add other fields."""
    return a.get("role") == b.get("role") and _content(a) == _content(b) and _calls(a) == _calls(b)


def continues(history: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether `messages` starts with `history` and has more messages."""
    return len(messages) > len(history) and all(map(same_message, history, messages))


def _content(message: Message) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    # Content in parts, as the OpenAI API allows.
    parts = [part.get("text", "") if isinstance(part, Mapping) else str(part) for part in content]
    return "".join(parts)


def _calls(message: Message) -> list[tuple[str, Any]]:
    """Name and arguments of each call; arguments that are JSON text are parsed."""
    out: list[tuple[str, Any]] = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = parse_json(arguments)
        out.append((function.get("name"), arguments))
    return out


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: content as a string, arguments of calls as objects."""
    plain = {**message, "content": _content(message)}
    if calls := _calls(message):
        plain["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
        ]
    else:
        # Some templates only test whether `tool_calls` exists: an empty list must not be there.
        plain.pop("tool_calls", None)
    return plain

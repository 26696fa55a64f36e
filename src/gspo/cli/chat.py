"""`gspo chat`: talk to a run or a model in the terminal, with the in-process sampler."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.cli.runs import find_model
from gspo.config import load
from gspo.errors import ConfigError, DataError, GspoError
from gspo.report import choose_step
from gspo.system import beat, inert, limited

if TYPE_CHECKING:
    from gspo.envs import Chat
    from gspo.sampling import Sampler
    from gspo.types import SamplingParams

COMMANDS = "/reset starts a new conversation, /quit ends; Ctrl-C stops an answer"


def chat(args: argparse.Namespace) -> int:
    words = list(args.words)
    if not words or "=" in words[0]:
        raise ConfigError("nothing to talk to: pass a run directory (runs/quickstart/gspo) or a model (embedded:tiny)")
    target = words.pop(0)
    given = {
        "train_dataset.system_prompt": args.system and json.dumps(args.system),
        "eval_gconfig.temperature": args.temperature,
        "eval_gconfig.max_new_tokens": args.max_new_tokens,
    }
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None] + words
    run = find_model(target)
    if run is None:
        overrides.insert(0, f"actor.path={json.dumps(target)}")
    config = load(run / "config.yaml" if run else None, overrides).config
    with contextlib.ExitStack() as stack:
        session = _open(config, run, choose_step(run, args.step) if run else 0, stack)
        return _talk(session, is_terminal=sys.stdin.isatty())


@dataclass
class ChatSession:
    """A conversation. Without a chat template nothing marks the turns, so each text is a prompt of its own."""

    chat: Chat
    sampler: Sampler
    params: SamplingParams
    max_context: int
    system: str | None = None
    _number: int = 0  # of the conversation: other draws in each
    _turn: int = 0
    _messages: list[dict[str, Any]] = field(default_factory=list)
    _prompt: tuple[int, ...] = ()  # tokens before the newest answer
    _answer: tuple[int, ...] = ()

    def reset(self) -> None:
        self._number, self._turn = self._number + 1, 0
        self._messages, self._prompt, self._answer = [], (), ()

    def ask(self, text: str) -> Iterator[str]:
        """The answer, piece by piece: a request for each token, which continues the cached row of the one before."""
        from gspo.types import Request, SampleId

        if self.chat.is_plain:
            self.reset()
        question = {"role": "user", "content": text}
        if self._messages:
            new = self.chat.continue_after(self._answer, self._messages[:-1], [question])
            prompt = self._prompt + self._answer + new
        else:
            if self.system is not None:
                self._messages.append({"role": "system", "content": self.system})
            prompt = self.chat.render([*self._messages, question])
        room = min(self.params.max_new_tokens, self.max_context - len(prompt))
        if room < 1:
            raise DataError(
                f"the conversation has {len(prompt):,} tokens, the context of the model {self.max_context:,}: /reset"
            )
        self._prompt, self._answer, shown = prompt, (), ""
        one = replace(self.params, max_new_tokens=1, min_new_tokens=0, stop=())
        try:
            for _ in range(room):
                request = Request(
                    SampleId(self._number, 0, self._turn), self._prompt + self._answer, one, keep_cache=True
                )
                self._turn += 1
                self.sampler.submit([request])
                (sample,) = self.sampler.completed()
                self._answer += tuple(sample.tokens.tolist())
                said = self.chat.text(self._answer)
                # An unfinished character decodes to U+FFFD; the next token completes it.
                if said.startswith(shown) and not said.endswith("\ufffd"):
                    yield said[len(shown) :]
                    shown = said
                if sample.finish == "stop" or any(stop in said for stop in self.params.stop):
                    break
            yield self.chat.text(self._answer)[len(shown) :]
        finally:  # also after an interrupted answer: what was said is part of the conversation
            self._messages += [question, {"role": "assistant", "content": self.chat.text(self._answer)}]


def _open(config: Any, run: Path | None, step: int, stack: contextlib.ExitStack) -> ChatSession:
    from gspo.envs import Chat
    from gspo.train import context_length, evaluation_params, load_policy, make_sampler, set_threads

    set_threads(config)
    policy, tokenizer = load_policy(config, run, step)
    sampler = make_sampler(config, policy, tokenizer, step)
    stack.callback(sampler.close)
    data = config.train_dataset
    template = {"auto": None, "none": False, True: None}.get(data.chat_template, data.chat_template)
    if isinstance(template, str) and template.endswith(".jinja"):
        template = Path(template).read_text(encoding="utf-8")
    params, _ = evaluation_params(config)
    chat = Chat(tokenizer, template, data.chat_template_kwargs)
    return ChatSession(chat, sampler, params, context_length(config, policy), data.system_prompt)


def _talk(session: ChatSession, *, is_terminal: bool) -> int:
    """Read lines and print answers until /quit or the end of the input. A pipe gets the answers alone."""
    from gspo.envs import TemplateError

    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # editing and history of input()
        plain = " Without a chat template every line is a prompt of its own." * session.chat.is_plain
        print(f"{COMMANDS}.{plain}")
    while True:
        try:
            with limited(math.inf):  # the user may take any time
                text = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            print(end="\n" * is_terminal)
            return 0
        if text == "/quit":
            return 0
        if text == "/reset":
            session.reset()
        elif text.startswith("/") and text[1:].isalpha():
            print(f"gspo: unknown command {inert(text)}: {COMMANDS}", file=sys.stderr)
        elif text:
            try:
                for piece in session.ask(text):
                    beat("a part of an answer")
                    print(inert(piece), end="", flush=True)
            except KeyboardInterrupt:
                session.sampler.abort()
            except (GspoError, TemplateError) as error:
                print(f"gspo: {inert(str(error))}", file=sys.stderr, end="")
                if not is_terminal:
                    return 1
            print(flush=True)

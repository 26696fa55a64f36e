"""A migration rule: it takes one old key out of a YAML tree and renames, checks, drops, refuses or translates it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gspo.config import Node, describe, known_keys
from gspo.config import yaml_tree as tree


@dataclass(frozen=True)
class Rule:
    """What happens to one old key.

    target      our key that takes the value (rename), or that must have the same value (repeat)
    reason      why the key is dropped, or what a translation does; for messages and documentation
    harmless    values that change nothing here and are dropped, or a test for them; other values are refused. None:
                all are dropped
    instead     what to use in place of a refused value
    translate   (move) → None, for everything else
    """

    key: str
    kind: str  # rename, repeat, drop, translate
    target: str = ""
    reason: str = ""
    harmless: tuple[Any, ...] | Callable[[Move], bool] | None = None
    instead: str = ""
    translate: Callable[[Move], None] | None = None

    @property
    def sentence(self) -> str:
        """What happens to the key, for docs/config.md."""
        if self.kind == "rename":
            return f"`{self.target}`" + (f" ({self.reason})" if self.reason else "")
        if self.kind == "repeat":
            return f"accepted if it is equal to `{self.target}`"
        if self.kind == "translate":
            return self.reason
        if self.harmless is None:
            return f"ignored: {self.reason}"
        if callable(self.harmless):
            return f"ignored if it changes nothing, else refused: {self.instead}"
        values = " or ".join(written(value) or '""' for value in self.harmless)
        return f"ignored if {values}, else refused: {self.instead}"

    def is_refused(self, move: Move) -> bool:
        if callable(self.harmless):
            return not self.harmless(move)
        return self.harmless is not None and move.node.data() not in self.harmless


@dataclass
class Move:
    """One old key on its way to our key, with the tree, and the lists that collect messages and problems."""

    rule: Rule
    node: Node
    root: Node
    problems: list[str]
    messages: list[str]

    def say(self, what: str) -> None:
        self.messages.append(f"{self.node.place}: {self.rule.key} {what}")

    def drop(self, why: str) -> None:
        self.say(f"is ignored: {why}")

    def refuse(self, what: str) -> None:
        self.problems.append(f"{self.node.place}: {self.rule.key}: {what}")

    def set(self, key: str, value: Any) -> None:
        """Give our key the value. The command line overrides the file; two values from the same source must agree."""
        # Key by key, so that only keys that really differ are in conflict.
        if isinstance(value, dict):
            for name, child in value.items():
                self.set(f"{key}.{name}", child)
            return
        # Three cases: the new value has priority, the existing one has priority, or both have the same source and must
        # agree.
        existing = self.existing(key)
        if existing is None or (self.node.from_command_line and not existing.from_command_line):
            place = self.node.place
            node = value if isinstance(value, Node) else Node(value, place, text=written(value), settled=True)
            tree.put(self.root, key, node)
        elif existing.from_command_line and not self.node.from_command_line:
            return
        elif existing.data() != (value.data() if isinstance(value, Node) else value):
            new = value if isinstance(value, Node) else Node(value, "")
            self.refuse(
                f"sets {key} to {written(new.data())}, but {existing.place} sets {key} to {written(existing.data())}; "
                "remove one of them"
            )

    def existing(self, key: str) -> Node | None:
        """The node at a key, or the null section above it."""
        node = None
        names = key.split(".")
        for depth in range(1, len(names) + 1):
            node = tree.get(self.root, ".".join(names[:depth]))
            if node is None:
                return None
            if node.value is None and depth < len(names):
                return node
        return node

    def value_of(self, key: str) -> Any:
        """The value of our key: written in the tree, or its default."""
        node = self.existing(key)
        return known_keys()[key].default if node is None else node.data()

    @property
    def is_number(self) -> bool:
        return isinstance(self.node.value, int | float) and not isinstance(self.node.value, bool)

    def switch(self) -> bool | None:
        """The value of a key that is true or false; None, with a problem, for any other value."""
        if isinstance(self.node.value, bool):
            return self.node.value
        self.problems.append(f"{self.node.place}: {self.rule.key} must be true or false, got {describe(self.node)}")
        return None


def written(value: Any) -> str:
    """A value as YAML would write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {written(child)}" for name, child in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def apply(move: Move) -> None:
    rule, node = move.rule, move.node
    if rule.translate is not None:
        rule.translate(move)
    elif rule.kind == "rename":
        move.set(rule.target, node)
        move.say(f"is now {rule.target}: {written(node.data())}")
    elif rule.kind == "repeat":
        repeat(move, rule.target)
    elif rule.is_refused(move):
        move.refuse(f"{tree.shorten(written(node.data()))} is not supported: {rule.instead}")
    else:
        move.drop(rule.reason if rule.harmless is None else "this value is what gspo does anyway")


def repeat(move: Move, target: str) -> None:
    """Accept a key that has the same value as our key, or null."""
    own = tree.get(move.root, target)
    # An unset tokenizer_path means the tokenizer of actor.path.
    if target == "tokenizer_path" and (own is None or own.value is None):
        own = tree.get(move.root, "actor.path")
    value = known_keys()[target].default if own is None else own.data()
    if move.node.value is None or move.node.data() == value or (own is not None and move.node.text == own.text):
        move.drop(f"it repeats {target}")
    else:
        move.refuse(
            f"is {tree.shorten(written(move.node.data()))}, but {target} is {tree.shorten(written(value))}; "
            f"a run has only one {target}: set {target} and remove {move.rule.key}"
        )


# -- How a table writes its rules: a pattern with braces is several keys -------------------------------------------


def expand(pattern: str) -> list[str]:
    """The keys of a pattern with braces.

    >>> expand("{saver,recover}.{a,b}")
    ['saver.a', 'saver.b', 'recover.a', 'recover.b']
    """
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    # Expand the first braces; the recursion expands the others.
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [key for part in match[1].split(",") for key in expand(head + part + tail)]


def renames(old: str, target: str) -> list[Rule]:
    return [Rule(old, "rename", target=target)]


def repeats(pattern: str, target: str) -> list[Rule]:
    """Accept the value of `target` only; of the key with the same last name if it ends with a dot."""
    names = {key: key.rpartition(".")[2] if target.endswith(".") else "" for key in expand(pattern)}
    return [Rule(key, "repeat", target=target + name) for key, name in names.items()]


def drops(pattern: str, reason: str) -> list[Rule]:
    return [Rule(key, "drop", reason=reason) for key in expand(pattern)]


def only(pattern: str, harmless: tuple[Any, ...] | Callable[[Move], bool], instead: str) -> list[Rule]:
    """Ignore these values, refuse all others."""
    return [Rule(key, "drop", harmless=harmless, instead=instead) for key in expand(pattern)]


def translates(pattern: str, reason: str, translation: Callable[[Move], None]) -> list[Rule]:
    return [Rule(key, "translate", reason=reason, translate=translation) for key in expand(pattern)]

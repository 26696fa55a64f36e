"""The verbs of the AReaL table: what it means to rename, repeat, drop, refuse or translate one key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo.config import yaml_tree as tree
from gspo.config.backends import SAMPLERS, TRAINERS, Backend, parse_allocation_mode, parse_backend
from gspo.config.validate import known_keys
from gspo.config.yaml_tree import Node, describe


@dataclass(frozen=True)
class Rule:
    """What becomes of one AReaL key.

    target      our key that takes the value, or that a repeated key must agree with
    reason      why it is dropped, or what a translation does: the message and the documentation read it
    harmless    values that ask for what happens here anyway; others are refused. None: every value is dropped
    instead     the sentence for a refused value
    translate   (move) → None, for what is more than a move
    """

    key: str
    kind: str  # rename, repeat, drop, refuse, translate
    target: str = ""
    reason: str = ""
    harmless: tuple[Any, ...] | None = None
    instead: str = ""
    translate: Callable[[Move], None] | None = None

    @property
    def sentence(self) -> str:
        """The fate of the key in words, for docs/config.md."""
        if self.kind == "rename":
            return f"`{self.target}`" + (f" ({self.reason})" if self.reason else "")
        if self.kind == "repeat":
            return f"accepted where it repeats `{self.target}`"
        if self.kind == "refuse":
            return f"refused: {self.instead}"
        if self.kind == "translate":
            return self.reason
        if self.harmless is None:
            return f"dropped: {self.reason}"
        values = " or ".join(_yaml(value) or '""' for value in self.harmless)
        return f"dropped where {values}; else refused: {self.instead}"


@dataclass
class Move:
    """One key on its way from AReaL's name to ours."""

    rule: Rule
    node: Node
    root: Node
    problems: list[str]
    messages: list[str]

    def say(self, what: str) -> None:
        self.messages.append(f"{self.node.place}: {self.rule.key} {what}")

    def refuse(self, what: str) -> None:
        self.problems.append(f"{self.node.place}: {self.rule.key}: {what}")

    def set(self, key: str, value: Any) -> None:
        """Give our key the value; the command line beats the file, equals must agree."""
        if isinstance(value, dict):
            for name, child in value.items():
                self.set(f"{key}.{name}", child)
            return
        existing = self.existing(key)
        if existing is None or (self.node.from_command_line and not existing.from_command_line):
            place = self.node.place
            node = value if isinstance(value, Node) else Node(value, place, text=_yaml(value), settled=True)
            tree.put(self.root, key, node)
        elif existing.from_command_line and not self.node.from_command_line:
            return
        elif existing.data() != (value.data() if isinstance(value, Node) else value):
            new = value if isinstance(value, Node) else Node(value, "")
            self.refuse(
                f"asks for {key} {_yaml(new.data())}, but {existing.place} sets {key} to {_yaml(existing.data())}; "
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

    def switch(self) -> bool | None:
        """The value of a yes/no key; None, with a problem, where it is neither."""
        if isinstance(self.node.value, bool):
            return self.node.value
        self.problems.append(f"{self.node.place}: {self.rule.key} must be true or false, got {describe(self.node)}")
        return None


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def apply(move: Move) -> None:
    rule, node = move.rule, move.node
    if rule.translate is not None:
        rule.translate(move)
    elif rule.kind == "rename":
        move.set(rule.target, node)
        move.say(f"is now {rule.target}: {_yaml(node.data())}")
    elif rule.kind == "repeat":
        _repeat(move)
    elif rule.kind == "refuse" or (rule.harmless is not None and node.data() not in rule.harmless):
        move.refuse(f"{tree.clip(_yaml(node.data()))} is refused: {rule.instead}")
    elif node.value is not None or rule.key not in known_keys():  # null is the default of the keys we know too
        move.say(f"dropped: {rule.reason}")


def _repeat(move: Move) -> None:
    """A section's copy of a top-level key must say the same; null says nothing."""
    target = move.rule.target
    own = tree.get(move.root, target)
    if target == "tokenizer_path" and (own is None or own.value is None):
        own = tree.get(move.root, "actor.path")
    value = known_keys()[target].default if own is None else own.data()
    if move.node.value is None or move.node.data() == value or (own is not None and move.node.text == own.text):
        move.say(f"dropped: it repeats {target}")
    else:
        move.refuse(
            f"is {tree.clip(_yaml(move.node.data()))}, but {target} is {tree.clip(_yaml(value))}; "
            f"one run has one {target}: set that, and remove this"
        )


# -- Translations that are more than a new name ---------------------------------------------------------------


def allocation_mode(move: Move) -> None:
    if move.node.value is None or move.node.value == "":
        return
    try:
        sampler, trainer = parse_allocation_mode(str(move.node.text or move.node.value))
    except ValueError as error:
        move.refuse(str(error))
        return
    for key, backend, names in (("rollout.backend", sampler, SAMPLERS), ("actor.backend", trainer, TRAINERS)):
        if not _agrees(tree.get(move.root, key), backend, names):
            move.set(key, str(backend))
    move.say(f"is now rollout.backend: {sampler} and actor.backend: {trainer}")


def _agrees(existing: Node | None, backend: Backend, names: tuple[str, ...]) -> bool:
    """Whether a written backend says the same; an engine without sizes is given them (AReaL: `backend: fsdp`)."""
    if existing is None or not isinstance(existing.value, str):
        return False
    if existing.value.strip() == backend.name:
        existing.value = existing.text = str(backend)
    try:
        return parse_backend(existing.value, names) == backend
    except ValueError:
        return False  # reported with that key


def weight_cap(move: Move) -> None:
    """behav(e)_imp_weight_cap and behave_imp_weight_mode are two keys with one meaning."""
    mode_node = tree.pop(move.root, "actor.behave_imp_weight_mode") if move.rule.key.endswith("_cap") else move.node
    cap = move.node.value if move.rule.key.endswith("_cap") else None
    mode = "token_mask" if mode_node is None else mode_node.value
    modes = ("disabled", "token_mask", "token_truncate", "sequence_mask", "sequence_truncate")
    if mode not in modes:
        move.problems.append(
            f"{(mode_node or move.node).place}: actor.behave_imp_weight_mode must be one of {', '.join(modes)}, "
            f"got {describe(mode_node or move.node)}; better, write actor.rejection_sampling"
        )
        return
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap > 1):
        move.refuse(f"must be a number above 1, got {describe(move.node)}; better, write actor.rejection_sampling")
        return
    if mode == "disabled" or (cap is None and mode_node is None):
        if move.existing("actor.rejection_sampling") is None:
            move.set("actor.rejection_sampling", None)
        fate = "null"
    else:
        level, _, action = str(mode).partition("_")
        upper = 5.0 if cap is None else float(cap)
        action = {"mask": "mask", "truncate": "clamp"}[action]
        move.set("actor.rejection_sampling", {"level": level, "action": action, "metric": "ratio", "upper": upper})
        fate = f"{{level: {level}, action: {action}, metric: ratio, upper: {upper:g}}}"
    move.say(f"is now actor.rejection_sampling: {fate}")
    if mode_node is not None and mode_node is not move.node:
        move.messages.append(f"{mode_node.place}: actor.behave_imp_weight_mode is now part of actor.rejection_sampling")


def group_size(move: Move) -> None:
    move.set("gconfig.n_samples", move.node)
    move.say(f"is now gconfig.n_samples: {_yaml(move.node.data())}")


def dynamic_sampling(move: Move) -> None:
    on = move.switch()
    if on is None:
        return
    move.set("actor.zero_variance_groups", "refill" if on else "count")
    extra = " (groups of equal rewards are replaced, so the batch keeps its size; `drop` shortens it)" if on else ""
    move.say(f"is now actor.zero_variance_groups: {'refill' if on else 'count'}{extra}")


def dynamic_bs(move: Move) -> None:
    on = move.switch()
    if on:
        move.set("actor.zero_variance_groups", "drop")
        move.say("is now actor.zero_variance_groups: drop")
    elif on is False:
        move.say("dropped: the batch has a fixed size unless actor.zero_variance_groups is drop")


def async_training(move: Move) -> None:
    on = move.switch()
    if on is None:
        return
    staleness = tree.get(move.root, "rollout.max_head_offpolicyness")
    if on:
        value = 0 if staleness is None else staleness.data()
        move.say(f"dropped: rollout.max_head_offpolicyness decides, and is {_yaml(value)}")
        return
    if staleness is not None and not (staleness.from_command_line and not move.node.from_command_line):
        tree.pop(move.root, "rollout.max_head_offpolicyness")
    move.set("rollout.max_head_offpolicyness", 0)
    now = tree.get(move.root, "rollout.max_head_offpolicyness")
    move.say(f"is now rollout.max_head_offpolicyness: {_yaml(now.data() if now else 0)}")


def loss_switch(algorithm: str) -> Callable[[Move], None]:
    def translate(move: Move) -> None:
        if move.node.value is None:
            return
        on = move.switch()
        existing = tree.get(move.root, "algorithm")
        if on and (existing is None or existing.data() != algorithm):
            move.set("algorithm", algorithm)
            move.say(f"is now algorithm: {algorithm}")
        elif on is False and existing is not None and existing.data() == algorithm:
            move.refuse(f"false contradicts algorithm: {algorithm} ({existing.place}); remove it")

    return translate


def tensorboard(move: Move) -> None:
    if not isinstance(move.node.value, dict):
        tree.put(move.root, move.rule.key, move.node)  # our own form: true or false
        return
    path = move.node.value.pop("path", None)
    for name, child in move.node.value.items():
        move.problems.append(
            f"{child.place}: {move.rule.key}.{name} is not a known key; {move.rule.key} is true or false"
        )
    on = path is not None and path.value is not None
    move.set(move.rule.key, on)
    move.say(f"is now {move.rule.key}: {_yaml(on)}" + ("; events go to the run directory" if on else ""))


def trackio(move: Move) -> None:
    if not isinstance(move.node.value, dict):
        tree.put(move.root, move.rule.key, move.node)  # our own form: true or false
        return
    mode, space = (move.node.value.get(name) for name in ("mode", "space_id"))
    on = mode is not None and mode.value not in (None, False, "disabled")
    if on and space is not None and space.value is not None:
        move.refuse("is refused with a space_id: it is written beside the run here; remove space_id")
        return
    move.set(move.rule.key, on)
    move.say(f"is now {move.rule.key}: {_yaml(on)}" + ("; its database goes to the run directory" if on else ""))


def perf_tracer(move: Move) -> None:
    enabled = move.node.value.get("enabled") if isinstance(move.node.value, dict) else None
    on = enabled is not None and enabled.value is True
    if on:
        move.set("profile", True)
    move.say("is now profile: true" if on else "dropped: its tracing is off (`profile: true` writes a timeline here)")


def other_logger(move: Move) -> None:
    mode = move.node.value.get("mode") if isinstance(move.node.value, dict) else None
    if mode is None or mode.value in (None, False, "disabled"):
        move.say("dropped: it is off")
    else:
        move.refuse("is refused: this logger is not offered; use stats_logger.wandb, tensorboard or trackio")


def engine_section(move: Move) -> None:
    if move.node.value in (None, {}):
        move.say("dropped: an empty section of an engine that does not run here")
    else:
        engine = move.rule.key.rpartition(".")[2]
        move.refuse(
            f"{engine} is an engine of AReaL's that does not run here; use actor.backend: fsdp:dN and remove it"
        )


def engine_backend(move: Move) -> None:
    actor = tree.get(move.root, "actor.backend")
    text = str(move.node.text or move.node.value)
    if (
        move.node.value is None
        or text.split(":")[0] == "fsdp"
        or (actor is not None and actor.data() == move.node.value)
    ):
        section = move.rule.key.partition(".")[0]
        move.say(f"dropped: the {section} model lives on the actor's ranks, as actor.backend places them")
    else:
        move.refuse(f"{text!r} is not offered; this model lives on the actor's ranks: remove it and set actor.backend")


def values_of(values: Mapping[Any, Any], default_for_null: bool = False) -> Callable[[Move], None]:
    """Translate foreign values of a key that is ours too; other values pass unchanged, without a message."""

    def translate(move: Move) -> None:
        for old, new in values.items():
            if move.node.value is old or (not isinstance(old, bool) and move.node.value == old and old is not None):
                place = move.node.place
                tree.put(move.root, move.rule.key, Node(new, place, text=_yaml(new), settled=True))
                move.say(f"{_yaml(old)} is now {_yaml(new)}" + (f" ({move.rule.reason})" if move.rule.reason else ""))
                return
        if default_for_null and move.node.value is None:
            move.say("null dropped: the default holds")
            return
        tree.put(move.root, move.rule.key, move.node)

    return translate


def top_k(move: Move) -> None:
    value = move.node.value
    if isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value >= 1_000_000):
        tree.put(move.root, move.rule.key, Node(0, move.node.place, text="0", settled=True))
        move.say(f"{value} is now 0, which keeps all tokens")
    else:
        tree.put(move.root, move.rule.key, move.node)

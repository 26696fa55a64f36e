"""Keys that are now a value of another key: one function per pair. Both keys of a pair may be in an old file."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gspo.algorithms import ALGORITHMS
from gspo.config import yaml_tree as tree
from gspo.config.migrate.rule import Move, Rule, written
from gspo.config.yaml_tree import Node


def _put(move: Move, target: str, value: Any) -> None:
    node = value if isinstance(value, Node) else Node(value, move.node.place, text=written(value), settled=True)
    tree.put(move.root, target, node)
    move.say(f"is now {target}: {written(node.data())}")


def _is_overridden(move: Move, target: str) -> bool:
    """Whether the command line sets the present key and a file the old one."""
    existing = tree.get(move.root, target)
    return existing is not None and existing.from_command_line and not move.node.from_command_line


def keep_sample_steps(move: Move) -> None:
    target = "rollout.dump_to_file"
    if move.node.value is None or move.value_of(target) is False or _is_overridden(move, target):
        move.drop(f"{target} decides")
    else:
        _put(move, target, move.node)


def column_name(move: Move) -> None:
    """prompt_column, answer_column and completion_column are entries of `columns`; `move.root` has both."""
    section, _, old = move.rule.key.rpartition(".")
    name = f"columns.{old.removesuffix('_column')}"
    target = name if "[" in section else f"{section}.{name}"  # the source of a mixture is its own root
    if move.node.value is None:
        move.drop(f"{section}.columns decides")
    else:
        tree.put(move.root, target, move.node)
        move.say(f"is now {section}.{name}: {written(move.node.data())}")


def columns_of_sources(root: Node, problems: list[str], messages: list[str]) -> None:
    """The same for the sources of a mixture, which are items of a list and have no dotted key."""
    for section in ("train_dataset.mixture", "valid_dataset.mixture"):
        sources = tree.get(root, section)
        for index, source in enumerate(
            sources.value if sources is not None and isinstance(sources.value, list) else ()
        ):
            for name in ("prompt_column", "answer_column", "completion_column"):
                node = tree.pop(source, name)
                if node is not None:
                    column_name(Move(Rule(f"{section}[{index}].{name}", "translate"), node, source, problems, messages))


def env_command(move: Move) -> None:
    if move.node.value in (None, []):
        move.drop("env.agent decides")
    elif move.value_of("env.agent") is not None:
        move.refuse("and env.agent are both set, but an episode uses only one of them; remove one")
    else:
        _put(move, "env.agent", move.node)


def prox_logp_recenter(move: Move) -> None:
    target, on = "actor.prox_logp_method", None if move.node.value is None else move.switch()
    if on and move.value_of(target) == "rollout":
        _put(move, target, "rollout_recentered")
    elif on is not None or move.node.value is None:
        move.drop(f"{target} decides")


def mean_leave1out(move: Move) -> None:
    target, on = "actor.reward_norm.mean_level", None if move.node.value is None else move.switch()
    if on and move.value_of(target) == "group":
        _put(move, target, "leave1out")
    elif on and move.value_of(target) == "batch":
        move.refuse(f"needs groups: set {target}: leave1out and remove it")
    elif on is not None or move.node.value is None:
        move.drop(f"{target} decides")


def overlong_penalty_factor(move: Move) -> None:
    target = "actor.overlong_reward_penalty"
    penalty, algorithm = move.value_of(target), ALGORITHMS.get(str(move.value_of("algorithm")))
    if penalty is None and algorithm is not None:
        penalty = algorithm.overlong_penalty
    if move.node.value is None or not penalty or move.node.value == 1:
        move.drop(f"{target} decides")
    else:
        _put(move, target, move.node if move.node.value else False)


def curriculum(move: Move) -> None:
    target = "train_dataset.shuffle"
    if move.node.value not in (None, "none", "pass_rate"):
        move.refuse(f"is now {target}, which is true, false or pass_rate")
    elif move.node.value != "pass_rate" or _is_overridden(move, target):
        move.drop(f"{target} decides")
    elif move.value_of(target) is False:
        move.refuse(f"draws prompts at random, but {target} is false; set {target}: pass_rate and remove it")
    else:
        _put(move, target, "pass_rate")


def stop_token_ids(move: Move) -> None:
    own = tree.get(move.root, "gconfig.stop")
    if move.node.value in (None, []):
        move.drop("gconfig.stop decides")
    elif isinstance(move.node.value, list):
        strings = own.value if own is not None and isinstance(own.value, list) else []
        _put(move, "gconfig.stop", Node([*strings, *move.node.value], move.node.place))
    else:
        move.refuse("must be a list of integers; set gconfig.stop")


def freq_epochs(target: str) -> Callable[[Move], None]:
    def translate(move: Move) -> None:
        existing, value = tree.get(move.root, target), move.node.value
        written_epochs = re.fullmatch(r"(?:(\d+) )?epochs?", str(existing.value)) if existing is not None else None
        if value is not None and (type(value) is not int or value < 1):
            move.refuse(f"must be an integer, at least 1; set {target}: epoch")
        elif value is None or _is_overridden(move, target):
            move.drop(f"{target} decides")
        # Of two numbers of epochs the smaller one is kept; a number of steps is kept in any case.
        elif written_epochs is not None and value < int(written_epochs[1] or 1):
            _put(move, target, _epochs(value))
        elif existing is not None and existing.value is not None:
            move.drop(f"{target}: {written(existing.data())} decides")
        else:
            _put(move, target, _epochs(value))

    return translate


def _epochs(num: int) -> str:
    return "epoch" if num == 1 else f"{num} epochs"

"""All migration rules in one table, and its use: replace old keys in a YAML tree by present ones."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping

from gspo.config import Node, is_failed
from gspo.config import yaml_tree as tree
from gspo.migrate import areal
from gspo.migrate.rule import Move, Rule, apply, written

# Old key → present key, for translations that move a value. Renamed and repeated keys have this in their rule.
_ALIASES = (
    ("actor.group_size", "gconfig.n_samples"),
    ("rollout.consumer_batch_size", "train_dataset.batch_size"),
    ("actor.dynamic_sampling", "actor.zero_variance_groups"),
    ("dynamic_bs", "actor.zero_variance_groups"),
    ("async_training", "rollout.max_head_offpolicyness"),
    ("actor.behav_imp_weight_cap", "actor.rejection_sampling"),
    ("actor.behave_imp_weight_cap", "actor.rejection_sampling"),
    ("actor.behave_imp_weight_mode", "actor.rejection_sampling"),
    ("allocation_mode", "rollout.backend"),
    ("allocation_mode", "actor.backend"),
    ("actor.use_sapo_loss", "algorithm"),
    ("actor.use_cispo_loss", "algorithm"),
    ("actor.recompute_logprob", "actor.prox_logp_method"),
    ("actor.recompute_logprobs", "actor.prox_logp_method"),
    ("saver.freq_secs", "recover.freq_secs"),
    ("recover.freq_steps", "saver.freq_steps"),
    ("saver.freq_epochs", "saver.freq_steps"),
    ("recover.freq_epochs", "saver.freq_steps"),
    ("evaluator.freq_epochs", "evaluator.freq_steps"),
    ("eval_gconfig.greedy", "eval_gconfig.temperature"),
)
_SAME_VALUE = {"actor.group_size": "gconfig.n_samples", "rollout.consumer_batch_size": "train_dataset.batch_size"}


@functools.cache
def rules() -> Mapping[str, Rule]:
    """Every rule by its old key, in the order of application."""
    return types.MappingProxyType({rule.key: rule for rule in areal.areal_rules()})


def migrate(root: Node, problems: list[str], messages: list[str]) -> None:
    """Replace old keys in a tree by present ones, in place; one message for each old key, and each AReaL default."""
    brought = areal.defaults(root)
    for rule in rules().values():
        # The old key is removed first: a translation may put a value back at the same key.
        node = tree.pop(root, rule.key)
        if node is not None and not is_failed(node):
            apply(Move(rule, node, root, problems, messages))
    # Sections that are empty after the rules.
    for key in ("actor.fsdp", "ref.fsdp", "critic.fsdp"):
        node = tree.get(root, key)
        if node is not None and node.value in (None, {}):
            tree.pop(root, key)
    for key, (value, why) in brought.items():
        existing = tree.get(root, key)
        # A null section is a default, too; an explicit null level is none.
        if existing is None or (existing.value is None and isinstance(value, dict)):
            below = {name: Node(own, tree.AREAL) for name, own in value.items()} if isinstance(value, dict) else value
            tree.put(root, key, Node(below, tree.AREAL, text=written(value)))
            if why:
                messages.append(f"{tree.AREAL}: {key} is {written(value)} ({why})")


def _aliases() -> Iterable[tuple[str, str]]:
    yield from ((rule.key, rule.target) for rule in rules().values() if rule.kind == "rename")
    yield from _ALIASES


def spellings(key: str) -> list[str]:
    """The old names of a present key, and the present names of an old key.

    >>> spellings("gconfig.n_samples"), spellings("actor.group_size")
    (['actor.group_size'], ['gconfig.n_samples'])
    """
    return [old for old, new in _aliases() if new == key] + [new for old, new in _aliases() if old == key]


def renamed(key: str) -> str:
    """The present name of a key; the key itself if its value does not simply move."""
    rule = rules().get(key)
    return rule.target if rule is not None and rule.kind in ("rename", "repeat") else _SAME_VALUE.get(key, key)


def is_known(key: str) -> bool:
    """Whether a rule handles this key or a section above it."""
    names = key.split(".")
    return any(".".join(names[:depth]) in rules() for depth in range(1, len(names) + 1))

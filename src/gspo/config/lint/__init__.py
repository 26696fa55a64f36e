"""Contradictions and advice about a resolved config: what cannot be, and what is probably not meant. Torch-free.

Each rule looks at the whole config and yields findings that name a key, where it was set, and the remedy.
`doctor` prints them all; `check` is what a run calls before it starts.
"""

from __future__ import annotations

from gspo.config.lint.facts import Finding, facts_of
from gspo.config.lint.rules import RULES
from gspo.config.lint.unbuilt import unbuilt
from gspo.config.loaded import Loaded
from gspo.errors import ConfigError


def lint(loaded: Loaded, num_gpus: int | None = None, context: int | None = None) -> list[Finding]:
    """All findings, errors first. `num_gpus` None: what this machine shows; `context`: the model's, where known."""
    facts = facts_of(loaded, num_gpus, context)
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: finding.severity != "error")


def missing(loaded: Loaded) -> list[Finding]:
    """An error for each thing the config asks for that this version cannot do."""
    facts = facts_of(loaded, 0)
    return [facts.error(key, f"this version does not have {what} yet", do) for key, what, do in unbuilt(loaded.config)]


def check(loaded: Loaded, num_gpus: int | None = None) -> list[Finding]:
    """The warnings to show before a run; ConfigError for the impossible, and for any warning where strict."""
    found = missing(loaded) + lint(loaded, num_gpus)
    fatal = [finding for finding in found if finding.severity == "error" or loaded.config.strict]
    if fatal:
        tail = "" if fatal[0].severity == "error" else "\n(strict: true makes warnings errors)"
        raise ConfigError("\n".join(str(finding) for finding in fatal) + tail)
    return found

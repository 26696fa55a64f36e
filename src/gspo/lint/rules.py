"""Contradictions and advice about a resolved config. Torch-free.

A rule is a function with a decorator: it looks at the whole config and yields findings (`@rule`), or returns what is
wrong with one key (`@error`, `@warning`). A finding names a key, the place where it was set, what is wrong, and a
remedy. `gspo doctor` prints all findings of `lint`; a run calls `check` before it starts.
"""

from __future__ import annotations

from gspo.config import Loaded
from gspo.errors import ConfigError
from gspo.lint import data, machine, objective
from gspo.lint.facts import RULES, Finding, facts_of

_SUBJECTS = (objective, data, machine)


def lint(loaded: Loaded, num_gpus: int | None = None, context: int | None = None) -> list[Finding]:
    """All findings, errors first. `num_gpus` None: those of this machine; `context`: the model's, if it is known."""
    facts = facts_of(loaded, num_gpus, context)
    found = [finding for subject in _SUBJECTS for rule in RULES[subject.__name__] for finding in rule(facts)]
    return sorted(found, key=lambda finding: finding.severity != "error")


def check(loaded: Loaded, num_gpus: int | None = None) -> list[Finding]:
    """The warnings to show before a run; ConfigError for errors, and with `strict` also for warnings.

    The findings stay with `loaded`: the launcher, the command and the trainer all call this, and the first call lints.
    """
    if num_gpus not in loaded.findings:
        loaded.findings[num_gpus] = lint(loaded, num_gpus)
    found = loaded.findings[num_gpus]
    fatal = [finding for finding in found if finding.severity == "error" or loaded.config.strict]
    if fatal:
        tail = "" if fatal[0].severity == "error" else "\n(strict: true makes warnings errors)"
        raise ConfigError("\n".join(str(finding) for finding in fatal) + tail)
    return found

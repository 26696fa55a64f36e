"""The explanation of another trainer's config: our doctor's sections, with findings in the words of that trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from gspo.audit.foreign import Draft
from gspo.config import Loaded, Origin, load, write_origins
from gspo.doctor import batch_section, objective_section, policy_section
from gspo.errors import ConfigError
from gspo.lint import Facts, Finding, facts_of, objective
from gspo.system import by_name, parse_yaml, to_json, write_run_file


def write_audit(run: Path, draft: Draft, *, version: str, source: str, unknown: Sequence[str]) -> dict[str, Any]:
    """Write the explanation of a config to a run directory and return it. `unknown`: what cannot be known, and why."""
    audit = {
        "system": draft.system,
        "version": version,
        "source": source,
        "unknown": list(unknown),
        "notes": list(draft.notes),
        "doctor": sections_of(draft),
    }
    head = (
        f"# Keys of {draft.system} in gspo's names, for the report; origins.json has their names. Not for training.\n"
    )
    # config.yaml last: it makes the folder a run directory, and readers then find the other two.
    texts = {
        "audit.json": to_json(audit) + "\n",
        "origins.json": write_origins({key: Origin("file", text) for key, text in draft.origins.items()}),
        "config.yaml": head + yaml.safe_dump(nested(draft.keys), sort_keys=False, allow_unicode=True),
    }
    for name, text in texts.items():
        with write_run_file(run / name) as tmp:
            tmp.write_text(text, encoding="utf-8")
    return audit


def nested(keys: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections.

    >>> nested({"algorithm": "gspo", "actor.eps_clip": 0.2, "actor.optimizer.lr": 1e-06})
    {'algorithm': 'gspo', 'actor': {'eps_clip': 0.2, 'optimizer': {'lr': 1e-06}}}
    """
    root: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, name = key.split(".")
        place = root
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return root


# Rule → system → remedy.
REMEDIES = {
    by_name(f"gspo.lint.{rule.replace('.', ':')}"): texts
    for rule, texts in parse_yaml(Path(__file__).with_name("remedies.yaml").read_text(encoding="utf-8")).items()
}


def sections_of(draft: Draft) -> dict[str, Any]:
    """What the page's objective section shows; `unreadable` with the reason where there is no explanation."""
    own = [asdict(finding) for finding in draft.findings]
    if draft.unexplained:
        return {"unreadable": draft.unexplained, "warnings": own}
    try:
        loaded = loaded_of(draft)
    except ConfigError as problem:
        return {"unreadable": f"{draft.file}: {problem}", "warnings": own}
    facts = facts_of(loaded, num_gpus=0)
    found = [*own, *(asdict(finding) for finding in findings_of(facts, draft))]
    words = policy_section(facts)
    return {
        "objective": objective_section(facts),
        "batch": batch_section(facts),
        "policies": {
            **{name: words[name] for name in ("sampling", "correction_words", "kl")},
            "pi_old": draft.pi_old or words["pi_old"],
        },
        "errors": [finding for finding in found if finding["severity"] == "error"],
        "warnings": [finding for finding in found if finding["severity"] == "warning"],
    }


def loaded_of(draft: Draft) -> Loaded:
    """The translated config, whose origins are the keys of the other system; ConfigError if it is not valid here."""
    loaded = load(draft.keys)
    theirs = {key: Origin("file", text) for key, text in draft.origins.items() if key in loaded.origins}
    return replace(loaded, origins={**loaded.origins, **theirs})


def findings_of(facts: Facts, draft: Draft) -> Iterator[Finding]:
    """Findings of the rules that apply, with key and remedy in the words of the other system."""
    for rule, remedies in REMEDIES.items():
        # The remedy for the aggregation is another clipped loss, which is no advice for a loss without a clip range.
        applies = draft.system in remedies and (rule is not objective.token_aggregation or facts.clips is not None)
        for finding in rule(facts) if applies else ():
            theirs, _, file = draft.origins.get(finding.key, f"{finding.key} ({draft.file})").rpartition(" (")
            remedy = remedies[draft.system].format(eps=facts.usual_eps)
            yield replace(finding, key=theirs, where=file.rstrip(")"), remedy=remedy)

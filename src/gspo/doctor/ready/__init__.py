"""Whether a config can run on this machine: the checks that `gspo train` makes before its first step, by the same code.

Nothing is trained and no weights are loaded. Hub names cost one request each. What cannot be checked is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.config import Loaded
from gspo.doctor.ready.check import ReadyCheck, attempt
from gspo.doctor.ready.data import check_data, look_at_environment, look_at_objective, look_at_rewards
from gspo.doctor.ready.machine import check_memory, check_packages, look_at_processes
from gspo.doctor.ready.models import check_models, check_vocabularies, find_tokenizer


def examine(loaded: Loaded, memory: Mapping[str, Any] | None = None) -> list[ReadyCheck]:
    """Every check, in the order in which a run needs the things. `memory`: the section of `gspo doctor`."""
    config = loaded.config
    checks = [attempt("processes", lambda: look_at_processes(config)), *check_packages(config)]
    models = list(check_models(config))
    checks += models
    tokenizer = None
    if all(check.state == "ok" for check in models if check.what in ("actor.path", "tokenizer_path")):
        tokenizer = find_tokenizer(config, checks)
    if tokenizer is not None:
        checks += check_vocabularies(config, tokenizer, {check.what for check in models if check.state == "ok"})
    checks.append(attempt("objective", lambda: look_at_objective(loaded)))
    checks.append(attempt("rewards", lambda: look_at_rewards(config)))
    environment = attempt("environment", lambda: look_at_environment(config))
    checks.append(environment)
    if environment.state == "failed":  # the rows may come from it
        checks.append(ReadyCheck("data", "unknown", "not read, because the environment failed"))
    else:
        checks += check_data(config, tokenizer)
    if memory is not None:
        checks.append(check_memory(loaded, memory))
    failed = {check.what for check in checks if check.state == "failed"}
    return [check for check in checks if check.text and not (check.state == "ok" and check.what in failed)]

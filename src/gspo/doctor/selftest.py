"""`gspo doctor --selftest`: tests gradients, packing, sampler and weight sync on this device with this model.

Each check ends in a measured difference and its bound. Nothing is trained, and no file is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gspo.config import Loaded
from gspo.doctor.checks import TEMPERATURE, copied, gradients, num_parameters, packings, parity, served, with_sampler
from gspo.doctor.probe import sampler_words
from gspo.errors import GspoError
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.probe import WORDS
from gspo.models.loading import load_model
from gspo.sampling.api import Sampler
from gspo.system.launched import Launched
from gspo.train.build.compute import set_threads
from gspo.train.build.objective import make_plan
from gspo.train.build.policy import make_policy, set_trained_part, with_tower
from gspo.train.build.sampler import make_sampler, sampler_dtype

EXACT_PARAMETERS = 3e8  # models on a CPU up to this size are checked in float64
ROUNDED = {"bf16": torch.bfloat16, "int8": torch.bfloat16}  # rollout.sampler_precision: the bounds of bfloat16 apply


@dataclass(frozen=True)
class SelfCheck:
    """One check: the measured difference and its bound; `skipped` is the reason why it did not run."""

    name: str
    what: str
    figure: float | None = None
    bound: float | None = None
    failure: str = ""
    skipped: str = ""

    @property
    def ok(self) -> bool:
        return bool(self.skipped) or (
            not self.failure and self.figure is not None and self.bound is not None and self.figure <= self.bound
        )

    def __str__(self) -> str:
        """
        >>> str(SelfCheck("packing", "packed against plain", 1e-12, 1e-6))
        'ok       packing            packed against plain: 1.0e-12 (allowed 1e-06)'
        """
        head = "skipped" if self.skipped else "ok" if self.ok else "FAILED"
        tail = self.skipped or self.failure or f"{self.figure:.1e} (allowed {self.bound:g})"
        return f"{head:<8} {self.name:<18} {self.what}: {tail}"


Check = tuple[
    str, str, Callable[[], tuple[float, float] | str]
]  # name, description, function → (difference, bound), or why it is skipped


def selftest(loaded: Loaded, place: Path, say: Callable[[str], None] = print) -> Iterator[SelfCheck]:
    """One line per check, as soon as it ends. `place`: a folder for published weights."""
    config = loaded.config
    set_threads(config)
    sequence_level = make_plan(loaded).settings["level"] != "token"
    policy, tokenizer = make_policy(config, sequence_level)
    dtype, kind = policy.model.dtype, policy.model.device.type
    sampler = partial(make_sampler, config, policy, tokenizer, 0)
    # Gradients and packings are compared in float64 where possible: an error of the code then stands out from rounding.
    exact = _exact(loaded, policy, tokenizer)
    where = f"{str(exact.model.dtype).removeprefix('torch.')}, {kind}"
    checks: list[Check] = [
        ("gradient", f"gradient by {WORDS[exact.layout]} against padded rows, {where}", partial(gradients, exact)),
        ("packing", f"log-probs by other packings and splits, {where}", partial(packings, exact)),
    ]
    precision = config.rollout.sampler_precision
    rounded = ROUNDED.get(precision, dtype)
    note = "" if precision == "none" else f", weights rounded to {precision}"
    sync = partial(copied, policy, partial(_another, loaded, policy, tokenizer, dtype), place)
    checks += [
        (
            "sampler parity",
            f"log-probs of the in-process sampler at T = {TEMPERATURE}{note}",
            lambda: with_sampler(sampler(), lambda s: parity(policy, s, rounded)),
        ),
        ("weight sync", "new weights published, loaded and probed in this process", sync),
    ]
    # The server check is last because it changes the policy's weights.
    checks.append(_server_check(loaded, policy, partial(sampler, place, lambda message: say(f"  {message}"))))
    for name, words, check in checks:
        yield _line(name, words, check)


def _line(name: str, words: str, check: Callable[[], tuple[float, float] | str]) -> SelfCheck:
    try:
        found = check()
    # A failed check becomes a line, so that the remaining checks still run.
    except (GspoError, RuntimeError, ValueError, TypeError) as error:
        return SelfCheck(name, words, failure=f"{type(error).__name__}: {error}")
    return SelfCheck(name, words, skipped=found) if isinstance(found, str) else SelfCheck(name, words, *found)


def _exact(loaded: Loaded, policy: PolicyModule, tokenizer: Any) -> PolicyModule:
    """The same model in float64 if it is on a CPU and small enough; else the policy itself."""
    config = loaded.config
    if policy.model.device.type != "cpu" or num_parameters(policy) > EXACT_PARAMETERS:
        return policy
    model = _another(loaded, policy, tokenizer, torch.float64)
    set_trained_part(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:  # an adapter is float32
            parameter.data = parameter.data.double()
    exact = PolicyModule(model)
    # As the probe of the policy found them.
    for name in ("layout", "attention", "stop_at_head", "logit_form"):
        setattr(exact, name, getattr(policy, name))
    return exact


def _another(loaded: Loaded, policy: PolicyModule, tokenizer: Any, dtype: torch.dtype) -> Any:
    """The initial model, loaded again without an adapter, as a sampler server does."""
    actor, device = loaded.config.actor, policy.model.device
    fresh: dict[str, Any] = {"from_scratch": actor.init_from_scratch, "seed": loaded.config.seed}
    fresh |= {"tokenizer": tokenizer, "images": with_tower(loaded.config)}
    return load_model(actor.path, dtype, device, **fresh)


def _server_check(loaded: Loaded, policy: PolicyModule, make: Callable[[], Sampler]) -> Check:
    config = loaded.config
    words = f"log-probs at T = {TEMPERATURE}, before and after new weights"
    if not Launched.read().num_samplers:
        return "sampler server", words, lambda: "a server needs a second GPU, and this machine has one"
    dtype = sampler_dtype(config) or policy.model.dtype
    words = f"{sampler_words(config)}: {words}"
    return "sampler server", words, lambda: with_sampler(make(), lambda s: served(loaded.config, policy, s, dtype))

"""An implementation against the cases: value, gradient, clip decisions and the metric, each in its own words."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gspo.conformance.suite import Answer, Batch, Case, Implementation, NotOfferedError, batch_of, load
from gspo.system import described


@dataclass(frozen=True)
class Outcome:
    """Of one case. status: agrees, differs (the paper decides), open (it does not), failed, not offered."""

    case: Case
    status: str
    answer: str = ""  # the known answer that was given; "other" if none
    details: tuple[str, ...] = ()
    metric: str = ""  # what the reported clip fraction counts
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        return self.status in ("differs", "failed")


def check_all(implementation: Implementation, cases: Iterable[Case] | None = None) -> list[Outcome]:
    """One outcome per case. Nothing that the implementation raises ends the suite."""
    return [check_case(implementation, case) for case in (load() if cases is None else cases)]


def check_case(implementation: Implementation, case: Case) -> Outcome:
    begin = time.perf_counter()
    try:
        # A division of 0 by 0 in somebody's code may warn; the outcome says what came of it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = _checked(implementation, case)
    except NotOfferedError as reason:
        outcome = Outcome(case, "not offered", details=(str(reason),))
    except Exception as error:  # whatever the user's code raises
        if [answer.name for answer in case.answers] == ["not finite"]:
            outcome = Outcome(case, "open", "an error")
        else:
            outcome = Outcome(case, "failed", details=(described(error),))
    return replace(outcome, seconds=time.perf_counter() - begin)


def _checked(implementation: Implementation, case: Case) -> Outcome:
    if case.kind == "advantage":
        if implementation.advantage is None:
            raise NotOfferedError("no function for advantages was given")
        return _compared(case, "advantage", implementation.advantage(case.inputs["rewards"], case.inputs["groups"]))
    if case.kind == "logp":
        if implementation.logp is None:
            raise NotOfferedError("no function for log-probs was given")
        logits, tokens = case.inputs["logits"], case.inputs["tokens"].long()
        return _compared(case, "logp", implementation.logp(logits, tokens, case.temperature))
    if case.objective not in implementation.objectives:
        raise NotOfferedError(f"it has no {case.objective}")
    leaf = case.inputs["logp"].to(getattr(torch, case.dtype)).clone().requires_grad_()
    loss, metric = _loss(implementation, case, leaf)
    if not loss.requires_grad:
        return Outcome(case, "failed", details=("the loss has no gradient: it does not depend on the log-probs",))
    (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    gradient = torch.zeros_like(leaf) if gradient is None else gradient
    return replace(_judged(case, float(loss.detach()), gradient.double()), metric=_metric(case, metric))


def _loss(implementation: Implementation, case: Case, leaf: Tensor) -> tuple[Tensor, float | None]:
    """The loss of the whole batch in the form of the case, and the reported clip fraction."""
    # Not the leaf itself: an operation in place on it would fail with a message about something else.
    whole = batch_of(case, leaf * 1)
    if case.kind == "packed":
        return _called(implementation, packed(whole)[0])
    if case.kind != "split":
        return _called(implementation, whole)
    totals = {"num_sequences": len(whole.mask), "num_tokens": int(whole.mask.sum())}
    totals["num_trained"] = int(whole.mask.any(-1).sum())
    parts = [replace(whole, **whole.rows(*rows), **totals, num_parts=len(case.parts)) for rows in case.parts]
    return torch.stack([_called(implementation, part)[0] for part in parts]).sum(), None


def packed(batch: Batch) -> tuple[Batch, Tensor]:
    """Without its padding: [N], and cu_seqlens. Masked places inside a sequence stay."""
    if batch.cu_seqlens is not None:
        return batch, batch.cu_seqlens
    lengths = (batch.mask * torch.arange(1, batch.mask.shape[1] + 1)).amax(-1)  # [B] up to the last trained token
    inside = torch.arange(batch.mask.shape[1]) < lengths[:, None]  # [B, T]
    rows = {name: x[inside] for name, x in vars(batch).items() if isinstance(x, Tensor) and x.shape == inside.shape}
    cuts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))  # [B + 1]
    return replace(batch, **rows, cu_seqlens=cuts), cuts


def _called(implementation: Implementation, batch: Batch) -> tuple[Tensor, float | None]:
    """(loss, clip fraction); ValueError for what is not a loss."""
    inputs = {name: x for name, x in vars(batch).items() if isinstance(x, Tensor)}
    versions = {name: x._version for name, x in inputs.items()}
    found = implementation.loss(batch)
    loss, metric = found if isinstance(found, tuple) else (found, None)
    if changed := [name for name, x in inputs.items() if x._version != versions[name]]:
        raise ValueError(f"it changes its input {changed[0]} in place; compute a new tensor instead")
    if not isinstance(loss, Tensor):
        raise ValueError(f"it returned the loss as {type(loss).__name__}; return a scalar tensor")
    if loss.numel() != 1:
        raise ValueError(f"it returned a loss of shape {list(loss.shape)}; return the scalar that is differentiated")
    return loss.reshape(()), metric


def _compared(case: Case, name: str, found: Tensor) -> Outcome:
    """Of a function whose result is one array."""
    if not isinstance(found, Tensor):
        raise ValueError(f"it returned {name} as {type(found).__name__}; return a tensor")
    for answer in case.answers:
        expected = answer.arrays[name]
        if found.shape != expected.shape:
            return Outcome(case, "failed", details=(f"it returned {list(found.shape)} for {list(expected.shape)}",))
        largest = expected.abs().max().clamp(min=1)
        if bool(((found.double() - expected).abs() <= case.tolerance * largest).all()):
            return Outcome(case, "agrees" if case.decided else "open", answer.name)
    worst = (found.double() - case.answers[0].arrays[name]).abs().max()
    detail = f"{name} differs by up to {float(worst):.3g}"
    return Outcome(case, "differs" if case.decided else "open", "other", (detail,))


def _judged(case: Case, loss: float, gradient: Tensor) -> Outcome:
    """The first answer that loss and gradient agree with, or how they differ from the first one."""
    differences = [list(_differences(case, answer, loss, gradient)) for answer in case.answers]
    for answer, found in zip(case.answers, differences, strict=True):
        if not found:
            is_first = answer is case.answers[0]
            status = "open" if not case.decided else "agrees" if is_first else "differs"
            return Outcome(case, status, answer.name, () if is_first else tuple(differences[0]))
    return Outcome(case, "differs" if case.decided else "open", "other", tuple(differences[0]))


def _differences(case: Case, answer: Answer, loss: float, gradient: Tensor) -> Iterator[str]:
    is_finite = math.isfinite(loss) and bool(gradient.isfinite().all())
    if answer.loss is None:
        if is_finite:
            yield f"the loss is {loss:.6g}, a plausible number"
        return
    if not is_finite:
        what = "loss" if not math.isfinite(loss) else "gradient"
        yield f"the {what} is {'NaN' if math.isnan(loss) or what == 'gradient' else loss}"
        return
    if abs(loss - answer.loss) > case.tolerance * answer.scale:
        yield f"loss {loss:.6g} for {answer.loss:.6g}"
    expected, clipped = answer.arrays["gradient"], answer.arrays["clipped"].bool()
    size = expected.abs()
    # Relative to the largest of the sequence, or to 1/1000 of the largest of all where a sequence has none.
    allowed = case.tolerance * size.amax(-1, keepdim=True).clamp(min=1e-3 * float(size.max()))
    wrong = (gradient - expected).abs() > allowed  # [B, T]
    if not bool(wrong.any()):
        return
    has_none = gradient.abs() <= allowed
    if (freed := (clipped & ~has_none & (expected == 0)).any(-1)).any():
        yield f"not clipped, but should be: sequence {_places(freed)}"
    if (cut := (~clipped & has_none & (expected.abs() > allowed)).any(-1)).any():
        yield f"no gradient, but should have one: sequence {_places(cut)}"
    if (rest := wrong.any(-1) & ~freed & ~cut).any():
        row = int(rest.nonzero()[0])
        column = int((gradient - expected)[row].abs().argmax())
        yield f"gradient {gradient[row, column]:.6g} for {expected[row, column]:.6g} in sequence {_places(rest)}"


def _places(flags: Tensor) -> str:
    found = [str(int(i)) for i in flags.nonzero()]
    return ", ".join(found[:4]) + (" …" if len(found) > 4 else "")


def _metric(case: Case, found: float | None) -> str:
    """Which clip fraction was reported: clipped of sequences or of tokens, or another number."""
    if found is None or case.answers[0].loss is None:
        return ""
    for name in ("sequences", "tokens"):
        if abs(found - getattr(case.answers[0], f"clip_fraction_{name}")) <= 1e-5:
            return name
    return f"{found:.3f}"

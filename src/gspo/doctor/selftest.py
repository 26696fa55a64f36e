"""`gspo doctor --selftest`: the equalities that training rests on, on this device, with this model and this sampler.

Gradients of the packed computation against plain padded rows, packings against each other, sampler against trainer at
a temperature other than 1, and weights that reach a sampler and are proved to have. Each check ends in a figure and the
bound it is held against; nothing is trained and nothing is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo import objectives, rng
from gspo.config import Loaded
from gspo.config.schema import Config
from gspo.doctor.probe import answers, sampler_words, trainer_logp
from gspo.errors import GspoError
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import Completion, PackItem, micro_batches, pack
from gspo.models.loading import load_model
from gspo.sampling.api import Sampler
from gspo.sampling.weights import load, probe
from gspo.sampling.weights.publish import publish
from gspo.system.launched import Launched
from gspo.train.build.compute import set_threads
from gspo.train.build.objective import make_plan
from gspo.train.build.policy import add_configured_adapter, make_policy
from gspo.train.build.sampler import make_sampler, sampler_dtype, weights_for
from gspo.types import Request, SampleId, SamplingParams

TEMPERATURE = 0.7  # at 1 a sampler that forgets the temperature would pass
# ‖a − b‖ / ‖b‖ of two right gradients, and |a − b| of two right log-probs, by the type they are computed in. Models
# compute norms and rotations in float32 whatever their type, so that a last bit of float64 can become one of float32.
GRADIENT = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
PACKED = {torch.float64: 1e-6, torch.float32: 5e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
EXACT_PARAMETERS = 3e8  # of a model on a CPU that is checked in float64
COPIED_PARAMETERS = 2e9  # of a model that is held twice for a moment
ROUNDED = {"bf16": torch.bfloat16, "int8": torch.bfloat16}  # rollout.sampler_precision: bounded as bfloat16 is


@dataclass(frozen=True)
class Line:
    """One check: its figure and the bound; `skipped` says why it could not be made."""

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
        >>> str(Line("packing", "packed against plain", 1e-12, 1e-6))
        'ok       packing            packed against plain: 1.0e-12 (allowed 1e-06)'
        """
        head = "skipped" if self.skipped else "ok" if self.ok else "FAILED"
        tail = self.skipped or self.failure or f"{self.figure:.1e} (allowed {self.bound:g})"
        return f"{head:<8} {self.name:<18} {self.what}: {tail}"


Check = tuple[str, str, Callable[[], tuple[float, float] | str]]  # name, words, figure and bound, or why not


def selftest(loaded: Loaded, place: Path, say: Callable[[str], None] = print) -> Iterator[Line]:
    """A line for each check as it ends. `place`: a folder for published weights."""
    config = loaded.config
    set_threads(config)
    sequence_level = make_plan(loaded).settings["level"] != "token"
    policy, tokenizer = make_policy(config, sequence_level)
    dtype, kind = policy.model.dtype, policy.model.device.type
    sampler = partial(make_sampler, config, policy, tokenizer, 0)
    exact = _exact(loaded, policy, tokenizer)
    where = f"{str(exact.model.dtype).removeprefix('torch.')}, {kind}"
    shares = "shared prefixes" if exact.share_prefix else "plain packing"
    checks: list[Check] = [
        ("gradient", f"gradient by {shares} against padded rows, {where}", partial(gradients, exact)),
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
        ("weight sync", "new weights published, read, taken and probed in process", sync),
    ]
    # Servers last: the policy's weights are changed on the way.
    checks.append(_server_check(loaded, policy, partial(sampler, place, lambda message: say(f"  {message}"))))
    for name, words, check in checks:
        yield _line(name, words, check)


def _line(name: str, words: str, check: Callable[[], tuple[float, float] | str]) -> Line:
    try:
        found = check()
    except (GspoError, RuntimeError, ValueError, TypeError) as error:
        return Line(name, words, failure=f"{type(error).__name__}: {error}")
    return Line(name, words, skipped=found) if isinstance(found, str) else Line(name, words, *found)


def _exact(loaded: Loaded, policy: PolicyModule, tokenizer: Any) -> PolicyModule:
    """The same model in float64 on a CPU, where it is small enough; elsewhere the policy itself."""
    config = loaded.config
    if policy.model.device.type != "cpu" or _num_parameters(policy) > EXACT_PARAMETERS:
        return policy
    model = _another(loaded, policy, tokenizer, torch.float64)
    add_configured_adapter(config, model)
    for parameter in model.parameters():  # an adapter comes in float32
        parameter.data = parameter.data.double()
    exact = PolicyModule(model, chunk_size=config.actor.logprobs_chunk_size)
    exact.share_prefix, exact.attention = policy.share_prefix, policy.attention
    return exact


def _another(loaded: Loaded, policy: PolicyModule, tokenizer: Any, dtype: torch.dtype) -> Any:
    """The model that the policy began with, once more, as a sampler server loads it: without an adapter."""
    actor, device = loaded.config.actor, policy.model.device
    fresh = {"from_scratch": actor.init_from_scratch, "seed": loaded.config.seed, "tokenizer": tokenizer}
    return load_model(actor.path, dtype, device, **fresh)


def _num_parameters(policy: PolicyModule) -> int:
    return sum(p.numel() for p in policy.parameters())


def _server_check(loaded: Loaded, policy: PolicyModule, make: Callable[[], Sampler]) -> Check:
    config = loaded.config
    words = f"log-probs at T = {TEMPERATURE}, before and after new weights"
    if not Launched.read().num_samplers:
        return "sampler server", words, lambda: "this machine has one GPU, and a server would need another"
    dtype = sampler_dtype(config) or policy.model.dtype
    words = f"{sampler_words(config)}: {words}"
    return "sampler server", words, lambda: with_sampler(make(), lambda s: served(loaded.config, policy, s, dtype))


# The checks


def made_items(num_vocab: int) -> list[PackItem]:
    """Uneven groups of random tokens: a completion of one token, a tool's words in the middle, one after a prompt."""
    draw, items, index = rng.generator(0, "selftest"), [], 0
    for num_prompt, lengths in ((11, (6, 1, 9)), (4, (7, 3)), (6, (5,))):
        completions = []
        for num in lengths:
            mask = np.ones(num, dtype=np.bool_)
            mask[2 : 4 if num > 6 else 2] = False
            completions.append(Completion(draw.integers(0, num_vocab, num), mask, index))
            index += 1
        items.append(PackItem(draw.integers(0, num_vocab, num_prompt), tuple(completions)))
    return items


def gradients(policy: PolicyModule) -> tuple[float, float]:
    """‖∇ packed − ∇ padded‖ / ‖∇ padded‖ of GSPO's loss, some sequences clipped, and how large it may be."""
    items = made_items(policy.model.config.get_text_config().vocab_size)
    device, dtype = policy.model.device, policy.model.dtype
    num = sum(len(item.completions) for item in items)
    advantage = torch.linspace(-1.0, 1.0, num, dtype=torch.float64).to(device)
    settings: dict[str, Any] = {"clip_low": 0.05, "clip_high": 0.05, "denominator": float(num)}

    def moved(index: Tensor) -> Tensor:  # log π_old − log π per sequence: inside the clip range, and outside
        return 0.08 * torch.sin(1.0 + index.to(torch.float64))

    def loss_of(logp: Tensor, index: Tensor, old: Tensor, **layout: Tensor) -> Tensor:
        held = logp.detach() + old.to(logp.dtype)
        by = advantage[index].to(logp.dtype)
        made = objectives.loss("gspo", logp, held, by, layout.pop("mask", None), **layout, **settings)
        return made.loss

    packed = pack(items, share_prefix=policy.share_prefix).to(device)
    logp = policy(packed, temperature=TEMPERATURE).logp
    per_token = moved(packed.index).repeat_interleave(packed.cu_seqlens.diff())
    got = _gradient(policy, loss_of(logp, packed.index, per_token, cu_seqlens=packed.cu_seqlens))
    plain, mask, index = padded_logp(policy, items)
    want = _gradient(policy, loss_of(plain, index, moved(index)[:, None].expand_as(plain), mask=mask))
    gap = sum(float((a - b).double().square().sum()) for a, b in zip(got, want, strict=True))
    size = sum(float(b.double().square().sum()) for b in want)
    return (gap / size) ** 0.5 if size else float("nan"), GRADIENT.get(dtype, 0.1)


def _gradient(policy: PolicyModule, loss: Tensor) -> list[Tensor]:
    parameters = [p for p in policy.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def padded_logp(policy: PolicyModule, items: Sequence[PackItem]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of completion tokens by the model itself on right-padded rows, [B, T]; mask; sequence numbers, [B]."""
    rows = [(item.prompt, completion) for item in items for completion in item.completions]
    width, longest = max(len(p) + len(c.tokens) for p, c in rows), max(len(c.tokens) for _, c in rows)
    ids, attention = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(2))
    source, mask = np.zeros((len(rows), longest), dtype=np.int64), np.zeros((len(rows), longest), dtype=np.bool_)
    for b, (prompt, completion) in enumerate(rows):
        begin, num = len(prompt), len(completion.tokens)
        ids[b, : begin + num] = np.concatenate([prompt, completion.tokens])
        attention[b, : begin + num] = 1
        source[b, :num] = np.arange(begin - 1, begin + num - 1)
        mask[b, :num] = completion.mask
    device = policy.model.device
    ids_t, at = torch.from_numpy(ids).to(device), torch.from_numpy(source).to(device)
    logits = policy.model(
        input_ids=ids_t, attention_mask=torch.from_numpy(attention).to(device), use_cache=False
    ).logits
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logits = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1])).to(wide)
    logp = (logits / TEMPERATURE).log_softmax(-1).gather(2, ids_t.gather(1, at + 1)[..., None])[..., 0]
    index = torch.tensor([completion.index for _, completion in rows], device=device)
    return logp, torch.from_numpy(mask).to(device), index


@torch.no_grad()
def packings(policy: PolicyModule) -> tuple[float, float]:
    """Largest |Δ log-prob| of a token between one pack, split ones, another order, and the padded rows."""
    items, device = made_items(policy.model.config.get_text_config().vocab_size), policy.model.device
    plain, mask, index = padded_logp(policy, items)
    want = {int(i): row[m] for i, row, m in zip(index, plain, mask, strict=True)}
    gap, share = 0.0, policy.share_prefix
    for order in (items, items[::-1]):
        for parts in ([order], micro_batches(order, 12, share_prefix=share), [[item] for item in order]):
            for part in parts:
                packed = pack(part, share_prefix=share).to(device)
                logp = policy(packed, temperature=TEMPERATURE, with_entropy=False).logp
                for b, i in enumerate(packed.index.tolist()):
                    low, high = packed.cu_seqlens[b : b + 2].tolist()
                    gap = max(gap, float((logp[low:high] - want[i]).abs().max()))
    return gap, PACKED.get(policy.model.dtype, 0.15)


def with_sampler(sampler: Sampler, work: Callable[[Sampler], tuple[float, float]]) -> tuple[float, float]:
    try:
        return work(sampler)
    finally:
        sampler.close()


def requests_of(num_vocab: int, first: int = 0) -> list[Request]:
    """Prompts of several lengths, each answered several times, at a temperature other than 1."""
    params = SamplingParams(max_new_tokens=24, temperature=TEMPERATURE)
    draw = rng.generator(first, "selftest prompts")
    prompts = [tuple(draw.integers(0, num_vocab, num).tolist()) for num in (3, 8, 17)]
    return [Request(SampleId(first + i, j), prompt, params) for i, prompt in enumerate(prompts) for j in range(4)]


def parity(policy: PolicyModule, sampler: Sampler, dtype: torch.dtype, first: int = 0) -> tuple[float, float]:
    """Largest |log μ − log π| of a sampled token, the trainer's as a step computes it."""
    requests = requests_of(policy.model.config.get_text_config().vocab_size, first)
    samples = answers(sampler, requests, 120.0)
    ours = trainer_logp(policy, requests, samples, temperature=TEMPERATURE)
    gaps = [float(np.abs(a - s.behavior_logp).max()) for a, s in zip(ours, samples, strict=True) if len(a)]
    return max(gaps), probe.TOLERANCE.get(dtype, 0.2)


def change(policy: PolicyModule) -> None:
    """Other weights, so different that the probe must see it."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
                if not parameter.any():  # an adapter begins with zeros
                    parameter.fill_(0.01)


def probed(policy: PolicyModule) -> list[np.ndarray]:
    return probe.sequence_logp(policy.model, _probe(policy))


def copied(policy: PolicyModule, make: Callable[[], Any], place: Path) -> tuple[float, float] | str:
    """Largest |Δ log-prob| of the probe between the policy and a model that took its published weights."""
    if (num := _num_parameters(policy)) > COPIED_PARAMETERS:
        return f"a model of {num:.1e} parameters is not held twice"
    other, dtype = make(), policy.model.dtype
    change(policy)
    _must_differ(probe.sequence_logp(other, _probe(policy)), probed(policy), dtype)
    published = publish(place / "weights", 1, policy.full_weights())
    try:
        load.copy_weights(other, load.read(published.path, published.sha256).items())
    finally:
        published.path.unlink()
    gap = np.concatenate(probe.sequence_logp(other, _probe(policy))) - np.concatenate(probed(policy))
    return float(np.abs(gap).max()), probe.TOLERANCE.get(dtype, 0.2)


def _probe(policy: PolicyModule) -> list[list[int]]:
    return probe.probe_sequences(policy.model.config.get_text_config().vocab_size)


def _must_differ(before: list[np.ndarray], after: list[np.ndarray], dtype: torch.dtype) -> None:
    if probe.mismatch(before, after, dtype) is None:
        raise ValueError("the probe cannot tell weights that were changed from those before; it proves nothing")


def served(config: Config, policy: PolicyModule, sampler: Sampler, dtype: torch.dtype) -> tuple[float, float]:
    """Parity with a server before and after new weights, which it must prove to have (`rollout/http.py`)."""
    before = probed(policy)
    first, bound = parity(policy, sampler, dtype)
    change(policy)
    _must_differ(before, probed(policy), dtype)
    sampler.load_weights(1, weights_for(config, sampler, policy))  # WeightSyncError: its probe is another's
    second, _ = parity(policy, sampler, dtype, first=8)
    return max(first, second), bound

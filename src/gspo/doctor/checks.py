"""`gspo doctor --probe` and `--selftest`: trainer and sampler of a config, compared on this device.

The processes are those of a run, placed by the same plan, in a temporary run directory: one rank of the trainer, and
one server if the config samples on servers. They always run on this machine, also for a config with Ray or Slurm; an
error says if this machine has too few GPUs.

Gradients of the packed computation are compared with plain padded rows, packings with each other, the sampler with the
trainer at a temperature other than 1, and a model that loaded published weights with the policy.

The configured sampler samples completions for a few training prompts, and the trainer computes the log-probs of the
same tokens. Mini-batch 1 of every training step measures the same. The verdict is that of a run.

Each check ends in a measured difference and its bound. Nothing is trained, and no file is left behind.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo import objectives, rng
from gspo.config import Config, Loaded, engine_of, flags_of, layout_of
from gspo.errors import GspoError, RolloutError
from gspo.launcher import config_file, launch
from gspo.learner import (
    WORDS,
    Completion,
    PackItem,
    PolicyModule,
    by_sequence,
    judge_noise,
    micro_batches,
    noise_message,
    noise_of,
    packed_parts,
)
from gspo.models import load_model
from gspo.rollout import single_turn
from gspo.runs import checkpoint
from gspo.sampling import Sampler, load, publish
from gspo.system import Launched, visible_gpus
from gspo.train import (
    find_environment,
    make_data,
    make_plan,
    make_policy,
    make_sampler,
    narrowest_clip,
    sampler_dtype,
    sampling_params,
    set_threads,
    set_trained_part,
    weights_for,
    with_tower,
)
from gspo.types import PromptKey, Request, Sample, SampleId, SamplingParams


def run_beside_sampler(
    loaded: Loaded, words: Sequence[str], here: Callable[[Loaded, Path], int], *, with_server: bool = False
) -> int:
    """Call `here` in this process if no server is needed; else launch `gspo WORDS --config FILE` and a server.

    Returns the exit code.
    """
    with tempfile.TemporaryDirectory(prefix="gspo-doctor-", ignore_cleanup_errors=True) as folder:
        small = one_of_each(loaded, Path(folder), visible_gpus(), with_server=with_server)
        path = small.config.run_path.absolute()
        command = [sys.executable, "-m", "gspo", *words, "--config", str(config_file(path))]
        code = launch(small, command)
        return here(small, path) if code is None else code


def one_of_each(loaded: Loaded, folder: Path, num_gpus: int, *, with_server: bool = False) -> Loaded:
    """The config with one rank and at most one server, on this machine, with `folder` for its run directory.

    `with_server`: add a server even if the config samples in process, unless the machine has a single GPU.
    """
    here = {"fileroot": str(folder), "n_nodes": 1, "n_gpus_per_node": None}
    config = loaded.config.model_copy(update={"cluster": loaded.config.cluster.model_copy(update=here)})
    # One server is enough for the checks; its tensor parallelism stays as in the run.
    sampler = layout_of(config, num_gpus).sampler
    if sampler is None:
        backend = "local:d1" if with_server and num_gpus != 1 else "local"
    else:
        # A list of addresses must have one entry per server, so the number of servers stays.
        given = flags_of(config).get("url")
        backend = str(replace(sampler, data=sampler.data if isinstance(given, list) else 1))
    rounds = config.rollout.sampler_precision != "none"  # in process alone
    rollout = {"backend": "local" if rounds else backend, "max_head_offpolicyness": 0}
    small = {
        "scheduler": config.scheduler.model_copy(update={"type": "local"}),
        "rollout": config.rollout.model_copy(update=rollout),
        "actor": config.actor.model_copy(update={"backend": "fsdp:d1"}),
        "strict": False,  # its warnings are about a run
    }
    return replace(loaded, config=config.model_copy(update=small))


TEMPERATURE = 0.7  # not 1: a sampler that ignores the temperature must fail
# Bounds by dtype: ‖a − b‖ / ‖b‖ of two correct gradients, and |a − b| of two correct log-probs. Models compute norms
# and rotary embeddings in float32 whatever their dtype, so float64 results can differ by float32 rounding.
GRADIENT = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
PACKED = {torch.float64: 1e-6, torch.float32: 5e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
COPIED_PARAMETERS = 2e9  # a larger model is not loaded a second time


def made_items(num_vocab: int) -> list[PackItem]:
    """Groups of random tokens of uneven lengths: a one-token completion, tool tokens in the middle, a group of one."""
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
    """‖∇ packed − ∇ padded‖ / ‖∇ padded‖ of GSPO's loss with some sequences clipped, and its bound."""
    items = made_items(policy.model.config.get_text_config().vocab_size)
    device, dtype = policy.model.device, policy.model.dtype
    num = sum(len(item.completions) for item in items)
    # [num]: negative and positive advantages, so that both clip bounds are used.
    advantage = torch.linspace(-1.0, 1.0, num, dtype=torch.float64).to(device)
    settings: dict[str, Any] = {"clip_low": 0.05, "clip_high": 0.05, "denominator": float(num)}

    def moved(index: Tensor) -> Tensor:  # log π_old − log π per sequence: inside the clip range, and outside
        return 0.08 * torch.sin(1.0 + index.to(torch.float64))

    def loss_of(logp: Tensor, index: Tensor, old: Tensor, **layout: Tensor) -> Tensor:
        # log π_old with a fixed distance to log π, because one forward pass has no earlier policy.
        held = logp.detach() + old.to(logp.dtype)
        by = advantage[index].to(logp.dtype)
        made = objectives.loss("gspo", logp, held, by, layout.pop("mask", None), **layout, **settings)
        return made.loss

    # The packed form, as in training: logp is [all completion tokens].
    packed = policy.pack(items)
    logp = policy(packed, temperature=TEMPERATURE).logp
    per_token = moved(packed.index).repeat_interleave(packed.cu_seqlens.diff())
    got = _gradient(policy, loss_of(logp, packed.index, per_token, cu_seqlens=packed.cu_seqlens))
    # The reference: plain, mask [B, T]; index [B].
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
    # ids, attention: [B, width]; source, mask: [B, longest completion].
    ids, attention = (np.zeros((len(rows), width), dtype=np.int64) for _ in range(2))
    source, mask = np.zeros((len(rows), longest), dtype=np.int64), np.zeros((len(rows), longest), dtype=np.bool_)
    for b, (prompt, completion) in enumerate(rows):
        begin, num = len(prompt), len(completion.tokens)
        ids[b, : begin + num] = np.concatenate([prompt, completion.tokens])
        attention[b, : begin + num] = 1
        # The logits at position t predict token t + 1, so completions start at the last prompt position.
        source[b, :num] = np.arange(begin - 1, begin + num - 1)
        mask[b, :num] = completion.mask
    device = policy.model.device
    ids_t, at = torch.from_numpy(ids).to(device), torch.from_numpy(source).to(device)
    logits = policy.model(
        input_ids=ids_t, attention_mask=torch.from_numpy(attention).to(device), use_cache=False
    ).logits
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    # [B, width, V] → [B, longest, V]: only positions that predict a completion token.
    logits = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1])).to(wide)
    # [B, longest]: the log-prob of the token that follows each position.
    logp = (logits / TEMPERATURE).log_softmax(-1).gather(2, ids_t.gather(1, at + 1)[..., None])[..., 0]
    index = torch.tensor([completion.index for _, completion in rows], device=device)
    return logp, torch.from_numpy(mask).to(device), index


@torch.no_grad()
def packings(policy: PolicyModule) -> tuple[float, float]:
    """Largest |Δ log-prob| of a token between one pack, split ones, another order, and the padded rows."""
    items = made_items(policy.model.config.get_text_config().vocab_size)
    plain, mask, index = padded_logp(policy, items)
    want = {int(i): row[m] for i, row, m in zip(index, plain, mask, strict=True)}
    gap, layout = 0.0, policy.layout
    for order in (items, items[::-1]):
        for parts in ([order], micro_batches(order, 12, layout=layout), [[item] for item in order]):
            for part in parts:
                packed = policy.pack(part)
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
    """Prompts of several lengths, each sampled several times, at a temperature other than 1."""
    params = SamplingParams(max_new_tokens=24, temperature=TEMPERATURE)
    draw = rng.generator(first, "selftest prompts")
    prompts = [tuple(draw.integers(0, num_vocab, num).tolist()) for num in (3, 8, 17)]
    return [Request(SampleId(first + i, j), prompt, params) for i, prompt in enumerate(prompts) for j in range(4)]


def parity(policy: PolicyModule, sampler: Sampler, dtype: torch.dtype, first: int = 0) -> tuple[float, float]:
    """Largest |log μ − log π| of a sampled token, with log π computed as in a training step."""
    requests = requests_of(policy.model.config.get_text_config().vocab_size, first)
    samples = sample_all(sampler, requests, 120.0)
    ours = trainer_logp(policy, requests, samples, temperature=TEMPERATURE)
    gaps = [float(np.abs(a - s.behavior_logp).max()) for a, s in zip(ours, samples, strict=True) if len(a)]
    return max(gaps), load.TOLERANCE.get(dtype, 0.2)


def change(policy: PolicyModule) -> None:
    """Change the weights so much that the probe must notice it."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)
                if not parameter.any():  # LoRA's B starts at zero
                    parameter.fill_(0.01)


def probed(policy: PolicyModule) -> list[np.ndarray]:
    return load.sequence_logp(policy.model, _probe(policy))


def copied(policy: PolicyModule, make: Callable[[], Any], place: Path) -> tuple[float, float] | str:
    """Largest |Δ log-prob| of the probe between the policy and a model that loaded its published weights."""
    if (num := num_parameters(policy)) > COPIED_PARAMETERS:
        return f"a model of {num:.1e} parameters is too large to load twice"
    other, dtype = make(), policy.model.dtype
    # Without a change, weights that were never loaded would also pass the comparison.
    change(policy)
    _must_differ(load.sequence_logp(other, _probe(policy)), probed(policy), dtype)
    published = publish(place / "weights", 1, policy.full_weights())
    try:
        load.copy_weights(other, load.read_published(published.path, published.sha256).items())
    finally:
        published.path.unlink()
    gap = np.concatenate(load.sequence_logp(other, _probe(policy))) - np.concatenate(probed(policy))
    return float(np.abs(gap).max()), load.TOLERANCE.get(dtype, 0.2)


def _probe(policy: PolicyModule) -> list[list[int]]:
    return load.probe_sequences(policy.model.config.get_text_config().vocab_size)


def _must_differ(before: list[np.ndarray], after: list[np.ndarray], dtype: torch.dtype) -> None:
    if load.mismatch(before, after, dtype) is None:
        raise ValueError(
            "the probe gives the same log-probs for changed weights, so it cannot detect a failed weight sync"
        )


def served(config: Config, policy: PolicyModule, sampler: Sampler, dtype: torch.dtype) -> tuple[float, float]:
    """Parity with a server before and after new weights; the server must show by the probe that it loaded them."""
    before = probed(policy)
    first, bound = parity(policy, sampler, dtype)
    change(policy)
    _must_differ(before, probed(policy), dtype)
    sampler.load_weights(1, weights_for(config, sampler, policy))  # raises WeightSyncError if its probe differs
    second, _ = parity(policy, sampler, dtype, first=8)
    return max(first, second), bound


def num_parameters(policy: PolicyModule) -> int:
    return sum(p.numel() for p in policy.parameters())


PROMPTS, SAMPLES = 8, 8
BINS = 4


def measure_noise(
    loaded: Loaded, run: Path | None, step: int, place: Path, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure the error and compare it with ε. `run`, `step`: the weights; `place`: a folder for files."""
    config = loaded.config
    set_threads(config)
    plan = make_plan(loaded)
    policy, tokenizer = make_policy(config, plan.settings["level"] != "token")
    # Step 0 is the model that training starts from; it has no checkpoint.
    if run is not None and step:
        folder = run / "checkpoints" / f"step_{step:06d}"
        checkpoint.verify(folder)
        checkpoint.load_checkpoint(folder, policy, None)
    if config.env.path or config.env.agent:
        say("episodes are not played: each prompt gets one completion, without its environment")
    data, _ = make_data(config, None, None, policy.processor or tokenizer, find_environment(config, None))
    num_samples, params = min(config.gconfig.n_samples, SAMPLES), sampling_params(config)
    # The same prompts in the same order as in training.
    rows = [data.row_of(config.seed, number, shuffle=bool(config.train_dataset.shuffle)) for number in range(PROMPTS)]
    requests = [
        Request(SampleId(number, i), prompt.tokens, params, origin=prompt)
        for number, prompt in enumerate(map(data.prompt, rows))
        for i in range(num_samples)
    ]
    sampler = make_sampler(config, policy, tokenizer, step, place, say)
    try:
        samples = sample_all(sampler, requests, config.rollout.request_timeout)
    finally:
        sampler.close()
    # Per sample: arrays [T], the sampler's and the trainer's log-probs of the same tokens.
    theirs = [sample.behavior_logp.astype(np.float64) for sample in samples]
    ours = trainer_logp(policy, requests, samples, temperature=plan.temperature, max_tokens=plan.max_tokens)
    eps = narrowest_clip(config, plan.settings)
    cuts = {"top_p": params.top_p < 1, "top_k": params.top_k > 0, "min_p": params.min_p > 0}
    return {
        "model": config.actor.path,
        "step": step,
        "sampler": sampler_words(config),
        "trainer": f"{next(policy.parameters()).dtype}, {policy.model.device.type}".removeprefix("torch."),
        "temperature": params.temperature,
        # Truncations whose kept sets are not recorded; those that are change nothing at equal weights.
        "cuts": [key for key, on in cuts.items() if on and not params.record_kept],
        "method": config.actor.prox_logp_method,
        "forced": config.actor.prox_logp_force,
        "eps": eps,
        "eps_auto": config.actor.eps_clip == "auto",
        **noise_figures(ours, theirs, eps),
    }


def sampler_words(config: Config) -> str:
    """Who samples, and in what precision."""
    if not Launched.read().num_samplers:
        precision = config.rollout.sampler_precision
        return "in process" + ("" if precision == "none" else f", on weights rounded to {precision}")
    engine, options = engine_of(config), flags_of(config)
    if not engine.is_external:
        return "a sampler server of our own"
    how = [f"{key} {options[key]}" for key in ("dtype", "quantization", "kv_cache_dtype") if options.get(key)]
    return ", ".join([f"{engine.name} server", *how])


def sample_all(sampler: Sampler, requests: Sequence[Request], deadline_s: float) -> list[Sample]:
    """A sample for each request, in their order."""
    found = {sample.id: sample for sample in single_turn(requests, sampler, deadline_s)}
    if missing := [request.id for request in requests if request.id not in found]:
        raise RolloutError(
            f"the sampler answered {len(found)} of {len(requests)} requests, and not {tuple(missing[0])}; if it needs "
            "longer, set rollout.request_timeout higher"
        )
    return [found[request.id] for request in requests]


@torch.no_grad()
def trainer_logp(
    policy: PolicyModule,
    requests: Sequence[Request],
    samples: Sequence[Sample],
    *,
    temperature: float,
    max_tokens: int = 8192,
) -> list[NDArray[np.float64]]:
    """The trainer's log-probs of the samples' tokens, packed as a step packs them."""
    # Completions of one prompt are packed together, as in training, where they share the prefix.
    groups: dict[PromptKey, tuple[Request, list[Completion]]] = {}
    for number, (request, sample) in enumerate(zip(requests, samples, strict=True)):
        completion = Completion(sample.tokens, sample.mask, number, kept=sample.trained_kept)
        groups.setdefault(request.key, (request, []))[1].append(completion)
    items = [PackItem(np.asarray(first.prompt), tuple(each), first.shown) for first, each in groups.values()]
    found: dict[int, NDArray[Any]] = {}
    for packed in packed_parts(policy, items, max_tokens):
        found |= by_sequence(packed, policy(packed, temperature=temperature, with_entropy=False).logp)
    return [found[i].astype(np.float64) for i in range(len(samples))]


def noise_figures(
    ours: Sequence[NDArray[np.float64]], theirs: Sequence[NDArray[np.float64]], eps: float | None
) -> dict[str, Any]:
    """log s of the trainer against the sampler by sequence, and by length; the verdict and its words."""
    # lengths, log_s: [n]; error: [all tokens].
    lengths = np.array([len(row) for row in ours], dtype=np.int64)
    log_s = np.array([float(np.mean(a - b)) if len(a) else np.nan for a, b in zip(ours, theirs, strict=True)])
    noise = noise_of(log_s, lengths)
    if noise is None:
        raise RolloutError("the sampler answered with no token at all; raise gconfig.max_new_tokens")
    error = np.concatenate([a - b for a, b in zip(ours, theirs, strict=True)])
    verdict = judge_noise(noise.p95, eps)
    return {
        "num_sequences": noise.count,
        "num_tokens": int(lengths.sum()),
        "log_s_mean": noise.mean,
        "log_s_std": noise.std,
        "log_s_p95_abs": noise.p95,
        "token_mean": float(error.mean()),
        "token_std": float(error.std()),
        "token_max_abs": float(np.abs(error).max()),
        "by_length": by_length(log_s, lengths),
        "verdict": verdict,
        "words": None if eps is None or verdict == "fine" else noise_message(noise, eps),
    }


def by_length(log_s: NDArray[np.float64], lengths: NDArray[np.int64]) -> list[Mapping[str, Any]]:
    """The noise of sequences of about one length, shortest first; equal lengths stand together."""
    # edges: at most BINS − 1 lengths; part: [n], the bin of each sequence.
    edges = np.unique(np.quantile(lengths, np.arange(1, BINS) / BINS, method="lower"))
    part, rows = np.searchsorted(edges, lengths), []
    for number in np.unique(part):
        mine = part == number
        noise = noise_of(log_s[mine], lengths[mine])
        if noise is not None:
            span = [int(lengths[mine].min()), int(lengths[mine].max())]
            figures = {"mean": noise.mean, "std": noise.std, "p95_abs": noise.p95}
            rows.append({"tokens": span, "num_sequences": noise.count, **figures})
    return rows


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

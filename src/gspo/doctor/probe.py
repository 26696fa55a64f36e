"""`gspo doctor --probe`: the difference between the sampler's and the trainer's log-probs at equal weights.

The configured sampler samples completions for a few training prompts, and the trainer computes the log-probs of the
same tokens. Mini-batch 1 of every training step measures the same. The verdict is that of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.config import Loaded
from gspo.config.layout import engine_of, flags_of
from gspo.config.schema import Config
from gspo.errors import RolloutError
from gspo.learner.policy.module import PolicyModule, packed_parts
from gspo.learner.policy.packing import Completion, PackItem, by_sequence
from gspo.learner.proximal import judge_noise, noise_message, noise_of
from gspo.rollout.workflow import single_turn
from gspo.runs import checkpoint
from gspo.sampling.api import Sampler
from gspo.system.launched import Launched
from gspo.train.build.compute import set_threads
from gspo.train.build.data import make_data
from gspo.train.build.given import find_environment
from gspo.train.build.objective import make_plan, narrowest_clip
from gspo.train.build.policy import make_policy
from gspo.train.build.sampler import make_sampler, sampling_params
from gspo.types import PromptKey, Request, Sample, SampleId

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

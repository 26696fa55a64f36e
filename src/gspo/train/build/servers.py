"""A trainer's side of sampler servers: which servers it accepts, where its weights go, what its own model says."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from gspo.errors import ConfigError
from gspo.learner.policy.module import PolicyModule
from gspo.models.moe import num_experts, route_shape, routers
from gspo.sampling.remote.client import HttpSampler
from gspo.sampling.remote.discovery import SHM, Address, forget, weight_folders
from gspo.sampling.verify import Experts
from gspo.sampling.weights.publish import Hub, sequence_logp

# Set by the launcher for the trainer: how many servers, and the folder in which they register; for both, the token.
COUNT, FOLDER, TOKEN = "GSPO_SAMPLERS", "GSPO_SAMPLER_DIR", "GSPO_SAMPLER_TOKEN"
RANKS = "GSPO_RANKS"  # set for both where there are several: `auto` does not say how many
COLOCATED = "GSPO_COLOCATED"  # set for both where one GPU is all there is


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a completion: the tokenizer's, and those of the model's own generation settings."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])}
    return sorted(e for e in ends if e is not None)


def context_of(model: Any, asked: int | None) -> int:
    """Longest prompt + completion: what was asked for (gconfig.max_tokens), else the model's own."""
    return asked or getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def facts_of(model: Any, *, seed: int, ends: Collection[int], max_context: int, dtype: torch.dtype) -> dict[str, Any]:
    """What trainer and server must agree on before a token is believed; an adapter's own weights do not count."""
    text = model.config.get_text_config()
    return {
        "model": text.model_type,
        "num_vocab": int(text.vocab_size),
        "num_parameters": sum(p.numel() for n, p in model.named_parameters() if ".lora_" not in n),
        "dtype": str(dtype),
        "seed": seed,
        "ends": sorted(ends),
        "max_context": max_context,
    }


def experts_of(model: Any, needed: bool) -> Experts:
    """What routes of this model are made of."""
    found = routers(model)
    num_layers, per_token, _ = route_shape(found)
    return Experts(num_layers, per_token, num_experts(found), needed)


def num_servers() -> int:
    """Servers that the launcher has started for this trainer; 0: it samples in its own process."""
    text = os.environ.get(COUNT, "0")
    if not text.isdigit():
        raise ConfigError(f"{COUNT} is {text!r}; it is the number of sampler servers")
    return int(text)


def token() -> str:
    if len(text := os.environ.get(TOKEN, "")) < 16:
        raise ConfigError(
            f"sampler servers need a secret of 16 characters or more in {TOKEN}, for them and the trainer"
        )
    return text


def connect(
    policy: PolicyModule,
    tokenizer: Any,
    run: Path,
    *,
    seed: int,
    max_tokens: int | None,
    mode: str,
    timeout_s: float,
    retries: int,
    needs_routes: bool,
    join_s: float,
    computes_in: torch.dtype | None,
    say: Callable[[str], None],
) -> HttpSampler:
    """The client of the servers that the environment names; it has no weights yet.

    `computes_in`: the servers' type where it is not the trainer's, which then bounds how far probes may differ.
    """
    model, ends = policy.model, end_tokens(policy.model, tokenizer)
    dtype, max_context = policy.compute_dtype or model.dtype, context_of(policy.model, max_tokens)
    num_bytes = sum(p.numel() for p in model.parameters()) * dtype.itemsize
    folder = Path(os.environ.get(FOLDER) or run / "samplers")
    for left in weight_folders(run):  # by a trainer of this run that was killed
        forget(left)
    return HttpSampler(
        folder,
        num_servers(),
        token(),
        facts=facts_of(model, seed=seed, ends=ends, max_context=max_context, dtype=dtype),
        max_context=max_context,
        ends=ends,
        place=hub() if mode == "broadcast" else partial(place, mode, run, num_bytes),
        dtype=computes_in or dtype,
        # A sharded model answers only when all ranks ask it: servers are then compared with each other.
        reference=partial(sequence_logp, model) if policy.world.size == 1 else None,
        timeout_s=timeout_s,
        retries=retries,
        experts=experts_of(model, needs_routes),
        join_s=join_s,
        colocated=bool(os.environ.get(COLOCATED)),
        say=say,
    )


def hub() -> Callable[[Sequence[Address | None]], Hub]:
    """Where weights are sent from: loopback, or our address as a server on another machine sees it."""
    made: list[Hub] = []

    def place(servers: Sequence[Address | None]) -> Hub:
        here = socket.gethostname()
        elsewhere = [urlsplit(a.url).hostname for a in servers if a is not None and a.host != here]
        host = "127.0.0.1"
        if elsewhere:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as toward:  # nothing is sent
                toward.connect((elsewhere[0], 9))
                host = toward.getsockname()[0]
        if not made or made[-1].host != host:
            made[:] = [Hub(host)]
        return made[0]

    return place


def place(mode: str, run: Path, num_bytes: int, servers: Sequence[Address | None]) -> Path:
    """The folder for published weights: this machine's memory where all servers are here, else the run directory."""
    memory, disk = weight_folders(run)
    elsewhere = [a.host for a in servers if a is not None and a.host != socket.gethostname()]
    if mode == "shm" and elsewhere:
        raise ConfigError(
            f"actor.weight_update_mode is shm, and a sampler server is on {elsewhere[0]}, which does not share this "
            "machine's memory; set it to disk or auto"
        )
    if mode == "shm":
        return memory
    # A new version is written beside the last one.
    has_room = os.access(SHM, os.W_OK) and shutil.disk_usage(SHM).free > 2.5 * num_bytes
    return memory if mode == "auto" and has_room and not elsewhere and None not in servers else disk

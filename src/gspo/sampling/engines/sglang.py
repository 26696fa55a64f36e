"""A sampler whose tokens are drawn by an SGLang server. EXPERIMENTAL: written from its documentation, never run.

Everything but the words is `rollout/vllm.py`: requests, interruptions, lies, bounds. SGLang's own routes are /generate,
/pause_generation, /continue_generation, /update_weights_from_disk and /flush_cache. Its log-probs know the temperature
and not top-p or top-k, so those are refused. Torch-free.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo import rng
from gspo.errors import ConfigError, DataError, RolloutError, WeightSyncError
from gspo.sampling.engines.vllm import LieError, VllmSampler, believable
from gspo.types import FinishReason, Request


class SglangSampler(VllmSampler):
    """Implements `gspo.sampling.api.Sampler` over one SGLang server."""

    engine, route = "SGLang", "/generate"

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not request.params.greedy and (request.params.top_p < 1 or request.params.top_k):
                raise DataError(
                    f"request {tuple(request.id)}: SGLang's log-probs are of the whole distribution, not of what top-p "
                    "or top-k leaves of it; set gconfig.top_p: 1 and gconfig.top_k: 0, or rollout.backend: vllm"
                )
        super().submit(requests)

    def _body(self, request: Request) -> dict[str, Any]:
        params, said = request.params, () if request.prefix is None else request.prefix.tokens.tolist()
        id, num = request.id, len(said)
        seed = rng.bits(self._seed, "sglang", id.submission, id.sample, id.turn, num, id.attempt)
        sampling = {
            "max_new_tokens": params.max_new_tokens - num,
            "min_new_tokens": max(params.min_new_tokens - num, 0),
            "temperature": 0.0 if params.greedy else params.temperature,
            "sampling_seed": int(seed) >> 33,  # 31 bits; heard under --enable-deterministic-inference alone
            "ignore_eos": True,
            "stop_token_ids": sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._ends)}),
            "stop": list(params.stop),
            "no_stop_trim": True,
        }
        return {"input_ids": [*request.prompt, *said], "sampling_params": sampling, "return_logprob": True}

    def _said(self, reply: Mapping[str, Any]) -> tuple[list[int], list[float], FinishReason]:
        about = reply.get("meta_info")
        if not isinstance(about, dict):
            raise LieError("its meta_info is missing")
        reason, rows = about.get("finish_reason"), about.get("output_token_logprobs")
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) >= 2 for row in rows):
            raise LieError("it said no log-probs")
        tokens = [row[1] for row in rows]
        if reply.get("output_ids") is not None and reply["output_ids"] != tokens:
            raise LieError("its output_ids are not the tokens it said log-probs of")
        return believable(tokens, [row[0] for row in rows], reason.get("type") if isinstance(reason, dict) else reason)

    def _call_back(self) -> None:
        self._post("/pause_generation", {"mode": "abort"})

    def _go_on(self) -> None:
        self._post("/continue_generation", {})

    def sleep(self) -> None:
        self._asleep = True
        self._halt()
        if self._can_sleep:
            self._post("/release_memory_occupation", {})

    def wake(self) -> None:
        if self._asleep and self._can_sleep:
            self._post("/resume_memory_occupation", {})
        self._asleep = False
        self._send()

    def load_published(self, version: int, path: str, sha256: str) -> None:
        """SGLang reads a folder: one that holds the published file alone. It does not check before it writes."""
        from gspo.sampling.weights.publish import sha256_of

        if (got := sha256_of(Path(path))) != sha256:
            raise WeightSyncError(f"{path} is not what was published: sha256 {got[:12]}… instead of {sha256[:12]}…")
        self._halt()
        self._call_back()
        with tempfile.TemporaryDirectory(dir=Path(path).parent, prefix=".sglang-") as folder:
            (Path(folder) / "model.safetensors").symlink_to(Path(path).resolve())
            body = {"model_path": folder, "flush_cache": True, "weight_version": str(version)}
            try:
                reply = self._post("/update_weights_from_disk", body, self._load_s)
            except RolloutError as error:
                raise self._break(f"weight version {version}: {error}") from error
        if reply.get("success") is not True:
            raise self._break(f"SGLang did not take weight version {version}: {reply.get('message')}")
        self._go_on()
        self.version = version
        self._send()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        rows = []
        for tokens in sequences:
            sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
            body = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True}
            about = self._post("/generate", {**body, "logprob_start_len": 0}).get("meta_info")
            said = about.get("input_token_logprobs") if isinstance(about, dict) else None
            try:
                assert [row[1] for row in said] == list(tokens)  # pyright: ignore[reportOptionalIterable]
                rows.append(np.array([row[0] for row in said[1:]], dtype=np.float32))  # pyright: ignore[reportOptionalSubscript]
            except (TypeError, IndexError, ValueError, AssertionError):
                raise RolloutError("SGLang did not say the log-probs of the probe's tokens") from None
        return rows

    def introduce(self) -> dict[str, Any]:
        model = self._get("/get_model_info").get("model_path")
        if not isinstance(model, str):
            raise ConfigError(f"the server {self._endpoint} does not answer as SGLang does (/get_model_info)")
        return {"device": "cuda", "model": model}

    def progress(self) -> float:
        """Samples that came back: token counters need --enable-metrics."""
        return float(self._counts["sampled_tokens"])

"""A sampler whose tokens an SGLang server samples. EXPERIMENTAL: written from its documentation, never run.

SGLang's routes are /generate, /pause_generation, /continue_generation, /update_weights_from_disk and /flush_cache. Its
log-probs include the temperature but not top-p or top-k, so those settings are refused. Torch-free.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.errors import ConfigError, DataError, RolloutError, WeightSyncError
from gspo.sampling.engines.base import EngineSampler
from gspo.sampling.engines.replies import InvalidReplyError, NewTokens, parse_completion
from gspo.system import files
from gspo.types import Request


class SglangSampler(EngineSampler):
    """Implements `gspo.sampling.api.Sampler` over one SGLang server."""

    engine, route = "SGLang", "/generate"
    interrupt, restart = ("/pause_generation", {"mode": "abort"}), ("/continue_generation", {})
    release, reclaim = ("/release_memory_occupation", {}), ("/resume_memory_occupation", {})

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.params.is_truncated:
                raise DataError(
                    f"request {tuple(request.id)}: SGLang's log-probs are of the whole distribution, not of the part "
                    "that top-p, top-k or min-p keeps; set gconfig.top_p: 1, gconfig.top_k: 0 and gconfig.min_p: 0, "
                    "or rollout.backend: vllm"
                )
        super().submit(requests)

    def load_published(self, version: int, path: str, sha256: str) -> None:
        """SGLang loads a folder: one with the published file only. It does not check the file before it loads it."""
        # Checked here, because SGLang loads whatever the file holds.
        if (got := files.sha256(Path(path))) != sha256:
            raise WeightSyncError(f"{path} is not what was published: sha256 {got[:12]}… instead of {sha256[:12]}…")
        # `_interrupt_all` ends with a restart: pause again, so that nothing is sampled during the load.
        self._interrupt_all()
        self._post(*self.interrupt)
        with tempfile.TemporaryDirectory(dir=Path(path).parent, prefix=".sglang-") as folder:
            (Path(folder) / "model.safetensors").symlink_to(Path(path).resolve())
            body = {"model_path": folder, "flush_cache": True, "weight_version": str(version)}
            try:
                reply = self._post("/update_weights_from_disk", body, self._load_s)
            except RolloutError as error:
                # The server may hold the old weights, the new ones, or a mixture.
                raise self._mark_broken(f"weight version {version}: {error}") from error
        if reply.get("success") is not True:
            raise self._mark_broken(f"SGLang did not load weight version {version}: {reply.get('message')}")
        self._resume_with(version)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        rows = []
        for tokens in sequences:
            sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
            body = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True}
            info = self._post("/generate", {**body, "logprob_start_len": 0}).get("meta_info")
            found = info.get("input_token_logprobs") if isinstance(info, dict) else None  # rows of [logp, token, text]
            try:
                # The first token of a sequence has no log-prob.
                assert [row[1] for row in found] == list(tokens)  # pyright: ignore[reportOptionalIterable]
                rows.append(np.array([row[0] for row in found[1:]], dtype=np.float32))  # pyright: ignore[reportOptionalSubscript]
            except (TypeError, IndexError, ValueError, AssertionError):
                raise RolloutError("SGLang did not return the log-probs of the probe's tokens") from None
        return rows

    def check_server(self) -> dict[str, Any]:
        model = self._get("/get_model_info").get("model_path")
        if not isinstance(model, str):
            raise ConfigError(f"the server {self._address} does not answer as SGLang does (/get_model_info)")
        return {"device": "cuda", "model": model}

    def progress(self) -> float:
        """Tokens of the samples that came back: SGLang's own counters need --enable-metrics."""
        return float(self._counts["sampled_tokens"])

    def _body(self, request: Request) -> dict[str, Any]:
        params, prefix = request.params, () if request.prefix is None else request.prefix.tokens.tolist()
        sampling = {
            "max_new_tokens": params.max_new_tokens - len(prefix),
            "min_new_tokens": max(params.min_new_tokens - len(prefix), 0),
            "temperature": 0.0 if params.greedy else params.temperature,
            # 31 bits; SGLang uses it only under --enable-deterministic-inference.
            "sampling_seed": self._request_seed(request, "sglang") >> 33,
            "ignore_eos": True,
            "stop_token_ids": self._stop_token_ids(request),
            "stop": list(params.stop),
            "no_stop_trim": True,
        }
        return {"input_ids": [*request.prompt, *prefix], "sampling_params": sampling, "return_logprob": True}

    def _parse(self, reply: Mapping[str, Any]) -> NewTokens:
        info = reply.get("meta_info")
        if not isinstance(info, dict):
            raise InvalidReplyError("its meta_info is missing")
        reason, rows = info.get("finish_reason"), info.get("output_token_logprobs")  # rows of [logp, token, text]
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) >= 2 for row in rows):
            raise InvalidReplyError("its log-probs are missing")
        tokens = [row[1] for row in rows]
        if reply.get("output_ids") is not None and reply["output_ids"] != tokens:
            raise InvalidReplyError("its output_ids are not the tokens of its log-probs")
        reason = reason.get("type") if isinstance(reason, dict) else reason
        return parse_completion(tokens, [row[0] for row in rows], reason)

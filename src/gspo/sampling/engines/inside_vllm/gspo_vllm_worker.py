"""Runs inside vLLM's environment: loads published weights, all of them or none.

vLLM mixes it into its worker (`--worker-extension-cls gspo_vllm_worker.Worker`); /collective_rpc calls its methods by
name, with strings as arguments. This folder is on vLLM's PYTHONPATH; gspo is not importable here.
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
    """Methods added to vLLM's worker; each returns a mapping that is valid JSON."""

    model_runner: Any  # vLLM's

    def gspo_state(self) -> dict[str, Any]:
        """Process, device and weight version: for the log, and to show that this class is loaded."""
        return {"pid": os.getpid(), "device": str(self.model_runner.device), "version": getattr(self, "_version", None)}

    def gspo_load(self, version: str, path: str, sha256: str) -> dict[str, Any]:
        """Load a version. {refused: why}: nothing changed. {broken: why}: the model is damaged, restart the server."""
        try:
            tensors = self._fetch(path, sha256)
            model = self.model_runner.vllm_config.model_config
            _check(tensors, expected_shapes(model.model), is_tied=bool(model.hf_text_config.tie_word_embeddings))
        except Exception as error:  # any defect of the file: the weights are unchanged
            return {"refused": f"{error}" or type(error).__name__}
        # From here on the model changes: an error leaves a mixture of old and new weights.
        try:
            self.gspo_unpack_experts()
            # vLLM's own loaders of checkpoints, layer by layer: fused, sharded and repacked weights become what they
            # are after a start.
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

    def gspo_unpack_experts(self) -> int:
        """Have the next reload pack the experts of a mixture again; returns the number of layers. CPU only.

        On a CPU vLLM multiplies with packed copies of the experts, too. Its reload takes a layer that has a kernel for
        one whose kernel reads the weights in place, as on CUDA, and keeps the old copies.
        """
        if self.model_runner.device.type != "cpu":
            return 0
        methods = [getattr(m, "quant_method", None) for m in self.model_runner.get_model().modules()]
        packed: list[Any] = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
        for method in packed:
            method.moe_kernel = None
        return len(packed)

    def gspo_repack_tied(self) -> int:
        """Repack the weights of a tied head: on a CPU vLLM multiplies with a packed copy of each weight.

        vLLM repacks the layers that the file names. A head that is tied to the embedding is not in the file: its weight
        changes with the embedding, but its packed copy would stay the old one. On CUDA there is no copy.
        """
        model, packed = self.model_runner.get_model(), 0
        owners: dict[int, str] = {}
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, Tensor) or not weight.numel():
                continue
            # A second module with the same weight is tied to the first one.
            is_shared = owners.setdefault(id(weight), name) != name
            if is_shared and hasattr(module, "cpu_linear"):
                from vllm.model_executor.layers.utils import (  # pyright: ignore[reportMissingImports]
                    dispatch_cpu_unquantized_gemm,
                )

                dispatch_cpu_unquantized_gemm(module, remove_weight=False)
                packed += 1
        return packed


def _read(path: Path, sha256: str) -> dict[str, Tensor]:
    if not stat.S_ISREG(path.lstat().st_mode):  # reading a pipe would never end
        raise ValueError(f"{path} is not a file; vLLM keeps its weights")
    # The digest covers the whole file and is checked before the file is parsed.
    with open(path, "rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != sha256:
        raise ValueError(
            f"{path} is not what was published: sha256 {got[:12]}… instead of {sha256[:12]}…; vLLM keeps its weights"
        )
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], is_tied: bool) -> None:
    """Every tensor of the model's files must arrive, with its shape, and finite. A tied head is optional."""
    for name, tensor in tensors.items():
        if name not in expected:
            raise ValueError(f"weight {name!r} is not in the model's own files; vLLM keeps its weights")
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"weight {name!r} is {tuple(tensor.shape)}, the model's files hold {expected[name]}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"weight {name!r} holds NaN or inf; vLLM keeps its weights")
    optional = {"lm_head.weight"} if is_tied else set()
    optional |= {name for name in expected if name.endswith(".rotary_emb.inv_freq")}  # computed, not trained
    if missing := sorted(set(expected) - set(tensors) - optional):
        raise ValueError(f"{len(missing)} weights did not arrive, first {missing[0]!r}; vLLM keeps its own")


def expected_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor in the model's safetensors files, read from their headers."""
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

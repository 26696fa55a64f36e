"""Compile, check and load `few_rows.c`: x·Wᵀ for 9 to 64 rows on a CPU.

The library is compiled at first use into the cache, under a name that depends on the source, the compiler and the
processor. Its result is compared with PyTorch's before it is used. Without a C compiler, or with GSPO_NATIVE=0,
PyTorch's own product is used. The two differ in their last bits, so the choice is part of a run's identity.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from gspo.models import cache as model_cache

MIN_ROWS, MAX_ROWS = 9, 64  # with fewer rows half a tile is empty; with more, PyTorch's product is as fast
MANY_WEIGHTS = 2**18  # smaller products take less time than the call
OPERATOR = "gspo::few_rows"  # its name in a timeline
_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
_COMPILE_S = 60.0

Product = Callable[[Tensor, Tensor], Tensor]  # x [N, in], W [out, in] → [N, out]


class Native(NamedTuple):
    product: Product | None
    why: str  # how it was compiled, or why it is not there


def large_linears(model: nn.Module) -> list[nn.Linear]:
    """The layers whose products are worth it. Plain nn.Linear only: adapters and quantised layers have their own."""
    linears = [m for m in model.modules() if type(m) is nn.Linear and m.weight.device.type == "cpu"]
    return [m for m in linears if m.weight.numel() >= MANY_WEIGHTS]


def native_for(model: nn.Module) -> Native | None:
    """The compiled product for sampling from this model; None for a model that has no use for it."""
    return load_native() if any(m.weight.dtype == torch.float32 for m in large_linears(model)) else None


def product_name(model: nn.Module) -> str:
    """Which product samples from this model, for the identity of a run: native or torch."""
    native = native_for(model)
    return "native" if native is not None and native.product is not None else "torch"


@cache
def load_native() -> Native:
    """The compiled product, once per process."""
    if os.environ.get("GSPO_NATIVE") == "0":
        return Native(None, "GSPO_NATIVE is 0")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        return Native(None, "there is no C compiler (cc, gcc or clang)")
    try:
        library = _compiled(compiler)
        product = _bind(ctypes.CDLL(str(library)))
    except (OSError, subprocess.SubprocessError) as error:
        return Native(None, f"{compiler}: {_first_line(error)}")
    return Native(product, str(library)) if _is_right(product) else Native(None, f"{library} computes wrong products")


def _compiled(compiler: str) -> Path:
    """The library in the cache, compiled if it is not there."""
    version = _run([compiler, "--version"])
    key = "\0".join([_SOURCE.read_text(encoding="utf-8"), version, " ".join(_FLAGS), _processor(), torch.__version__])
    folder = model_cache.root() / "native"
    library = folder / f"few_rows-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as tmp:
            _build(compiler, Path(tmp) / "few_rows.so").replace(library)
    # A user who can write these files can run code in this process.
    for place in (folder, library):
        found = place.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise OSError(f"{place} can be written by other users; remove it")
    return library


def _build(compiler: str, out: Path) -> Path:
    # Linked without an OpenMP library, it takes the one that PyTorch has loaded: two would compete for the cores.
    part = out.with_suffix(".o")
    _run([compiler, *_FLAGS[:-1], "-c", str(_SOURCE), "-o", str(part)])
    _run([compiler, "-shared", str(part), "-o", str(out)])
    try:
        ctypes.CDLL(str(out))
    except OSError:  # another OpenMP than PyTorch's
        out.unlink()
        _run([compiler, *_FLAGS, str(_SOURCE), "-o", str(out)])
    return out


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    if done.returncode:
        raise OSError(f"exit code {done.returncode}: {done.stderr.strip()[:200]}")
    return done.stdout


def _bind(library: Any) -> Product:
    function = library.few_rows
    pointer, number = ctypes.c_void_p, ctypes.c_long
    function.argtypes = [pointer, pointer, pointer, number, number, number, ctypes.c_int]

    def product(x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        y = x.new_empty(len(x), len(weight))
        num_threads = torch.get_num_threads()
        # A timeline (`profile: true`) does not see a call of C by itself.
        is_recorded = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        with record_function(OPERATOR) if is_recorded else nullcontext():
            failed = function(
                x.data_ptr(), weight.data_ptr(), y.data_ptr(), len(x), x.shape[1], len(weight), num_threads
            )
        if failed:
            raise MemoryError(f"no memory for a product of {tuple(x.shape)} and {tuple(weight.shape)}")
        return y

    return product


def _is_right(product: Product) -> bool:
    """Against PyTorch's product in float64, with sizes that are no multiple of a tile, a block or a chunk."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for rows, num_in, num_out in ((17, 577, 491), (9, 31, 7), (64, 288, 240)):
            # Not in the default type, which a caller may have set to float64.
            x, weight = (torch.randn(num, num_in, dtype=torch.float32) for num in (rows, num_out))
            exact = x.double() @ weight.double().T
            if not (product(x, weight) - exact).abs().max() < 1e-5 * num_in**0.5:
                return False
    return True


def _processor() -> str:
    """The instruction set: a library for another one could end the process."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]

"""Compile and load the C sources of this folder, once per process.

The library is compiled at first use into the cache, under a name that depends on the sources, the compiler and the
processor. Without a C compiler, or with GSPO_NATIVE=0, there is none, and PyTorch's operators are used. Results differ
in their last bits, so the choice is part of a run's identity (`few_rows.product_name`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from gspo.models import cache as model_cache
from gspo.system import fsync, instruction_set, kill_group, sha256

_FOLDER = Path(__file__).parent
_TUNED = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"  # clang's flag on ARM
_FLAGS, _OPENMP = ["-O3", _TUNED, "-fPIC"], ["-fopenmp"]
_COMPILE_S = 60.0


class Library(NamedTuple):
    functions: Any  # ctypes.CDLL, or None
    why: str  # where it is, or why it is not there


@cache
def load_library() -> Library:
    if os.environ.get("GSPO_NATIVE") == "0":
        return Library(None, "GSPO_NATIVE is 0")
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        return Library(None, "there is no C compiler (cc, gcc or clang)")
    try:
        path = _compiled(compiler)
        return Library(ctypes.CDLL(str(path)), str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return Library(None, f"{compiler}: {_first_line(error)}")


def sources_digest() -> str:
    """Eight digits that change with the C sources and the flags of the compiler: other ones may round differently."""
    return hashlib.sha256("\0".join([*_texts(), *_FLAGS, *_OPENMP]).encode()).hexdigest()[:8]


def named_in_timeline(name: str) -> AbstractContextManager[Any]:
    """A name for a call of C in a timeline (`profile: true`), which does not see it by itself."""
    is_recorded = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
    return record_function(name) if is_recorded else nullcontext()


def _texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.[ch]"))]


def _compiled(compiler: str) -> Path:
    """The library in the cache, compiled if it is not there."""
    version = _run([compiler, "--version"])
    key = "\0".join([*_texts(), version, " ".join(_FLAGS + _OPENMP), instruction_set(), torch.__version__])
    folder = model_cache.root() / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A user who can write to this folder can run code in this process.
    if not _is_private(folder, stat.S_IFDIR):
        raise OSError(f"{folder} can be written by other users; remove it")
    name = f"gspo-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if found := _found(folder, name):
        return found
    with model_cache.one_at_a_time(folder / f".{name}.lock"):
        if found := _found(folder, name):  # another process has compiled it meanwhile
            return found
        with tempfile.TemporaryDirectory(dir=folder) as tmp:
            built = _build(compiler, Path(tmp) / "gspo.so")
            built.chmod(0o700)  # whatever the umask is
            fsync(built)
            library = built.replace(folder / f"{name}-{sha256(built)}.so")
            fsync(folder)
            return library


def _found(folder: Path, name: str) -> Path | None:
    """The library whose content has the digest of its name: loading a truncated one would end the process."""
    for library in sorted(folder.glob(f"{name}-*.so")):
        with suppress(OSError):  # another process has removed it, or it is a folder
            if _is_private(library, stat.S_IFREG) and library.stem.rpartition("-")[2] == sha256(library):
                return library
            library.unlink()
    return None


def _is_private(place: Path, kind: int) -> bool:
    found = place.lstat()
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _build(compiler: str, out: Path) -> Path:
    sources = [str(path) for path in sorted(_FOLDER.glob("*.c"))]
    parts = [str(out.with_name(f"{Path(source).stem}.o")) for source in sources]
    problem = OSError("no sources")
    # Linked without an OpenMP library, it takes the one that PyTorch has loaded: two would compete for the cores. If
    # PyTorch has another one, the compiler's own is linked. Without OpenMP (Apple's clang), it runs in one thread.
    for compiled, linked in ((_OPENMP, []), (_OPENMP, _OPENMP), ([], [])):
        try:
            for source, part in zip(sources, parts, strict=True):
                _run([compiler, *_FLAGS, *compiled, "-c", source, "-o", part])
            _run([compiler, "-shared", *linked, *parts, "-lm", "-o", str(out)])
            ctypes.CDLL(str(out))
            return out
        except OSError as error:
            problem = error
    raise problem


def _run(command: list[str]) -> str:
    pipe: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    # A session of its own, so that the compiler's children end with it.
    with subprocess.Popen(command, start_new_session=True, **pipe) as process:
        try:
            out, problem = process.communicate(timeout=_COMPILE_S)  # wait: 60 s, the sampler, once per machine
        except BaseException:
            kill_group(process.pid)
            raise
    if process.returncode:
        raise OSError(f"exit code {process.returncode}: {problem.strip()[:200]}")
    return out


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]

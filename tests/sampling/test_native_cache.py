"""The compiled library in the cache: private, whole or compiled again, and never loaded when it is damaged."""

import os
import platform
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from native_library import forget_native

from gspo.sampling import few_rows, library

pytestmark = [pytest.mark.run, pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")]


@pytest.fixture
def cache(native_anew, monkeypatch, tmp_path_factory):
    """The cache folder, and one short source in place of ours, which takes seconds to compile."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "one.c").write_text("int one(void) { return 1; }\n")
    monkeypatch.setattr(library, "_FOLDER", folder)
    return native_anew


def the_file(cache: Path) -> Path:
    (file,) = (cache / "native").iterdir()
    return file


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077, 0o277])
def test_it_is_private_whatever_the_umask_is(cache, umask):
    before = os.umask(umask)
    try:
        assert library.load_library().functions.one() == 1
    finally:
        os.umask(before)
    assert stat.S_IMODE(the_file(cache).stat().st_mode) == 0o700
    assert not (cache / "native").stat().st_mode & 0o077


def cut(size: int):
    return lambda file: os.truncate(file, size)


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def replaced(make):
    def damage(file: Path) -> None:
        file.unlink()
        make(file)

    return damage


DAMAGES = {
    **{f"cut at {size}": cut(size) for size in (0, 1, 1000, 4096, 12288, 20480)},
    "a flipped bit": flipped,
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "sparse": cut(30 * 2**20),
    "writable by others": lambda file: file.chmod(0o666),
    "a FIFO": replaced(os.mkfifo),
    "a link": replaced(lambda file: file.symlink_to("/dev/zero")),
    "a text": replaced(lambda file: file.write_text("#!/bin/sh\n")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again_and_not_loaded(cache, damage):
    assert library.load_library().functions.one() == 1
    whole = the_file(cache).read_bytes()
    forget_native()
    DAMAGES[damage](the_file(cache))
    found = library.load_library()
    assert found.functions is not None, found.why
    file = the_file(cache)
    assert str(file) == found.why
    assert stat.S_IMODE(file.stat().st_mode) == 0o700
    assert len(file.read_bytes()) == len(whole)


def test_a_folder_of_other_users_is_named_and_not_used(cache):
    (cache / "native").mkdir(mode=0o777)
    (cache / "native").chmod(0o777)
    found = library.load_library()
    assert found.functions is None
    assert "native can be written by other users" in found.why


def test_a_folder_that_is_a_link_or_in_the_place_of_a_library_is_named(cache):
    (cache / "native").symlink_to(cache)
    assert library.load_library().functions is None
    (cache / "native").unlink()
    forget_native()
    library.load_library()
    file = the_file(cache)
    file.unlink()
    file.mkdir()
    forget_native()
    assert library.load_library().functions is None


def test_a_compiler_that_hangs_ends_with_its_children(cache, monkeypatch):
    pids = cache / "pids"
    hangs = cache / "cc"
    hangs.write_text(f"#!/bin/sh\nsleep 1000 &\necho $$ $! > {pids}\nwait\n")
    hangs.chmod(0o755)
    monkeypatch.setenv("CC", str(hangs))
    monkeypatch.setattr(library, "_COMPILE_S", 1.0)
    assert "timed out" in library.load_library().why
    for pid in map(int, pids.read_text().split()):
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                break
            time.sleep(0.02)
        else:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("a child of the compiler lives on")


def test_a_compiler_that_prints_no_text_is_no_traceback(cache, monkeypatch):
    odd = cache / "cc"
    odd.write_text("#!/bin/sh\nprintf '\\377\\376' >&2\nexit 1\n")
    odd.chmod(0o755)
    monkeypatch.setenv("CC", str(odd))
    assert "exit code 1" in library.load_library().why


def test_processes_that_start_together_compile_once(cache, tmp_path):
    log, cc = tmp_path / "log", tmp_path / "cc"
    cc.write_text(f'#!/bin/sh\ncase "$1" in --version) ;; *) echo run >> {log} ;; esac\nexec cc "$@"\n')
    cc.chmod(0o755)
    environment = {**os.environ, "CC": str(cc)}
    code = "import sys; from gspo.sampling import few_rows, library as it; "
    code += "it._FOLDER = it.Path(sys.argv[1]); print(it.load_library().why)"
    command = [sys.executable, "-c", code, str(library._FOLDER)]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=200)[0].strip() for process in running}
    assert len(said) == 1
    assert said.pop().endswith(".so")
    assert len(log.read_text().splitlines()) == 2  # the source and the link


def test_a_folder_with_the_name_of_a_library_does_not_turn_compiled_decoding_off(cache):
    library.load_library()
    file = the_file(cache)
    file.with_name(file.name.replace(file.stem.rpartition("-")[2], "0")).mkdir()
    forget_native()
    assert library.load_library().functions.one() == 1


NO_OPENMP = """#!/bin/sh
case " $* " in *" -fopenmp "*) echo "clang: error: unsupported option '-fopenmp'" >&2; exit 1;; esac
exec cc "$@"
"""


@pytest.mark.parametrize("compiler", ["without OpenMP", "clang"])
def test_a_compiler_without_openmp_compiles_for_one_thread(native_anew, monkeypatch, tmp_path, compiler):
    """Apple's clang refuses -fopenmp; Debian's has no omp.h unless libomp-dev is installed."""
    if compiler == "clang" and not shutil.which("clang"):
        pytest.skip("there is no clang")
    script = tmp_path / "no_openmp"
    script.write_text(NO_OPENMP)
    script.chmod(0o700)
    monkeypatch.setenv("CC", "clang" if compiler == "clang" else str(script))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    native = few_rows.load_native()
    assert native.product is not None, native.why
    x, w = torch.randn(17, 300), torch.randn(50, 300)
    torch.testing.assert_close(native.product(x, w), x @ w.T)


def test_the_processor_is_named_by_the_flag_that_clang_takes(monkeypatch):
    for machine, flag in (("x86_64", "-march=native"), ("arm64", "-mcpu=native"), ("aarch64", "-mcpu=native")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        assert flag in runpy.run_path(library.__file__)["_FLAGS"]

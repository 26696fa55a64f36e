"""The oldest and the newest TRL of the supported range, each in a folder of its own, run the tests of this room."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gspo.trl.internals import NEWEST, OLDEST, REMEDY

ROOT = Path(__file__).parents[2]


def test_the_extra_has_the_range_that_is_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = REMEDY.removeprefix("install ")
    assert any(need.startswith(wanted) for need in extras["trl"])


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("numbers", [OLDEST, NEWEST], ids=lambda numbers: ".".join(map(str, numbers)))
def test_this_version_of_trl_passes(tmp_path, numbers):
    wanted = f"trl=={numbers[0]}.{numbers[1]}.*"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), wanted]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"{wanted} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    version = [sys.executable, "-c", "import trl; print(trl.__version__, trl.__file__)"]
    found = subprocess.run(version, capture_output=True, text=True, env=env, timeout=120, check=True).stdout
    assert found.startswith(".".join(map(str, numbers)))
    assert str(tmp_path) in found
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("same_numbers", "trainer")]
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "not full", *files]
    done = subprocess.run(tests, capture_output=True, text=True, env=env, cwd=ROOT, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:]

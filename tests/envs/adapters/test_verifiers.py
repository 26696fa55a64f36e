"""Environments of verifiers, with the real package in its own virtual environment (`make setup-envs`)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gspo.envs.find import find_environment
from gspo.errors import ConfigError

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
needs_verifiers = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-verifiers: run `make setup-envs`")


def run(*command, **options):
    paths = os.pathsep.join([str(ROOT / "src"), str(HERE / "verifiers_env")])
    done = subprocess.run(
        [str(PYTHON), *command], capture_output=True, text=True, timeout=900, env={**os.environ, "PYTHONPATH": paths},
        **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_without_the_package_the_error_names_the_command():
    with pytest.raises(ConfigError, match="pip install 'verifiers"):
        find_environment("verifiers:anything")


def test_another_release_is_refused_with_the_one_that_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.0")
    with pytest.raises(ConfigError, match=r"needs verifiers 0\.3 or 0\.4, found 1\.2\.0: pip install 'verifiers"):
        find_environment("verifiers:anything")


@pytest.mark.full
@pytest.mark.timeout(1000)  # processes that import verifiers: minutes on a busy machine
@needs_verifiers
def test_episodes_of_the_package_are_played():
    found = json.loads(run(str(HERE / "verifiers_env" / "checks.py")).splitlines()[-1])
    assert found["rows"] == [48, 2, {"prompt": "10+11=", "idx": 0}]
    right, wrong = found["results"]
    assert right == {"reward": 1.0, "correct": 1.0, "length": 2.0}
    assert wrong["reward"] == 0.0
    assert found["asked"] == [1, 1]
    assert found["again"] == [right]
    assert found["tools"]["reward"] == 1.0
    assert "21" in found["tool prompt"]
    assert found["raise"][:2] == ["VerifiersError", "crash"]
    assert "the judge is away" in found["raise"][2]
    assert found["nan"][:2] == ["EpisodeError", "crash"]
    assert "must be a finite number" in found["nan"][2]
    assert found["hang"][:2] == ["VerifiersError", "timeout"]
    assert "allow_code" in found["gspo_sums {'harness': 'bash'}"]
    assert "no_such_package" in found["no_such_package {}"]


@pytest.mark.full
@pytest.mark.timeout(1000)  # processes that import verifiers: minutes on a busy machine
@needs_verifiers
def test_an_environment_trains_with_one_line_of_yaml(tmp_path):
    (tmp_path / "run.yaml").write_text("actor: {path: embedded:tiny}\nenv: {path: verifiers:gspo_sums}\n")
    small = ("total_train_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=8")
    run("-m", "gspo", "train", "run.yaml", "cluster.fileroot=runs", *small, cwd=tmp_path)
    (metrics,) = tmp_path.glob("runs/**/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    trained = [row for row in rows if "reward/mean" in row]
    assert len(trained) == 2
    assert all("reward/part_length" in row for row in trained)


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.skipif(
    not list(ROOT.glob(".venv-verifiers/lib/*/site-packages/scratchpad")),
    reason="scratchpad, an environment of the authors of verifiers, is not in .venv-verifiers (docs/environments.md)",
)
def test_an_environment_that_others_wrote_is_played_as_it_is():
    """scratchpad: a tool server that all episodes share, with state of its own for each."""
    found = json.loads(run(str(HERE / "verifiers_env" / "scratchpad_checks.py")).splitlines()[-1])
    assert found["rows"] == 19
    assert found["results"] == [{"isolated": 1.0, "reward": 1.0}, {"isolated": 1.0, "reward": 1.0}]

"""Environments of verifiers, with the real package in its own virtual environment (`make setup-envs`)."""

import json
import os
import subprocess
from pathlib import Path

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

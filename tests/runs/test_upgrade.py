"""Configs and run directories of 0.1 under this version: docs/upgrading.md.

of_0_1/ was written by two states of 0.1: its first day (2949741, v00) and its last (f0af1d5, v01); less the weights.
"""

import json
import shutil
from pathlib import Path

import pytest
import training_runs

from gspo.cli import main as cli
from gspo.config import load
from gspo.errors import CheckpointError, ConfigError
from gspo.report import read_metrics
from gspo.runs.checkpoint import _own_sha256, verify
from gspo.system import sha256

OLD = Path(__file__).parent / "of_0_1"


def test_a_config_of_0_1_without_removed_keys_loads():
    config = load(OLD / "run.yaml").config
    assert (config.algorithm, config.actor.eps_clip, config.train_dataset.batch_size) == ("gspo", 0.002, 2)


@pytest.mark.parametrize("version", ["v00", "v01"])
def test_the_resolved_config_of_a_run_of_0_1_is_refused_with_the_names_of_the_removed_keys(version):
    with pytest.raises(ConfigError, match=r"train_dataset\.prompt_column is not a known key"):
        load(OLD / version / "config.yaml")


@pytest.mark.parametrize("version", ["v00", "v01"])
def test_a_run_of_0_1_is_reported(version, tmp_path, capsys):
    shutil.copytree(OLD, tmp_path / "old")
    run = tmp_path / "old" / version
    assert cli.main(["report", str(run)]) == 0
    assert (run / "report.html").read_bytes().startswith(b"<!doctype html>")
    assert cli.main(["report", str(run), "--samples", "--step", "2"]) == 0
    assert "6189+2280=" in capsys.readouterr().out
    assert cli.main(["compare", str(run.parent), "--out", str(tmp_path / "compare.html")]) == 0
    assert cli.main(["checkpoints", str(run)]) == 0


def test_a_checkpoint_of_the_first_day_is_refused():
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing or damaged"):
        verify(OLD / "v00" / "checkpoints" / "step_000002")


@pytest.mark.run
def test_a_checkpoint_with_the_state_of_0_1_is_resumed(tiny, tmp_path):
    path = training_runs.train(tmp_path, "total_train_steps=1")[1]
    (folder,) = (path / "checkpoints").iterdir()
    old = json.loads((OLD / "v01" / "checkpoints" / "step_000002" / "state.json").read_text())
    new = json.loads((folder / "state.json").read_text())
    assert new.keys() - old.keys()  # there is something that 0.1 did not write
    state = {name: new.get(name, value) for name, value in old.items()}
    state["identity"] = {name: new["identity"].get(name, value) for name, value in old["identity"].items()}
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("sha256")
    size = (folder / "state.json").stat().st_size
    manifest["files"]["state.json"] = {"sha256": sha256(folder / "state.json"), "bytes": size}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": _own_sha256(manifest)}))
    (path / "origins.json").unlink()  # 0.1 did not write it
    training_runs.train(tmp_path, "total_train_steps=2")
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]

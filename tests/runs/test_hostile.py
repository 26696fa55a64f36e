"""Hostile files where we read: nothing is unpickled or executed, and each is refused by name (P8, test 14)."""

import hashlib
import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
from safetensors.torch import save_file
from training_runs import path_of, train

from gspo.cli.main import main
from gspo.runs.checkpoint import _own_sha256

pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.run]


class Bomb:
    """Unpickled, it touches a file."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny):
    """Two steps, with a checkpoint of each."""
    root = tmp_path_factory.mktemp("run")
    train(root, "total_train_steps=2", "saver.freq_steps=1", "saver.keep=2")
    return path_of(root)


@pytest.fixture
def copy(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "trial0"))


def seal(folder, manifest):
    """Write this manifest with a right digest of its own."""
    manifest.pop("sha256")
    manifest["sha256"] = _own_sha256(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def gspo(capsys, monkeypatch):
    """The command, in this process: a pickle that is opened fires here as well. Exit code and what was said."""
    monkeypatch.setenv("COLUMNS", "400")

    def run(*words):
        code = main(words)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_a_bomb_is_one(tmp_path):
    """The control: what is planted below does fire when it is unpickled."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_place_of_a_checkpoints_file_is_named_and_never_opened_as_one(copy, tmp_path, gspo, name):
    canary = tmp_path / "canary"
    for folder in (copy / "checkpoints").iterdir():
        (folder / name).write_bytes(pickle.dumps(Bomb(canary)))
    for verb in ("export", "checkpoints", "eval"):
        code, said = gspo(verb, str(copy), *(["--verify"] if verb == "checkpoints" else ["--step", "last"]))
        assert code == 1
        assert name in said
    assert not canary.exists()


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "environment.json", "samples/step_000001.jsonl"])
def test_a_pickle_in_place_of_a_runs_file_is_refused_or_ignored(copy, tmp_path, gspo, name):
    canary = tmp_path / "canary"
    (copy / name).write_bytes(pickle.dumps(Bomb(canary)))
    for verb in ("export", "eval", "checkpoints"):
        gspo(verb, str(copy), *([] if verb == "checkpoints" else ["--step", "last"]))
    assert not canary.exists()


def test_a_safetensors_header_of_a_terabyte_is_refused_without_reading_it(copy, tmp_path, gspo):
    newest = sorted((copy / "checkpoints").iterdir())[-1]
    bad = struct.pack("<Q", 2**40) + b"{}"
    (newest / "model.safetensors").write_bytes(bad)
    # A liar who also fixes the manifest: the file itself must be refused.
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = {"sha256": hashlib.sha256(bad).hexdigest(), "bytes": len(bad)}
    seal(newest, manifest)
    code, said = gspo("export", str(copy), "--step", "last")
    assert code == 1
    assert "model.safetensors" in said


def test_a_manifest_cannot_name_files_elsewhere(copy, tmp_path, gspo):
    newest = sorted((copy / "checkpoints").iterdir())[-1]
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"]["../../../secret"] = manifest["files"].pop("state.json")
    seal(newest, manifest)
    code, said = gspo("checkpoints", str(copy), "--verify")
    assert code == 1
    assert "manifest.json" in said


def test_a_tensor_name_with_dots_is_a_name_and_no_path(tmp_path, gspo):
    import torch

    folder = tmp_path / "model"
    from gspo.models import embedded

    model, tokenizer = embedded.build("embedded:tiny")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file({"../../escaped": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    code, said = gspo("eval", str(folder), "--data", "embedded:arithmetic:2-3")
    assert code == 1
    assert "escaped" in said
    assert not (tmp_path.parent / "escaped").exists()

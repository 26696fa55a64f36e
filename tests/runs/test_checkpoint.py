import errno
import json
import os
import shutil

import model_zoo
import pytest
import torch
from processes import files_up_to

from gspo.errors import CheckpointError
from gspo.learner import PolicyModule, make_optimizer
from gspo.runs import checkpoint

STATE = {"step": 3, "noise": 5.5e-8, "auto_eps": None, "alarm_counts": {"entropy collapsed": 2}, "identity": {"a": 1}}


def make_policy(name="qwen3", dtype=torch.float32, kind="adamw", steps=2):
    """A policy that has been trained a little, so that moments are not zero."""
    policy = PolicyModule(model_zoo.build(name, dtype))
    optimizer = make_optimizer(policy.parameters(), kind=kind, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.99), eps=1e-8)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for p in policy.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return policy, optimizer


def contents(policy, optimizer):
    names = {p: n for n, p in policy.named_parameters()}
    moments = {f"{names[p]}/{k}": v.clone() for p, state in optimizer.state.items() for k, v in state.items()}
    return {n: p.detach().clone() for n, p in policy.named_parameters()} | moments


def assert_equal(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def save(root, step, policy=None, optimizer=None, **state):
    if policy is None:
        policy, optimizer = make_policy(steps=0)
    return checkpoint.save(root, step, policy, optimizer, STATE | {"step": step} | state, "digest")


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [("qwen3", torch.float32, "adamw"), ("qwen3_moe", torch.bfloat16, "adamw"), ("llama", torch.float64, "sgd")],
)
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path, name, dtype, kind):
    policy, optimizer = make_policy(name, dtype, kind)
    want = contents(policy, optimizer)
    folder = checkpoint.save(tmp_path, 3, policy, optimizer, STATE, "digest")
    assert folder == tmp_path / "step_000003"
    assert sorted(p.name for p in folder.iterdir()) == sorted([*checkpoint.FILES, "manifest.json"])
    assert {p.name for p in tmp_path.iterdir()} == {"step_000003"}
    assert checkpoint.verify(folder) | {"files": None} == {
        "format": 1, "step": 3, "config": "digest", "files": None
    }  # fmt: skip
    fresh, fresh_optimizer = make_policy(name, dtype, kind, steps=1)
    assert checkpoint.load_checkpoint(folder, fresh, fresh_optimizer) == STATE
    assert_equal(contents(fresh, fresh_optimizer), want)
    # The next update is the same, too: nothing an optimizer needs is missing.
    for policy_, optimizer_ in ((policy, optimizer), (fresh, fresh_optimizer)):
        for p in policy_.parameters():
            p.grad = torch.full_like(p, 0.1)
        optimizer_.step()
    assert_equal(contents(fresh, fresh_optimizer), contents(policy, optimizer))


def test_weights_can_be_loaded_without_an_optimizer(tmp_path):
    policy, optimizer = make_policy()
    folder = checkpoint.save(tmp_path, 1, policy, optimizer, STATE, "digest")
    fresh, _ = make_policy(steps=0)
    assert checkpoint.load_checkpoint(folder, fresh, None) == STATE
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), policy.parameters(), strict=True))


@pytest.mark.parametrize("name", [*checkpoint.FILES, "manifest.json"])
def test_a_flipped_bit_anywhere_is_found_and_its_file_named(tmp_path, name):
    folder = save(tmp_path, 1)
    whole = (folder / name).read_bytes()
    stride = max(1, len(whole) // 97)
    for at in {*range(0, len(whole), stride), 0, len(whole) - 1}:
        for bit in (0, 3, 6, 7):
            broken = bytearray(whole)
            broken[at] ^= 1 << bit
            (folder / name).write_bytes(broken)
            with pytest.raises(CheckpointError, match=r"damaged|format|cannot be read") as caught:
                checkpoint.verify(folder)
            assert name in str(caught.value) or name == "manifest.json"
    (folder / name).write_bytes(whole)
    checkpoint.verify(folder)


@pytest.mark.parametrize("name", [*checkpoint.FILES, "manifest.json"])
def test_truncated_missing_and_swapped_files_are_found(tmp_path, name):
    folder, other = save(tmp_path / "a", 1), save(tmp_path / "b", 2)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=name):
        checkpoint.verify(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} (is missing|cannot be read: No such file)"):
        checkpoint.verify(folder)
    if name == "state.json":  # the only one that differs between the two
        shutil.copy(other / name, folder / name)
        with pytest.raises(CheckpointError, match=name):
            checkpoint.verify(folder)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"format": 1}', '{"format": 1, "files": {}, "sha256": "x"}'])
def test_a_manifest_of_another_shape_is_refused(tmp_path, text):
    folder = save(tmp_path, 1)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoint.verify(folder)


def test_the_newest_whole_checkpoint_comes_after_the_damaged_ones(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step_000003" / "model.safetensors").write_bytes(b"")
    (tmp_path / ".step_000004.tmp").mkdir()
    (tmp_path / "step_other").mkdir()
    found = list(checkpoint.latest(tmp_path))
    assert [folder.name for folder, _ in found] == ["step_000003", "step_000002", "step_000001"]
    assert isinstance(found[0][1], CheckpointError)
    assert found[1][1]["step"] == 2


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path):
    os.rename(save(tmp_path, 1), tmp_path / "step_000007")
    with pytest.raises(CheckpointError, match="holds step 1: folders were renamed or swapped"):
        checkpoint.verify(tmp_path / "step_000007")


def test_another_models_checkpoint_is_refused_before_a_tensor_is_touched(tmp_path):
    folder = save(tmp_path, 1)
    for name, dtype, what in (
        ("llama", torch.float32, "another model"),
        ("qwen3", torch.float64, "float32"),
    ):
        policy, optimizer = make_policy(name, dtype)
        before = contents(policy, optimizer)
        with pytest.raises(CheckpointError, match=what):
            checkpoint.load_checkpoint(folder, policy, optimizer)
        assert_equal(contents(policy, optimizer), before)


@pytest.mark.parametrize("operation", ["fsync", "rename", "mkdir"])
def test_a_failing_file_system_leaves_earlier_checkpoints_and_no_debris(tmp_path, monkeypatch, operation):
    save(tmp_path, 1)
    before = {p.name: p.read_bytes() for p in (tmp_path / "step_000001").iterdir()}
    policy, optimizer = make_policy(steps=0)
    really, calls = getattr(os, operation), []

    def full(*args, **kwargs):
        calls.append(args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, full)
        with pytest.raises(CheckpointError, match=r"No space left on device.*cluster\.fileroot"):
            save(tmp_path, 2, policy, optimizer)
    assert calls
    assert getattr(os, operation) is really
    assert checkpoint.steps(tmp_path) == [1]
    assert {p.name for p in tmp_path.iterdir()} == {"step_000001"}
    assert {p.name: p.read_bytes() for p in (tmp_path / "step_000001").iterdir()} == before
    checkpoint.verify(save(tmp_path, 2, policy, optimizer))


@pytest.mark.parametrize("num_bytes", [100, 40_000])  # in the header, and inside the tensors
def test_a_disk_that_fills_while_tensors_are_written_leaves_earlier_checkpoints(tmp_path, num_bytes):
    save(tmp_path, 1)
    policy, optimizer = make_policy(steps=0)
    with files_up_to(num_bytes), pytest.raises(CheckpointError, match=r"File too large.*cluster\.fileroot"):
        save(tmp_path, 2, policy, optimizer)
    assert {p.name for p in tmp_path.iterdir()} == {"step_000001"}
    checkpoint.verify(tmp_path / "step_000001")


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 1, noise=1.0)
    folder = save(tmp_path, 1, noise=2.0)
    checkpoint.verify(folder)
    assert json.loads((folder / "state.json").read_text())["noise"] == 2.0
    assert checkpoint.steps(tmp_path) == [1]


def test_pruning_keeps_the_newest_and_the_best_and_sweeps_debris(tmp_path):
    for step in (2, 4, 6, 8):
        save(tmp_path, step)
    (tmp_path / ".step_000009.tmp").mkdir()
    checkpoint.prune(tmp_path, 8, keep=2, best=2)
    assert checkpoint.steps(tmp_path) == [2, 6, 8]
    assert not list(tmp_path.glob(".step*"))
    checkpoint.prune(tmp_path, 8, keep=1, best=None)
    assert checkpoint.steps(tmp_path) == [8]
    checkpoint.prune(tmp_path, 8, keep=5, best=None)
    assert checkpoint.steps(tmp_path) == [8]


def test_pruning_never_counts_a_damaged_checkpoint_of_the_future_as_the_newest(tmp_path):
    """After a fall back from 9 to 6, the run publishes 7: that is what must survive, not the damaged 9."""
    for step in (6, 7, 9):
        save(tmp_path, step)
    (tmp_path / "step_000009" / "model.safetensors").write_bytes(b"torn")
    checkpoint.prune(tmp_path, 7, keep=1, best=None)
    assert checkpoint.steps(tmp_path) == [7]


@pytest.mark.parametrize("entry", [None, {}, [], {"bytes": 0}])
def test_a_manifest_whose_entries_are_no_entries_is_a_damaged_one(tmp_path, entry):
    manifest = {"format": 1, "step": 1, "files": dict.fromkeys(checkpoint.FILES, entry)}
    manifest["sha256"] = checkpoint._own_sha256(manifest)
    folder = tmp_path / "step_000001"
    folder.mkdir()
    for name in checkpoint.FILES:
        (folder / name).touch()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="is missing or damaged"):
        checkpoint.verify(folder)

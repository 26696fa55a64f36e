"""Weights on their way to a server: all of a published version or nothing, whatever happens to the file."""

import asyncio
import hashlib
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from served import local
from test_local import MATRIX, assert_same, group_requests, run, spoiled
from tiny_models import build

from gspo.errors import WeightSyncError
from gspo.learner import PolicyModule, weight_names
from gspo.sampling.remote.server import RefusedCallError
from gspo.sampling.weights import load
from gspo.sampling.weights.publish import publish

pytestmark = pytest.mark.run


def digest(model):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


@pytest.mark.parametrize(
    "fault", ["holds NaN", "did not arrive", "not a parameter", "the sampler holds", "torch.float64"]
)
def test_weights_that_are_not_the_models_are_refused_whole(house, fault):
    server, first = house.serve(), build("llama", seed=1)
    client = house.trained(first, version=1, retries=1)
    before = digest(server.model)
    assert before == digest(first)
    tensors = spoiled({n: p.detach() for n, p in build("llama", seed=2).named_parameters()}, MATRIX)[fault]
    with pytest.raises(WeightSyncError, match=fault):
        client.load_weights(2, tensors.items())
    assert digest(server.model) == before
    # A later version is as good as ever.
    client.load_weights(3, first.named_parameters())
    requests = group_requests(2, 2)
    client.submit(requests)
    assert_same({s.id: s for s in client.completed(20)}, run(local(first), requests))


@pytest.mark.parametrize(
    "damage", ["truncated", "a flipped bit", "missing", "replaced", "a pipe", "a pickle", "a null byte in its name"]
)
def test_a_file_that_is_not_what_was_published_is_refused_whole(house, damage):
    server, first, second = house.serve(), build("llama", seed=1), build("llama", seed=2)
    client = house.client()
    client.load_weights(1, first.named_parameters())
    published = publish(house.folder / "other", 2, second.named_parameters())
    path, data = published.path, bytearray(published.path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "a flipped bit":
        data[-100] ^= 1
        path.write_bytes(data)
    elif damage == "replaced":
        save_file({n: p.detach() for n, p in first.named_parameters()}, path)
    elif damage == "a pickle":
        torch.save(first.state_dict(), path)
    elif damage != "a null byte in its name":
        path.unlink()
        if damage == "a pipe":
            os.mkfifo(path)
    body = {
        "session": client._pool.servers[0]._session,
        "version": 2,
        "path": f"{path}\0" if damage == "a null byte in its name" else str(path),
        "sha256": published.sha256,
        "probe": [],
        "wait_s": 10,
    }
    with pytest.raises(WeightSyncError, match=r"is not what was published|cannot be read|is not a file"):
        asyncio.run(server.engine.load_weights(body))
    assert digest(server.model) == digest(first)
    assert server.engine.state()["version"] == 1


def test_a_stale_or_different_version_is_refused_and_a_repeated_one_is_not_loaded_again(house):
    server, first, second = house.serve(), build("llama", seed=1), build("llama", seed=2)
    client = house.client()
    client.load_weights(2, first.named_parameters())
    other = publish(house.folder / "other", 2, second.named_parameters())
    stale = publish(house.folder / "other", 1, second.named_parameters())
    for published in (other, stale):
        body = {"session": client._pool.servers[0]._session, "version": published.version, "path": str(published.path)}
        with pytest.raises(RefusedCallError, match="not newer"):
            asyncio.run(server.engine.load_weights({**body, "sha256": published.sha256, "probe": [], "wait_s": 10}))
    current = client._pool.published
    with torch.no_grad():
        next(server.model.parameters()).add_(1)  # a second load would undo it
    spoiled = digest(server.model)
    again = {
        "session": client._pool.servers[0]._session,
        "version": 2,
        "path": "/nowhere",
        "sha256": current.sha256,
        "probe": [[1, 2, 3]],
    }
    reply = asyncio.run(server.engine.load_weights({**again, "wait_s": 10}))
    assert (reply["version"], reply["loading"], digest(server.model)) == (2, False, spoiled)


def test_files_are_private_and_only_the_last_version_is_kept(house):
    house.serve()
    client = house.client()
    model = build("llama")
    for version in range(3):
        client.load_weights(version, model.named_parameters())
    files = list((house.folder / "weights").iterdir())
    assert [f.name for f in files] == ["weights_00000002.safetensors"]
    assert files[0].stat().st_mode & 0o077 == 0
    client.close()
    assert not (house.folder / "weights").exists()


@pytest.mark.parametrize("name", ["qwen3_moe", "llama_mha"])
def test_the_names_of_files_reach_the_parameters_of_the_model(name, tmp_path):
    """Experts are one tensor a layer in memory and many on disk; tied weights come once."""
    source, target = build(name, seed=1), build(name)
    published = publish(tmp_path, 0, weight_names(PolicyModule(source)))
    load.copy_weights(target, load.read_published(published.path, published.sha256).items())
    assert digest(target) == digest(source)


@pytest.mark.parametrize("fault", ["did not arrive", "the sampler holds"])
def test_experts_are_checked_by_the_names_of_files(fault):
    source, target = build("qwen3_moe", seed=1), build("qwen3_moe")
    tensors, before = dict(weight_names(PolicyModule(source))), digest(target)
    name = next(n for n in tensors if "experts.1.up_proj" in n)
    with pytest.raises(WeightSyncError, match=fault):
        load.copy_weights(target, spoiled(tensors, name)[fault].items())
    assert digest(target) == before


def test_probes_of_different_weights_differ_and_of_equal_ones_do_not():
    one, other = build("llama", seed=1), build("llama", seed=2)
    sequences = load.probe_sequences(48)
    values = load.sequence_logp(one, sequences)
    assert load.mismatch(values, load.sequence_logp(build("llama", seed=1), sequences), torch.float32) is None
    assert "another model" in (load.mismatch(values, load.sequence_logp(other, sequences), torch.float32) or "")
    assert load.mismatch(values, [row * np.nan for row in values], torch.float32) is not None
    assert load.mismatch(values, values[:-1], torch.float32) is not None

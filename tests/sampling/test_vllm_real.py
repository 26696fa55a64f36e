"""A real vLLM server, on this CPU, with the embedded model: log-probs, interruptions, weights and the tied head.

`make setup-vllm` installs it into .venv-vllm; without it these tests are skipped. One server serves the whole file, but
for the adapter's test, which is the last.
"""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from real_vllm import REASON, VERSION, gap, give, nudge, started
from safetensors.torch import load_file, save_file
from test_vllm import run, served

from gspo.errors import WeightSyncError
from gspo.learner import PolicyModule, full_parameters, weight_names
from gspo.models import embedded
from gspo.sampling.local.draw import warp
from gspo.sampling.weights.load import sequence_logp
from gspo.sampling.weights.publish import Broadcaster, publish
from gspo.train import make_policy
from gspo.types import Request, SampleId, SamplingParams

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

if REASON:
    pytest.skip(REASON, allow_module_level=True)

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    with started(tmp_path_factory.mktemp("vllm")) as (sampler, _):
        yield sampler


@pytest.fixture(scope="module")
def policy():
    """A trainer's model that is not the one vLLM has started with."""
    model = embedded.build("embedded:tiny")[0]
    nudge(model)
    return PolicyModule(model)


def test_weights_reach_it_whole_and_the_log_probs_are_the_trainers(vllm, policy, tmp_path):
    for _ in range(3):
        nudge(policy.model)
        assert gap(vllm, policy) > 0.1  # they were other weights
        give(vllm, policy, tmp_path)
        assert gap(vllm, policy) < 5e-5


def test_weights_can_be_broadcast_to_it(vllm, policy):
    nudge(policy.model)
    assert gap(vllm, policy) > 0.1
    VERSION[0] += 1
    offer = Broadcaster("127.0.0.1").publish(VERSION[0], weight_names(policy))
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(vllm.load_published, offer.version, f"{offer.address(0)}#first", offer.sha256)
        while not taken.done():
            offer.deliver(0)
    taken.result()
    assert gap(vllm, policy) < 5e-5


PARAMS = {
    "plain": {},
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 1.4},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 3},
    "all of it": {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
    "no early end": {"min_new_tokens": 20},
    "no end": {"ignore_eos": True},
    "greedy": {"greedy": True},
}


@pytest.mark.parametrize("how", PARAMS)
def test_log_probs_are_of_the_distribution_that_was_sampled(vllm, policy, tmp_path, how):
    give(vllm, policy, tmp_path)
    params = SamplingParams(24, **PARAMS[how])
    requests = [Request(SampleId(i, j), (3 + i, 7, 9), params) for i in range(3) for j in range(6)]
    for id, sample in run(vllm, requests, 120).items():
        prompt = (3 + id.submission, 7, 9)
        tokens = torch.tensor([[*prompt, *sample.tokens.tolist()]])
        with torch.no_grad():
            logits = policy.model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
        forbidden = torch.zeros_like(logits, dtype=torch.bool)
        forbidden[: params.min_new_tokens, 1] = True
        scores = warp(
            logits,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            forbidden=forbidden,
        )
        expected = torch.log_softmax(scores.double(), -1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(sample.behavior_logp, expected, atol=1e-4)
        assert (sample.finish == "stop") == (sample.tokens[-1] == 1 and not params.ignore_eos)
        assert len(sample.tokens) >= params.min_new_tokens
        if params.greedy:
            assert (logits.argmax(-1) == tokens[0, len(prompt) :]).all()


def test_the_same_keys_draw_the_same_tokens_in_any_company(vllm, policy, tmp_path):
    give(vllm, policy, tmp_path)
    params = SamplingParams(12, ignore_eos=True, temperature=1.5)
    requests = [Request(SampleId(i, j), (3 + i, 7, 9), params) for i in range(4) for j in range(4)]
    together, alone = run(vllm, requests, 120), run(vllm, requests[5:6], 60)
    id = requests[5].id
    assert together[id].tokens.tolist() == alone[id].tokens.tolist()
    assert len({tuple(sample.tokens) for sample in together.values()}) == 16


def test_an_interrupted_sample_goes_on_under_new_weights(vllm, policy, tmp_path):
    give(vllm, policy, tmp_path)
    before = vllm.version
    requests = [Request(SampleId(9, j), (3, 4, 5), SamplingParams(400, ignore_eos=True)) for j in range(8)]
    vllm.submit(requests)
    deadline = time.monotonic() + 60
    made = vllm.progress()
    while vllm.progress() < made + 100 and time.monotonic() < deadline:
        time.sleep(0.05)
    nudge(policy.model)
    give(vllm, policy, tmp_path)
    for sample in vllm.completed(240):
        assert set(sample.versions.tolist()) == {before, before + 1}
        tokens = torch.tensor([[3, 4, 5, *sample.tokens.tolist()]])
        with torch.no_grad():
            logp = torch.log_softmax(policy.model(input_ids=tokens).logits[0, 2:-1].double(), -1)
        said = logp.gather(1, tokens[0, 3:, None])[:, 0].numpy()
        new = sample.versions == before + 1
        np.testing.assert_allclose(sample.behavior_logp[new], said[new], atol=1e-4)
        assert np.abs(sample.behavior_logp - said)[~new].max() > 0.01


def test_aborted_samples_can_be_continued(vllm):
    params = SamplingParams(300, ignore_eos=True)
    requests = [Request(SampleId(8, j), (3, 4, 5), params) for j in range(4)]
    vllm.submit(requests)
    time.sleep(1.0)
    partial = {sample.id: sample for sample in vllm.abort()}
    assert all(sample.finish == "abort" and len(sample.tokens) < 300 for sample in partial.values())
    assert any(len(sample.tokens) for sample in partial.values())
    for id, sample in run(vllm, [replace(r, prefix=partial[r.id]) for r in requests], 240).items():
        assert sample.tokens[: len(partial[id].tokens)].tolist() == partial[id].tokens.tolist()
        assert (len(sample.tokens), sample.finish) == (300, "length")


def changed(tensors, name):
    tensor = tensors[NAME].clone()
    if name == "NaN":
        tensor[0, 0] = torch.nan
    changes = {"NaN": {NAME: tensor}, "a foreign name": {"x.y": tensor}, "a wrong shape": {NAME: tensor.T.contiguous()}}
    return {n: t for n, t in {**tensors, **changes.get(name, {})}.items() if (n, name) != (NAME, "missing")}


@pytest.mark.parametrize("fault", ["NaN", "a foreign name", "a wrong shape", "missing", "another sha256"])
def test_a_file_that_does_not_fit_is_refused_whole(vllm, policy, tmp_path, fault):
    published = give(vllm, policy, tmp_path)
    before, path = gap(vllm, policy), tmp_path / "other.safetensors"
    tensors = {name: tensor + 0.01 for name, tensor in load_file(published.path).items()}
    save_file(changed(tensors, fault), path)
    digest = "0" * 64 if fault == "another sha256" else hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(WeightSyncError, match=r"keeps its|model's files hold|did not arrive"):
        vllm.load_published(VERSION[0] + 1, str(path), digest)
    assert gap(vllm, policy) == before < 5e-5
    assert not vllm.broken


def test_reloading_in_vllms_own_way_leaves_the_tied_head_old_and_the_sync_is_refused(vllm, policy, house, tmp_path):
    """The trap: vLLM says it has loaded. The probe does not agree, and a trainer does not get a sample."""
    give(vllm, policy, tmp_path)
    nudge(policy.model)

    def reload_only(version, path, sha256):
        folder = house.folder / "as_a_model"
        folder.mkdir(exist_ok=True)
        save_file(load_file(path), folder / "model.safetensors")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        assert vllm._post("/collective_rpc", body, 120)["results"] == [None]  # it says that all went well
        vllm.version = version

    careless = served(house, vllm, identity={"num_vocab": 32, "seed": 5})
    careless.engine._load_file = reload_only
    client = house.client(reference=policy.model, retries=1, timeout_s=60.0, identity={"num_vocab": 32}, ends=[1])
    with pytest.raises(WeightSyncError, match="log-probs of the probe differ"):
        client.load_weights(0, weight_names(policy))
    # The embedding is new and the head is not: a mixture of two models.
    assert gap(vllm, policy) > 0.1
    client.close()
    # Our own way mends it.
    careless.engine._load_file = vllm.load_published
    client = house.client(reference=policy.model, retries=1, timeout_s=60.0, identity={"num_vocab": 32}, ends=[1])
    client.load_weights(1, weight_names(policy))
    client.submit([Request(SampleId(0, 0), (3, 4, 5), SamplingParams(8))])
    assert len(list(client.completed(60))) == 1
    assert gap(vllm, policy) < 5e-5
    VERSION[0] += 10


def test_an_adapter_travels_alone_and_is_taken_whole_or_not_at_all(tmp_path):
    asked = ("actor.use_lora=true", "actor.lora_rank=3", "actor.lora_alpha=5", "actor.target_modules=[all-linear]")
    with started(tmp_path, *asked) as (vllm, config):
        policy, _ = make_policy(config, True)
        assert gap(vllm, policy) < 5e-5  # B starts at zero: the base model
        requests = [Request(SampleId(0, j), (3, 4, 5), SamplingParams(6, ignore_eos=True)) for j in range(4)]
        for version in range(1, 4):
            with torch.no_grad():
                for _, parameter in full_parameters(policy.model):
                    parameter.add_(0.1 * torch.randn_like(parameter))
            assert gap(vllm, policy) > 0.1
            published = publish(tmp_path / "weights", version, full_parameters(policy.model))
            assert published.path.stat().st_size < 100_000  # the model has 1.3 MB
            vllm.load_published(version, str(published.path), published.sha256)
            assert gap(vllm, policy) < 5e-5
            for sample in run(vllm, requests, 60).values():
                said = sequence_logp(policy.model, [[3, 4, 5, *sample.tokens.tolist()]])[0][2:]
                np.testing.assert_allclose(sample.behavior_logp, said, atol=1e-4)
        tensors, path = load_file(published.path), tmp_path / "other.safetensors"
        name = next(iter(tensors))
        for changes in (
            {name: tensors[name] * torch.nan},
            {"x": tensors[name].clone()},
            {name: tensors[name].T.contiguous()},
        ):
            save_file({**tensors, **changes}, path)
            with pytest.raises(WeightSyncError, match="keeps its"):
                vllm.load_published(9, str(path), hashlib.sha256(path.read_bytes()).hexdigest())
            assert gap(vllm, policy) < 5e-5
        assert not vllm.broken
        assert len(run(vllm, requests, 60)) == 4
        assert len(list(tmp_path.glob("adapter-*"))) == 1

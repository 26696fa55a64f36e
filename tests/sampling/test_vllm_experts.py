"""Mixtures of experts through vLLM: routes in its replies, and a real server: weights, kept sets, an adapter, routes.

The real server needs `make setup-vllm`; without it those tests are skipped.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from real_vllm import REASON, gap, give, nudge, started
from test_local import group_requests
from test_vllm import run
from tiny_models import build

from gspo.config import load
from gspo.errors import ConfigError
from gspo.learner import PolicyModule
from gspo.lint import lint
from gspo.models import embedded, routed, routers, routes_mismatch
from gspo.sampling.api import Experts
from gspo.sampling.engines.vllm import WORKER_FOLDER
from gspo.sampling.local.draw import kept_sets, warp
from gspo.sampling.remote.protocol import experts_of
from gspo.sampling.weights.load import sequence_logp
from gspo.sampling.weights.publish import publish
from gspo.train import make_policy
from gspo.types import Extras, Request, SampleId, SamplingParams

MOE = "embedded:tiny-moe"


def routes_of(model, prompt, tokens):
    """The trainer's routes of (prompt positions, the position before each token)."""
    with torch.no_grad(), routed(routers(model)) as recorder:
        model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False)
    rows = recorder.routes()
    return rows[: len(prompt)], rows[len(prompt) - 1 : -1]


# Replies, against a stand-in server with vLLM's interface


@pytest.mark.run
def test_routes_are_of_the_prompt_and_of_the_position_before_each_token(lookalike):
    sampler, server = lookalike("qwen3_moe", experts=experts_of(build("qwen3_moe"), needed=True))
    sampler.check_server()
    requests = group_requests(2, 2, SamplingParams(6, ignore_eos=True))
    samples = run(sampler, requests)
    for request in requests:
        sample = samples[request.id]
        prompt_routes, routes = routes_of(server.model, request.prompt, sample.tokens.tolist())
        assert (sample.extras.routes.own.dtype, len(sample.extras.routes.own)) == (np.uint8, 6)
        assert np.array_equal(sample.extras.routes.prompt, prompt_routes)
        assert np.array_equal(sample.extras.routes.own, routes)


@pytest.mark.run
def test_a_continued_sample_keeps_the_routes_of_its_first_tokens(lookalike):
    sampler, _ = lookalike("qwen3_moe", experts=experts_of(build("qwen3_moe"), needed=True))
    (request,) = group_requests(1, 1, SamplingParams(4, ignore_eos=True))
    first = run(sampler, [request])[request.id]
    # Routes that no model would choose, so that routes computed again would be seen.
    odd = first.extras.routes.own[..., ::-1].copy()
    prefix = Request(
        request.id,
        request.prompt,
        SamplingParams(9, ignore_eos=True),
        prefix=replace(first, extras=Extras(replace(first.extras.routes, own=odd)), finish="abort"),
    )
    whole = run(sampler, [prefix])[request.id]
    assert np.array_equal(whole.extras.routes.own[:4], odd)
    assert np.array_equal(whole.extras.routes.prompt, first.extras.routes.prompt)
    assert whole.extras.routes.own.shape == (9, *odd.shape[1:])


BAD_ROUTES = {
    "missing": None,
    "not base64": "§",
    "not a .npy file": "AAAA",
    "pickled": "gASVBgAAAAAAAABdlEsBYS4=",
    "too short": ...,
}


@pytest.mark.run
@pytest.mark.parametrize("fault", BAD_ROUTES)
def test_routes_that_cannot_be_true_are_an_invalid_response(lookalike, fault):
    faults = [fault]

    def meddle(body, reply):
        if faults:
            faults.pop()
            choice = reply["choices"][0]
            given = BAD_ROUTES[fault]
            choice["routed_experts"] = server.routed_experts(body["prompt"]) if given is ... else given
        return reply

    sampler, server = lookalike("qwen3_moe", experts=experts_of(build("qwen3_moe"), needed=True), meddle=meddle)
    requests = group_requests(1, 1, SamplingParams(4, ignore_eos=True))
    sample = run(sampler, requests)[requests[0].id]  # requested again
    assert sampler.health()["invalid_responses"] == 1
    assert len(sample.extras.routes.own) == 4


@pytest.mark.run
def test_a_server_without_routes_is_refused_by_its_flag(lookalike):
    sampler, _ = lookalike("llama_mha", experts=Experts(1, 1, 4, needed=True))
    with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
        sampler.check_server()


def test_replay_of_the_engines_routes_is_refused_where_vllm_cannot_return_them():
    how = ["algorithm=gspo", f"actor.path={MOE}", "actor.routing_replay=rollout"]

    def refusals(num_gpus, *more):
        found = lint(load(None, [*how, *more]), num_gpus)
        return [f.message for f in found if f.key == "actor.routing_replay" and f.severity == "error"]

    (said,) = refusals(0, "rollout.backend=vllm:d1")
    assert "Model Runner V2" in said
    assert not refusals(2, "rollout.backend=vllm:d1")
    assert not refusals(0, "rollout.backend=vllm:d1", "vllm.env.VLLM_USE_V2_MODEL_RUNNER=1")
    assert not refusals(0, "rollout.backend=local:d1")


# A real server


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_experts_are_repacked_at_every_load_and_kept_sets_are_the_trainers(tmp_path):
    model = embedded.build(MOE)[0]
    policy = PolicyModule(model)
    truncated = ("gconfig.top_p=0.9", "gconfig.min_p=0.02")
    with started(tmp_path, f"actor.path={MOE}", *truncated) as (vllm, _):
        for _ in range(3):
            nudge(model)
            assert gap(vllm, policy) > 0.1
            give(vllm, policy, tmp_path / "weights")
            assert gap(vllm, policy) < 5e-5
        params = SamplingParams(24, top_p=0.9, min_p=0.02, temperature=1.3, record_kept=True)
        requests = [Request(SampleId(i, j), (3 + i, 7, 9), params) for i in range(3) for j in range(8)]
        sizes = []
        for id, sample in run(vllm, requests, 300).items():
            prompt = (3 + id.submission, 7, 9)
            tokens = torch.tensor([[*prompt, *sample.tokens.tolist()]])
            with torch.no_grad():
                logits = model(input_ids=tokens).logits[0, len(prompt) - 1 : -1]
            scores = warp(logits, temperature=1.3, top_p=0.9, min_p=0.02)
            assert [ids.tolist() for ids in sample.extras.kept.sets()] == [ids.tolist() for ids in kept_sets(scores)]
            said = torch.log_softmax(scores.double(), -1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
            np.testing.assert_allclose(sample.behavior_logp, said, atol=1e-4)
            sizes += sample.extras.kept.counts.tolist()
        assert 1 < max(sizes) < 32


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_an_adapter_on_experts_arrives_merged(tmp_path):
    targets = ("actor.use_lora=true", "actor.lora_rank=3", "actor.target_modules=[all-linear, experts]")
    with started(tmp_path, f"actor.path={MOE}", *targets) as (vllm, config):
        policy, _ = make_policy(config, True)
        assert gap(vllm, policy) < 5e-5
        for version in (1, 2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.1 * torch.randn_like(parameter))
            assert gap(vllm, policy) > 0.1
            published = publish(tmp_path / "weights", version, policy.full_weights())
            vllm.load_published(version, str(published.path), published.sha256)
            assert gap(vllm, policy) < 5e-5


# Model Runner V2 needs Triton, which has no CPU backend; its interpreter needs one to be registered.
_SITE = """\
try:
    import triton.backends as found
except ImportError:  # the trainer's interpreter, which starts vLLM's
    pass
else:
    class Driver:
        @staticmethod
        def is_active():
            return True

    found.backends["cpu"] = found.Backend(compiler=None, driver=Driver)
"""
# V2's sampler calls one Triton function directly that the interpreter cannot run; it has a torch version.
_WORKER = """\
import vllm.v1.sample.ops.topk_topp_sampler as sampler
from gspo_vllm_worker import Worker

sampler.HAS_TRITON = False
"""


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_model_runner_v2_returns_the_routes_of_the_trainer(tmp_path):
    """Under Triton's interpreter, about 11 tokens/s: few tokens."""
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "sitecustomize.py").write_text(_SITE)
    (inside / "gspo_interpreted_worker.py").write_text(_WORKER)
    paths = os.pathsep.join(map(str, (inside, WORKER_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")]))))
    env = f"{{VLLM_USE_V2_MODEL_RUNNER: 1, TRITON_INTERPRET: 1, PYTHONPATH: '{paths}'}}"
    how = (
        f"actor.path={MOE}", "actor.routing_replay=rollout", "rollout.max_concurrent_rollouts=8",
        "vllm.worker_extension_cls=gspo_interpreted_worker.Worker", "gconfig.max_tokens=64", f"vllm.env={env}",
    )  # fmt: skip
    model = embedded.build(MOE)[0]
    policy = PolicyModule(model)
    with started(tmp_path, *how) as (vllm, _):
        nudge(model)
        give(vllm, policy, tmp_path / "weights")
        assert gap(vllm, policy) < 5e-5
        requests = [Request(SampleId(0, j), (3, 4, 5), SamplingParams(8, ignore_eos=True)) for j in range(4)]
        flips, used = [], set()
        for sample in run(vllm, requests, 1200).values():
            used |= {*sample.extras.routes.own.ravel().tolist()}
            tokens = sample.tokens.tolist()
            prompt_routes, routes = routes_of(model, (3, 4, 5), tokens)
            assert sample.extras.routes.own.shape == routes.shape
            flips += routes_mismatch(sample.extras.routes.own, routes).ravel().tolist()
            flips += routes_mismatch(sample.extras.routes.prompt, prompt_routes).ravel().tolist()
            np.testing.assert_allclose(
                sample.behavior_logp, sequence_logp(model, [[3, 4, 5, *tokens]])[0][2:], atol=1e-4
            )
        # Engine and trainer agree but at near-ties.
        assert np.mean(flips) < 0.01
        assert len(used) > 2

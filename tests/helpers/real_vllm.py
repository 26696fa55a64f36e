"""A real vLLM server on this CPU for the tests of test_vllm_real.py and test_vllm_experts.py, and weights for it."""

from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from gspo.config import engine_flags as engines
from gspo.config import layout_of, load
from gspo.errors import ConfigError
from gspo.launcher import engine
from gspo.launcher import model as serve_model
from gspo.launcher import vllm as serve_vllm
from gspo.learner import weight_names
from gspo.sampling import EngineAddress, VllmSampler, is_cpu_build, probe_sequences, publish, sequence_logp
from gspo.system import stop

try:
    PYTHON = engines.python_of("vllm", {})
    REASON = "" if is_cpu_build(PYTHON) or torch.cuda.is_available() else f"{PYTHON} has no vLLM for CPUs"
except ConfigError as error:
    REASON = str(error)


@contextmanager
def started(folder, *overrides):
    """vLLM as a run starts it, and our sampler over it."""
    config = load(None, ["rollout.backend=vllm:d1", "actor.path=embedded:tiny", "algorithm=gspo", *overrides]).config
    layout = layout_of(config, torch.cuda.device_count())
    source = serve_model.model_folder(config, folder / "model")
    identity, endpoint = serve_model.identity_for(config, source), EngineAddress(socket=str(folder / "http"))
    child = engine.start_engine(serve_vllm.command(config, layout, source, identity["max_context"], endpoint))
    try:
        engine.await_ready(endpoint, child, 1500)
        experts = serve_vllm.experts_for(config, source)
        kind = partial(VllmSampler, adapters=serve_vllm.adapter_folders(config, source, folder), experts=experts)
        sampler = engine.connect_engine(kind, config, identity, endpoint, can_sleep=False)
        sampler.check_server()
        yield sampler, config
        sampler.close()
    finally:
        stop(child, 5.0)
    assert not (folder / "http").exists() or child.poll() is not None


def nudge(model):
    """Another model: every weight moves, the tied head with the embedding."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


VERSION = [0]


def give(vllm, policy, folder):
    """Publish the policy's weights and have vLLM take them."""
    VERSION[0] += 1
    published = publish(folder, VERSION[0], weight_names(policy))
    vllm.load_published(VERSION[0], str(published.path), published.sha256)
    return published


def gap(vllm, policy):
    probe = probe_sequences(32)
    ours, theirs = sequence_logp(policy.model, probe), vllm.score(probe)
    return float(np.abs(np.concatenate(ours) - np.concatenate(theirs)).max())

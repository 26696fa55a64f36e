"""From requests to samples: in this process, on our servers, or by an inference engine."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.sampling.api import Experts, KeepsCache, Sampler, rows_at_once
    from gspo.sampling.engines.base import EngineAddress, EngineSampler
    from gspo.sampling.engines.vllm import (
        EXTENSION, LORA_RANKS, MAX_LOGPROBS, NAME, VllmSampler, WORKER_FOLDER, is_cpu_build,
    )
    from gspo.sampling.local.draw import warp
    from gspo.sampling.local.engine import LocalSampler
    from gspo.sampling.native import decode, few_rows, library
    from gspo.sampling.native.few_rows import product_name
    from gspo.sampling.remote.client import HttpSampler, JOIN_S
    from gspo.sampling.remote.engine import SamplerEngine
    from gspo.sampling.remote.protocol import context_limit, experts_of, sampler_identity
    from gspo.sampling.remote.discovery import forget, give_up, register, registered, unregister, weight_folders
    from gspo.sampling.remote.scores import KEY, START_S, open_scores
    from gspo.sampling.remote.server import SamplerServer
    from gspo.sampling.weights import load
    from gspo.sampling.weights.load import (
        check_finite, copy_weights, fetch_weights, probe_sequences, read_published, sequence_logp,
    )
    from gspo.sampling.weights.publish import publish, weight_store
    # fmt: on

__getattr__ = face(__name__)

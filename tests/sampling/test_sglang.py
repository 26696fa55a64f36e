"""SGLang's words: what is asked and believed, against a small server that speaks as its documentation says."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from served import IDENTITY
from test_vllm import EOS, logp_of, run
from tiny_models import VOCAB, build
from vllm_lookalike import Lookalike

from gspo.config import load
from gspo.config.layout import layout_of
from gspo.errors import DataError, RolloutError, WeightSyncError
from gspo.launcher.serve import sglang as serve_sglang
from gspo.sampling.engines.sglang import SglangSampler
from gspo.sampling.weights.load import copy_weights
from gspo.sampling.weights.probe import probe_sequences, sequence_logp
from gspo.sampling.weights.publish import publish
from gspo.types import Request, SampleId, SamplingParams

pytestmark = pytest.mark.run

PROMPT = (7, 8, 9)


class Documented(Lookalike):
    """SGLang's routes over the same tiny model."""

    def __init__(self, model):
        super().__init__(model)
        self.reply = lambda reply: reply
        self.routes = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": lambda _: {},
            "/update_weights_from_disk": self.load,
            "/get_model_info": lambda _: {"model_path": "somewhere"},
        }

    def generate(self, body):
        how = body["sampling_params"]
        asked = {"prompt": body["input_ids"], "max_tokens": how["max_new_tokens"], "temperature": how["temperature"]}
        asked |= {"seed": how.get("sampling_seed", 0), "stop_token_ids": how.get("stop_token_ids", [])}
        choice = self.complete(asked)["choices"][0]
        rows = zip(choice["logprobs"]["token_logprobs"], choice["token_ids"], strict=True)
        about = {
            "finish_reason": {"type": choice["finish_reason"]},
            "output_token_logprobs": [[*r, None] for r in rows],
        }
        if "logprob_start_len" in body:
            said = sequence_logp(self.model, [body["input_ids"]])[0].astype(float).tolist()
            about["input_token_logprobs"] = [
                [p, t, None] for p, t in zip([None, *said], body["input_ids"], strict=True)
            ]
        return self.reply({"text": "", "output_ids": choice["token_ids"], "meta_info": about})

    def pause(self, body):
        assert body == {"mode": "abort"}
        self.epoch += 1
        return {}

    def load(self, body):
        (file,) = Path(body["model_path"]).iterdir()
        copy_weights(self.model, load_file(file).items())
        return {"success": True, "message": ""}


@pytest.fixture
def both():
    server = Documented(build("llama_mha", 1))
    sampler = SglangSampler(
        server.endpoint, seed=5, num_vocab=VOCAB, max_context=64, eos_token_ids=[EOS], version=0, retries=1
    )
    yield sampler, server
    sampler.close()
    server.close()


def requests(num=3, **how):
    return [Request(SampleId(0, i), PROMPT, SamplingParams(6, **how)) for i in range(num)]


def test_samples_and_the_probe_are_read_from_its_replies(both):
    sampler, server = both
    assert sampler.check_server()["model"] == "somewhere"
    for sample in run(sampler, requests()).values():
        said = logp_of(server.model, PROMPT, sample.tokens.tolist())
        np.testing.assert_allclose(sample.behavior_logp, said, atol=1e-5)
    probe = probe_sequences(IDENTITY["num_vocab"])
    ours = sequence_logp(server.model, probe)
    np.testing.assert_allclose(np.concatenate(sampler.score(probe)), np.concatenate(ours), atol=1e-6)


def test_a_published_file_is_loaded_as_a_folder_that_holds_it_alone(both, tmp_path):
    sampler, server = both
    other = build("llama_mha", 2)
    published = publish(tmp_path, 1, other.named_parameters())
    with pytest.raises(WeightSyncError, match="not what was published"):
        sampler.load_published(1, str(published.path), "0" * 64)
    sampler.load_published(1, str(published.path), published.sha256)
    assert [path.name for path in tmp_path.iterdir()] == [published.path.name]
    for sample in run(sampler, requests()).values():
        assert set(sample.versions.tolist()) == {1}
        np.testing.assert_allclose(sample.behavior_logp, logp_of(other, PROMPT, sample.tokens.tolist()), atol=1e-5)
    server.routes["/update_weights_from_disk"] = lambda _: {"success": False, "message": "shapes"}
    with pytest.raises(RolloutError, match="shapes"):
        sampler.load_published(2, str(published.path), published.sha256)
    assert sampler.broken


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {**r, "meta_info": None}, "meta_info"),
        (lambda r: {**r, "meta_info": {**r["meta_info"], "output_token_logprobs": None}}, "log-probs are missing"),
        (lambda r: {**r, "output_ids": [1, 2]}, "output_ids"),
        (lambda r: {**r, "meta_info": {**r["meta_info"], "finish_reason": None}}, "finish_reason"),
    ],
)
def test_a_lie_is_found(both, change, message):
    sampler, server = both
    server.reply = change
    sampler.submit(requests(1))
    with pytest.raises(RolloutError, match=message):
        list(sampler.completed(20))
    assert sampler.health()["invalid_responses"] == 2


def test_top_p_is_refused_as_its_log_probs_know_nothing_of_it(both):
    with pytest.raises(DataError, match=r"gconfig\.top_p"):
        both[0].submit(requests(1, top_p=0.9))


def test_the_command_line_has_the_runs_flags_and_hides_the_key(tmp_path):
    import sys

    config = load(None, ["rollout.backend=sglang:d1t2", "cluster.n_gpus_per_node=4", "actor.path=embedded:tiny",
                         f"sglang.python={sys.executable}", "sglang.mem_fraction_static=0.7"]).config  # fmt: skip
    key = serve_sglang.key_file(tmp_path, "k" * 64)
    start = serve_sglang.command(config, layout_of(config, 4), "/model", 512, 30000, key)
    text = " ".join(start.argv)
    for part in ("-m sglang.launch_server --model-path /model", "--tp-size 2", "--mem-fraction-static=0.7",
                 "--context-length=512", "--host 127.0.0.1 --port 30000"):  # fmt: skip
        assert part in text
    assert "kkk" not in text
    assert key.stat().st_mode & 0o077 == 0

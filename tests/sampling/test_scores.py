"""Log-probs of given tokens from servers: those of the model, and refusals where they would be something else."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from http_judge import reply
from served import TOKEN, House
from tiny_models import VOCAB, build
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from gspo.errors import ConfigError, DataError, RolloutError
from gspo.sampling.remote import scores
from gspo.sampling.remote.scores import open_scores
from gspo.sampling.weights.load import probe_sequences, sequence_logp

pytestmark = pytest.mark.run
SEQUENCES = probe_sequences(VOCAB, count=70, length=5)  # more than one call


def words(shift=0):
    """A tokenizer of the words w0, w1, …; `shift` gives them other ids."""
    vocabulary = {f"w{(i + shift) % VOCAB}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


class Vllm(ThreadingHTTPServer):
    """The routes of vLLM that a teacher needs, as its documentation describes them."""

    daemon_threads = True

    def __init__(self, model, tokenizer, meddle=lambda path, reply: (200, reply), names=("teacher",)):
        self.model, self.tokenizer, self.meddle, self.names, self.bodies = model, tokenizer, meddle, names, []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, path, body):
        if path == "/v1/models":
            return {"data": [{"id": name} for name in self.names]}
        if path == "/tokenize":
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return {"tokens": ids, "count": len(ids), "max_model_len": 64}
        logps = [sequence_logp(self.model, [tokens])[0].tolist() for tokens in body["prompt"]]
        rows = [
            [None, *({str(t): {"logprob": p, "rank": 1}} for t, p in zip(tokens[1:], row, strict=True))]
            for tokens, row in zip(body["prompt"], logps, strict=True)
        ]
        return {
            "model": body["model"],
            "choices": [{"index": i, "text": "", "prompt_logprobs": row} for i, row in enumerate(rows)],
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        self.server.bodies.append((self.path, self.headers.get("Authorization"), body))
        status, said = self.server.meddle(self.path, self.server.answer(self.path, body))
        reply(self, status, said)

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture
def house(tmp_path, monkeypatch):
    monkeypatch.setenv(scores.KEY, TOKEN)
    house = House(tmp_path)
    yield house
    house.close()


@pytest.fixture
def opened(house):
    def open_one(url, timeout_s=5.0):
        client = open_scores(url, timeout_s=timeout_s)
        house.stack.callback(client.close)
        return client

    return open_one


@pytest.fixture
def vllm(house):
    def start(*args, **kwargs):
        server = Vllm(build("llama"), words(), *args, **kwargs)
        house.stack.callback(server.server_close)
        house.stack.callback(server.shutdown)
        return server

    return start


def test_a_sampler_server_scores_as_its_model_does_and_has_its_vocabulary(house, opened):
    server = house.serve(vocabulary=words().get_vocab())
    client = opened(server.url)
    client.check_vocabulary(words())
    for got, expected in zip(client.score(SEQUENCES), sequence_logp(server.model, SEQUENCES), strict=True):
        assert got.tobytes() == expected.tobytes()
    with pytest.raises(DataError, match=r"teacher\.path.*another vocabulary"):
        client.check_vocabulary(words(shift=1))


def test_a_server_whose_weights_a_trainer_changes_is_no_teacher(house, opened):
    server, model = house.serve(), build("llama")
    house.client(reference=model).load_weights(1, model.named_parameters())
    with pytest.raises(RolloutError, match="samples for a trainer"):
        opened(server.url).score(SEQUENCES)


def test_tokens_that_the_model_does_not_have_are_refused_and_the_server_stays(house, opened):
    client = opened(house.serve().url)
    for wrong in ([[1, VOCAB]], [[1]], [[1, -1]]):
        with pytest.raises(RolloutError, match="400"):
            client.score(wrong)
    assert len(client.score(SEQUENCES[:1])[0]) == 4


def test_another_key_and_a_closed_port_are_named(house, opened, monkeypatch):
    url = house.serve(vocabulary={}).url
    monkeypatch.setenv(scores.KEY, "another secret of the tests")
    with pytest.raises(ConfigError, match=scores.KEY):
        opened(url).check_vocabulary(words())
    monkeypatch.setattr(scores, "START_S", 0.2)
    with pytest.raises(ConfigError, match="did not answer within"):
        opened("http://127.0.0.1:9").check_vocabulary(words())


@pytest.mark.parametrize("url", ["http://", "http://x/?a=1"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="not the address"):
        open_scores(url, timeout_s=1.0)


def test_vllm_scores_as_its_model_does(vllm, opened):
    server = vllm()
    client = opened(server.url)
    client.check_vocabulary(words())
    for got, expected in zip(client.score(SEQUENCES), sequence_logp(server.model, SEQUENCES), strict=True):
        np.testing.assert_array_equal(got, expected)
    calls = [body for path, _, body in server.bodies if path == "/v1/completions"]
    assert [len(body["prompt"]) for body in calls] == [64, 6]
    assert {body["model"] for body in calls} == {"teacher"}
    assert {key for _, key, _ in server.bodies} == {f"Bearer {TOKEN}"}


def test_another_tokenizer_at_vllm_is_refused(vllm, opened):
    with pytest.raises(DataError, match=r"another vocabulary.*the same"):
        opened(vllm().url).check_vocabulary(words(shift=1))


def test_one_of_several_models_is_named_in_the_address(vllm, opened):
    server = vllm(names=("base", "adapter"))
    with pytest.raises(ConfigError, match="serves base, adapter; name one"):
        opened(server.url).check_vocabulary(words())
    client = opened(server.url + "#adapter")
    client.check_vocabulary(words())
    client.score(SEQUENCES[:2])
    assert server.bodies[-1][2]["model"] == "adapter"


def fewer(path, reply):
    if "choices" in reply:
        reply["choices"][0]["prompt_logprobs"].pop()
    return 200, reply


def positive(path, reply):
    for choice in reply.get("choices", ()):
        choice["prompt_logprobs"] = [row and {t: {"logprob": 0.5} for t in row} for row in choice["prompt_logprobs"]]
    return 200, reply


def no_probability(path, reply):
    for choice in reply.get("choices", ()):
        choice["prompt_logprobs"] = [row and {t: {"logprob": -9999} for t in row} for row in choice["prompt_logprobs"]]
    return 200, reply


@pytest.mark.parametrize("meddle", [fewer, positive, no_probability])
def test_log_probs_that_cannot_be_true_end_the_run_with_the_address(vllm, opened, meddle):
    server = vllm(meddle)
    client = opened(server.url)
    client.check_vocabulary(words())
    with pytest.raises(RolloutError, match=r"teacher\.path: invalid response of http://127"):
        client.score(SEQUENCES[:2])


def test_a_server_that_fails_is_asked_again_until_the_deadline(vllm, opened, monkeypatch):
    monkeypatch.setattr(scores, "_PAUSE_S", 0.01)
    failures = []

    def flaky(path, reply):
        failures.append(path)
        return (503, {"error": "starting"}) if path == "/v1/completions" and len(failures) < 6 else (200, reply)

    client = opened(vllm(flaky).url)
    client.check_vocabulary(words())
    assert len(client.score(SEQUENCES[:2])) == 2
    assert len(failures) == 6
    client = opened(vllm(lambda path, reply: (500, {})).url, timeout_s=0.2)
    with pytest.raises(RolloutError, match=r"scored nothing for 0\.2 s \(rollout\.request_timeout\)"):
        client.score(SEQUENCES[:2])

"""Log-probs of given tokens from servers: those of the model, and refusals where they would be something else."""

import numpy as np
import pytest
from served import TOKEN
from tiny_models import VOCAB, build
from vllm_lookalike import Lookalike
from word_tokenizers import tokenizer_of

from gspo.errors import ConfigError, DataError, RolloutError
from gspo.sampling.remote import scores
from gspo.sampling.remote.scores import open_scores
from gspo.sampling.weights.load import probe_sequences, sequence_logp

pytestmark = pytest.mark.run
SEQUENCES = probe_sequences(VOCAB, count=70, length=5)  # more than one call


def words(shift=0):
    """A tokenizer of the words w0, w1, …; `shift` gives them other ids."""
    return tokenizer_of((f"w{(i + shift) % VOCAB}" for i in range(VOCAB)), "w0")


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(scores.KEY, TOKEN)


@pytest.fixture
def opened(house):
    def open_one(url, timeout_s=5.0):
        client = open_scores(url, timeout_s=timeout_s)
        house.stack.callback(client.close)
        return client

    return open_one


@pytest.fixture
def vllm(house):
    """The routes of vLLM that a teacher needs, as its documentation describes them."""

    def start(meddle=lambda path, reply: (200, reply), names=("teacher",)):
        server, tokenizer = Lookalike(build("llama")), words()
        house.stack.callback(server.close)

        def tokenize(body):
            ids = tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return {"tokens": ids, "count": len(ids), "max_model_len": 64}

        def complete(body):
            choices = [server.complete({**body, "prompt": tokens})["choices"][0] for tokens in body["prompt"]]
            return {"model": body["model"], "choices": choices}

        for path, answer in {
            "/v1/models": lambda _: {"data": [{"id": name} for name in names]},
            "/tokenize": tokenize,
            "/v1/completions": complete,
        }.items():
            server.routes[path] = lambda body, path=path, answer=answer: meddle(path, answer(body))
        server.url = f"{server.endpoint.url}/v1"
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
    calls = [body for path, _, body in server.heard if path == "/v1/completions"]
    assert [len(body["prompt"]) for body in calls] == [64, 6]
    assert {body["model"] for body in calls} == {"teacher"}
    assert {key for _, key, _ in server.heard} == {f"Bearer {TOKEN}"}


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
    assert server.heard[-1][2]["model"] == "adapter"


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

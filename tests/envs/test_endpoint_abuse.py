"""Calls of the agents' endpoint that are refused: by episode, by number, by time; and other episodes go on.

Keys, heads and bodies: tests/system/test_http_abuse.py."""

import asyncio
import json
import socket
import threading
from functools import partial

import pytest
import talkers
from endpoints import Policy, endpoint, head, said
from processes import until
from raw_http import talk
from scripted_client import scripted
from tokenizers import Regex, pre_tokenizers

from gspo.envs.agents import openai_api as api
from gspo.envs.agents.agent import open_episode
from gspo.envs.agents.endpoint import DIALECTS, MAX_PARALLEL, OpenEpisode
from gspo.envs.agents.messages_api import MessagesError

pytestmark = pytest.mark.run

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "3+4="}]}


@pytest.fixture(scope="module")
def served():
    with endpoint() as (server, line, _, key):
        server.body_s = server.head_s = 0.5
        server.max_body = 100_000
        yield server, line, key


def post(served, body, path="/e/7-0/v1/chat/completions", key=None):
    server, _, own = served
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return talk(server.port, head(server.port, key or own, path=path, **{"Content-Length": str(len(data))}), data)


@pytest.mark.parametrize(
    "path",
    ["/", "*", "/e", "/e/", "/e/7-0/../8-0/v1/models", "/health", "/e/7-0/v1/embeddings", "/e/7-0/chat/completions"],
)
def test_what_is_below_no_episode_has_no_key(served, path):
    server, _, key = served
    assert talk(server.port, head(server.port, key, "GET", path))[0] in (401, 404)


def test_refusals_are_counted_where_they_belong(served):
    server, line, _ = served
    before, strangers = line.counts.copy(), server.refused
    post(served, {"model": "other", **{k: v for k, v in CHAT.items() if k != "model"}})
    post(served, b"{")
    post(served, CHAT, key="wrong")
    assert line.counts - before == {"model_not_found": 1, "invalid_json": 1}
    assert server.refused == strangers + 1


def test_an_unknown_episode_is_not_found_and_an_ended_one_is_gone(served):
    server = served[0]
    assert post(served, CHAT, "/e/9-9/v1/chat/completions", server.key("9-9"))[0] == 404
    line = OpenEpisode("8-3", Policy(), served[1].loop)
    server.open(line)
    assert post(served, CHAT, "/e/8-3/v1/chat/completions", server.key("8-3"))[0] == 200
    server.end(line)
    status, reply = post(served, CHAT, "/e/8-3/v1/chat/completions", server.key("8-3"))
    assert (status, json.loads(reply)["error"]["code"]) == (410, "episode_ended")


def test_a_connection_is_used_again(served):
    server, _, key = served
    data = json.dumps(CHAT).encode()
    one = head(server.port, key, **{"Content-Length": str(len(data))}).encode() + b"\r\n" + data
    bad = head(server.port, key).encode() + b"\r\n{}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(one + bad + one)
        reply = b""
        while reply.count(b"HTTP/1.1") < 3 or not reply.endswith(b"}"):
            reply += connection.recv(65536)
    assert [part.split()[0] for part in reply.split(b"HTTP/1.1")[1:]] == [b"200", b"400", b"200"]


def slow(seconds):
    async def answer(ask):
        await asyncio.sleep(seconds)
        return said()

    return Policy(answer)


def test_calls_beyond_the_bound_wait_their_turn():
    with endpoint(slow(0.6)) as (server, line, _, key):
        statuses = []
        threads = [
            threading.Thread(target=lambda: statuses.append(post((server, line, key), CHAT)[0]))
            for _ in range(MAX_PARALLEL + 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(statuses) == [200] * MAX_PARALLEL + [429] * 3
        assert line.counts["too_many_calls"] == 3
        assert not line.in_flight


def test_a_call_that_takes_too_long_an_episode_that_ends_and_a_server_that_stops_are_told():
    with endpoint(slow(60), request_timeout_s=0.3) as (server, line, _, key):
        status, reply = post((server, line, key), CHAT)
        assert (status, json.loads(reply)["error"]["code"]) == (408, "request_timeout")
        server.request_timeout_s = 60.0
        for expected in (410, 503):
            other = OpenEpisode(f"7-{expected}", line.answer, line.loop)
            server.open(other)
            threading.Timer(0.3, *((server.close,) if expected == 503 else (server.end, (other,)))).start()
            where = f"/e/{other.name}/v1/chat/completions"
            assert post((server, other, server.key(other.name)), CHAT, where)[0] == expected
            assert not other.in_flight


def test_an_agent_that_hangs_up_frees_its_place():
    with endpoint(slow(60)) as (server, line, _, key):
        data = json.dumps(CHAT).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head(server.port, key, **{"Content-Length": str(len(data))}).encode() + b"\r\n" + data)
            until(lambda: line.in_flight)
        until(lambda: not line.in_flight)
        assert post((server, line, key), {"reward": 1}, "/e/7-0/reward")[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/responses", {"input": "x", "text": "json"}, "unsupported_value"),
        ("/v1/responses", {"input": "x", "text": [1]}, "unsupported_value"),
        ("/v1/responses", {"input": "x", "text": {"format": "json"}}, "unsupported_value"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, "unsupported_value"),
        ("/v1/responses", {"input": "x", "text": {"verbosity": "low"}}, "unsupported_value"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "text"}}}, None),
        ("/v1/responses", {"input": "x", "text": {"format": None, "verbosity": "medium"}}, None),
        ("/v1/responses", {"input": "x", "text": None}, None),
        ("/reward", {"reward": 10**400}, "invalid_value"),
        ("/reward", {"reward": -(10**400)}, "invalid_value"),
        ("/reward", {"reward": True}, "invalid_value"),
        ("/v1/chat/completions", {"messages": CHAT["messages"], "max_tokens": 10**400}, None),
        ("/v1/chat/completions", {"messages": CHAT["messages"], "temperature": 10**400}, "invalid_value"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x", "name": "y"}]}, "unknown_parameter"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "stop_sequences": ""}, "invalid_type"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "tools": 0}, "invalid_type"),
    ],
)
def test_a_field_is_understood_or_refused_and_never_dropped(served, path, body, code):
    body = (
        body if path == "/reward" else {"model": "policy", **({"max_tokens": 9} if "messages" in path else {}), **body}
    )
    status, reply = post(served, body, f"/e/7-0{path}")
    error = json.loads(reply).get("error")
    assert (status, error and error["code"]) == (400 if code else 200, code)


def test_two_values_of_one_key_are_refused(served):
    data = json.dumps(CHAT)[:-1].encode() + b', "model": "policy"}'
    status, reply = post(served, data)
    assert (status, json.loads(reply)["error"]["code"]) == (400, "invalid_json")
    assert "'model' appears twice" in json.loads(reply)["error"]["message"]


TEXT = [{"type": "text", "text": "a"}]
FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"x": {}}}}
TOOL_CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
FULL = {
    "/v1/chat/completions": {
        "model": "policy", "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto",
        "messages": [{"role": "user", "name": "n", "content": TEXT},
                     {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
                     {"role": "tool", "tool_call_id": "c", "content": "7"}],
        "max_tokens": 5, "max_completion_tokens": 4, "stop": ["x"], "temperature": 0.5, "top_p": 1, "n": 1,
        "logit_bias": {}, "response_format": {"type": "text"}, "logprobs": True, "stream": False,
        "stream_options": {"include_usage": True}, "return_token_ids": True, "metadata": {},
    },
    "/v1/completions": {"model": "policy", "prompt": [5, 6], "max_tokens": 4, "logprobs": 1, "stop": "x", "n": 1},
    "/v1/responses": {
        "model": "policy", "instructions": "i", "max_output_tokens": 5, "tools": [{"type": "function", **FUNCTION}],
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                  {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"},
                  {"type": "function_call_output", "call_id": "c", "output": "7"}],
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": None}, "truncation": "disabled", "include": [],
    },
    "/v1/messages": {
        "model": "policy", "max_tokens": 5, "system": TEXT, "stop_sequences": ["x"], "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": TEXT},
                     {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": TEXT}]}],
        "tools": [{"name": "add", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
    },
    "/reward": {"reward": 1},
}  # fmt: skip
NESTED = json.loads("[" * 90 + "]" * 90)
VALUES = [None, True, 0, -1, 10**400, -(10**400), 1e308, float("nan"), float("inf"), "", "x", "\x00", "\u202e", [],
          [[]], [None], [1], ["x"], [{}], {}, {"type": None}, {"type": "text", "text": None}, {"type": ["x"]},
          {"format": None}, {"a": 10**400}, NESTED, {"x": NESTED}, "x" * 70_000]  # fmt: skip


def places(value, at=()):
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from places(inner, (*at, key))


def replaced(value, at, new):
    if not at:
        return new
    copy = value.copy()
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


def answered(path, body):
    """What the endpoint does with a request, from its bytes to the bytes of the reply, without HTTP."""
    if path == "/reward":
        return api.read_body(api.read_reward, body)
    dialect = DIALECTS[path]
    ask = api.read_body(partial(dialect.read, model="policy"), body)

    async def play():
        line = open_episode(scripted("7", template=talkers.CHATML), [])
        if ask.messages:
            assert line.count_tokens(ask) > 0
        return await line.answer(ask)

    found, names = asyncio.run(play()), {"id": "i", "model": "policy", "created": 1}
    return json.dumps(dialect.body(found, ask, **names)), list(dialect.events(found, ask, **names))


# All of them in the long tier, one in 16 in the short one.
@pytest.mark.parametrize("one_in", [16, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("path", FULL)
def test_any_value_at_any_place_of_a_request_is_answered_or_refused_with_4xx(path, one_in):
    assert answered(path, json.dumps(FULL[path]).encode())
    number = refused = 0
    for at in places(FULL[path]):
        for value in VALUES:
            number += 1
            if number % one_in:
                continue
            error = None
            try:
                answered(path, json.dumps(replaced(FULL[path], at, value)).encode())
            except api.ApiError as refusal:
                error = refusal
            if error is not None:
                refused += 1
                assert 400 <= error.status < 500
                # Refused by the check of its field, not by the net below all checks.
                assert "cannot be read" not in str(error), (at, value)
                assert json.dumps([error.body(), MessagesError(error).body()])
    assert refused > number / one_in / 4


def test_a_text_that_makes_the_tokenizer_panic_is_refused_and_the_next_call_is_answered():
    client = scripted("7", "8", template=talkers.CHATML)
    client.talk.tokenizer._tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    wrong = "a" * 60 + "!"
    with pytest.raises(BaseException, match="retry-limit") as panic:
        client.talk.tokenizer.encode(wrong)
    assert not isinstance(panic.value, Exception)
    line = None

    async def answer(ask):
        return await line.answer(ask)

    with endpoint(Policy(answer)) as (server, served_line, _, key):
        line = asyncio.run_coroutine_threadsafe(_opened(client), served_line.loop).result(10)
        served_line.count_tokens = line.count_tokens
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"):
            body = {"model": "policy", "max_tokens": 3}
            body |= (
                {"prompt": wrong} if path == "/v1/completions" else {"messages": [{"role": "user", "content": wrong}]}
            )
            status, reply = post((server, line, key), body, f"/e/7-0{path}")
            assert (status, json.loads(reply)["error"]["code"]) == (400, "refused")
            assert "the tokenizer cannot encode the text" in json.loads(reply)["error"]["message"]
        assert post((server, line, key), CHAT)[0] == 200


async def _opened(client):
    return open_episode(client, [])

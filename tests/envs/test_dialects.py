"""The endpoint as the real packages see it: Anthropic's messages and OpenAI's responses."""

import anthropic
import httpx
import openai
import pytest
from endpoints import Policy, endpoint, said

from gspo.envs.agents.endpoint import SHARED, OpenEpisode

pytestmark = pytest.mark.run

CALL = {"name": "calculator", "description": "adds", "input_schema": {"type": "object", "properties": {}}}
FLAT = {"type": "function", "name": "calculator", "parameters": {"type": "object", "properties": {}}, "strict": False}


@pytest.fixture
def served():
    policy = Policy()
    with (
        endpoint(policy) as (server, line, url, key),
        openai.OpenAI(base_url=url, api_key=key, max_retries=0) as ours,
        anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0) as theirs,
    ):
        yield policy, ours, theirs, server, line, url, key


def test_messages_are_answered(served):
    policy, _, client, *_ = served
    reply = client.messages.create(
        model="policy", max_tokens=9, system="Be brief.", stop_sequences=["\n"],
        messages=[{"role": "user", "content": [{"type": "text", "text": "3+"}, {"type": "text", "text": "4="}]}],
    )  # fmt: skip
    assert [(block.type, block.text) for block in reply.content] == [("text", "7")]
    assert (reply.stop_reason, reply.usage.input_tokens, reply.usage.output_tokens) == ("end_turn", 5, 2)
    asked = policy.asked[-1]
    assert asked.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4="})
    assert (asked.max_tokens, asked.stop) == (9, ("\n",))
    policy.answer = lambda ask: said("12", finish="length")
    reply = client.messages.create(model="policy", max_tokens=2, messages=[{"role": "user", "content": "x"}])
    assert reply.stop_reason == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_messages_are_called_and_their_results_come_back(served, stream):
    policy, _, client, *_ = served
    policy.answer = lambda ask: said("hm", (("calculator", '{"x": 1}'),))
    ask = {"model": "policy", "max_tokens": 9, "tools": [CALL], "tool_choice": {"type": "auto"}}
    messages = [{"role": "user", "content": "3+4="}]
    if stream:
        with client.messages.stream(messages=messages, **ask) as events:
            reply = events.get_final_message()
    else:
        reply = client.messages.create(messages=messages, **ask)
    text, use = reply.content
    assert (text.text, use.name, use.input, reply.stop_reason) == ("hm", "calculator", {"x": 1}, "tool_use")
    assert policy.asked[-1].tools[0]["function"]["parameters"]["type"] == "object"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "7", "is_error": True}
    messages += [{"role": "assistant", "content": reply.content},
                 {"role": "user", "content": [result, {"type": "text", "text": "so?"}]}]  # fmt: skip
    client.messages.create(messages=messages, **ask)
    back = policy.asked[-1].messages
    assert [m["role"] for m in back] == ["user", "assistant", "tool", "user"]
    assert back[1]["tool_calls"][0]["function"] == {"name": "calculator", "arguments": '{"x": 1}'}
    assert (back[1]["content"], back[2]["content"], back[3]["content"]) == ("hm", "error: 7", "so?")


def test_threads_of_messages_are_refused_so_that_the_client_sends_its_history(served):
    policy, _, client, _, _, url, key = served
    body = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    body["thread"] = {"type": "continue", "previous_message_id": "m"}
    reply = httpx.post(f"{url}/messages", json=body, headers={"Authorization": f"Bearer {key}"})
    assert reply.status_code == 400
    assert reply.json()["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}
    assert not policy.asked

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: one
            b: other
        """
        return str(a + b)

    answers = iter([said("", (("add", '{"a": 3, "b": 4}'),)), said("7")])
    policy.answer = lambda ask: next(answers)
    runner = client.beta.messages.tool_runner(
        model="policy", max_tokens=9, tools=[add], messages=[{"role": "user", "content": "3+4="}]
    )
    assert runner.until_done().content[0].text == "7"
    assert [m["role"] for m in policy.asked[-1].messages] == ["user", "assistant", "tool"]
    assert policy.asked[-1].messages[-1]["content"] == "7"
    assert policy.asked[-1].tools


def test_errors_of_messages_have_their_own_format(served):
    _policy, _, client, server, line, url, key = served
    with pytest.raises(anthropic.NotFoundError, match="let the agent ask for"):
        client.messages.create(model="claude", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    with pytest.raises(anthropic.BadRequestError, match="cannot be forced"):
        client.messages.create(
            model="policy", max_tokens=1, messages=[{"role": "user", "content": "x"}], tools=[CALL],
            tool_choice={"type": "any"},
        )  # fmt: skip
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="'image', which is not supported"):
        client.messages.create(model="policy", max_tokens=1, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="no field 'thinking'"):
        client.messages.create(
            model="policy", max_tokens=1, messages=[{"role": "user", "content": "x"}], thinking={"type": "adaptive"}
        )
    wrong = client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(model="policy", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    body = {"model": "policy", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    assert httpx.post(f"{url}/messages", json=body, headers={"X-Api-Key": key}).status_code == 200
    server.end(line)
    gone = httpx.post(f"{url}/messages", json=body, headers={"X-Api-Key": key})
    assert (gone.status_code, gone.json()["type"]) == (410, "error")


@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_answered(served, stream):
    policy, client, *_ = served
    ask = {"model": "policy", "input": "3+4=", "instructions": "Be brief.", "max_output_tokens": 9}
    if stream:
        with client.responses.stream(**ask) as events:
            kinds = [event.type for event in events]
            reply = events.get_final_response()
        assert kinds[0] == "response.created"
        assert "response.output_text.delta" in kinds
    else:
        reply = client.responses.create(**ask)
    assert (reply.output_text, reply.status, reply.usage.total_tokens) == ("7", "completed", 7)
    asked = policy.asked[-1]
    assert asked.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4="})
    assert asked.max_tokens == 9
    policy.answer = lambda ask: said("12", finish="length")
    reply = client.responses.create(model="policy", input="x")
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_responses_are_called_and_their_results_come_back(served, stream):
    policy, client, *_ = served
    policy.answer = lambda ask: said("hm", (("calculator", '{"x": 1}'), ("calculator", "{}")))
    ask = {"model": "policy", "tools": [FLAT]}
    items = [{"role": "user", "content": "3+4="}]
    if stream:
        with client.responses.stream(input=items, **ask) as events:
            for _ in events:
                pass
            reply = events.get_final_response()
    else:
        reply = client.responses.create(input=items, **ask)
    text, *calls = reply.output
    assert [(call.name, call.arguments) for call in calls] == [("calculator", '{"x": 1}'), ("calculator", "{}")]
    items += [item.model_dump() for item in reply.output]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "7"} for call in calls]
    client.responses.create(input=items, **ask)
    back = policy.asked[-1].messages
    assert [m["role"] for m in back] == ["user", "assistant", "tool", "tool"]
    assert back[1]["content"] == text.content[0].text == "hm"
    assert len(back[1]["tool_calls"]) == 2


@pytest.mark.parametrize(
    ("field", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_not_found"),
        ({"conversation": "conv_1"}, "unsupported_value"),
        ({"background": True}, "unsupported_value"),
        ({"reasoning": {"effort": "high"}}, "unsupported_value"),
        ({"truncation": "auto"}, "unsupported_value"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, "unsupported_value"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_value"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "unsupported_value"),
        ({"nothing": 1}, "unknown_parameter"),
        ({"input": 5}, "invalid_type"),
    ],
)
def test_what_responses_cannot_have_here_is_refused_by_name(served, field, code):
    policy, client, *_ = served
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="policy", input="x", extra_body=field)
    assert error.value.code == code
    assert not policy.asked


def test_many_episodes_share_an_address_and_are_told_apart_by_a_header(served):
    _policy, _, _, server, line, _url, key = served
    other = Policy(lambda ask: said("other"))
    second = OpenEpisode("8-0", other, line.loop)
    server.open(second)
    server.share("a", line)
    server.share("b", second)
    shared = openai.OpenAI(base_url=server.address(), api_key=server.key(SHARED), max_retries=0)

    def say(session):
        return shared.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "x"}], extra_headers={"X-Session-ID": session}
        ).choices[0].message.content  # fmt: skip

    with shared:
        assert (say("a"), say("b")) == ("7", "other")
        with pytest.raises(openai.NotFoundError):
            say("c")
        server.end(second)
        with pytest.raises(openai.APIStatusError) as error:
            say("b")
        assert error.value.status_code == 410
        assert say("a") == "7"
    with (
        openai.OpenAI(base_url=server.address(), api_key=key, max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()

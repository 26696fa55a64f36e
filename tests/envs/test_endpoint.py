"""The endpoint as the real openai package sees it, in every mode that agents use."""

import openai
import pytest
from endpoints import Policy, endpoint, said

from gspo.envs.agents.openai_api import read_chat

pytestmark = pytest.mark.run

ASK = [{"role": "user", "content": "3+4="}]
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def served():
    policy = Policy()
    with (
        endpoint(policy) as (server, line, url, key),
        openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client,
    ):
        yield client, policy, line, server


def test_a_chat_is_answered(served):
    client, policy, _, _ = served
    reply = client.chat.completions.create(
        model="policy", messages=ASK, max_tokens=20, max_completion_tokens=9, stop="\n"
    )
    assert (reply.object, reply.model, reply.id) == ("chat.completion", "policy", "chatcmpl-7-0-1")
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "7", "stop")
    assert (choice.message.tool_calls, choice.logprobs) == (None, None)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (5, 2, 7)
    assert (policy.asked[-1].max_tokens, policy.asked[-1].stop) == (9, ("\n",))


def test_log_probs_are_those_of_the_tokens(served):
    client = served[0]
    (choice,) = client.chat.completions.create(model="policy", messages=ASK, logprobs=True).choices
    content = choice.logprobs.content
    assert [(c.token, c.logprob, bytes(c.bytes).decode()) for c in content] == [
        ("7", -0.5, "7"),
        ("<eos>", -0.5, "<eos>"),
    ]
    (choice,) = client.completions.create(model="policy", prompt="3+4=", logprobs=0).choices
    assert (choice.logprobs.tokens, choice.logprobs.token_logprobs) == (["7", "<eos>"], [-0.5, -0.5])
    assert choice.logprobs.text_offset == [0, 1]


def test_a_stream_says_the_same(served):
    client = served[0]
    options = {"include_usage": True}
    with client.chat.completions.create(model="policy", messages=ASK, stream=True, stream_options=options) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "7"
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, None, "stop"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.total_tokens == 7
    with client.chat.completions.stream(model="policy", messages=ASK) as stream:  # the helper that puts it together
        assert stream.get_final_completion().choices[0].message.content == "7"
    texts = [c.choices[0].text for c in client.completions.create(model="policy", prompt="3+4=", stream=True)]
    assert "".join(texts) == "7"


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_come_as_calls(served, stream):
    client, policy, _, _ = served
    policy.answer = lambda ask: said("hm", (("calculator", '{"x": 1}'), ("calculator", "{}")))
    try:
        if stream:
            with client.chat.completions.stream(model="policy", messages=ASK, tools=[TOOL]) as events:
                (choice,) = events.get_final_completion().choices
        else:
            (choice,) = client.chat.completions.create(model="policy", messages=ASK, tools=[TOOL]).choices
    finally:
        policy.answer = lambda ask: said()
    assert choice.finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("calculator", '{"x": 1}'), ("calculator", "{}"),
    ]  # fmt: skip
    assert len({c.id for c in choice.message.tool_calls}) == 2
    assert policy.asked[-1].tools[0]["function"]["name"] == "calculator"
    # What the library makes of an answer is understood when it comes back, in the form that templates read.
    again = [*ASK, choice.message.model_dump(), {"role": "tool", "tool_call_id": "c", "content": "7"}]
    client.chat.completions.create(model="policy", messages=again, tools=[TOOL])
    back = policy.asked[-1].messages[1]
    assert back["content"] == "hm"
    assert [call["function"] for call in back["tool_calls"]] == [
        {"name": "calculator", "arguments": '{"x": 1}'}, {"name": "calculator", "arguments": "{}"},
    ]  # fmt: skip


def test_tokens_go_in_and_out(served):
    client, policy, _, _ = served
    reply = client.completions.create(model="policy", prompt=[4, 5, 6], extra_body={"return_token_ids": True})
    assert policy.asked[-1].prompt == (4, 5, 6)
    assert reply.choices[0].model_extra["token_ids"] == [10, 11]
    assert reply.model_extra["prompt_token_ids"] == [0, 1, 2, 3, 4]


def test_there_is_one_model(served):
    client = served[0]
    assert [model.id for model in client.models.list()] == ["policy"]
    assert client.models.retrieve("policy").owned_by == "gspo"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-4o")
    assert error.value.code == "model_not_found"


def test_another_models_name_is_refused_with_the_name_to_ask_for(served):
    with pytest.raises(openai.NotFoundError, match=r"'policy', got 'gpt-4o'; let the agent ask for 'policy'") as error:
        served[0].chat.completions.create(model="gpt-4o", messages=ASK)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


def test_the_runs_sampling_takes_the_place_of_the_agents_and_is_counted(served):
    client, policy, line, _ = served
    before = line.counts["settings_replaced"]
    client.chat.completions.create(model="policy", messages=ASK, temperature=0.2, top_p=0.9, seed=4, user="me")
    assert policy.asked[-1].replaced == ("temperature", "top_p")
    client.chat.completions.create(model="policy", messages=ASK, seed=4)
    assert line.counts["settings_replaced"] == before + 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("frequency_penalty", 0.5),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("top_logprobs", 3),
        ("reasoning_effort", "low"),
        ("functions", [{"name": "f"}]),
        ("temperature", 3.0),
        ("max_tokens", 0),
        ("stop", ["a"] * 17),
        ("modalities", ["audio"]),
        ("tools", [{"type": "custom", "custom": {"name": "x"}}]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(served, name, value):
    with pytest.raises(openai.BadRequestError) as error:
        served[0].chat.completions.create(**{"model": "policy", "messages": ASK, name: value})
    assert str(error.value.param).startswith(name)
    assert name in str(error.value)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hello"],
        [{"role": "wizard", "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
        [{"role": "user", "content": 5}],
        [{"role": "assistant", "tool_calls": [{"id": "x"}]}],
        [{"role": "user", "content": "x", "audio": {"id": "y"}}],
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(served, messages):
    with pytest.raises(openai.BadRequestError, match="messages"):
        served[0].chat.completions.create(model="policy", messages=messages)


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"], [[1], [2]], [1.5], [True], [-1], [2**40], None])
def test_prompts_that_are_not_one_prompt_are_refused(served, prompt):
    with pytest.raises(openai.BadRequestError) as error:
        served[0].post("/completions", cast_to=object, body={"model": "policy", "prompt": prompt})
    assert error.value.param == "prompt"


def test_a_megabyte_is_read_and_three_are_not(served):
    client = served[0]
    assert client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 2**20}]).choices
    with pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 3 * 2**20}])
    assert (error.value.status_code, error.value.code) == (413, "body_too_large")


def test_a_reward_can_be_posted(served):
    client, _, line, _ = served
    url = str(client.base_url).replace("/v1/", "/reward")
    assert client.post(url, cast_to=object, body={"reward": 0.25}) == {"reward": 0.25}
    assert line.reward == 0.25
    for body in ({}, {"reward": "1"}, {"reward": True}, {"reward": None}, {"reward": 1, "more": 2}):
        with pytest.raises(openai.BadRequestError):
            client.post(url, cast_to=object, body=body)
    assert line.reward == 0.25


def test_the_key_of_another_episode_does_not_open_this_one(served):
    client, _, _, server = served
    with pytest.raises(openai.AuthenticationError) as error:
        client.with_options(api_key=server.key("7-1")).models.list()
    assert error.value.code == "invalid_api_key"


def test_messages_are_brought_into_one_form():
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [],
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
    ]  # fmt: skip
    assert read_chat({"model": "m", "messages": messages}, "m").messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
    )  # fmt: skip

import json

import pytest
import talkers

from gspo.envs.chat import Chat, TemplateError, continues, parse_calls, same_message

USER = {"role": "user", "content": "2*3?"}
CALL = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "2*3"}'}}


def test_what_follows_an_answer_is_what_a_whole_rendering_would_have_written():
    talk = talkers.chat()
    encode = talk.tokenizer.encode
    said = encode("Six" + talkers.END, add_special_tokens=False)
    history, new = [USER], [{"role": "user", "content": "sure?"}]
    whole = talk.render([USER, {"role": "assistant", "content": "Six"}, *new])
    assert (*talk.render(history), *said, *talk.continue_after(said, history, new)) == whole


def test_an_answer_that_was_cut_off_is_closed_by_the_template():
    talk = talkers.chat()
    said = talk.tokenizer.encode("Si", add_special_tokens=False)
    tail = talk.tokenizer.decode(talk.continue_after(said, [USER], [USER]))
    assert tail == f"{talkers.END}\n{talkers.START}user\n2*3?{talkers.END}\n{talkers.START}assistant\n"


def test_a_mark_in_a_message_is_only_text():
    talk = talkers.chat()
    said = talk.tokenizer.encode("x" + talkers.END, add_special_tokens=False)
    history, new = [{"role": "user", "content": "gspo7d1c9answer"}], [{"role": "user", "content": "gspo7d1c9answer"}]
    whole = talk.render([*history, {"role": "assistant", "content": "x"}, *new])
    assert (*talk.render(history), *said, *talk.continue_after(said, history, new)) == whole


def test_without_a_template_a_message_is_its_content():
    talk = talkers.chat(template=None)
    assert talk.is_plain
    assert talk.tokenizer.decode(talk.render([{"role": "system", "content": "Add."}, USER])) == "Add.\n\n2*3?"
    assert talk.tokenizer.decode(talk.continue_after([5], [USER], [{"role": "tool", "content": "6"}])) == "6"


def test_a_template_that_refuses_or_hides_an_answer_says_so():
    refusing = talkers.chat("{{ raise_exception('no') }}")
    with pytest.raises(TemplateError, match="no"):
        refusing.render([USER])
    hiding = talkers.chat("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(TemplateError, match="changes the content"):
        hiding.continue_after([5], [USER], [USER])


def test_arguments_of_calls_reach_the_template_as_objects():
    talk = talkers.chat()
    text = talk.tokenizer.decode(talk.render([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]))
    assert '<tool_call>{"name": "calculator", "arguments": {"expression": "2*3"}}</tool_call>' in text


def test_calls_are_parsed_and_what_is_no_call_stays_text():
    two = '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>\n<tool_call>\n{"name": "b"}\n</tool_call>'
    message = parse_calls("Hm. " + two)
    assert message["content"] == "Hm."
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["a", "b"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": 1}
    for broken in ("<tool_call>{nope}</tool_call>", "<tool_call>[1]</tool_call>", '<tool_call>{"name": 3}</tool_call>',
                   "<tool_call>" + "[" * 100_000):  # fmt: skip
        assert parse_calls(broken) == {"role": "assistant", "content": broken}


def test_a_call_that_was_cut_off_before_its_closing_mark_still_counts():
    assert parse_calls('<tool_call>{"name": "a", "arguments": {}}')["tool_calls"][0]["function"]["name"] == "a"


def test_messages_are_compared_by_what_they_say():
    mine = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    function = {"name": "calculator", "arguments": '{"expression":"2*3"}'}
    theirs = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "other", "function": function}],
    }
    assert same_message(mine, theirs)
    assert same_message(USER, {"role": "user", "content": [{"type": "text", "text": "2*3?"}]})
    assert not same_message(USER, {"role": "user", "content": "2*4?"})
    assert continues([USER, mine], [USER, theirs, USER])
    assert not continues([USER, mine], [USER, mine])
    assert not continues([USER, mine], [mine, USER, USER])


def test_a_given_template_goes_before_the_tokenizers():
    talk = Chat(talkers.tokenizer(), template="{{ messages[0].content }}!")
    assert talk.tokenizer.decode(talk.render([USER])) == "2*3?!"


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"', "[" * 500 + "]" * 500])
def test_a_call_that_no_client_reads_or_no_tokenizer_encodes_stays_text(value):
    text = f'<tool_call>{{"name": "a", "arguments": {{"x": {value}}}}}</tool_call>'
    assert parse_calls(text) == {"role": "assistant", "content": text}

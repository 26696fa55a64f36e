"""The built-in environments and how they are named, against scripted answers of a model."""

import asyncio
import re
from pathlib import Path

import pytest
import talkers
from scripted_client import call, last_prompt, play, scripted

from gspo.envs.builtin.self_correct import SelfCorrect
from gspo.envs.builtin.tools import Tools
from gspo.envs.client import OutOfRoomError
from gspo.envs.find import find_environment
from gspo.errors import ConfigError
from gspo.rewards import box as sandbox

needs_sandbox = pytest.mark.skipif(bool(sandbox.unavailable()), reason=sandbox.unavailable() or "it works")


def test_in_plain_text_a_result_stands_behind_its_call():
    client = scripted("[12*34]", ">408")
    assert play(Tools(), client) is None
    assert last_prompt(client) == "12*34=[12*34]408"
    assert client.asked[0].params.stop == ("]",)
    assert len(client.asked) == 2


@pytest.mark.run
@needs_sandbox
def test_several_tools_are_called_by_name_in_plain_text():
    client = scripted("[calculator 2+2]", "[python print(7)]", "[no 1]", ">x")
    play(Tools(["calculator", "python"]), client)
    assert last_prompt(client).endswith(
        "2+2]4[python print(7)]7\n[no 1]error: there is no tool 'no'; there are calculator, python"
    )


def test_with_a_template_tools_are_described_called_and_answered():
    client = scripted(call("calculator", expression="6*7"), f"42{talkers.END}", template=talkers.CHATML)
    play(Tools(), client)
    assert last_prompt(client).startswith(f"{talkers.START}system\n1 tools{talkers.END}")
    assert f"{talkers.START}tool\n42{talkers.END}\n{talkers.START}assistant\n" in last_prompt(client)
    # One sequence: the second request goes on from the tokens of the first answer.
    first = client.asked[0].prompt
    assert client.asked[1].prompt[: len(first)] == first


@pytest.mark.parametrize(
    ("said", "result"),
    [
        (call("calculator", expression="1/0"), "error: division by zero"),
        (call("calculator", expression=7), "error: calculator takes 'expression', a text"),
        (call("calculator"), "error: calculator takes 'expression', a text"),
        (call("rm", path="/"), "error: there is no tool 'rm'; there are calculator"),
        (call("calculator", expression="9" * 199 + "*9"), "error: the expression has 201 characters; 200 are allowed"),
    ],
)
def test_a_bad_call_is_answered_in_words_and_the_episode_goes_on(said, result):
    client = scripted(said, f"so?{talkers.END}", template=talkers.CHATML)
    play(Tools(), client)
    assert f"{talkers.START}tool\n{result}{talkers.END}" in last_prompt(client)


def test_a_call_that_is_no_json_is_an_answer():
    client = scripted(f"<tool_call>{{nope</tool_call>{talkers.END}", template=talkers.CHATML)
    play(Tools(), client)
    assert len(client.asked) == 1


def test_an_episode_ends_with_its_turns():
    client = scripted(*["[1+1]"] * 9)
    play(Tools(max_turns=3), client)
    assert len(client.asked) == 3


def test_a_long_result_is_cut():
    client = scripted("[10**900]", ">1")
    play(Tools(max_output=20), client)
    assert last_prompt(client).endswith(
        "]" + "1" + "0" * 19 + "… (901 characters)".replace("…", "<pad>")
    ) or "901" in last_prompt(client)


def test_a_context_that_is_full_ends_the_episode_and_one_that_never_had_room_fails():
    client = scripted("[1+1]", "[1+1]", "[1+1]", context=22)
    play(Tools(), client)
    assert len(client.asked) < 4
    with pytest.raises(OutOfRoomError):
        play(Tools(), scripted("x", context=6))


@pytest.mark.run
@needs_sandbox
@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(6*7)", "42\n"),
        ("import os; print(os.listdir('/home'))", "FileNotFoundError"),
        ("while True: pass", "error: over its time of 1 s"),
        ("print('x' * 10_000_000)", "characters)"),
        ("raise SystemExit(3)", "error: ended with exit code 3"),
    ],
)
def test_programs_run_in_the_sandbox_and_what_becomes_of_them_is_said(code, result):
    said = asyncio.run(Tools("python", timeout=1.0, max_output=300).call("python", {"code": code}))
    assert result in said
    assert len(said) < 400


def test_tools_that_there_are_not_are_refused_by_name():
    for options in ({"tools": ["hammer"]}, {"tools": []}, {"max_turns": 0}, {"timeout": 0}):
        with pytest.raises(ConfigError, match=r"env\.options"):
            Tools(**options)


def test_python_without_a_sandbox_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "unavailable", lambda: "bubblewrap is not installed")
    with pytest.raises(ConfigError, match="allow_unsandboxed"):
        Tools(["python"])


def test_self_correction_says_when_an_answer_is_wrong_and_pays_less_for_later_ones():
    def env(**options):
        return SelfCorrect(check="final", options={"marker": ">"}, **options)

    right = scripted(">408", data={"answer": "408"})
    assert play(env(), right) == {"reward": 1.0, "first_attempt": 1.0}
    second = scripted(">400", ">408", data={"answer": "408"})
    assert play(env(discount=0.5, feedback="(not {answer})"), second) == {"reward": 0.5, "first_attempt": 0.0}
    assert last_prompt(second) == "12*34=>400(not >400)"
    never = scripted(*[">1"] * 9, data={"answer": "408"})
    assert play(env(attempts=3), never)["reward"] == 0
    assert len(never.asked) == 3


def test_a_check_of_the_users_gets_the_columns_it_names():
    def check(text, level):
        return float(len(text) > level)

    client = scripted("abc", data={"answer": "x", "level": 2})
    assert play(SelfCorrect(check=check), client)["reward"] == 1


def test_the_environment_of_the_document_plays():
    page = (Path(__file__).parents[2] / "docs" / "episodes.md").read_text()
    (code,) = re.findall(r"```python\n(# my_env.py\n.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert play(names["env"], scripted("408", data={"answer": "408"})) == 1.0
    second = scripted("7", "408", data={"answer": "408"})
    assert play(find_environment(names["env"], {"hint": "?"}), second) == 0.5
    assert last_prompt(second) == "12*34=7?"
    assert second.asked[1].params.max_new_tokens == 64


async def mine(client, data, bonus=0):
    return bonus


def sync(client, data):
    return 1.0


class Own:
    def __init__(self, level=1):
        self.level = level

    async def __call__(self, client, data):
        return self.level


def test_environments_are_found_by_name_function_class_and_object():
    assert isinstance(find_environment("tools", {"tools": ["calculator"]}), Tools)
    assert isinstance(find_environment("self_correct"), SelfCorrect)
    assert asyncio.run(find_environment(mine, {"bonus": 3})(None, {})) == 3
    assert asyncio.run(find_environment(Own, {"level": 4})(None, {})) == 4
    assert asyncio.run(find_environment(Own(5))(None, {})) == 5
    assert asyncio.run(find_environment(f"{__file__}:mine", {"bonus": 2})(None, {})) == 2


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ("toolz", {}, "tools, self_correct"),
        ("no_such_module:env", {}, "importing"),
        (f"{__file__}:nothing", {}, "no function"),
        (sync, {}, "async def"),
        (mine, {"malus": 1}, "env.options"),
        (Own, {"height": 1}, "env.options"),
        ("tools", {"hammers": 1}, "env.options"),
        (lambda client: None, {}, "async def"),
    ],
)
def test_what_is_no_environment_is_refused_by_name(given, options, says):
    with pytest.raises(ConfigError, match=says):
        find_environment(given, options)

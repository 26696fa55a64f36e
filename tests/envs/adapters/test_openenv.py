"""OpenEnv servers over their websocket protocol: a small server here, and one made with the real package."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import talkers
from openenv_server import SERVER
from processes import until
from scripted_client import call, last_prompt, play, scripted

from gspo.envs.adapters.openenv import OpenEnvError
from gspo.envs.client import EpisodeError
from gspo.envs.client import play as play_episode
from gspo.envs.find import find_environment
from gspo.errors import ConfigError
from gspo.types import Failure


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "app.py").write_text(SERVER)
    return tmp_path


@pytest.fixture
def make(folder, monkeypatch):
    made = []

    def make(kind="", **options):
        monkeypatch.setenv("KIND", kind)
        made.append(find_environment(f"openenv:{folder}", {"timeout": 3, **options}))
        return made[-1]

    yield make
    for env in made:
        env.close()


def client(*answers, template=None):
    return scripted(*answers, data={"seed": 17}, question="Guess the number.", template=template)


@pytest.mark.run
def test_observations_are_read_answers_are_actions_and_rewards_belong_to_turns(make):
    env = make(observation="hint")
    asked = client("3", "many", "99", "7")
    assert play(env, asked) == 0.0
    assert asked.turn_rewards == {0: 0.0, 3: 1.0}
    text = last_prompt(asked)
    assert text.startswith("Guess the number.\n\nguess 0-93low")
    assert "error: the answer must be one integer" in text
    assert "error: number: must be 0 to 9" in text
    rows = env.rows("train", 3)
    assert [row["seed"] for row in rows] == [0, 1, 2]
    assert rows[0]["prompt"] == "Guess the number."
    # The same server, as a user's own one, by its address.
    other = find_environment(f"openenv:{env._url}", {"observation": "hint", "action": "number"})
    assert play(other, client("7")) == 0.0
    import httpx

    until(lambda: httpx.get(f"{env._url}/open").json() == 0, 5)  # every session was closed
    with pytest.raises(ConfigError, match=r"env\.options\.action: the server has no field 'nothing'; it has number"):
        find_environment(f"openenv:{env._url}", {"action": "nothing"})


@pytest.mark.run
def test_an_action_with_several_fields_is_json(make):
    env = make("json")
    asked = client('{"number": 3, "colour": "red"}', "3", '{"number": 7}')
    play(env, asked)
    assert asked.turn_rewards == {0: 0.0, 2: 1.0}
    assert "error: the answer must be a JSON object with number, colour" in last_prompt(asked)


@pytest.mark.run
def test_tools_of_an_environment_are_called(make):
    env = make("tools")
    asked = client(call("add", a=3), call("sub", a=1), f"7{talkers.END}", template=talkers.CHATML)
    play(env, asked)
    assert asked.turn_rewards == {0: 0.5, 1: 0.0}
    assert f"{talkers.START}tool\n7{talkers.END}" in last_prompt(asked)
    assert "error: no such tool" in last_prompt(asked)


@pytest.mark.run
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("die", "step: ConnectionClosed"),
        pytest.param("hang", "did not answer step within 1 s", marks=pytest.mark.full),
        pytest.param("nonsense", "step: JSONDecodeError", marks=pytest.mark.full),
        pytest.param("large", "step: ConnectionClosed", marks=pytest.mark.full),
    ],
)
def test_a_server_that_misbehaves_costs_one_sample(make, kind, why):
    env = make(kind, timeout=1)
    with pytest.raises(OpenEnvError, match=why) as error:
        play(env, client("3"))
    assert error.value.kind == "infra"


@pytest.mark.run
def test_a_server_that_died_is_started_again_for_the_next_episode(make):
    env = make("die", timeout=20)
    for _ in range(2):
        with pytest.raises(OpenEnvError, match="step: ConnectionClosed"):  # each has answered reset before
            play(env, client("3"))
        env._server._process.wait(20)


@pytest.mark.run
@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "why"), [("nan", "reward is nan; it must be a finite number"), ("list", "must be a number, got list")]
)
def test_a_reward_that_is_no_number_costs_one_sample(make, kind, why):
    with pytest.raises(EpisodeError, match=why):
        play(make(kind), client("3"))


def test_without_the_package_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(ConfigError, match=r"openenv needs websockets: pip install .*"):
        find_environment("openenv:http://127.0.0.1:1")


@pytest.mark.run
def test_a_server_that_is_full_says_which_number_to_set(make):
    import asyncio

    from websockets.asyncio.client import connect

    env = make()

    async def crowd():
        url = env._url.replace("http", "ws") + "/ws"
        async with connect(url), connect(url):
            await env(client("3"), {"seed": 1})

    with pytest.raises(OpenEnvError, match=r"CAPACITY_REACHED.*env\.options\.sessions"):
        asyncio.run(crowd())


@pytest.mark.run
def test_what_is_no_server_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"has no server/app\.py"):
        find_environment(f"openenv:{tmp_path}")
    with pytest.raises(ConfigError, match="did not answer as an OpenEnv server"):
        find_environment("openenv:http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"env\.path: the OpenEnv server no_such_package ended with exit code 1"):
        find_environment("openenv:no_such_package")
    with pytest.raises(ConfigError, match="must be at least 1"):
        find_environment("openenv:http://127.0.0.1:1", {"sessions": 0})


GOOD = {"action": {"properties": {"number": {"type": "integer"}}}, "observation": {"properties": {}}}


@contextlib.contextmanager
def answering(send):
    """A server whose answer to every request is what `send` writes to the socket; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.recv(65536)
                        send(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def reply(body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(data) + data


@pytest.mark.run
@pytest.mark.parametrize(
    "schema",
    [
        {}, [], "x", 3, None, {"action": {}}, {**GOOD, "action": None}, {**GOOD, "action": []},
        {**GOOD, "action": "Guess"}, {**GOOD, "observation": None}, {**GOOD, "observation": 3},
        {**GOOD, "action": {"properties": "x"}}, {**GOOD, "action": {"properties": ["x"]}},
        {**GOOD, "action": {"properties": {"x": 5}}}, {**GOOD, "action": {"required": 5}},
        {**GOOD, "action": {"required": [["x"]]}}, {**GOOD, "observation": {"properties": "x"}},
        b"[" * 200_000, b'{"action": ' + b'{"a": ' * 2000 + b"{}" + b"}" * 2001, b"\xff\xfe{", b"",
        b'{"action": {"title": "' + b"x" * 400_000 + b'"}, "observation": {}}', b"[" + b"0," * 500_000 + b"0]",
    ],
    ids=lambda schema: str(schema)[:40],
)  # fmt: skip
def test_a_schema_of_another_form_is_an_error_that_names_the_address(schema):
    why = "/schema (did not answer as|is not that of) an OpenEnv server"
    with answering(lambda connection: connection.sendall(reply(schema))) as url, pytest.raises(ConfigError, match=why):
        find_environment(f"openenv:{url}", {"timeout": 20})


@pytest.mark.run
def test_odd_parts_of_a_right_schema_do_no_harm():
    schema = {"action": {"title": ["A"], "properties": {"x": True, "metadata": {}}, "required": ["x", "gone"]},
              "observation": {}, "description": {"a": 1}}  # fmt: skip
    with answering(lambda connection: connection.sendall(reply(schema))) as url:
        env = find_environment(f"openenv:{url}", {"timeout": 20})
    assert env.rows("train", 1)[0]["prompt"] == "OpenEnv"  # a description that is not a text is none
    assert env._parse("seven") == ({"x": "seven"}, "")


def drip(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.05)


def flood(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 600000000\r\n\r\n")
    while True:
        connection.sendall(b" " * 2**20)


@pytest.mark.run
@pytest.mark.parametrize(
    ("send", "why"), [(drip, "no answer within 1 s"), (flood, "more than 1048576 bytes"), (lambda c: c.recv(1), "1 s")]
)
def test_an_answer_that_drips_floods_or_never_comes_ends_at_the_deadline(send, why):
    began = time.monotonic()
    with answering(send) as url, pytest.raises(ConfigError, match=why):
        find_environment(f"openenv:{url}", {"timeout": 1})
    assert time.monotonic() - began < 15


@pytest.mark.full
@pytest.mark.run
@pytest.mark.parametrize(
    "answer",
    [
        "[]", "3", "null", "{}", '{"data": []}', '{"type": "error", "data": {}}', "[" * 100_000,
        '{"type": "error", "data": {"message": ' + "[" * 90 + "]" * 90 + "}}", '{"data": {"reward": "1"}}',
        '{"data": {"reward": ' + "9" * 400 + "}}", '{"data": {"reward": [1]}}',
        '{"data": {"x": ' + "[" * 101 + "]" * 101 + "}}",
    ],
    ids=lambda answer: answer[:40],
)  # fmt: skip
def test_a_step_of_another_form_costs_one_sample(folder, monkeypatch, answer):
    app = (folder / "server" / "app.py").read_text()
    line = 'elif KIND == "large": await ws.send_text("x" * 2**21); continue'
    assert line in app
    (folder / "server" / "app.py").write_text(
        app.replace(line, f'elif KIND == "odd": await ws.send_text({answer!r}); continue')
    )
    monkeypatch.setenv("KIND", "odd")
    env = find_environment(f"openenv:{folder}", {"timeout": 20})
    try:
        failure = asyncio.run(play_episode(env, client("3")))
        assert isinstance(failure, Failure)
        assert failure.kind in ("infra", "crash")
        assert "StopIteration" not in failure.message  # the first step failed, there was no second one
    finally:
        env.close()


REAL = Path(__file__).parents[3] / ".venv-openenv" / "bin" / "python"
needs_openenv = pytest.mark.skipif(not REAL.exists(), reason="no .venv-openenv: run `make setup-envs`")


@pytest.mark.full
@needs_openenv
def test_a_server_made_with_openenv_itself_is_played(tmp_path):
    done = subprocess.run(
        [str(REAL.with_name("openenv")), "init", "echo_env"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    env = find_environment(f"openenv:{tmp_path / 'echo_env'}", {"python": str(REAL), "sessions": 1, "timeout": 20})
    try:
        asked = scripted("hello", "ab", data={"seed": 1}, question="Say something.")
        env._max_steps = 2
        play(env, asked)
        assert "hello" in last_prompt(asked).split("hello", 1)[1]  # the echo of the answer
        assert asked.turn_rewards[0] > 0
    finally:
        env.close()

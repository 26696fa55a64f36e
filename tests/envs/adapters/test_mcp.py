"""MCP servers as tools: a small server of our own over the real protocol, and a server from npm."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import talkers
from processes import are_gone, is_alive, until
from scripted_client import call, last_prompt, play, scripted

from gspo.envs.adapters.mcp import McpError, McpServer, McpTools, read_specs
from gspo.envs.builtin.tools import Tools
from gspo.envs.find import find_environment
from gspo.errors import ConfigError

SERVER = """
import json, os, sys, time
calls = 0
def send(**message): print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
print("a line that is not JSON", flush=True)
for line in sys.stdin:
    m = json.loads(line)
    if m.get("method") == "initialize":
        send(id=m["id"], result={"protocolVersion": m["params"]["protocolVersion"], "capabilities": {}})
        send(id="from-server", method="ping")
    elif m.get("method") == "tools/list":
        one = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        first = not m["params"].get("cursor")
        tools = ["count", "fail"] if first else ["sleep", "die", "flood"]
        send(id=m["id"], result={"tools": [{"name": n, "inputSchema": one} for n in tools],
                                 **({"nextCursor": "2"} if first else {})})
    elif m.get("method") == "tools/call":
        calls += 1
        name, text = m["params"]["name"], m["params"]["arguments"].get("text")
        if name == "sleep": time.sleep(60)
        if name == "die": sys.exit("the disk is gone")
        if name == "flood": print("x" * (17 * 2**20), flush=True)
        open("seen.txt", "a").write("x")
        send(id=m["id"], result={"content": [{"type": "text", "text": f"{text} {calls} {os.path.getsize('seen.txt')}"}],
                                 "isError": name == "fail"})
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    monkeypatch.chdir(tmp_path)
    return [sys.executable, str(file)]


@pytest.mark.run
def test_a_model_calls_the_tools_of_a_server_and_reads_their_results(command):
    env = find_environment("tools", {"mcp": [{"command": command, "name": "mine"}]})
    client = scripted(call("count", text="hello"), call("fail", text="no"), f"so{talkers.END}", template=talkers.CHATML)
    try:
        play(env, client)
    finally:
        env.close()
    assert f"{talkers.START}system\n5 tools{talkers.END}" in last_prompt(client)
    assert "hello 1 1" in last_prompt(client)
    assert "error: no 2 2" in last_prompt(client)


@pytest.mark.run
def test_without_a_template_the_call_stands_in_brackets(command):
    env = Tools(["calculator"], mcp=[command])
    client = scripted("[count hi]", "[calculator 2+2]", '[count {"text": "x"}]', ">x")
    try:
        play(env, client)
    finally:
        env.close()
    assert last_prompt(client).endswith('[count hi]hi 1 1[calculator 2+2]4[count {"text": "x"}]{"text": "x"} 2 2')


@pytest.mark.run
def test_a_server_per_episode_has_its_own_state_and_folder_and_is_gone_afterwards(command):
    env = Tools(mcp=[{"command": command, "per_episode": True}])
    for _ in range(2):
        client = scripted(call("count", text="a"), call("count", text="b"), f".{talkers.END}", template=talkers.CHATML)
        play(env, client)
        assert "b 2 2" in last_prompt(client)
    until(lambda: not _children(command[1]), 10)


def _children(script: str) -> list[int]:
    def words(pid: str) -> str:
        try:
            return Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            return ""

    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and script in words(pid)]


@pytest.mark.run
@pytest.mark.parametrize(
    ("tool", "why"),
    [("sleep", "did not answer tools/call within 0.5 s"), ("die", "the disk is gone"), ("flood", "sent a message of")],
)
def test_a_server_that_hangs_dies_or_floods_costs_one_sample_and_is_replaced(command, tool, why):
    # Only a server that hangs is given up for time: a long message takes more than half a second on a busy machine.
    env = Tools(mcp=[command], timeout=0.5 if tool == "sleep" else 20)
    try:
        began = time.monotonic()
        with pytest.raises(McpError, match=why) as error:
            play(env, scripted(call(tool, text="x"), template=talkers.CHATML))
        assert error.value.kind == "infra"
        assert time.monotonic() - began < 20
        client = scripted(call("count", text="again"), f".{talkers.END}", template=talkers.CHATML)
        play(env, client)
        assert "again 1" in last_prompt(client)
    finally:
        env.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, r"env\.options\.mcp must be a list"),
        ([{"command": "no-such-program-here"}], r"mcp\[0\]\.command: there is no program 'no-such-program-here'"),
        ([{"command": []}], r"mcp\[0\]\.command must be a command line"),
        ([{"comand": ["x"]}], r"mcp\[0\]\.comand is not known"),
        (["true a", "true a"], "two servers are named 'a'"),
    ],
)
def test_a_wrong_server_is_refused_by_its_key(given, message):
    with pytest.raises(ConfigError, match=message):
        read_specs(given)


@pytest.mark.run
def test_a_command_that_is_no_server_is_an_error_before_the_run():
    with pytest.raises(ConfigError, match=r"env\.options\.mcp: the MCP server .* ended with exit code 3: oh no"):
        McpTools([[sys.executable, "-c", "import sys; print('oh no', file=sys.stderr); sys.exit(3)"]], 1.0)


@pytest.mark.run
def test_a_server_ends_with_a_killed_trainer(command, tmp_path):
    program = (
        "import sys, time; from gspo.envs.adapters.mcp import McpServer, read_specs\n"
        f"server = McpServer(read_specs([{command!r}])[0]); print(server._process.pid, flush=True); time.sleep(60)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    pid = int(trainer.stdout.readline())
    assert is_alive(pid)
    trainer.kill()
    trainer.communicate(timeout=10)
    assert are_gone([pid], 10)


@pytest.mark.full
def test_tools_of_a_server_from_npm_are_called(tmp_path_factory):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("npm")
    install = ["npm", "install", "--silent", "--prefix", str(folder), "@modelcontextprotocol/server-everything"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=200)
    if done.returncode:
        pytest.skip(f"the npm registry did not provide the server: {done.stderr[-200:]}")
    server = McpServer(read_specs([[str(folder / "node_modules/.bin/mcp-server-everything")]])[0])
    try:
        by_name = {tool["name"]: tool for tool in server.tools}
        assert "echo" in by_name
        assert "hello" in server.call("echo", {"message": "hello"}, 20)
        assert server.call("echo", {"wrong": 1}, 20).startswith("error: ")
        assert json.dumps(by_name["echo"]["inputSchema"])
    finally:
        server.close()

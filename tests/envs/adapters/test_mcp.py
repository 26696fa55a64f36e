"""MCP servers as tools: a small server of our own over the real protocol, and a server from npm."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
    ("tool", "why", "later"),
    [
        ("sleep", "did not answer tools/call within 0.5 s", "again 1"),
        ("die", "the disk is gone", "again 1"),
        ("flood", "sent a message of", "again 2"),  # it is the same server
    ],
)
def test_a_server_that_hangs_dies_or_floods_costs_one_sample(command, tool, why, later):
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
        assert later in last_prompt(client)
    finally:
        env.close()


HOSTILE = """
import json, os, sys, threading, time
def send(text): sys.stdout.write(text + chr(10)); sys.stdout.flush()
def result(m, **r): send(json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": r}))
TOOLS = [{"name": "echo"}]
def start(): pass
def tool(m, name): result(m, content=[{"type": "text", "text": name}])
def listed(m): result(m, tools=TOOLS)
%s
start()
for line in sys.stdin:
    m = json.loads(line)
    if m.get("method") in ("initialize", "ping"): result(m)
    elif m.get("method") == "tools/list": listed(m)
    elif m.get("method") == "tools/call": tool(m, m["params"]["name"])
"""


@pytest.fixture
def hostile(tmp_path):
    """Start a small server with one part replaced."""
    made = []

    def start(part):
        file = tmp_path / "hostile.py"
        file.write_text(HOSTILE % part)
        made.append(McpServer(read_specs([[sys.executable, "-S", "-I", str(file)]])[0]))
        return made[-1]

    yield start
    for server in made:
        server.close()


LINES = [
    '{"level": "info", "msg": "started"}', "[1, 2]", "3", '"text"', "null", '{"id": null}', '{"id": [1], "result": 2}',
    '{"id": {"a": 1}}', '{"id": 1e400, "result": 1}', '{"id": true, "result": 1}', '{"id": 99, "result": 1}',
    '{"id": -1, "error": {}}', '{"method": null, "id": null}', '{"method": ["x"], "id": ["y"]}', '{"method": "ping"}',
    '{"method": "ping", "id": ' + "9" * 4000 + "}", '{"method": "ping", "id": "' + "x" * 10**5 + '"}', "{" * 50_000,
    '{"id": ' + "[" * 900 + "]" * 900 + "}", "\\x00\\x1b[2J", "\\ud800",
]  # fmt: skip


@pytest.mark.run
def test_lines_that_are_no_answers_are_ignored_at_the_start_and_during_a_call(hostile):
    lines = f"LINES = {LINES!r}\n" + (
        "def start():\n  for line in LINES: sys.stdout.buffer.write(line.encode('utf-8', 'replace') + b'\\n')\n"
        "def tool(m, name): start(); result(m, content=[{'type': 'text', 'text': name}]); start()"
    )
    server = hostile(lines)
    assert [server.call("echo", {}, 20) for _ in range(3)] == ["echo"] * 3


@pytest.mark.run
@pytest.mark.parametrize(
    "tool",
    [
        3, "x", {}, {"name": ["x"]}, {"name": ""}, {"name": "x" * 300}, {"name": "e", "inputSchema": "string"},
        {"name": "e", "inputSchema": {"required": 5}}, {"name": "e", "inputSchema": {"required": [["a"]]}},
        {"name": "e", "inputSchema": {"properties": ["a"]}}, {"name": "e", "inputSchema": {"properties": {"a": 1}}},
        {"name": "e", "inputSchema": []}, {"name": "e", "description": {"a": 1}},
        {"name": "e", "inputSchema": {"title": "x" * 2**19}},
    ],
)  # fmt: skip
def test_a_wrong_tool_is_an_error_that_names_it(hostile, tool):
    with pytest.raises(McpError, match="describes a tool wrongly: "):
        hostile(f"TOOLS = [{tool!r}]")


@pytest.mark.run
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("result(m, content=[{'type': 'text', 'text': 5}, {'type': ['x']}, 7])", "[text]\n[['x']]"),
        ("result(m, content=3)", ""),
    ],
)
def test_an_answer_of_another_form_is_an_empty_text(hostile, answer, text):
    assert hostile(f"def tool(m, name): {answer}").call("echo", {}, 20) == text


@pytest.mark.run
@pytest.mark.parametrize("error", ["[]", "{'message': [[[]]]}", "5", "{'message': 'x' * 10**6}"])
def test_an_error_of_any_form_fails_the_call_at_once_and_the_server_stays(hostile, error):
    server = hostile(
        f"def tool(m, name): send(json.dumps({{'id': m['id'], 'error': {error}}}))\n"
        "def listed(m): result(m, tools=TOOLS)"
    )
    for _ in range(2):
        with pytest.raises(McpError, match="refused") as raised:
            server.call("echo", {}, 20)
        assert len(str(raised.value)) < 500
    assert not server.is_over


@pytest.mark.run
def test_a_late_tool_costs_its_call_and_not_those_of_others(hostile):
    server = hostile(
        "late = lambda m: threading.Timer(3, result, (m,)).start()\n"
        "def tool(m, name): late(m) if name == 'late' else result(m, content=[{'type': 'text', 'text': name}])"
    )
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(server.call, "late", {}, 0.3)
        assert server.call("echo", {}, 20) == "echo"
        with pytest.raises(McpError, match=r"did not answer tools/call within 0\.3 s"):
            late.result(20)
    assert not server.is_over
    assert server.call("echo", {}, 20) == "echo"


@pytest.mark.run
@pytest.mark.parametrize(
    ("attack", "within_s"),
    [
        # Pings without end from a server that reads nothing; the same, as a drip of bytes; log lines without end.
        ('def tool(m, name):\n  while True: send(\'{"method": "ping", "id": 1}\')', 12),
        *(
            pytest.param(f"def tool(m, name):\n  {attack}", within_s, marks=pytest.mark.full)
            for attack, within_s in [
                ("while True: sys.stdout.write('x'); sys.stdout.flush(); time.sleep(0.05)", 12),
                ('while True: send(\'{"level": "info"}\' * 1000)', 30),
                ("sys.stdin.close(); os.close(0); time.sleep(60)", 12),
                ("os.close(1); time.sleep(60)", 12),
            ]
        ),
    ],
)
def test_a_call_ends_at_its_deadline_whatever_the_server_sends(hostile, attack, within_s):
    server = hostile(attack)
    began = time.monotonic()
    with pytest.raises(McpError):
        server.call("echo", {}, 1.0)
    # The deadline, a ping, and a busy machine.
    assert time.monotonic() - began < within_s
    assert server.is_over


@pytest.mark.run
def test_a_message_that_the_server_does_not_read_ends_at_the_deadline_of_its_call(hostile):
    server = hostile("def tool(m, name): time.sleep(60)")
    with ThreadPoolExecutor(4) as pool:
        began = time.monotonic()
        calls = [pool.submit(server.call, "echo", {"text": "x" * 10**6}, 1.0) for _ in range(4)]
        for each in calls:
            with pytest.raises(McpError):
                each.result(30)
        assert time.monotonic() - began < 15


@pytest.mark.run
def test_a_reader_thread_that_fails_fails_its_calls_at_once(hostile, monkeypatch):
    server = hostile("")
    monkeypatch.setattr(server, "_handle", lambda line: 1 / 0)
    with pytest.raises(McpError, match="cannot be read: ZeroDivisionError"):
        server.call("echo", {}, 60)


@pytest.mark.full
def test_a_server_that_starts_slowly_does_not_hold_the_calls_of_another_one(tmp_path):
    slow, quick = tmp_path / "slow.py", tmp_path / "quick.py"
    dies_once = f"if name == 'die': open({str(tmp_path / 'died')!r}, 'w'); os._exit(3)\n"
    waits = f"import os\nif os.path.exists({str(tmp_path / 'died')!r}): import time; time.sleep(6)\n"
    slow.write_text(waits + HOSTILE % f"TOOLS = [{{'name': 'die'}}]\ndef tool(m, name):\n  {dies_once}")
    quick.write_text(HOSTILE % "")
    tools = McpTools([[sys.executable, "-S", str(file)] for file in (slow, quick)], 1.0)
    try:
        with tools.episode() as found, ThreadPoolExecutor(1) as pool:
            with pytest.raises(McpError, match="exit code 3"):
                asyncio.run(found["die"].call({}))
            starting = pool.submit(asyncio.run, found["die"].call({}))
            began = time.monotonic()
            assert asyncio.run(found["echo"].call({})) == "echo"
            assert time.monotonic() - began < 10
            assert not starting.done()
            with pytest.raises(McpError):
                starting.result(60)
    finally:
        tools.close()


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

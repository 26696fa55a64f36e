"""Each adapter trains a small environment of its kind end to end (verifiers: test_verifiers.py)."""

import sys

import pytest
from openenv_server import SERVER
from training_runs import metrics, train

pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.full]

FEW = ("train_dataset.batch_size=4", "evaluator.size=4", "total_train_steps=2", "gconfig.temperature=1.5")
CONTROL = ("actor.path=embedded:tiny-control", "train_dataset.path=env", "gconfig.max_new_tokens=1")

GAME = '''
class Game:
    """A TRL environment: its tools are never called by a model without a chat template."""

    def reset(self, **columns):
        self.question = columns["question"]

    def hint(self) -> str:
        """Give a hint."""
        return "no"


def short(completions, environments, **_):
    assert environments[0].question
    return [float(-len(completions[0][-1]["content"]))]
'''

ADDER = """
import json, sys
for line in sys.stdin:
    m = json.loads(line)
    text = m.get("params", {}).get("arguments", {}).get("sum", "0")
    results = {
        "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}},
        "tools/list": {"tools": [{"name": "add", "inputSchema": {
            "type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}}]},
        "tools/call": {"content": [{"type": "text", "text": str(sum(int(x) for x in text.split("+") if x.isdigit()))}]},
    }
    if "id" in m and m["method"] in results:
        print(json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": results[m["method"]]}), flush=True)
"""


def trained(path):
    """The rows of the two steps, after checks that hold for every adapter."""
    rows = [row for row in metrics(path) if "reward/mean" in row]
    assert len(rows) == 2
    assert not [name for row in rows for name in row if name.startswith("episode/failures_") and row[name]]
    assert any(row["grad/norm"] > 0 for row in rows)
    return rows


def test_a_gymnasium_environment(tmp_path):
    seen = "env.options.observation={levels: 11, low: [-1, -2, -0.2, -2], high: [1, 2, 0.2, 2]}"
    how = ("env.path=gymnasium:CartPole-v1", "env.max_turns=12", "env.options.max_steps=12", seen)
    _, path = train(tmp_path, *FEW, *CONTROL, *how, "actor.sequence_unit=turn")
    for row in trained(path):
        assert row["episode/sequences_mean"] == 1
        assert 1 < row["episode/turns_mean"] <= 12
        assert 0 < row["reward/part_invalid"] < 1  # an untrained model also says 2, 3 and 4
        assert row["reward/mean"] == pytest.approx(row["reward/part_return"])


def test_an_openenv_server_that_is_started_with_the_run(tmp_path):
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "app.py").write_text(SERVER)
    how = (f"env.path=openenv:{tmp_path}", "env.options.sessions=2", "env.options.max_steps=3", "env.max_turns=3")
    _, path = train(tmp_path / "runs", *FEW, *CONTROL, *how, "train_dataset.size=40")
    assert all(row["episode/turns_mean"] > 1 for row in trained(path))


def test_a_class_for_trl(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    file = tmp_path / "game.py"
    _, path = train(tmp_path / "runs", *FEW, f"env.path=trl:{file}:Game", f"env.options.reward_funcs=['{file}:short']")
    assert all(row["reward/mean"] < 0 for row in trained(path))


def test_the_tools_of_an_mcp_server(tmp_path):
    (tmp_path / "adder.py").write_text(ADDER)
    server = f"env.options.mcp=[['{sys.executable}', '{tmp_path / 'adder.py'}']]"
    model = (
        "actor.path=embedded:tiny-tools",
        "train_dataset.path=embedded:arithmetic:5-5",
        "gconfig.max_new_tokens=16",
    )
    _, path = train(tmp_path / "runs", *FEW, *model, "env.path=tools", server, "env.options.max_turns=3")
    assert all(row["episode/turns_mean"] > 1 for row in trained(path))  # some episodes called the tool

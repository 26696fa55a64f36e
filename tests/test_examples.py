"""Every shipped example runs here: configs on the embedded model and task, scripts as a person would start them."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripted_client import last_prompt, play, scripted
from tiers import brief

from gspo.cli import main as cli
from gspo.report import read_metrics
from gspo.rewards import unavailable
from gspo.system import find_function
from registries.restaurants import FOOD, restaurant_rows

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(f for f in (ROOT / "examples").rglob("*.yaml") if "projects" not in f.parts)  # those: cli/test_init.py
BRIEF = [path for path in CONFIGS if path.stem in ("quickstart", "agent")]  # the others are in the long suite
HERE = ("actor.path=embedded:tiny", "train_dataset.path=embedded:arithmetic")
OTHER_MODELS = {"distill": ("teacher.path=embedded:tiny",)}  # a run of the user
TALKS = ("converse", "converse_sft")  # their rows have columns of their own
PROGRAMS = "code_gspo"  # its reward judges programs, so it keeps its own problems
SMALL = (
    "total_train_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=4", "actor.ppo_n_minibatches=2",
    "evaluator.size=8", "threads=1",
)  # fmt: skip


def python(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=250, check=False, cwd=cwd,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def steps_under(root: Path) -> list[int]:
    (metrics,) = root.glob("*/*/metrics.jsonl")
    return [row["step"] for row in read_metrics(metrics.parent)]


def test_there_are_examples():
    assert {"quickstart.yaml", "gsm8k_gspo.yaml", "gsm8k_grpo.yaml"} <= {path.name for path in CONFIGS}


def _skip_if_missing(path: Path) -> None:
    if path.stem == PROGRAMS and unavailable():
        pytest.skip(unavailable())
    if path.parent.name == "robotics" and importlib.util.find_spec("mujoco") is None:
        pytest.skip("mujoco is not installed: pip install 'gspo[robotics]'")


@pytest.mark.run  # bubblewrap is started for programs
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_doctor_finds_no_problem_in_a_shipped_config(path, capsys):
    if path.stem == PROGRAMS and unavailable():
        pytest.skip(unavailable())
    # --quick: models and data sets of some examples are downloaded, so whether they can run depends on the machine.
    assert cli.main(["doctor", "--quick", str(path)]) == 0
    assert "Config: no problems found" in capsys.readouterr().out


def test_doctor_says_that_the_quick_start_can_run_on_any_machine(capsys):
    assert cli.main(["doctor", "examples/quickstart.yaml"]) == 0
    assert capsys.readouterr().out.endswith("This machine: it can run here.\n")


@pytest.mark.full
@pytest.mark.run
@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("math/gsm8k_gspo", "set actor.path to the folder"),
        ("smollm2_arithmetic", "python examples/fetch.py smollm2-135m"),
    ],
)
def test_without_network_the_doctor_names_what_an_example_lacks_and_how_to_get_it(path, remedy, tmp_path, monkeypatch):
    for name in ("GSPO_CACHE", "HF_HOME", "GSPO_DATA"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported: in a process of its own
    done = python("-m", "gspo", "doctor", f"examples/{path}.yaml")
    assert done.returncode == 1, done.stderr
    out = " ".join(done.stdout.split())
    assert "Config: no problems found" in out
    assert "This machine: it cannot run here" in out
    assert remedy in out


@pytest.mark.run
@pytest.mark.parametrize("path", brief(CONFIGS, *BRIEF), ids=lambda path: path.stem)
def test_a_shipped_config_trains_on_the_embedded_model_and_task(path, tmp_path, monkeypatch, capfd):
    _skip_if_missing(path)
    here = HERE[:1] if path.stem == PROGRAMS else HERE
    if path.stem in TALKS:
        here = (HERE[0], f"train_dataset.path={_talks(tmp_path / 'data')}")
        if path.stem == "converse_sft":  # the embedded model has no chat template for whole talks
            here += ("train_dataset.columns.prompt=prompt",)
    small = [word for word in SMALL if not path.stem.endswith("sft") or not word.startswith("gconfig.n_samples")]
    monkeypatch.chdir(ROOT)  # configs name files below it
    code = cli.main(
        ["train", str(path), *here, *small, *OTHER_MODELS.get(path.stem, ()), f"cluster.fileroot={tmp_path}"]
    )
    out = capfd.readouterr()
    assert code == 0, out.err + out.out
    assert steps_under(tmp_path) == [0, 1, 2]


def _talks(folder: Path) -> Path:
    """Rows as `python examples/fetch.py restaurants` makes them."""
    places = [{"name": f"{food} {area}", "food": food, "area": area} for food in ("1", "2", "3") for area in ("4", "5")]
    folder.mkdir()
    for split, rows in restaurant_rows(places, [f"{'0' * n} {FOOD}" for n in range(1, 60)]).items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_simulated_user_tells_the_area_only_if_no_restaurant_was_named():
    talk = find_function(str(ROOT / "examples/converse/converse.py") + ":talk")
    row = {"area": "north", "answer": "Curry Garden", "names": ["Curry Garden", "Royal Spice", "Thai Cook"]}

    def reward(*said):
        client = scripted(*said, data=row)
        outcome = play(talk, client)
        assert len(client.asked) == len(said)
        if len(said) == 2:
            assert "In the north, please." in last_prompt(client)
        return outcome["reward"]

    assert reward("Which area?", "Try the curry garden.") == 1.0
    assert reward("Try Curry Garden.") == 0.3
    assert reward("Which area?", "Royal Spice") == 0.1 == reward("Royal Spice")
    assert reward("Which area?", "I do not know.") == 0.0
    assert reward("Curry Garden or Royal Spice or Thai Cook") == 0.0


@pytest.mark.full
def test_the_script_trains_as_the_command_does(tmp_path):
    config = "examples/math/gsm8k_gspo.yaml"
    script = python(
        "examples/math/gsm8k_rl.py", "--config", config, *HERE, *SMALL, f"cluster.fileroot={tmp_path / 'script'}"
    )
    assert script.returncode == 0, script.stderr + script.stdout
    assert "2 steps" in script.stdout.splitlines()[-1]
    command = python("-m", "gspo", "train", config, *HERE, *SMALL, f"cluster.fileroot={tmp_path / 'command'}")
    assert command.returncode == 0, command.stderr
    trained = [metrics_of(tmp_path / side) for side in ("script", "command")]
    assert trained[0] == trained[1]


def metrics_of(root: Path) -> list[dict]:
    (file,) = root.glob("*/*/metrics.jsonl")
    clocks = ("time/", "throughput/")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in read_metrics(file.parent)]


# The files of docs/python.md; tests/docs/test_blocks.py runs them.

SNIPPETS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL))


@pytest.mark.run
def test_the_documented_reward_signatures_score_alike(tmp_path):
    from gspo.rewards import RewardItem, RewardPool, reward_spec
    from gspo.types import Score

    file = tmp_path / "rewards.py"
    file.write_text(SNIPPETS["rewards.py"])
    item = RewardItem("2+2=", ("4", "5"), (1, 2), ((3,), (4,)), {"answer": "4"})
    for name in ("per_completion", "areal", "trl"):
        with RewardPool(reward_spec(f"{file}:{name}"), workers=1) as pool:
            (scores,) = pool.score([item])
        assert [score.value for score in scores if isinstance(score, Score)] == [1.0, 0.0], (name, scores)


def test_the_figures_of_a_text_task_have_baselines_and_paired_gains(tmp_path, capsys):
    rows = [{"prompt": f"Sum up: {d}", "document": d, "answer": a} for d, a in (("a b c d", "x y"), ("e f g h", "z w"))]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "run.yaml"
    gates = "[{name: overlap, n: 1}, {name: length, most: 3, gate: true}]"
    config.write_text(f"reward: {{functions: {gates}}}\ntrain_dataset: {{path: {tmp_path / 'data'}}}\n")
    evals = tmp_path / "gspo" / "evals"
    evals.mkdir(parents=True)
    for step, rewards in ((0, (0.0, 0.25)), (5, (0.5, 1.0))):
        found = [{"row": i, "reward": r, "reward_parts": {"overlap": r, "length": 1.0}} for i, r in enumerate(rewards)]
        (evals / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    find_function(str(ROOT / "examples/summarise/figures.py") + ":main")(str(config), str(tmp_path / "gspo"))
    lines = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines() if line.startswith("|")}
    # Ten words of the document are four here: a copy, and too long.
    assert lines["first ten words"].split("|")[2:5] == [" 0.000 [0.000, 0.658] ", " 0.000 ", " 0.000 "]
    assert lines["the reference"].split("|")[3:5] == [" 1.000 ", " 1.000 "]
    assert "0.125" in lines["gspo, before"]
    assert lines["gspo, after step 5"].split("|")[5].strip().startswith("0.625 [")


@pytest.mark.full
def test_the_baselines_of_the_robotics_example_are_played(tmp_path):
    _skip_if_missing(ROOT / "examples/robotics/reach.yaml")
    out = tmp_path / "results.json"
    done = python("examples/robotics/play.py", "--episodes", "8", "--json", str(out))
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    assert results["random"]["success"][0] < 0.4
    assert results["scripted"]["success"][0] == 1.0

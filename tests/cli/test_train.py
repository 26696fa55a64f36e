"""A run through the command line: train, summary, resume, eval, export, checkpoints, and the names it writes."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gspo.cli import main as cli
from gspo.cli.train import show_run
from gspo.report import best_step, evaluation_view, read_metrics
from gspo.stats import pass_at_k
from gspo.train import score_figures
from gspo.types import Failure, Group, Prompt, Sample, SampleId, Score

pytestmark = pytest.mark.run

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "examples" / "quickstart.yaml")
SMALL = (
    "train_dataset.batch_size=8", "gconfig.n_samples=4", "gconfig.max_new_tokens=40", "actor.ppo_n_minibatches=2",
    "actor.optimizer.lr=2e-4", "evaluator.size=24", "evaluator.freq_steps=1", "saver.freq_steps=1", "threads=1",
)  # fmt: skip


def arguments(root: Path, *overrides: str) -> list[str]:
    return ["train", QUICKSTART, *SMALL, f"cluster.fileroot={root}", *overrides]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps, and what the command printed."""
    root = tmp_path_factory.mktemp("runs")
    done = gspo(*arguments(root, "total_train_steps=2"))
    assert done.returncode == 0, done.stderr
    return root / "quickstart" / "gspo", done.stdout


def gspo(*args: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "gspo", *args],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "160", **env},
    )  # fmt: skip


def test_train_ends_with_a_summary_the_run_the_picture_and_the_next_commands(trained):
    run, said = trained
    first = "GSPO (one ratio per completion), clip 2e-3/2.5e-3, 2 updates per batch, embedded:tiny, "
    assert said.startswith(first + "8 prompts × 4 completions, lr ")
    tail = said[said.index("Finished.") :]
    assert re.search(r"held-out accuracy +\d+\.\d% \(\S+\) → \d+\.\d% \(\S+\) +on 24 problems", tail)
    assert re.search(r"clipped +\d+\.\d% low \+ \d+\.\d% high, \d+ of \d+ sequences +at ε 0\.002 / 0\.0025", tail)
    assert re.search(r"tokens/s +[\d,]+ sampled, [\d,]+ trained", tail)
    assert all(text in tail for text in (str(run), f"gspo eval {run}", f"gspo export {run}", str(run / "training.png")))
    assert (run / "training.png").read_bytes().startswith(b"\x89PNG")
    assert f"gspo report {run} --open" in tail
    assert (run / "report.html").read_bytes().startswith(b"<!doctype html>")


@pytest.mark.full
def test_a_finished_run_prints_its_summary_and_trains_nothing(trained):
    run, _ = trained
    before = {file: file.read_bytes() for file in [run / "metrics.jsonl", *run.glob("checkpoints/*/*")]}
    again = gspo(*arguments(run.parents[1], "total_train_steps=2"))
    assert again.returncode == 0, again.stderr
    assert "nothing was trained" in again.stdout
    assert "held-out accuracy" in again.stdout
    assert {file: file.read_bytes() for file in [run / "metrics.jsonl", *run.glob("checkpoints/*/*")]} == before


def test_without_matplotlib_training_ends_well_and_says_what_to_install(trained, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what Python does with a module that is not there
    show_run(trained[0], "Finished.", {})
    assert "[report]'" in capsys.readouterr().out


@pytest.mark.full
def test_ctrl_c_saves_says_how_to_go_on_and_the_same_command_does(tmp_path):
    args = arguments(tmp_path, "total_train_steps=100000", "evaluator.freq_steps=100000")
    run = tmp_path / "quickstart" / "gspo"
    process = subprocess.Popen(
        [sys.executable, "-m", "gspo", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    while not any(row["step"] for row in read_metrics(run)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    step = read_metrics(run)[-1]["step"]
    assert "SIGINT: saving after this step" in said
    assert f"Stopped and saved after step {step}." in said
    assert "Traceback" not in errors
    assert f"resume             gspo train {QUICKSTART}" in said
    assert (run / "checkpoints" / f"step_{step:06d}" / "manifest.json").is_file()
    resumed = gspo(*args, f"total_train_steps={step + 1}")
    assert resumed.returncode == 0, resumed.stderr
    assert f"at step {step}" in resumed.stdout
    assert [row["step"] for row in read_metrics(run)] == list(range(step + 2))


def test_eval_of_a_checkpoint_agrees_with_the_accuracy_measured_in_training(trained, capsys):
    run, _ = trained
    measured = {row["step"]: row["eval/accuracy"] for row in read_metrics(run)}
    for step in (0, 2):
        assert cli.main(["eval", str(run), "--step", str(step), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["avg"]["value"] == pytest.approx(measured[step], abs=1e-12)


def test_eval_draws_several_samples_and_writes_what_it_found(trained, capsys):
    run, _ = trained
    assert cli.main(["eval", str(run), "--samples", "4", "--problems", "8", "--step", "last", "--name", "four"]) == 0
    text = capsys.readouterr().out
    written = json.loads((run / "eval_four.json").read_text())
    assert written["sampling"]["greedy"] is False
    assert (written["num_problems"], written["num_samples"], written["step"]) == (8, 4, 2)
    assert list(written["pass"]) == ["1", "2", "4"]
    rights = [p["num_correct"] for p in written["problems"]]
    assert [sum(s["correct"] for s in p["samples"]) for p in written["problems"]] == rights
    assert (written["reward"]["value"], written["graded"]) == (pytest.approx(written["avg"]["value"]), 0.0)
    assert written["avg"]["value"] == pytest.approx(sum(rights) / 32)
    assert written["pass"]["4"]["value"] == pytest.approx(sum(r > 0 for r in rights) / 8)
    for name, share in (("avg@4", written["avg"]), ("pass@2", written["pass"]["2"])):
        assert share["low"] <= share["value"] <= share["high"]
        assert re.search(rf"^{name} +{100 * share['value']:.1f}%", text, re.MULTILINE)


def test_eval_takes_a_model_and_other_data(trained, tmp_path, capsys):
    rows = tmp_path / "test.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{a}+45=", "answer": str(a + 45)}) + "\n" for a in range(11, 19)))
    args = ["--data", str(rows), "reward.functions=[numeric]", "--max-new-tokens", "40", "--json", "threads=1"]
    for target in ("embedded:tiny", str(trained[0])):
        assert cli.main(["eval", target, *args]) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["num_problems"], result["data"]) == (8, str(rows))
    out = tmp_path / "result.json"
    assert cli.main(["eval", "embedded:tiny", *args, "--out", str(out)]) == 0
    assert [len(problem["samples"]) for problem in json.loads(out.read_text())["problems"]] == [1] * 8


@pytest.mark.parametrize("verb", ["eval", "export"])
def test_a_step_that_is_not_there_is_refused_with_those_that_are(verb, trained, capsys):
    assert cli.main([verb, str(trained[0]), "--step", "7"]) == 2
    assert "available: 1, 2" in capsys.readouterr().err


def test_checkpoints_lists_them_and_finds_the_damaged_one(trained, tmp_path, capsys):
    import shutil

    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    assert cli.main(["checkpoints", str(run), "--verify"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == ["step", "1", "2"]
    best = [line.split()[0] for line in listed.splitlines() if "best" in line]
    assert best == [str(step) for step in [best_step(run)] if step]  # step 0 has no checkpoint
    assert listed.count("ok") == 2
    weights = run / "checkpoints" / "step_000001" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert cli.main(["checkpoints", str(run)]) == 0  # listing reads no bytes
    assert "DAMAGED" not in capsys.readouterr().out
    assert cli.main(["checkpoints", str(run), "--verify"]) == 1
    assert capsys.readouterr().out.count("DAMAGED") == 1


def test_a_folder_that_is_no_run_names_the_runs_below_it(trained, capsys):
    assert cli.main(["checkpoints", str(trained[0].parent)]) == 2
    assert str(trained[0]) in capsys.readouterr().err


def test_eval_of_graded_rewards_shows_the_reward_and_no_accuracy_of_zero():
    found = score_figures([replace(group(False), outcomes=(Score(r),)) for r in (-0.5, 0.5, 0.3)], 1)
    assert found["graded"] == 1.0
    out = io.StringIO()
    console = Console(file=out, width=100)
    console.print(evaluation_view("head", {**found, "seconds": 1.0}))
    text = out.getvalue()
    assert re.search(r"reward +0\.100 +-1\.214 … 1\.414", text)
    assert "avg@1" not in text
    plain = score_figures([group(True), group(False)], 1)
    console.print(evaluation_view("head", {**plain, "seconds": 1.0}))
    assert "avg@1" in out.getvalue()
    assert "pass@1" not in out.getvalue()


# What the documents promise


def test_every_metric_of_a_run_is_documented_and_every_documented_one_is_written(trained):
    documented = set(re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
    written = {
        re.sub(r"^reward/part_.*", "reward/part_<name>", name) for row in read_metrics(trained[0]) for name in row
    }
    # These exist where a run has a reference, a teacher, a mixture, a critic, experts, a correction, episodes,
    # completions of its own, truncated sampling, an entropy term or a curriculum (tests/train/test_variants.py,
    # test_distillation.py, test_critic.py, test_moe_training.py, test_correction_step.py, test_agent_training.py,
    # test_sft.py, test_truncated_sampling.py, test_controls.py).
    of_variants = {
        "policy/kl_reference",
        "reward/kl_penalty",
        "time/reference_s",
        "policy/kl_teacher",
        "time/teacher_s",
        "eval/loss",
        "time/critic_s",
        "eval/<source>/<name>",
        "policy/entropy_coef",
    }
    sections = ("critic/", "moe/", "correction/", "episode/", "agent/", "kept/", "curriculum/")
    of_variants |= {name for name in documented if name.startswith(sections)}
    assert written == documented - of_variants
    assert of_variants < documented


def test_every_file_and_field_of_a_run_is_documented(trained):
    text = (ROOT / "docs" / "run-directory.md").read_text()
    run, _ = trained
    for file in run.iterdir():
        assert f"`{re.sub(r'^eval_.*', 'eval_<name>.json', file.name)}" in text, file.name
    (row, *_) = (run / "samples" / "step_000001.jsonl").read_text().splitlines()
    assert all(f"`{field}`" in text for field in json.loads(row))


def test_the_snippet_of_the_run_directory_document_reads_a_run(trained):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "run-directory.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code.replace('"runs/quickstart/gspo"', repr(str(trained[0]))), names)
    assert len(names["rows"]) == 32
    assert names["kept"]
    by_number = {row["sequence"]: row for row in names["rows"]}
    for number, drift in names["drift"].items():
        assert len(drift) == by_number[number]["length"]


# pass@k


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one():
    from itertools import combinations

    for total, right in ((5, 0), (5, 2), (6, 5), (4, 4)):
        marks = [True] * right + [False] * (total - right)
        for k in range(1, total + 1):
            draws = list(combinations(marks, k))
            assert pass_at_k(total, right, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def group(*marks: bool | None) -> Group:
    samples = tuple(Sample.of(SampleId(0, i), [1, 2], [0.0, 0.0], 0) for i in range(len(marks)))
    outcomes = tuple(Failure("timeout", "late") if m is None else Score(float(m)) for m in marks)
    return Group(0, Prompt((1,), "?"), samples, ("",) * len(marks), outcomes)


def test_a_failed_reward_is_no_wrong_answer():
    found = score_figures([group(True, None, None), group(False, False, True)], 3)
    assert found["avg"]["value"] == pytest.approx((1 + 1 / 3) / 2)
    assert found["pass"]["3"] == pytest.approx({"value": 1.0, "low": 0.2065, "high": 1.0, "problems": 1}, abs=1e-3)
    assert found["reward_failures"] == 2
    nothing = score_figures([group(None)], 1)
    assert nothing["avg"] == {"value": None, "low": None, "high": None, "problems": 0}


@pytest.mark.run
def test_preview_shows_prompts_completions_and_rewards_and_writes_nothing(tmp_path, monkeypatch, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("actor: {path: embedded:tiny}\ntrain_dataset: {path: embedded:arithmetic, batch_size: 4}\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["preview", str(config), "--prompts", "2", "--samples", "2", "threads=1"]) == 0
    out = capsys.readouterr().out
    assert out.count("── prompt") == 2
    assert len(re.findall(r"── completion, reward [01]\n", out)) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    assert cli.main(["preview", str(config), "--samples", "0"]) == 2
    # Of an episode every turn is shown: the first prompt's first answer is wrong, and the environment asks again.
    again = ["env.path=self_correct", "env.options.feedback='0+0='"]
    assert cli.main(["preview", str(config), "--prompts", "1", "threads=1", *again]) == 0
    assert re.search(r"── completion, reward .*\n.*>\d+‹0\+0=›.", capsys.readouterr().out)


def test_a_run_that_its_learning_rate_destroyed_is_not_offered_for_export_and_gets_no_eps(tmp_path):
    fast = ("actor.optimizer.lr=5e-3", "total_train_steps=8", "evaluator.size=64", "evaluator.freq_steps=8")
    done = gspo(*arguments(tmp_path, *fast))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "quickstart" / "gspo"
    rewards = [row["reward/mean"] for row in read_metrics(run) if row["step"] > 0]
    assert rewards[0] > 0.1
    assert rewards[-1] == 0  # the fault happened
    tail = done.stdout[done.stdout.index("Finished.") :]
    assert "Set actor.optimizer.lr lower." in tail
    assert "gspo export" not in tail
    boot = re.search(r'class="boot">(.*?)</script>', (run / "report.html").read_text(), re.DOTALL)
    shown = json.loads(boot[1])["overview"]
    assert shown["suggested"] is None
    assert not any("would have clipped" in answer["more"] for answer in shown["answers"])

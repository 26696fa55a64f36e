"""`gspo study run` as a person starts it, on a study of two steps."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gspo.studies import plan, results
from gspo.system import all_processes, descendants

pytestmark = pytest.mark.run

CONFIG = """
algorithm: gspo
total_train_steps: 2
threads: 1
actor: {path: "embedded:tiny", ppo_n_minibatches: 2, eps_clip: 0.002, eps_clip_higher: 0.0025}
gconfig: {n_samples: 4, max_new_tokens: 32}
train_dataset: {path: "embedded:arithmetic:2", size: 64, batch_size: 2}
evaluator: {freq_steps: 1, size: 8}
saver: {freq_steps: 1}
"""
STUDY = """
claim: a test
about: two steps
base: base.yaml
seeds: [1, 2]
arms:
  gspo: {}
  random: {reward.functions: [{name: final, marker: ">"}, "gspo.studies.control:coin"], reward.weights: [0.0, 1.0]}
measures: [start, final, reward_area]
checks: [{says: it stands still, measure: gain, arm: gspo, side: above, margin: -2}]
"""


@pytest.fixture
def study(tmp_path):
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "short.yaml").write_text(STUDY)
    return tmp_path


def command(folder, *words):
    places = ["--docs", str(folder / "docs"), "--runs", str(folder / "runs")]
    return [sys.executable, "-m", "gspo", "study", "run", str(folder / "short.yaml"), *places, *words]


def run(folder, *words, code=0):
    done = subprocess.run(command(folder, *words), capture_output=True, text=True, timeout=1200)
    assert done.returncode == code, done.stderr
    return done


def recorded(folder):
    return results.read_records(folder / "docs", plan.find_study(str(folder / "short.yaml")))


def records(folder):
    return json.loads((folder / "docs" / "short.json").read_text())["records"]


@pytest.mark.full
def test_arms_times_seeds_become_records_and_nothing_is_made_twice(study):
    first = run(study, "--jobs", "2", "--seeds", "1")
    assert "short: 2 new runs, 0 found, 0 failed" in first.stdout
    found = {(r["arm"], r["seed"]): r for r in records(study)}
    assert set(found) == {("gspo", 1), ("random", 1)}
    # The control is paid by a coin, and still judged by the truth: before training both arms are one model.
    assert found["gspo", 1]["measures"]["start"] == found["random", 1]["measures"]["start"]
    assert found["gspo", 1]["measures"]["reward_area"] != found["random", 1]["measures"]["reward_area"]
    (one,) = [r for r in recorded(study) if r["arm"] == "gspo"]
    assert one["config"]["actor.eps_clip"] == 0.002
    assert one["config"]["seed"] == 1
    assert one["train"].startswith("gspo train ")
    assert one["command"].startswith("gspo study run")
    assert {"torch", "transformers", "python"} <= one["versions"].keys()
    assert one["machine"]
    assert one["date"]
    assert one["took"]["cpu_s"] > 0
    # Weights are not kept, what explains the run is.
    kept = next((study / "runs").rglob("metrics.jsonl")).parent
    assert (kept / "config.yaml").exists()
    assert not (kept / "checkpoints").exists()
    again = run(study, "--jobs", "2", "--seeds", "1")
    assert "short: 0 new runs, 2 found, 0 failed" in again.stdout
    assert "too few" in again.stdout or "one seed" in again.stdout


@pytest.mark.full
def test_an_arm_of_two_stages_starts_from_the_model_of_the_first(study):
    supervised = CONFIG.replace("algorithm: gspo", "algorithm: sft").replace("n_samples: 4, ", "")
    supervised = supervised.replace(
        "ppo_n_minibatches: 2, eps_clip: 0.002, eps_clip_higher: 0.0025", "optimizer: {lr: 3.0e-3}"
    )
    (study / "sft.yaml").write_text(supervised.replace("size: 64", "columns: {completion: solution}, size: 64"))
    # The second stage changes nothing, so what it shows at its end is what the first stage made.
    frozen = "actor.optimizer.lr: 1.0e-12"
    stages = STUDY.replace("  random", f"  two stages: {{first: sft.yaml, {frozen}}}\n  random")
    (study / "short.yaml").write_text(stages.replace("gspo: {}", f"gspo: {{{frozen}}}"))
    run(study, "--seeds", "1")
    found = {r["arm"]: r for r in recorded(study)}
    assert found["two stages"]["measures"]["start"] == found["two stages"]["measures"]["final"]
    assert found["two stages"]["measures"]["start"] != found["gspo"]["measures"]["start"]
    assert found["two stages"]["config"]["first"]["algorithm"] == "sft"
    assert "actor.path=runs/" in found["two stages"]["train"].split(" && ")[1]
    assert "3 found" in run(study, "--seeds", "1").stdout


@pytest.mark.full
def test_a_run_that_cannot_be_made_is_told_with_its_log_and_the_exit_code(study):
    (study / "base.yaml").write_text(CONFIG.replace("embedded:tiny", "/nowhere/model"))
    done = run(study, "--only", "gspo", "--seeds", "1", code=1)
    assert "/nowhere/model" in done.stderr
    assert "job_seed1.log" in done.stderr


@pytest.mark.full
def test_a_tuned_study_tries_its_grid_and_goes_on_with_the_best_on_other_seeds(study):
    tune = """
tune:
  seeds: [7]
  by: reward_area
  grid: {lr: [{actor.optimizer.lr: 1.0e-5}, {actor.optimizer.lr: 2.0e-4}]}
"""
    (study / "short.yaml").write_text(
        STUDY.replace("  random", "  other").replace("checks:", "plots: []\nchecks:") + tune
    )
    done = run(study, "--seeds", "1")
    assert "short: 6 new runs, 0 found, 0 failed" in done.stdout
    found = records(study)
    tried = {r["arm"]: r["measures"]["reward_area"] for r in found if r["stage"] == "tune"}
    assert set(tried) == {"gspo lr=1e-05", "gspo lr=0.0002", "other lr=1e-05", "other lr=0.0002"}
    configs = json.loads((study / "docs" / "short.json").read_text())["configs"]
    for arm in ("gspo", "other"):
        (tested,) = [r for r in found if r["stage"] == "test" and r["arm"] == arm]
        assert tested["seed"] == 1
        # Of two equals the first is taken.
        best = max(("1e-05", "0.0002"), key=lambda lr: tried[f"{arm} lr={lr}"])
        assert configs[tested["digest"]]["actor.optimizer.lr"] == float(best)
    assert "short: 0 new runs, 6 found, 0 failed" in run(study, "--seeds", "1").stdout


@pytest.mark.full
def test_a_killed_study_goes_on_and_ends_as_if_it_had_not_been(study, tmp_path_factory):
    longer = CONFIG.replace("total_train_steps: 2", "total_train_steps: 12")
    (study / "base.yaml").write_text(longer)
    process = subprocess.Popen(
        command(study, "--only", "gspo", "--seeds", "1"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while not list((study / "runs").rglob("checkpoints/step_000003")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(10)  # the worker sees that nobody waits for it, saves and ends
    assert not (study / "docs").exists()
    interrupted = list((study / "runs").rglob("metrics.jsonl"))
    assert interrupted
    assert len(interrupted[0].read_text().splitlines()) < 13
    run(study, "--only", "gspo", "--seeds", "1")
    other = tmp_path_factory.mktemp("whole")
    for name in ("base.yaml", "short.yaml"):
        (other / name).write_text((study / name).read_text())
    run(other, "--only", "gspo", "--seeds", "1")
    (ours,), (theirs,) = records(study), records(other)
    assert ours["curves"] == theirs["curves"]
    assert ours["digest"] == theirs["digest"]


@pytest.mark.full
def test_a_study_whose_process_group_is_terminated_leaves_no_process_behind(study):
    (study / "base.yaml").write_text(CONFIG.replace("total_train_steps: 2", "total_train_steps: 400"))
    process = subprocess.Popen(
        command(study, "--only", "gspo", "--seeds", "1"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list((study / "runs").rglob("checkpoints/step_000002")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    below = descendants(process.pid)
    assert below
    os.killpg(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 130
    assert not [pid for pid, _ in all_processes() if pid in below]
    assert "1 run to do, 2 at a time" in said
    assert str(study / "docs" / "short.json") in said

"""The comparison runs as a user would start it; figures are read from what it wrote."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from gspo.lab.bench import page
from gspo.lab.bench.compare import _run, has_peer, slope
from gspo.lab.bench.timeline import breakdown
from gspo.lab.bench.workloads import WORKLOADS, reward, workload_rows, write_workload_model


def bench(*words):
    # On one core: threads that wait for each other by spinning are slow beside other tests.
    core = {min(os.sched_getaffinity(0))}
    done = subprocess.run(
        [sys.executable, "-m", "gspo", "bench", *words],
        capture_output=True, text=True, timeout=280, preexec_fn=lambda: os.sched_setaffinity(0, core),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_row_of_a_workload_has_the_promised_length_and_sparse_leaves_one_group_in_eight():
    for workload in WORKLOADS.values():
        data = workload_rows(workload, 16)
        assert {len(row["prompt"].split()) for row in data} == {workload.prompt_tokens}
        assert sum(not row["flat"] for row in data) == 2 * (8 - workload.flat_of_8)
    scores = reward(["w5 w9", "w7 w2", "w5 w9"], flat=[False, False, True])
    assert scores[0] != scores[1]
    assert scores[2] == 0.0


@pytest.mark.full
def test_ours_alone_prints_a_table_and_writes_the_page(tmp_path):
    out = bench("--workload", "tiny", "--no-peer", "--steps", "2", "--rounds", "1", "--write", str(tmp_path))
    assert "tiny" in out
    known = json.loads((tmp_path / "performance.json").read_text())["workloads"]["tiny"]
    assert known["ours"]["step_s"] > 0
    assert "trl" not in known
    # Every share of a phase is counted once: they sum to the whole.
    for shares in known["breakdown"].values():
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-6)
        assert shares["matrix products"] > 0.02
    text = (tmp_path / "performance.md").read_text()
    assert "| tiny |" in text
    assert "Where a step's time goes" in text


@pytest.mark.full
@pytest.mark.skipif(not has_peer(), reason="TRL is not installed (extra bench)")
def test_trl_does_the_same_work_and_the_ratio_is_of_the_two_times():
    found = json.loads(bench("--workload", "tiny", "--steps", "2", "--rounds", "1", "--json"))["workloads"]["tiny"]
    assert found["ratio"] == pytest.approx(found["trl"]["step_s"] / found["ours"]["step_s"])
    assert found["trl"]["rollout_s"] < found["trl"]["step_s"]
    assert found["trl_default"]["step_s"] > 0


def test_a_page_of_two_runs_keeps_what_the_second_did_not_measure(tmp_path):
    path = tmp_path / "performance.json"
    path.write_text(json.dumps({"machine": {"date": "x"}, "workloads": {"a": 1, "b": 2}, "sweep": [3]}))
    merged = page.merge(path, {"machine": {"date": "y"}, "workloads": {"b": 5}})
    assert merged == {"machine": {"date": "y"}, "workloads": {"a": 1, "b": 5}, "sweep": [3]}


def test_the_slope_is_that_of_least_squares():
    assert slope([0, 1, 2, 5], [1, 3, 5, 11]) == pytest.approx(2.0)


def test_self_time_is_what_nested_operators_leave(tmp_path):
    def event(name, ts, dur, cat="cpu_op"):
        return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": 1, "cat": cat}

    trace = tmp_path / "t.json"
    events = [
        event("train", 0, 100, "user_annotation"),
        event("aten::linear", 10, 40),
        event("aten::mm", 15, 30),
        event("aten::mul", 60, 10),
        event("aten::mul", 200, 50),
    ]
    trace.write_text(json.dumps({"traceEvents": events}))
    shares = breakdown(trace)["train"]
    assert shares["matrix products"] == pytest.approx(0.4)
    assert shares["other operators"] == pytest.approx(0.1)
    assert shares["outside operators"] == pytest.approx(0.5)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not has_peer(), reason="TRL is not installed (extra bench)")
def test_both_sides_show_the_same_images_and_their_passes_through_the_tower_are_counted(tmp_path):
    small = replace(WORKLOADS["vision"], visual_tokens=256, num_prompts=2, num_samples=4, new_tokens=4)
    write_workload_model(small, tmp_path)
    ours, peer = (_run(side, small, str(tmp_path)) for side in ("ours", "peer"))
    # Per step. Ours: for sampling and for training. TRL: each sample's image, for sampling, π_old and training.
    assert (ours["tower_images"], peer["tower_images"]) == (4, 24)
    frozen = _run("ours", replace(small, frozen=True), str(tmp_path))
    assert frozen["tower_images"] == 2

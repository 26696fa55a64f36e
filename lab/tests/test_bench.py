"""The comparison runs as a user would start it; figures are read from what it wrote."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from lab.bench import page
from lab.bench.commits.compare import ratio_of
from lab.bench.compare import has_peer, run_side, slope
from lab.bench.sampler import measure_side, sampler_table
from lab.bench.timeline import breakdown
from lab.bench.workloads import TINY, WORKLOADS, Workload, reward, workload_rows, write_workload_model


def bench(*words, code=0):
    # On one core: threads that wait for each other by spinning are slow beside other tests.
    core = {min(os.sched_getaffinity(0))}
    done = subprocess.run(
        [sys.executable, "-m", "gspo", "bench", *words],
        capture_output=True, text=True, timeout=580, preexec_fn=lambda: os.sched_setaffinity(0, core),
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout if not code else done.stderr


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
@pytest.mark.timeout(600)  # five processes, each with its imports, on one core
def test_trl_does_the_same_work_and_the_ratio_is_of_the_two_times():
    found = json.loads(bench("--workload", "tiny", "--steps", "2", "--rounds", "1", "--json"))["workloads"]["tiny"]
    assert found["ratio"] == pytest.approx(found["trl"]["step_s"] / found["ours"]["step_s"])
    assert found["trl"]["rollout_s"] < found["trl"]["step_s"]
    assert found["trl_default"]["step_s"] > 0


def test_a_page_of_two_runs_keeps_what_the_second_did_not_measure(tmp_path):
    path = tmp_path / "performance.json"
    path.write_text(json.dumps({"machine": {"date": "x"}, "workloads": {"a": 1, "b": 2}, "sweep": [3]}))
    merged = page.merge(path, {"machine": {"date": "y"}, "workloads": {"b": 5}})
    dates = {"a": "x", "b": "y", "sweep": "x"}
    assert merged == {"machine": {"date": "y"}, "workloads": {"a": 1, "b": 5}, "sweep": [3], "dates": dates}
    path.write_text(json.dumps(merged))
    assert page.merge(path, {"machine": {"date": "z"}, "sweep": [4]})["dates"] == {"a": "x", "b": "y", "sweep": "z"}


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
    ours, peer = (run_side(side, small, str(tmp_path)) for side in ("ours", "peer"))
    # Per step. Ours: for sampling and for training. TRL: each sample's image, for sampling, π_old and training.
    assert (ours["tower_images"], peer["tower_images"]) == (4, 24)
    frozen = run_side("ours", replace(small, frozen=True), str(tmp_path))
    assert frozen["tower_images"] == 2


@pytest.mark.full
def test_a_commit_is_as_fast_as_itself():
    # Step by step and by CPU seconds, so that a busy machine changes little. The tree may have uncommitted changes.
    [found] = json.loads(bench("--compare", "HEAD", "--rounds", "1", "--steps", "6", "--threshold", "0.3", "--json"))
    assert found["pairs"] == 5
    assert 0.75 < found["cpu_ratio"][0] < 1.3
    assert not found["slower"]


@pytest.mark.run
def test_an_unknown_commit_is_refused_with_its_name():
    assert "--compare nosuch: git has no sources of this commit" in bench("--compare", "nosuch", code=2)


def test_a_ratio_is_of_medians_and_its_interval_contains_it():
    pairs = {"new": [{"cpu_s": x} for x in (1.0, 1.1, 1.2, 9.0)], "old": [{"cpu_s": 1.0}] * 4}
    middle, low, high = ratio_of(pairs, "cpu_s")
    assert middle == pytest.approx(1.15)
    assert low <= middle <= high


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(not has_peer(), reason="TRL is not installed (extra bench)")
def test_both_sides_play_the_turns_of_an_episode(tmp_path):
    w = Workload("episode", TINY, 2, 4, 8, 4, num_turns=3, reply_tokens=5)
    assert (w.sampled_tokens, w.completion_tokens) == (12, 22)
    write_workload_model(w, tmp_path)
    for side in ("ours", "peer"):  # TRL's side checks that no turn ended early
        found = run_side(side, w, str(tmp_path))
        assert found["train_tokens_s"] * found["train_s"] == pytest.approx(8 * (8 + 22))
        assert found["rollout_tokens_s"] * found["rollout_s"] == pytest.approx(8 * 12)


@pytest.mark.run
def test_our_sampler_and_generate_sample_the_same_number_of_tokens(tmp_path):
    w = Workload("sampler", TINY, 2, 2, 8, 6)
    write_workload_model(w, tmp_path)
    for side in ("ours", "transformers"):  # each checks the number of tokens itself
        found = measure_side(side, w, str(tmp_path))
        assert found["tokens_s"] == pytest.approx(2 * 2 * 6 / found["wall_s"])


def test_the_table_of_samplers_leaves_out_an_engine_that_is_not_installed():
    shape = {"num_prompts": 4, "num_samples": 8, "prompt_tokens": 44, "new_tokens": 48}
    sides = {"ours": {"tokens_s": 200.0, "cpu_s": 2.0}, "transformers": {"tokens_s": 100.0, "cpu_s": 4.0}}
    head, row = sampler_table([{"workload": shape, "sides": sides}])
    assert "vLLM" not in " ".join(head)
    assert row == ["32", "44 / 48", "200", "100", "2.00"]

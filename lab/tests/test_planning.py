"""The validation of `gspo plan`: the calibration, and the table that it writes."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from gspo.errors import GspoError
from lab.planning import scaling, validate
from lab.planning.calibrate import costs_of, predict, slowdown_of
from lab.planning.simulation import Work, recorded_lengths
from lab.planning.trial import MODELS

SAMPLER = {"decode_s": [0.01, 0.02, 0.04, 0.1], "context_s": 1e-6, "prefill_token_s": 1e-4, "load_s": 0.01}
LENGTHS = [10, 20, 40, 96, 96]
INLINE = {"step_s": 5.0, "rollout_s": 2.5, "sync_s": 0.0, "staleness": 0.0, "tokens": 192 * 52.4, "lengths": LENGTHS}
SERVED = {"step_s": 5.6, "rollout_s": 2.9, "sync_s": 0.2, "staleness": 0.0, "tokens": 192 * 52.4}


def work():
    w = MODELS["1M"]
    return Work(w.num_prompts, w.num_samples, w.prompt_tokens, recorded_lengths(LENGTHS), num_steps=40)


def test_the_calibration_reproduces_the_runs_that_it_was_made_from():
    found = {**SAMPLER, **costs_of(SAMPLER, INLINE, SERVED, work())}
    assert predict(found, work(), num_servers=0).step_s == pytest.approx(INLINE["step_s"], rel=0.02)
    assert predict(found, work(), num_servers=1).step_s == pytest.approx(SERVED["step_s"], rel=0.02)


def test_a_slowdown_is_a_median_ratio_and_never_a_gain():
    assert slowdown_of(SAMPLER, [{"decode_s": [0.012, 0.024, 0.048, 0.9]}]) == pytest.approx(1.2)
    assert slowdown_of(SAMPLER, [{"decode_s": [0.009, 0.019, 0.03, 0.09]}]) == 1.0


def test_the_table_counts_only_runs_that_the_calibration_did_not_use():
    known = {"sampler": {**SAMPLER, "slowdown": 1.0}, "runs": {"0/0": INLINE, "1/0": SERVED}}
    results = {"date": "today", "processor": "a CPU", "models": {"1M": known}}
    assert "No run was predicted yet" in "\n".join(validate.validation_table(results))
    right = validate.predictions(MODELS["1M"], {**known, "runs": {**known["runs"], "2/0": SERVED}})["2/0"]["step_s"]
    known["runs"]["2/0"] = {**SERVED, "step_s": right / 1.1}
    known["runs"]["0/1"] = {**INLINE, "step_s": 1.0}  # far from any prediction
    text = "\n".join(validate.validation_table(results))
    assert "Of 2 runs that the calibration did not use, 1 are within 15%" in text
    assert "+10%" in text


def test_a_section_of_a_page_is_replaced_and_the_rest_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a -->\nold\n<!-- b -->\nafter\n")
    validate.write_section(page, "<!-- a -->", "<!-- b -->", ["new"])
    assert page.read_text() == "before\n<!-- a -->\n\nnew\n\n<!-- b -->\nafter\n"
    with pytest.raises(GspoError, match="has no lines"):
        validate.write_section(page, "<!-- c -->", "<!-- b -->", [])


def test_the_plan_for_large_clusters_is_no_slower_than_today():
    today, planned = (scaling._row(small_job(64, pipelined=pipelined), 2) for pipelined in (False, True))
    assert planned["step_s"] < today["step_s"]
    assert planned["weights_s"] < 1 < today["weights_s"]


def small_job(num_gpus, **changes):
    job = scaling.job_on("7B", "H100", num_gpus, 200.0, 0.5, 512)
    return replace(job, work=replace(job.work, num_groups=32, group_size=4), **changes)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_validation_measures_predicts_and_continues_where_it_stopped(tmp_path):
    (tmp_path / "planning.md").write_text(f"{validate.BEGIN}\n{validate.END}\n")
    words = [sys.executable, "-m", "lab.planning.validate", "--docs", str(tmp_path), "--model", "1M", "--eta", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "results" / "planning.json").read_text())["models"]["1M"]["runs"]
    assert set(runs) == {"0/0", "1/0", "0/1", "1/1", "2/1"}
    assert 0 < runs["1/1"]["staleness"] <= 1
    assert "| 1M | 2 servers | 1 |" in (tmp_path / "planning.md").read_text()
    again = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0
    assert "s/step" not in again.stderr  # nothing was measured again

"""`make accept`: the report of a machine's checks."""

import json

import pytest

from lab import accept
from lab.accept import AcceptOutcome, Trial


def test_without_a_gpu_its_checks_are_skipped_with_the_reason():
    found = {check.name: check.absent for check in accept.checks(0)}
    assert found["bfloat16"] == found["vLLM"] == "there is no GPU"
    assert found["two ranks"] == found["quick-start"] == ""
    assert "NCCL needs two" in {check.name: check.absent for check in accept.checks(1)}["two ranks"]


def test_the_report_has_figures_reasons_and_the_output_of_a_failure():
    about = {"platform": "Linux", "cores": 2, "gpus": [], "cuda": None, "packages": {"torch": "2.13"}}
    outcomes = [
        AcceptOutcome("quick-start", "gspo train quickstart", "passed", 61.2, {"accuracy": [0.326, 0.992]}),
        AcceptOutcome("vLLM", "gspo train", "skipped", reason="there is no GPU"),
        AcceptOutcome("bench", "gspo bench", "failed", 3.0, reason="exit code 1\nTraceback\nValueError: x"),
    ]
    text = accept.to_markdown(about, outcomes)
    assert "| quick-start | passed | 61 | accuracy 0.326 → 0.992 | `gspo train quickstart` |" in text
    assert "| vLLM | skipped | 0 | there is no GPU |" in text
    assert "ValueError: x" in text.partition("## bench")[2]


def test_a_run_that_does_not_learn_fails(tmp_path):
    folder = tmp_path / "runs" / "quickstart" / "gspo"
    folder.mkdir(parents=True)
    rows = [{"step": i, "eval/accuracy": 0.3, "time/step_s": 1.0} for i in range(3)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(AssertionError, match=r"0\.300 → 0\.300; expected more than 0\.9"):
        accept._learned(tmp_path, "")
    with pytest.raises(AssertionError, match="the steps 0 to 62"):
        accept._resumed(tmp_path, "")


@pytest.mark.run
def test_a_command_that_fails_is_a_failed_check_with_its_output(tmp_path):
    found = accept.run(Trial("wrong", ["train", "no_such_example"]), tmp_path)
    assert found.status == "failed"
    assert "no_such_example" in found.reason


@pytest.mark.run  # the platform's name is asked of a process
def test_a_gpu_that_is_not_there_is_said_before_anything_runs(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert accept.main(["--gpu"]) == 2
    assert "make accept" in capsys.readouterr().err
    assert accept.main(["--only", "nonsense"]) == 2


@pytest.mark.full
def test_the_self_test_passes_as_a_check(tmp_path):
    assert accept.main(["--only", "self-test", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "accept.json").read_text())
    (check,) = found["checks"]
    assert check["status"] == "passed"
    assert check["figures"]["gradient"] < 1e-6
    assert "self-test | passed" in (tmp_path / "accept.md").read_text()

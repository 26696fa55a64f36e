"""`TRLCallback` with TRL's real trainer: what it records is what TRL computes, and it changes no number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

trl = pytest.importorskip("trl", reason="needs the test extra: pip install .[test]")

import torch  # noqa: E402
from trl_runs import GROUP, make_trainer, text_reward  # noqa: E402

from gspo.audit import TRLCallback  # noqa: E402
from gspo.cli.reports import words_of, write_report_of  # noqa: E402
from gspo.errors import ConfigError  # noqa: E402
from gspo.report import open_run, read_block, read_metrics, sample_steps, status_of  # noqa: E402  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]


def trained(folder, path=None, **settings):
    """A trained TRL trainer, recorded in `path` if there is one."""
    trainer = make_trainer(folder, **settings)
    if path is not None:
        trainer.add_callback(TRLCallback(trainer, path))
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """Three rollout batches of two updates with an ε that some sequences reach."""
    folder = tmp_path_factory.mktemp("narrow")
    return trained(folder / "out", folder / "run", epsilon=2e-3, epsilon_high=3e-3), folder / "run"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """ε 0.2 with sequence ratios."""
    folder = tmp_path_factory.mktemp("wide")
    return trained(folder / "out", folder / "run", epsilon=0.2), folder / "run"


def test_a_step_is_a_rollout_batch_and_report_opens_the_directory(narrow):
    _, run = narrow
    rows = read_metrics(open_run(run))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert list(sample_steps(run)) == [1, 2, 3]
    assert status_of(run, 3, {}) == "finished"
    assert write_report_of(run).read_text().count('class="samples"') == 3


def test_clip_shares_are_those_that_trl_logs_for_the_second_update(narrow):
    trainer, run = narrow
    assert_as_logged(trainer.state.log_history, run)


def assert_as_logged(history, run):
    logs = {log["step"]: log for log in history if "clip_ratio/low_mean" in log}
    low, high = [], []
    for row in read_metrics(run):
        theirs = logs[2 * row["step"]]
        assert row["clip/sequences_low"] == pytest.approx(theirs["clip_ratio/low_mean"])
        assert row["clip/sequences_high"] == pytest.approx(theirs["clip_ratio/high_mean"])
        assert row["policy/entropy"] == pytest.approx(
            np.mean([logs[2 * row["step"] - 1]["entropy"], theirs["entropy"]]), rel=0.02
        )
        assert row["grad/norm_max"] == max(logs[2 * row["step"] - i]["grad_norm"] for i in (0, 1))
        low.append(row["clip/sequences_low"])
        high.append(row["clip/sequences_high"])
    assert min(max(low), max(high)) > 0, "nothing was clipped, so nothing was compared"


def test_the_first_mini_batch_differs_from_pi_old_by_rounding_only(narrow):
    for row in read_metrics(narrow[1]):
        assert row["ratio/first_minibatch_max_abs"] < 1e-5 < row["ratio/log_s_max_abs"]
        assert row["ratio/log_s_p05"] <= row["ratio/log_s_p50"] <= row["ratio/log_s_p95"]


def test_two_processes_record_one_run(tmp_path):
    script = Path(__file__).parents[1] / "helpers" / "trl_runs.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*launch, script, tmp_path, "--recorded"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_as_logged(json.loads((tmp_path / "history.json").read_text()), tmp_path / "run")
    assert_own_texts(tmp_path / "run", with_answers=False)


def test_every_sample_keeps_its_own_text_reward_and_length(narrow):
    assert_own_texts(narrow[1], with_answers=True)


def assert_own_texts(run, with_answers):
    for step in (1, 2, 3):
        lines = (run / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 4 * GROUP
        assert len({row["length"] for row in rows}) > 1, "lengths are equal, so no mix-up could be seen"
        for row in rows:
            assert row["reward"] == pytest.approx(text_reward(row["completion"]), abs=1e-6)
            # `length` comes from the tensors after TRL's shuffle, the text from before it.
            assert row["length"] == len(row["completion"].split()) + (row["finish"] == "stop")
            assert (row["answer"] is not None) == with_answers
            assert len({other["prompt"] for other in rows if other["submission"] == row["submission"]}) == 1
        assert sorted({row["minibatch"] for row in rows}) == [0, 1]
        assert any(row["clipped"] for row in rows if row["minibatch"]) == any(read_block(run, step)["clipped"])


def test_the_callback_changes_no_weight_and_removes_its_hooks(narrow, tmp_path):
    trainer, _ = narrow
    alone = trained(tmp_path, epsilon=2e-3, epsilon_high=3e-3)
    for ours, theirs in zip(trainer.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not {"_compute_loss", "_generate_and_score_completions"} & vars(trainer).keys()


def test_eps_0_2_with_sequence_ratios_is_diagnosed(wide):
    _, run = wide
    (finding,) = words_of(run)["warnings"]
    assert finding["key"] == "epsilon"
    assert "nothing is ever clipped" in finding["message"]
    assert "set epsilon and epsilon_high to" in finding["remedy"]
    boot = json.loads(write_report_of(run).read_text().partition('class="boot">')[2].partition("</script>")[0])
    assert boot["overview"]["audit"]["system"] == "TRL"
    assert boot["overview"]["audit"]["version"] == trl.__version__
    said = {a["question"]: a for a in boot["overview"]["answers"]}
    assert "was not reached" in said["Is my ε sensible?"]["text"]
    assert "set ε" in said["Is my ε sensible?"]["more"]


def test_one_update_per_rollout_batch_is_diagnosed(tmp_path):
    trained(tmp_path / "out", tmp_path / "run", gradient_accumulation_steps=4, max_steps=2)
    rows = read_metrics(tmp_path / "run")
    assert [row["ratio/log_s_max_abs"] for row in rows] == [0.0, 0.0]
    found = [finding["message"] for finding in words_of(tmp_path / "run")["warnings"]]
    assert any("every ratio is exactly 1" in message for message in found)


def test_a_failure_of_the_audit_does_not_end_the_training(tmp_path, capsys):
    trainer = make_trainer(tmp_path / "out", max_steps=2)
    callback = TRLCallback(trainer, tmp_path / "run")
    trainer.add_callback(callback)
    callback._take_samples = lambda *_: 1 / 0
    trainer.train()
    assert trainer.state.global_step == 2
    assert capsys.readouterr().out.count("the audit stopped recording") == 1


def test_another_major_version_and_another_trainer_are_refused_by_name(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"records a trl\.GRPOTrainer, not a object"):
        TRLCallback(object())
    monkeypatch.setattr(trl, "__version__", "2.1.0")
    with pytest.raises(ConfigError, match=r"TRL 1\.x .* trl 2\.1\.0 is installed"):
        TRLCallback(object())


def test_a_directory_that_holds_a_run_is_refused(narrow, tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.add_callback(TRLCallback(trainer, narrow[1]))
    with pytest.raises(ConfigError, match="already holds a run"):
        trainer.train()

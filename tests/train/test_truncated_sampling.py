"""Runs with top-p: ratios are over the kept tokens, in a synchronous run and in one that samples ahead."""

import pytest
from training_runs import RANKED, assert_resumes, metrics, path_of, train

CUT = (
    "gconfig.top_p=0.9", RANKED, "train_dataset.batch_size=4", "gconfig.max_new_tokens=24", "evaluator.freq_steps=0",
)  # fmt: skip
AHEAD = (*CUT, "rollout.max_head_offpolicyness=2", "actor.use_decoupled_loss=true", "total_train_steps=5")


@pytest.mark.run
def test_a_run_with_top_p_passes_the_noise_test_and_without_replay_it_does_not(tmp_path, tiny):
    train(tmp_path / "exact", *CUT, "total_train_steps=2")
    train(tmp_path / "whole", *CUT, "actor.sampling_mask_replay=false", "total_train_steps=1")
    exact, whole = ([r for r in metrics(path_of(tmp_path / n)) if r["step"]] for n in ("exact", "whole"))
    assert max(row["noise/log_s_p95_abs"] for row in exact) <= 1e-6
    assert whole[0]["noise/log_s_p95_abs"] > 1e-3
    assert all(1 < row["kept/tokens_mean"] < row["kept/tokens_max"] for row in exact)
    assert all(0.9 <= row["kept/mass"] <= 1 for row in exact)
    assert all(0 <= row["kept/mass_outside"] <= 0.1 for row in exact)
    assert not [name for name in whole[0] if name.startswith("kept/")]


@pytest.mark.full
def test_a_stopped_run_goes_on_with_the_kept_sets_of_pending_groups_bit_for_bit(tmp_path, tiny):
    assert_resumes(tmp_path, *AHEAD, after=3)

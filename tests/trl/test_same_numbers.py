"""GSPOTrainer and TRL's GRPOTrainer, side by side: the same seed gives the same losses, norms, metrics and weights."""

from __future__ import annotations

from typing import Any

import pytest

trl = pytest.importorskip("trl", reason="needs the extra trl: pip install .[trl]")

from trl_runs import GSPO, UPDATES, trained  # noqa: E402

from gspo.trl import GSPOTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

NOT_COMPARED = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
# A generation batch is 16 completions of 4 prompts in micro-batches of 4; two of them are an update unless set.
GRPO = {"importance_sampling_level": "token", "epsilon": 5e-3}
LORA = {"lora": True, "epsilon": 2e-4}
CASES: dict[str, dict[str, Any]] = {
    "gspo": GSPO,
    "grpo": GRPO,
    "dr_grpo": GRPO | {"loss_type": "dr_grpo"},
    "dapo": GRPO | {"loss_type": "dapo", "epsilon_high": 6e-3},
    "bnpo": GRPO | {"loss_type": "bnpo"},
    "luspo": GSPO | {"loss_type": "luspo"},
    "cispo": GRPO | {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": GRPO | {"loss_type": "sapo"},
    "vespo": GRPO | {"loss_type": "vespo", "tolerance": 1e-5},  # its weight has the power of all tokens' ratios
    "kl": GSPO | {"beta": 0.1},
    "kl, token, no bias correction": GRPO | {"beta": 0.1, "use_bias_correction_kl": False},
    "two iterations": GSPO | {"num_iterations": 2},
    "two iterations, token, kl": GRPO | {"num_iterations": 2, "beta": 0.1},
    "four updates per batch": GSPO | {"gradient_accumulation_steps": 1},
    "one update per batch": GSPO | {"gradient_accumulation_steps": 4},
    "one update of two batches": GSPO | {"gradient_accumulation_steps": 8},
    "updates that cut a batch": GSPO | {"gradient_accumulation_steps": 3},
    "one micro-batch": GSPO | {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1},
    "truncated ones masked": GSPO | {"mask_truncated_completions": True},
    "truncated ones masked, dapo": GRPO | {"mask_truncated_completions": True, "loss_type": "dapo"},
    "entropy quantile": GRPO | {"top_entropy_quantile": 0.5},
    "entropy bonus": GSPO | {"entropy_coef": 0.01},
    "adaptive entropy": GRPO | {"use_adaptive_entropy": True, "entropy_target": 3.0},
    "dual clip": GSPO | {"delta": 1.01},
    "off-policy mask": GSPO | {"off_policy_mask_threshold": 1e-3},
    "rewards scaled by the batch": GSPO | {"scale_rewards": "batch"},
    "temperature": GSPO | {"temperature": 0.7},
    "top-p": GSPO | {"top_p": 0.9},
    "gradient checkpointing": GSPO | {"gradient_checkpointing": True},
    "tools": GSPO | {"rollout": True},
    "tools, token": GRPO | {"rollout": True, "loss_type": "dapo"},
    "lora": LORA,
    "lora, kl": LORA | {"beta": 0.1},
    "lora, gradient checkpointing": LORA | {"gradient_checkpointing": True},
}
ONE_UPDATE = ("one update per batch", "one update of two batches", "one micro-batch")  # every ratio is 1
CORE = ("gspo", "two iterations, token, kl", "tools", "lora, kl", "gradient checkpointing")


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    """The logs of both runs, and the final weights. A log-prob of 3 has a rounding of 2e-7 in float32."""
    assert len(ours.state.log_history) == len(theirs.state.log_history) > UPDATES
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() - NOT_COMPARED:
            # None: a metric of a micro-batch without trained tokens.
            allowed = max(tolerance, 5e-6) if name == "grad_norm" else tolerance  # the root of 10,000 rounded squares
            same = None if other[name] is None else pytest.approx(other[name], rel=allowed, abs=allowed)
            assert mine[name] == same, (name, mine["step"])
    weights = zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True)
    for (name, mine), (_, other) in weights:
        assert float((mine - other).detach().abs().max()) <= tolerance, name


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.run if name in CORE else pytest.mark.full) for name in CASES]
)
@pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")
def test_losses_norms_metrics_and_weights_are_those_of_trl(tmp_path, capsys, case):
    settings = dict(CASES[case])
    tolerance = settings.pop("tolerance", 1e-6)
    theirs = trained(tmp_path / "theirs", trl.GRPOTrainer, dict(settings))
    ours = trained(tmp_path / "ours", GSPOTrainer, dict(settings))
    assert "TRL's own code" not in capsys.readouterr().out, "nothing of ours was compared"
    assert_same(ours, theirs, tolerance)
    clipped = [log["clip_ratio/region_mean"] for log in theirs.state.log_history if "clip_ratio/region_mean" in log]
    if clipped and case not in ONE_UPDATE:
        assert max(clipped) > 0, "no ratio was clipped, so that clipping was not compared"

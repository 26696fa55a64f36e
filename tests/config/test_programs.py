"""What doctor says about rewards that run model-written code."""

from pathlib import Path

from gspo.config import load
from gspo.lint import ineffective, lint

EXAMPLE = Path(__file__).parents[2] / "examples" / "code" / "code_gspo.yaml"


def found(*overrides):
    return {(finding.severity, finding.key) for finding in lint(load(EXAMPLE, list(overrides)), num_gpus=0)}


def test_a_program_must_fit_into_its_rewards_time():
    assert ("error", "reward.timeout") in found("reward.timeout=5")
    assert ("error", "reward.timeout") not in found("reward.timeout=6")


def test_the_unsafe_key_is_warned_of():
    assert ("warning", "reward.allow_unsandboxed_code") in found("reward.allow_unsandboxed_code=true")
    assert ("warning", "reward.allow_unsandboxed_code") not in found()


def test_a_machine_without_bubblewrap_is_told_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ("warning", "reward.functions") in found()
    assert ("warning", "reward.functions") not in found("reward.functions=[numeric]")


def test_the_unsafe_key_is_idle_where_no_reward_runs_code():
    overrides = ["reward.allow_unsandboxed_code=true"]
    assert not any("allow_unsandboxed_code" in str(idle) for idle in ineffective(load(EXAMPLE, overrides)))
    overrides.append("reward.functions=[numeric]")
    assert any("allow_unsandboxed_code" in str(idle) for idle in ineffective(load(EXAMPLE, overrides)))

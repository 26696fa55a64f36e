"""Whole runs of the embedded mixture: its metrics, replay and a rounded sampler through the real loop."""

import pytest
from peft import PeftModel
from training_runs import assert_resumes, build_fast, logits, metrics, train
from transformers import AutoModelForCausalLM

from gspo.config import load
from gspo.errors import ConfigError, DataError
from gspo.models import embedded, load_model
from gspo.train.commands import export

pytestmark = pytest.mark.run

NAME = "embedded:tiny-moe"


@pytest.fixture
def brief(tmp_path, monkeypatch):
    build_fast(monkeypatch, tmp_path / "cache", NAME)


SHORT = (
    f"actor.path={NAME}", "total_train_steps=1", "train_dataset.batch_size=4", "gconfig.max_new_tokens=8",
    "evaluator.size=4",
)  # fmt: skip


def test_the_embedded_mixture_is_what_it_says(brief):
    model, _ = embedded.build(NAME)
    config = model.config
    assert config.num_hidden_layers >= 6
    assert config.num_experts >= 16
    assert config.num_experts_per_tok >= 2
    assert sum(p.numel() for p in model.parameters()) <= 8_000_000
    assert not config.output_router_logits  # no balancing loss comes along
    for key, value in embedded.shape(NAME).items():
        assert getattr(config, key) == value, key


def some_reward(completions, **_):
    """Differs inside a group whatever an untrained model says."""
    return [float(sum(map(ord, c)) % 3) for c in completions]


@pytest.mark.full
def test_a_run_logs_its_experts_drift_and_a_rounded_sampler_its_noise(brief, tmp_path):
    rounded = "rollout.sampler_precision=int8"
    _, path = train(tmp_path / "a", *SHORT, rounded, "actor.routing_replay=rollout", reward=some_reward)
    row = metrics(path)[-1]
    assert 0 <= row["moe/expert_flip_rate"] <= row["moe/tokens_with_flip"] <= 1
    assert [name for name in row if name.startswith("moe/flip_rate_layer_")] == [
        f"moe/flip_rate_layer_{i:02d}" for i in range(6)
    ]
    assert row["moe/sampler_flip_rate"] > 0
    assert row["noise/log_s_p95_abs"] > 1e-5
    _, path = train(tmp_path / "b", *SHORT, reward=some_reward)
    exact = metrics(path)[-1]
    assert exact["noise/log_s_p95_abs"] < row["noise/log_s_p95_abs"]
    assert exact["moe/sampler_flip_rate"] < row["moe/sampler_flip_rate"]


def test_replay_is_refused_where_it_cannot_be(tiny, tmp_path):
    with pytest.raises(DataError, match=r"actor\.routing_replay: Qwen3ForCausalLM has no router"):
        train(tmp_path, "actor.routing_replay=proximal")
    with pytest.raises(ConfigError, match="prox_logp_method rollout has no such pass"):
        train(tmp_path, "actor.routing_replay=proximal", "actor.prox_logp_method=rollout")
    with pytest.raises(ConfigError, match="vLLM returns them only with its Model Runner V2"):
        train(tmp_path, "actor.routing_replay=rollout", "rollout.backend=vllm:d2")


@pytest.mark.full
def test_an_adapter_on_experts_is_trained_resumed_and_exported(brief, tmp_path):
    how = (
        *SHORT, "total_train_steps=3", "saver.freq_steps=1", "actor.use_lora=true", "actor.lora_rank=2",
        "actor.target_modules=[all-linear,experts]", "actor.optimizer.lr=1e-2",
    )  # fmt: skip
    trainer, path = assert_resumes(tmp_path, *how, after=2, reward=some_reward)
    trained, base = logits(trainer.parts.learner.policy.model), logits(load_model(NAME))
    assert (trained - base).abs().max() > 1e-3
    config = load(path / "config.yaml").config
    merged = AutoModelForCausalLM.from_pretrained(export(config, path, 3, tmp_path / "merged", merge=True))
    assert (logits(merged) - trained).abs().max() <= 1e-5
    adapter = PeftModel.from_pretrained(load_model(NAME), str(export(config, path, 3, tmp_path / "adapter")))
    assert (logits(adapter) - trained).abs().max() <= 1e-5

"""Whole runs of the embedded mixture: its metrics, replay and a rounded sampler through the real loop."""

import signal

import pytest
import torch
from peft import PeftModel
from training_runs import digests, metrics, path_of, train
from transformers import AutoModelForCausalLM

from gspo.config import load
from gspo.errors import ConfigError, DataError
from gspo.models import embedded
from gspo.models.loading import load_model
from gspo.train.export import export
from gspo.train.loop import Leader

pytestmark = pytest.mark.run

NAME = "embedded:tiny-moe"


@pytest.fixture
def brief(tmp_path, monkeypatch):
    """A cache of its own and a recipe of two warm steps, so that building takes no time."""
    recipe = {**embedded.RECIPES[NAME], "warm": {**embedded.RECIPES[NAME]["warm"], "steps": 2}}
    monkeypatch.setitem(embedded.RECIPES, NAME, recipe)
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path / "cache"))


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
@pytest.mark.timeout(1800)
def test_the_embedded_mixture_learns_addition(tmp_path):
    """The quick start on the mixture: it starts at about a third and must have improved well before its end."""
    _, path = train(
        tmp_path, f"actor.path={NAME}", "train_dataset.path=embedded:arithmetic", "train_dataset.size=4000",
        "train_dataset.batch_size=32", "gconfig.n_samples=8", "gconfig.max_new_tokens=48", "actor.eps_clip=0.002",
        "actor.eps_clip_higher=0.0025", "actor.ppo_n_minibatches=4", "actor.optimizer.lr=5e-5", "evaluator.size=256",
        "evaluator.freq_steps=10", "total_train_steps=30",
    )  # fmt: skip
    accuracy = [row["eval/accuracy"] for row in metrics(path) if "eval/accuracy" in row]
    assert 0.2 < accuracy[0] < 0.45
    assert accuracy[-1] > accuracy[0] + 0.1


class Stopping(Leader):
    """Asked to stop during its second step."""

    def record(self, batch, report, clock):
        if self.parts.state.step == 2:
            self.parts.stop.signal = signal.SIGTERM
        super().record(batch, report, clock)


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 4, 5, 12, 6, 7, 8, 13]])).logits


@pytest.mark.full
def test_an_adapter_on_experts_is_trained_resumed_and_exported(brief, tmp_path):
    how = (
        *SHORT, "total_train_steps=3", "saver.freq_steps=1", "actor.use_lora=true", "actor.lora_rank=2",
        "actor.target_modules=[all-linear,experts]", "actor.optimizer.lr=1e-2",
    )  # fmt: skip
    trainer, path = train(tmp_path / "straight", *how, reward=some_reward)
    train(tmp_path / "stopped", *how, kind=Stopping, reward=some_reward)
    train(tmp_path / "stopped", *how, reward=some_reward)
    assert digests(path_of(tmp_path / "stopped")) == digests(path)
    trained, base = logits(trainer.parts.learner.policy.model), logits(load_model(NAME))
    assert (trained - base).abs().max() > 1e-3
    config = load(path / "config.yaml").config
    merged = AutoModelForCausalLM.from_pretrained(export(config, path, 3, tmp_path / "merged", merge=True))
    assert (logits(merged) - trained).abs().max() <= 1e-5
    adapter = PeftModel.from_pretrained(load_model(NAME), str(export(config, path, 3, tmp_path / "adapter")))
    assert (logits(adapter) - trained).abs().max() <= 1e-5

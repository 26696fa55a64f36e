"""Whole runs of the embedded hybrid, a model with state outside the attention: padded rows through the real loop."""

import pytest
from training_runs import RANKED, assert_resumes, build_fast, logits, metrics, train
from transformers import AutoModelForCausalLM

from gspo.config import load
from gspo.models import embedded
from gspo.runs import checkpoint
from gspo.train.commands import export

pytestmark = pytest.mark.run

NAME = "embedded:tiny-hybrid"
SHORT = (
    f"actor.path={NAME}", "train_dataset.batch_size=2", "gconfig.max_new_tokens=6", "evaluator.size=2", RANKED,
    "actor.mb_spec.max_tokens_per_mb=40", "saver.freq_steps=1", "evaluator.freq_steps=1",
)  # fmt: skip
PPO = ("algorithm=ppo", "critic.optimizer.lr=1e-3", "~actor.eps_clip")
REF = ("actor.kl_ctl=0.01", "ref={}")
LORA = ("actor.use_lora=true", "actor.lora_rank=4", "actor.optimizer.lr=2e-3", "actor.kl_loss_coef=0.01", "ref={}")


@pytest.fixture
def brief(tmp_path, monkeypatch):
    build_fast(monkeypatch, tmp_path / "cache", NAME)


def test_the_embedded_hybrid_trains_on_padded_rows_and_is_sampled_with_transformers_cache(brief, tmp_path):
    trainer, path = train(tmp_path, *SHORT, "total_train_steps=1")
    model, parts = embedded.build(NAME)[0], trainer.parts
    assert {*model.config.layer_types} == {"linear_attention", "full_attention"}
    assert parts.learner.policy.layout == "padded"
    assert "sampled in process with transformers' cache;" in (path / "log.txt").read_text()
    assert (logits(parts.learner.policy.model) - logits(model)).abs().max() > 1e-5


@pytest.mark.full
def test_a_resumed_hybrid_has_its_critic_and_reference_and_its_export_has_its_logits(brief, tmp_path):
    trainer, path = assert_resumes(tmp_path, *SHORT, *PPO, *REF, "total_train_steps=2", after=1)
    learner = trainer.parts.learner
    assert {learner.policy.layout, learner.reference.policy.layout, learner.critic.module.policy.layout} == {"padded"}
    folder = path / "checkpoints" / "step_000002"
    assert {*checkpoint.FILES, *checkpoint.CRITIC_FILES} < {file.name for file in folder.iterdir()}
    assert metrics(path)[-1]["policy/kl_reference"] > 0
    exported = export(load(path / "config.yaml").config, path, 2, tmp_path / "model")
    loaded, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (logits(loaded) - logits(learner.policy.model)).abs().max() <= 1e-5


@pytest.mark.full
def test_an_adapter_on_a_hybrid_resumes_and_its_merged_export_has_its_logits(brief, tmp_path):
    trainer, path = assert_resumes(tmp_path, *SHORT, *LORA, "total_train_steps=2", after=1)
    trained, base = logits(trainer.parts.learner.policy.model), logits(embedded.build(NAME)[0])
    merged = export(load(path / "config.yaml").config, path, 2, tmp_path / "merged", merge=True)
    assert (logits(AutoModelForCausalLM.from_pretrained(merged)) - trained).abs().max() <= 1e-5
    assert (trained - base).abs().max() > 1e-4

"""Supervised fine-tuning is the same loop on the completions of the data set."""

import pytest
import ranked_runs
import torch
from training_runs import SFT, digests, metrics, train

from gspo.config import load
from gspo.errors import ConfigError
from gspo.lint import check
from gspo.objectives import loss
from gspo.runs import State


def test_the_objective_is_the_mean_cross_entropy_and_its_gradient_bit_for_bit():
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 11, requires_grad=True)
    tokens, mask = torch.randint(11, (3, 5)), torch.arange(5) < torch.tensor([[5], [2], [3]])
    logp = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    ours = loss("sft", logp, torch.zeros_like(logp), torch.ones(3), mask).loss
    (grad,) = torch.autograd.grad(ours, logits)
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.masked_fill(~mask, -100).flatten())
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    assert torch.equal(grad, torch.autograd.grad(plain, logits)[0])


def test_the_best_step_without_a_reward_is_that_of_the_lowest_loss():
    state = State()
    for step, value in enumerate((2.0, 1.0, 1.5)):
        state.step = step
        state.compare_best({"eval/loss": value}, None)
    assert state.best_step == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("gconfig.n_samples=4", "a row of the data set has one completion"),
        ("env.path=calculator", "nothing is sampled"),
        ("actor.kl_loss_coef=0.1", "KL estimators need samples"),
        ("actor.zero_variance_groups=refill", "always has equal rewards"),
        ("evaluator.best=eval/los", "set eval/loss"),
    ],
)
def test_settings_that_need_samples_are_refused(override, words):
    with pytest.raises(ConfigError, match=words):
        check(load(None, ["algorithm=sft", "ref.path=embedded:tiny", override]), 0)


def test_defaults_of_sft_are_one_completion_and_a_larger_learning_rate():
    config = load(None, ["algorithm=sft"]).config
    assert (config.gconfig.n_samples, config.actor.optimizer.lr, config.actor.ppo_n_minibatches) == (1, 1e-5, 1)
    assert load(None, ["algorithm=sft", "gconfig.temperature=0.5"]).config.eval_gconfig.n_samples == 1
    assert not check(load(None, ["algorithm=sft"]), 0)


@pytest.mark.run
def test_a_run_lowers_the_held_out_loss_and_resumes_bit_for_bit(tmp_path):
    short = ("total_train_steps=4", "evaluator.freq_steps=2", "saver.freq_steps=1", "saver.keep=9")
    _, whole = train(tmp_path / "whole", *SFT, *short)
    rows = metrics(whole)
    held = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(held) == 3
    assert held[-1] < held[0]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 4]  # the task has a reward of its own
    assert not any(name.startswith(("reward/", "clip/", "ratio/")) for row in rows for name in row)
    assert 0.1 < rows[1]["loss/mean"] / held[0] < 10  # both are per token, at the first weights
    # Cut the run after step 2 and train again: the last checkpoint is the same.
    train(tmp_path / "cut", *SFT, *short, "total_train_steps=2")
    _, again = train(tmp_path / "cut", *SFT, *short)
    assert digests(again)["model.safetensors"] == digests(whole)["model.safetensors"]
    assert [r["loss/mean"] for r in metrics(again)[1:]] == [r["loss/mean"] for r in rows[1:]]


@pytest.mark.full
def test_rows_without_a_reward_are_evaluated_by_loss_alone(tmp_path):
    rows = [{"prompt": f"{i}+{i}=", "completion": f"{2 * i}"} for i in range(60)]
    _, path = train(tmp_path, *(o for o in SFT if "column" not in o), "total_train_steps=2", dataset=rows)
    first, *_, last = metrics(path)
    assert "eval/accuracy" not in first
    assert last["eval/loss"] < first["eval/loss"]
    assert last["eval/best_step"] == 2


@pytest.mark.full
def test_two_ranks_measure_and_train_as_one(tmp_path):
    short = (*SFT, "total_train_steps=2", "evaluator.freq_steps=1", "actor.dtype=float64")
    one, two = (metrics(ranked_runs.train(tmp_path / str(n), n, *short)) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert a["loss/mean"] == pytest.approx(b["loss/mean"], rel=1e-9)
        assert a["eval/loss"] == pytest.approx(b["eval/loss"], rel=1e-9)


@pytest.mark.full
def test_an_adapter_is_trained_on_the_completions_too(tmp_path):
    trainer, path = train(
        tmp_path, *SFT, "actor.use_lora=true", "actor.lora_rank=4", "actor.gradient_checkpointing=true"
    )
    first, *_, last = metrics(path)
    assert last["eval/loss"] < first["eval/loss"]
    assert all("lora" in name for name, p in trainer.parts.learner.policy.named_parameters() if p.requires_grad)

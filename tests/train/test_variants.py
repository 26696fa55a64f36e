"""The variants of training on the real loop: each learns, resumes to the last bit, and says what is wrong."""

import json

import group_filters
import numpy as np
import pytest
import torch
from tiers import brief
from training_runs import digests, make_trainer, metrics, path_of, samples, train

from gspo.config import load
from gspo.doctor import explain
from gspo.errors import CheckpointError, ConfigError, DataError, TrainingError
from gspo.models import load_model
from gspo.runs import checkpoint
from gspo.train.build.learner import load_policy

pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.run]

REF = ("ref={}",)
PPO = ("algorithm=ppo", "critic.optimizer.lr=1e-3", "actor.gae_lambda=0.95", "~actor.eps_clip")
ONE = ("total_train_steps=1", "evaluator.at_start=false", "evaluator.size=4")
VARIANTS = {
    "KL in the loss": ("actor.kl_loss_coef=0.05", *REF),
    "KL in the reward": ("algorithm=gspo_token", "actor.kl_ctl=0.02", *REF),
    "PPO": PPO,
    "PPO with sequence ratios": (*PPO, "actor.importance_sampling_level=sequence", "actor.eps_clip=0.002"),
    "8-bit moments": ("actor.optimizer.type=adamw8bit",),
    "refill": ("actor.zero_variance_groups=refill", "actor.max_refills=20"),
    "a filter of groups": ("rollout.dynamic_filter_fn=group_filters:mixed", "actor.max_refills=20"),
}


@pytest.mark.full
def test_the_overlong_penalty_alone_shortens_completions(tmp_path):
    """Every completion earns 1, less the penalty: only length can teach."""
    overrides = ["total_train_steps=8", "gconfig.temperature=2", "gconfig.max_new_tokens=48", "actor.eps_clip=0.02",
                 "evaluator.at_start=false", "evaluator.size=4", "actor.overlong_reward_penalty=true",
                 "actor.overlong_tokens=40"]  # fmt: skip
    _, path = train(tmp_path, *overrides, reward={"name": "regex", "pattern": "^"})
    lengths = [row["length/mean"] for row in metrics(path)]
    assert np.mean(lengths[-2:]) < 0.8 * np.mean(lengths[:2])


# What learns: the accuracy on held-out problems rises by at least the gain from before the first step to the last one

SHORT = ("total_train_steps=6", "evaluator.size=48")
CONTROLLED = (
    "total_train_steps=12", "train_dataset.batch_size=16", "gconfig.n_samples=8", "gconfig.max_new_tokens=48",
    "actor.optimizer.lr=1e-4", "actor.ppo_n_minibatches=4", "evaluator.size=64", "evaluator.freq_steps=12",
)  # fmt: skip
LORA = (
    "actor.use_lora=true", "actor.lora_rank=8", "actor.lora_alpha=16", "actor.optimizer.lr=1e-3", "actor.eps_clip=0.01",
    "total_train_steps=6", "train_dataset.batch_size=16", "gconfig.n_samples=8", "evaluator.size=64",
)  # fmt: skip
# The quick start on another model, which starts at about a third.
ADDITION = (
    "train_dataset.path=embedded:arithmetic", "train_dataset.size=4000", "train_dataset.batch_size=32",
    "gconfig.n_samples=8", "gconfig.max_new_tokens=48", "actor.eps_clip=0.002", "actor.eps_clip_higher=0.0025",
    "actor.ppo_n_minibatches=4", "actor.optimizer.lr=5e-5", "evaluator.freq_steps=10",
)  # fmt: skip
AHEAD = ("rollout.max_head_offpolicyness=2", "actor.use_decoupled_loss=true")
LEARNS = {
    **{name: ((*SHORT, *how), 0.15) for name, how in VARIANTS.items()},
    "rewards normalised apart": (
        (*CONTROLLED, "reward.normalize=each", "reward.functions=[final,format]", "reward.weights=[1,0.5]"), 0.2),
    "an entropy term": ((*CONTROLLED, "actor.entropy_coef=0.01", "actor.entropy_target=0.1"), 0.2),
    "a curriculum": ((*CONTROLLED, "train_dataset.shuffle=pass_rate", "train_dataset.size=256"), 0.2),
    "the product correction": ((*CONTROLLED, "actor.rejection_sampling.preset=seq_tis", *AHEAD), 0.2),
    "an adapter": (LORA, 0.2),  # 0.52 → 0.98 where this was written
    "an adapter on a base of 4 bits": ((*LORA, "actor.lora_base_bits=4"), 0.2),
    "an adapter on a base of 8 bits": ((*LORA, "actor.lora_base_bits=8"), 0.2),
    "a mixture of experts": (
        (*ADDITION, "actor.path=embedded:tiny-moe", "total_train_steps=30", "evaluator.size=256"), 0.1),
    "a hybrid": ((*ADDITION, "actor.path=embedded:tiny-hybrid", "total_train_steps=20", "evaluator.size=128"), 0.2),
}  # fmt: skip


STARTS_AT = {"a mixture of experts": (0.2, 0.45), "a hybrid": (0, 0.5)}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("variant", brief(LEARNS, "PPO"))
def test_every_variant_learns(variant, tmp_path):
    overrides, gain = LEARNS[variant]
    if "of 4 bits" in variant:
        pytest.importorskip("bitsandbytes", reason="weights of 4 bits need bitsandbytes")
    _, path = train(tmp_path, *overrides)
    rows = metrics(path)
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert accuracy[-1] >= accuracy[0] + gain, accuracy
    low, high = STARTS_AT.get(variant, (0, 1))
    assert low <= accuracy[0] <= high
    assert all(row["grad/skipped_updates"] == 0 for row in rows if row["step"])


# Doctor


@pytest.mark.parametrize(("variant", "words"), [
    ("KL in the loss", "0.05 × KL to embedded:tiny in the loss (k3)"),
    ("KL in the reward", "0.02 × the KL to the reference is subtracted from the reward of each token"),
    ("PPO", "embedded:tiny with a new value head, 2 updates per batch at 1e-3"),
    ("PPO with sequence ratios", "the completion's ratio as value, with the gradient of each token's own ratio"),
    ("refill", "groups with equal rewards: resampled, at most 20 rounds"),
    ("a filter of groups", "group_filters:mixed decides which are trained on"),
])  # fmt: skip
def test_doctor_explains_every_variant_and_finds_nothing_wrong(variant, words, tmp_path):
    report = explain(make_trainer(tmp_path, *VARIANTS[variant]).loaded, num_gpus=0)
    assert words in json.dumps(report.sections, ensure_ascii=False)
    assert report.exit_code == 0
    assert not report.findings


# The reference


@pytest.mark.full
@pytest.mark.parametrize("key", ["actor.kl_loss_coef", "actor.kl_ctl"])
def test_a_large_coefficient_holds_the_policy_at_the_reference(key, tmp_path):
    ends = {}
    for coefficient in (0.001, 10.0):
        overrides = ["algorithm=gspo_token", f"{key}={coefficient}", *REF, "total_train_steps=10", "evaluator.size=4"]
        _, path = train(tmp_path / str(coefficient), *overrides)
        rows = metrics(path)[1:]
        ends[coefficient] = np.mean([row["policy/kl_reference"] for row in rows[-2:]])
        assert rows[0]["policy/kl_reference"] < 1e-3  # the run starts at its reference
        assert ("reward/kl_penalty" in rows[0]) == (key == "actor.kl_ctl")
        assert rows[0]["time/reference_s"] > 0
    assert ends[10.0] < 0.5 * ends[0.001]


def test_without_a_coefficient_no_reference_is_loaded(tmp_path):
    trainer, path = train(tmp_path, *REF, *ONE)
    assert trainer.parts.learner.reference is None
    assert not {"policy/kl_reference", "time/reference_s"} & metrics(path)[0].keys()


def test_with_kl_in_the_loss_groups_of_equal_rewards_enter_the_model(tmp_path):
    _, path = train(tmp_path, "actor.kl_loss_coef=0.1", *REF, *ONE)
    rows = samples(path, 1)
    assert any(row["advantage"] == 0 for row in rows)
    assert all(row["log_s"] is not None for row in rows)
    assert metrics(path)[0]["skipped/zero_advantage_sequences"] == 0


def test_a_reference_of_its_own_is_another_model_and_a_missing_one_names_its_key(tmp_path):
    trainer = make_trainer(tmp_path, "actor.kl_loss_coef=0.1", "ref.path=/nowhere/at/all")
    with pytest.raises(DataError, match=r"ref\.path: there is no folder '/nowhere/at/all'"):
        trainer.train(report=False)
    other = make_trainer(tmp_path / "o", "actor.kl_loss_coef=0.1", *REF, "total_train_steps=1")
    other.train(report=False)
    assert other.parts.learner.reference.policy is not other.parts.learner.policy
    assert not next(other.parts.learner.reference.policy.parameters()).requires_grad


@pytest.mark.full
def test_of_an_adapter_the_reference_is_the_policy_with_its_adapter_off(tmp_path):
    lora = ("actor.use_lora=true", "actor.optimizer.lr=2e-3", "actor.kl_loss_coef=0.01", *REF, "evaluator.size=4")
    trainer, path = train(tmp_path, *lora, "total_train_steps=2")
    assert trainer.parts.learner.reference.policy is trainer.parts.learner.policy
    rows = metrics(path)[1:]
    # Mini-batch 1 of step 1 is the base model itself; later the adapter has moved away from it.
    assert rows[0]["policy/kl_reference"] < 1e-3
    assert rows[-1]["policy/kl_reference"] > 1e-5
    # The same run against a loaded copy of the base model: the same numbers up to rounding.
    load_model("embedded:tiny", torch.float32, torch.device("cpu")).save_pretrained(tmp_path / "base")
    _, loaded = train(tmp_path / "copy", *lora, "total_train_steps=2", f"ref.path={tmp_path / 'base'}")
    for row, other in zip(rows, metrics(loaded)[1:], strict=True):
        assert row["policy/kl_reference"] == pytest.approx(other["policy/kl_reference"], rel=0.05, abs=1e-6)


# Resuming


@pytest.mark.full
def test_a_resumed_run_has_its_critic_its_moments_and_its_first_reference(tmp_path):
    everything = (*PPO, "actor.kl_ctl=0.01", *REF, "saver.freq_steps=2", "evaluator.freq_steps=2", "evaluator.size=4",
                  "actor.optimizer.lr=1e-3")  # fmt: skip
    _, straight = train(tmp_path / "straight", *everything, "total_train_steps=4")
    _, halves = train(tmp_path / "halves", *everything, "total_train_steps=2")
    folder = halves / "checkpoints" / "step_000002"
    assert {*checkpoint.FILES, *checkpoint.CRITIC_FILES} < {file.name for file in folder.iterdir()}
    train(tmp_path / "halves", *everything, "total_train_steps=4")
    got, want = digests(halves), digests(straight)
    assert {"critic.safetensors", "critic_optimizer.safetensors"} < got.keys()
    assert got == want
    # A reference read from the checkpoint would be at a distance of 0 again.
    assert metrics(halves)[3]["policy/kl_reference"] > 1e-4
    policy, _ = load_policy(load(halves / "config.yaml").config, halves, 4)
    assert sum(p.numel() for p in policy.parameters()) > 0
    # A damaged critic is a damaged checkpoint.
    (halves / "checkpoints/step_000004/critic.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"critic\.safetensors is damaged"):
        checkpoint.verify(halves / "checkpoints/step_000004")


# Filters


@pytest.mark.full
def test_a_filter_decides_what_is_trained_on_and_the_rest_is_resampled(tmp_path):
    quick = ("total_train_steps=2", "actor.max_refills=20", "evaluator.at_start=false", "evaluator.size=4")
    trainer, path = train(tmp_path, *quick, dynamic_filter_fn=group_filters.short)
    rows = metrics(path)
    assert all(row["length"] < 30 for step in (1, 2) for row in samples(path, step))
    assert sum(row["reward/refilled_groups"] for row in rows) > 0
    assert trainer.parts.state.submission == 2 * 8 + sum(row["reward/refilled_groups"] for row in rows)
    _, plain = train(tmp_path / "plain", *quick)
    assert any(row["length"] >= 30 for step in (1, 2) for row in samples(plain, step))


@pytest.mark.parametrize(("name", "what"), [
    ("nothing", r"actor\.max_refills\) gave 0 of 8 groups.*16 groups were rejected by rollout\.dynamic_filter_fn"),
    ("number", r"rollout\.dynamic_filter_fn failed on submission 0: TypeError: it returned .*True .* or False"),
    ("crash", r"rollout\.dynamic_filter_fn failed on submission 0: KeyError: 'made to fail'"),
])  # fmt: skip
def test_a_filter_that_cannot_be_used_ends_the_run_with_its_name(name, what, tmp_path):
    quick = ("actor.max_refills=1", "evaluator.at_start=false")
    with pytest.raises(TrainingError, match=what):
        train(tmp_path, *quick, f"rollout.dynamic_filter_fn=group_filters:{name}")
    assert checkpoint.steps(path_of(tmp_path) / "checkpoints") == []


@pytest.mark.parametrize(
    "name", ["group_filters:absent", "no_such_module:f", "group_filters:not_callable", "absent.py:f"]
)
def test_a_filter_that_is_not_there_is_refused_before_anything_is_opened(name, tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.dynamic_filter_fn\b.*: .*" + name.partition(":")[0]):
        make_trainer(tmp_path, f"rollout.dynamic_filter_fn={name}")

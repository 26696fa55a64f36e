"""Keys that the schema no longer has: they load, with one message each, and run directories that hold them resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.config import load, value_of
from gspo.config.migrate.table import rules
from gspo.config.schema import known_keys
from gspo.errors import ConfigError

# config.yaml of a run of the version with 242 keys, and the command line that it came from.
OLD_RUN = Path(__file__).parent / "files" / "config_of_version_0.1.yaml"
COMMAND_LINE = (
    "experiment_name=old", "trial_name=full", "algorithm=ppo", "critic={}", "ref={}", "actor.kl_loss_coef=0.1",
    "valid_dataset.path=embedded:arithmetic", "eval_gconfig.n_samples=2", "actor.rejection_sampling.preset=tis",
    "actor.reward_norm={mean_level: group, group_size: 8}", "rollout.consumer_batch_size=16", "recover.freq_steps=5",
    "scheduler.slurm.partition=long", "reward.functions=[math, format]", "reward.format_regex=^<a>",
    "rollout.backend=local", "actor.backend=fsdp",
)  # fmt: skip


def told(loaded, key):
    return [line for line in loaded.messages if f" {key} " in line]


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    return str(caught.value)


def test_the_config_of_an_old_run_is_the_config_of_its_command_line_today():
    assert load(OLD_RUN).config == load(None, COMMAND_LINE).config


def test_the_config_of_an_old_run_has_one_message_for_each_removed_key():
    messages = load(OLD_RUN).messages
    named = [line.split(": ", 1)[1].split(" ")[0] for line in messages]
    assert len(named) == len(set(named))
    assert {"allocation_mode", "cluster.name_resolve", "actor.use_sapo_loss", "critic.value_loss_coef"} <= set(named)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rollout.consumer_batch_size=16", "train_dataset.batch_size", 16),
        ("saver.freq_secs=60", "recover.freq_secs", 60),
        ("saver.freq_secs=3600", "recover.freq_secs", 300),
        ("recover.freq_steps=5", "saver.freq_steps", 5),
        ("recover.freq_epochs=2", "saver.freq_epochs", 2),
        ("recover.mode=fault", "recover.mode", "auto"),
        ("scheduler.slurm.partition=gpu", "scheduler.slurm.sbatch", ["--partition=gpu"]),
        ("scheduler.slurm.account=us", "scheduler.slurm.sbatch", ["--account=us"]),
        ("actor.recompute_logprob=true", "actor.prox_logp_method", "recompute"),
        ("actor.recompute_logprob=false", "actor.prox_logp_method", "rollout"),
        ("actor.attn_impl=flash_attention_2", "actor.dtype", "auto"),
        ("actor.mb_spec.granularity=8", "actor.mb_spec.max_tokens_per_mb", 8192),
        ("ref.mb_spec.max_tokens_per_mb=100", "actor.mb_spec.max_tokens_per_mb", 8192),
        ("actor.temperature=1.0", "gconfig.temperature", 1.0),
        ("eval_gconfig.stop=[]", "gconfig.stop", []),
        ("train_dataset.type=rl", "train_dataset.path", "embedded:arithmetic"),
        ("valid_dataset.batch_size=7", "valid_dataset.path", "embedded:arithmetic"),
    ],
)
def test_a_removed_key_is_translated_or_ignored_with_one_message(override, key, value):
    loaded = load(None, [override, "rollout.backend=local", "actor.backend=fsdp"])
    assert value_of(loaded.config, key) == value
    assert len(loaded.messages) == 1


def test_the_higher_of_two_frequencies_wins():
    both = load(None, ["saver.freq_steps=4", "recover.freq_steps=9"])
    assert both.config.saver.freq_steps == 4
    assert "at least as frequent" in told(both, "recover.freq_steps")[0]
    assert load(None, ["saver.freq_steps=9", "recover.freq_steps=4"]).config.saver.freq_steps == 4


def test_options_of_sbatch_are_appended():
    slurm = load(None, ["scheduler.slurm.sbatch=[--mem=8G]", "scheduler.slurm.partition=gpu"]).config.scheduler.slurm
    assert slurm.sbatch == ["--mem=8G", "--partition=gpu"]


def test_a_format_pattern_becomes_an_entry_of_the_functions():
    reward = load(None, ["reward.functions=[math, format]", "reward.format_regex=^<a>"]).config.reward
    assert reward.functions == ["math", {"name": "regex", "pattern": "^<a>", "label": "format"}]
    assert "reward.functions" in refusal("reward.format_regex=^<a>")


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("actor.temperature=0.7", "gconfig.temperature"),
        ("actor.max_new_tokens=7", "gconfig.max_new_tokens"),
        ("eval_gconfig.stop=[x]", "gconfig.stop"),
        ("actor.reward_norm={mean_level: group, group_size: 3}", "gconfig.n_samples"),
        ("actor.disable_dropout=false", "remove it"),
        ("critic.value_loss_coef=0.5", "critic.optimizer.lr"),
        ("train_dataset.type=sft", "remove it"),
    ],
)
def test_a_value_that_means_something_else_is_refused_with_the_remedy(override, remedy):
    assert remedy in refusal(override)


def test_no_removed_key_is_in_the_schema():
    """A rule for a key of the schema may only translate old values of it."""
    for key in set(rules()) & set(known_keys()):
        assert rules()[key].kind == "translate", key

"""Keys that the schema no longer has: they load, with one message each, and run directories that hold them resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.config import load, value_of
from gspo.config.migrate.table import rules
from gspo.config.schema import known_keys
from gspo.errors import ConfigError

# config.yaml of runs of the versions with 242 and 203 keys, and the command lines that they came from.
FILES = Path(__file__).parent / "files"
OLD_RUN, NEWER_RUN = FILES / "config_of_version_0.1.yaml", FILES / "config_of_203_keys.yaml"
NEWER_COMMAND_LINE = (
    "experiment_name=old", "trial_name=full", "algorithm=ppo", "critic={}", "ref={}", "actor.kl_loss_coef=0.1",
    "valid_dataset.path=embedded:arithmetic", "actor.rejection_sampling.preset=sequence_mask",
    "actor.reward_norm.mean_level=group", "actor.adv_norm.std_level=batch", "rollout.max_head_offpolicyness=1",
    "rollout.backend=local", "actor.backend=fsdp",
)  # fmt: skip
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


@pytest.mark.parametrize(("file", "words"), [(OLD_RUN, COMMAND_LINE), (NEWER_RUN, NEWER_COMMAND_LINE)])
def test_the_config_of_an_old_run_is_the_config_of_its_command_line_today(file, words):
    """So the run resumes: no key has changed."""
    assert load(file).config == load(None, words).config


@pytest.mark.parametrize("file", [OLD_RUN, NEWER_RUN])
def test_the_config_of_an_old_run_has_one_message_for_each_removed_key(file):
    messages = load(file).messages
    named = [line.split(": ", 1)[1].split(" ")[0] for line in messages]
    assert len(named) == len(set(named))
    old = {name for name in named if name not in known_keys()}
    if file == OLD_RUN:
        assert {"allocation_mode", "cluster.name_resolve", "actor.use_sapo_loss", "critic.value_loss_coef"} <= old
    else:
        assert len(old) == 61


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("rollout.consumer_batch_size=16", "train_dataset.batch_size", 16),
        ("saver.freq_secs=60", "recover.freq_secs", 60),
        ("saver.freq_secs=3600", "recover.freq_secs", 300),
        ("recover.freq_steps=5", "saver.freq_steps", 5),
        ("recover.freq_epochs=2", "saver.freq_steps", "2 epochs"),
        ("saver.freq_epochs=1", "saver.freq_steps", "epoch"),
        ("saver.freq_epochs=null", "saver.freq_steps", None),
        ("evaluator.freq_epochs=3", "evaluator.freq_steps", "3 epochs"),
        ("stats_logger.keep_sample_steps=5", "rollout.dump_to_file", 5),
        ("stats_logger.keep_sample_steps=null", "rollout.dump_to_file", True),
        ("env.command=[sh, a.sh]", "env.agent", ["sh", "a.sh"]),
        ("env.command=[]", "env.agent", None),
        ("actor.prox_logp_recenter=true", "actor.prox_logp_method", "auto"),
        ("gconfig.stop_token_ids=[7, 8]", "gconfig.stop", [7, 8]),
        ("gconfig.stop_token_ids=[]", "gconfig.stop", []),
        ("eval_gconfig.ignore_eos=false", "gconfig.ignore_eos", False),
        ("eval_gconfig.stop_token_ids=[]", "gconfig.stop", []),
        ("actor.reward_norm.mean_leave1out=true", "actor.reward_norm.mean_level", None),
        ("actor.overlong_penalty_factor=0.5", "actor.overlong_reward_penalty", False),
        ("train_dataset.curriculum=pass_rate", "train_dataset.shuffle", "pass_rate"),
        ("train_dataset.curriculum=none", "train_dataset.shuffle", True),
        ("actor.eps_clip_auto.target_fraction=0.15", "actor.eps_clip", 0.2),
        ("train_dataset.prompt_column=task", "train_dataset.columns", {"prompt": "task"}),
        ("train_dataset.completion_column=null", "train_dataset.columns", {}),
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
        ("valid_dataset.batch_size=7", "valid_dataset.split", "test"),
        ("valid_dataset.size=16", "evaluator.size", 16),
        ("valid_dataset.size=5000", "evaluator.size", 512),
        ("valid_dataset.system_prompt=null", "train_dataset.system_prompt", None),
        ("eval_gconfig.greedy=true", "eval_gconfig.temperature", 0),
        ("eval_gconfig.greedy=false", "eval_gconfig.temperature", 1.0),
        ("gconfig.greedy=false", "gconfig.temperature", 1.0),
        ("actor.reward_norm.eps=1e-5", "actor.reward_norm.std_level", None),
        ("actor.adv_norm.std_unbiased=true", "actor.adv_norm.std_level", None),
        ("rollout.queue_size=16", "rollout.max_head_offpolicyness", 0),
        ("rollout.request_retries=3", "rollout.backend", "local"),
        ("critic.dtype=auto", "actor.dtype", "auto"),
        ("critic.optimizer.beta2=0.999", "actor.optimizer.beta2", 0.999),
        ("actor.mb_spec.n_mbs=4", "actor.mb_spec.max_tokens_per_mb", 8192),
        ("actor.logprobs_chunk_size=1024", "actor.dtype", "auto"),
        ("actor.eps_clip_auto.decay=0.8", "actor.eps_clip", 0.2),
        ("scheduler.slurm.time=1:00:00", "scheduler.slurm.sbatch", ["--time=1:00:00"]),
        ("scheduler.slurm.cpus_per_node=8", "scheduler.slurm.sbatch", ["--cpus-per-task=8"]),
        ("stats_logger.wandb.project=p", "stats_logger.wandb.mode", "disabled"),
        ("stats_logger.keep_token_samples=16", "rollout.dump_to_file", True),
        ("env.model=policy", "env.path", None),
    ],
)
def test_a_removed_key_is_translated_or_ignored_with_one_message(override, key, value):
    loaded = load(None, [override, "rollout.backend=local", "actor.backend=fsdp"])
    assert value_of(loaded.config, key) == value
    assert len(loaded.messages) == 1


def test_the_higher_of_two_frequencies_wins():
    both = load(None, ["saver.freq_steps=4", "recover.freq_steps=9"])
    assert both.config.saver.freq_steps == 4
    assert "4 is not larger" in told(both, "recover.freq_steps")[0]
    assert load(None, ["saver.freq_steps=9", "recover.freq_steps=4"]).config.saver.freq_steps == 4


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["saver.freq_epochs=4", "recover.freq_epochs=2"], "saver.freq_steps", "2 epochs"),
        (["saver.freq_epochs=2", "recover.freq_epochs=4"], "saver.freq_steps", "2 epochs"),
        (["evaluator={freq_epochs: 1, freq_steps: 9}"], "evaluator.freq_steps", 9),
        (["evaluator={freq_epochs: 1, freq_steps: null}"], "evaluator.freq_steps", "epoch"),
        (["rollout.dump_to_file=false", "stats_logger.keep_sample_steps=5"], "rollout.dump_to_file", False),
        (["rollout.dump_to_file=true", "stats_logger.keep_sample_steps=5"], "rollout.dump_to_file", 5),
        (["actor={prox_logp_method: rollout, prox_logp_recenter: true}"], "actor.prox_logp_method",
         "rollout_recentered"),
        (["actor={recompute_logprob: false, prox_logp_recenter: true}"], "actor.prox_logp_method",
         "rollout_recentered"),
        (["actor={prox_logp_method: recompute, prox_logp_recenter: true}"], "actor.prox_logp_method", "recompute"),
        (["actor.reward_norm={mean_level: group, mean_leave1out: true}"], "actor.reward_norm.mean_level", "leave1out"),
        (["actor.reward_norm={mean_level: group, mean_leave1out: false}"], "actor.reward_norm.mean_level", "group"),
        (["actor={overlong_reward_penalty: true, overlong_penalty_factor: 0.5}"], "actor.overlong_reward_penalty", 0.5),
        (["actor={overlong_reward_penalty: true, overlong_penalty_factor: 1}"], "actor.overlong_reward_penalty", True),
        (["actor={overlong_reward_penalty: true, overlong_penalty_factor: 0}"], "actor.overlong_reward_penalty", False),
        (["algorithm=dapo", "actor.overlong_penalty_factor=2"], "actor.overlong_reward_penalty", 2),
        (["gconfig={stop: [x], stop_token_ids: [5]}", "eval_gconfig.stop_token_ids=[5]"], "gconfig.stop", ["x", 5]),
        (["env={agent: null, command: [sh]}"], "env.agent", ["sh"]),
        (["train_dataset={prompt_column: q, answer_column: null, columns: {level: l}}"], "train_dataset.columns",
         {"level": "l", "prompt": "q"}),
        (["train_dataset={answer_column: a}", "valid_dataset={answer_column: a, path: x}"], "train_dataset.columns",
         {"answer": "a"}),
    ],
)  # fmt: skip
def test_two_keys_of_an_old_file_become_one(overrides, key, value):
    assert value_of(load(None, overrides).config, key) == value


def test_a_source_of_a_mixture_with_old_keys_loads_with_a_message_for_each():
    loaded = load(None, ["train_dataset.mixture=[{path: x, prompt_column: q, columns: {level: l}}, {path: y}]"])
    first, second = loaded.config.train_dataset.mixture
    assert (first.columns, second.columns) == ({"level": "l", "prompt": "q"}, {})
    (message,) = told(loaded, "train_dataset.mixture[0].prompt_column")
    assert "train_dataset.mixture[0].columns.prompt: q" in message


def test_an_override_wins_over_the_old_key_of_a_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("stats_logger: {keep_sample_steps: 9}\nsaver: {freq_epochs: 1}\nrollout: {dump_to_file: true}\n")
    config = load(file, ["rollout.dump_to_file=3", "saver.freq_steps=7"]).config
    assert (config.rollout.dump_to_file, config.saver.freq_steps) == (3, 7)


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
        ("valid_dataset.answer_column=x", "valid_dataset.mixture"),
        ("valid_dataset.max_length=9", "train_dataset.max_length"),
        ("gconfig.greedy=7", "must be true or false"),
        ("actor.reward_norm={std_level: group, eps: 0.1}", "remove it"),
        ("actor.adv_norm.mean_leave1out=true", "actor.reward_norm.mean_level: leave1out"),
        ("actor.reward_norm={mean_level: batch, mean_leave1out: true}", "mean_level: leave1out"),
        ("eval_gconfig.stop_token_ids=[3]", "remove it"),
        ("gconfig.stop_token_ids=3", "gconfig.stop"),
        ("saver.freq_epochs=0", "saver.freq_steps: epoch"),
        ("train_dataset.curriculum=hard", "train_dataset.shuffle"),
        ("env={agent: a.py:f, command: [sh]}", "remove one"),
        ("train_dataset={curriculum: pass_rate, shuffle: false}", "train_dataset.shuffle: pass_rate"),
        ("actor={eps_clip: auto, eps_clip_auto: {target_fraction: 0.15}}", "actor.eps_clip_higher"),
        ("critic.optimizer.weight_decay=0.5", "actor.optimizer.weight_decay"),
        ("ref.dtype=float64", "actor.dtype"),
        ("actor.eps_clip_auto.decay=0.5", "actor.eps_clip_higher"),
        ("actor.rejection_sampling.only_negative=true", "sequence_mask"),
        ("actor.optimizer.min_lr_ratio=0.1", "remove it"),
        ("actor.gmpo_log_clip=0.3", "gspo.objectives.loss"),
        ("rollout.request_retries=7", "remove it"),
        ("stats_logger.keep_token_samples=0", "rollout.dump_to_file"),
        ("scheduler.slurm.save_before=90", "120 s"),
        ("evaluator.freq_secs=60", "evaluator.freq_steps"),
        ("env.model=gpt", "$OPENAI_MODEL"),
    ],
)
def test_a_value_that_means_something_else_is_refused_with_the_remedy(override, remedy):
    assert remedy in refusal(override)


def test_a_queue_is_refused_where_it_limited_what_staleness_allows():
    stale = ("rollout.max_head_offpolicyness=1", "train_dataset.batch_size=8")
    assert load(None, [*stale, "rollout.queue_size=16"]).config.rollout.max_head_offpolicyness == 1
    assert "rollout.max_concurrent_rollouts" in refusal(*stale, "rollout.queue_size=15")


def test_an_override_of_the_temperature_wins_over_greedy_in_an_old_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("eval_gconfig: {n_samples: 1, greedy: true, temperature: 1.0}\ngconfig: {temperature: 0.8}\n")
    temperatures = [load(file, words).config.eval_gconfig.temperature
                    for words in ([], ["eval_gconfig.temperature=0.5"], ["~eval_gconfig.temperature"])]  # fmt: skip
    assert temperatures == [0, 0.5, 0.8]


def test_no_removed_key_is_in_the_schema():
    """A rule for a key of the schema may only translate old values of it."""
    for key in set(rules()) & set(known_keys()):
        assert rules()[key].kind == "translate", key


def test_local_as_the_trainers_backend_is_one_process():
    loaded = load(None, ["actor.backend=local"])
    assert loaded.config.actor.backend == "fsdp:d1"
    (message,) = told(loaded, "actor.backend")
    assert message.startswith("command line: actor.backend local is now fsdp:d1 (")

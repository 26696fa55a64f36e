"""Configs of AReaL's two eras load; each foreign key leaves one line; the impossible is refused with a remedy."""

from __future__ import annotations

import pytest
import yaml
from areal_files import NEW, OLD

from gspo.config import effective_objective, known_keys, load, objective_words, value_of
from gspo.errors import ConfigError
from gspo.lint import lint
from gspo.migrate.table import rules

AUTO = "one process samples and trains"


def own(messages):
    """Without the lines that are about no key of the file: `auto`, and AReaL's defaults."""
    return [line for line in messages if AUTO not in line and not line.startswith("AReaL's default")]


def loaded(folder, text, overrides=()):
    path = folder / "areal.yaml"
    path.write_text(text)
    return load(path, overrides)


def refusal(folder, text, overrides=()):
    with pytest.raises(ConfigError) as caught:
        loaded(folder, text, overrides)
    return str(caught.value)


def leaves(data, prefix=""):
    """The dotted keys of a config file that are not the schema's: a section that AReaL alone knows counts as one."""
    for name, value in data.items():
        key = prefix + name
        if key in rules() and (key not in known_keys() or rules()[key].kind in ("drop", "repeat")):
            yield key
        elif isinstance(value, dict) and not (key in known_keys() and known_keys()[key].free):
            yield from leaves(value, key + ".")


def test_the_old_era_loads_with_its_meaning(tmp_path):
    result = loaded(tmp_path, OLD)
    config = result.config
    assert (config.rollout.backend, config.actor.backend) == ("vllm:d2", "fsdp:d2")
    assert (config.gconfig.n_samples, config.rollout.max_head_offpolicyness) == (4, 3)
    assert (config.actor.eps_clip, config.actor.eps_clip_higher, config.actor.optimizer.lr) == (0.3, 0.3, 2e-5)
    assert (config.gconfig.temperature, config.train_dataset.batch_size) == (0.9, 64)
    assert "sglang is ignored: gspo has no SGLang" in "\n".join(result.messages)
    assert (config.recover.mode, config.recover.freq_secs, config.cluster.fileroot) == (
        "disabled",
        1800.0,
        "/data/runs",
    )
    objective = effective_objective(result)
    assert (objective["level"], objective["advantage"], objective["proximal"]) == ("token", "group_std", "recompute")
    assert objective["settings"]["correction"]["upper"] == 4.0
    assert objective["settings"]["correction"]["action"] == "mask"


def test_the_new_era_loads_with_its_meaning(tmp_path):
    result = loaded(tmp_path, NEW)
    config = result.config
    assert (config.rollout.backend, config.actor.backend) == ("vllm:d2p1t1", "fsdp:d2p1t1")
    assert (config.scheduler.type, config.gconfig.top_k, config.recover.mode) == ("local", 0, "auto")
    assert (config.actor.weight_update_mode, config.actor.prox_logp_method) == ("broadcast", "recompute")
    assert (config.evaluator.at_start, config.stats_logger.tensorboard, config.profile) == (True, False, False)
    objective = effective_objective(result)
    assert (objective["name"], objective["level"], objective["settings"]["clip_low"]) == ("grpo", "sequence", 0.3)
    assert objective["settings"]["correction"]["upper"] == 4.0


@pytest.mark.parametrize("text", [OLD, NEW])
def test_each_foreign_key_leaves_exactly_one_line_with_its_place(tmp_path, text):
    messages = own(loaded(tmp_path, text).messages)
    assert all(line.startswith(f"{tmp_path}/areal.yaml:") for line in messages)
    told = [line.split(": ", 1)[1].split(" ")[0] for line in messages]
    assert len(told) == len(set(told))
    assert set(leaves(yaml.safe_load(text))) <= set(told)
    # Beyond AReaL's own keys, only foreign values of ours are told about.
    assert set(told) - set(leaves(yaml.safe_load(text))) <= {
        "actor.prox_logp_method",
        "actor.weight_update_mode",
        "gconfig.top_k",
        "recover.mode",
        "stats_logger.tensorboard",
        "allocation_mode",
    }


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("async_training: false\nrollout: {max_head_offpolicyness: 4}", "rollout.max_head_offpolicyness", 0),
        ("async_training: true\nrollout: {max_head_offpolicyness: 4}", "rollout.max_head_offpolicyness", 4),
        ("actor: {dynamic_sampling: true}", "actor.zero_variance_groups", "refill"),
        ("algorithm: dapo\nactor: {dynamic_sampling: false}", "actor.zero_variance_groups", "count"),
        ("dynamic_bs: true", "actor.zero_variance_groups", "drop"),
        ("actor: {group_size: 16}", "gconfig.n_samples", 16),
        ("actor: {recompute_logprobs: false}", "actor.prox_logp_method", "rollout"),
        ("actor: {use_sapo_loss: true}", "algorithm", "sapo"),
        ("actor: {use_cispo_loss: true}", "algorithm", "cispo"),
        ("actor: {prox_logp_method: reuse_train_logp}", "actor.prox_logp_method", "recompute"),
        ("actor: {enable_tree_training: false}", "actor.share_prefix", False),
        ("critic: {eps_clip: 0.5}", "critic.value_eps_clip", 0.5),
        ("evaluator: {eval_before_train: false}", "evaluator.at_start", False),
        ("recover: {mode: off}", "recover.mode", "disabled"),
        ("recover: {mode: 'on'}", "recover.mode", "auto"),
        ("gconfig: {top_k: -1}", "gconfig.top_k", 0),
        ("perf_tracer: {enabled: true}", "profile", True),
        ("stats_logger: {tensorboard: {path: /x}}", "stats_logger.tensorboard", True),
        ("stats_logger: {trackio: {mode: local}}", "stats_logger.trackio", True),
        ("stats_logger: {trackio: {mode: disabled}}", "stats_logger.trackio", False),
        ("actor: {mb_spec: {max_tokens_per_mb: null}}", "actor.mb_spec.max_tokens_per_mb", 8192),
        ("actor: {overlong_penalty_factor: null}", "actor.overlong_reward_penalty", False),
        ("allocation_mode: vllm:d4t2+fsdp:d8", "rollout.backend", "vllm:d4t2"),
        ("allocation_mode: sglang:d4+d4p1t1", "actor.backend", "fsdp:d4"),
        ("allocation_mode: sglang.d4p1m2+d4p1m1\nactor: {backend: fsdp}", "rollout.backend", "vllm:d4t2"),
        ("allocation_mode: sglang:d4+d4\nactor: {backend: 'fsdp:d4p1t1'}", "actor.backend", "fsdp:d4p1t1"),
    ],
)
def test_old_spellings_mean_what_they_meant_and_say_so_once(tmp_path, written, key, value):
    result = loaded(tmp_path, written)
    assert value_of(result.config, key) == value
    assert len(own(result.messages)) == 1


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        ("behav_imp_weight_cap: 3", ("token", "mask", 3.0)),
        ("behave_imp_weight_cap: 3.0", ("token", "mask", 3.0)),
        ("behave_imp_weight_cap: 3, behave_imp_weight_mode: token_mask", ("token", "mask", 3.0)),
        ("behave_imp_weight_cap: 3, behave_imp_weight_mode: token_truncate", ("token", "clamp", 3.0)),
        ("behave_imp_weight_cap: 3, behave_imp_weight_mode: sequence_mask", ("sequence", "mask", 3.0)),
        ("behave_imp_weight_cap: 3, behave_imp_weight_mode: sequence_truncate", ("sequence", "clamp", 3.0)),
        ("behave_imp_weight_mode: sequence_mask", ("sequence", "mask", 5.0)),
        ("behave_imp_weight_cap: null, behave_imp_weight_mode: disabled", None),
        ("behave_imp_weight_mode: disabled", None),
        ("behav_imp_weight_cap: null", None),
    ],
)
def test_the_weight_cap_becomes_rejection_sampling(tmp_path, cap, expected):
    result = loaded(tmp_path, f"actor: {{use_decoupled_loss: true, {cap}}}")
    correction = result.config.actor.rejection_sampling
    got = None if correction is None else (correction.level, correction.action, correction.upper)
    assert got == expected
    assert len(own(result.messages)) == len(cap.split(","))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("actor: {behav_imp_weight_cap: 0.5}", ["behav_imp_weight_cap", "above 1"]),
        ("actor: {behave_imp_weight_mode: tokens}", ["behave_imp_weight_mode", "token_mask"]),
        (
            "actor: {behav_imp_weight_cap: 3, rejection_sampling: {upper: 4}}",
            ["rejection_sampling.upper", "remove one"],
        ),
        ("actor: {group_size: 4}\ngconfig: {n_samples: 8}", ["gconfig.n_samples", "remove one"]),
        ("actor: {use_sapo_loss: true}\nalgorithm: gspo", ["algorithm", "gspo", "remove one"]),
        ("actor: {use_sapo_loss: false}\nalgorithm: sapo", ["use_sapo_loss", "contradicts"]),
        ("actor: {use_sapo_loss: true, use_cispo_loss: true}", ["algorithm", "remove one"]),
        ("actor: {dynamic_sampling: 3}", ["dynamic_sampling must be true or false"]),
        ("actor: {experiment_name: other}", ["actor.experiment_name", "a run has only one experiment_name"]),
        ("saver: {fileroot: /elsewhere}", ["saver.fileroot", "cluster.fileroot"]),
        ("actor: {megatron: {ddp: {}}}", ["actor.megatron", "fsdp:dN"]),
        ("actor: {archon: {attn_type: x}}", ["actor.archon", "fsdp:dN"]),
        ("ref: {backend: 'megatron:d4'}", ["ref.backend", "actor.backend"]),
        ("allocation_mode: sglang:d4+megatron:d4", ["allocation_mode", "megatron", "fsdp"]),
        ("allocation_mode: sglang:d4|d4", ["allocation_mode", "rollout.backend: local"]),
        ("allocation_mode: sglang:d4", ["allocation_mode", "no trainer"]),
        ("allocation_mode: sglang:d4+eval", ["allocation_mode", "gspo eval"]),
        ("allocation_mode: sglang:d4+d4\nrollout: {backend: 'vllm:d2'}", ["rollout.backend", "remove one"]),
        ("enable_offload: true", ["enable_offload", "actor.backend"]),
        ("ref: {init_from_scratch: true}", ["ref.init_from_scratch", "not supported"]),
        ("rollout: {agent: {mode: inline}}", ["rollout.agent", "env.agent"]),
        ("actor: {m2_threshold: 0.04}", ["m2_threshold", "rejection_sampling"]),
        ("gconfig: {frequency_penalty: 0.1}", ["frequency_penalty", "remove it"]),
        ("total_train_n_seqs: 100", ["total_train_steps"]),
        ("stats_logger: {swanlab: {mode: online}}", ["swanlab", "wandb"]),
        ("stats_logger: {trackio: {mode: online, space_id: me/x}}", ["trackio", "remove space_id"]),
        ("train_dataset: {type: sft}", ["train_dataset.type", "remove it"]),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_to_do(tmp_path, text, words):
    message = refusal(tmp_path, text)
    assert f"{tmp_path}/areal.yaml:" in message
    for word in words:
        assert word in message


def test_an_agreeing_repetition_is_fine_even_across_eras(tmp_path):
    text = "actor: {group_size: 4, use_sapo_loss: true}\ngconfig: {n_samples: 4}\nalgorithm: sapo\n"
    assert loaded(tmp_path, text).config.gconfig.n_samples == 4


def test_the_command_line_beats_the_file_across_spellings(tmp_path):
    old = "actor: {behave_imp_weight_cap: 3.0, group_size: 4, use_decoupled_loss: true}\n"
    config = loaded(tmp_path, old, ["actor.rejection_sampling.upper=9", "gconfig.n_samples=2"]).config
    assert config.actor.rejection_sampling is not None
    assert (config.actor.rejection_sampling.upper, config.gconfig.n_samples) == (9.0, 2)
    new = "actor: {rejection_sampling: {upper: 3.0}, use_decoupled_loss: true}\ngconfig: {n_samples: 4}\n"
    config = loaded(tmp_path, new, ["+actor.behave_imp_weight_cap=9", "+actor.group_size=2"]).config
    assert config.actor.rejection_sampling is not None
    assert (config.actor.rejection_sampling.upper, config.gconfig.n_samples) == (9.0, 2)
    assert loaded(tmp_path, old, ["actor.rejection_sampling=null"]).config.actor.rejection_sampling is None
    result = loaded(tmp_path, "rollout: {max_head_offpolicyness: 2}\nasync_training: false", ["async_training=true"])
    assert result.config.rollout.max_head_offpolicyness == 2


def test_every_target_of_a_rule_is_a_key_of_ours():
    for rule in rules().values():
        assert not rule.target or rule.target in known_keys(), rule


def test_an_sft_config_trains_its_model_by_sft(tmp_path):
    (tmp_path / "sft.yaml").write_text(
        "model: {path: embedded:tiny, optimizer: {type: adam, lr: 2e-5}, mb_spec: {max_tokens_per_mb: 4096}}\n"
        "tokenizer_path: ${model.path}\n"
        "train_dataset: {path: a.jsonl, type: sft, max_length: 1024}\n"
    )
    config = load(tmp_path / "sft.yaml").config
    assert (config.algorithm, config.actor.path, config.tokenizer_path) == ("sft", "embedded:tiny", "embedded:tiny")
    assert (config.actor.optimizer.lr, config.actor.mb_spec.max_tokens_per_mb) == (2e-5, 4096)
    with pytest.raises(ConfigError, match=r"model: is TRL's name; here it is actor\.path"):
        load({"model": "gpt2"})


def refusal_of(*overrides):
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    return str(caught.value)


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
        ("gconfig.stop_token_ids=[7, 8]", "gconfig.stop", [7, 8]),
        ("gconfig.stop_token_ids=[]", "gconfig.stop", []),
        ("eval_gconfig.ignore_eos=false", "gconfig.ignore_eos", False),
        ("eval_gconfig.stop_token_ids=[]", "gconfig.stop", []),
        ("actor.reward_norm.mean_leave1out=true", "actor.reward_norm.mean_level", None),
        ("actor.overlong_penalty_factor=0.5", "actor.overlong_reward_penalty", False),
        ("recover.mode=fault", "recover.mode", "auto"),
        ("actor.recompute_logprob=true", "actor.prox_logp_method", "recompute"),
        ("actor.recompute_logprob=false", "actor.prox_logp_method", "rollout"),
        ("actor.attn_impl=flash_attention_2", "actor.dtype", "auto"),
        ("actor.mb_spec.granularity=8", "actor.mb_spec.max_tokens_per_mb", 8192),
        ("ref.mb_spec.max_tokens_per_mb=100", "actor.mb_spec.max_tokens_per_mb", 8192),
        ("actor.temperature=1.0", "gconfig.temperature", 1.0),
        ("eval_gconfig.stop=[]", "gconfig.stop", []),
        ("train_dataset.type=rl", "train_dataset.path", "embedded:arithmetic"),
        ("valid_dataset.batch_size=7", "valid_dataset.split", "test"),
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
        ("stats_logger.wandb.project=p", "stats_logger.wandb.mode", "disabled"),
    ],
)
def test_a_key_of_areal_is_translated_or_ignored_with_one_message(override, key, value):
    loaded = load(None, [override, "rollout.backend=local", "actor.backend=fsdp"])
    assert value_of(loaded.config, key) == value
    assert len(loaded.messages) == 1


def test_the_higher_of_two_frequencies_wins():
    both = load(None, ["saver.freq_steps=4", "recover.freq_steps=9"])
    assert both.config.saver.freq_steps == 4
    assert "4 is not larger" in both.messages[0]
    assert load(None, ["saver.freq_steps=9", "recover.freq_steps=4"]).config.saver.freq_steps == 4


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["saver.freq_epochs=4", "recover.freq_epochs=2"], "saver.freq_steps", "2 epochs"),
        (["saver.freq_epochs=2", "recover.freq_epochs=4"], "saver.freq_steps", "2 epochs"),
        (["evaluator={freq_epochs: 1, freq_steps: 9}"], "evaluator.freq_steps", 9),
        (["evaluator={freq_epochs: 1, freq_steps: null}"], "evaluator.freq_steps", "epoch"),
        (["actor.reward_norm={mean_level: group, mean_leave1out: true}"], "actor.reward_norm.mean_level", "leave1out"),
        (["actor.reward_norm={mean_level: group, mean_leave1out: false}"], "actor.reward_norm.mean_level", "group"),
        (["actor={overlong_reward_penalty: true, overlong_penalty_factor: 0.5}"], "actor.overlong_reward_penalty", 0.5),
        (["actor={overlong_reward_penalty: true, overlong_penalty_factor: 1}"], "actor.overlong_reward_penalty", True),
        (["actor={overlong_reward_penalty: true, overlong_penalty_factor: 0}"], "actor.overlong_reward_penalty", False),
        (["algorithm=dapo", "actor.overlong_penalty_factor=2"], "actor.overlong_reward_penalty", 2),
        (["gconfig={stop: [x], stop_token_ids: [5]}", "eval_gconfig.stop_token_ids=[5]"], "gconfig.stop", ["x", 5]),
    ],
)  # fmt: skip
def test_two_keys_of_areal_become_one(overrides, key, value):
    assert value_of(load(None, overrides).config, key) == value


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("actor.temperature=0.7", "gconfig.temperature"),
        ("actor.max_new_tokens=7", "gconfig.max_new_tokens"),
        ("eval_gconfig.stop=[x]", "gconfig.stop"),
        ("actor.reward_norm={mean_level: group, group_size: 3}", "gconfig.n_samples"),
        ("actor.disable_dropout=false", "remove it"),
        ("train_dataset.type=sft", "remove it"),
        ("valid_dataset.max_length=9", "train_dataset.max_length"),
        ("gconfig.greedy=7", "must be true or false"),
        ("actor.reward_norm={std_level: group, eps: 0.1}", "remove it"),
        ("actor.adv_norm.mean_leave1out=true", "actor.reward_norm.mean_level: leave1out"),
        ("actor.reward_norm={mean_level: batch, mean_leave1out: true}", "mean_level: leave1out"),
        ("eval_gconfig.stop_token_ids=[3]", "remove it"),
        ("gconfig.stop_token_ids=3", "gconfig.stop"),
        ("saver.freq_epochs=0", "saver.freq_steps: epoch"),
        ("critic.optimizer.weight_decay=0.5", "actor.optimizer.weight_decay"),
        ("ref.dtype=float64", "actor.dtype"),
        ("actor.optimizer.min_lr_ratio=0.1", "remove it"),
        ("rollout.request_retries=7", "remove it"),
        ("evaluator.freq_secs=60", "evaluator.freq_steps"),
    ],
)
def test_a_value_that_means_something_else_is_refused_with_the_remedy(override, remedy):
    assert remedy in refusal_of(override)


def test_a_queue_is_refused_where_it_limited_what_staleness_allows():
    stale = ("rollout.max_head_offpolicyness=1", "train_dataset.batch_size=8")
    assert load(None, [*stale, "rollout.queue_size=16"]).config.rollout.max_head_offpolicyness == 1
    assert "rollout.max_concurrent_rollouts" in refusal_of(*stale, "rollout.queue_size=15")


def test_an_override_of_the_temperature_wins_over_greedy_in_a_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("eval_gconfig: {n_samples: 1, greedy: true, temperature: 1.0}\ngconfig: {temperature: 0.8}\n")
    temperatures = [load(file, words).config.eval_gconfig.temperature
                    for words in ([], ["eval_gconfig.temperature=0.5"], ["~eval_gconfig.temperature"])]  # fmt: skip
    assert temperatures == [0, 0.5, 0.8]


def test_no_key_of_a_rule_is_in_the_schema():
    """A rule for a key of the schema may only translate old values of it."""
    for key in set(rules()) & set(known_keys()):
        assert rules()[key].kind == "translate", key


def test_a_key_of_an_earlier_version_is_unknown_and_the_nearest_key_is_named():
    assert "not a known key; the nearest is train_dataset.columns" in refusal_of("train_dataset.prompt_column=task")
    assert "not a known key" in refusal_of("stats_logger.keep_sample_steps=5")


# What a file of AReaL's leaves to AReaL's defaults.

THEIRS = "gconfig: {greedy: false}\n"  # a key that only AReaL has


def test_a_file_without_reward_norm_trains_reinforce_pp(tmp_path):
    """AReaL's REINFORCE++ example: the raw reward, KL in the reward, a normalisation over the batch's tokens."""
    text = THEIRS + "actor: {adv_norm: {mean_level: batch, std_level: batch}, kl_ctl: 0.001}\nref: {}\n"
    result = loaded(tmp_path, text)
    objective = effective_objective(result)
    assert (objective["advantage"], objective["aggregation"]) == ("batch", "token_mean")
    assert objective_words(result).startswith("REINFORCE_PP (one ratio per token)")
    assert str(result.origin("actor.reward_norm")) == "AReaL's default"
    assert not result.is_set("actor.loss_aggregation")
    # First: the lines that change what is trained.
    assert [line.split(" (")[0] for line in result.messages[:3]] == [
        "AReaL's default: actor.loss_aggregation is token_mean",
        "AReaL's default: actor.reward_norm is {mean_level: null, std_level: null}",
        "AReaL's default: actor.prox_logp_method is rollout",
    ]


def test_the_same_file_with_an_algorithm_has_that_algorithms_defaults(tmp_path):
    text = THEIRS + "actor: {importance_sampling_level: sequence}\n"
    theirs = effective_objective(loaded(tmp_path, text))
    assert (theirs["advantage"], theirs["aggregation"], theirs["settings"]["clip_low"]) == (
        "reward_norm", "token_mean", 0.2,
    )  # fmt: skip
    gspo = effective_objective(loaded(tmp_path, text, ["algorithm=gspo"]))
    assert (gspo["advantage"], gspo["aggregation"], gspo["settings"]["clip_low"]) == (
        "group_std", "sequence_mean", 3e-4,
    )  # fmt: skip


def test_a_file_is_areals_if_it_has_a_key_that_only_areal_has(tmp_path):
    native = "actor: {importance_sampling_level: sequence}\n"
    for overrides in ([], ["gconfig.greedy=false"]):  # the command line does not make a file AReaL's
        result = loaded(tmp_path, native, overrides)
        assert effective_objective(result)["aggregation"] == "sequence_mean"
        assert not any(line.startswith("AReaL's default") for line in result.messages)


def test_doctor_says_where_gspo_by_its_paper_differs_and_which_key_to_set(tmp_path):
    group = "{mean_level: group, std_level: group}"
    result = loaded(tmp_path, THEIRS + f"actor: {{importance_sampling_level: sequence, reward_norm: {group}}}\n")
    (finding,) = [f for f in lint(result, num_gpus=0) if f.key == "actor.loss_aggregation"]
    assert "in the paper every completion has the same weight" in finding.message
    assert finding.remedy.startswith("set actor.loss_aggregation: sequence_mean (the paper)")
    assert objective_words(result).startswith("GSPO with token_mean (one ratio per completion)")


def test_a_section_of_a_norm_has_areals_levels(tmp_path):
    text = THEIRS + "actor: {reward_norm: {mean_level: group}, adv_norm: {std_level: null}}\n"
    actor = loaded(tmp_path, text).config.actor
    assert (actor.reward_norm.mean_level, actor.reward_norm.std_level) == ("group", "batch")
    assert (actor.adv_norm.mean_level, actor.adv_norm.std_level) == ("batch", None)


def test_mask_no_eos_with_zero_of_an_areal_file_zeroes_the_reward(tmp_path):
    text = "actor: {mask_no_eos_with_zero: true}\n"
    assert loaded(tmp_path, text).config.actor.mask_no_eos_with_zero is True
    result = loaded(tmp_path, THEIRS + text)
    assert result.config.actor.mask_no_eos_with_zero == "reward"
    assert any("actor.mask_no_eos_with_zero true is now reward" in line for line in result.messages)

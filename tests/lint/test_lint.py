"""Every warning and every error: a config that triggers it, and its neighbour that does not."""

import dataclasses
import re
import shlex

import pytest

from gspo.algorithms import ALGORITHMS
from gspo.config import dump, load
from gspo.errors import ConfigError
from gspo.lint import check, lint
from gspo.lint.unused import ineffective

BASE = ["algorithm=gspo"]


def findings(*overrides, num_gpus=0, base=BASE):
    return lint(load(None, [*base, *overrides]), num_gpus=num_gpus)


def keys(*overrides, severity, **kwargs):
    return [f.key for f in findings(*overrides, **kwargs) if f.severity == severity]


def rows(table):
    """The lines of a table as (key, overrides of each column …)."""
    for line in table.strip().splitlines():
        key, _, columns = line.partition(": ")
        split = [shlex.split(column.replace("FILE", __file__)) for column in columns.split("|")]
        yield key, *([key + word if word[0] == "=" else word for word in column] for column in split)


def test_the_presets_have_nothing_to_object_to():
    for name in ALGORITHMS.keys() - {"ppo", "sft", "distill"}:  # they need a critic, completions or a teacher
        assert findings(base=[f"algorithm={name}"]) == [], name
    assert findings("critic.path=embedded:tiny", base=["algorithm=ppo"]) == []


# One finding a line: its key, what both configs set, what is wrong, what the neighbour sets in its place. `=x` sets the
# key of the finding; FILE is a file that exists.
ERRORS = """
actor.weight_update_mode: rollout.backend=vllm:d1 vllm.url=http://a:1 | =broadcast | =disk
gconfig.temperature: | =0 | =0.1
actor.optimizer.type: =adamw8bit | actor.backend=fsdp:d2 | actor.backend=fsdp:d1
actor.optimizer.offload: =true | actor.backend=fsdp:d2 |
actor.optimizer.offload: =true | actor.optimizer.type=adamw8bit | actor.optimizer.type=adamw
actor.lora_base_bits: =4 | | actor.use_lora=true
actor.backend: actor.lora_base_bits=8 actor.use_lora=true | =fsdp:d2 | rollout.backend=local:d2
rollout.backend: actor.use_lora=true =vllm:d1 | actor.lora_base_bits=8 |
rollout.sampler_precision: actor.use_lora=true =bf16 | actor.lora_base_bits=8 |
actor.entropy_target: =0.3 | | actor.entropy_coef=0.001
reward.normalize: =each | algorithm=ppo critic.path=embedded:tiny |
reward.normalize: =each env.path=tools | env.turn_discount=0.9 actor.sequence_unit=turn |
actor.rejection_sampling.upper: actor.rejection_sampling.preset=seq_tis | =null |
gconfig.max_tokens: | =500 | =512
actor.kl_loss_coef: =0.1 | | ref.path=embedded:tiny
actor.kl_ctl: =0.1 | | ref.path=embedded:tiny
gconfig.n_samples: | =1 | =2
env.path: | =toolz | =tools
env.path: | =nothing.py:f | =mine:f
env.path: | =trl:nothing.py:Game | =trl:FILE:Game
reward.functions: | =[math,nothing.py:f] | =[math,mine:f]
reward.functions: | "=[{name: nothing.py:f}]" | "=[{name: FILE:f}]"
train_dataset.mixture: | "=[{path: a.jsonl, reward: [nothing.py:f]}]" | "=[{path: a.jsonl, reward: [mine:f]}]"
rollout.dynamic_filter_fn: | =nothing.py:f | =FILE:f
evaluator.best: | =eval/length | =eval/math/accuracy
evaluator.best: | =reward | =eval/reward
env.max_turns: env.path=tools env.options.max_turns=20 | | =20
env.turn_discount: env.path=tools =0.9 | algorithm=ppo critic.path=embedded:tiny | algorithm=grpo
gconfig.n_samples: =1 | algorithm=rloo | algorithm=reinforce_pp
gconfig.n_samples: algorithm=reinforce_pp =1 | actor.reward_norm.std_level=group | actor.reward_norm.std_level=batch
actor.ppo_n_minibatches: | =3 | =2
actor.ppo_n_minibatches: | =512 | =256
algorithm: =ppo | | critic.path=embedded:tiny
actor.zero_variance_groups: algorithm=ppo critic={} gconfig.n_samples=1 | =drop |
gconfig.min_new_tokens: gconfig.max_new_tokens=8 | =9 | =8
gconfig.min_new_tokens: eval_gconfig.max_new_tokens=8 | =9 | =8
actor.eps_clip: algorithm=grpo | =1.0 | =0.9
actor.eps_clip: =auto | algorithm=cispo | algorithm=gspo
actor.eps_clip: =auto | algorithm=grpo | algorithm=gspo_token
actor.use_decoupled_loss: =true | actor.prox_logp_method=rollout | actor.prox_logp_method=recompute
actor.target_modules: =[] | actor.use_lora=true |
reward.weights: reward.functions=[math,format] | =[1.0] | =[1.0,0.1]
actor.overlong_tokens: =600 | algorithm=dapo | algorithm=gspo
actor.mask_no_eos_with_zero: =true gconfig.ignore_eos=true | | gconfig.stop=[x]
cluster.n_gpus_per_node: rollout.backend=vllm:d4 actor.backend=fsdp:d4 | =4 | =8
vllm: rollout.backend=vllm:d1 | vllm.logprobs_mode=raw_logprobs | vllm.max_model_len=512
rollout.max_head_offpolicyness: rollout.backend=vllm:d1 =2 | cluster.n_gpus_per_node=1 | cluster.n_gpus_per_node=2
"""

WARNINGS = """
gconfig.temperature: | =0.1 | =0.5
actor.eps_clip: | =0.2 | =0.005
actor.eps_clip: =0.2 | | gconfig.max_new_tokens=4
actor.eps_clip: =0.2 | | algorithm=grpo
actor.eps_clip_higher: | =0.3 | =0.003
actor.eps_clip: =0.06 | | gconfig.max_new_tokens=14
actor.eps_clip: algorithm=grpo | =0.002 | =0.02
actor.eps_clip: algorithm=dr_grpo | =0.002 | =0.02
actor.eps_clip: algorithm=dapo | =0.002 | =0.02
actor.eps_clip: algorithm=rloo | =0.002 | =0.02
actor.eps_clip: algorithm=reinforce_pp | =0.002 | =0.02
actor.eps_clip: algorithm=ppo critic.path=embedded:tiny | =0.002 | =0.02
actor.eps_clip: algorithm=distill teacher.path=embedded:tiny | =0.002 | =0.02
actor.eps_clip: actor.importance_sampling_level=token | =0.002 | =0.02
actor.eps_clip_higher: algorithm=grpo actor.eps_clip=0.2 | =0.0025 |
actor.eps_clip: =0.002 | algorithm=grpo | algorithm=gspo_token
actor.eps_clip: =0.002 | algorithm=grpo | algorithm=luspo
actor.eps_clip: gconfig.max_new_tokens=16 | | =auto
actor.eps_clip: =1e-6 | | actor.dtype=float64
actor.ppo_n_minibatches: | =1 | =2
actor.ppo_n_minibatches: =1 | | actor.prox_logp_method=rollout
actor.loss_aggregation: | =token_mean | =sequence_sum
actor.loss_aggregation: =token_mean | | algorithm=grpo
actor.kl_ctl: =0.1 ref.path=embedded:tiny | | algorithm=gspo_token
actor.kl_ctl: ref.path=embedded:tiny | =0.1 | actor.kl_loss_coef=0.1
env.turn_discount: env.path=tools =0.9 | | actor.sequence_unit=turn
actor.kl_ctl: =0.1 ref.path=embedded:tiny algorithm=grpo | actor.kl_loss_coef=0.1 |
actor.kl_estimator: actor.kl_loss_coef=0.1 ref.path=embedded:tiny | =k1 | =k2
actor.kl_estimator: ref.path=embedded:tiny =k1 | actor.kl_loss_coef=0.1 | actor.kl_ctl=0.1 algorithm=grpo
critic: critic.path=embedded:tiny | | algorithm=ppo
rollout.max_head_offpolicyness: =4 | | actor.use_decoupled_loss=true
rollout.max_head_offpolicyness: =4 | | actor.prox_logp_method=rollout
actor.prox_logp_method: rollout.max_head_offpolicyness=4 | =rollout | actor.use_decoupled_loss=true
gconfig.top_p: =0.9 actor.prox_logp_method=rollout | actor.sampling_mask_replay=false |
gconfig.top_k: =20 actor.use_decoupled_loss=true | actor.sampling_mask_replay=false |
gconfig.min_p: =0.1 actor.prox_logp_method=recompute | actor.sampling_mask_replay=false | gconfig.min_new_tokens=2
gconfig.min_new_tokens: =2 | actor.prox_logp_method=rollout |
actor.prox_logp_method: =rollout | rollout.backend=vllm:d4 cluster.n_gpus_per_node=8 | rollout.backend=local
actor.rejection_sampling.upper: actor.rejection_sampling.action=clamp | =null | =2.0
actor.rejection_sampling.agg: actor.rejection_sampling.level=sequence | =sum | =mean
actor.rejection_sampling.agg: actor.rejection_sampling.preset=seq_tis | gconfig.max_new_tokens=2000 | gconfig.max_new_tokens=200
actor.mb_spec.max_tokens_per_mb: =1000 | train_dataset.max_length=600 | train_dataset.max_length=400
actor.reward_norm: actor.reward_norm.mean_level=batch | | algorithm=null
actor.reward_norm: actor.reward_norm.mean_level=group | | actor.reward_norm.std_level=group
actor.adv_norm: | actor.adv_norm.std_level=group | actor.adv_norm.std_level=batch
valid_dataset.split: valid_dataset.path=embedded:arithmetic | =train |
actor.optimizer.lr: | =0 | =1e-9
actor.optimizer.lr: | =10 | =5e-3
actor.optimizer.lr: actor.optimizer.type=sgd | =10 | =1
critic.optimizer.lr: algorithm=ppo critic.path=embedded:tiny | =1 | =1e-3
actor.optimizer.lr: =1e-3 | actor.path=org/model |
actor.optimizer.lr: actor.path=org/model =3e-4 | | actor.use_lora=true
actor.init_from_scratch: =true | actor.use_lora=true |
actor.dtype: | =bfloat16 | =float32
actor.dtype: =bfloat16 | | cluster.n_gpus_per_node=4
actor.fp32_lm_head: actor.dtype=bfloat16 =false | | algorithm=grpo
actor.fp32_lm_head: actor.dtype=bfloat16 | =false |
"""  # noqa: E501


@pytest.mark.parametrize(("key", "both", "wrong", "right"), rows(ERRORS))
def test_the_impossible_is_an_error_and_its_neighbour_is_not(key, both, wrong, right):
    assert key in keys(*both, *wrong, severity="error")
    assert keys(*both, *right, severity="error") == []


@pytest.mark.parametrize(("key", "both", "wrong", "right"), rows(WARNINGS))
def test_the_suspicious_is_a_warning_and_its_neighbour_is_not(key, both, wrong, right):
    before = [f for f in findings(*both, *wrong) if f.severity == "warning" and f.key == key]
    after = [f.message for f in findings(*both, *right)]
    assert before
    assert not any(f.message in after for f in before)
    assert keys(*both, *wrong, severity="error") == []


def test_every_finding_names_key_place_and_remedy(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("algorithm: gspo\nactor:\n  eps_clip: 0.4\n  ppo_n_minibatches: 1\n")
    found = {f.key: f for f in lint(load(file, ["gconfig.temperature=0"]), num_gpus=0)}
    assert found["actor.eps_clip"].where == f"{file}:3"
    assert found["gconfig.temperature"].where == "command line"
    assert "3e-4" in found["actor.eps_clip"].remedy
    assert all(f.remedy and f.message and not f.message.endswith(".") for f in found.values())


def test_token_ratios_with_an_eps_of_sequence_ratios_are_warned_about():
    eps = ["actor.eps_clip=2e-3", "actor.eps_clip_higher=2.5e-3"]
    (finding,) = lint(load("examples/quickstart.yaml", ["algorithm=grpo", *eps]), num_gpus=0)
    assert "ε = 2e-3 and 2.5e-3 is a clip range for sequence ratios" in finding.message
    assert "'~actor.eps_clip' '~actor.eps_clip_higher'" in finding.remedy
    assert lint(load("examples/quickstart.yaml", ["algorithm=grpo"]), num_gpus=0) == []


def test_ppo_without_a_critic_names_the_keys_to_add():
    (finding,) = lint(load("examples/quickstart.yaml", ["algorithm=ppo"]), num_gpus=0)
    assert finding.severity == "error"
    for words in ("'critic={}'", "critic.path", "critic.optimizer.lr", "critic.value_eps_clip"):
        assert words in finding.remedy
    assert lint(load("examples/quickstart.yaml", ["algorithm=ppo", "critic={}"]), num_gpus=0) == []


@pytest.mark.parametrize("tokens", [14, 32, 48, 64, 256, 500, 512, 4096])
def test_an_advised_eps_raises_no_warning_of_its_own(tokens):
    length = f"gconfig.max_new_tokens={tokens}"
    (wide,) = findings("actor.eps_clip=0.2", "actor.eps_clip_higher=0.2", length)
    advised = [float(value) for value in re.findall(r"[0-9][0-9.e-]*", wide.remedy.partition("sequences, or ")[2])]
    assert advised
    for low in advised:
        assert findings(f"actor.eps_clip={low}", f"actor.eps_clip_higher={4 / 3 * low}", length) == []
    if tokens <= 64:
        (narrow,) = findings("actor.eps_clip=3e-4", length)
        assert narrow.remedy.partition(", or ")[2] == wide.remedy.partition("sequences, or ")[2]


def test_the_areal_example_of_old_is_told_that_its_ratio_never_acts():
    found = keys("actor.eps_clip=0.4", "actor.ppo_n_minibatches=1", severity="warning")
    assert {"actor.eps_clip", "actor.ppo_n_minibatches"} <= set(found)


def test_an_undividable_batch_is_told_the_nearest_numbers_that_work():
    (finding,) = [
        f for f in findings("gconfig.n_samples=7", "actor.ppo_n_minibatches=6") if f.key == "actor.ppo_n_minibatches"
    ]
    assert "32 prompts × 7 samples = 224 sequences" in finding.message
    assert finding.remedy == "set actor.ppo_n_minibatches: 4 or 7, or train_dataset.batch_size: 30 or 36"
    for repair in ("actor.ppo_n_minibatches=4", "actor.ppo_n_minibatches=7"):
        assert keys("gconfig.n_samples=7", repair, severity="error") == []
    for prompts in (30, 36):
        sizes = ["gconfig.n_samples=7", "actor.ppo_n_minibatches=6", f"train_dataset.batch_size={prompts}"]
        assert keys(*sizes, severity="error") == []


def test_on_a_gpu_machine_auto_is_bfloat16():
    assert "actor.fp32_lm_head" in keys("actor.fp32_lm_head=false", severity="warning", num_gpus=1)
    assert "actor.fp32_lm_head" not in keys("actor.fp32_lm_head=false", severity="warning", num_gpus=0)


def test_check_returns_warnings_and_refuses_the_impossible():
    assert [f.key for f in check(load(None, ["algorithm=gspo", "actor.eps_clip=0.2"]), num_gpus=0)] == [
        "actor.eps_clip"
    ]
    with pytest.raises(ConfigError, match=r"gconfig\.n_samples \(command line\)"):
        check(load(None, ["algorithm=gspo", "gconfig.n_samples=1"]), num_gpus=0)


def test_strict_makes_warnings_errors():
    with pytest.raises(ConfigError, match="strict"):
        check(load(None, ["algorithm=gspo", "actor.eps_clip=0.2", "strict=true"]), num_gpus=0)


# The key, a config in which nothing reads it, and what makes something read it.
UNUSED = """
actor.sapo_tau_pos: =2 | algorithm=sapo
actor.c_clip: =3 algorithm=cispo | algorithm=gspo
actor.eps_clip: =0.1 algorithm=sapo | algorithm=grpo
actor.gae_lambda: =0.95 | algorithm=ppo critic.path=x
critic.value_eps_clip: =0.3 | algorithm=ppo
actor.lora_rank: =8 | actor.use_lora=true
actor.target_modules: =[q_proj] | actor.use_lora=true
ref.path: =x | actor.kl_loss_coef=0.1
actor.kl_estimator: =k2 | actor.kl_loss_coef=0.1 ref.path=x
actor.max_refills: =3 | algorithm=dapo
actor.overlong_tokens: =50 | actor.overlong_reward_penalty=true
actor.rejection_sampling.upper: =2 actor.use_decoupled_loss=false | actor.use_decoupled_loss=true
actor.rejection_sampling.agg: =max | actor.rejection_sampling.level=sequence
vllm: vllm.seed=1 | rollout.backend=vllm:d1
actor.weight_update_mode: =shm | rollout.backend=vllm:d1
eval_gconfig.top_k: "eval_gconfig={top_k: 5, temperature: 0}" | eval_gconfig.temperature=0.5
gconfig.stop: =[3] gconfig.min_new_tokens=512 | gconfig.min_new_tokens=0
actor.optimizer.beta1: =0.8 actor.optimizer.type=sgd | actor.optimizer.type=adamw
reward.weights: =[2.0] | reward.functions=[math]
total_train_epochs: =2 total_train_steps=9 | total_train_steps=null
evaluator.size: =9 evaluator.freq_steps=0 | evaluator.freq_steps=5
env.timeout: =5 | env.path=tools
actor.sequence_unit: =turn | env.path=tools
actor.sequence_unit: =turn env.path=tools algorithm=grpo | algorithm=gspo
"""


@pytest.mark.parametrize(("key", "overrides", "remedy"), rows(UNUSED))
def test_a_key_that_nothing_reads_is_named_and_its_reader_silences_it(key, overrides, remedy):
    idle = dict(ineffective(load(None, [*BASE, *overrides]), num_gpus=0))
    assert idle.get(key)
    assert key not in dict(ineffective(load(None, [*BASE, *overrides, *remedy]), num_gpus=0))


def test_a_key_the_user_left_alone_is_never_reported():
    assert ineffective(load(None, BASE), num_gpus=0) == []


def test_a_resolved_config_does_not_complain_of_the_keys_it_restates(tmp_path):
    file = tmp_path / "resolved.yaml"
    file.write_text(dump(load(None, [*BASE, "actor.sapo_tau_pos=2"])))
    assert [key for key, _ in ineffective(load(file), num_gpus=0)] == ["actor.sapo_tau_pos"]


def test_a_config_is_linted_once_and_a_copy_again():
    loaded = load(None, ["algorithm=gspo"])
    assert check(loaded) is check(loaded)
    other = dataclasses.replace(loaded, path=None)
    assert other.findings == {}
    assert check(other) == check(loaded)

"""Algorithm-aware defaults: set by the user > level > algorithm > default; π_old; the effective objective."""

from __future__ import annotations

from itertools import product

import pytest

from gspo.algorithms import ALGORITHMS, COMMON_SETTINGS, CORRECTIONS, GATES
from gspo.config import effective_objective, load, proximal_policy
from gspo.config.resolve import objective_words
from gspo.config.schema import known_keys
from gspo.errors import ConfigError


def actor(*overrides):
    return load(None, overrides).config.actor


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        load(None, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_alone_is_its_preset(name):
    preset = ALGORITHMS[name]
    result = load(None, [f"algorithm={name}"])
    objective = effective_objective(result)
    assert {key: objective[key] for key in ("level", "gate", "advantage", "aggregation")} == {
        "level": preset.level,
        "gate": preset.gate,
        "advantage": preset.advantage,
        "aggregation": preset.aggregation,
    }
    assert {key: objective["settings"][key] for key in preset.settings} == dict(preset.settings)
    assert result.config.actor.ppo_n_minibatches == preset.minibatches
    assert result.config.actor.zero_variance_groups == preset.zero_variance_groups
    assert result.config.actor.overlong_reward_penalty == preset.overlong_penalty


@pytest.mark.parametrize("name", ALGORITHMS)
def test_settings_are_those_of_the_gate_and_the_common_ones(name):
    settings = effective_objective(load(None, [f"algorithm={name}"]))["settings"]
    allowed = {*GATES[ALGORITHMS[name].gate].settings, *COMMON_SETTINGS, "level", "aggregation"}
    assert set(settings) - {"max_new_tokens"} == allowed
    assert ("max_new_tokens" in settings) == (ALGORITHMS[name].aggregation == "token_sum")


def test_without_an_algorithm_it_is_gspo_with_token_ratios_grpo_and_with_a_critic_ppo():
    assert load(None).config.algorithm == "gspo"
    assert load(None, ["actor.importance_sampling_level=token"]).config.algorithm == "grpo"
    assert load(None, ["critic={}"]).config.algorithm == "ppo"
    assert load(None, ["critic={}", "algorithm=gspo"]).config.algorithm == "gspo"


def test_the_level_brings_clip_range_and_aggregation_to_grpo():
    result = load(None, ["algorithm=grpo", "+actor.importance_sampling_level=sequence"])
    chosen = result.config.actor
    assert (chosen.eps_clip, chosen.eps_clip_higher, chosen.loss_aggregation) == (3e-4, 4e-4, "sequence_mean")
    assert str(result.origin("actor.eps_clip_higher")) == "level sequence"
    assert chosen.fp32_lm_head is True
    assert effective_objective(result)["level"] == "sequence"


def test_the_token_level_on_gspo_brings_the_token_scale():
    chosen = actor("algorithm=gspo", "actor.importance_sampling_level=token")
    assert (chosen.eps_clip, chosen.eps_clip_higher, chosen.loss_aggregation) == (0.2, 0.2, "sequence_mean")
    assert chosen.fp32_lm_head is False


def test_the_level_changes_a_foreign_aggregation_too():
    assert actor("algorithm=dapo", "actor.importance_sampling_level=sequence").loss_aggregation == "sequence_mean"


@pytest.mark.parametrize(("name", "level"), [("luspo", "sequence"), ("dapo", "token"), ("gspo_token", "sequence")])
def test_an_algorithms_own_level_spelled_out_changes_nothing(name, level):
    spelled = load(None, [f"algorithm={name}", f"actor.importance_sampling_level={level}"])
    assert spelled.config == load(None, [f"algorithm={name}"]).config
    assert effective_objective(spelled)["level"] == ALGORITHMS[name].level


def test_the_level_brings_neither_advantages_nor_sampling_nor_mini_batches():
    plain, changed = (
        load(None, ["algorithm=dapo"]),
        load(None, ["algorithm=dapo", "actor.importance_sampling_level=sequence"]),
    )
    assert effective_objective(changed)["advantage"] == effective_objective(plain)["advantage"]
    assert changed.config.gconfig == plain.config.gconfig
    assert changed.config.actor.zero_variance_groups == "refill"
    assert changed.config.actor.ppo_n_minibatches == plain.config.actor.ppo_n_minibatches


def test_what_the_user_set_beats_level_and_algorithm():
    chosen = actor(
        "algorithm=gspo",
        "actor.importance_sampling_level=sequence",
        "actor.eps_clip=0.01",
        "actor.loss_aggregation=token_mean",
        "actor.ppo_n_minibatches=7",
    )
    assert (chosen.eps_clip, chosen.loss_aggregation, chosen.ppo_n_minibatches) == (0.01, "token_mean", 7)


def test_eps_clip_alone_is_symmetric_and_eps_clip_higher_alone_keeps_the_lower():
    chosen = actor("algorithm=gspo", "actor.eps_clip=0.001")
    assert (chosen.eps_clip, chosen.eps_clip_higher) == (0.001, 0.001)
    chosen = actor("algorithm=gspo", "actor.eps_clip_higher=0.001")
    assert (chosen.eps_clip, chosen.eps_clip_higher) == (3e-4, 0.001)


def test_eps_clip_auto_starts_from_the_levels_scale():
    objective = effective_objective(load(None, ["algorithm=gspo", "actor.eps_clip=auto"]))
    assert objective["eps_auto"]
    assert (objective["settings"]["clip_low"], objective["settings"]["clip_high"]) == (3e-4, 4e-4)
    assert actor("algorithm=gspo", "actor.eps_clip=auto").eps_clip == "auto"
    assert "remove one of them" in refusal("actor.eps_clip=auto", "actor.eps_clip_higher=0.1")


def test_gmpo_has_no_token_level():
    assert "gmpo" in refusal("algorithm=gmpo", "actor.importance_sampling_level=token")


def test_nulls_that_need_no_device_become_concrete():
    config = load(
        None, ["gconfig.temperature=0.7", "gconfig.max_new_tokens=100", "ref={}", "critic={}", "actor.path=m"]
    ).config
    assert config.actor.overlong_tokens == 20
    assert config.actor.optimizer.lr == 1e-6
    assert (config.tokenizer_path, config.ref.path, config.critic.path) == ("m", "m", "m")
    assert (config.scheduler.type, config.train_dataset.split) == ("local", "train")
    assert (config.actor.dtype, config.rollout.backend, config.actor.backend) == ("auto", "auto", "auto")
    assert actor("actor.use_lora=true").optimizer.lr == 1e-5


def test_evaluation_is_one_greedy_sample_unless_its_section_says_how_to_sample():
    usual = load(None, ["gconfig.max_new_tokens=77"]).config.eval_gconfig
    assert (usual.n_samples, usual.temperature, usual.max_new_tokens) == (1, 0, 77)
    longer = load(None, ["eval_gconfig.max_new_tokens=99"]).config.eval_gconfig
    assert (longer.temperature, longer.max_new_tokens) == (0, 99)
    sampled = load(None, ["eval_gconfig.n_samples=4", "gconfig.temperature=0.6"]).config.eval_gconfig
    assert (sampled.n_samples, sampled.temperature) == (4, 0.6)


def test_backend_auto_is_said_once():
    assert len(load(None).messages) == 1
    assert "rollout.backend and actor.backend" in load(None).messages[0]
    assert load(None, ["rollout.backend=local", "actor.backend=fsdp"]).messages == []


TABLE = {
    # (prox_logp_method, recompute_logprob, use_decoupled_loss): (π_old, weight π_old/μ)
    ("auto", None, False): ("auto", False),
    ("auto", True, False): ("recompute", False),
    ("auto", False, False): ("rollout", False),
    ("auto", None, True): ("recompute", True),
    ("auto", True, True): ("recompute", True),
    ("auto", False, True): ("recompute", True),
    ("recompute", None, False): ("recompute", False),
    ("recompute", True, False): ("recompute", False),
    ("recompute", False, False): ("recompute", False),
    ("recompute", None, True): ("recompute", True),
    ("recompute", True, True): ("recompute", True),
    ("recompute", False, True): ("recompute", True),
    ("rollout", None, False): ("rollout", False),
    ("rollout", True, False): ("rollout", False),
    ("rollout", False, False): ("rollout", False),
    ("rollout", None, True): ("rollout", False),
    ("rollout", True, True): ("rollout", False),
    ("rollout", False, True): ("rollout", False),
    ("loglinear", None, False): ("loglinear", False),
    ("loglinear", True, False): ("loglinear", False),
    ("loglinear", False, False): ("loglinear", False),
    ("loglinear", None, True): ("loglinear", True),
    ("loglinear", True, True): ("loglinear", True),
    ("loglinear", False, True): ("loglinear", True),
}
YAML = {None: "null", True: "true", False: "false"}


def test_the_table_of_the_proximal_policy_is_complete():
    methods = known_keys()["actor.prox_logp_method"].choices
    assert set(TABLE) == set(product(methods, (None, True, False), (False, True)))


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_each_row_of_the_proximal_policy(row):
    method, recompute, decoupled = row
    if recompute is None:
        chosen = proximal_policy(decoupled, method)
        assert (chosen.method, chosen.corrected) == TABLE[row]
    result = load(
        None,
        [
            f"actor.prox_logp_method={method}",
            f"actor.recompute_logprob={YAML[recompute]}",
            f"actor.use_decoupled_loss={YAML[decoupled]}",
        ],
    )
    objective = effective_objective(result)
    assert (objective["proximal"], objective["corrected"]) == TABLE[row]
    assert (objective["settings"]["correction"] is not None) == TABLE[row][1]
    assert result.config.actor.prox_logp_method == TABLE[row][0]
    is_rollout = method == "rollout"
    contradicted = (method, recompute) == ("recompute", False) or (is_rollout and (recompute or decoupled))
    assert any("has no effect" in line for line in result.messages) == bool(contradicted)


def test_a_correction_alone_switches_its_weight_on_and_false_keeps_it_off():
    result = load(None, ["actor.rejection_sampling.preset=tis"])
    assert result.config.actor.use_decoupled_loss is True
    assert any("actor.use_decoupled_loss" in line for line in result.messages)
    result = load(None, ["actor.rejection_sampling.preset=tis", "actor.use_decoupled_loss=false"])
    assert effective_objective(result)["settings"]["correction"] is None
    assert any("actor.rejection_sampling has no effect" in line for line in result.messages)


@pytest.mark.parametrize("preset", CORRECTIONS)
def test_a_named_correction_is_its_row_and_set_keys_override_it(preset):
    form = effective_objective(load(None, [f"actor.rejection_sampling.preset={preset}"]))["settings"]["correction"]
    assert {key: form[key] for key in CORRECTIONS[preset]} == dict(CORRECTIONS[preset])
    assert set(form) == {"level", "action", "metric", "agg", "upper", "lower", "only_negative"}
    overridden = load(None, [f"actor.rejection_sampling.preset={preset}", "actor.rejection_sampling.upper=3.5"])
    assert effective_objective(overridden)["settings"]["correction"]["upper"] == 3.5


def test_a_null_bound_that_the_user_wrote_beats_the_preset():
    correction = actor("actor.rejection_sampling={preset: icepop, lower: null}").rejection_sampling
    assert (correction.lower, correction.upper) == (None, 5.0)


def test_the_bare_weight_has_no_bounds():
    form = effective_objective(load(None, ["actor.use_decoupled_loss=true"]))["settings"]["correction"]
    assert (form["action"], form["upper"], form["lower"]) == ("clamp", None, None)


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["action=clamp", "metric=kl_k2"], "mask"),
        (["lower=3", "upper=2"], "above"),
        (["upper=0.5"], "enclose 1"),
        (["lower=1.5"], "enclose 1"),
    ],
)
def test_an_impossible_correction_is_refused(overrides, word):
    assert word in refusal(*(f"actor.rejection_sampling.{text}" for text in overrides))


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        ("{mean_level: group, std_level: group}", "group_std"),
        ("{mean_level: group}", "group_mean"),
        ("{mean_level: leave1out}", "leave_one_out"),
        ("{mean_level: batch, std_level: batch}", "reward_norm"),
        ("{mean_level: group, std_level: batch}", "reward_norm"),
    ],
)
def test_a_reward_norm_is_called_by_the_advantage_it_amounts_to(norm, name):
    assert effective_objective(load(None, [f"actor.reward_norm={norm}"]))["advantage"] == name


def test_the_objective_library_accepts_every_effective_objective():
    torch = pytest.importorskip("torch")
    objectives = pytest.importorskip("gspo.objectives")
    logp = torch.tensor([[-1.0, -2.0], [-1.5, -0.5]], dtype=torch.float64, requires_grad=True)
    for name in ALGORITHMS:
        for extra in ([], ["actor.rejection_sampling.preset=icepop"], ["actor.eps_clip=auto"]):
            objective = effective_objective(load(None, [f"algorithm={name}", *extra]))
            out = objectives.loss(
                objective["name"],
                logp,
                logp.detach(),
                torch.tensor([1.0, -1.0], dtype=torch.float64),
                torch.ones(2, 2),
                behavior_logp=logp.detach(),
                **objective["settings"],
            )
            assert torch.isfinite(out.loss)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=gspo"], "GSPO (one ratio per completion), clip 3e-4/4e-4, 4 updates per batch"),
        (["actor.importance_sampling_level=sequence", "actor.ppo_n_minibatches=1"], "GSPO (one ratio per completion)"),
        ([], "GSPO (one ratio per completion), clip 3e-4/4e-4"),
        (["actor.importance_sampling_level=token"], "GRPO (one ratio per token), clip 0.2/0.2"),
        (["critic.path=x"], "PPO (one ratio per token)"),
        (["algorithm=gspo", "actor.eps_clip=auto"], "GSPO (one ratio per completion), automatic clip range"),
        (["algorithm=cispo"], "CISPO (one ratio per token)"),
    ],
)
def test_the_objective_is_named_in_a_newcomers_words(overrides, words):
    assert objective_words(load(None, overrides)).startswith(words)

"""A migrated config computes what it computed there: advantages and loss on a fixed batch, by that system's own code.

AReaL and verl are downloaded from PyPI when the tests run (`their_code`). AReaL's package has no examples and no tests:
a checkout of its repository, named by the environment variable AREAL_SOURCE, adds both. A difference that we know has
an entry in KNOWN and a line in docs/migrating.md; it is taken out of the batch, and everything else must be equal.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import their_code
import torch
import yaml

from gspo import objectives
from gspo.audit.findings import loaded_of
from gspo.audit.verl import from_verl
from gspo.config import effective_objective, load, yaml_tree
from gspo.errors import ConfigError
from gspo.learner import batch_with_advantages, with_token_advantages
from gspo.train.build.learner import assembly, make_credit
from gspo.types import Group, Prompt, Sample, SampleId, Score

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SOURCE = os.environ.get("AREAL_SOURCE", "")
PROMPT, LONGEST, GROUPS = 3, 12, 4


@dataclasses.dataclass
class Drawn:
    """One rollout batch: completions [n, LONGEST], each true up to its length; the last of each group is truncated."""

    group_size: int
    rewards: torch.Tensor  # [n]
    lengths: torch.Tensor  # [n]
    mask: torch.Tensor  # [n, T]
    behavior: torch.Tensor  # [n, T] log μ, …
    proximal: torch.Tensor
    current: torch.Tensor
    reference: torch.Tensor
    values: torch.Tensor
    bootstrap: torch.Tensor  # [n] the value after the last token; AReaL uses that of truncated completions

    @classmethod
    def of(cls, group_size, *, equal_group=True):
        draw = torch.Generator().manual_seed(3)
        n = GROUPS * group_size
        lengths = torch.randint(2, LONGEST, (n,), generator=draw)
        lengths[group_size - 1 :: group_size] = LONGEST
        rewards = torch.randint(0, 2, (n,), generator=draw).float() + 0.25 * torch.rand(n, generator=draw)
        if equal_group:
            rewards[:group_size] = 1.0
        mask = torch.arange(LONGEST) < lengths[:, None]

        def logp(mean, width):
            return (mean + width * torch.randn(n, LONGEST, generator=draw)) * mask

        current = logp(-1.0, 0.3)
        proximal, behavior = ((current + logp(0.0, width)) * mask for width in (0.3, 0.9))
        values = 0.5 * torch.rand(n, LONGEST, generator=draw)
        reference, bootstrap = current + logp(0.0, 0.5), torch.rand(n, generator=draw)
        return cls(group_size, rewards, lengths, mask, behavior, proximal, current, reference, values, bootstrap)

    @property
    def truncated(self):
        return self.lengths == LONGEST


def ours(loaded, batch: Drawn):
    """(advantages [n, T], loss) of a config."""
    size, config = batch.group_size, loaded.config
    samples = [
        Sample.of(
            SampleId(i // size, i % size), np.arange(m), batch.behavior[i, :m].double().numpy(), 0,
            "length" if batch.truncated[i] else "stop", np.ones(m, bool),
        )
        for i, m in enumerate(batch.lengths.tolist())
    ]  # fmt: skip
    outcomes = [Score(float(r), {"part": float(r)}) for r in batch.rewards]
    groups = [
        Group(g, Prompt((1,) * PROMPT, "?"), tuple(samples[s]), ("",) * size, tuple(outcomes[s]))
        for g in range(GROUPS)
        for s in (slice(g * size, (g + 1) * size),)
    ]
    made = batch_with_advantages(groups, num_minibatches=1, **assembly(loaded))

    def rows(x):
        return {i: x[i, :m].double().numpy() for i, m in enumerate(batch.lengths.tolist())}

    made = dataclasses.replace(made, reference_logp=rows(batch.reference))
    if config.critic is not None:
        made = dataclasses.replace(made, values=rows(batch.values))
    made = with_token_advantages(made, make_credit(config))
    advantages = torch.tensor(made.advantages)[:, None].expand(-1, LONGEST) * batch.mask
    if made.token_advantages is not None:
        advantages = torch.zeros(len(samples), LONGEST, dtype=torch.float64)
        for i, own in made.token_advantages.items():
            advantages[i, : len(own)] = torch.tensor(own)
    objective = effective_objective(loaded)
    old = batch.behavior if objective["proximal"] == "rollout" else batch.proximal
    # One A per sequence has the shape [n], as in training.
    given = advantages if made.token_advantages is not None else torch.tensor(made.advantages)
    loss = objectives.loss(
        objective["name"], batch.current.double(), old.double(), given, batch.mask,
        behavior_logp=batch.behavior.double(), reference_logp=batch.reference.double(), **objective["settings"],
    ).loss  # fmt: skip
    return advantages, float(loss)


# -- AReaL ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def areal():
    empty = ("areal.utils.logging", "areal.infra", "areal.experimental", "areal.engine")
    names = ("api.cli_args", "utils.functional", "trainer.ppo.actor")
    args, functional, actor = their_code.imported("areal", *(f"areal.{name}" for name in names), empty=empty)
    return SimpleNamespace(args=args, functional=functional, actor=actor)


def areal_config(areal, values):
    """AReaL's PPOActorConfig of the `actor` section of a file."""
    known = {f.name for f in dataclasses.fields(areal.args.PPOActorConfig)}
    given = {name: value for name, value in values.items() if name in known}
    kinds = {"reward_norm": areal.args.NormConfig, "adv_norm": areal.args.NormConfig}
    kinds["rejection_sampling"] = areal.args.RejectionSamplingConfig
    for name, kind in kinds.items():
        if isinstance(given.get(name), dict):
            given[name] = kind(**given[name])
    plain = {"bool", "int", "float", "str", "bool | None", "int | None", "float | None", "NormConfig | None"}
    plain |= {"RejectionSamplingConfig | None"}
    types = {f.name: str(getattr(f.type, "__name__", f.type)) for f in dataclasses.fields(areal.args.PPOActorConfig)}
    simple = {n: v for n, v in given.items() if not isinstance(v, dict | list) or types[n] in plain}
    return areal.args.PPOActorConfig(**simple)


def areals(areal, values, batch: Drawn, has_critic):
    """(advantages [n, T], loss) of AReaL. Its tensors are of prompt and completion; position t predicts token t + 1."""
    config, n = areal_config(areal, values), len(batch.rewards)
    whole = PROMPT + LONGEST

    def shifted(x):  # a completion's token t is predicted at PROMPT − 1 + t
        out = torch.zeros(n, whole)
        out[:, PROMPT - 1 : whole - 1] = x
        return out

    loss_mask, attention = torch.zeros(n, whole), torch.zeros(n, whole)
    loss_mask[:, PROMPT:] = batch.mask
    attention[:, :PROMPT], attention[:, PROMPT:] = 1, batch.mask
    data = {
        "input_ids": torch.zeros(n, whole, dtype=torch.long), "rewards": batch.rewards.clone(),
        "loss_mask": loss_mask, "attention_mask": attention, "logprobs": shifted(batch.behavior).roll(1, -1),
        "prox_logp": shifted(batch.proximal), "ref_logp": shifted(batch.reference),
    }  # fmt: skip
    if has_critic:
        data["values"] = shifted(batch.values)
        data["values"][:, -1] = batch.bootstrap
    actor = areal.actor.PPOActor(config, engine=None)
    data = actor._compute_advantages(data)
    common = {"logprobs": shifted(batch.current), "advantages": data["advantages"], "old_logprobs": data["logprobs"]}
    common |= {"loss_mask": data["loss_mask"].bool(), "importance_sampling_level": config.importance_sampling_level}
    if config.use_sapo_loss:
        loss, _ = areal.functional.sapo_loss_fn(**common, tau_pos=config.sapo_tau_pos, tau_neg=config.sapo_tau_neg)
    else:
        loss, _ = areal.functional.ppo_actor_loss_fn(
            **common, proximal_logprobs=data["prox_logp"], eps_clip=config.eps_clip,
            eps_clip_higher=config.eps_clip_higher, c_clip=config.c_clip, rejection_sampling=config.rejection_sampling,
        )  # fmt: skip
    return data["advantages"][:, PROMPT - 1 : whole - 1].double() * batch.mask, float(loss)


def is_decoupled(actor):
    return bool(actor.get("use_decoupled_loss"))


def without_bootstrap(batch):
    return dataclasses.replace(batch, bootstrap=torch.zeros_like(batch.bootstrap))


# name: (what docs/migrating.md says, whether a config has it, how a batch looks without it)
KNOWN = {
    "no weight": (
        "`use_decoupled_loss` without `rejection_sampling`",
        lambda actor, _: is_decoupled(actor) and not actor.get("rejection_sampling"),
        lambda batch: dataclasses.replace(batch, behavior=batch.proximal),
    ),
    "kl": (
        "`kl_ctl` with `recompute_logprob` and without `use_decoupled_loss`",
        lambda actor, _: actor.get("kl_ctl", 0) and actor.get("recompute_logprob") and not is_decoupled(actor),
        lambda batch: dataclasses.replace(batch, behavior=batch.proximal),
    ),
    "bootstrap": (
        "a truncated completion with a critic bootstraps",
        lambda _, has_critic: has_critic,
        without_bootstrap,
    ),
}


def test_known_differences_are_in_the_documentation():
    page = (ROOT / "docs/migrating.md").read_text()
    assert [name for name, (words, _, _) in KNOWN.items() if words not in page] == []


def compare(areal, values, loaded):
    actor, has_critic = values["actor"], isinstance(values.get("critic"), dict)
    size = loaded.config.gconfig.n_samples
    batch = Drawn.of(size, equal_group=loaded.config.actor.zero_variance_groups == "count")
    found = [fix for _, applies, fix in KNOWN.values() if applies(actor, has_critic)]
    # Each known difference is one: with it the two systems disagree.
    if found:
        (_, one), (_, other) = ours(loaded, batch), areals(areal, actor, batch, has_critic)
        assert abs(one - other) > 1e-4 * max(abs(other), 1e-2)
    for fix in found:
        batch = fix(batch)
    got, want = ours(loaded, batch), areals(areal, actor, batch, has_critic)
    # AReaL adds 1e-5 to a std, and computes in float32.
    torch.testing.assert_close(got[0], want[0], rtol=5e-4, atol=5e-4)
    assert got[1] == pytest.approx(want[1], rel=2e-3, abs=2e-4)


BASE = "gconfig: {n_samples: 4, greedy: false, max_new_tokens: 12}\ncluster: {name_resolve: {type: nfs}}\n"
GROUP, BATCH = "{mean_level: group, std_level: group, group_size: 4}", "{mean_level: batch, std_level: batch}"
PLAIN = "eps_clip: 0.4, kl_ctl: 0.0, recompute_logprob: true, use_decoupled_loss: false"
# The objectives of AReaL's examples, one each, then what their keys can say besides.
OBJECTIVES = {
    "grpo": f"{PLAIN}, reward_norm: {GROUP}, adv_norm: {BATCH}",
    "gspo": f"{PLAIN}, reward_norm: {GROUP}, adv_norm: {BATCH}, importance_sampling_level: sequence",
    "reinforce": f"{PLAIN}, adv_norm: {BATCH}, reward_scaling: 10.0, reward_bias: -0.5",
    "reinforce with kl": "eps_clip: 0.4, kl_ctl: 0.1, use_decoupled_loss: true, rejection_sampling: {upper: 5.0}, "
    f"adv_norm: {BATCH}",
    "kl of the recomputed policy": f"eps_clip: 0.4, kl_ctl: 0.1, recompute_logprob: true, adv_norm: {BATCH}",
    "rloo": f"{PLAIN}, adv_norm: {BATCH}, "
    "reward_norm: {mean_level: group, mean_leave1out: true, std_level: null, group_size: 4}",
    "dr grpo": f"{PLAIN}, reward_norm: {{mean_level: group, std_level: null, group_size: 4}}",
    "lite ppo": f"{PLAIN}, adv_norm: {BATCH}, reward_norm: {{mean_level: group, std_level: batch, group_size: 4}}",
    "sapo": f"{PLAIN}, use_sapo_loss: true, reward_norm: {GROUP}, adv_norm: {BATCH}",
    "sampler's policy": f"eps_clip: 0.2, kl_ctl: 0.0, reward_norm: {GROUP}",
    "decoupled": f"eps_clip: 0.2, kl_ctl: 0.0, use_decoupled_loss: true, reward_norm: {GROUP}",
    "limits without weight": f"{PLAIN}, reward_norm: {GROUP}, rejection_sampling: {{upper: 1.2}}",
    "zeroed": f"{PLAIN}, reward_norm: {GROUP}, adv_norm: {BATCH}, mask_no_eos_with_zero: true",
    "levels by default": f"{PLAIN}, reward_norm: {{}}, adv_norm: {{std_level: null}}",
    "dapo": f"{PLAIN}, eps_clip_higher: 0.28, c_clip: 3.0, reward_norm: {GROUP}, adv_norm: {BATCH}, "
    "overlong_reward_penalty: true, overlong_tokens: 4, overlong_penalty_factor: 0.5, max_new_tokens: 12",
    "discount": f"{PLAIN}, reward_norm: {GROUP}, discount: 0.9",
}
LIMITS = [
    f"{{level: {level}, action: {action}, metric: {metric}, agg: {agg}, upper: {upper}, lower: {lower}}}"
    for level, aggs in (("token", ["mean"]), ("sequence", ["mean", "sum", "max"]))
    for agg in aggs
    for action, metric, upper, lower in (
        ("mask", "ratio", 1.3, 0.6), ("clamp", "ratio", 1.3, 0.6), ("mask", "kl_k1", 0.3, -0.3),
        ("mask", "kl_k2", 0.3, "null"), ("mask", "kl_k3", 0.3, "null"),
    )
]  # fmt: skip
DECOUPLED = f"eps_clip: 0.2, kl_ctl: 0.0, use_decoupled_loss: true, reward_norm: {GROUP}, rejection_sampling: "
OBJECTIVES |= {
    f"{level} {limit}": f"{DECOUPLED}{limit}, importance_sampling_level: {level}"
    for level in ("token", "sequence")
    for limit in LIMITS
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_of_areals_files_is_the_same_here(areal, tmp_path, name):
    text = BASE + f"actor: {{{OBJECTIVES[name]}}}\nref: {{path: x}}\n"
    (tmp_path / "areal.yaml").write_text(text)
    compare(areal, yaml.safe_load(text), load(tmp_path / "areal.yaml"))


@pytest.mark.parametrize("more", ["", f", adv_norm: {BATCH}", f", adv_norm: {BATCH}, mask_no_eos_with_zero: true"])
def test_ppo_of_areals_files_is_the_same_here(areal, tmp_path, more):
    text = BASE + f"actor: {{{PLAIN}, gae_lambda: 0.9, discount: 0.95{more}}}\ncritic: {{eps_clip: 0.5}}\n"
    (tmp_path / "areal.yaml").write_text(text)
    compare(areal, yaml.safe_load(text), load(tmp_path / "areal.yaml"))


def examples():
    return sorted(Path(SOURCE, "examples").rglob("*.yaml")) if SOURCE else []


@pytest.mark.skipif(not SOURCE, reason="AREAL_SOURCE names no checkout of AReaL")
@pytest.mark.parametrize("file", examples(), ids=lambda file: str(file.relative_to(SOURCE)))
def test_an_example_of_areal_is_the_same_here(areal, file):
    root = yaml_tree.read(file)
    yaml_tree.interpolate(root, lambda _: yaml_tree.Node(None, ""))
    values = root.data()
    if not isinstance(values.get("actor"), dict) or "gconfig" not in values:
        pytest.skip("it configures no training with rewards")
    short = ["gconfig.max_new_tokens=12", "actor.max_new_tokens=12"]
    values["actor"] |= {"max_new_tokens": 12}
    if values["actor"].get("overlong_reward_penalty"):
        short.append("actor.overlong_tokens=4")
        values["actor"]["overlong_tokens"] = 4
    cap = values["actor"].pop("behav_imp_weight_cap", None)  # the old form of the limits
    if cap is not None:
        values["actor"]["rejection_sampling"] = {"upper": cap}
    try:
        loaded = load(file, short)
    except ConfigError as error:
        pytest.skip(f"refused: {str(error)[:200]}")
    compare(areal, values, loaded)


@pytest.mark.skipif(not SOURCE, reason="AREAL_SOURCE names no checkout of AReaL")
def test_areals_own_functional_tests_pass_with_our_functions(tmp_path):
    """77 tests in AReaL 1.0.4. `areal_adapter` puts our functions in place of those that the tests import."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "areal_adapter", "-q", "-p", "no:cacheprovider", "--noconftest",
         "-c", os.devnull, "--rootdir", str(tmp_path),
         *(str(Path(SOURCE, f"tests/test_{name}.py")) for name in ("functional", "rejection_sampling"))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests/helpers")])},
        capture_output=True, text=True, timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 70, done.stdout[-500:]


# -- verl ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verl():
    _, core = their_code.imported("verl", "verl.utils", "verl.trainer.ppo.core_algos")
    core.ActorConfig, core.AlgoConfig = Section, type("AlgoConfig", (), {})  # only their types are asked for
    return core


class Section(SimpleNamespace):
    """A section of verl's config, as its functions read it."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def dotted(section, prefix=""):
    for name, value in section.items():
        yield from dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


A = "actor_rollout_ref.actor."
GRPO, GSPO = {"algorithm.adv_estimator": "grpo"}, {A + "policy_loss.loss_mode": "gspo"}
# What verl's example scripts set on top of its ppo_trainer.yaml, as far as advantages and the loss depend on it.
VERL = {
    "as shipped": {},
    "grpo": GRPO,
    "dr_grpo": GRPO | {"algorithm.norm_adv_by_std_in_grpo": False, A + "loss_agg_mode": "seq-mean-token-sum-norm"},
    "dapo": GRPO | {A + "clip_ratio_high": 0.28, A + "clip_ratio_c": 10.0},
    "gspo": GRPO | GSPO | {A + "clip_ratio_low": 3e-4, A + "clip_ratio_high": 4e-4},
    "gspo by its paper": GRPO | GSPO | {A + "loss_agg_mode": "seq-mean-token-mean"},
    "rloo": {"algorithm.adv_estimator": "rloo", A + "loss_agg_mode": "seq-mean-token-mean"},
    "reinforce++": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "reinforce++, discounted": {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 0.9},
    "reinforce++ baseline": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    "sapo": GRPO | {A + "policy_loss.loss_mode": "sapo", A + "loss_agg_mode": "seq-mean-token-mean"},
    "kl in the loss": GRPO | {A + "use_kl_loss": True, A + "kl_loss_coef": 0.01},
    "ppo, λ 0.95": {"algorithm.gamma": 0.98, "algorithm.lam": 0.95},
}


def verls(verl, values, batch: Drawn):
    """(advantages [n, T], loss) of verl."""
    config = Section(**{k.removeprefix(A): v for k, v in values.items() if k.startswith(A)}, global_batch_info={})
    mask, rewards = batch.mask.float(), torch.zeros_like(batch.current)
    rewards[torch.arange(len(rewards)), batch.lengths - 1] = batch.rewards
    index = np.repeat(np.arange(GROUPS), batch.group_size)
    name, gamma, lam = (values[f"algorithm.{key}"] for key in ("adv_estimator", "gamma", "lam"))
    if name == "gae":
        advantages, _ = verl.compute_gae_advantage_return(rewards, batch.values * mask, mask, gamma, lam)
    else:
        more = {"config": SimpleNamespace(gamma=gamma), "index": index}
        if name == "grpo":
            more["norm_adv_by_std_in_grpo"] = values["algorithm.norm_adv_by_std_in_grpo"]
        advantages, _ = verl.get_adv_estimator_fn(name)(token_level_rewards=rewards, response_mask=mask, **more)
    mode = values[A + "policy_loss.loss_mode"]
    aggregation = values[A + "loss_agg_mode"]
    loss, _ = verl.get_policy_loss_fn(mode)(batch.proximal, batch.current, advantages, mask, aggregation, config)
    if config.use_kl_loss:
        token_kl = verl.kl_penalty(batch.current, batch.reference, config.kl_loss_type)
        loss = loss + config.kl_loss_coef * verl.agg_loss(token_kl, mask, aggregation)
    return advantages.double() * mask, float(loss)


@pytest.mark.parametrize("name", VERL)
def test_an_example_of_verl_is_the_same_here(verl, name):
    shipped = their_code.wheel("verl") / "verl/trainer/config/_generated_ppo_trainer.yaml"
    values = dict(dotted(yaml.safe_load(shipped.read_text()))) | VERL[name]
    values |= {"actor_rollout_ref.rollout.n": 4, "data.max_response_length": LONGEST, A + "ppo_mini_batch_size": 1024}
    loaded = loaded_of(from_verl(values, "ppo_trainer.yaml"))
    batch = Drawn.of(4, equal_group=False)
    got, want = ours(loaded, batch), verls(verl, values, batch)
    torch.testing.assert_close(got[0], want[0], rtol=5e-4, atol=5e-4)
    assert got[1] == pytest.approx(want[1], rel=2e-3, abs=2e-4)

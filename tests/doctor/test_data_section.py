"""What doctor says about problems and rewards, and the rules and idle keys of mixtures."""

from gspo.config import load
from gspo.doctor.explanation import explain
from gspo.doctor.render import to_text
from gspo.lint import ineffective, lint

MIXED = "train_dataset.mixture=[{path: 'embedded:arithmetic', weight: 3, name: sums}, {path: a.jsonl, reward: [math]}]"


def words(*overrides):
    return explain(load(None, overrides)).sections["data"]


def test_doctor_names_problems_templates_and_rewards():
    said = words("train_dataset.size=100", "train_dataset.max_length=64", "train_dataset.system_prompt=Think.")
    assert said["training"] == "embedded:arithmetic, split train, 100 rows"
    assert said["template"].endswith("with a system prompt; prompts of more than 64 tokens are dropped")
    assert said["reward"] == "final, the default of the data set"


def test_doctor_says_that_an_environment_brings_rewards_and_problems():
    said = words("env.path=mine:play")
    assert said["reward"] == "that of the episode; if it gives none: final, the default of the data set"
    said = words("env.path=gymnasium:CartPole-v1")
    assert (said["training"], said["held_out"]) == ("problems of the environment", "other problems of the environment")


def test_doctor_names_the_shares_and_rewards_of_a_mixture():
    said = words(MIXED)
    assert said["training"] == "75 % embedded:arithmetic as sums; 25 % a.jsonl"
    assert said["reward"] == "a.jsonl: math; other sources: their default"
    assert said["held_out"] == "the held-out part of each training source"


def test_doctor_shows_a_judge_and_a_reward_model_with_their_weights():
    said = words(
        "reward.functions=[{name: judge, url: 'http://h:1/v1', model: m}, {name: reward_model, path: rm}]",
        "reward.weights=[1, 0.5]",
    )
    assert said["reward"] == "judge m at http://h:1/v1 + 0.5 × reward_model rm, in the trainer's process"
    assert "judge m at" in to_text(
        explain(load(None, ["reward.functions=[{name: judge, url: 'http://h/v1', model: m}]"]))
    )


def errors(*overrides):
    return {f.key: f.message for f in lint(load(None, overrides), 0) if f.severity == "error"}


def test_a_source_without_a_path_and_a_reward_without_a_name_are_errors():
    assert "has no path" in errors("train_dataset.mixture=[{weight: 2}]")["train_dataset.mixture"]
    assert "has no name" in errors("reward.functions=[{url: 'http://x'}]")["reward.functions"]
    nameless = errors("train_dataset.mixture=[{path: a, reward: [{marker: x}]}]")
    assert "has no name" in nameless["reward.functions"]


def test_keys_that_a_mixture_leaves_idle_are_named():
    idle = dict(ineffective(load(None, [MIXED, "train_dataset.path=x", "train_dataset.size=3"]), 0))
    assert {"train_dataset.path", "train_dataset.size"} <= idle.keys()
    assert "train_dataset.mixture" not in idle
    assert "train_dataset.mixture" in dict(ineffective(load(None, [MIXED, "reward.functions=[math]"]), 0))

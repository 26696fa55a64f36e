"""Gymnasium environments: the real package, small environments of it, and environments that misbehave."""

import sys
import time

import gymnasium
import numpy as np
import pytest
import talkers
from gymnasium import spaces
from processes import until
from scripted_client import last_prompt, play, scripted

from gspo.envs.adapters.common import ActionCodec, CallTimeoutError, InvalidActionError, ObservationCodec
from gspo.envs.client import EpisodeError, OutOfRoomError, outcome_of
from gspo.envs.find import find_environment
from gspo.errors import ConfigError
from gspo.train import first_reward

closed = []


class Odd(gymnasium.Env):
    """One number to reach; `trouble` chooses how it misbehaves."""

    observation_space = spaces.Box(-5, 5, (1,))
    action_space = spaces.Discrete(3, start=-1)

    def __init__(self, trouble=""):
        self.trouble = trouble
        if trouble == "large":
            self.observation_space = spaces.Box(-5, 5, (10**6,))

    def close(self):
        closed.append(self.trouble)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.integers(-3, 0)
        return np.full(self.observation_space.shape, self.at), {}

    def step(self, action):
        self.at += action
        if self.trouble == "raise":
            raise RuntimeError("the motor is hot")
        if self.trouble == "hang":
            time.sleep(5)
        if self.trouble == "slow":
            time.sleep(0.5)
        value = np.nan if self.trouble == "nan observation" else self.at
        size = {"large": 10**6, "wrong shape": 3}.get(self.trouble, 1)
        reward = {"nan reward": np.nan, "two rewards": np.zeros(2)}.get(self.trouble, -abs(float(self.at)))
        if self.trouble == "old step":
            return np.full(1, value), reward, False, {}
        return np.full(size, value), reward, self.at == 0, False, {"is_success": self.at == 0}


gymnasium.register("Odd-v0", Odd, disable_env_checker=True)


def client(*answers, seed=3, **options):
    return scripted(*answers, data={"seed": seed}, question=" ", **options)


def first_observation(seed):
    env = gymnasium.make("Odd-v0")
    return int(env.reset(seed=seed)[0][0])


def test_an_episode_of_numbers():
    start = first_observation(3)
    env = find_environment("gymnasium:Odd-v0", {"prompt": "Go to 0. "})
    asked = client(*["1"] * -start)
    result = play(env, asked)
    assert result["success"] == result["reward"] == 1.0
    assert result["steps"] == -start
    assert result["return"] == sum(range(start + 1, 1))
    assert asked.turn_rewards == {i: float(start + 1 + i) for i in range(-start)}
    assert last_prompt(asked).startswith(f"Go to 0. {start}")
    env.close()


def test_without_a_success_to_report_the_return_is_the_reward():
    env = find_environment("gymnasium:Odd-v0", {"success": "not_there"})
    seed = next(seed for seed in range(20) if first_observation(seed) < -1)
    asked = client(*["1"] * -first_observation(seed), seed=seed)
    returned = play(env, asked)
    outcome = outcome_of(returned, asked.turn_rewards)
    assert outcome.value == outcome.parts["reward"] == returned["return"] < 0  # not 0: evaluation takes it as graded
    env.close()


def test_all_episodes_of_a_seed_begin_alike_and_instances_are_used_again():
    env = find_environment("gymnasium:Odd-v0", {"max_steps": 1})
    first, second, other = (client("1", seed=seed) for seed in (3, 3, 1_000_007))
    for asked in (first, second, other):
        play(env, asked)
    assert first.asked[0].prompt == second.asked[0].prompt
    assert len(env._pool) == 1
    train, test = env.rows("train", None), env.rows("test", None)
    assert not {row["seed"] for row in train} & {row["seed"] for row in test}
    env.close()


def test_seeds_of_evaluations_can_be_fresh():
    env = find_environment("gymnasium:Odd-v0", {"held_out": 3_000_000})
    assert [row["seed"] for row in env.rows("test", 2)] == [3_000_000, 3_000_001]
    assert env.rows("train", 1)[0]["seed"] == 0
    env.close()


def test_with_a_potential_the_reward_of_a_step_is_its_change():
    env = find_environment("gymnasium:Odd-v0", {"potential": lambda observation: 10 * float(observation[0])})
    asked = client("-1", "0", "1", "1", "1", "1")
    play(env, asked)
    assert list(asked.turn_rewards.values())[:3] == [-10.0, 0.0, 10.0]
    with pytest.raises(ConfigError, match="reward and potential are both set"):
        find_environment("gymnasium:Odd-v0", {"potential": len, "reward": len})
    env.close()


def test_without_history_each_decision_sees_one_observation():
    env = find_environment("gymnasium:Odd-v0", {"history": False, "max_steps": 2, "prompt": "x"})
    start = first_observation(3)
    asked = client("0", "0")
    play(env, asked)
    assert [asked.talk.tokenizer.decode(r.prompt) for r in asked.asked] == [str(start)] * 2
    env.close()


def test_an_answer_that_is_no_action_costs_its_turn_and_the_model_is_told():
    env = find_environment("gymnasium:Odd-v0", {"max_steps": 3, "invalid_reward": -2})
    asked = client("left", "7", "1")
    result = play(env, asked)
    assert result["invalid"] == pytest.approx(2 / 3)
    assert asked.turn_rewards[0] == asked.turn_rewards[1] == -2
    assert "error: answer with one number from -1 to 1" in last_prompt(asked)
    env.close()


@pytest.mark.parametrize(
    ("trouble", "error", "message"),
    [
        ("raise", RuntimeError, "the motor is hot"),
        ("hang", CallTimeoutError, "step took longer than 0.2 s"),
        ("nan observation", EpisodeError, "not finite"),
        ("nan reward", EpisodeError, "must be a finite number"),
        ("two rewards", EpisodeError, "the reward of a step must be a number, got ndarray"),
        ("wrong shape", EpisodeError, "it has 3 numbers, and the observation space has 1"),
        ("old step", EpisodeError, r"step returned 4 values, not \(observation"),
        ("large", OutOfRoomError, "cannot fit a context"),
    ],
)
def test_an_environment_that_misbehaves_costs_one_sample_and_the_next_one_runs(trouble, error, message):
    env = find_environment("gymnasium:Odd-v0", {"make": {"trouble": trouble}, "timeout": 0.2, "max_steps": 2})
    for _ in range(3):  # more often than there are threads
        with pytest.raises(error, match=message):
            play(env, client("0", "0"))
    # None leaks: one was made to look at its spaces, and three were played.
    until(lambda: closed.count(trouble) >= (1 if trouble == "hang" else 4), 20)
    env.close()


def test_an_environment_that_returns_after_its_timeout_is_closed_then():
    env = find_environment("gymnasium:Odd-v0", {"make": {"trouble": "slow"}, "timeout": 0.1})
    with pytest.raises(CallTimeoutError):
        play(env, client("0"))
    until(lambda: closed.count("slow") == 2, 20)  # the one that was made to look at its spaces, and this one
    env.close()


def test_another_action_space_or_another_major_version_is_refused_with_the_remedy(monkeypatch):
    with pytest.raises(ConfigError, match=r"a Dict action space needs your own function: action: module:function"):
        ActionCodec(None, spaces.Dict({"a": spaces.Discrete(2)}))
    monkeypatch.setattr(gymnasium, "__version__", "2.0.1")
    with pytest.raises(ConfigError, match=r"needs gymnasium 1\.x, found 2\.0\.1: pip install .*\[envs\]'"):
        find_environment("gymnasium:Odd-v0")


def test_without_the_package_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[envs\]'"):
        find_environment("gymnasium:Odd-v0")


def test_levels_are_letters_and_digits():
    seen = ObservationCodec({"levels": 11, "low": -0.15, "high": 0.15}, spaces.Box(-np.inf, np.inf, (3,)))
    assert seen.text(np.array([-9.0, 0.0, 9.0])) == "afk"
    moved = ActionCodec({"levels": 5}, spaces.Box(-1, 1, (3,), np.float32))
    assert moved.read("024").tolist() == [-1.0, 0.0, 1.0]
    assert moved.read("024").dtype == np.float32
    assert moved.limits == {"max_new_tokens": 3, "min_new_tokens": 3}
    part = ActionCodec({"levels": 5, "numbers": 2}, spaces.Box(-1, 1, (3,), np.float32))
    assert part.read("04").tolist() == [-1.0, 1.0, 0.0]
    for wrong in ("02", "0245", "025", "ab1"):
        with pytest.raises(InvalidActionError):
            moved.read(wrong)


def test_numbers_and_other_spaces():
    box = ActionCodec(None, spaces.Box(-1, 1, (2,), np.float32))
    assert box.read("I choose 0.5, -7").tolist() == [0.5, -1.0]
    with pytest.raises(InvalidActionError, match="2 numbers, got 1"):
        box.read("0.5")
    many = ActionCodec(None, spaces.MultiDiscrete([3, 2]))
    assert many.read("2 1").tolist() == [2, 1]
    with pytest.raises(InvalidActionError):
        many.read("2 2")
    assert ActionCodec(None, spaces.Text(9)).read("abc") == "abc"
    own = ActionCodec({"of": lambda text, space: len(text)}, spaces.Dict({"a": spaces.Discrete(2)}))
    assert own.read("four") == 4
    seen = ObservationCodec(None, None)
    assert seen.text({"a": np.array([1.0, 0.256]), "b": (1, "x")}) == "a: 1, 0.26\nb: 1; x"


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("gymnasium:Nothing-v0", {}, r"gymnasium\.make\('Nothing-v0'\) failed"),
        ("gymnasium:Odd-v0", {"modules": ["no_such_package"]}, r"env\.options\.modules: no_such_package"),
        ("gymnasium:Odd-v0", {"observation": {"levels": 99}}, r"observation\.levels must be between 2 and 52"),
        ("gymnasium:Odd-v0", {"action": {"levels": 5}}, r"action\.levels is for Box"),
        ("gymnasium:Odd-v0", {"observation": {"level": 5}}, r"observation\.level is not known"),
        ("gymnasium:Odd-v0", {"reward": "math:nothing"}, r"env\.options\.reward: .*no function nothing"),
        ("gymnasium:Odd-v0", {"held_out": 5}, r"env\.options\.held_out must be at least 1000000"),
        ("gymnasium:Odd-v0", {"potential": "math:nothing"}, r"env\.options\.potential: .*no function nothing"),
        ("gymnasium:Odd-v0", {"max_steps": 0}, "must be at least 1"),
        ("gymnasium:CartPole-v1", {"observation": {"levels": 9}}, r"observation\.(low|high) must be set"),
        ("gymnasium:Odd-v0", {"colour": 1}, r"env\.options do not fit"),
    ],
)
def test_wrong_options_are_refused_by_name(path, options, message):
    with pytest.raises(ConfigError, match=message):
        find_environment(path, options)


def test_cart_pole_is_played_with_a_template():
    env = find_environment("gymnasium:CartPole-v1", {"max_steps": 4, "prompt": "Balance it: 0 left, 1 right.\n"})
    asked = client(*[f"{i % 2}{talkers.END}" for i in range(4)], template=talkers.CHATML)
    result = play(env, asked)
    assert result["return"] == 4.0
    # Its score is its return, so that evaluations do not call it wrong.
    assert first_reward(outcome_of(result, asked.turn_rewards)) == 4.0
    assert len(asked.asked) == 4
    env.close()

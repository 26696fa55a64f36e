"""Environments of TRL: classes as a user wrote them, and TRL's own rules for tools, errors and rewards."""

import asyncio
import time

import pytest
import talkers
from scripted_client import call, last_prompt, play, scripted

from gspo.envs.adapters.common import CallTimeoutError
from gspo.envs.client import EpisodeError, TooManyTurnsError, outcome_of
from gspo.envs.find import find_environment
from gspo.errors import ConfigError


class Guess:
    """As in TRL's documentation: plain methods are tools."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.secret = None

    def reset(self, secret, prompt, **columns):
        self.secret, self.asked = secret, 0
        assert prompt[-1]["role"] == "user"
        return " The number is between 1 and 9."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The guess.
        """
        self.asked += 1
        return "right" if number == self.secret else "too low" if number < self.secret else "too high"

    async def slow(self, text: str) -> str:
        """
        Answer later.

        Args:
            text: Any text.
        """
        await asyncio.sleep(0)
        return f"slow {text}"

    def _not_a_tool(self):
        raise AssertionError

    def get_reward(self):
        return 1.0 / self.asked


class Broken(Guess):
    def reset(self, **columns):
        raise RuntimeError("no database")


class Untyped:
    def reset(self, **columns):
        return None

    def tool(self, x):
        return x


def few_calls(completions, environments, secret, **_):
    """A TRL reward function that looks into its environments."""
    assert completions[0][-1]["role"] == "assistant"
    return [float(environments[0].asked < 3 and secret[0] == 5)]


def client(*answers, **data):
    return scripted(*answers, template=talkers.CHATML, data={"secret": 5, **data}, question="Find it.")


def test_a_class_is_an_environment_as_it_is():
    env = find_environment(Guess)
    asked = client(call("guess", number=3), call("slow", text="x") + call("guess", number=5), f"5{talkers.END}")
    assert play(env, asked) == {"reward": 0.5}
    text = last_prompt(asked)
    assert "Find it. The number is between 1 and 9." in text
    assert text.index("too low") < text.index("right") < text.index("slow x")  # async results come last
    assert f"{talkers.START}system\n2 tools{talkers.END}" in text


def test_instances_are_reset_and_used_again_and_one_that_failed_is_not():
    env = find_environment(Guess)
    before = Guess.made
    for _ in range(3):
        play(env, client(call("guess", number=5), f"5{talkers.END}"))
    assert Guess.made == before
    with pytest.raises(ZeroDivisionError):
        play(env, client(f"I give up{talkers.END}"))  # get_reward divides by no guesses
    play(env, client(call("guess", number=5), f"5{talkers.END}"))
    assert Guess.made == before + 1


@pytest.mark.parametrize(
    ("said", "result"),
    [
        (call("guess", wrong=1), "unexpected keyword argument"),
        (call("nothing"), "Tool nothing not found."),
        (call("_not_a_tool"), "Tool _not_a_tool not found."),
        (call("reset"), "Tool reset not found."),
    ],
)
def test_errors_of_a_tool_are_results(said, result):
    asked = client(said, call("guess", number=5), f"5{talkers.END}")
    play(find_environment(Guess), asked)
    assert result in last_prompt(asked)


class Hanging(Guess):
    def guess(self, number: int) -> str:
        """
        Never answer.

        Args:
            number: The guess.
        """
        time.sleep(3)
        return ""

    async def slow(self, text: str) -> str:
        """
        Never answer.

        Args:
            text: Any text.
        """
        await asyncio.sleep(60)
        return ""


@pytest.mark.parametrize("said", [call("guess", number=1), call("slow", text="x")])
def test_a_tool_that_hangs_costs_one_sample_and_blocks_no_other(said, monkeypatch):
    monkeypatch.setattr("gspo.envs.adapters.trl._THREADS", 1)
    env = find_environment(Hanging, {"timeout": 0.1})
    for _ in range(3):  # more often than there are threads
        with pytest.raises(CallTimeoutError, match=r"the environment's (guess|slow) took longer than 0\.1 s") as error:
            play(env, client(said))
        assert error.value.kind == "timeout"
    env.close()


@pytest.mark.parametrize(
    ("reward", "message"), [(float("nan"), "must be a finite number"), ("good", "must be a number")]
)
def test_a_reward_that_is_no_number_costs_one_sample(reward, message):
    class Odd(Guess):
        def get_reward(self):
            return reward

    with pytest.raises(EpisodeError, match=message):
        outcome_of(play(find_environment(Odd), client(f"5{talkers.END}")), {})


def test_a_megabyte_from_a_tool_ends_the_episode_and_is_not_fatal():
    class Loud(Guess):
        def guess(self, number: int) -> str:
            """
            Answer at length.

            Args:
                number: The guess.
            """
            self.asked += 1
            return "x" * 2**20

    assert play(find_environment(Loud), client(call("guess", number=1), f"5{talkers.END}")) == {"reward": 1.0}


def test_reward_functions_see_their_environment():
    env = find_environment(Guess, {"reward_funcs": [few_calls]})
    assert play(env, client(call("guess", number=5), f"5{talkers.END}")) == {
        "reward": 2.0,
        "Guess": 1.0,
        "few_calls": 1.0,
    }


def test_a_limit_of_rounds_and_of_turns_ends_the_episode():
    env = find_environment(Guess, {"max_tool_calling_iterations": 1})
    asked = client(*[call("guess", number=1)] * 5)
    assert play(env, asked)["reward"] == 1.0
    assert len(asked.asked) == 2
    asked = client(*[call("guess", number=1)] * 20)
    assert play(find_environment(Guess), asked)["reward"] == pytest.approx(1 / 9)  # env.max_turns of the client
    asked = client()
    asked._max_turns = 0
    with pytest.raises(TooManyTurnsError):
        play(find_environment(Guess), asked)


def test_rows_choose_among_named_environments():
    class Other(Guess):
        def get_reward(self):
            return 7.0

    from gspo.envs.adapters.trl import TrlEnvironment

    env = TrlEnvironment({"guess": Guess, "other": Other})
    assert play(env, client(f"5{talkers.END}", environment="other")) == {"reward": 7.0}
    with pytest.raises(EpisodeError, match=r"the row's environment is 'third'; env\.path has guess, other"):
        play(env, client(f"5{talkers.END}", environment="third"))


def test_bad_classes_are_named_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match=r"Untyped\.tool cannot be a tool"):
        find_environment(Untyped)
    with pytest.raises(ConfigError, match=r"env\.path: .*no function Nothing"):
        find_environment("trl:random:Nothing")
    with pytest.raises(ConfigError, match="has no method reset"):
        find_environment("trl:threading:Lock")
    with pytest.raises(ConfigError, match=r"env\.options do not fit"):
        find_environment(Guess, {"colour": 1})
    file = tmp_path / "mine.py"
    file.write_text("class Env:\n    def reset(self, **row):\n        return None\n")
    with pytest.raises(ConfigError, match=f"a class for TRL is env.path: trl:{file}:Env"):
        find_environment(f"{file}:Env")
    assert find_environment(f"trl:{file}:Env")
    with pytest.raises(RuntimeError, match="no database"):
        play(find_environment(Broken), client())

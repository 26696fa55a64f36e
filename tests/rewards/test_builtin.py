"""What each built-in reward says about hand-made completions."""

import subprocess
import sys

import pytest

from gspo.errors import ConfigError
from gspo.rewards.call import RewardItem
from gspo.rewards.functions.builtin import BUILTIN, final_number
from gspo.rewards.pool import RewardPool
from gspo.rewards.spec import RewardPart, combine, function_name, reward_spec
from gspo.types import Failure


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("She sold 48+24 = 72 clips.", "72", 1.0),
        ("… #### 1,234", "1234", 1.0),
        ("#### 1,234\nand then 5", "1234", 1.0),
        (r"thus \boxed{18}, not 19", "18", 1.0),
        (r"\boxed{\frac{3}{4}}", "0.75", 1.0),
        ("3/4", "0.75", 1.0),
        ("0.1", "1/10", 1.0),
        ("1/3", "0.333333333", 0.0),
        ("$1,000.50", "1000.5", 1.0),
        ("x = −3", "-3", 1.0),
        ("5-3", "3", 1.0),
        ("5-3", "-3", 0.0),
        ("the answer is 18.", "18", 1.0),
        ("50%", "50", 1.0),
        ("", "1", 0.0),
        ("no idea", "1", 0.0),
        ("1/0", "1", 0.0),
        ("9" * 5000, "9", 0.0),
        ("1e999999999", "1", 0.0),
        ("x" * 10_000 + " 42 " + "y" * 300, "42", 1.0),
        ("1" + "0" * 255, "1" + "0" * 255, 1.0),
    ],
)
def test_numeric_compares_the_final_number_exactly(text, answer, value):
    assert BUILTIN["numeric"](text, answer=answer) == value


def test_a_number_cut_by_the_search_window_is_read_whole():
    assert final_number("12" + "3" * 256) == int("12" + "3" * 256)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1>85", 1.0), ("1>85 ", 1.0), ("1>085", 0.0), ("85", 0.0), (">8>85", 1.0), (">85>", 0.0), ("", 0.0)],
)
def test_final_wants_the_exact_text_after_the_last_marker(text, value):
    assert BUILTIN["final"](text, answer="85", marker=">") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a</think>\n<answer>b</answer>\n", 1.0),
        ("<think>a</think>x<answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<think></think><answer>b</answer>", 0.0),
        ("</think><think><answer>b</answer>", 0.0),
    ],
)
def test_format_wants_each_tag_once_and_in_order(text, value):
    assert BUILTIN["format"](text) == value


def test_overlong_is_zero_then_linear_then_flat():
    lengths = [0, 80, 85, 100, 101]
    values = [BUILTIN["overlong"]("", num_tokens=n, max_tokens=100, buffer_tokens=20, factor=2.0) for n in lengths]
    assert values == [0.0, 0.0, -0.5, -2.0, -2.0]
    with pytest.raises(ValueError, match="buffer_tokens"):
        BUILTIN["overlong"]("", num_tokens=1, max_tokens=10, buffer_tokens=0)


@pytest.mark.run
def test_math_knows_equal_forms_and_fails_on_a_reference_it_cannot_read():
    pytest.importorskip("math_verify")
    cases = [
        (r"so $\boxed{\frac{1}{2}}$", "0.5", 1.0),
        (r"the answer is $2\sqrt{3}$", r"\sqrt{12}", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("#### 72", "72", 1.0),
        ("#### 71", "72", 0.0),
        ("I do not know", "72", 0.0),
    ]
    with RewardPool(reward_spec("math"), workers=1, log_path="/dev/null") as pool:
        items = [RewardItem("q", (text,), data={"answer": answer}) for text, answer, _ in cases]
        assert [o.value for (o,) in pool.score(items)] == [value for *_, value in cases]
        ((outcome,),) = pool.score([RewardItem("q", (r"\boxed{1}",), data={"answer": ""})])
        assert isinstance(outcome, Failure)
        assert "reference answer" in outcome.message


@pytest.mark.run
def test_reasoning_gym_scores_by_its_own_rule():
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("chain_sum", size=1, seed=3)[0]
    right = entry["answer"]
    with RewardPool(reward_spec("reasoning_gym"), workers=1, log_path="/dev/null") as pool:
        texts = (right, f"hm <answer> {right} </answer>.", "<answer>wrong</answer>")
        (outcomes,) = pool.score([RewardItem("q", texts, data={"answer": right, "entry": entry})])
        assert [o.value == 1.0 for o in outcomes] == [True, True, False]


@pytest.mark.run
def test_built_ins_load_neither_torch_nor_numpy():
    code = "import sys, gspo.rewards.workers.supervisor; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_spec_is_read_from_names_mappings_and_functions():
    spec = reward_spec(
        ["math", {"name": "final", "weight": 0.5, "marker": "="}, {"name": "final", "label": "end"}, "math"]
    )
    assert [(p.name, p.weight, dict(p.kwargs), p.label) for p in spec] == [
        ("math", 1.0, {}, "math"),
        ("final", 0.5, {"marker": "="}, "final"),
        ("final", 1.0, {}, "end"),
        ("math", 1.0, {}, "math#2"),
    ]
    assert reward_spec(combine)[0].name == "gspo.rewards.spec:combine"
    assert reward_spec(RewardPart("numeric")) == (RewardPart("numeric"),)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([], "empty"),
        ("numerik", "did you mean 'numeric'"),
        ({"weight": 1.0}, "name"),
        ({"name": "math", "weight": "heavy"}, "weight"),
        ({"name": "math", "weight": float("nan")}, "weight"),
        ([3], "must be a name"),
        (5, "must be a name"),
        ({"name": "final", "markr": ">"}, "has no argument markr; it takes marker"),
        ({"name": "overlong", "max_tokens": 9}, "overlong needs buffer_tokens"),
        ({"name": "regex", "pattern": "("}, "regular expression"),
    ],
)
def test_a_spec_that_cannot_be_meant_is_a_config_error(value, says):
    with pytest.raises(ConfigError, match=says):
        reward_spec(value, key="reward")


@pytest.mark.run
def test_a_function_of_the_main_script_is_found_by_its_file(tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "from gspo.rewards.pool import RewardPool\n"
        "from gspo.rewards.call import RewardItem\n"
        "from gspo.rewards.spec import reward_spec\n"
        "def length(completions, **columns):\n"
        "    return [float(len(c)) for c in completions]\n"
        "if __name__ == '__main__':\n"
        "    with RewardPool(reward_spec(length), workers=1) as pool:\n"
        "        print(pool.score([RewardItem('q', ('ab', 'c'))])[0][0].value)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2.0\n"
    assert function_name(combine) == ("gspo.rewards.spec:combine", "")


def test_weights_may_stand_beside_the_names():
    pattern = {"name": "regex", "pattern": "^<a>", "label": "format"}
    spec = reward_spec(["math", pattern], weights=[1.0, 0.2])
    assert [(p.name, p.label, p.weight) for p in spec] == [("math", "math", 1.0), ("regex", "format", 0.2)]
    with pytest.raises(ConfigError, match="2 functions but 1 weights"):
        reward_spec(["math", "format"], weights=[1.0])

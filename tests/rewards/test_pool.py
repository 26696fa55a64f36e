"""The reward machinery under code that hangs, dies or answers nonsense: bounded, typed, and no harm to neighbours."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from processes import are_gone, is_alive, until

from gspo.errors import ConfigError, DataError, RewardError
from gspo.rewards.call import RewardItem
from gspo.rewards.functions.builtin import BUILTIN
from gspo.rewards.pool import RewardPool
from gspo.rewards.spec import combine, reward_spec
from gspo.system import own_children
from gspo.types import Failure, Score

pytestmark = pytest.mark.run

HERE = Path(__file__).parents[1] / "helpers"
ZOO = str(HERE / "reward_zoo.py")


def item(*completions, **data):
    ids = [[len(text)] for text in completions]
    return RewardItem("q", completions, [7, 8], ids, data)


@contextmanager
def pool_of(*functions, log_path=None, **kwargs):
    spec = reward_spec([f if isinstance(f, dict) or f in BUILTIN else f"{ZOO}:{f}" for f in functions])
    with RewardPool(spec, **{"workers": 2, "timeout_s": 1.0, "log_path": log_path or "/dev/null", **kwargs}) as pool:
        yield pool


@pytest.fixture(autouse=True)
def others():
    """What this process had started before: other tests may share it."""
    OTHERS.clear()
    OTHERS.update(children_of(os.getpid()))


OTHERS = set()


def children_of(pid):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z" and int(entry.name) not in OTHERS:
                found += [int(entry.name), *children_of(int(entry.name))]
    return found


@pytest.fixture(scope="module")
def patient():
    """One pool for functions that end by themselves: each finds workers that were replaced after the one before."""
    with pool_of("choose", timeout_s=10.0) as pool:
        yield pool


@pytest.mark.parametrize("bad", ["sum", "power", "regex", "ignore", "sleep"])
def test_a_hang_ends_within_timeout_plus_one_second_and_its_group_mates_are_scored(bad):
    with pool_of("choose") as pool:
        pool.wait_ready()
        start = time.monotonic()
        (outcomes,) = pool.score([item("good", bad, "good")])
        took_s = time.monotonic() - start
        assert 1.0 <= took_s < 2.0
        assert [type(o) for o in outcomes] == [Score, Failure, Score]
        assert outcomes[1].kind == "timeout"
        assert "choose" in outcomes[1].message
        assert "1 s" in outcomes[1].message


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("exit", "exit code 7"),
        ("segfault", "SIGSEGV"),
        ("sysexit", "SystemExit"),
        ("raise", "RuntimeError: no luck"),
        ("memory", "MemoryError"),
    ],
)
def test_a_crash_is_a_crash_with_its_reason_and_its_neighbours_are_scored(patient, bad, says):
    outcomes = patient.score([item("good", bad, "good"), item("good")])
    assert outcomes[0][1].kind == "crash"
    assert says in outcomes[0][1].message
    assert [outcomes[0][i].value for i in (0, 2)] == [1.0, 1.0]
    assert outcomes[1][0].value == 1.0


def test_a_signal_from_outside_is_retried_and_then_infra_never_a_reward(patient):
    ((outcome,),) = patient.score([item("term")])
    assert outcome.kind == "infra"
    assert "SIGTERM" in outcome.message


def test_a_child_left_behind_is_killed_with_its_worker(tmp_path):
    pidfile = tmp_path / "pids"
    with pool_of("choose", timeout_s=1.5) as pool:
        (outcomes,) = pool.score([item("child", "daemon", "good", pidfile=str(pidfile))])
        assert [getattr(o, "kind", "score") for o in outcomes] == ["timeout", "crash", "score"]
        left_behind = [int(line) for line in pidfile.read_text().split()]
        assert len(left_behind) == 2
        assert are_gone(left_behind)


def test_good_groups_are_not_delayed_by_a_hung_neighbour():
    with pool_of("choose", workers=2, timeout_s=3.0) as pool:
        pool.wait_ready()
        start = time.monotonic()
        pool.submit("hung", item("sum"))
        for index in range(50):
            pool.submit(index, item("good", "good"))
        seen = []
        for key, outcomes in pool.completed():
            seen.append(key)
            if key != "hung":
                assert time.monotonic() - start < 2.0
                assert [o.value for o in outcomes] == [1.0, 1.0]
        assert seen[-1] == "hung"
        assert len(seen) == 51


def test_throughput_after_kills_is_as_before():
    with pool_of("choose", timeout_s=0.5) as pool:
        good = [item("good") for _ in range(100)]
        pool.score(good)
        start = time.monotonic()
        pool.score(good)
        before_s = time.monotonic() - start
        killed = pool.score([item("sum") for _ in range(4)])
        assert [o.kind for (o,) in killed] == ["timeout"] * 4
        pool.score(good)
        start = time.monotonic()
        pool.score(good)
        assert time.monotonic() - start < 3 * before_s + 0.2


def test_deadlines_hold_while_the_trainer_is_busy():
    with pool_of("choose", workers=1, timeout_s=0.5) as pool:
        pool.submit("a", item("sum", "good"))
        pool.submit("b", item("good"))
        time.sleep(1.6)
        ready = dict(pool.completed(deadline_s=0))
        assert [type(o) for o in ready["a"]] == [Failure, Score]
        assert ready["b"][0].value == 1.0


def test_completed_gives_control_back_at_its_deadline():
    with pool_of("choose", timeout_s=5.0) as pool:
        pool.submit("x", item("sleep"))
        start = time.monotonic()
        assert list(pool.completed(deadline_s=0.2)) == []
        assert time.monotonic() - start < 1.0
        assert pool.outstanding == 1


def test_order_is_that_of_the_items_whatever_finishes_first():
    with pool_of("echo", workers=2, timeout_s=10.0) as pool:
        items = [item(*(str(100 * i + j) for j in range(3)), answer="1") for i in range(40)]
        values = [[o.value for o in outcomes] for outcomes in pool.score(items)]
        assert values == [[100 * i + j + 1.0 for j in range(3)] for i in range(40)]


def test_no_items_and_empty_groups_are_answered_at_once():
    with pool_of("good") as pool:
        assert pool.score([]) == []
        assert pool.score([item()]) == [()]


@pytest.mark.parametrize(
    ("function", "asked", "values"),
    [
        ("echo_group", item("1", "3", "2", answer="a", level=4), [0.0, 1.0, 0.0]),  # columns are lists
        ("chat_group", item("abc", "de", messages=[{"role": "user", "content": "q"}]), [3.0, 2.0]),  # so are messages
        ("modules", item("a"), [0.0]),  # the worker has not imported torch
    ],
)
def test_trl_functions_see_the_whole_group(function, asked, values):
    with pool_of(function, timeout_s=10.0) as pool:
        assert [o.value for o in pool.score([asked])[0]] == values


def test_async_functions_of_both_signatures_run_together_and_time_out_alone():
    with pool_of("awaited", "awaited_group", workers=1, timeout_s=1.0) as pool:
        pool.wait_ready()
        start = time.monotonic()
        (outcomes,) = pool.score([item("a", "slow", "b", "c", "d", "e", "f", "g")])
        assert time.monotonic() - start < 2.0
        assert [getattr(o, "kind", None) for o in outcomes] == [None, "timeout", *[None] * 6]
        assert outcomes[0].parts == {"awaited": 1.0, "awaited_group": 2.0}


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("none", "returned None"),
        ("string", "returned '1.0' (str)"),
        ("short", "1 rewards for 7 completions"),
        ("scalar", "1.0 (float)"),
    ],
)
def test_a_wrong_return_fails_the_group_by_name(what, says):
    with pool_of("returns", timeout_s=10.0) as pool:
        (outcomes,) = pool.score([item(*"abcdefg", what=what)])
        assert {o.kind for o in outcomes} == {"crash"}
        assert all(says in o.message and "returns" in o.message for o in outcomes)


def test_a_wrong_element_fails_its_own_sample_only():
    with pool_of("returns", timeout_s=10.0) as pool:
        (outcomes,) = pool.score([item(*"abcdefg", what="elements")])
        assert [isinstance(o, Score) for o in outcomes] == [True, False, False, False, False, True, True]
        assert [outcomes[i].value for i in (0, 5, 6)] == [1.0, 2.0, 1.0]
        for index, says in [(1, "None"), (2, "nan"), (3, "'1.0'"), (4, "inf")]:
            assert says in outcomes[index].message


def test_parts_are_logged_unweighted_and_summed_with_their_weights():
    parts = (
        {"name": f"{ZOO}:plain", "weight": 2.0, "bonus": 0.5},
        {"name": "overlong", "weight": 0.5, "max_tokens": 4, "buffer_tokens": 2, "label": "length"},
    )
    with pool_of(*parts, timeout_s=10.0) as pool:
        ids = RewardItem("q", ("abc",), [7, 8], [np.arange(3)], {"answer": "abc"})
        ((outcome,),) = pool.score([ids])
        assert outcome == Score(2.0 * 1.5 + 0.5 * -0.5, {"plain": 1.5, "length": -0.5})


def test_a_sum_that_is_not_finite_is_a_failure():
    finite, huge = {"name": "final", "label": "a"}, {"name": "format", "label": "b"}
    spec = reward_spec([finite, huge], weights=[10.0, -10.0])
    assert combine(spec, [1.0, 0.5]) == Score(5.0, {"a": 1.0, "b": 0.5})
    for values in ([1e308, 0.0], [1e308, 1e308], [0.0, 1e308]):
        outcome = combine(spec, values)
        assert outcome.kind == "crash"
        assert "10 × " in outcome.message
    assert combine(reward_spec([finite, huge], weights=[1.0, 1.0]), [1e308, 1e308]).kind == "crash"  # fsum raises
    with pytest.raises(ConfigError, match="finite"):
        reward_spec([finite], weights=[10**400])


def test_a_reward_cannot_change_what_the_next_call_sees():
    changes = [{"name": f"{ZOO}:{name}", "kept": ["k"]} for name in ("changes", "changes_group", "changes")]
    with pool_of(*changes, workers=1, timeout_s=10.0) as pool:
        row = {"answer": [1], "deep": {"a": [{"b": 1}]}, "messages": [{"role": "user", "content": "q"}]}
        (outcomes,) = pool.score([item("a", "b", **row)])
        assert [o.parts for o in outcomes] == [{"changes": 7.0, "changes_group": 7.0, "changes#2": 7.0}] * 2


def test_columns_reach_functions_as_they_are_and_built_ins_compare_with_the_final_answer():
    solution = "6 * 12 = 72\n#### 72"
    with pool_of("sees_marks", "numeric", {"name": "final", "marker": "="}, "math", timeout_s=30.0) as pool:
        asked = RewardItem("q", ("x =72", "#### 7"), [7, 8], [[1], [2]], {"answer": solution}, reference="72")
        (outcomes,) = pool.score([asked])
        assert [o.parts for o in outcomes] == [
            {"sees_marks": 1.0, "numeric": 1.0, "final": 1.0, "math": 1.0},
            {"sees_marks": 1.0, "numeric": 0.0, "final": 0.0, "math": 0.0},
        ]


def test_a_regex_of_the_user_that_backtracks_forever_is_a_timeout():
    with pool_of({"name": "regex", "pattern": "(a+)+b"}) as pool:
        (outcomes,) = pool.score([item("a" * 64, "ab")])
        assert outcomes[0].kind == "timeout"
        assert outcomes[1].value == 1.0


def test_closing_leaves_no_process(tmp_path):
    pool = RewardPool(reward_spec(f"{ZOO}:choose"), workers=3, timeout_s=60.0, log_path=tmp_path / "log")
    pool.wait_ready()
    pool.submit("hung", item("child", pidfile=str(tmp_path / "pids")))
    while not (tmp_path / "pids").exists():
        time.sleep(0.02)
    family = children_of(os.getpid())
    assert len(family) >= 5  # supervisor, three workers, the child of the reward
    pool.close()
    assert are_gone(family)


def test_everything_dies_with_a_trainer_that_is_killed(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(
        "import sys, time\n"
        "from gspo.rewards.pool import RewardPool\n"
        "from gspo.rewards.call import RewardItem\n"
        "from gspo.rewards.spec import reward_spec\n"
        f"pool = RewardPool(reward_spec('{ZOO}:choose'), workers=2, timeout_s=60.0)\n"
        "pool.wait_ready()\n"
        f"data = {{'pidfile': {str(tmp_path / 'pids')!r}}}\n"
        "pool.submit(0, RewardItem('q', ('child',), [], [[1]], data))\n"
        "pool.submit(1, RewardItem('q', ('sum',), [], [[1]], data))\n"
        "time.sleep(60)\n"
    )
    trainer = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    try:
        until((tmp_path / "pids").exists)
        time.sleep(0.2)
        family = children_of(trainer.pid)
        assert len(family) >= 4
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert are_gone(family)


def test_ctrl_c_reaches_no_worker():
    with pool_of("pids", "choose", timeout_s=10.0) as pool:
        ((first,),) = pool.score([item("good")])
        family = children_of(os.getpid())
        for pid in family:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
        assert all(map(is_alive, family))
        assert isinstance(pool.score([item("good")])[0][0], Score)
        assert isinstance(first, Score)


def test_a_dead_supervisor_is_an_infra_failure_and_the_pool_goes_on():
    with pool_of("choose", timeout_s=30.0) as pool:
        pool.wait_ready()
        pool.submit("x", item("sleep", "good"))
        family = children_of(os.getpid())
        os.kill(family[0], signal.SIGKILL)  # the first is our own child: the supervisor
        ((key, outcomes),) = list(pool.completed())
        assert key == "x"
        assert {o.kind for o in outcomes} == {"infra"}
        assert are_gone(family)
        assert pool.score([item("good")])[0][0].value == 1.0


def test_a_stopped_supervisor_is_an_infra_failure_within_timeout_plus_one_second():
    with pool_of("choose", timeout_s=2.0) as pool:
        pool.wait_ready()
        family = children_of(os.getpid())
        os.kill(family[0], signal.SIGSTOP)
        start = time.monotonic()
        ((outcome,),) = pool.score([item("good")])
        assert outcome.kind == "infra"
        assert "hangs" in outcome.message
        assert 2.0 < time.monotonic() - start < 3.0
        assert are_gone(family)
        assert pool.score([item("good")])[0][0].value == 1.0


def test_a_trainer_that_was_stopped_itself_does_not_take_its_supervisor_for_silent():
    with pool_of("choose", workers=1, timeout_s=1.0) as pool:
        pool.submit("x", item("slow"))
        assert list(pool.completed(0.05)) == []
        pool._last_poll -= 60.0  # what a minute under SIGSTOP leaves behind
        assert [o.value for _, (o,) in pool.completed()] == [1.0]


@pytest.mark.parametrize("bad", ["leave a thread", "leave a thread, 0.2"])
def test_a_worker_blocked_by_a_thread_that_an_earlier_call_left_is_replaced_in_time(bad):
    with pool_of("choose", workers=1, timeout_s=2.0) as pool:
        ((first,),) = pool.score([item(bad)])
        assert first.value == 1.0
        time.sleep(0.5)
        start = time.monotonic()
        outcomes = pool.score([item("good"), item("good", blob="x" * 5_000_000)])  # the second fills the socket
        assert [o.value for (o,) in outcomes] == [1.0, 1.0]
        assert 0.9 < time.monotonic() - start < 3.0


def test_a_copy_of_the_worker_that_comes_back_from_a_call_sends_nothing():
    with pool_of("choose", workers=1, timeout_s=2.0) as pool:
        for _ in range(3):
            assert [o.value for o in pool.score([item("fork", "good")])[0]] == [1.0, 1.0]


def test_a_reward_that_patches_the_clock_is_not_taken_for_late():
    with pool_of("choose", workers=1, timeout_s=2.0) as pool:
        assert [o.value for o in pool.score([item("patch the clock", "good")])[0]] == [1.0, 1.0]


def test_functions_that_cannot_be_used_are_config_errors_that_name_them():
    for name, says in [
        (f"{ZOO}:missing", "no function missing"),
        ("no_such_module_here:f", "No module named"),
        (f"{HERE}/nothing.py:f", "there is no file"),
        (f"{ZOO}:no_signature", "no supported signature"),
    ]:
        with RewardPool(reward_spec(name), log_path="/dev/null", key="reward") as pool:
            with pytest.raises(ConfigError, match=says) as caught:
                pool.wait_ready()
            assert "reward" in str(caught.value)
            assert name in str(caught.value)


def test_a_column_that_cannot_travel_is_a_data_error():
    with pool_of("good") as pool, pytest.raises(DataError, match="cannot be sent to a reward worker"):
        pool.score([item("a", callback=lambda: None)])


def test_score_refuses_to_mix_with_submitted_groups():
    with pool_of("good", timeout_s=10.0) as pool:
        pool.submit("x", item("good"))
        with pytest.raises(RewardError, match="outstanding"):
            pool.score([item("good")])
        assert dict(pool.completed())["x"][0].value == 1.0


def test_what_rewards_print_goes_to_the_log(tmp_path):
    module = tmp_path / "noisy.py"
    module.write_text("def f(completions, **columns):\n    print('hello from f', flush=True)\n    return [0.0]\n")
    with RewardPool(reward_spec(f"{module}:f"), workers=1, log_path=tmp_path / "log") as pool:
        pool.score([item("a")])
    assert "hello from f" in (tmp_path / "log").read_text()


def test_an_inline_reward_starts_no_process_and_256_samples_cost_under_5_ms():
    before = own_children()
    with RewardPool(reward_spec({"name": "final", "weight": 0.5})) as pool:
        assert own_children() == before
        items = [
            RewardItem("37+48=", ("7+8+0=15,3+4+1=08>85",) * 8, (), [[1] * 20] * 8, {"answer": "85"}) for _ in range(32)
        ]
        best_s = 1.0
        for _ in range(20):
            start = time.perf_counter()
            outcomes = pool.score(items)
            best_s = min(best_s, time.perf_counter() - start)
        assert len(outcomes) == 32
        assert outcomes[0][0] == Score(0.5, {"final": 1.0})
        assert best_s < 0.005


def test_an_inline_reward_without_its_reference_is_a_crash_not_a_zero():
    with RewardPool(reward_spec("numeric")) as pool:
        outcomes = pool.score([item("4", answer="no number"), item("4")])
        assert {o.kind for (o,) in outcomes} == {"crash"}
        assert "no number" in outcomes[0][0].message
        assert "answer" in outcomes[1][0].message

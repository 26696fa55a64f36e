"""The judge against a real HTTP server on loopback: scores, failures, retries, caching, and a key that stays secret."""

import os
import re
import threading
import time
from contextlib import closing

import pytest
from http_judge import JudgeHandler, JudgeServer, serving
from processes import until

from gspo.errors import ConfigError
from gspo.rewards.call import RewardItem
from gspo.rewards.functions.judge import Judge
from gspo.rewards.pool import RewardPool
from gspo.rewards.spec import reward_spec
from gspo.types import Failure, Score

pytestmark = pytest.mark.run


@pytest.fixture
def world():
    with serving(JudgeServer()) as server:
        yield server


def judged(world, items, **settings):
    entry = {"name": "judge", "url": world.url, "model": "critic", "backoff": 0.01, "timeout": 5.0, **settings}
    with RewardPool(reward_spec(entry)) as pool:
        return pool.score(items)


def item(*completions, **data):
    messages = [{"role": "user", "content": "What is 2+2?"}]
    return RewardItem("<user>What is 2+2?<assistant>", completions, data={"answer": "4", **data}, messages=messages)


def graded(number, question):
    """A judge that reads: the last number of what it is shown to grade is right if it is 4."""
    shown = question.partition("Answer to grade:")[2].partition("Think briefly")[0]
    return f"Let me see. Score: 0 would be harsh.\nScore: {float('4' in shown)}"


def test_the_last_score_of_the_answer_is_the_reward_and_the_question_shows_all_three(world):
    world.plan = graded
    ((right, wrong),) = judged(world, [item("It is 4.", "It is 5.")])
    assert (right, wrong) == (Score(1.0, {"judge": 1.0}), Score(0.0, {"judge": 0.0}))
    path, body = world.requests[0]
    assert path == "/v1/chat/completions"
    assert body["model"] == "critic"
    assert body["temperature"] == 0.0
    asked = body["messages"][-1]["content"]
    assert "What is 2+2?" in asked
    assert "<user>" not in asked, "the judge reads the question, not the policy's template"
    assert "It is 4." in asked or "It is 5." in asked
    assert "Authorization" not in world.headers[0]


def test_scores_are_brought_to_0_to_1_and_outside_the_scale_is_a_failure(world):
    world.plan = lambda number, question: "7/10" if "A" in question else "70/10"
    ((good, odd),) = judged(
        world, [item("A", "B")], prompt="{completion}", pattern=r"(\d+)/10", max_score=10.0, retries=0
    )
    assert good == Score(0.7, {"judge": 0.7})
    assert isinstance(odd, Failure)
    assert "outside 0…10" in odd.message


def test_a_template_fills_columns_once_and_leaves_other_braces_alone(world):
    judged(world, [item("{answer} {level}", level="easy")], prompt='{"a": {completion}, "l": {level}, "x": {unknown}}')
    assert world.requests[0][1]["messages"][-1]["content"] == '{"a": {answer} {level}, "l": easy, "x": {unknown}}'


def test_a_judge_that_times_out_is_a_failure_that_names_the_key_and_not_a_zero(world):
    world.plan = lambda number, question: time.sleep(1.5) or "Score: 1"
    start = time.monotonic()
    ((outcome,),) = judged(world, [item("x")], timeout=0.2, retries=1)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "timeout"
    assert "0.2 s" in outcome.message
    assert "timeout" in outcome.message
    assert len(world.requests) == 2
    assert time.monotonic() - start < 1.4


def test_an_answer_that_trickles_is_over_at_the_timeout_too(world):
    def trickle(number, question):
        handler = current.pop()
        handler.send_response(200)
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
        raise OSError("done")

    current = []

    class Trickling(JudgeHandler):
        def do_POST(self):  # noqa: N802
            current.append(self)
            super().do_POST()

    world.RequestHandlerClass, world.plan = Trickling, trickle
    start = time.monotonic()
    ((outcome,),) = judged(world, [item("x")], timeout=0.3, retries=0)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "timeout"
    assert time.monotonic() - start < 1.2


def test_a_server_in_trouble_is_asked_again_and_the_score_is_its_own(world):
    world.plan = lambda number, question: (500, b"out of order", {}) if number < 3 else "Score: 0.5"
    ((outcome,),) = judged(world, [item("x")], retries=3)
    assert outcome == Score(0.5, {"judge": 0.5})
    assert len(world.requests) == 3


def test_retry_after_is_obeyed(world):
    world.plan = lambda number, question: (429, b"", {"Retry-After": "0.4"}) if number == 1 else "Score: 1"
    start = time.monotonic()
    ((outcome,),) = judged(world, [item("x")], backoff=0.0)
    assert isinstance(outcome, Score)
    assert time.monotonic() - start >= 0.4


def test_trouble_that_lasts_is_an_infra_failure_of_that_sample_alone(world):
    world.plan = lambda number, question: (503, b"busy", {}) if "bad" in question else "Score: 1"
    ((good, bad),) = judged(world, [item("fine", "bad")], retries=2)
    assert good == Score(1.0, {"judge": 1.0})
    assert isinstance(bad, Failure)
    assert bad.kind == "infra"
    assert "503" in bad.message
    assert sum("bad" in body["messages"][-1]["content"] for _, body in world.requests) == 3


@pytest.mark.parametrize(
    "answer", ["I like it.", (200, b"<html>", {}), (200, b'{"error": "none"}', {}), (200, b'{"choices": []}', {})]
)
def test_an_answer_without_a_score_is_asked_again_and_then_a_failure(world, answer):
    world.plan = lambda number, question: answer
    ((outcome,),) = judged(world, [item("x")], retries=1)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "infra"
    assert len(world.requests) == 2


@pytest.mark.parametrize("status", [401, 302])
def test_a_refusal_or_a_redirect_is_not_asked_again_and_the_key_goes_nowhere_else(world, monkeypatch, status):
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    world.plan = lambda number, question: (status, b"bad key: sk-very-secret", {"Location": f"{world.url}/elsewhere"})
    ((outcome,),) = judged(world, [item("x")], api_key_env="JUDGE_KEY")
    assert len(world.requests) == 1
    assert world.headers[0]["Authorization"] == "Bearer sk-very-secret"
    assert isinstance(outcome, Failure)
    assert str(status) in outcome.message
    assert "secret" not in outcome.message


def test_nobody_there_is_an_infra_failure():
    server = JudgeServer()
    server.server_close()
    ((outcome,),) = judged(server, [item("x")], retries=1)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "infra"


def test_equal_completions_are_asked_about_once_also_while_the_first_is_under_way(world):
    world.plan = lambda number, question: time.sleep(0.1) or "Score: 1"
    with RewardPool(reward_spec({"name": "judge", "url": world.url, "model": "m"})) as pool:
        first = pool.score([item("same", "same"), item("same", "other")])
        again = pool.score([item("same", "other")])
    assert len(world.requests) == 2
    assert first[1] == again[0]


def test_a_failure_is_not_remembered(world):
    world.plan = lambda number, question: (400, b"", {}) if number == 1 else "Score: 1"
    with RewardPool(reward_spec({"name": "judge", "url": world.url, "model": "m"})) as pool:
        assert isinstance(pool.score([item("x")])[0][0], Failure)
        assert isinstance(pool.score([item("x")])[0][0], Score)


def test_a_cache_on_disk_serves_the_next_run_and_survives_a_torn_line(world, tmp_path):
    file = tmp_path / "deep" / "judge.jsonl"
    before = judged(world, [item("a", "b")], cache=str(file))
    with file.open("a") as out:
        out.write('{"question": "torn')
    assert len(world.requests) == 2
    assert judged(world, [item("a", "b")], cache=str(file)) == before
    assert len(world.requests) == 2
    judged(world, [item("a")], cache=str(file), max_score=2.0)
    assert len(world.requests) == 3, "another scale is another question"


def test_no_more_requests_at_once_than_allowed_and_they_do_run_together(world):
    world.plan = lambda number, question: time.sleep(0.05) or "Score: 1"
    judged(world, [item(*map(str, range(12)))], concurrency=3)
    assert len(world.requests) == 12
    assert world.most_at_once == 3


def test_judging_starts_when_a_group_is_handed_in_not_when_it_is_asked_for(world):
    with RewardPool(reward_spec({"name": "judge", "url": world.url, "model": "m"})) as pool:
        pool.submit("group", item("x"))
        until(lambda: len(world.requests) == 1, 5)
        assert dict(pool.completed()) == {"group": (Score(1.0, {"judge": 1.0}),)}


def test_a_group_whose_judge_thinks_is_not_waited_for_by_a_look_and_does_not_hold_up_another(world):
    thought = threading.Event()
    world.plan = lambda number, question: "Score: 1" if "quick" in question or thought.wait(20) else "Score: 0"
    with RewardPool(reward_spec({"name": "judge", "url": world.url, "model": "m"})) as pool:
        pool.submit("slow", item("hard"))
        pool.submit("fast", item("quick"))
        begin = time.monotonic()
        heard = []
        while not heard:
            heard = [key for key, _ in pool.completed(0.0)]
            assert time.monotonic() - begin < 15
        assert heard == ["fast"]
        assert list(pool.completed(0.1)) == []
        assert pool.outstanding == 1
        assert not thought.is_set()
        thought.set()
        assert dict(pool.completed()) == {"slow": (Score(1.0, {"judge": 1.0}),)}


def test_a_judge_adds_to_other_rewards_by_weight(world):
    world.plan = lambda number, question: "Score: 0.5"
    spec = reward_spec(["numeric", {"name": "judge", "url": world.url, "model": "m", "weight": 2.0}])
    with RewardPool(spec) as pool:
        ((outcome,),) = pool.score([item("4")])
    assert outcome == Score(2.0, {"numeric": 1.0, "judge": 0.5})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": "localhost:8000"}, "judge.url must be an http"),
        ({"url": "http://me:pw@host/v1"}, "must not hold a password"),
        ({"pattern": "("}, "judge.pattern"),
        ({"pattern": "Score"}, "needs a group"),
        ({"timeout": 0}, "judge.timeout must be positive"),
        ({"concurrency": 0}, "judge.concurrency"),
        ({"prompt": "grade!"}, "judge.prompt must hold {completion}"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE is not set"),
        ({"api_key": "sk-1"}, "judge has no argument api_key"),
        ({"api_key_env": "sk-1-live"}, "judge"),  # a key in place of its variable is not repeated either
        ({"max_score": 0.0}, "judge.max_score must be above min_score"),
    ],
)
def test_settings_that_cannot_work_are_config_errors_that_name_them(settings, says):
    entry = {"name": "judge", "url": "http://127.0.0.1:9/v1", "model": "m", **settings}
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        RewardPool(reward_spec(entry)).close()
    assert "sk-1" not in str(caught.value)


def test_a_cache_that_no_judge_wrote_gives_no_score_and_no_traceback(tmp_path):
    file = tmp_path / "scores"
    scores = (b"NaN", b"1e999", b"-1", b"5", b"true", b'"1"', b"9" * 400, b"[" * 5000)
    file.write_bytes(b"\xff\n" + b"".join(b'{"question": "%d", "score": %s}\n' % pair for pair in enumerate(scores)))
    with closing(Judge(url="http://127.0.0.1:1/v1", model="m", cache=str(file))) as judge:
        assert judge._known == {}
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="not a regular file"):
        Judge(url="http://127.0.0.1:1/v1", model="m", cache=str(file))


@pytest.mark.parametrize(
    "reply", [b"[" * 100_000, b'{"choices": [{"message": {"content": ' + b"[" * 9000 + b"]" * 9000]
)
def test_a_deep_answer_is_a_failure_of_its_sample(reply):
    with closing(Judge(url="http://127.0.0.1:1/v1", model="m")) as judge:
        (kind, why), _ = judge._read(reply)
    assert kind == "infra"
    assert "no chat completion" in why

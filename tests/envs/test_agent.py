"""Agents through the endpoint, the real driver of episodes and the real in-process sampler."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import openai
import pytest
import talkers
from processes import is_alive, until

from gspo.envs.agents import agent as agents
from gspo.envs.agents import reaper
from gspo.envs.agents.agent import Agents
from gspo.envs.driver import Episodes
from gspo.types import Failure, Score

pytestmark = pytest.mark.run

# One pool of connections for all episodes: setting up a client costs more than a call.
SHARED = openai.OpenAI(base_url="http://127.0.0.1:1/v1", api_key="none", max_retries=0)


@pytest.fixture
def play(talk, sampler):
    """Run an agent; its samples by (submission, sample), and what its calls came to."""
    made = []

    def run(agent, num=2, num_samples=2, **how):
        environment = Agents(agent)
        episodes = Episodes(environment, talk, max_context=talkers.CONTEXT, **{"timeout_s": 20.0, **how})
        made.extend((environment, episodes))
        requests = list(talkers.requests(talk, num, num_samples))
        samples = {sample.id[:2]: sample for sample in episodes(requests, sampler)}
        assert samples.keys() == {request.id[:2] for request in requests}
        return samples, environment.take_counts()

    yield run
    for part in made:
        part.close()


def ask(base_url, api_key, messages, **how):
    client = SHARED.with_options(base_url=base_url, api_key=api_key)
    return client.chat.completions.create(model="policy", messages=messages, **how).choices[0].message


def two_turns(base_url, api_key, data):
    messages = [*data["messages"]]
    for _ in range(2):
        answer = ask(base_url, api_key, messages)
        messages += [answer.model_dump(), {"role": "user", "content": f"is it {data['answer']}?"}]
    return len(answer.content) / 2


async def two_turns_async(base_url, api_key, data):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [*data["messages"]]
        for _ in range(2):
            stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"is it {data['answer']}?"},
            ]
    return len(said) / 2


# No library at all: an agent in any language can do as much.
TWO_TURNS = """
import json, os, sys, urllib.request
data = json.load(sys.stdin)
messages = data["messages"]
for _ in range(2):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": f"is it {data['answer']}?"}]
assert not [name for name in os.environ if name.startswith("GSPO_")]
print("talking to myself")
print(len(answer["content"]) / 2)
"""


def python(program, *args):
    return [sys.executable, "-c", program, *args]


def arrays(samples):
    return {id: talkers.arrays(sample) for id, sample in samples.items()}


def outcomes(samples):
    return {id: sample.outcome for id, sample in samples.items()}


def test_an_agents_turns_are_one_sequence_of_the_tokens_that_were_sampled(play, talk):
    samples, counts = play(two_turns)
    for (submission, _), sample in samples.items():
        assert sample.rest == ()
        assert sample.prompt is None
        said = talk.tokenizer.decode(sample.tokens[~sample.mask])
        assert said.endswith(f"{talkers.START}user\nis it {submission}?{talkers.END}\n{talkers.START}assistant\n")
        assert set(sample.turns[sample.mask].tolist()) == {0, 1}
        last = talk.text(sample.tokens[sample.mask & (sample.turns == 1)])
        assert sample.outcome == Score(len(last) / 2, {})
    assert counts == {"calls": 8}
    assert samples[0, 0].tokens.tolist() != samples[0, 1].tokens.tolist()


def test_a_function_a_coroutine_and_a_command_are_trained_alike(play, monkeypatch):
    monkeypatch.setenv("GSPO_SAMPLER_TOKEN", "none of an agent's business")
    first, _ = play(two_turns)
    for other in (two_turns_async, python(TWO_TURNS)):
        samples, _ = play(other)
        assert arrays(samples) == arrays(first)
        assert outcomes(samples) == outcomes(first)


def test_with_servers_that_answer_as_they_come_the_draws_are_the_same(play):
    as_they_come, in_rounds = play(two_turns, rounds=False)[0], play(two_turns)[0]
    for id, sample in in_rounds.items():
        other = as_they_come[id]
        assert other.tokens.tolist() == sample.tokens.tolist()
        # What is computed together rounds differently; what is drawn does not change.
        np.testing.assert_allclose(other.behavior_logp, sample.behavior_logp, atol=1e-5)


def fan_out(delays, base_url, api_key, data):
    """Three questions at once, two of them the same, and one that reads all the answers."""
    questions = ["a?", "b?", "b?"]

    def one(number):
        time.sleep(delays[number])
        return ask(base_url, api_key, [{"role": "user", "content": questions[number]}]).content

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(one, range(3)))
    ask(base_url, api_key, [{"role": "user", "content": "|".join(sorted(answers))}])
    return 1.0


def test_what_parallel_calls_draw_is_a_function_of_what_they_ask(play):
    samples, counts = play(partial(fan_out, (0.0, 0.0, 0.0)))
    assert counts == {"calls": 16}
    for sample in samples.values():
        *parallel, last = sample.sequences
        assert len(parallel) == 3
        assert [int(s.turns[0]) for s in sample.sequences] == [0, 1, 2, 3]
        asked = Counter(s.prompt for s in parallel)
        assert sorted(asked.values()) == [1, 2]
        assert len({tuple(s.tokens.tolist()) for s in parallel}) == 3  # asked twice, drawn twice
        assert last.prompt not in [s.prompt for s in parallel]
    again, _ = play(partial(fan_out, (0.03, 0.0, 0.02)))
    draws = [{(s.prompt, *s.tokens.tolist()) for s in samples[0, 0].sequences} for samples in (samples, again)]
    assert draws[0] == draws[1]


def edits(base_url, api_key, data):
    answer = ask(base_url, api_key, data["messages"])
    other = {"role": "assistant", "content": "I say " + answer.content}
    ask(base_url, api_key, [*data["messages"], other, {"role": "user", "content": "sure?"}])
    return 0.5


def test_an_edited_history_is_a_further_sequence_of_the_same_sample(play):
    samples, _ = play(edits)
    for sample in samples.values():
        first, second = sample.sequences
        assert first.mask.all()
        assert second.mask.all()
        assert second.prompt is not None
        assert sample.outcome == Score(0.5, {})


def texts_and_tokens(base_url, api_key, data):
    client = SHARED.with_options(base_url=base_url, api_key=api_key)
    more = {"return_token_ids": True}
    first = client.completions.create(model="policy", prompt="abc", logprobs=0, extra_body=more)
    tokens = first.model_extra["prompt_token_ids"] + first.choices[0].model_extra["token_ids"]
    client.completions.create(model="policy", prompt=[*tokens, 20, 21], max_tokens=3)
    return float(sum(first.choices[0].logprobs.token_logprobs))


def test_completions_of_tokens_continue_each_other(play):
    samples, _ = play(texts_and_tokens)
    for sample in samples.values():
        assert sample.rest == ()
        assert sample.tokens[~sample.mask].tolist() == [20, 21]
        assert sample.mask[sample.turns == 1].sum() <= 3
        assert sample.outcome.value == pytest.approx(sample.behavior_logp[sample.turns == 0].sum(), abs=1e-4)


# Rewards


def posts(base_url, api_key, data):
    ask(base_url, api_key, data["messages"])
    client = SHARED.with_options(base_url=base_url, api_key=api_key)
    client.post(base_url.replace("/v1", "/reward"), cast_to=object, body={"reward": 0.75})


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (posts, Score(0.75)),
        (lambda *_: {"reward": 1, "format": 0.5}, Score(1.0, {"reward": 1.0, "format": 0.5})),
        (lambda *_: None, None),
        (lambda *_: "good", Failure("crash", "environment: reward must be a number, got str")),
        (lambda *_: float("nan"), Failure("crash", "environment: reward is nan")),
        (python("print(3)"), Score(3.0)),
        (python("print({'reward': 1})"), None),  # no JSON
        (python("""print('{"reward": 1, "format": 0.5}')"""), Score(1.0, {"reward": 1.0, "format": 0.5})),
        (python("pass"), None),
    ],
)
def test_a_reward_is_returned_printed_or_posted(play, agent, expected):
    samples, _ = play(agent, num=1, num_samples=1)
    outcome = samples[0, 0].outcome
    if isinstance(expected, Failure):
        assert isinstance(outcome, Failure)
        assert (outcome.kind, outcome.message[: len(expected.message)]) == (expected.kind, expected.message)
    else:
        assert outcome == expected


# Bad agents: each costs its own sample


def only_first(bad, good=two_turns):
    """The agent of submission 0 is bad, the others are good."""
    return lambda base_url, api_key, data: (bad if data["answer"] == "0" else good)(base_url, api_key, data)


def never_stops_asking(base_url, api_key, data):
    while True:
        ask(base_url, api_key, data["messages"])


def wrong_model(base_url, api_key, data):
    SHARED.with_options(base_url=base_url, api_key=api_key).chat.completions.create(model="gpt-4o", messages=[])


def ends_the_process(*_):
    sys.exit(3)


def fills_the_context(base_url, api_key, data):
    ask(base_url, api_key, [{"role": "user", "content": "x" * 2000}])


def foreign_tokens(base_url, api_key, data):
    client = SHARED.with_options(base_url=base_url, api_key=api_key)
    client.completions.create(model="policy", prompt=[5, 10**6])


@pytest.mark.parametrize(
    ("bad", "kind", "message", "counted"),
    [
        (never_stops_asking, "limit", "env.max_turns", "too_many_turns"),
        (fills_the_context, "limit", "the agent then raised BadRequestError", "context_length_exceeded"),
        (foreign_tokens, "crash", "vocabulary", "refused"),
        (wrong_model, "crash", "the model here is 'policy', got 'gpt-4o'", "model_not_found"),
        (ends_the_process, "crash", "SystemExit", "calls"),
        (lambda *_: 1 / 0, "crash", "division by zero", "calls"),
    ],
)
def test_a_bad_agent_costs_its_own_sample(play, bad, kind, message, counted):
    samples, counts = play(only_first(bad), num_samples=1, max_turns=4)
    assert isinstance(samples[0, 0].outcome, Failure)
    assert samples[0, 0].outcome.kind == kind
    assert message in samples[0, 0].outcome.message
    assert isinstance(samples[1, 0].outcome, Score)
    assert counts[counted]


def test_garbage_and_a_megabyte_are_refused_and_the_episode_goes_on(play):
    def garbage(base_url, api_key, data):
        client = SHARED.with_options(base_url=base_url, api_key=api_key)
        for body in ({"model": "policy", "messages": "hello"}, {"wrong": 1}, {"model": "policy", "messages": [{}]}):
            with pytest.raises(openai.BadRequestError):
                client.post("/chat/completions", cast_to=object, body=body)
        for size in (2**20, 3 * 2**20):
            with pytest.raises(openai.APIStatusError):
                ask(base_url, api_key, [{"role": "user", "content": "x" * size}])
        return two_turns(base_url, api_key, data)

    samples, counts = play(garbage, num=1, num_samples=1)
    assert isinstance(samples[0, 0].outcome, Score)
    assert counts == {
        "calls": 3, "invalid_type": 1, "unknown_parameter": 1, "invalid_value": 1, "context_length_exceeded": 1,
        "body_too_large": 1,
    }  # fmt: skip


@pytest.mark.parametrize("ask_first", [True, False])
def test_an_agent_that_never_ends_is_given_up_and_its_later_calls_are_refused(play, ask_first):
    late = []

    def hangs(base_url, api_key, data):
        if ask_first:
            ask(base_url, api_key, data["messages"])
        time.sleep(2.5)
        try:
            ask(base_url, api_key, data["messages"])
        except openai.APIStatusError as error:
            late.append(error.code)

    samples, _ = play(only_first(hangs), num_samples=1, timeout_s=1.0)
    assert samples[0, 0].outcome == Failure("timeout", "environment: sent no request for 1 s (env.timeout)")
    assert bool(len(samples[0, 0].tokens)) == ask_first
    assert isinstance(samples[1, 0].outcome, Score)
    until(lambda: late)
    assert late == ["episode_ended"]


def test_a_coroutine_that_never_ends_is_cancelled(play):
    cancelled = []

    async def hangs(base_url, api_key, data):
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(True)

    samples, _ = play(hangs, num=1, num_samples=1, timeout_s=0.5)
    assert samples[0, 0].outcome.kind == "timeout"
    until(lambda: cancelled)


def test_when_too_many_threads_hang_no_more_are_started(play, monkeypatch):
    monkeypatch.setattr(agents, "MAX_ABANDONED", 2)
    end = threading.Event()
    environment_runs = []

    def hangs(*_):
        environment_runs.append(True)
        end.wait(30)

    try:
        # One environment, three lots one after the other.
        samples, _ = play_in_turn(hangs, lots=3)
    finally:
        end.set()
    assert [s.outcome.kind for s in samples] == ["timeout", "timeout", "crash"]
    assert "a command line in env.agent" in samples[2].outcome.message
    assert len(environment_runs) == 2


def play_in_turn(agent, lots):
    talk, sampler = talkers.chat(), talkers.sampler(talkers.CONTEXT)
    environment = Agents(agent)
    episodes = Episodes(environment, talk, max_context=talkers.CONTEXT, timeout_s=0.3)
    try:
        return [
            sample for i in range(lots) for sample in episodes(list(talkers.requests(talk, 1, 1, first=i)), sampler)
        ], environment.take_counts()
    finally:
        episodes.close()
        environment.close()


# Commands leave nothing behind

HANGS = """
import os, subprocess, sys, time
mark = sys.argv[1]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(mark + ".far", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
open(mark + ".near", "w").write(str(os.getpid()))
while True:
    print("x" * 10**6)
"""


def pids(mark):
    files = [Path(f"{mark}.{side}") for side in ("near", "far")]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


def test_a_command_that_never_ends_is_killed_with_all_it_started(play, tmp_path):
    mark = str(tmp_path / "mark")
    samples, _ = play(python(HANGS, mark), num=1, num_samples=1, timeout_s=2.0)
    assert samples[0, 0].outcome.kind == "timeout"
    until(lambda: not any(map(is_alive, pids(mark))))


def test_a_command_that_fails_says_why(play):
    for command, message in (
        (python("import sys; print('no luck today', file=sys.stderr); sys.exit(3)"), "exit code 3: no luck today"),
        (["no-such-program"], "no-such-program cannot be started: No such file"),
        (python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), "was killed by SIGKILL"),
    ):
        samples, _ = play(command, num=1, num_samples=1)
        assert samples[0, 0].outcome.kind == "crash"
        assert message in samples[0, 0].outcome.message


@pytest.mark.parametrize("victim", ["trainer", "reaper"])
def test_whoever_is_killed_the_command_goes_too(victim, tmp_path):
    """A trainer that dies closes the pipe; when the reaper dies, the kernel kills the command."""
    mark = str(tmp_path / "mark")
    trainer = subprocess.Popen(
        python(
            "import os, subprocess, sys, time\n"
            "r, w = os.pipe()\n"
            "k = subprocess.Popen([sys.executable, '-I', '-S', sys.argv[1], str(r), *sys.argv[2:]], pass_fds=[r],\n"
            "                     stdout=subprocess.DEVNULL)\n"
            "print(k.pid, flush=True)\n"
            "time.sleep(600)\n",
            reaper.__file__, *python(HANGS, mark),
        ),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        kept = int(trainer.stdout.readline())
        near, far = pids(mark)
        assert is_alive(near)
        assert is_alive(far)
        os.kill(trainer.pid if victim == "trainer" else kept, signal.SIGKILL)
        until(lambda: not is_alive(near))
        if victim == "trainer":
            until(lambda: not is_alive(far) and not is_alive(kept))
        else:
            os.kill(far, signal.SIGKILL)  # out of the group and without its subreaper: nobody's
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()


@pytest.mark.parametrize("rounds", [True, False])
def test_as_many_agents_run_as_may_and_the_draws_are_the_same(play, rounds):
    running, most = [], []

    def counted(base_url, api_key, data):
        running.append(1)
        most.append(len(running))
        try:
            return two_turns(base_url, api_key, data)
        finally:
            running.pop()

    few, _ = play(counted, num=4, rounds=rounds, at_once=3)
    assert max(most) == 3 if rounds else max(most) <= 3
    all_at_once, _ = play(two_turns, num=4)
    assert {id: s.tokens.tolist() for id, s in few.items()} == {id: s.tokens.tolist() for id, s in all_at_once.items()}
    assert outcomes(few) == outcomes(all_at_once)


def test_strangers_at_the_door_change_nothing(play):
    """Junk, wrong keys and silent connections while an agent is at work."""
    quiet, _ = play(two_turns)
    served = []

    def disturbed(base_url, api_key, data):
        port = int(base_url.split(":")[2].split("/")[0])
        for junk in (b"\x16\x03\x01\r\n\r\n", b"POST /e/0-0/reward HTTP/1.1\r\nContent-Length: 13\r\n\r\n" + b"x" * 13):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                connection.sendall(junk)
                served.append(connection.recv(100)[:12])
        silent = socket.create_connection(("127.0.0.1", port))
        try:
            return two_turns(base_url, api_key, data)
        finally:
            silent.close()

    samples, counts = play(disturbed)
    assert arrays(samples) == arrays(quiet)
    assert outcomes(samples) == outcomes(quiet)
    assert counts == {"calls": 8}
    assert {reply[:10] for reply in served} == {b"HTTP/1.1 4"}

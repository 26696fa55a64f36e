"""The driver of episodes against the real in-process sampler."""

import asyncio
import itertools
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import talkers

from gspo.envs.client import EpisodeError, OutOfRoomError, TooManyTurnsError, outcome_of
from gspo.envs.driver import Episodes
from gspo.errors import RolloutError
from gspo.types import Failure, SampleId, Score

pytestmark = pytest.mark.run


@pytest.fixture
def play(talk, sampler):
    """Run an environment; samples by id."""
    made = []

    def run(environment, num=4, num_samples=2, sampler=sampler, **how):
        episodes = Episodes(environment, talk, max_context=talkers.CONTEXT, **{"timeout_s": 20.0, **how})
        made.append(episodes)
        samples = list(episodes(list(talkers.requests(talk, num, num_samples)), sampler))
        assert len(samples) == num * num_samples
        return {sample.id: sample for sample in samples}

    yield run
    for episodes in made:
        episodes.close()


async def two_turns(client, data):
    messages = client.messages
    answer = await client.chat(messages)
    await client.chat([*messages, answer, {"role": "user", "content": f"is it {data['answer']}?"}])
    return len(answer["content"]) % 2


def test_an_episode_is_one_sequence_with_the_environments_words_between(play, talk):
    samples = play(two_turns)
    for id, sample in samples.items():
        assert sample.rest == ()
        assert sample.prompt is None
        said = talk.tokenizer.decode(sample.tokens[~sample.mask])
        assert said.endswith(f"{talkers.START}user\nis it {id.submission}?{talkers.END}\n{talkers.START}assistant\n")
        assert set(sample.turns[sample.mask].tolist()) == {0, 1}
        assert sample.outcome == Score(sample.outcome.value, {})
    assert len({sample.outcome.value for sample in samples.values()}) == 2
    assert len({len(sample.tokens) for sample in samples.values()}) > 1


def test_its_log_probs_are_those_of_the_whole_sequence(play, talk, sampler):
    import torch

    for id, sample in play(two_turns, num=2).items():
        prompt = talk.render([{"role": "user", "content": f"q{id.submission}?"}])
        ids = torch.tensor([[*prompt, *sample.tokens.tolist()]])
        with torch.no_grad():
            logp = sampler._model(input_ids=ids).logits[0].log_softmax(-1)
        own = logp[range(len(prompt) - 1, ids.shape[1] - 1), ids[0, len(prompt) :]].numpy()
        np.testing.assert_allclose(own[sample.mask], sample.behavior_logp[sample.mask], atol=2e-5)


def test_what_is_sampled_does_not_depend_on_who_is_slow(play):
    async def slow(client, data):
        await asyncio.sleep(0.05 * (int(data["answer"]) % 3))
        answer = await client.chat(client.messages)
        await asyncio.to_thread(time.sleep, 0.05 * ((int(data["answer"]) + 1) % 3))
        await client.chat([*client.messages, answer, {"role": "user", "content": f"is it {data['answer']}?"}])
        return len(answer["content"]) % 2

    plain, delayed = play(two_turns), play(slow)
    assert {id: talkers.arrays(s) for id, s in plain.items()} == {id: talkers.arrays(s) for id, s in delayed.items()}


def test_without_rounds_the_same_tokens_are_sampled(play):
    plain, free = play(two_turns), play(two_turns, rounds=False)
    assert {id: s.tokens.tolist() for id, s in plain.items()} == {id: s.tokens.tolist() for id, s in free.items()}


def test_an_edited_history_is_trained_as_a_second_sequence(play):
    async def edits(client, data):
        await client.chat(client.messages)
        await client.chat([{"role": "user", "content": "start over"}])
        return 1.0

    for sample in play(edits).values():
        assert len(sample.rest) == 1
        assert sample.rest[0].prompt is not None
        assert sample.rest[0].turns.tolist() == [1] * len(sample.rest[0].tokens)
        assert sample.last_turn.tolist() == sample.rest[0].tokens.tolist()


def test_requests_in_parallel_are_numbered_as_they_were_made_and_drawn_apart(play):
    async def both(client, data):
        messages = client.messages
        a, b = await asyncio.gather(client.complete(client.prompt.tokens), client.complete(client.prompt.tokens))
        assert (a.id.turn, b.id.turn) == (0, 1)
        await client.chat(messages)
        return 0.0

    first, second = play(both), play(both)
    assert {id: talkers.arrays(s) for id, s in first.items()} == {id: talkers.arrays(s) for id, s in second.items()}
    sample = first[SampleId(0, 0)]
    assert len(sample.rest) == 2
    assert [talkers.arrays(s)[0][1] for s in sample.sequences] != 3 * [talkers.arrays(sample)[0][1]]


def test_rewards_of_turns_add_up_with_the_last(play):
    async def credited(client, data):
        answer = await client.chat(client.messages)
        client.reward(0.25)
        client.reward(0.25)
        await client.chat([*client.messages, answer, {"role": "user", "content": "and?"}])
        return {"reward": 1.0, "neat": 0.5}

    for sample in play(credited).values():
        assert sample.outcome == Score(1.5, {"reward": 1.0, "neat": 0.5})
        assert sample.turn_rewards == {0: 0.5}


def test_an_environment_that_says_nothing_leaves_the_reward_to_others(play):
    async def silent(client, data):
        await client.chat(client.messages)

    assert all(sample.outcome is None for sample in play(silent).values())


# What goes wrong costs one sample.


async def raises(client, data):
    await client.chat(client.messages)
    raise ValueError("x" * 10_000)


async def exits(client, data):
    sys.exit(3)


async def hangs(client, data):
    await client.chat(client.messages)
    await asyncio.Event().wait()


async def blocks(client, data):
    await client.chat(client.messages)
    time.sleep(3.0)


async def never_ends(client, data):
    messages = client.messages
    while True:
        messages = [*messages, await client.chat(messages), {"role": "user", "content": "on"}]


async def a_megabyte(client, data):
    await client.chat([{"role": "tool", "content": "x" * 1_000_000}])


async def too_long(client, data):
    await client.chat([{"role": "tool", "content": "x" * 1_000}])


async def foreign_token(client, data):
    await client.complete([99_999])


async def no_tokens(client, data):
    await client.complete([])


async def text_reward(client, data):
    return "good"


async def nan_reward(client, data):
    return float("nan")


async def dict_without_reward(client, data):
    return {"neat": 1.0}


async def hot(client, data):
    await client.chat(client.messages, temperature=0.1)


async def rewards_nothing(client, data):
    client.reward(1.0)


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (raises, "crash", "ValueError: xxx"), (exits, "crash", "SystemExit"), (hangs, "timeout", "env.timeout"),
        (blocks, "timeout", "blocked"), (never_ends, "limit", "env.max_turns"), (a_megabyte, "limit", "1000000"),
        (too_long, "limit", "context of 512"), (foreign_token, "crash", "99999"), (no_tokens, "crash", "empty"),
        (text_reward, "crash", "str"), (nan_reward, "crash", "nan"), (dict_without_reward, "crash", "'reward'"),
        (hot, "crash", "temperature"), (rewards_nothing, "crash", "no answered turn"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rounds", [True, False])
def test_what_goes_wrong_costs_one_sample(play, wrong, kind, says, rounds):
    async def one_of_them(client, data):
        return await (wrong if data["answer"] == "1" else two_turns)(client, data)

    plain = play(two_turns, num_samples=1)
    samples = play(one_of_them, num_samples=1, timeout_s=0.5, max_turns=3, rounds=rounds)
    bad = samples.pop(SampleId(1, 0))
    assert isinstance(bad.outcome, Failure)
    assert bad.outcome.kind == kind
    assert says in bad.outcome.message
    assert len(bad.outcome.message) < 4000  # the message and the lines of the user's code
    for id, sample in samples.items():
        assert sample.tokens.tolist() == plain[id].tokens.tolist()
        assert sample.outcome == plain[id].outcome


def test_others_of_a_blocked_thread_get_the_answers_they_had_and_sample_no_token_twice(play, sampler):
    begun = []

    async def counted(client, data):
        begun.append(data["answer"])
        if data["answer"] == "1":
            return await blocks(client, data)
        return await two_turns(client, data)

    before = sampler.health()["sampled_tokens"]
    samples = play(counted, num_samples=1, timeout_s=0.5)
    assert sorted(begun) == ["0", "0", "1", "2", "2", "3", "3"]
    assert sampler.health()["sampled_tokens"] - before == sum(int(s.mask.sum()) for s in samples.values())


def test_an_environment_may_catch_its_limits(play):
    async def careful(client, data):
        await client.chat(client.messages)
        await client.chat(client.messages)
        with pytest.raises(TooManyTurnsError):
            await client.chat(client.messages)
        with pytest.raises(OutOfRoomError):
            await client.complete([7] * talkers.CONTEXT)
        return 1.0

    assert all(sample.outcome == Score(1.0) for sample in play(careful, max_turns=2).values())


def test_an_answer_shrinks_to_the_room_that_is_left(play):
    async def nearly_full(client, data):
        sample = await client.complete([7] * (talkers.CONTEXT - 3), min_new_tokens=9)
        return len(sample.tokens)

    assert all(sample.outcome.value == 3 for sample in play(nearly_full).values())


def test_a_client_is_used_from_other_threads_and_loops(play):
    async def elsewhere(client, data):
        def agent():
            return asyncio.run(client.chat(client.messages))["content"]

        return len(await asyncio.to_thread(agent)) % 2

    async def here(client, data):
        return len((await client.chat(client.messages))["content"]) % 2

    there, plain = play(elsewhere, num=20), play(here, num=20)  # more than a pool of threads would have
    assert {id: talkers.arrays(s) for id, s in there.items()} == {id: talkers.arrays(s) for id, s in plain.items()}
    assert {id: s.outcome for id, s in there.items()} == {id: s.outcome for id, s in plain.items()}


def test_who_asks_after_the_end_is_refused(play):
    kept = []

    async def keeps(client, data):
        kept.append(client)
        return 0.0

    play(keeps)
    with pytest.raises(EpisodeError, match="ended"):
        asyncio.run(kept[0].chat(kept[0].messages))


def test_a_sampler_that_never_answers_ends_the_run_and_not_the_thread(talk):
    class Silent:
        """A sampler whose servers are gone and who does not notice."""

        version = 0

        def submit(self, requests):
            pass

        def completed(self, deadline_s=None):
            time.sleep(min(deadline_s, 0.1))
            yield from ()

    for rounds in (True, False):
        episodes = Episodes(two_turns, talk, max_context=talkers.CONTEXT, rounds=rounds, request_timeout_s=0.3)
        with pytest.raises(RolloutError, match=r"rollout\.request_timeout"):
            list(episodes(list(talkers.requests(talk)), Silent()))
        episodes.close()


def test_nothing_of_a_run_stays_behind(talk, sampler):
    before = {thread.ident for thread in threading.enumerate()}
    episodes = Episodes(two_turns, talk, max_context=talkers.CONTEXT)
    next(iter(episodes(list(talkers.requests(talk)), sampler)))
    episodes.close()
    for _ in range(100):
        if {thread.ident for thread in threading.enumerate()} <= before:
            return
        time.sleep(0.05)
    raise AssertionError([thread.name for thread in threading.enumerate()])


def test_attempts_and_submissions_key_the_draws(talk, sampler):
    def tokens(attempt):
        asked = [replace(r, id=r.id._replace(attempt=attempt)) for r in talkers.requests(talk, 2, 1)]
        episodes = Episodes(two_turns, talk, max_context=talkers.CONTEXT)
        said = [s.tokens.tolist() for s in sorted(episodes(asked, sampler), key=lambda s: s.id)]
        episodes.close()
        return said

    first, again, other = tokens(0), tokens(0), tokens(1)
    assert first == again
    assert all(a != b for a, b in itertools.zip_longest(first, other))


async def changes_its_row(client, data):
    await client.chat(client.messages)
    data["answer"] += "!"
    data["deep"]["list"].append(1)
    return float(len(data["deep"]["list"]) + len(data["answer"]))


def test_an_environment_cannot_change_what_the_next_episode_sees(talk, sampler):
    episodes = Episodes(changes_its_row, talk, max_context=talkers.CONTEXT, timeout_s=20.0)
    row = {"answer": "1", "deep": {"list": []}}
    asked = [replace(request, origin=replace(request.origin, data=row)) for request in talkers.requests(talk, 1, 3)]
    try:
        assert [sample.outcome for sample in episodes(asked, sampler)] == [Score(3.0)] * 3
    finally:
        episodes.close()
    assert row == {"answer": "1", "deep": {"list": []}}


@pytest.mark.parametrize(("returned", "turns"), [(1e308, {0: 1e308}), (None, {0: 1e308, 1: 1e308})])
def test_a_sum_of_rewards_that_is_not_finite_is_an_error(returned, turns):
    with pytest.raises(EpisodeError, match="finite"):
        outcome_of(returned, turns)


async def _cancels_itself(client, data):
    task = asyncio.create_task(asyncio.sleep(10))
    task.cancel()
    await task


async def _cancels_all(client, data):
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(1)


async def _raises_without_a_text(client, data):
    class OddError(Exception):
        def __str__(self):
            raise ValueError

    raise OddError


@pytest.mark.parametrize("environment", [_cancels_itself, _cancels_all, _raises_without_a_text])
def test_an_environment_that_cancels_tasks_or_has_no_text_fails_at_once(play, environment):
    begin = time.monotonic()
    samples = play(environment, timeout_s=60.0)
    assert time.monotonic() - begin < 30
    for sample in samples.values():
        assert isinstance(sample.outcome, Failure)
        assert sample.outcome.kind == "crash"


def test_an_environment_that_stops_the_shared_event_loop_does_not_end_the_run(play):
    async def stops(client, data):
        if client.id.submission % 2 == 0:
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0)
        return await two_turns(client, data)

    assert all(isinstance(sample.outcome, Score) for sample in play(stops, timeout_s=60.0).values())


def test_a_turn_computes_only_its_new_tokens_and_an_ended_episode_frees_its_row(play, talk):
    sampler = talkers.sampler(talkers.CONTEXT)
    for _ in range(2):  # the second time begins from an empty store, too
        samples = play(two_turns, sampler=sampler)
        assert sampler.health()["cache_bytes"] == 0
    prompts = {id: talk.render([{"role": "user", "content": f"q{id.submission}?"}]) for id in samples}
    # Prompts once per group, and per sample what follows the first answer's last token.
    between = sum(int((~s.mask).sum()) + 1 for s in samples.values())
    expected = sum(len(prompts[id]) for id in samples if id.sample == 0) + between
    assert sampler.health()["prefill_tokens"] == 2 * expected

from dataclasses import replace

import model_zoo
import pytest
import torch
from made_batches import FAILED, make_group

from gspo.errors import DataError, RewardError, RolloutError
from gspo.rewards import RewardPool, reward_spec
from gspo.rollout.groups import refuse_failures, sample_groups, single_turn
from gspo.sampling import LocalSampler
from gspo.system import Clock
from gspo.types import Prompt, SampleId, SamplingParams, Score

pytestmark = pytest.mark.run

PARAMS = SamplingParams(max_new_tokens=6)
PROMPTS = [(7, Prompt((1, 2, 3), "a", {"answer": "1"})), (5, Prompt((4,), "b")), (9, Prompt((5, 6), "c"))]


@pytest.fixture(scope="module")
def sampler():
    model = model_zoo.build("qwen3", torch.float32)
    return LocalSampler(model, seed=1, eos_token_ids=[0, 1, 2, 3], max_rows=4, version=3)


@pytest.fixture(scope="module")
def rewards():
    with RewardPool(reward_spec({"name": "regex", "pattern": r"^\d"})) as pool:
        yield pool


def decode(tokens):
    return " ".join(map(str, tokens))


def groups_of(sampler, rewards, prompts=PROMPTS, num_samples=3, **more):
    return sample_groups(
        prompts, num_samples=num_samples, params=PARAMS, sampler=sampler, rewards=rewards, decode=decode, **more
    )


def test_groups_come_in_the_order_of_their_prompts_with_samples_in_theirs(sampler, rewards):
    groups = groups_of(sampler, rewards)
    assert [g.submission for g in groups] == [7, 5, 9]
    for group, (submission, prompt) in zip(groups, PROMPTS, strict=True):
        assert group.prompt is prompt
        assert [s.id for s in group.samples] == [SampleId(submission, i) for i in range(3)]
        assert group.texts == tuple(decode(s.tokens.tolist()) for s in group.samples)
        assert all(isinstance(o, Score) for o in group.outcomes)
        assert all((s.versions == 3).all() for s in group.samples)
    assert len({len(s.tokens) for g in groups for s in g.samples}) > 1  # they did not end together


def test_the_order_of_completion_changes_nothing(sampler, rewards):
    def backwards(requests, sampler):
        return reversed(list(single_turn(requests, sampler)))

    plain, turned = groups_of(sampler, rewards), groups_of(sampler, rewards, workflow=backwards)
    assert [g.texts for g in plain] == [g.texts for g in turned]
    assert [g.outcomes for g in plain] == [g.outcomes for g in turned]


def test_another_attempt_draws_anew_and_scoring_is_clocked(sampler, rewards):
    clock = Clock()
    again = groups_of(sampler, rewards, attempt=1, clock=clock)
    assert [g.texts for g in again] != [g.texts for g in groups_of(sampler, rewards)]
    assert clock.seconds["reward"] >= 0


def twice(requests, sampler):
    for sample in single_turn(requests, sampler):
        yield sample
        yield sample


def foreign(requests, sampler):
    for sample in single_turn(requests, sampler):
        yield replace(sample, id=SampleId(1234, 0))


def beyond(requests, sampler):
    for sample in single_turn(requests, sampler):
        yield replace(sample, id=replace_sample(sample.id))


def replace_sample(id):
    return id._replace(sample=id.sample + 1)


def too_few(requests, sampler):
    yield from list(single_turn(requests, sampler))[1:]


@pytest.mark.parametrize("workflow", [twice, foreign, beyond])
def test_a_sample_nobody_asked_for_is_an_error(sampler, rewards, workflow):
    with pytest.raises(RolloutError, match="was not requested or was returned before"):
        groups_of(sampler, rewards, workflow=workflow)
    sampler.abort()
    list(sampler.completed())
    list(rewards.completed())


def test_a_workflow_that_loses_a_sample_is_an_error(sampler, rewards):
    with pytest.raises(RolloutError, match="1 of 3 groups unfinished"):
        groups_of(sampler, rewards, workflow=too_few)
    list(rewards.completed())


@pytest.mark.parametrize(
    ("prompt", "what"),
    [((1, model_zoo.VOCAB), "token 61 is outside the model's vocabulary of 61"), ((-1,), "token -1"),
     ((1,) * 125, r"exceeds the context of 128.*gconfig\.max_new_tokens"), ((), "the prompt is empty")],
)  # fmt: skip
def test_a_prompt_that_cannot_be_sampled_is_refused_before_anything_is(sampler, rewards, prompt, what):
    before = sampler.health()["sampled_tokens"]
    with pytest.raises(DataError, match=what):
        groups_of(sampler, rewards, [*PROMPTS, (11, Prompt(prompt, "?"))])
    assert sampler.health()["sampled_tokens"] == before
    assert sampler.health()["waiting"] == 0


def test_failures_are_counted_and_too_many_end_the_run_with_the_first_message():
    some = [make_group(0, [1, 0, FAILED, 1]), make_group(1, [0, FAILED, 1, 1])]
    assert refuse_failures(some, 0.25) == [FAILED, FAILED]
    with pytest.raises(RewardError, match=r"2 of 8 rewards failed.*reward\.max_failure_fraction = 0\.2.*made to fail"):
        refuse_failures(some, 0.2)
    assert refuse_failures([make_group(0, [1, 0])], 0.0) == []
    with pytest.raises(RewardError, match="2 of 2"):
        refuse_failures([make_group(0, [FAILED, FAILED])], 1.0)  # nothing is left to learn from

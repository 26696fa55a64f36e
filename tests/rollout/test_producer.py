"""Sampling ahead of the trainer: in turn (in-process) and beside it (a sampler with weights of its own)."""

import copy
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import model_zoo
import numpy as np
import pytest
import talkers
import torch
from http_judge import JudgeServer, serving
from training_runs import RANKED, SMALL, digests, metrics, path_of, samples, stopping, train

from gspo.config import load
from gspo.envs import Episodes
from gspo.errors import RolloutError, TrainingError
from gspo.rewards import GivenRewards, RewardPool, reward_spec
from gspo.rollout.buffer import Buffer
from gspo.rollout.groups import GroupAssembler, refuse_failures, sample_groups, single_turn
from gspo.rollout.producer import RolloutProducer
from gspo.runs import checkpoint
from gspo.sampling import LocalSampler
from gspo.system import Clock
from gspo.train import Leader, local_sampler, opening, sampling_params
from gspo.types import Prompt, SampleId, SamplingParams

pytestmark = pytest.mark.run

TINY = (
    "train_dataset.batch_size=4", "gconfig.n_samples=4", "gconfig.max_new_tokens=32", "total_train_steps=6",
    "evaluator.size=4", "evaluator.freq_steps=4", "saver.freq_steps=2", "saver.keep=9",
)  # fmt: skip
BY_TWO = ("rollout.max_head_offpolicyness=2", "actor.use_decoupled_loss=true")
AHEAD = (*TINY, *BY_TWO, RANKED)


class Synchronous(Leader):
    """The loop without anything that could run ahead: sample, score, train."""

    def sample(self, clock):
        parts, begin = self.parts, 4 * self.parts.state.step
        prompts = [(i, parts.prompt_of(i)) for i in range(begin, begin + 4)]
        groups = sample_groups(
            prompts, num_samples=4, params=sampling_params(load(None, [*SMALL, *TINY]).config),
            sampler=parts.sampler, rewards=parts.rewards, decode=parts.decode, workflow=parts.workflow, clock=clock,
        )  # fmt: skip
        refuse_failures(groups, 0.0)
        parts.producer.buffer.submission = begin + 4
        return groups


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tiny):
    root = tmp_path_factory.mktemp("ahead")
    train(root, *AHEAD)
    return path_of(root)


# Inline


def test_without_staleness_the_run_is_the_synchronous_one_bit_for_bit(tmp_path, tiny):
    short = (*TINY, "total_train_steps=3", "evaluator.freq_steps=2")
    train(tmp_path / "ahead", *short)
    train(tmp_path / "plain", *short, kind=Synchronous)
    assert digests(path_of(tmp_path / "ahead")) == digests(path_of(tmp_path / "plain"))


@pytest.mark.full
def test_batch_b_is_sampled_by_version_b_minus_the_bound_and_trained_in_order(straight):
    rows = {step: samples(straight, step) for step in range(1, 7)}
    for batch in range(6):
        assert {row["version"] for row in rows[batch + 1]} == {max(0, batch - 2)}
        assert {row["oldest_version"] for row in rows[batch + 1]} == {max(0, batch - 2)}
        assert [row["submission"] for row in rows[batch + 1]] == np.repeat(range(4 * batch, 4 * batch + 4), 4).tolist()
    steps = [row for row in metrics(straight) if row["step"]]
    assert [row["staleness/max"] for row in steps] == [0, 1, 2, 2, 2, 2]
    assert [row["staleness/token_mean"] for row in steps] == [0, 1, 2, 2, 2, 2]
    assert {row["staleness/mixed"] for row in steps} == {0}


def test_stale_samples_are_clipped_against_the_trainers_policy_and_measure_no_noise(straight):
    steps = [row for row in metrics(straight) if row["step"]]
    assert {row["policy/proximal"] for row in steps} == {"recompute"}
    assert {row["ratio/first_minibatch_max_abs"] for row in steps} - {None} == {0.0}  # None: nothing to learn there
    assert steps[0]["noise/log_s_p95_abs"] < 1e-5
    assert [row["noise/log_s_p95_abs"] for row in steps[1:]] == [None] * 5  # drift is not noise
    assert steps[0]["correction/raw_mean"] == pytest.approx(1.0, abs=1e-5)
    assert max(abs(row["correction/raw_mean"] - 1) for row in steps[2:]) > 1e-4  # and here it is: π_old/μ
    assert {row["correction/outside"] for row in steps} == {0.0}


def test_a_checkpoint_holds_the_groups_that_wait_and_the_last_one_none(straight):
    held = {p.name: sorted(f.name for f in p.glob("waiting.*")) for p in (straight / "checkpoints").iterdir()}
    both = ["waiting.json", "waiting.safetensors"]
    assert held == {"step_000002": both, "step_000004": both, "step_000006": []}
    waiting = json.loads((straight / "checkpoints/step_000002/waiting.json").read_text())
    assert [group["submission"] for group in waiting] == list(range(8, 16))


def test_a_stopped_run_goes_on_with_what_was_waiting_bit_for_bit(straight, tmp_path):
    train(tmp_path, *AHEAD, kind=stopping(3))
    assert metrics(path_of(tmp_path))[-1]["step"] == 3
    train(tmp_path, *AHEAD)
    assert digests(path_of(tmp_path)) == digests(straight)


@pytest.mark.full
def test_a_run_that_forgets_pending_groups_is_seen(straight, tmp_path, monkeypatch):
    train(tmp_path, *AHEAD, kind=stopping(3))
    load_groups = checkpoint.load_pending_groups
    monkeypatch.setattr(checkpoint, "load_pending_groups", lambda folder: None)
    assert len(load_groups(path_of(tmp_path) / "checkpoints/step_000003")[1]) == 8
    train(tmp_path, *AHEAD)
    assert metrics(path_of(tmp_path))[-3]["staleness/max"] == 0  # it had to sample a batch now
    assert digests(path_of(tmp_path))["model.safetensors"] != digests(straight)["model.safetensors"]


@pytest.mark.full
def test_rejected_groups_are_replaced_ahead_of_time_too(tmp_path, tiny):
    _, path = train(tmp_path, *TINY, *BY_TWO, "actor.zero_variance_groups=refill", "actor.max_refills=20",
                    "total_train_steps=3")  # fmt: skip
    rows = [row for row in metrics(path) if row["step"]]
    assert [row["reward/zero_variance_groups"] for row in rows] == [0, 0, 0]
    assert sum(row["reward/refilled_groups"] for row in rows) > 0
    trained = [row["submission"] for step in (1, 2, 3) for row in samples(path, step)]
    assert trained == sorted(trained)
    assert len(set(trained)) == 12


@pytest.mark.full
@pytest.mark.parametrize(("method", "name"), [("loglinear", "loglinear"), ("rollout", "rollout")])
def test_other_sources_of_the_proximal_policy_take_stale_samples_too(tmp_path, tiny, method, name):
    _, path = train(tmp_path, *TINY, "rollout.max_head_offpolicyness=1", f"actor.prox_logp_method={method}",
                    "total_train_steps=3", "evaluator.at_start=false", "evaluator.freq_steps=9")  # fmt: skip
    rows = metrics(path)
    assert {row["policy/proximal"] for row in rows} == {name}
    first = [row["ratio/first_minibatch_max_abs"] for row in rows if row["ratio/first_minibatch_max_abs"] is not None]
    if method == "loglinear":
        assert set(first) == {0.0}
    else:  # against the sampler: the age of the samples is in the ratio before any update
        assert first[-1] > 1e-4


# In the background


class Beside:
    """An in-process engine with weights of its own, as a server has them; `fails_at` breaks it at a poll."""

    in_process = False

    def __init__(self, engine, fails_at=None):
        self.engine, self.fails_at, self.polls = engine, fails_at, 0
        self.loaded = [engine.version]

    @property
    def version(self):
        return self.engine.version

    def completed(self, deadline_s=None):
        self.polls += 1
        if self.fails_at is not None and self.polls >= self.fails_at:
            raise RolloutError("the sampler was made to fail")
        yield from self.engine.completed(deadline_s)

    def load_weights(self, version, tensors):
        assert tensors is not None
        self.engine.load_weights(version, tensors)
        self.loaded.append(version)

    def __getattr__(self, name):
        return getattr(self.engine, name)


def with_own_weights(monkeypatch, **how):
    make, made = local_sampler, []

    def make_sampler(config, policy, tokenizer, version, run, say):
        made.append(Beside(make(config, copy.deepcopy(policy.model), tokenizer, version), **how))
        return made[-1]

    monkeypatch.setattr(opening, "make_sampler", make_sampler)
    return made


def trained_on(path):
    return [row["submission"] for file in sorted((path / "samples").glob("*.jsonl"))
            for row in map(json.loads, file.read_text().splitlines())]  # fmt: skip


def test_beside_the_trainer_groups_are_trained_in_order_within_the_bound_and_nothing_is_lost(
    tmp_path, tiny, monkeypatch
):
    made = with_own_weights(monkeypatch)
    train(tmp_path, *AHEAD, "rollout.max_concurrent_rollouts=20", kind=stopping(3))
    assert "rollout producer" not in {thread.name for thread in threading.enumerate()}
    train(tmp_path, *AHEAD, "rollout.max_concurrent_rollouts=20")
    path = path_of(tmp_path)
    assert trained_on(path) == np.repeat(range(24), 4).tolist()
    steps = [row for row in metrics(path) if row["step"]]
    assert all(row["staleness/max"] <= 2 for row in steps)
    assert steps[2]["staleness/max"] > 0  # sampled while the trainer trained: it cannot be of its version
    assert made[0].loaded == [0, 1, 2, 3]
    assert made[1].loaded == [3, 4, 5, 6]


@pytest.mark.full
def test_an_error_in_the_sampling_thread_ends_the_run_keeps_the_last_step_and_it_goes_on(tmp_path, tiny, monkeypatch):
    with_own_weights(monkeypatch, fails_at=90)
    with pytest.raises(RolloutError, match="made to fail"):
        train(tmp_path, *AHEAD, "evaluator.at_start=false", "total_train_steps=60")
    assert "rollout producer" not in {thread.name for thread in threading.enumerate()}
    with_own_weights(monkeypatch)
    done = metrics(path_of(tmp_path))[-1]["step"] if (path_of(tmp_path) / "metrics.jsonl").exists() else 0
    train(tmp_path, *AHEAD, "evaluator.at_start=false", f"total_train_steps={done + 2}")
    assert trained_on(path_of(tmp_path)) == np.repeat(range(4 * (done + 2)), 4).tolist()


PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)


@pytest.fixture
def model():
    return model_zoo.build("qwen3", torch.float32)


@pytest.fixture
def rewards():
    with RewardPool(reward_spec({"name": "regex", "pattern": r"^\d"})) as pool:
        yield pool


def decode(tokens):
    return " ".join(map(str, tokens))


def make_background(model, rewards, buffer, **more):
    sampler = LocalSampler(model, seed=1, eos_token_ids=[0], max_rows=64)
    how = {
        "sampler": sampler, "rewards": rewards, "prompt_of": lambda i: Prompt((1 + i % 50, 2, 3), "?"),
        "assembler": GroupAssembler(2, PARAMS, decode), "workflow": single_turn, "background": True,
    } | more  # fmt: skip
    return RolloutProducer(buffer, **how), sampler


def test_new_weights_interrupt_a_generation_that_goes_on_with_them(model, rewards):
    producer, sampler = make_background(model, rewards, Buffer(2, 1))
    for _ in range(5):
        producer._iterate()  # one token for every sample
    assert sampler.health()["running"] == 8
    producer.publish(1, [(name, p.detach() * 1.01) for name, p in model.named_parameters()])
    while not producer.buffer.ready:
        producer._iterate()
    groups, _ = producer._take(1)
    for sample in (s for group in groups for s in group.samples):
        cut = int((sample.versions == 0).sum())
        assert 0 < cut < 12
        assert sample.versions.tolist() == [0] * cut + [1] * (12 - cut)


def test_an_evaluation_gets_its_own_samples_while_training_goes_on(model, rewards):
    producer, _ = make_background(model, rewards, Buffer(2, 1))
    producer._iterate()
    prompts = [(1 << 40, Prompt((7, 8), "e")), ((1 << 40) + 1, Prompt((9,), "f"))]
    groups = sample_groups(prompts, num_samples=1, params=PARAMS, sampler=producer.sampler, rewards=producer.rewards,
                           decode=decode)  # fmt: skip
    assert [g.samples[0].id for g in groups] == [SampleId(1 << 40, 0), SampleId((1 << 40) + 1, 0)]
    while not producer.buffer.ready:
        producer._iterate()
    assert [g.submission for g in producer._take(0)[0]] == [0, 1]


@pytest.fixture
def judge():
    with serving(JudgeServer()) as server:
        yield server


def judged_by(judge):
    # It gives up after 10 s: a test that waits for it ends, and fails.
    asked = {"url": judge.url, "model": "m", "prompt": "{prompt}:{completion}", "timeout": 10, "retries": 0}
    return RewardPool(reward_spec({"name": "judge", **asked}))


def test_a_judge_that_thinks_stops_neither_sampling_nor_new_weights_nor_an_evaluations_samples(model, judge):
    thought = threading.Event()
    judge.score = lambda text: float(thought.wait(30))
    with judged_by(judge) as rewards:
        producer, sampler = make_background(model, rewards, Buffer(2, 1))
        while producer._iterate() or sampler.health()["running"]:
            pass
        assert len(producer._unscored) == 4  # all that the bound admits is sampled and handed in
        producer.publish(1, [(name, p.detach() * 1.01) for name, p in model.named_parameters()])
        producer._iterate()
        assert sampler.health()["running"] == 4  # the next batch
        prompt = Prompt((7, 8), "e")
        request = GroupAssembler(1, PARAMS, decode).expect([(1 << 40, prompt)])
        producer.sampler.submit(request)
        assert [sample.id for sample in producer.sampler.completed()] == [SampleId(1 << 40, 0)]
        assert not thought.is_set()
        assert not producer.buffer.ready
        thought.set()
        while not producer.buffer.ready:
            producer._iterate()
        groups, _ = producer._take(1)
    assert [outcome.value for group in groups for outcome in group.outcomes] == [1.0] * 4


def test_an_evaluation_that_waits_for_its_judge_leaves_training_alone(model, judge):
    thought, texts = threading.Event(), []
    judge.score = lambda text: float(thought.wait(30)) if text.startswith("e:") else texts.append(text) or 1.0
    with judged_by(judge) as rewards:
        producer, _ = make_background(model, rewards, Buffer(2, 1))
        found: list = []
        how = {
            "num_samples": 1,
            "params": PARAMS,
            "sampler": producer.sampler,
            "rewards": producer.rewards,
            "decode": decode,
        }
        evaluation = threading.Thread(
            target=lambda: found.extend(sample_groups([(1 << 40, Prompt((7, 8), "e"))], **how)), daemon=True
        )
        evaluation.start()
        while not any(text.startswith("e:") for text in judge.asked):
            time.sleep(0.01)
        try:
            for version in range(3):
                assert len(producer.next(version, Clock())[0]) == 2
                producer.publish(version + 1, None)
            assert evaluation.is_alive()
            assert not thought.is_set()
            thought.set()
            evaluation.join(30)
        finally:
            producer.close()
    assert [group.outcomes[0].value for group in found] == [1.0]
    assert len(texts) >= 3 * 2 * 2


def test_a_workflow_of_the_users_own_runs_beside_the_trainer_too(model, rewards):
    def twice(requests, sampler):
        """Asks again, as an episode does, and answers with what was said the second time."""
        sampler.submit(requests)
        assert {sample.id for sample in sampler.completed()} == {request.id for request in requests}
        sampler.submit([replace(request, id=request.id._replace(turn=1)) for request in requests])
        for sample in sampler.completed():
            yield replace(sample, id=sample.id._replace(turn=0))

    producer, _ = make_background(model, rewards, Buffer(2, 1), workflow=twice)
    try:
        batches = []
        for version in range(3):
            batches.append([g.submission for g in producer.next(version, Clock())[0]])
            producer.publish(version + 1, None)
    finally:
        producer.close()
    assert batches == [[0, 1], [2, 3], [4, 5]]


def test_episodes_are_played_beside_the_trainer_across_versions():
    async def two_turns(client, data):
        answer = await client.chat(client.messages)
        await client.chat([*client.messages, answer, {"role": "user", "content": "on"}])
        return float(len(answer["content"]))

    talk = talkers.chat()

    def prompt_of(i):
        messages = ({"role": "user", "content": f"q{i}"},)
        return Prompt(talk.render(messages), "?", messages=messages)

    episodes = Episodes(two_turns, talk, max_context=256, rounds=False)
    with RewardPool(reward_spec("math")) as pool:
        producer, sampler = make_background(
            talkers.model(256), GivenRewards(pool), Buffer(2, 1), workflow=episodes, prompt_of=prompt_of
        )
        try:
            batches = []
            for version in range(3):
                batches.append(producer.next(version, Clock())[0])
                producer.publish(version + 1, None)
        finally:
            episodes.close()
            producer.close()
    assert [[g.submission for g in groups] for groups in batches] == [[0, 1], [2, 3], [4, 5]]
    for version, groups in enumerate(batches):
        for sample in (s for group in groups for s in group.samples):
            assert set(sample.turns.tolist()) == {0, 1}
            assert version - 1 <= sample.versions.min() <= sample.versions.max() <= version
            assert sample.outcome in [o for group in groups for o in group.outcomes]
    assert sampler.health()["running"] == 0


def test_a_sampler_that_keeps_old_weights_is_found_out(model, rewards):
    producer, sampler = make_background(model, rewards, Buffer(2, 0), background=False)
    producer.next(0, Clock())
    producer.publish(1, None)
    producer.next(1, Clock())
    sampler.version = 1  # as if it had not heard of version 2
    with pytest.raises(RolloutError, match=r"version 1 would be trained on at version 2.*max_head_offpolicyness = 0"):
        producer.next(2, Clock())
    left = producer.snapshot()  # of the run that ends here: the same prompts are sampled again
    assert (left.submission, left.resubmit, left.groups) == (4, (), ())
    sampler.version = 2
    assert [group.submission for group in producer.next(2, Clock())[0]] == [4, 5]


def test_a_filter_that_rejects_everything_ends_the_run_beside_the_trainer_too(model, rewards):
    producer, _ = make_background(model, rewards, Buffer(2, 1), reject_reason=lambda group: "are dull", max_refills=2)
    try:
        with pytest.raises(TrainingError, match=r"3 rounds of sampling \(actor\.max_refills\) gave 0 of 4.*are dull"):
            producer.next(0, Clock())
    finally:
        producer.close()


def test_a_sampler_that_says_nothing_is_an_error_after_its_deadline(model, rewards):
    producer, sampler = make_background(model, rewards, Buffer(2, 1), timeout_s=0.3)
    sampler.pause()
    try:
        with pytest.raises(RolloutError, match=r"no sample arrived for 0\.3 s.*4 groups.*rollout\.request_timeout"):
            producer.next(0, Clock())
    finally:
        producer.close()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_with_a_sampler_server_batches_come_in_order_while_the_trainer_trains(tmp_path, tiny):
    """Launcher, server, HTTP; slow on purpose, so that new weights come in the middle of generations."""
    asked = [*SMALL, *TINY, *BY_TWO, "rollout.backend=local:d1", f"cluster.fileroot={tmp_path}"]
    environment = {**os.environ, "GSPO_SAMPLER_LATENCY": "0.02"}
    (tmp_path / "empty.yaml").write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "gspo", "train", str(tmp_path / "empty.yaml"), *asked],
        capture_output=True, text=True, env=environment, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    path = path_of(tmp_path)
    assert trained_on(path) == np.repeat(range(24), 4).tolist()
    steps = [row for row in metrics(path) if row["step"]]
    assert all(row["staleness/max"] <= 2 for row in steps)
    assert max(row["staleness/max"] for row in steps) > 0
    assert max(row["staleness/mixed"] for row in steps) > 0  # interrupted and gone on

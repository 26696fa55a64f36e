"""Distillation in a run: the student samples, and a teacher scores its tokens."""

from contextlib import ExitStack
from functools import partial

import pytest
import ranked_runs
from training_runs import metrics, train

from gspo.cli.train import model_of_run
from gspo.errors import ConfigError, DataError
from gspo.models import add_adapter, load_model, load_tokenizer, save_adapter
from gspo.sampling import KEY, LocalSampler, SamplerEngine, SamplerServer, sequence_logp

TEACHER = (
    "algorithm=sft", "~gconfig.n_samples", "~actor.ppo_n_minibatches", "~actor.eps_clip", "actor.optimizer.lr=1e-3",
    "actor.optimizer.lr_scheduler_type=linear", "train_dataset.batch_size=32", "total_train_steps=80",
    "evaluator.size=128",
)  # fmt: skip
TOKEN = "a secret of the tests"
STUDENT = ("algorithm=distill", "~actor.eps_clip", "total_train_steps=30", "train_dataset.batch_size=16")


def test_a_run_without_a_teacher_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"teacher\.path"):
        train(tmp_path, "algorithm=distill")
    with pytest.raises(ConfigError, match="does not use a teacher"):
        train(tmp_path, "algorithm=gspo", "teacher.path=embedded:tiny")


def in_process(folder, stack):
    return "embedded:tiny"


def adapter(folder, stack):
    """A new adapter adds nothing: B is 0."""
    model = load_model("embedded:tiny")
    add_adapter(model, rank=2, alpha=4, target_modules=["all-linear"], seed=0)
    save_adapter(model, folder / "adapter", "embedded:tiny")
    return str(folder / "adapter")


def server(folder, stack, noise=0.0):
    model, tokenizer = load_model("embedded:tiny"), load_tokenizer("embedded:tiny")
    for p in model.parameters():
        p.data += noise * p.data.sin()
    ends = [tokenizer.eos_token_id]
    engine = SamplerEngine(
        LocalSampler(model, seed=0, eos_token_ids=ends, verify=False),
        identity={},
        score=partial(sequence_logp, model),
        vocabulary=tokenizer.get_vocab(),
    )
    served = SamplerServer(engine, TOKEN)
    stack.callback(served.close)
    return served.url


@pytest.mark.run
@pytest.mark.parametrize("teacher", [in_process, adapter, server])
def test_a_teacher_that_is_the_student_has_no_distance_and_moves_nothing(tmp_path, monkeypatch, teacher):
    monkeypatch.setenv(KEY, TOKEN)
    short = ("total_train_steps=1", "train_dataset.batch_size=4", "evaluator.freq_steps=0", "~actor.ppo_n_minibatches")
    with ExitStack() as stack:
        _, path = train(tmp_path, *STUDENT, *short, f"teacher.path={teacher(tmp_path, stack)}")
    (row,) = metrics(path)
    assert abs(row["policy/kl_teacher"]) < 1e-4
    assert row["grad/norm"] < 1e-3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("teacher.exact_kl=0", "is a server"),
        ("gconfig.temperature=0.8", "temperature 1"),
        ("gconfig.top_p=0.9", "top_p"),
    ],
)
def test_settings_that_a_teacher_on_a_server_cannot_follow_are_refused(tmp_path, override, words):
    with pytest.raises(ConfigError, match=words):
        train(tmp_path, *STUDENT, "teacher.path=http://127.0.0.1:9", override)


@pytest.mark.full
def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"teacher\.path"):
        train(tmp_path, *STUDENT, "actor.path=embedded:tiny-control", "teacher.path=embedded:tiny")


@pytest.mark.full
def test_two_ranks_share_the_questions_to_a_server_and_make_the_run_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, TOKEN)
    short = (*STUDENT, "total_train_steps=2", "train_dataset.batch_size=4", "evaluator.freq_steps=0")
    with ExitStack() as stack:
        short += (f"teacher.path={server(tmp_path, stack, noise=0.2)}",)
        _, alone = train(tmp_path / "one", *short, "evaluator.at_start=false")
        two = ranked_runs.train(tmp_path / "two", 2, *short, "actor.backend=fsdp:d2")
    assert len(metrics(alone)) == len(metrics(two)) == 2
    for one, other in zip(metrics(alone), metrics(two), strict=True):
        assert one["policy/kl_teacher"] > 0.005
        for key in ("policy/kl_teacher", "loss/mean", "grad/norm", "reward/mean"):
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-6), key


@pytest.mark.full
@pytest.mark.parametrize("how", [(), ("teacher.exact_kl=0.5",)], ids=["sampled", "exact"])
def test_a_student_recovers_most_of_what_its_teacher_knows(tmp_path, how):
    _, run = train(tmp_path / "teacher", *TEACHER)
    teacher = metrics(run)[-1]["eval/accuracy"]
    model = model_of_run(str(run), "teacher.path")
    _, run = train(tmp_path / "student", *STUDENT, f"teacher.path={model}", "evaluator.size=128", *how)
    rows = metrics(run)
    first, last = rows[0]["eval/accuracy"], rows[-1]["eval/accuracy"]
    assert teacher > first + 0.2
    assert last > first + 0.5 * (teacher - first)
    assert rows[-1]["policy/kl_teacher"] < rows[1]["policy/kl_teacher"]

"""Distillation in a run: the student samples, and a teacher scores its tokens."""

import pytest
from training_runs import metrics, train

from gspo.cli.train import model_of_run
from gspo.errors import ConfigError, DataError

TEACHER = (
    "algorithm=sft", "~gconfig.n_samples", "~actor.ppo_n_minibatches", "~actor.eps_clip", "actor.optimizer.lr=1e-3",
    "actor.optimizer.lr_scheduler_type=linear", "train_dataset.batch_size=32", "total_train_steps=80",
    "evaluator.size=128",
)  # fmt: skip
STUDENT = ("algorithm=distill", "~actor.eps_clip", "total_train_steps=30", "train_dataset.batch_size=16")


def test_a_run_without_a_teacher_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"teacher\.path"):
        train(tmp_path, "algorithm=distill")
    with pytest.raises(ConfigError, match="does not use a teacher"):
        train(tmp_path, "algorithm=gspo", "teacher.path=embedded:tiny")


@pytest.mark.run
def test_a_teacher_that_is_the_student_has_no_distance_and_moves_nothing(tmp_path):
    short = ("total_train_steps=1", "train_dataset.batch_size=4", "evaluator.freq_steps=0", "~actor.ppo_n_minibatches")
    _, path = train(tmp_path, *STUDENT, *short, "teacher.path=embedded:tiny")
    (row,) = metrics(path)
    assert abs(row["policy/kl_teacher"]) < 1e-4
    assert row["grad/norm"] < 1e-3


@pytest.mark.full
def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"teacher\.path"):
        train(tmp_path, *STUDENT, "actor.path=embedded:tiny-control", "teacher.path=embedded:tiny")


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

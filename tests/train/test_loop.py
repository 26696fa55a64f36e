import gzip
import json
import os
import shutil
import signal
from pathlib import Path

import loop_rewards
import numpy as np
import pytest
import torch
from made_runs import strict
from safetensors.numpy import load_file
from tiers import brief
from training_runs import (
    RANKED,
    asked,
    digests,
    make_trainer,
    metrics,
    path_of,
    samples,
    signals,
    train,
    without_clocks,
)

from gspo.algorithms import ALGORITHMS
from gspo.config import load
from gspo.data import make_dataset
from gspo.diagnosis import TOTAL
from gspo.errors import CheckpointError, ConfigError, TrainingError
from gspo.monitor import Lines, LivePanel
from gspo.rollout import single_turn
from gspo.runs import checkpoint
from gspo.system import read_jsonl
from gspo.train import Trainer
from gspo.train.loop import Leader

pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.run]

ROOT = Path(__file__).parents[2]
FOUR = ("total_train_steps=4", "evaluator.freq_steps=2", "saver.freq_steps=2")


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tiny):
    """Four steps without interruption."""
    return train(tmp_path_factory.mktemp("straight"), *FOUR)


@pytest.fixture
def used(straight, tmp_path):
    """A directory with a copy of that run."""
    shutil.copytree(straight[1], path_of(tmp_path))
    return tmp_path


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)


# The same run twice, and a run in two halves


def test_two_runs_are_the_same_to_the_last_bit_and_another_seed_is_not(straight, tmp_path):
    _, path = straight
    _, again = train(tmp_path / "again", *FOUR)
    assert digests(again) == digests(path)
    _, other = train(tmp_path / "other", *FOUR, "seed=2")
    assert digests(other)["model.safetensors"] != digests(path)["model.safetensors"]


@pytest.mark.parametrize("number", brief([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1], signal.SIGTERM))
def test_a_run_stopped_by_a_signal_and_resumed_is_the_uninterrupted_one(straight, tmp_path, number, capsys):
    _, path = straight
    workflow = signals(1, number)
    trainer = make_trainer(tmp_path, *FOUR, workflow=workflow)
    summary = trainer.train(report=False)
    assert workflow.sent
    assert (summary.finished, summary.steps) == (False, 2)  # the step it was in is finished
    assert "eval/accuracy" in metrics(summary.path)[2]  # due at step 2 anyway
    assert f"{signal.Signals(number).name}: saving after this step" in capsys.readouterr().out
    assert "stopped after step 2; run the same command again" in (summary.path / "log.txt").read_text()
    again = trainer.train(report=False)  # the same call goes on
    assert (again.finished, again.steps) == (True, 4)
    assert f"resumed from {summary.path}/checkpoints/step_000002 at step 2" in capsys.readouterr().out
    assert digests(again.path) == digests(path)


@pytest.mark.full
def test_a_stop_between_due_evaluations_measures_nothing_extra(straight, tmp_path):
    _, path = straight
    _, stopped = train(tmp_path, *FOUR, workflow=signals(2))
    assert checkpoint.steps(stopped / "checkpoints")[-1] == 3
    assert "eval/accuracy" not in metrics(stopped)[3]
    _, whole = train(tmp_path, *FOUR)
    assert digests(whole) == digests(path)


class SignalledLate(Leader):
    """The signal comes after the step has looked for it."""

    def record(self, batch, report, clock):
        super().record(batch, report, clock)
        if self.parts.state.step == 1:
            interrupt()


@pytest.mark.full
def test_a_signal_that_comes_after_the_step_was_recorded_saves_it_all_the_same(straight, tmp_path):
    _, path = straight
    quiet = [*FOUR, "evaluator.at_start=false"]
    trainer, stopped = train(tmp_path, *quiet, kind=SignalledLate)
    assert trainer.parts.state.step == 1
    assert checkpoint.steps(stopped / "checkpoints") == [1]
    _, whole = train(tmp_path, *quiet)
    assert digests(whole)["model.safetensors"] == digests(path)["model.safetensors"]
    assert [row["step"] for row in metrics(whole)] == [1, 2, 3, 4]


def test_a_signal_before_the_first_step_leaves_a_directory_that_starts_anew(tmp_path):
    def workflow(requests, sampler):
        interrupt()
        return single_turn(requests, sampler)

    trainer, stopped = train(tmp_path, workflow=workflow)
    assert trainer.parts.state.step == 0
    assert checkpoint.steps(stopped / "checkpoints") == []
    _, path = train(tmp_path, "total_train_steps=1")
    assert [row["step"] for row in metrics(path)] == [0, 1]
    assert "has no checkpoint" in (path / "log.txt").read_text()


def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on_to_the_same_end(straight, tmp_path, capsys):
    _, path = straight
    _, mine = train(tmp_path, *FOUR, "saver.freq_steps=1", "saver.keep=4", "total_train_steps=3")
    broken = mine / "checkpoints" / "step_000003" / "model.safetensors"
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 1
    broken.write_bytes(content)
    with (mine / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "torn')
    capsys.readouterr()
    train(tmp_path, *FOUR)
    said = capsys.readouterr().out
    assert f"ignored: {broken} is damaged" in said
    assert "resumed from" in said
    assert "at step 2" in said
    got, want = digests(mine), digests(path)
    # Step 3 was the last of the first session and measured; the resumed one did not measure it.
    assert got == want


def test_only_damaged_checkpoints_are_an_error_and_never_a_silent_start_from_scratch(used):
    path = path_of(used)
    rows = metrics(path)
    for folder in (path / "checkpoints").iterdir():
        (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        train(used, *FOUR)
    assert metrics(path) == rows


def test_gradient_checkpointing_gives_the_same_run(straight, tmp_path):
    _, path = straight
    _, mine = train(tmp_path, *FOUR, "actor.gradient_checkpointing=true")
    assert digests(mine) == digests(path)


def test_micro_batches_change_no_result(straight, tmp_path):
    _, path = straight
    _, mine = train(tmp_path, *FOUR, "actor.mb_spec.max_tokens_per_mb=100")
    for got, want in zip(metrics(mine), metrics(path), strict=True):
        assert got.get("reward/mean") == want.get("reward/mean")
        assert got.get("grad/norm", 0.0) == pytest.approx(want.get("grad/norm", 0.0), rel=1e-4)


# The run directory


METRICS = {
    "reward/at_clip",
    "step", "reward/mean", "reward/std", "reward/zero_variance_groups", "reward/failures", "reward/part_final",
    "reward/refilled_groups", "length/mean", "length/max", "length/clipped_mean", "length/truncated", "staleness/mean",
    "staleness/token_mean", "staleness/mixed", "staleness/max", "policy/entropy",
    "policy/kl_behavior", "policy/proximal", "loss/mean", "grad/norm",
    "grad/norm_max", "grad/skipped_updates", "skipped/zero_advantage_sequences", "ratio/log_s_mean", "ratio/log_s_std",
    "ratio/log_s_p05", "ratio/log_s_p50", "ratio/log_s_p95", "ratio/log_s_max_abs", "ratio/first_minibatch_max_abs",
    "clip/sequences_low", "clip/sequences_high", "clip/tokens", "clip/eps_low", "clip/eps_high", "ess/sequences",
    "clip/num_sequences", "noise/log_s_mean", "noise/log_s_std", "noise/log_s_p95_abs",
    "optimizer/lr",
}  # fmt: skip
TIMES = {
    "time/rollout_s", "time/reward_s", "time/train_s", "time/sync_s", "time/step_s", "time/bookkeeping_s",
    "time/proximal_s", "time/forward_backward_s", "time/optimizer_s",
    "throughput/rollout_tokens", "throughput/rollout_tokens_s", "throughput/train_tokens_s",
}  # fmt: skip
EVAL = {
    f"eval/{name}"
    for name in ("accuracy", "accuracy_ci", "reward", "reward_ci", "graded", "pass_at_k", "k", "problems", "length")
} | {"eval/reward_failures", "eval/best_step"}


def test_the_run_directory_holds_what_the_contract_says(straight):
    _, path = straight
    names = {p.name for p in path.iterdir()} - {".lock"}
    assert names == {
        "config.yaml",
        "origins.json",
        "metrics.jsonl",
        "samples",
        "evals",
        "checkpoints",
        "environment.json",
        "log.txt",
    }
    assert {p.name for p in (path / "checkpoints").iterdir()} <= {"step_000002", "step_000004"}
    assert {p.name for p in (path / "samples").iterdir()} == {
        f"step_00000{i}.{kind}" for i in (1, 2, 3, 4) for kind in ("jsonl", "safetensors")
    }
    assert {p.name for p in (path / "evals").iterdir()} == {f"step_00000{i}.jsonl" for i in (0, 2, 4)}
    assert strict((path / "environment.json").read_text())["threads"] == 1
    resolved = load(path / "config.yaml").config
    assert (resolved.actor.eps_clip, resolved.actor.eps_clip_higher) == (0.002, 0.002)
    assert path.parts[-2:] == ("gspo", "trial0")


def test_a_metrics_row_has_every_documented_name_and_strict_json(straight):
    _, path = straight
    rows = [strict(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0].keys() == {"step"} | EVAL
    for row in rows[1:]:
        assert row.keys() - {"time/eval_s"} == METRICS | TIMES | (EVAL if row["step"] in (2, 4) else set())
    assert all(row["eval/problems"] == 16 for row in rows if "eval/problems" in row)
    moved = [row["ratio/log_s_max_abs"] for row in rows[1:] if row["ratio/log_s_max_abs"] is not None]
    assert max(moved) > 1e-4  # the second mini-batch is another policy than the first


def test_samples_are_every_sequence_with_what_happened_to_it(straight):
    _, path = straight
    for step in (1, 2, 3, 4):
        lines = (path / f"samples/step_{step:06d}.jsonl").read_text().splitlines()
        rows = [strict(line) for line in lines]
        assert len(rows) == 8 * 4
        assert [row["sequence"] for row in rows] == list(range(32))
        assert {row["version"] for row in rows} == {step - 1}
        assert [row["submission"] for row in rows] == np.repeat(range(8 * step - 8, 8 * step), 4).tolist()
        for row in rows:
            assert row["reward"] == float(row["completion"].endswith(">" + row["answer"]))
            assert (row["log_s"] is None) == (row["advantage"] == 0)
            assert row["minibatch"] == row["sequence"] // 16
            assert row["length"] >= 8
        row = metrics(path)[step]
        assert row["reward/mean"] == pytest.approx(np.mean([r["reward"] for r in rows]))
        assert row["skipped/zero_advantage_sequences"] == sum(r["advantage"] == 0 for r in rows)
        tensors = load_file(path / f"samples/step_{step:06d}.safetensors")
        kept = {int(name.partition("/")[0]) for name in tensors}
        live = [r["sequence"] for r in rows if r["advantage"] != 0]
        assert kept <= set(live)
        assert len(kept) == min(16, len(live))
        for i in kept:
            gap = tensors[f"{i}/logp"] - tensors[f"{i}/behavior_logp"]
            assert len(gap) == rows[i]["length"] == len(tensors[f"{i}/tokens"]) == len(tensors[f"{i}/entropy"])
            if rows[i]["minibatch"] == 0:
                assert np.abs(gap).max() < 1e-4  # the sampler and the trainer are the same policy
            else:
                assert gap.mean() == pytest.approx(rows[i]["log_s"], abs=1e-5)


def test_the_checkpoints_weights_are_the_trained_ones_and_the_best_is_kept(straight):
    trainer, path = straight
    state = json.loads((path / "checkpoints/step_000004/state.json").read_text())
    assert state["step"] == 4
    assert state["submission"] == 4 * 8
    assert state["update"] == 4 * 2
    measured = {row["step"]: row["eval/accuracy"] for row in metrics(path) if "eval/accuracy" in row}
    assert state["best"]["eval/accuracy"] == max(measured.values())
    assert state["best_step"] == max(s for s, a in measured.items() if a == max(measured.values()))
    assert metrics(path)[-1]["eval/best_step"] == state["best_step"]
    stored = load_file(path / "checkpoints/step_000004/model.safetensors")
    for name, p in trainer.parts.learner.policy.named_parameters():
        assert torch.equal(p.detach(), torch.from_numpy(stored[name]))


def test_held_out_problems_are_none_of_the_training_problems(straight):
    trainer, path = straight
    trained = asked(path)
    held_out = {trainer.parts.valid.prompt(i).text for i in range(len(trainer.parts.valid))}
    assert trained <= {trainer.parts.data.prompt(i).text for i in range(len(trainer.parts.data))}
    assert len(held_out) >= 16
    assert not held_out & {trainer.parts.data.prompt(i).text for i in range(len(trainer.parts.data))}


def test_held_out_accuracy_of_the_untrained_model_is_measured_at_step_0(straight):
    _, path = straight
    first = metrics(path)[0]
    assert first["step"] == 0
    assert 0 < first["eval/accuracy"] < 1


@pytest.mark.full
def test_a_graded_run_keeps_its_best_step_by_reward_and_every_held_out_answer(tmp_path):
    """Wrong answers with right digits have a reward: accuracy alone would not tell the steps apart."""
    how = ("reward.functions=[loop_rewards:digits]", "total_train_steps=2", "evaluator.freq_steps=1", "saver.keep=1")
    _, path = train(tmp_path, *how)
    rows = [row for row in metrics(path) if "eval/reward" in row]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(0 < row["eval/graded"] <= 1 for row in rows)
    best = max(rows, key=lambda row: (row["eval/reward"], row["step"]))["step"]
    assert rows[-1]["eval/best_step"] == best
    assert set(checkpoint.steps(path / "checkpoints")) == {step for step in (best, 2) if step}
    for row in rows:
        answers = read_jsonl(path / "evals" / f"step_{row['step']:06d}.jsonl")
        assert [a["row"] for a in answers] == list(range(16))
        assert sum(a["reward"] for a in answers) / 16 == pytest.approx(row["eval/reward"])
        assert sum(a["correct"] for a in answers) / 16 == pytest.approx(row["eval/accuracy"])
    documented = (ROOT / "docs" / "run-directory.md").read_text()
    assert all(f"`{name}`" in documented for name in answers[0])


def test_without_evaluation_no_held_out_problem_is_needed(tmp_path):
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{a}+1=", "answer": str(a + 1)}) + "\n" for a in range(10, 50)))
    gone = ("valid_dataset.path=gone.jsonl", f"train_dataset.path={rows}", "train_dataset.size=null")
    _, path = train(tmp_path, "evaluator.freq_steps=0", "total_train_steps=1", "reward.functions=[numeric]", *gone)
    assert [row["step"] for row in metrics(path)] == [1]
    assert not any(name.startswith("eval/") for name in metrics(path)[0])
    assert "no evaluation (evaluator.freq_steps: 0)" in (path / "log.txt").read_text()
    assert not (path / "evals").exists()


# Whose directory is it


def test_other_settings_in_a_used_directory_are_refused_with_what_differs(used):
    path = path_of(used)
    before = digests(path)
    with pytest.raises(ConfigError) as caught:
        train(used, *FOUR, "actor.eps_clip=0.01", "gconfig.n_samples=8", "saver.keep=5")
    message = str(caught.value)
    assert "actor.eps_clip: 0.002 → 0.01" in message
    assert "gconfig.n_samples: 4 → 8" in message
    assert "saver.keep" not in message  # decides what is kept, not what is learnt
    assert "trial_name" in message
    assert digests(path) == before
    assert load(path / "config.yaml").config.actor.eps_clip == 0.002


@pytest.mark.full
def test_the_length_of_a_run_is_free_unless_a_schedule_is_a_share_of_it(tmp_path):
    schedule = "actor.optimizer.lr_scheduler_type=linear"
    train(tmp_path, "total_train_steps=1", schedule)
    with pytest.raises(ConfigError, match="total_train_steps: 1 → 2"):
        train(tmp_path, "total_train_steps=2", schedule)


def test_another_data_set_in_a_used_directory_is_refused(tmp_path):
    rows = [{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 50)]
    train(tmp_path, "total_train_steps=1", dataset=rows)
    with pytest.raises(ConfigError, match=r"belongs to another run \(data: "):
        train(tmp_path, "total_train_steps=2", dataset=rows[1:])


@pytest.mark.full
def test_a_run_continues_with_the_threads_that_it_began_with(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    train(tmp_path, "total_train_steps=1", "threads=null")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(ConfigError, match=r"\(threads: 1 → 2\); set threads=1 to continue this one"):
        train(tmp_path, "total_train_steps=2", "threads=null")
    _, path = train(tmp_path, "total_train_steps=2", "threads=1")
    assert [row["step"] for row in metrics(path)] == [0, 1, 2]


@pytest.mark.full
def test_recover_mode_disabled_refuses_a_used_directory(tmp_path):
    _, path = train(tmp_path, "total_train_steps=1")
    before = digests(path)
    with pytest.raises(ConfigError, match=r"already holds a run.*recover\.mode=auto"):
        train(tmp_path, "recover.mode=disabled")
    assert digests(path) == before
    for folder in (path / "checkpoints").iterdir():  # also before the first checkpoint: the metrics are somebody's
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    with pytest.raises(ConfigError, match="already holds a run"):
        train(tmp_path, "recover.mode=disabled")
    assert [row["step"] for row in metrics(path)] == [0, 1]
    train(tmp_path / "new", "recover.mode=disabled", "total_train_steps=1")


def test_a_second_trainer_in_the_same_directory_is_refused_and_the_first_goes_on(tmp_path):
    refused = []

    def workflow(requests, sampler):
        if not refused:
            with pytest.raises(ConfigError, match="in use by another trainer") as caught:
                make_trainer(tmp_path).train()
            refused.append(caught)
        return single_turn(requests, sampler)

    trainer, path = train(tmp_path, "total_train_steps=1", workflow=workflow)
    assert refused
    assert trainer.parts.state.step == 1
    assert len(metrics(path)) == 2


def test_a_finished_run_is_left_as_it_is(used):
    before = digests(path_of(used))
    trainer, path = train(used, *FOUR)
    assert trainer.parts.state.step == 4
    assert digests(path) == before


@pytest.mark.full
def test_a_longer_run_goes_on_from_a_shorter_one(straight, tmp_path):
    _, path = straight
    train(tmp_path, *FOUR, "total_train_steps=2")
    _, mine = train(tmp_path, *FOUR)
    assert digests(mine) == digests(path)


# What a caller brings


def test_a_reward_function_by_name_runs_in_a_worker_and_is_logged_by_its_label(tmp_path):
    _, path = train(tmp_path, "reward.functions=[loop_rewards:digits,final]", "total_train_steps=2")
    row = metrics(path)[1]
    assert row["reward/mean"] == pytest.approx(row["reward/part_digits"] + row["reward/part_final"])
    rows = samples(path, 1)
    for r in rows:
        assert r["reward_parts"]["digits"] == loop_rewards.digits(r["completion"], r["answer"])
    # 'final' needs its marker: by name alone it compares with the last number.
    assert row["reward/failures"] == 0


@pytest.mark.parametrize("reward", [loop_rewards.lengths, [loop_rewards.digits, "final"]])
def test_a_python_function_is_a_reward(tmp_path, reward):
    _, path = train(tmp_path, "total_train_steps=1", reward=reward, workflow=None)
    rows = samples(path, 1)
    if callable(reward):
        assert [r["reward"] for r in rows] == [len(r["completion"]) for r in rows]
    else:
        assert [r["reward_parts"]["digits"] for r in rows] == [
            loop_rewards.digits(r["completion"], r["answer"]) for r in rows
        ]
    assert len(metrics(path)) == 2


def test_a_callers_rows_are_trained_on_and_a_part_of_them_is_held_out(tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "ground_truth": str(a + b)} for a in range(10, 22) for b in range(10, 22)]
    trainer, path = train(tmp_path, dataset=rows)
    trained = asked(path)
    given = {row["prompt"] for row in rows}
    held_out = {trainer.parts.valid.prompt(i).text for i in range(len(trainer.parts.valid))}
    assert trained < given
    assert held_out < given
    assert not trained & held_out
    assert metrics(path)[0]["eval/problems"] == len(held_out) <= 16


@pytest.mark.full
def test_the_seed_orders_the_rows_unless_they_are_not_shuffled(tmp_path):
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 26)]
    orders = {}
    for how in ("seed=1", "seed=2", "train_dataset.shuffle=false"):
        _, path = train(
            tmp_path / how, how, "total_train_steps=2", "evaluator.at_start=false", dataset=rows, valid=rows
        )
        orders[how] = [row["prompt"] for step in (1, 2) for row in samples(path, step)[::4]]
        assert sorted(orders[how]) == sorted(row["prompt"] for row in rows)  # an epoch visits every row once
    assert orders["seed=1"] != orders["seed=2"]
    assert orders["train_dataset.shuffle=false"] == [row["prompt"] for row in rows]


@pytest.mark.full
def test_a_callers_held_out_rows_are_what_is_evaluated(tmp_path):
    rows = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 40)]
    held = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in range(10, 15)]
    trainer, path = train(tmp_path, dataset=rows, valid=held, overrides=())
    assert metrics(path)[0]["eval/problems"] == 5
    assert len(trainer.parts.data) == 30
    tokenizer = trainer.parts.learner.tokenizer
    own = make_dataset(rows[:9], tokenizer=tokenizer)
    trainer, _ = train(
        tmp_path / "dataset", "total_train_steps=1", dataset=own, valid=make_dataset(held, tokenizer=tokenizer)
    )
    assert trainer.parts.data.rows is own.rows


@pytest.mark.full
def test_a_workflow_decides_how_requests_become_samples(tmp_path):
    """The first token of every completion is declared untrained, as a tool's words would be."""
    seen = []

    def workflow(requests, sampler):
        seen.append(len(requests))
        for sample in single_turn(requests, sampler):
            sample.mask[0] = False
            yield sample

    _, path = train(tmp_path, "total_train_steps=2", workflow=workflow)
    assert seen == [16, 32, 32, 16]  # held out, two batches, held out
    rows = samples(path, 1)
    tensors = load_file(path / "samples/step_000001.safetensors")
    assert tensors
    for name, value in tensors.items():
        assert len(value) == rows[int(name.partition("/")[0])]["length"]
    _, plain = train(tmp_path / "plain", "total_train_steps=2")
    assert metrics(path)[1]["length/mean"] == metrics(plain)[1]["length/mean"] - 1


def test_a_trainer_takes_a_yaml_path_and_overrides(tmp_path):
    (tmp_path / "run.yaml").write_text("algorithm: grpo\ntrial_name: by_path\nthreads: 1\n")
    trainer = Trainer(tmp_path / "run.yaml", overrides=["algorithm=gspo"])
    assert trainer.config.algorithm == "gspo"
    assert trainer.config.trial_name == "by_path"


# Every road through the update


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=() if name == "gspo_token" else pytest.mark.full)
        for name in ALGORITHMS
        if name not in ("ppo", "sft", "distill")  # they need a critic, completions or a teacher: tests of their own
    ],
)
def test_every_preset_without_a_critic_trains(tmp_path, algorithm):
    overrides = [f"algorithm={algorithm}", "total_train_steps=2", "evaluator.at_start=false", "evaluator.size=4"]
    # The presets' own clip ranges and mini-batches, as a user gets them.
    trainer, path = train(tmp_path, *overrides, "~actor.eps_clip", "~actor.ppo_n_minibatches")
    rows = metrics(path)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad/skipped_updates"] == 0 for row in rows)
    assert max(row["grad/norm"] for row in rows) > 0
    assert trainer.parts.learner.plan.name == algorithm
    assert trainer.parts.state.update == 2 * ALGORITHMS[algorithm].minibatches


def test_ppo_is_refused_until_there_is_a_critic(tmp_path):
    with pytest.raises(ConfigError, match="critic"):
        train(tmp_path, "algorithm=ppo")


@pytest.mark.parametrize(("method", "sources"), [
    ("auto", ["recompute", "sampler"]), ("rollout", ["rollout", "rollout"]),
    pytest.param("recompute", ["recompute", "recompute"], marks=pytest.mark.full),
])  # fmt: skip
def test_the_proximal_policy_comes_from_where_the_config_says(tmp_path, method, sources):
    _, path = train(
        tmp_path, f"actor.prox_logp_method={method}", "total_train_steps=2", "evaluator.at_start=false", RANKED
    )
    rows = metrics(path)
    assert [row["policy/proximal"] for row in rows] == sources
    first = rows[0]["ratio/first_minibatch_max_abs"]
    # The sampler's values are those of the same weights up to float32 rounding; its own forward is exact.
    assert 0 < first < 1e-5 if method == "rollout" else first == 0
    assert 0 < rows[0]["noise/log_s_p95_abs"] < 1e-5
    assert rows[1]["ratio/log_s_max_abs"] > 1e-4
    if method == "auto":
        assert (
            "update 2 of a batch uses the sampler's log-probs as old policy: the sampler's error is"
            in (path / "log.txt").read_text()
        )


@pytest.mark.full
def test_all_proximal_sources_learn_the_same_up_to_the_noise(tmp_path):
    rewards = {}
    for method in ("recompute", "rollout"):
        _, path = train(tmp_path / method, f"actor.prox_logp_method={method}", "evaluator.at_start=false")
        rewards[method] = [row["grad/norm"] for row in metrics(path)]
    assert rewards["rollout"] == pytest.approx(rewards["recompute"], rel=1e-2)
    assert rewards["rollout"] != rewards["recompute"]


@pytest.mark.parametrize("preset", brief(["tis", "icepop", "sequence_mask", "geometric"], "tis"))
def test_the_decoupled_loss_with_a_behavior_correction_trains(tmp_path, preset):
    _, path = train(
        tmp_path, "actor.use_decoupled_loss=true", f"actor.rejection_sampling.preset={preset}", "total_train_steps=2",
        "evaluator.at_start=false",
    )  # fmt: skip
    assert max(row["grad/norm"] for row in metrics(path)) > 0
    assert {row["policy/proximal"] for row in metrics(path)} == {"recompute"}


def test_refilled_batches_hold_no_group_of_equal_rewards(tmp_path):
    trainer, path = train(tmp_path, "actor.zero_variance_groups=refill", "total_train_steps=2", "actor.max_refills=20")
    rows = metrics(path)[1:]
    assert all(row["reward/zero_variance_groups"] == 0 for row in rows)
    assert all(row["skipped/zero_advantage_sequences"] == 0 for row in rows)
    assert sum(row["reward/refilled_groups"] for row in rows) > 0
    # Every prompt that was asked counts as asked, also those that were thrown away.
    assert trainer.parts.state.submission == 2 * 8 + sum(row["reward/refilled_groups"] for row in rows)


def test_refilling_gives_up_with_what_to_set_and_keeps_the_last_step(tmp_path):
    with pytest.raises(TrainingError, match=r"actor\.max_refills.*actor\.zero_variance_groups=count"):
        train(
            tmp_path,
            "actor.zero_variance_groups=refill",
            "actor.max_refills=2",
            reward={"name": "regex", "pattern": "^"},
        )
    assert checkpoint.steps(path_of(tmp_path) / "checkpoints") == []


def test_dropped_groups_leave_the_denominator_in_the_loop(tmp_path):
    norms = {}
    for how in ("count", "drop"):
        _, path = train(tmp_path / how, f"actor.zero_variance_groups={how}", "total_train_steps=1",
                        "actor.ppo_n_minibatches=1", "actor.optimizer.gradient_clipping=0")  # fmt: skip
        norms[how] = metrics(path)[1]
    skipped = norms["count"]["skipped/zero_advantage_sequences"]
    assert skipped > 0
    assert norms["drop"]["grad/norm"] == pytest.approx(norms["count"]["grad/norm"] * 32 / (32 - skipped), rel=1e-4)


@pytest.mark.full
def test_the_automatic_clip_range_moves_and_survives_a_checkpoint(tmp_path):
    auto = ("actor.eps_clip=auto", "total_train_steps=4", "saver.freq_steps=1", "evaluator.at_start=false")
    _, path = train(tmp_path / "whole", *auto)
    lows = [row["clip/eps_low"] for row in metrics(path)]
    assert lows[0] == pytest.approx(0.15)  # before anything was seen: nothing is clipped
    assert metrics(path)[0]["clip/tokens"] == 0
    assert len(set(lows)) > 2
    assert all(row["clip/eps_high"] == pytest.approx(4 / 3 * row["clip/eps_low"]) for row in metrics(path))
    train(tmp_path / "halves", *auto, "total_train_steps=2")
    _, halves = train(tmp_path / "halves", *auto)
    got = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in digests(halves)["metrics"]]
    want = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in digests(path)["metrics"]]
    assert got == want
    assert digests(halves)["model.safetensors"] == digests(path)["model.safetensors"]


# What speaks up, what ends a run


class Poisoned(Leader):
    """From step 2 on a gradient is not a number."""

    def begin(self):
        super().begin()
        weight = next(self.parts.learner.policy.parameters())
        weight.register_hook(lambda g: g * float("nan") if self.parts.state.step >= 1 else g)


def test_non_finite_gradients_touch_nothing_and_end_the_run_with_a_typed_error(tmp_path):
    settings = ("saver.freq_steps=1", "rollout.dump_to_file=false", RANKED)
    trainer = make_trainer(tmp_path, *settings, kind=Poisoned)
    with pytest.raises(TrainingError, match=r"3 updates of the policy in a row.*actor\.optimizer\.lr"):
        trainer.train(report=False)
    path = path_of(tmp_path)
    # Dumped though nothing else is: the bad batches and only they, that of the step that was never finished too.
    assert sorted(f.name for f in (path / "samples").glob("*.jsonl")) == ["step_000002.jsonl", "step_000003.jsonl"]
    rows = metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[1]["grad/skipped_updates"], rows[2]["grad/skipped_updates"]) == (0, 2)
    assert rows[2]["grad/norm"] is None
    states = [load_file(path / f"checkpoints/step_00000{i}" / "model.safetensors") for i in (1, 2)]
    moments = [load_file(path / f"checkpoints/step_00000{i}" / "optimizer.safetensors") for i in (1, 2)]
    for first, second in (states, moments):
        assert all(np.array_equal(first[name], second[name]) for name in first)
    assert "non-finite gradient, update skipped" in (path / "log.txt").read_text()
    # The poison gone, the same command goes on.
    trainer, _ = train(tmp_path, *settings)
    assert trainer.parts.state.step == 3
    assert metrics(path)[3]["grad/skipped_updates"] == 0


def test_a_finding_is_told_and_with_on_alarm_stop_ends_the_run_without_losing_a_step(tmp_path, capsys):
    dull = ("actor.optimizer.lr=0", f"total_train_steps={TOTAL + 1}", "train_dataset.batch_size=2",
            "evaluator.size=1", "gconfig.max_new_tokens=2", "actor.eps_clip=0.2",
            "evaluator.at_start=false")  # fmt: skip
    with pytest.raises(TrainingError, match="every reward was 0 for 3 steps"):
        train(tmp_path, *dull, "on_alarm=stop")
    assert checkpoint.steps(path_of(tmp_path) / "checkpoints")[-1] == TOTAL
    assert f"warning at step {TOTAL}: every reward was 0" in capsys.readouterr().out
    trainer, path = train(tmp_path, *dull, "on_alarm=warn")
    assert trainer.parts.state.step == TOTAL + 1
    assert [row["step"] for row in metrics(path)] == list(range(1, TOTAL + 2))


@pytest.mark.full
def test_the_same_rows_are_written_whatever_the_display(straight, tmp_path, monkeypatch):
    """A live panel on a terminal is a view: the run is the same."""
    _, path = straight
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    trainer, mine = train(tmp_path, *FOUR)
    assert isinstance(trainer.parts.display, LivePanel)
    assert isinstance(straight[0].parts.display, Lines)
    assert [without_clocks(r) for r in metrics(mine)] == [without_clocks(r) for r in metrics(path)]


@pytest.mark.full
def test_profile_writes_timelines_with_the_phases_of_a_step_and_changes_nothing(tmp_path, straight):
    _, path = train(tmp_path, *FOUR, "profile=true")
    traces = sorted((path / "profile").iterdir())
    assert [t.name for t in traces] == ["step_000002.trace.json.gz", "step_000003.trace.json.gz"]
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    names = {e["name"] for e in events if e.get("cat") == "user_annotation"}
    assert names >= {"rollout", "reward", "train", "proximal", "forward_backward", "optimizer", "sync", "bookkeeping"}
    assert any(e.get("cat") == "cpu_op" and e["name"].startswith("aten::") for e in events)
    assert digests(path) == digests(straight[1])


def test_the_parts_of_a_step_are_timed_and_sum_to_the_step(straight):
    for row in metrics(straight[1]):
        if "time/step_s" not in row:
            continue
        parts = ("rollout", "train", "sync", "bookkeeping", "eval")
        whole = sum(row.get(f"time/{part}_s", 0.0) for part in parts)
        assert 0.9 * row["time/step_s"] < whole <= row["time/step_s"]
        inner = sum(row[f"time/{part}_s"] for part in ("proximal", "forward_backward", "optimizer"))
        assert inner <= row["time/train_s"]
        assert row["time/reward_s"] <= row["time/rollout_s"]

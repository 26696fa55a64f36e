"""Several ranks are one trainer: the same gradients, the same run, one end. Ranks are started by torchrun."""

import json
import os
import signal
import time

import numpy as np
import pytest
import ranked_runs
import ranked_steps
import torch
from made_batches import make_batch, uneven_groups
from processes import is_alive
from ranked_runs import finish, path_of, ranks_of, start, start_run, wait_for_step
from safetensors.torch import load_file
from training_runs import metrics
from training_runs import train as train_alone

from gspo.errors import ConfigError, TrainingError
from gspo.learner import Completion, PackItem, filler, joined, split_over_ranks
from gspo.runs import checkpoint
from gspo.system import StopRequest

pytestmark = pytest.mark.run

# Gradients


def assert_equal_steps(tmp_path, num_ranks, names, reports=True):
    """One training step on several ranks and on one: weights, reports and kept log-probs, to 1e-9 in float64."""
    code, said = finish(start(num_ranks, ranked_steps.__file__, tmp_path, *names))
    assert code == 0, said
    for name in names:
        want, told = ranked_steps.run(ranked_steps.CASES[name])
        got = load_file(tmp_path / f"{name}.safetensors")
        assert want.keys() == got.keys()
        for key in want if reports else [key for key in want if not key.startswith("logp/")]:
            assert float((want[key] - got[key]).abs().max()) <= 1e-9, (name, key)
        also = json.loads((tmp_path / f"{name}.json").read_text())
        # A prompt that two ranks share is computed by both.
        for key in told.keys() - {"num_input_tokens"} if reports else ("applied",):
            np.testing.assert_allclose(
                np.array(also[key], float), np.array(told[key], float), rtol=0, atol=1e-9, err_msg=f"{name} {key}"
            )
    return got, also


def test_two_ranks_take_the_step_of_one(tmp_path, exact):
    assert_equal_steps(tmp_path, 2, ["plain", "own", "padded"])


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_kind_of_step_is_the_same_on_several_ranks(tmp_path, num_ranks, exact):
    names = [name for name in ranked_steps.CASES if name != "nonfinite"]
    assert_equal_steps(tmp_path, num_ranks, names)


@pytest.mark.full
def test_a_loss_that_is_no_number_on_one_rank_skips_the_update_on_all(tmp_path, exact):
    # Which sequences share the broken micro-batch depends on the ranks; that nothing came of it does not.
    _, told = assert_equal_steps(tmp_path, 2, ["nonfinite"], reports=False)
    assert told["applied"] == [False, True]


# Who computes what


def test_every_sequence_is_some_one_ranks_and_loads_are_balanced():
    batch = make_batch(uneven_groups())
    items = batch.items(batch.trainable)
    total = sum(item.num_tokens(share_prefix=False) for item in items)
    for num in (1, 2, 3, 7, 40):
        for layout in ("shared", "packed", "padded"):
            parts = split_over_ranks(items, num, layout=layout)
            assert len(parts) == num
            assert (
                sorted(c.index for part in parts for i in part for c in i.completions)
                == np.flatnonzero(batch.trainable).tolist()
            )
            if layout != "shared":
                longest = max(len(i.prompt) + c.num_inputs for i in items for c in i.completions)
                loads = [sum(i.num_tokens(share_prefix=False) for i in part) for part in parts]
                assert max(loads) <= total / num + longest


def one_group(num_prompt, lengths):
    completions = (Completion(np.zeros(n + 1, np.int64), np.ones(n + 1, bool), i) for i, n in enumerate(lengths))
    return PackItem(np.zeros(num_prompt, np.int64), tuple(completions))


def test_a_group_is_cut_where_its_completions_are_the_work_and_kept_where_its_prompt_is():
    short = split_over_ranks([one_group(4, [50] * 4)], 2)
    assert [len(part) for part in short] == [1, 1]
    assert [part[0].num_tokens(share_prefix=True) for part in short] == [104, 104]
    long = split_over_ranks([one_group(1000, [5, 5])], 2)
    assert sorted(len(part) for part in long) == [0, 1]  # either rank would have to read the prompt


def test_a_filler_is_one_token_of_nobody():
    packed = filler()
    assert packed.is_filler
    assert (packed.num_tokens, packed.num_targets) == (1, 1)


# Runs


def assert_same_course(one, other, tolerance=1e-6):
    """The metrics of two runs, up to rounding; same samples, same steps."""
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for a, b in zip(one, other, strict=True):
        for key in ("loss/mean", "grad/norm", "reward/mean", "length/mean", "eval/accuracy", "policy/entropy"):
            if a.get(key) is None:
                assert b.get(key) is None, key
            else:
                assert b[key] == pytest.approx(a[key], abs=tolerance, rel=1e-4 if key == "grad/norm" else 0), key


@pytest.mark.full
def test_two_ranks_make_the_run_of_one_process(tmp_path, tiny):
    path = ranked_runs.train(tmp_path / "two", 2, "total_train_steps=2", "actor.backend=fsdp:d2")
    _, alone = train_alone(tmp_path / "one", "total_train_steps=2", "evaluator.at_start=false")
    assert_same_course(metrics(alone), metrics(path))
    folders = [p / "checkpoints" / "step_000002" for p in (alone, path)]
    for file in checkpoint.FILES[:2]:
        want, got = (load_file(folder / file) for folder in folders)
        assert want.keys() == got.keys()
        assert all(want[key].shape == got[key].shape and want[key].dtype == got[key].dtype for key in want)
        assert max(float((want[key] - got[key]).abs().max()) for key in want) < 1e-4
    checkpoint.verify(folders[1])


VARIANTS = {
    "plain": (),
    "adapter": ("actor.use_lora=true", "actor.lora_rank=4", "actor.kl_loss_coef=0.01", "ref.path=null"),
    "reference": ("actor.kl_loss_coef=0.01", "ref.path=null", "actor.gradient_checkpointing=true"),
    "critic": ("algorithm=ppo", "critic.optimizer.lr=1e-3", "~actor.eps_clip"),
}


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_two_ranks_saved_goes_on_with_one_and_with_three(tmp_path, tiny, variant):
    more = (*VARIANTS[variant], "saver.freq_steps=1", "saver.keep=9", "trial_name=trial0", "experiment_name=gspo")
    more += ("evaluator.freq_steps=1",)  # the last step of a run is measured anyway
    _, whole = train_alone(tmp_path / "whole", *more, "total_train_steps=4", "evaluator.at_start=false")
    for num_ranks in (1, 3):
        root = tmp_path / f"then{num_ranks}"
        ranked_runs.train(root, 2, *more, "total_train_steps=2")
        process = start_run(root, num_ranks, *more, "total_train_steps=4")
        code, said = finish(process)
        assert code == 0, said
        assert f"ranks changed from 2 to {num_ranks}" in said
        assert_same_course(metrics(whole), metrics(path_of(root)))


@pytest.mark.full
def test_half_precision_layers_keep_their_weights_in_float32(tmp_path, tiny):
    path = ranked_runs.train(tmp_path, 2, "total_train_steps=2", "actor.fsdp.param_dtype=bfloat16")
    kept = load_file(path / "checkpoints" / "step_000002" / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    assert all(np.isfinite(row["grad/norm"]) for row in metrics(path))
    assert metrics(path)[-1]["noise/log_s_p95_abs"] < 0.05  # sampler and trainer both compute in bfloat16


# The end


def test_the_config_and_the_launcher_must_agree_on_the_number_of_ranks(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="asks for 2 ranks, but 1"), joined(2, 10.0, StopRequest()):
        pass


def test_one_process_is_a_world_of_its_own_and_starts_nothing(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(None, 10.0, StopRequest()) as world:
        assert (world.size, world.is_first, world.all_reduce_sum(2.5), world.union({3: np.ones(1)})) == (
            1, True, 2.5, {3: np.ones(1)},
        )  # fmt: skip
    assert not torch.distributed.is_initialized()


def test_a_signal_is_said_once_whoever_got_it():
    said = []
    stop = StopRequest()
    stop.listen()
    stop.defer(said.append)
    stop.ask(signal.SIGTERM, "rank 3")
    stop.ask(signal.SIGTERM, "rank 3")
    stop.restore()
    assert stop.signal == signal.SIGTERM
    assert said == ["SIGTERM (rank 3): saving after this step (press Ctrl-C again to exit at once)"]


LONG = ("total_train_steps=400", "saver.freq_steps=1", "evaluator.freq_steps=1000")


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_rank_stops_all_after_the_same_step(tmp_path, tiny, rank):
    process = start_run(tmp_path, 2, *LONG, "saver.freq_steps=1000")
    wait_for_step(process, tmp_path, 2)
    pids = ranks_of(process)
    time.sleep(0.5)
    os.kill(pids[rank], signal.SIGTERM)
    _, said = finish(process)
    steps = checkpoint.steps(path_of(tmp_path) / "checkpoints")
    assert len(steps) == 1
    assert metrics(path_of(tmp_path))[-1]["step"] == steps[0]
    assert f"Stopped and saved after step {steps[0]}" in said
    assert "exitcode  : 130" in said
    assert "rank      : 0" in said.partition("Root Cause")[2]
    assert not any(map(is_alive, pids.values()))


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_stopped_ends_all_in_time_and_the_run_goes_on(tmp_path, tiny, fault, rank):
    process = start_run(tmp_path, 2, *LONG, "stall_timeout=20")
    wait_for_step(process, tmp_path, 2)
    pids, at = ranks_of(process), time.monotonic()
    os.kill(pids[rank], fault)
    code, said = finish(process, timeout=150)
    assert code != 0
    assert time.monotonic() - at < 120, said  # stall_timeout, and torch's own patience with a stopped process
    if fault == signal.SIGSTOP:  # a killed one is torchrun's to name
        assert f"rank {rank} sends no heartbeat" in said or f"rank {rank} has sent no heartbeat" in said
    assert "Traceback" not in said.partition("gspo: ")[0], said
    assert not any(map(is_alive, pids.values()))
    step = max(checkpoint.steps(path_of(tmp_path) / "checkpoints"))
    checkpoint.verify(path_of(tmp_path) / "checkpoints" / f"step_{step:06d}")
    code, said = finish(start_run(tmp_path, 2, *LONG, f"total_train_steps={step + 1}"))
    assert code == 0, said
    assert f"at step {step}" in said


@pytest.mark.full
def test_the_first_error_is_shown_and_ends_every_rank(tmp_path, tiny):
    process = start_run(tmp_path, 2, "reward.functions=[nowhere:at_all]")
    code, said = finish(process)
    assert code != 0
    assert "nowhere" in said
    assert "rank 1 ends because rank 0 failed: ConfigError" in said or "SIGTERM" in said


@pytest.mark.full
def test_a_rank_that_fails_is_named_by_the_others(tmp_path, tiny):
    """An error in the middle of training, on rank 1 alone."""
    code, said = finish(start(2, ranked_steps.__file__, tmp_path, "broken"))
    assert code != 0
    assert "DataError: made to fail on rank 1" in said
    assert TrainingError.__name__ in said
    assert "rank 0 ends because rank 1 failed: DataError: made to fail on rank 1" in said

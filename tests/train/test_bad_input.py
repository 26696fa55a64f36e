"""Every bad input of the loop is a typed error that names a key, at or before the first affected sample."""

import json
import shutil

import loop_rewards
import pytest
from processes import files_up_to
from training_runs import digests, metrics, path_of, train
from word_tokenizers import tokenizer_of

from gspo.data import Dataset, make_dataset
from gspo.errors import CheckpointError, ConfigError, DataError, RewardError
from gspo.models import embedded
from gspo.runs import checkpoint
from gspo.types import Prompt

pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.run]

CONTEXT = embedded.shape("embedded:tiny")["max_position_embeddings"]
ROWS = [{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 50)]


def nothing_was_sampled(root):
    path = path_of(root)
    return not metrics(path) if (path / "metrics.jsonl").exists() else True


@pytest.mark.parametrize("key", ["train_dataset", "valid_dataset"])
def test_a_prompt_longer_than_the_context_is_refused_before_anything_is_sampled(tmp_path, key):
    rows = [*ROWS[:20], {"question": "1" * (CONTEXT - 6) + "+1=", "answer": "?"}]
    given = {"dataset": rows, "valid": ROWS[:3]} if key == "train_dataset" else {"dataset": ROWS, "valid": rows}
    with pytest.raises(
        DataError, match=rf"{key}, row 20: the prompt has {CONTEXT - 3} tokens.*max_new_tokens.*max_length"
    ):
        train(tmp_path, **given)
    assert nothing_was_sampled(tmp_path)


def test_room_for_the_completion_is_part_of_the_context(tmp_path):
    with pytest.raises(DataError, match=rf"gconfig\.max_new_tokens = {CONTEXT - 1}"):
        train(tmp_path, f"gconfig.max_new_tokens={CONTEXT - 1}", dataset=ROWS, valid=ROWS[:1])
    with pytest.raises(DataError, match=rf"eval_gconfig\.max_new_tokens = {CONTEXT - 1}"):
        train(tmp_path, f"eval_gconfig.max_new_tokens={CONTEXT - 1}", dataset=ROWS, valid=ROWS[:1])
    with pytest.raises(
        ConfigError, match=rf"gconfig\.max_tokens is 4096, but the context of embedded:tiny is {CONTEXT}"
    ):
        train(tmp_path, "gconfig.max_tokens=4096")
    assert nothing_was_sampled(tmp_path)


def test_a_token_id_outside_the_vocabulary_is_refused_before_anything_is_sampled(tmp_path):
    data = make_dataset(ROWS, tokenizer=embedded.embedded_tokenizer())
    foreign = Dataset("rows", "train", data.rows, data.tokenizer)
    for row in range(len(foreign)):
        foreign._prompts[row] = Prompt((3, 99, 4), "?", {"answer": "1"})
    with pytest.raises(DataError, match=r"token 99 is outside the model's vocabulary of 32.*tokenizer_path"):
        train(tmp_path, "evaluator.at_start=false", dataset=foreign, valid=data)
    assert nothing_was_sampled(tmp_path)


def test_a_tokenizer_of_another_model_is_refused_at_load(tmp_path):
    tokenizer_of(map(str, range(100)), eos_token="1").save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(DataError, match=r"token ids up to 99 but .* embeddings for 32.*tokenizer_path"):
        train(tmp_path, f"tokenizer_path={tmp_path / 'tokenizer'}")


def test_an_empty_data_set_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"train_dataset\.path.*has no rows"):
        train(tmp_path, dataset=[])
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match=r"train_dataset\.path.*has no rows"):
        train(tmp_path, f"train_dataset.path={tmp_path / 'empty.jsonl'}", "~train_dataset.size")
    with pytest.raises(DataError, match=r"valid_dataset\.path.*has no rows"):
        train(tmp_path, dataset=ROWS, valid=[])
    with pytest.raises(DataError, match=r"train_dataset\.max_length is 2"):
        train(tmp_path, "train_dataset.max_length=2")


@pytest.mark.parametrize(
    ("reward", "what"),
    [
        (loop_rewards.too_few, r"returned \d rewards for \d completions|returned 0 rewards for 1 completions"),
        (loop_rewards.none, r"returned None \(NoneType\); it must return a number"),
        (loop_rewards.nan, "returned nan; a reward must be finite"),
        (loop_rewards.word, r"returned '1\.0' \(str\); it must return a number"),
        (loop_rewards.crash, "raised ZeroDivisionError: made to fail"),
    ],
)
def test_a_reward_that_gives_no_number_ends_the_run_at_the_first_batch(tmp_path, reward, what):
    with pytest.raises(RewardError, match=what) as caught:
        train(tmp_path, reward=reward)
    assert "reward.max_failure_fraction" in str(caught.value)
    assert "16 of 16" in str(caught.value)  # the held-out problems of step 0
    assert nothing_was_sampled(tmp_path)


def test_rewards_that_fail_in_training_end_the_run_and_the_last_step_is_kept(tmp_path):
    """Problems with small answers come first: two steps are trained before every reward fails."""
    easy = [{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10, 26)]
    hard = [{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(60, 84)]
    order = ("train_dataset.shuffle=false", "total_train_steps=5", "evaluator.at_start=false")
    with pytest.raises(RewardError, match="32 of 32 rewards failed"):
        train(tmp_path, *order, dataset=easy + hard, valid=easy[:4], reward=loop_rewards.late_crash)
    path = path_of(tmp_path)
    assert checkpoint.steps(path / "checkpoints") == [2]
    assert [row["step"] for row in metrics(path)] == [1, 2]
    state = json.loads((path / "checkpoints/step_000002/state.json").read_text())
    assert state["submission"] == 16  # the prompts of the failed batch will be asked again


def test_some_failing_rewards_are_masked_and_counted_and_never_a_zero(tmp_path):
    """A quarter of the problems fail: below the threshold, training goes on without them."""
    rows = [{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in [*range(10, 16), *range(60, 62)]]
    _, path = train(
        tmp_path, "total_train_steps=2", "reward.max_failure_fraction=0.3", dataset=rows, valid=rows[:4],
        reward=loop_rewards.late_crash,
    )  # fmt: skip
    for step in (1, 2):
        assert metrics(path)[step]["reward/failures"] == 8
        rows = [json.loads(line) for line in (path / f"samples/step_{step:06d}.jsonl").read_text().splitlines()]
        failed = [row for row in rows if row["failure"]]
        assert len(failed) == 8
        assert all(row["reward"] is None and row["advantage"] == 0 and row["log_s"] is None for row in failed)
        assert all("crash: " in row["failure"] for row in failed)


def test_a_model_folder_that_is_whole_trains_and_gives_the_embedded_models_run(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(embedded.embedded_folder("embedded:tiny"), folder)
    _, path = train(tmp_path / "folder", f"actor.path={folder}", "total_train_steps=2")
    _, embedded_path = train(tmp_path / "embedded", "total_train_steps=2")
    got, want = digests(path), digests(embedded_path)
    assert got["model.safetensors"] == want["model.safetensors"]
    assert got["metrics"] == want["metrics"]


@pytest.mark.full
def test_a_disk_without_space_for_a_checkpoint_loses_nothing_and_the_same_command_goes_on(tmp_path):
    whole = ("total_train_steps=3", "saver.freq_steps=1", "saver.keep=4")
    _, want = train(tmp_path / "roomy", *whole)
    train(tmp_path / "full", *whole, "total_train_steps=1")
    path = path_of(tmp_path / "full")
    first = {p.name: p.read_bytes() for p in (path / "checkpoints/step_000001").iterdir()}
    refused = pytest.raises(CheckpointError, match=r"step_000002.*File too large.*cluster\.fileroot")
    with files_up_to(500_000), refused:  # room for metrics and samples, not for weights
        train(tmp_path / "full", *whole)
    assert {p.name for p in (path / "checkpoints").iterdir()} == {"step_000001"}
    assert {p.name: p.read_bytes() for p in (path / "checkpoints/step_000001").iterdir()} == first
    train(tmp_path / "full", *whole)
    got = digests(path)
    assert got["model.safetensors"] == digests(want)["model.safetensors"]
    assert got["step_000003.jsonl"] == digests(want)["step_000003.jsonl"]


def test_a_disk_without_space_for_samples_is_a_typed_error(tmp_path):
    wide = ("total_train_steps=1", "gconfig.n_samples=16")
    refused = pytest.raises(CheckpointError, match=r"samples/step_000001.*cluster\.fileroot")
    with files_up_to(20_000), refused:  # the resolved config fits, 128 samples do not
        train(tmp_path, *wide)
    assert [row["step"] for row in metrics(path_of(tmp_path))] == [0]
    train(tmp_path, *wide)
    assert [row["step"] for row in metrics(path_of(tmp_path))] == [0, 1]

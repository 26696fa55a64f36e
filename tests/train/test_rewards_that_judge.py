"""Training by a reward model, by a judge and on a mixture, on the tiny model: the policy learns what it should."""

import importlib
import itertools
import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from http_judge import JudgeServer, serving
from training_runs import assert_resumes, digests, make_trainer, metrics, samples, train
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from word_tokenizers import tokenizer_of

from gspo.errors import ConfigError, DataError, RewardError
from gspo.models import embedded, load_tokenizer

pytestmark = pytest.mark.run

ALPHABET = "0123456789+=,>"
# From random weights, four tokens at a time: whatever is rewarded is found by chance and learnt in a few steps.
QUICK = (
    "gconfig.max_new_tokens=4", "gconfig.ignore_eos=true", "gconfig.n_samples=8",
    "train_dataset.batch_size=8", "actor.optimizer.lr=3e-3", "actor.eps_clip=0.2", "total_train_steps=12",
    "evaluator.at_start=false", "evaluator.size=1",
)  # fmt: skip


def sevens(folder):
    """A classifier whose one logit is high where the last token is a 7, and low elsewhere: attention and MLP are cut,
    so its hidden state is the last token's embedding."""
    size = len(ALPHABET) + 1
    config = Qwen3Config(
        vocab_size=size, hidden_size=size, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=256, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.fill_(1.0 if "norm" in name else 0.0)
        model.get_input_embeddings().weight.copy_(torch.eye(size))
        model.score.weight[0, 1 + ALPHABET.index("7")] = size**-0.5  # RMSNorm makes a one-hot √size long
    return with_tokenizer(model, folder)


def moody(folder):
    """A classifier whose scores use all their bits."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(ALPHABET) + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, num_labels=1, pad_token_id=0,
        initializer_range=0.5,
    )  # fmt: skip
    return with_tokenizer(AutoModelForSequenceClassification.from_config(config), folder)


def with_tokenizer(model, folder):
    model.save_pretrained(folder)
    tokenizer_of(["[PAD]", *ALPHABET], pad_token="[PAD]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def blank(tiny, tmp_path_factory):
    """The embedded model before it was taught anything: every token is about as likely as any other."""
    folder = tmp_path_factory.mktemp("blank")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(embedded.embedded_folder(tiny))).save_pretrained(folder)
    load_tokenizer(tiny).save_pretrained(folder)
    return f"actor.path={folder}"


@pytest.fixture
def judge():
    with serving(JudgeServer()) as server:
        yield server


def rewards_of(path):
    return [row["reward/mean"] for row in metrics(path) if row["step"] > 0]


def test_a_policy_learns_what_a_reward_model_likes(tmp_path, blank):
    model = sevens(tmp_path / "model")
    _, path = train(tmp_path, blank, *QUICK, f"reward.functions=[{{name: reward_model, path: '{model}'}}]")
    rewards = rewards_of(path)
    last = samples(path, 12)
    assert all(row["reward"] == pytest.approx(float(row["completion"].endswith("7")), abs=1e-4) for row in last)
    assert rewards[0] < 0.2
    assert rewards[-1] > rewards[0] + 0.3


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "reward_model"))
    return importlib.import_module("reward_model")


def test_pairs_are_read_from_a_file_and_few_or_wrong_ones_are_refused(tmp_path, example):
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}, {"prompt": "1+1=", "chosen": "2"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"line 2: a pair has prompt, chosen and rejected"):
        example.pairs_of_file(file)
    file.write_text(json.dumps(rows[0]) + "\n")
    pairs = example.pairs_of_file(file)
    assert pairs == [("1+1=", "2", "3")]
    with pytest.raises(DataError, match="1 pairs of 1 prompts: at least 10"):
        example.train_reward_model(pairs, "embedded:tiny", tmp_path / "model")


@pytest.mark.full
def test_a_reward_model_trained_on_pairs_teaches_what_the_pairs_prefer(tmp_path, blank, example):
    """The pairs prefer more sevens. The policy sees the model's scores only, and writes sevens."""
    draw = random.Random(0)
    digits = partial(draw.choices, "0123456789", k=4)
    texts = [("".join(digits()), f"{draw.randrange(999)}+{draw.randrange(999)}=") for _ in range(800)]
    ordered = [(q, *sorted((a, b), key=lambda t: -t.count("7"))) for (a, q), (b, _) in itertools.pairwise(texts)]
    pairs = [example.Pair(*pair) for pair in ordered if pair[1].count("7") > pair[2].count("7")]
    model = tmp_path / "model"
    assert example.train_reward_model(pairs, "embedded:tiny", model, steps=60, batch=16) > 0.8
    _, path = train(tmp_path, blank, *QUICK, f"reward.functions=[{{name: reward_model, path: '{model}'}}]")
    first, last = (np.mean([row["completion"].count("7") for row in samples(path, step)]) for step in (1, 12))
    assert last > first + 0.5, (first, last)


@pytest.mark.full
def test_checkpoints_ask_a_reward_model_earlier_and_change_no_bit_of_a_run_that_samples_ahead(tmp_path, blank):
    """A checkpoint has what waits scored at once: other texts come together than without it."""
    entry = f"reward.functions=[{{name: reward_model, path: '{moody(tmp_path / 'model')}', device: cpu}}]"
    ahead = ("rollout.max_head_offpolicyness=2", "actor.use_decoupled_loss=true", "train_dataset.batch_size=2",
             "total_train_steps=5", entry)  # fmt: skip
    _, often = train(tmp_path / "often", blank, *QUICK, *ahead, "saver.freq_steps=1")
    _, once = train(tmp_path / "once", blank, *QUICK, *ahead, "saver.freq_steps=5")
    assert len(list((often / "checkpoints").iterdir())) > len(list((once / "checkpoints").iterdir()))
    assert digests(often) == digests(once)


def test_a_policy_learns_what_a_judge_likes_and_each_text_is_judged_once(tmp_path, blank, judge):
    judge.score = lambda completion: completion.count("7") / 4
    entry = f"{{name: judge, url: '{judge.url}', model: m, prompt: '{{completion}}'}}"
    _, path = train(tmp_path, blank, *QUICK, f"reward.functions=[{entry}]")
    rewards = rewards_of(path)
    assert rewards[0] < 0.2
    assert rewards[-1] > rewards[0] + 0.3
    assert len(judge.asked) == len(set(judge.asked))


def test_a_judge_that_is_gone_stops_the_run_with_its_reason_and_not_with_zeros(tmp_path, blank, judge):
    judge.score = lambda completion: None
    entry = f"{{name: judge, url: '{judge.url}', model: m, prompt: '{{completion}}', retries: 0}}"
    with pytest.raises(RewardError, match=r"rewards failed in one batch.*max_failure_fraction.*judge at .*HTTP 500"):
        train(tmp_path, blank, *QUICK, f"reward.functions=[{entry}]")
    assert judge.asked


def test_a_judge_that_fails_for_some_masks_those_and_trains_on_the_rest(tmp_path, blank, judge):
    judge.score = lambda completion: None if completion.startswith("1") else 1.0
    entry = f"{{name: judge, url: '{judge.url}', model: m, prompt: '{{completion}}', retries: 0}}"
    _, path = train(tmp_path, blank, *QUICK, "total_train_steps=1", f"reward.functions=[{entry}]")
    rows = samples(path, 1)
    failed = [row for row in rows if row["completion"].startswith("1")]
    assert failed
    assert all(row["reward"] is None and row["advantage"] == 0 and "infra" in row["failure"] for row in failed)
    assert all(row["reward"] == 1.0 for row in rows if row not in failed)
    assert metrics(path)[-1]["reward/failures"] == len(failed)


def mixed(*second):
    rewards = f", reward: [{', '.join(second)}]" if second else ""
    return (
        "train_dataset.mixture=[{path: 'embedded:arithmetic:2', weight: 3, size: 100}, "
        f"{{path: 'embedded:arithmetic:3', name: three, size: 100{rewards}}}]"
    )


@pytest.mark.full
def test_a_mixture_trains_with_each_sources_reward_and_reports_each(tmp_path, tiny):
    _, path = train(tmp_path, mixed("numeric"), "total_train_steps=4", "evaluator.size=16")
    rows = metrics(path)
    assert {"reward/part_final@arithmetic:2", "reward/part_numeric@three"} <= rows[-1].keys()
    log = (path / "log.txt").read_text()
    assert (
        "train_dataset.mixture[0]: 100 problems of embedded:arithmetic:2 (train), 75 % of prompts as arithmetic:2"
        in log
    )
    asked = [row["prompt"] for step in range(1, 5) for row in samples(path, step)]
    digits = {len(prompt.partition("+")[0]) for prompt in asked}
    assert digits == {2, 3}


@pytest.mark.full
def test_a_policy_learns_both_tasks_of_a_mixture(tmp_path, tiny):
    _, path = train(
        tmp_path, mixed(), "total_train_steps=24", "train_dataset.batch_size=24", "gconfig.n_samples=8",
        "evaluator.at_start=false", "evaluator.size=1",
    )  # fmt: skip
    rows = [row for row in metrics(path) if row["step"] > 0]
    for name in ("reward/part_final@arithmetic:2", "reward/part_final@three"):
        values = [row[name] for row in rows if name in row]
        assert sum(values[-6:]) / 6 > sum(values[:6]) / 6 + 0.1, name


@pytest.mark.full
def test_a_resumed_mixture_is_the_uninterrupted_one(tmp_path, tiny):
    assert_resumes(tmp_path, mixed(), "total_train_steps=4", after=2)


@pytest.mark.full
def test_reasoning_gym_trains_end_to_end_with_its_own_scorer(tmp_path, tiny):
    pytest.importorskip("reasoning_gym", reason="needs gspo[tasks]")
    _, path = train(
        tmp_path,
        "train_dataset.path=reasoning_gym:chain_sum",
        "train_dataset.options={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}",
        "train_dataset.size=32",
        "total_train_steps=2",
        "evaluator.at_start=false",
    )
    assert metrics(path)[-1]["reward/failures"] == 0


@pytest.mark.parametrize(
    ("overrides", "kind", "says"),
    [
        (["train_dataset.mixture=[{weight: 2}]"], ConfigError, r"train_dataset\.mixture .*has no path"),
        (["reward.functions=[{url: 'http://x'}]"], ConfigError, r"reward\.functions .*has no name"),
        (
            [
                "train_dataset.mixture=[{path: 'embedded:arithmetic', name: a}]",
                "valid_dataset.mixture=[{path: 'embedded:arithmetic', name: a, reward: [numeric]}]",
            ],
            ConfigError,
            "give a different rewards; name one of them otherwise",
        ),
        (["reward.functions=[{name: juge}]"], ConfigError, r"reward\.functions.*did you mean 'judge'"),
        (["reward.functions=[{name: judge, url: 'http://x'}]"], ConfigError, "judge needs model"),
        (["reward.functions=[{name: reward_model, path: /nowhere}]"], DataError, r"reward_model\.path"),
        (
            ["train_dataset.mixture=[{path: 'embedded:arithmetic', columns: {prompt: qestion}}]"],
            DataError,
            r"train_dataset\.mixture\[0\]\.columns\.prompt is 'qestion', but the columns of .* are question, answer",
        ),
        (
            ["train_dataset.chat_template=true"],
            DataError,
            r"train_dataset\.chat_template is true.*\.jinja file, or false",
        ),
    ],
)
def test_bad_input_is_named_before_training(tmp_path, tiny, overrides, kind, says):
    with pytest.raises(kind, match=says):
        make_trainer(tmp_path, *overrides).train()

"""A reward model from a folder: plain transformers' scores in any batch, and clear words for the wrong folder."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from word_tokenizers import tokenizer_of

from gspo.errors import ConfigError, DataError
from gspo.rewards.call import RewardItem
from gspo.rewards.functions.reward_model import RewardModel
from gspo.rewards.pool import RewardPool
from gspo.rewards.spec import reward_spec
from gspo.types import Failure

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789+=<>"
CHAT = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.5,
}  # fmt: skip


def make_tokenizer(chat=None):
    return tokenizer_of(["[PAD]", *LETTERS], pad_token="[PAD]", chat_template=chat)


def save(folder, *, kind=AutoModelForSequenceClassification, chat=None, config=None, **changes):
    torch.manual_seed(3)
    config = copy.deepcopy(config) if config else Qwen3Config(vocab_size=len(LETTERS) + 1, **SIZES)
    for name, value in {"num_labels": 1, "pad_token_id": 0, **changes}.items():
        setattr(config, name, value)
    kind.from_config(config).save_pretrained(folder)
    make_tokenizer(chat).save_pretrained(folder)
    return str(folder)


def items():
    groups = [("2+2=", ("4", "5 or so", "a long story about 4")), ("1+1=", ("2", "x" * 20)), ("2+2=", ("4",))]
    return [RewardItem(f"<rendered>{q}", answers, messages=({"role": "user", "content": q},)) for q, answers in groups]


def plain_scores(path, texts):
    """What transformers says about each text alone."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = make_tokenizer()
    with torch.no_grad():
        return [model(torch.tensor([tokenizer.encode(text)])).logits[0, 0].item() for text in texts]


def flat(results):
    return [value for group in results for value in group]


@pytest.mark.parametrize("batch_size", [1, 4, None])
@pytest.mark.parametrize("chat", [None, CHAT])
def test_scores_are_those_of_plain_transformers_in_any_batch(tmp_path, batch_size, chat):
    path = save(tmp_path, chat=chat)
    form = "<{}><{}>" if chat else "{}{}"
    texts = [form.format(i.messages[0]["content"], c) for i in items() for c in i.completions]
    scores = flat(RewardModel(path=path, batch_size=batch_size, device="cpu").score(items()))
    assert scores == pytest.approx(plain_scores(path, texts), abs=1e-5)
    assert max(scores) - min(scores) > 0.05, "a model that scores everything alike shows nothing"


def test_scores_do_not_depend_on_order_or_company(tmp_path):
    path = save(tmp_path)
    one_by_one = RewardModel(path=path, device="cpu")
    alone = [flat(one_by_one.score([item])) for item in items()]
    together = RewardModel(path=path, device="cpu").score(items()[::-1])[::-1]
    assert together == alone, "one text at a time: equal to the last bit"
    batched = RewardModel(path=path, device="cpu", batch_size=3).score(items()[::-1])[::-1]
    assert flat(batched) == pytest.approx(flat(alone), abs=1e-5)


def test_a_model_without_a_padding_token_batches_all_the_same(tmp_path):
    path = save(tmp_path, pad_token_id=None)
    texts = [i.messages[0]["content"] + c for i in items() for c in i.completions]
    scores = flat(RewardModel(path=path, batch_size=4, device="cpu").score(items()))
    assert scores == pytest.approx(plain_scores(path, texts), abs=1e-5)


def test_an_encoder_serves_too(tmp_path):
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
    path = save(tmp_path, config=BertConfig(vocab_size=len(LETTERS) + 1, **sizes))
    texts = [i.messages[0]["content"] + c for i in items() for c in i.completions]
    scores = flat(RewardModel(path=path, batch_size=4, device="cpu").score(items()))
    assert scores == pytest.approx(plain_scores(path, texts), abs=1e-5)


def test_equal_texts_enter_the_model_once(tmp_path):
    scorer = RewardModel(path=save(tmp_path), device="cpu")
    rows = []
    scorer._model.register_forward_pre_hook(lambda m, args, kwargs: rows.append(kwargs["input_ids"]), with_kwargs=True)
    first = scorer.score(items())
    assert len(rows) == 5, "six texts, two of them equal"
    assert scorer.score(items()) == first
    assert len(rows) == 5


def test_a_group_in_a_pool_is_scored_with_all_that_wait(tmp_path):
    entry = {"name": "reward_model", "path": save(tmp_path), "weight": 0.5, "device": "cpu", "batch_size": 8}
    with RewardPool(reward_spec(["numeric", entry])) as pool:
        rows = []
        pool._scorers[1]._model.register_forward_pre_hook(
            lambda m, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        for number, item in enumerate(items()):
            pool.submit(number, RewardItem(item.prompt, item.completions, data={"answer": "4"}, messages=item.messages))
        assert rows == []
        outcomes = dict(pool.completed())
    assert rows == [5]
    score = outcomes[0][0]
    assert score.value == pytest.approx(score.parts["numeric"] + 0.5 * score.parts["reward_model"])
    assert score.parts["numeric"] == 1.0


def test_a_text_too_long_is_a_failure_of_its_sample(tmp_path):
    with RewardPool(reward_spec({"name": "reward_model", "path": save(tmp_path), "max_length": 10})) as pool:
        ((short, long),) = pool.score([RewardItem("2+2=", ("4", "x" * 30))])
    assert not isinstance(short, Failure)
    assert isinstance(long, Failure)
    assert "34 tokens is outside of 1…10" in long.message


def test_two_labels_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"reward_model\.path.*has 2 labels \(LABEL_0, LABEL_1\).*one number"):
        RewardPool(reward_spec({"name": "reward_model", "path": save(tmp_path, num_labels=2)}))


def test_a_policy_is_not_taken_for_a_reward_model(tmp_path):
    path = save(tmp_path, kind=AutoModelForCausalLM)
    with pytest.raises(DataError, match=r"no weights for score\.weight, so it is not a trained classifier"):
        RewardPool(reward_spec({"name": "reward_model", "path": path}))


@pytest.mark.parametrize(
    ("settings", "kind", "says"),
    [
        ({}, ConfigError, "reward_model needs path"),
        ({"path": "./nowhere"}, DataError, "there is no folder"),
        ({"path": "x", "lenght": 3}, ConfigError, "has no argument lenght"),
        ({"path": "x", "dtype": "int"}, ConfigError, "dtype must be float32"),
    ],
)
def test_bad_settings_are_named(settings, kind, says):
    with pytest.raises(kind, match=says):
        RewardPool(reward_spec({"name": "reward_model", **settings}))


def test_a_template_that_is_not_there_and_a_tokenizer_of_another_model_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"chat_template is true, but the tokenizer .* has none; set it to false"):
        RewardModel(path=save(tmp_path / "a"), chat_template=True)
    small = Qwen3Config(vocab_size=10, **SIZES)
    with pytest.raises(DataError, match="has 42 tokens, its model only 10"):
        RewardModel(path=save(tmp_path / "b", config=small))

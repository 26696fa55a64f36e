"""Rows of supervised fine-tuning: which tokens are trained, and which rows are refused."""

import numpy as np
import pytest
from word_tokenizers import tokenizer_of

from gspo.data.dataset import make_dataset
from gspo.errors import DataError
from gspo.models import embedded
from gspo.rollout import from_data
from gspo.train import refuse_long_prompts
from gspo.types import Request, SampleId, SamplingParams

# Every turn ends with ~, the end-of-turn token, and a line end, as in ChatML.
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}~\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
# As Qwen3: what the assistant thought is shown in the last turn only.
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'][0] }}>"
    "{{ m['content'].split('|')[-1] if m['role'] == 'assistant' and not loop.last else m['content'] }}~\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
TALK = [
    {"role": "system", "content": "add"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "so|2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "so|4"},
]


@pytest.fixture(scope="module")
def tokenizer():
    characters = [chr(c) for c in range(32, 127)] + ["\n", "[eos]"]
    return tokenizer_of(characters, "?", eos_token="[eos]", additional_special_tokens=["~"])


def text_of(tokenizer, tokens):
    return "".join(tokenizer.convert_ids_to_tokens(list(map(int, tokens))))


def rows_of(rows, tokenizer, **settings):
    return make_dataset(rows, tokenizer=tokenizer, supervised=True, **settings)


def trained(tokenizer, sample):
    return text_of(tokenizer, sample.tokens[sample.mask])


def test_a_plain_completion_is_trained_whole_and_ends_with_eos(tokenizer):
    prompt = rows_of([{"prompt": "1+1=", "completion": "2"}], tokenizer, chat_template=False).prompt(0)
    assert prompt.text == "1+1="
    assert text_of(tokenizer, prompt.target.tokens) == "2[eos]"
    assert prompt.target.mask.all()
    assert not prompt.target.behavior_logp.any()


def test_the_completion_is_the_worked_solution_and_the_reference_the_answer():
    row = {"question": "1+2=", "answer": "3", "solution": "1+2+0=03>3"}
    prompt = rows_of([row], embedded.embedded_tokenizer()).prompt(0)
    assert trained(embedded.embedded_tokenizer(), prompt.target) == "1+2+0=03>3<eos>"
    assert prompt.reference == "3"


def test_a_chat_template_ends_the_completion_and_the_line_end_after_it_is_not_trained(tokenizer):
    data = rows_of([{"prompt": "1+1", "completion": "2"}], tokenizer, chat_template=TEMPLATE)
    assert data.prompt(0).text == "<u>1+1~\n<a>"
    assert text_of(tokenizer, data.prompt(0).target.tokens) == "2~"


def test_only_the_assistants_turns_are_trained(tokenizer):
    prompt = rows_of([{"messages": TALK}], tokenizer, chat_template=TEMPLATE).prompt(0)
    assert prompt.text == "<s>add~\n<u>1+1~\n<a>"
    assert text_of(tokenizer, prompt.target.tokens) == "so|2~\n<u>2+2~\n<a>so|4~"
    assert trained(tokenizer, prompt.target) == "so|2~so|4~"
    assert prompt.target.rest == ()


def test_a_template_that_changes_earlier_turns_makes_one_sequence_per_turn(tokenizer):
    target = rows_of([{"messages": TALK}], tokenizer, chat_template=FORGETFUL).prompt(0).target
    first, second = target.sequences
    assert (trained(tokenizer, first), trained(tokenizer, second)) == ("so|2~", "so|4~")
    assert first.prompt is None
    assert text_of(tokenizer, second.prompt) == "<s>add~\n<u>1+1~\n<a>2~\n<u>2+2~\n<a>"


def test_messages_as_prompt_and_completion_train_the_completion_only(tokenizer):
    row = {"prompt": TALK[:4], "completion": TALK[4:]}
    prompt = rows_of([row], tokenizer, chat_template=TEMPLATE).prompt(0)
    assert prompt.text.endswith("<a>so|2~\n<u>2+2~\n<a>")
    assert trained(tokenizer, prompt.target) == "so|4~"


def test_the_workflow_gives_each_request_its_rows_completion_at_the_current_version(tokenizer):
    data = rows_of([{"messages": TALK}], tokenizer, chat_template=FORGETFUL)

    class Sampler:
        version = 7

    request = Request(SampleId(3, 0), data.prompt(0).tokens, SamplingParams(8), origin=data.prompt(0))
    (sample,) = from_data([request], Sampler())
    assert sample.id == request.id
    assert all((s.versions == 7).all() for s in sample.sequences)
    assert np.array_equal(sample.tokens, data.prompt(0).target.tokens)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1+1="}, "no completion to train on.*columns.completion"),
        ({"prompt": "1+1=", "completion": "  "}, "row 1: column 'completion' must be a completion"),
        ({"prompt": "1+1=", "completion": 2}, "row 1: column 'completion' must be a completion.*got 2"),
        ({"messages": TALK[:2]}, "no completion to train on: column 'messages' has no assistant turn"),
        ({"messages": TALK[2:]}, "begins with the assistant"),
    ],
)
def test_a_row_without_anything_to_train_on_is_refused(tokenizer, row, words):
    good = {"prompt": "1=", "completion": "1"} if "prompt" in row else {"messages": TALK}
    rows = [row] if "no completion" in words else [good, row]
    with pytest.raises(DataError, match=words):
        rows_of(rows, tokenizer, chat_template=TEMPLATE)


def test_a_row_beyond_the_context_is_refused_or_dropped_by_prompt_and_completion_together(tokenizer):
    rows = [{"prompt": "1", "completion": "2" * 9}, {"prompt": "1", "completion": "2"}]
    data = rows_of(rows, tokenizer, chat_template=False)
    refuse_long_prompts(data, 11, max_new_tokens=512)  # prompt 1, completion 9, EOS
    with pytest.raises(DataError, match=r"row 0: prompt and completion have 11 tokens.*max_length=10"):
        refuse_long_prompts(data, 10, max_new_tokens=1)
    kept = rows_of(rows, tokenizer, chat_template=False, max_length=10)
    assert (len(kept), kept.num_too_long) == (1, 1)


def test_another_completion_is_another_data_set(tokenizer):
    digests = {rows_of([{"prompt": "1", "completion": c}], tokenizer).digest() for c in ("2", "3")}
    assert len(digests) == 2

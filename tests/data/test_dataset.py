"""Loading data of every kind, rendering prompts once, and keeping held-out problems out of training."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from word_tokenizers import tokenizer_of

from gspo.data.columns import order
from gspo.data.dataset import load_dataset, make_dataset
from gspo.data.files import read_file
from gspo.data.mixture import make_mixture
from gspo.data.sources import default_reward, in_held_out
from gspo.errors import DataError
from gspo.rewards import RewardItem, RewardPool, reward_spec
from gspo.system import naming_panics
from gspo.train import refuse_long_prompts

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
needs_gsm8k = pytest.mark.skipif(not GSM8K.is_dir(), reason="skipped: no GSM8K in ../shared/data/gsm8k")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
ROWS = [{"question": f"{i}+{i}=", "answer": str(2 * i), "level": i % 3} for i in range(200)]


@pytest.fixture(scope="module")
def tokenizer():
    characters = [chr(c) for c in range(32, 127)] + ["\n", "[bos]"]
    ids = [("[bos]", len(characters) - 1)]
    begin = processors.TemplateProcessing(single="[bos] $A", special_tokens=ids)
    return tokenizer_of(characters, "?", lambda inner: setattr(inner, "post_processor", begin), bos_token="[bos]")


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    yield tokenizer
    tokenizer.chat_template = None


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_file_format_gives_the_same_problems(tmp_path, tokenizer, suffix):
    data = load_dataset(write(tmp_path / f"sums{suffix}", ROWS), "all", tokenizer=tokenizer)
    assert len(data) == 200
    prompt = data.prompt(7)
    assert prompt.text == "7+7="
    assert prompt.tokens == tuple(tokenizer.encode("7+7="))
    assert prompt.data["answer"] == "14"
    assert int(prompt.data["level"]) == 1
    assert (prompt.source, prompt.row) == (str(tmp_path / f"sums{suffix}"), 7)
    assert data.prompt(7) is prompt


def test_a_folder_gives_its_own_splits_whole(tmp_path, tokenizer):
    write(tmp_path / "train-00000-of-00002.jsonl", ROWS[:50])
    write(tmp_path / "train-00001-of-00002.jsonl", ROWS[50:100])
    write(tmp_path / "test.csv", ROWS[100:130])
    train = load_dataset(str(tmp_path), "train", tokenizer=tokenizer)
    assert [row["question"] for row in train.rows] == [row["question"] for row in ROWS[:100]]
    assert len(load_dataset(str(tmp_path), "test", tokenizer=tokenizer)) == 30
    assert len(load_dataset(str(tmp_path), "valid", tokenizer=tokenizer)) == 30


def test_a_source_without_held_out_data_is_divided_by_problem_not_by_row(tmp_path, tokenizer):
    rows = [*ROWS, *({**row, "level": 9} for row in ROWS), *({**r, "question": r["question"] + " "} for r in ROWS)]
    path = write(tmp_path / "sums.jsonl", rows)
    train = {row["question"].strip() for row in load_dataset(path, "train", tokenizer=tokenizer).rows}
    test = {row["question"].strip() for row in load_dataset(path, "test", tokenizer=tokenizer).rows}
    assert not train & test
    assert train | test == {row["question"] for row in ROWS}
    assert 2 <= len(test) <= 25


def test_the_user_is_told_how_rows_were_divided(tmp_path, tokenizer):
    path = write(tmp_path / "guess.jsonl", [{"prompt": "Guess.", "answer": str(i)} for i in range(60)])
    train, test = (load_dataset(path, split, tokenizer=tokenizer) for split in ("train", "test"))
    assert train.describe().endswith("57 problems of " + path + " (train); 3 of 60 rows are held out")
    assert test.describe().endswith("60 rows have one prompt: 3 rows are held out by position, not by prompt")
    assert {r["answer"] for r in train.rows} | {r["answer"] for r in test.rows} == {str(i) for i in range(60)}
    two = write(tmp_path / "two.csv", [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}])
    assert len(load_dataset(two, "train", tokenizer=tokenizer)) == 2
    assert "too few to hold some out" in load_dataset(two, "test", tokenizer=tokenizer).describe()


def test_a_file_that_is_held_out_by_name_is_not_trained_on_by_accident(tmp_path, tokenizer):
    path = write(tmp_path / "test.jsonl", ROWS)
    assert len(load_dataset(path, "test", tokenizer=tokenizer)) == 200
    with pytest.raises(DataError, match=r"train_dataset.split: all"):
        load_dataset(path, "train", tokenizer=tokenizer)


def test_rows_are_not_rewritten_and_the_final_answer_has_its_own_name(tokenizer):
    rows = [
        {"question": "1", "answer": "a\n#### 1,234", "gold": "9", "reference": "mine"},
        {"question": "2", "answer": "#### -5 ", "gold": "8", "reference": "mine"},
        {"question": "3", "answer": "plain", "gold": "7", "reference": "mine"},
    ]
    data = make_dataset(rows, tokenizer=tokenizer)
    assert [data.prompt(i).data for i in range(3)] == rows
    assert [data.prompt(i).reference for i in range(3)] == ["1234", "-5", "plain"]
    chosen = make_dataset(rows, tokenizer=tokenizer, columns={"answer": "gold"})
    assert chosen.prompt(0).data == rows[0]
    assert chosen.prompt(0).reference == "9"
    other_name = make_dataset([{"question": "1", "target": "x #### 3"}], tokenizer=tokenizer).prompt(0)
    assert other_name.data == {"question": "1", "target": "x #### 3", "answer": "x #### 3"}
    assert make_dataset([{"question": "1"}], tokenizer=tokenizer).prompt(0).reference is None


@needs_gsm8k
def test_real_gsm8k_is_found_by_its_hub_name_and_every_reference_scores_itself(tokenizer, monkeypatch):
    monkeypatch.setenv("GSPO_DATA", str(GSM8K.parent))
    train = load_dataset("openai/gsm8k", "train", tokenizer=tokenizer)
    test = load_dataset("openai/gsm8k", "test", tokenizer=tokenizer, key="valid_dataset")
    assert (len(train), len(test)) == (7473, 1319)
    assert train.prompt(0).reference == "72"
    assert train.rows[0]["answer"].endswith("#### 72")
    # The digest that runs before this column was kept as it is have recorded.
    assert train.digest().startswith("b669d122b97e70f0")
    assert not {row["question"] for row in train.rows} & {row["question"] for row in test.rows}
    with RewardPool(reward_spec("numeric")) as pool:
        prompts = [test.prompt(row) for row in range(len(test))]
        texts = [prompt.data["answer"] for prompt in prompts]
        items = [
            RewardItem("", (text, text + "1"), data=prompt.data, reference=prompt.reference)
            for text, prompt in zip(texts, prompts, strict=True)
        ]
        outcomes = pool.score(items)
    assert all(right.value == 1.0 and wrong.value == 0.0 for right, wrong in outcomes)
    assert load_dataset(str(GSM8K), "test", tokenizer=tokenizer).rows[5] == test.rows[5]


@pytest.mark.run
def test_the_hub_without_a_connection_says_how_to_give_a_folder():
    code = (
        "from gspo.data.dataset import load_dataset\n"
        "from gspo.errors import DataError\n"
        "try: load_dataset('openai/gsm8k', 'train', tokenizer=None)\n"
        "except DataError as e: print(e)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": "/nonexistent/cache"}
    environment.pop("GSPO_DATA", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert "train_dataset.path" in done.stdout, done.stderr
    assert "GSPO_DATA" in done.stdout
    assert "train.jsonl" in done.stdout


def test_chat_templates_are_used_where_the_tokenizer_has_one(tmp_path, chat_tokenizer):
    path = write(tmp_path / "sums.jsonl", ROWS)
    data = load_dataset(path, "all", tokenizer=chat_tokenizer, system_prompt="Add.", chat_template="auto")
    assert data.prompt(1).text == "<s>Add.<u>1+1=<a>"
    assert data.prompt(1).tokens == tuple(chat_tokenizer.encode("<s>Add.<u>1+1=<a>", add_special_tokens=False))
    plain = load_dataset(path, "all", tokenizer=chat_tokenizer, system_prompt="Add.", chat_template="none")
    assert plain.prompt(1).text == "Add.\n\n1+1="
    own = load_dataset(path, "all", tokenizer=chat_tokenizer, chat_template="{{ messages[0]['content'] }}!")
    assert own.prompt(1).text == "1+1=!"


def test_rows_in_memory_make_a_data_set_too(tokenizer):
    data = make_dataset(iter(ROWS), tokenizer=tokenizer)
    assert (len(data), data.prompt(3).text, data.prompt(3).data["answer"]) == (200, "3+3=", "6")
    with pytest.raises(DataError, match="no rows"):
        make_dataset([], tokenizer=tokenizer)


def test_conversational_rows_keep_their_messages(tmp_path, chat_tokenizer):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "2"},
    ]
    path = write(tmp_path / "chat.jsonl", [{"prompt": messages, "reward_model": {"ground_truth": "2"}}])
    data = load_dataset(path, "all", tokenizer=chat_tokenizer, columns={"answer": "reward_model.ground_truth"})
    assert data.prompt(0).text == "<u>hi<a>yes?<u>2<a>"
    assert data.prompt(0).data["messages"] == messages
    assert data.prompt(0).data["answer"] == "2"
    plain = load_dataset(path, "all", tokenizer=chat_tokenizer, chat_template=False)
    with pytest.raises(DataError, match=r"train_dataset.chat_template"):
        plain.prompt(0)


def test_a_template_that_refuses_and_a_missing_one_are_data_errors(tmp_path, tokenizer):
    path = write(tmp_path / "sums.jsonl", ROWS)
    with pytest.raises(DataError, match=r"chat_template is true"):
        load_dataset(path, "all", tokenizer=tokenizer, chat_template=True)
    refusing = load_dataset(path, "all", tokenizer=tokenizer, chat_template="{{ raise_exception('no system') }}")
    with pytest.raises(DataError, match="no system"):
        refusing.prompt(0)


class Counting:
    """A tokenizer that counts the texts and characters it tokenizes."""

    chat_template = None

    def __init__(self, tokenizer):
        self._tokenizer, self.texts, self.characters = tokenizer, 0, 0

    def encode(self, text, **options):
        self.texts, self.characters = self.texts + 1, self.characters + len(text)
        return self._tokenizer.encode(text, **options)

    def apply_chat_template(self, messages, **options):
        return self._tokenizer.apply_chat_template(messages, **options)


def test_a_huge_row_is_dropped_or_refused_without_being_tokenized(tokenizer):
    huge = {"question": "x" * 50_000_000, "answer": "0"}
    counting = Counting(tokenizer)
    data = make_dataset([*ROWS[:5], huge], tokenizer=counting, max_length=64)
    assert (len(data), data.num_too_long) == (5, 1)
    assert counting.characters < 100
    data = make_dataset([*ROWS[:5], huge], tokenizer=counting)
    with pytest.raises(DataError, match=r"row 5: the prompt has 50000000 characters.*max_length=44"):
        refuse_long_prompts(data, 64, 20)
    with pytest.raises(DataError, match=r"max_length is 64, but the shortest of 1 prompts .* has 50000000 characters"):
        make_dataset([huge], tokenizer=counting, max_length=64)
    assert counting.characters < 200


def test_a_template_that_makes_a_huge_prompt_is_refused_without_being_tokenized(tokenizer):
    counting = Counting(tokenizer)
    data = make_dataset(ROWS[:3], tokenizer=counting, chat_template="{{ messages[0]['content'] * 9999999 }}")
    with pytest.raises(DataError, match=r"row 0: the prompt has \d+ characters"):
        refuse_long_prompts(data, 64, 20)
    assert counting.texts == 0


def test_rows_that_fit_by_their_size_are_tokenized_when_they_are_used(tokenizer):
    counting = Counting(tokenizer)
    data = make_dataset(ROWS, tokenizer=counting)
    refuse_long_prompts(data, 4096, 1024)
    mixed = make_mixture([data], [1.0])
    refuse_long_prompts(mixed, 4096, 1024)
    kept = make_dataset(ROWS, tokenizer=counting, max_length=2000)
    assert counting.texts == 0
    # A limit near the lengths is decided by tokens, as ever: "[bos]99+99=" is 7.
    with pytest.raises(DataError, match="row 10: the prompt has 7 tokens"):
        refuse_long_prompts(data, 10, 4)
    assert counting.texts == 11
    assert kept.prompt(3).tokens == data.prompt(3).tokens
    assert len(kept) == len(ROWS)


def test_a_prompt_with_a_lone_surrogate_is_refused_by_its_row(tokenizer):
    data = make_dataset([*ROWS[:2], {"question": "1+\ud800=", "answer": "1"}], tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"row 2: the prompt has a lone surrogate \(U\+D800\) at character 2"):
        refuse_long_prompts(data, 4096, 20)
    with pytest.raises(DataError, match=r"row 2: the prompt has a lone surrogate"):
        data.prompt(2)


def test_prompts_beyond_max_length_are_dropped_and_counted(tmp_path, tokenizer):
    path = write(tmp_path / "sums.jsonl", ROWS)
    data = load_dataset(path, "all", tokenizer=tokenizer, max_length=6)  # [bos] + "99+99" + "=" is 7
    assert len(data) == 10
    assert data.num_too_long == 190
    assert [data.prompt(i).row for i in range(10)] == list(range(10))
    with pytest.raises(DataError, match=r"train_dataset.max_length is 2.*5 tokens"):
        load_dataset(path, "all", tokenizer=tokenizer, max_length=2)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no rows"),
        ('{"question": "a"}\n{oops\n', r"d\.jsonl:2 is not valid JSON"),
        ('{"question": "a"}\n' + '{"a":' * 100_000, r"d\.jsonl:2 is not valid JSON"),
        ('{"question": ["x"]}\n', "row 0: column 'question' must be a string or a list of messages"),
        ("[1, 2]\n", "must be a JSON object"),
        ('{"text": "a"}\n', "columns.prompt"),
        ('{"question": "a", "answer": 1}\n{"question": "", "answer": 1}\n', "row 1"),
        ('{"question": "a", "answer": 1}\n{"question": "b"}\n', "columns.answer"),
        ('{"question": "a", "answer": 1}\n{"question": "b", "answer": NaN}\n', "row 1.*null"),
        ('{"question": "a"}\n{"question": "\\ud800 1+1="}\n', r"d\.jsonl:2 .*surrogate \(\\ud800\)"),
        ('{"question": "a"}\n{"question": "b", "x": ["\\uDFFF"]}\n', r"d\.jsonl:2 .*surrogate"),
        ('{"question": "a"}\n{"question": "b", "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n", r"d\.jsonl:2 .*deeper"),
        ('{"question": "a"}\n{"question": "b", "x": ' + "[" * 200 + "]" * 200 + "}\n", r"d\.jsonl:2 .*deeper"),
        ('{"question": "a"}\n{"question": "b", "question": "c"}\n', r"d\.jsonl:2 .*'question' appears twice"),
        ('{"question": "a"}\n{"question": "b", "x": [{"y": 1, "y": 1}]}\n', r"d\.jsonl:2 .*'y' appears twice"),
        ('{"question": "a"}\n{"question": ' + "1" * 5000 + "}\n", r"d\.jsonl:2 .*digits"),
        ('{"question": "a"}\n{"question": 7}\n', "row 1.*must be a string"),
        ('{"question": "a"}\n{"question": ["a", "b"]}\n', "row 1.*list of messages"),
        ('{"question": "a"}\n{"question": [["role", "user"]]}\n', "row 1.*list of messages"),
        ('{"question": "a", "answer": 1}\n{"question": "b", "answer": 1e999}\n', "row 1.*missing"),
    ],
)
def test_bad_rows_are_named(tmp_path, tokenizer, content, says):
    path = tmp_path / "d.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=says):
        load_dataset(str(path), "all", tokenizer=tokenizer)


def test_odd_but_right_files_are_read(tmp_path, tokenizer):
    content = '{"question": "a \\ud83d\\ude00", "x": %s}\r\n\r\n{"question": "b", "x": NaN}\r\n' % ("[" * 90 + "]" * 90)
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + content.encode())
    data = load_dataset(str(tmp_path / "d.jsonl"), "all", tokenizer=tokenizer)
    assert [row["question"] for row in data.rows] == ["a \U0001f600", "b"]


def test_bad_files_are_named_with_their_line(tmp_path, tokenizer):
    (tmp_path / "deep.json").write_text("[" * 100_000 + "]" * 100_000)
    (tmp_path / "twice.json").write_text('[{"question": "a", "question": "b"}]')
    (tmp_path / "twice.csv").write_text("question,answer,answer\n1,2,3\n")
    (tmp_path / "short.csv").write_text("question,answer\n1,2\n3\n")
    (tmp_path / "latin.csv").write_bytes("question,answer\n1,2\né,2\n".encode("latin-1"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "a"}\n{"question": "\xed\xa0\x80"}\n')
    (tmp_path / "d.jsonl.gz").write_bytes(b"\x1f\x8b")
    for name in ("fifo", "folder", "device", "loop"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "fifo" / "train.jsonl")
    (tmp_path / "folder" / "train.jsonl").mkdir()
    (tmp_path / "device" / "train.jsonl").symlink_to("/dev/zero")
    (tmp_path / "loop" / "train.jsonl").symlink_to("train.jsonl")
    (tmp_path / "sparse.jsonl").touch()
    os.truncate(tmp_path / "sparse.jsonl", 1 << 42)
    for name, says in [
        ("fifo", "is not a regular file"),
        ("folder", "is not a regular file"),
        ("device", "is not a regular file"),
        ("loop", "cannot be read|there is no file"),
        ("sparse.jsonl", "4.0 TiB, more than the memory"),
        ("deep.json", "deeper than 100"),
        ("twice.json", "'question' appears twice"),
        ("twice.csv", "twice.csv:1 has two columns named 'answer'"),
        ("short.csv", "short.csv:3"),
        ("latin.csv", "latin.csv:3 is not UTF-8"),
        ("latin.jsonl", "latin.jsonl:2 is not UTF-8"),
        ("d.jsonl.gz", "compressed"),
    ]:
        with pytest.raises(DataError, match=says):
            load_dataset(str(tmp_path / name), "all", tokenizer=tokenizer)


@pytest.mark.parametrize("rows", [[1, 2], [None], {"question": ["a"]}])
def test_rows_of_the_caller_that_are_no_mappings_are_named(tokenizer, rows):
    with pytest.raises(DataError, match="row 0: a row must be a mapping"):
        make_dataset(rows, tokenizer=tokenizer)


def test_a_parquet_file_of_billions_of_rows_is_refused_before_they_are_made(tmp_path, tokenizer):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1_000_000, pyarrow.int8()), ["1+1="])
    table = pyarrow.table({"question": pyarrow.chunked_array([column] * 51)})
    parquet.write_table(table, tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 1_000_000
    with pytest.raises(DataError, match="51,000,000 rows"):
        load_dataset(str(tmp_path / "bomb.parquet"), "all", tokenizer=tokenizer)


def test_bad_names_are_named(tmp_path, tokenizer):
    path = write(tmp_path / "d.jsonl", ROWS)
    cases = [
        ({"path": str(tmp_path / "none.jsonl")}, "there is no file"),
        ({"path": "./nowhere"}, "there is no data file or folder"),
        ({"path": "embedded:algebra"}, "embedded:arithmetic"),
        ({"path": "embedded:arithmetic:1", "split": "test", "size": 500}, "train_dataset.size is 500.*different test"),
        ({"path": "reasoning_gym:chain_summ"}, "chain_sum"),
        ({"path": path, "split": "trian"}, "train_dataset.split"),
        ({"path": path, "columns": {"prompt": "q"}}, "train_dataset.columns.prompt is 'q'.*question"),
        ({"path": path, "columns": {"answer": "a"}}, "train_dataset.columns.answer is 'a'"),
    ]
    for arguments, says in cases:
        with pytest.raises(DataError, match=says):
            load_dataset(**arguments, tokenizer=tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no \.jsonl"):
        load_dataset(str(tmp_path / "empty"), tokenizer=tokenizer)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="Parquet"):
        load_dataset(str(tmp_path / "broken.parquet"), tokenizer=tokenizer)
    (tmp_path / "ragged.csv").write_text("question,answer\n1,2,3\n")
    with pytest.raises(DataError, match="more or fewer fields"):
        load_dataset(str(tmp_path / "ragged.csv"), tokenizer=tokenizer)


def test_embedded_arithmetic_loads_with_its_reward_and_the_same_held_out_set_for_every_seed(tokenizer):
    train = load_dataset("embedded:arithmetic", "train", tokenizer=tokenizer, size=300)
    test = load_dataset("embedded:arithmetic", "test", tokenizer=tokenizer, seed=1)
    assert len(train) == 300
    assert len({row["question"] for row in test.rows}) == len(test) >= 500
    assert test.rows == load_dataset("embedded:arithmetic", "test", tokenizer=tokenizer, seed=2).rows
    assert not {row["question"] for row in train.rows} & {row["question"] for row in test.rows}
    assert {
        len(row["question"]) for row in load_dataset("embedded:arithmetic:2", "train", tokenizer=tokenizer).rows
    } == {6}
    with RewardPool(reward_spec(default_reward("embedded:arithmetic"))) as pool:
        outcomes = pool.score([RewardItem(row["question"], (row["solution"],), data=row) for row in train.rows])
    assert {o.value for (o,) in outcomes} == {1.0}


@pytest.mark.run
def test_reasoning_gym_tasks_load_by_name_and_score_their_own_answers(tokenizer):
    pytest.importorskip("reasoning_gym")
    train = load_dataset("reasoning_gym:chain_sum", "train", tokenizer=tokenizer, size=60)
    test = load_dataset("reasoning_gym:chain_sum", "test", tokenizer=tokenizer, size=40)
    assert (len(train), len(test)) == (60, 40)
    assert not {row["question"] for row in train.rows} & {row["question"] for row in test.rows}
    again = load_dataset("reasoning_gym:chain_sum", "train", tokenizer=tokenizer, size=60)
    assert again.rows == train.rows
    assert again.digest() == train.digest() != test.digest()
    with RewardPool(reward_spec(default_reward("reasoning_gym:chain_sum")), workers=1, log_path="/dev/null") as pool:
        items = [RewardItem("", (row["answer"], "none"), data=train.prompt(i).data) for i, row in enumerate(train.rows)]
        outcomes = pool.score(items)
    assert all(right.value == 1.0 and wrong.value < 0.5 for right, wrong in outcomes)


def test_order_visits_every_row_once_an_epoch_and_depends_on_nothing_but_its_key():
    epochs = [[order(1, 50, 50 * e + i) for i in range(50)] for e in range(6)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert order(1, 50, 17) == epochs[0][17]  # epoch 0 has left the cache by now
    assert [order(2, 50, i) for i in range(50)] != epochs[0]
    with pytest.raises(DataError, match="has no rows"):
        order(1, 0, 0)


@pytest.mark.run
def test_order_is_the_same_in_another_process():
    code = "from gspo.data.columns import order; print([order(3, 1000, i) for i in range(995, 1005)])"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(done.stdout) == [order(3, 1000, i) for i in range(995, 1005)]


def test_the_held_out_share_is_what_was_asked_and_spaces_do_not_matter():
    assert 380 < sum(in_held_out(f"problem {i}", 0.2) for i in range(2000)) < 420
    assert all(in_held_out(f"a  b {i}\n", 0.2) == in_held_out(f"a b {i}", 0.2) for i in range(50))


# Column mapping, templates and what the user is told


def test_columns_are_taken_from_nested_places_and_given_new_names(tmp_path, chat_tokenizer):
    """The form of verl's files."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{i}?"}],
            "reward_model": {"ground_truth": str(i)},
            "extra": {"level": i},
        }
        for i in range(3)
    ]
    data = load_dataset(
        str(write(tmp_path / "train.jsonl", rows) or tmp_path / "train.jsonl"), "all", tokenizer=chat_tokenizer,
        columns={"answer": "reward_model.ground_truth", "level": "extra.level"},
    )  # fmt: skip
    assert [data.prompt(i).data["answer"] for i in range(3)] == ["0", "1", "2"]
    assert [data.prompt(i).data["level"] for i in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"columns": {"prompt": "qestion"}},
            "train_dataset.columns.prompt is 'qestion', but the columns of rows are question, answer",
        ),
        (
            {"columns": {"answer": "a.b"}},
            "train_dataset.columns.answer is 'a.b', but the columns of rows are question, answer",
        ),
        ({"columns": {"x": "y"}}, "train_dataset.columns.x is 'y', but the columns of rows are question, answer"),
    ],
)
def test_a_column_that_does_not_exist_is_named_with_those_that_do(tokenizer, settings, says):
    with pytest.raises(DataError, match=re.escape(says)):
        make_dataset([{"question": "2+2=", "answer": "4"}], tokenizer=tokenizer, **settings)


def test_a_chat_template_can_be_a_file_a_text_or_refused(tmp_path, tokenizer, chat_tokenizer):
    row = [{"question": "2+2=", "answer": "4"}]
    (tmp_path / "own.jinja").write_text("[{{ messages[0].content }}{{ mood }}]")
    for template in (str(tmp_path / "own.jinja"), "[{{ messages[0].content }}{{ mood }}]"):
        data = make_dataset(row, tokenizer=tokenizer, chat_template=template, template_kwargs={"mood": "!"})
        assert data.prompt(0).text == "[2+2=!]"
    assert make_dataset(row, tokenizer=chat_tokenizer, chat_template=False).prompt(0).text == "2+2="
    assert make_dataset(row, tokenizer=chat_tokenizer, chat_template=True).prompt(0).text != "2+2="
    with pytest.raises(DataError, match=r"chat_template must be auto, true, false, none.*got 'chatml'"):
        make_dataset(row, tokenizer=tokenizer, chat_template="chatml")
    with pytest.raises(DataError, match=r"chat_template: .*gone\.jinja cannot be read"):
        make_dataset(row, tokenizer=tokenizer, chat_template=str(tmp_path / "gone.jinja"))


def test_a_tokenizer_without_a_template_is_an_error_where_one_is_needed_and_plain_text_elsewhere(tokenizer):
    row = [{"question": "2+2=", "answer": "4"}]
    assert make_dataset(row, tokenizer=tokenizer).prompt(0).text == "2+2="
    with pytest.raises(
        DataError, match=r"train_dataset\.chat_template is true, but the tokenizer has none; give a \.jinja"
    ):
        make_dataset(row, tokenizer=tokenizer, chat_template=True)
    spoken = make_dataset([{"messages": [{"role": "user", "content": "2+2="}]}], tokenizer=tokenizer)
    with pytest.raises(
        DataError, match=r"list of messages, but no chat template is used; set train_dataset\.chat_template"
    ):
        spoken.prompt(0)


def test_the_user_is_told_how_many_problems_there_are_and_how_many_were_dropped(tokenizer):
    rows = [{"question": "1" * n, "answer": "1"} for n in range(1, 11)]
    data = make_dataset(rows, tokenizer=tokenizer, source="ones", split="train", max_length=8)
    assert (
        data.describe()
        == "train_dataset: 7 problems of ones (train), 3 longer prompts dropped (train_dataset.max_length)"
    )


def test_options_are_for_procedural_tasks(tokenizer):
    with pytest.raises(DataError, match=r"train_dataset\.options \(min_terms\) are settings of reasoning_gym tasks"):
        load_dataset("embedded:arithmetic", tokenizer=tokenizer, options={"min_terms": 2})


@pytest.mark.parametrize("content", [["a", "b"], [1], [[{"role": "user", "content": "x"}]], [], {"role": "user"}])
def test_messages_that_are_no_mappings_are_refused_by_row(tokenizer, content):
    rows = [{"messages": [{"role": "user", "content": "1"}], "answer": "1"}, {"messages": content, "answer": "1"}]
    with pytest.raises(DataError, match=r"row 1: column 'messages' must be a string or a list of messages"):
        make_dataset(rows, tokenizer=tokenizer, chat_template=TEMPLATE)


def test_a_fifo_in_place_of_data_or_a_template_is_refused_by_name(tmp_path, tokenizer):
    """Opening it would wait for its other end."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "train.jsonl")
    with pytest.raises(DataError, match=r"train_dataset\.path: .*train\.jsonl is not a regular file"):
        load_dataset(str(tmp_path / "folder"), tokenizer=tokenizer)
    os.mkfifo(tmp_path / "chat.jinja")
    with pytest.raises(DataError, match=r"train_dataset\.chat_template: .*chat\.jinja cannot be read.*regular file"):
        make_dataset(ROWS[:1], tokenizer=tokenizer, chat_template=str(tmp_path / "chat.jinja"))


def test_a_long_field_of_a_csv_file_is_read_and_a_path_that_is_too_long_is_an_error(tmp_path, tokenizer):
    file = tmp_path / "long.csv"
    file.write_text(f"question,answer\n{'1' * 200_000},2\n1+1=,2\n")
    assert len(load_dataset(str(file), "all", tokenizer=tokenizer)) == 2
    with pytest.raises(DataError, match=r"train_dataset\.path: a+ cannot be read: File name too long"):
        load_dataset("a" * 5000 + ".jsonl", tokenizer=tokenizer)


def test_a_template_that_needs_too_much_memory_is_refused_with_a_reason(tokenizer):
    data = make_dataset(ROWS[:1], tokenizer=tokenizer, chat_template="{{ 'x' * 10**13 }}")
    with pytest.raises(DataError, match=r"row 0: the chat template cannot render the messages \(MemoryError\)"):
        data.prompt(0)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "(.*a){20}$"])
def test_a_panic_of_the_tokenizers_library_names_the_row(tmp_path, pattern, capfd):
    inner = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "a" * 60 + "!", "answer": "1"}]
    data = make_dataset(rows, tokenizer=tokenizer, source="mine")
    assert data.prompt(0).text == "a"
    with pytest.raises(DataError, match="mine, row 1: the tokenizer: a library failed"):
        data.prompt(1)


def test_an_interruption_is_not_taken_for_a_panic():
    with pytest.raises(KeyboardInterrupt), naming_panics("here", DataError):
        raise KeyboardInterrupt


def test_the_last_of_many_columns_may_be_the_one_that_appears_twice(tmp_path):
    (tmp_path / "wide.csv").write_text(",".join(map(str, range(30_000))) + ",29999\n")
    began = time.process_time()
    with pytest.raises(DataError, match="two columns named '29999'"):
        read_file(tmp_path / "wide.csv")
    assert time.process_time() - began < 2  # comparing each with each takes more than 5 s

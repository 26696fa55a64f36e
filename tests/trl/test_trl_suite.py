"""TRL's own tests of its GRPOTrainer, run against ours: what passes with TRL's class passes with ours.

TRL's source distributions contain no tests. GSPO_TRL_TESTS names the folder `tests` of a clone of its repository;
models and data of the hub are replaced by tiny ones that are built here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("GSPO_TRL_TESTS", "")
# Tests that pass with TRL's class and not with ours, and why.
EXCEPTIONS = {
    "TestGRPOTrainer::test_warning_raised_sequence_level_with_token_summed_loss[dapo]": (
        "with sequence ratios an unset loss_type is grpo here, so TRL has nothing to warn of; one line tells it"
    ),
}
MODELS = ("Qwen2ForCausalLM-2.5", "Qwen3ForCausalLM", "LlamaForCausalLM-3.2", "MistralForCausalLM-0.2")
CLASSIFIERS = ("Qwen2ForSequenceClassification-2.5", "Qwen3ForSequenceClassification")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Their helpers may be of another version than the installed TRL.
OTHER_VERSION = """
import importlib
importlib.import_module("trl.import_utils").__getattr__ = lambda name: lambda *_: False
"""
# In place of the hub's data set of the same name.
DATA = """
def load_dataset(name, config=None, split=None, streaming=False, **_):
    from datasets import Dataset, DatasetDict
    assert name == "trl-internal-testing/zen" and "image" not in (config or ""), name
    texts = ["Beautiful is better than", "Explicit is", "Simple is better", "Flat is better than", "Now"] * 4
    chat = config.startswith("conversational")
    rows = [{"prompt": [{"role": "user", "content": text}] if chat else text} for text in texts]
    both = DatasetDict(train=Dataset.from_list(rows[:17]), test=Dataset.from_list(rows[17:]))
    both = both if split is None else both[split]
    return both.to_iterable_dataset() if streaming else both
"""


def write_models(to: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    letters = [*pre_tokenizers.ByteLevel.alphabet(), "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        additional_special_tokens=["<|im_start|>"], chat_template=TEMPLATE,
    )  # fmt: skip
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name in (*MODELS, *CLASSIFIERS):
        torch.manual_seed(0)
        kind = re.match(r"[A-Z][a-z]+\d?", name).group().lower()
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        config = AutoConfig.for_model(
            kind, vocab_size=len(tokenizer), num_key_value_heads=2, **sizes, **ends, num_labels=1
        )
        auto = AutoModelForSequenceClassification if name in CLASSIFIERS else AutoModelForCausalLM
        auto.from_config(config).save_pretrained(to / f"tiny-{name}")
        tokenizer.save_pretrained(to / f"tiny-{name}")


def outcomes(folder: Path, ours: bool, select: str) -> dict[str, str]:
    """The result of each test: passed, failed, error or skipped."""
    package = folder / ("ours" if ours else "theirs")
    package.mkdir()
    for name in ("__init__.py", "testing_utils.py", "testing_constants.py", "conftest.py", "test_grpo_trainer.py"):
        if (source := Path(FOLDER) / name).is_file():
            text = source.read_text(encoding="utf-8")
            text = re.sub(r'"trl-internal-testing/(tiny-[\w.-]+)"', rf'"{folder}/models/\1"', text)
            if name == "test_grpo_trainer.py":
                assert text.count("from trl import GRPOConfig, GRPOTrainer\n") == 1
                class_line = (
                    "from gspo.trl import GSPOTrainer as GRPOTrainer" if ours else "from trl import GRPOTrainer"
                )
                text = text.replace(
                    "from trl import GRPOConfig, GRPOTrainer\n", f"from trl import GRPOConfig\n{class_line}\n{DATA}\n"
                )
            if name == "__init__.py":
                text += OTHER_VERSION
            (package / name).write_text(text, encoding="utf-8")
    env = os.environ | {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "--tb=line", "-c", os.devnull,
               "--rootdir", str(folder), "-k", select, str(package / "test_grpo_trainer.py")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, timeout=3000, check=False)
    (folder / f"{package.name}.log").write_text(done.stdout + done.stderr)
    found = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) \S*::(\w+(?:::\w+)?(?:\[[^\]]*\])?)", done.stdout, re.M)
    return {name: result.lower() for result, name in found}


@pytest.mark.full
@pytest.mark.timeout(6600)
@pytest.mark.skipif(not FOLDER, reason="set GSPO_TRL_TESTS to the folder tests of a clone of TRL (not in its sdist)")
def test_what_passes_with_trls_trainer_passes_with_ours(tmp_path):
    write_models(tmp_path / "models")
    select = os.environ.get("GSPO_TRL_SELECT", "not vlm and not vision and not vllm")
    theirs, ours = (outcomes(tmp_path, mine, select) for mine in (False, True))
    passed = {name for name, result in theirs.items() if result == "passed"}
    assert len(passed) > 5, (tmp_path / "theirs.log").read_text()[-3000:]
    worse = {name: ours.get(name, "missing") for name in passed if ours.get(name) != "passed"}
    print(f"{len(theirs)} tests, {len(passed)} pass with TRL's class, {len(worse)} of them not with ours")
    assert worse.keys() == EXCEPTIONS.keys() & passed, worse

"""`gspo models check`: one architecture of each layout and sampler, a folder, and all of them in the long suite."""

import re
from pathlib import Path

import pytest
import torch
import transformers as tf

from gspo.cli.main import main
from gspo.doctor import check_model, is_exact
from lab.zoo import families

PAGE = Path(__file__).parents[2] / "docs" / "model_families.md"


@pytest.mark.run
@pytest.mark.parametrize(
    ("name", "layout", "engine"),
    [
        ("qwen3", "shared", "continuous batching"),
        pytest.param("gptj", "packed", None, marks=pytest.mark.full),
        ("qwen3_next", "padded", "transformers' cache"),
        ("qwen3_vl", "shared", "continuous batching"),  # with images
        pytest.param("qwen3_5", "padded", "transformers' cache", marks=pytest.mark.full),
    ],
)
def test_an_architecture_gets_its_layout_and_sampler_and_both_are_exact(name, layout, engine):
    row = families.check_type(name)
    assert (row.layout, row.refused, row.not_built) == (layout, "", "")
    assert engine is None or row.engine == engine
    assert is_exact(row)
    assert torch.float32 is not torch.float64  # what was replaced is back


def test_what_cannot_be_built_says_why():
    assert families.check_type("bart").not_built == "bart is an encoder-decoder model"
    assert "there is no folder" in check_model("./no/such/folder").refused


@pytest.mark.run
def test_the_verb_prints_a_line_for_each_model_and_fails_for_a_refused_one(capsys, tmp_path):
    page, folder = tmp_path / "page.md", str(tmp_path / "folder")
    tf.T5Config().save_pretrained(folder)
    assert main(["models", "check", "llama", folder, "--write", str(page)]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^llama\s+shared prefixes\s+continuous batching\s+\S+e-\d+\s+\S+e-\d+", printed, re.MULTILINE)
    assert f"1 of 2 train and sample; refused or not exact: {folder}\n" in printed
    assert re.search(r"^\| llama \| shared prefixes \|", page.read_text(), re.MULTILINE)
    assert main(["models", "check"]) == 2


def test_a_name_that_is_no_model_is_an_error_with_the_nearest_type_before_any_check(capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["models", "check", "llama", "qwen3_nxt"]) == 2
    said = capsys.readouterr()
    assert "'qwen3_nxt' is neither a model type of transformers nor a model; did you mean qwen3_next?" in said.err
    assert not said.out
    assert main(["models", "check", "./no/such/folder"]) == 2
    assert "there is no folder './no/such/folder'" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_no_architecture_that_can_be_built_is_refused_and_the_page_is_true():
    rows = [families.check_type(name) for name in families.TYPES]
    assert [row.name for row in rows if not row.not_built and not is_exact(row)] == []
    listed = re.findall(r"^\| (\S+) \| ([^|]+?) \| ([^|]+?) \| \d", PAGE.read_text(), re.MULTILINE)
    assert listed == [(row.name, *row.cells()[1:3]) for row in rows if not row.not_built]

import json
import os
import shutil

import numpy as np
import pytest
import torch
from training_runs import build_fast

from gspo.data import arithmetic
from gspo.errors import DataError
from gspo.models import cache, embedded, lessons

pytestmark = pytest.mark.run

NAME = "embedded:tiny"


@pytest.fixture
def brief(tmp_path, monkeypatch):
    build_fast(monkeypatch, tmp_path, NAME)
    return tmp_path


def test_a_model_is_built_once_and_then_taken_from_the_cache(brief, monkeypatch):
    model, _ = embedded.build(NAME)
    calls = []
    monkeypatch.setattr(embedded, "warm_start", lambda name: calls.append(name))
    again, tokenizer = embedded.build(NAME)
    assert not calls
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert [p.name for p in brief.iterdir() if not p.name.startswith(".")] == [embedded.embedded_folder(NAME).name]
    assert len(tokenizer) == len(embedded.VOCABULARY) <= model.config.vocab_size


def test_building_twice_gives_the_same_weights(brief):
    first, second = (embedded.warm_start(NAME).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "sums"])
def test_a_damaged_cache_is_built_anew(brief, damage):
    whole = {n: p.clone() for n, p in embedded.build(NAME)[0].named_parameters()}
    file = embedded.embedded_folder(NAME) / ("SHA256.json" if damage == "sums" else "model.safetensors")
    content = bytearray(file.read_bytes())
    if damage == "delete":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(content[:-5])
    elif damage == "sums":
        file.write_text("[")
    else:
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    again = dict(embedded.build(NAME)[0].named_parameters())
    assert all(torch.equal(again[n], w) for n, w in whole.items())
    assert cache.is_whole(embedded.embedded_folder(NAME))


def test_a_build_that_is_killed_leaves_nothing_that_looks_whole(brief, monkeypatch):
    def killed(name, tell):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "warm_start", killed)
        with pytest.raises(KeyboardInterrupt):
            embedded.build(NAME)
    assert not embedded.embedded_folder(NAME).exists()
    assert not [p for p in brief.iterdir() if p.is_dir()]
    embedded.build(NAME)


def test_another_recipe_is_another_folder(monkeypatch):
    before, path = embedded.recipe_digest(NAME), embedded.embedded_folder(NAME)
    recipe = {**embedded.RECIPES[NAME], "digits": (2, 5)}
    monkeypatch.setitem(embedded.RECIPES, NAME, recipe)
    assert embedded.recipe_digest(NAME) != before
    assert embedded.embedded_folder(NAME) != path


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match=r"actor\.path: there is no model 'embedded:huge'.*embedded:tiny"):
        embedded.build("embedded:huge")


def test_the_tokenizer_has_one_token_per_character_and_round_trips():
    tokenizer = embedded.embedded_tokenizer()
    problem = arithmetic.worked((37, 48))
    ids = tokenizer.encode(problem.question + problem.solution)
    assert len(ids) == len(problem.question + problem.solution)
    assert tokenizer.decode(ids) == problem.question + problem.solution
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == tokenizer.decode(ids)
    assert tokenizer.eos_token_id == embedded.shape(NAME)["eos_token_id"]
    assert tokenizer.pad_token_id == embedded.shape(NAME)["pad_token_id"]


def test_the_model_is_small_and_of_the_declared_shape(brief):
    model, _ = embedded.build(NAME)
    assert sum(p.numel() for p in model.parameters()) <= 3_000_000
    for key, value in embedded.shape(NAME).items():
        assert getattr(model.config, key) == value, key


def test_the_teacher_forgets_most_carries_and_so_the_model_has_something_to_learn():
    warm = embedded.RECIPES[NAME]["warm"]
    stream = arithmetic.problems("warm", seed=warm["seed"])
    drawn = [lessons.careless(next(stream), step, 0, warm) for step in range(300)]
    wrong = np.mean([not p.solution.endswith(">" + p.answer) for p in drawn])
    assert 0.3 < wrong < 0.9


def test_a_build_that_was_slower_leaves_the_faster_ones_model_in_place(brief, monkeypatch):
    """What another process has published meanwhile is the same recipe: it is kept, and whoever reads it reads on."""
    finished = brief / "elsewhere"
    embedded.build(NAME)
    shutil.copytree(embedded.embedded_folder(NAME), finished)
    shutil.rmtree(embedded.embedded_folder(NAME))
    slow = embedded.warm_start

    def overtaken(name, tell):
        model = slow(name)
        shutil.copytree(finished, embedded.embedded_folder(NAME))
        overtaken.inode = os.stat(embedded.embedded_folder(NAME)).st_ino
        return model

    monkeypatch.setattr(embedded, "warm_start", overtaken)
    embedded.build(NAME)
    assert os.stat(embedded.embedded_folder(NAME)).st_ino == overtaken.inode
    assert json.loads((embedded.embedded_folder(NAME) / "SHA256.json").read_text())


def test_the_pupil_of_tiny_tools_is_taught_to_ask_seldom_and_to_read_what_it_is_told():
    warm = embedded.RECIPES["embedded:tiny-tools"]["warm"]
    problem = arithmetic.worked((184, 768))
    taught = [lessons.asking(problem, step, row, warm) for step in range(20) for row in range(50)]
    shown = [p.solution == "[184+768]952>952" for p in taught]
    asks = [s and not lessons.only_reads(i // 50, i % 50, warm) for i, s in enumerate(shown)]
    assert {p.solution for p in taught} == {"[184+768]952>952", ">952"}
    assert np.mean(shown) == pytest.approx(warm["asks"] + warm["reads"], abs=0.05)
    assert np.mean(asks) == pytest.approx(warm["asks"], abs=0.05)


def test_tiny_tools_speaks_of_calls_and_the_others_do_not():
    asked = "184+768=[184+768]952>952"
    tokenizer = embedded.embedded_tokenizer("embedded:tiny-tools")
    assert tokenizer.decode(tokenizer.encode(asked)) == asked
    assert 0 in embedded.embedded_tokenizer().encode(asked)  # unknown
    assert len(tokenizer) <= embedded.shape("embedded:tiny-tools")["vocab_size"]


@pytest.mark.full
def test_the_start_for_control_tasks_answers_in_digits_that_depend_on_what_it_reads():
    """A start that ignores its input learns one action for all observations."""
    name = "embedded:tiny-control"
    words = embedded.vocabulary(name)
    digits = [words.index(str(digit)) for digit in range(5)]
    letters = words.index("a") + np.random.default_rng(0).integers(0, 11, size=(64, 3))
    model = embedded.warm_start(name)
    with torch.no_grad():
        logp = model(input_ids=torch.from_numpy(letters)).logits[:, -1].log_softmax(-1)[:, digits]
    assert logp.exp().sum(-1).mean() > 0.95
    assert logp.std(0).mean() > 0.08  # over observations
    assert logp.exp().mean(0).min() > 0.1  # no digit is preferred by much

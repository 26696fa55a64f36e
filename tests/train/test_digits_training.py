"""The embedded vision task trains by its names alone."""

import json

import numpy as np
import pytest
from training_runs import build_fast, metrics, train

from gspo.data import digits
from gspo.models import embedded, lessons, load_processor

NAME = "embedded:tiny-vision"


def test_the_prompt_has_seven_tokens_and_its_processor_needs_no_built_model(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path))
    tokenizer = embedded.embedded_tokenizer(NAME)
    processor = load_processor(NAME, tokenizer)
    text = processor.render([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "="}]}])
    assert text.endswith("=")
    assert not embedded.unknown_characters(NAME, text)
    assert len(tokenizer.encode(text.replace(embedded.IMAGE, 4 * embedded.IMAGE))) == 7
    assert processor.pixels([np.zeros((16, 16), np.uint8)])["pixel_values"].shape == (16, 32)
    assert not list(tmp_path.iterdir())


def test_the_teacher_of_tiny_vision_misreads_only_digits_that_look_alike():
    warm = embedded.RECIPES[NAME]["warm"]
    stream = digits.problem_stream("warm", seed=1)
    wrong = 0
    for step in range(300):
        problem = next(stream).problem
        taught = lessons.misread_problem(problem, step, 0, warm)
        assert taught.question == digits.QUESTION
        # "7+8+0=15,3+4+1=08>85": the digits of each column are at places 0 and 2.
        read = [column[place] for column in taught.solution.split(",") for place in (0, 2)]
        right = [column[place] for column in problem.solution.split(",") for place in (0, 2)]
        assert all(a == b or digits.ALIKE[b] == a for a, b in zip(read, right, strict=True))
        wrong += not taught.solution.endswith(f">{problem.answer}")
    assert 100 < wrong < 270


@pytest.mark.run
def test_the_embedded_vision_task_trains(tmp_path, monkeypatch):
    build_fast(monkeypatch, tmp_path / "cache", NAME, tower_steps=2, batch=4)
    settings = [f"actor.path={NAME}", "train_dataset.path=embedded:digits", "train_dataset.size=8"]
    settings += ["train_dataset.batch_size=2", "gconfig.max_new_tokens=6", "evaluator.size=2", "total_train_steps=1"]
    _, run = train(tmp_path / "runs", *settings)
    assert metrics(run)[-1]["step"] == 1
    samples = [json.loads(line) for line in (run / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert all(digits.glyphs_of(sample["images"]["from"][0]["name"]) for sample in samples)
    assert (embedded.embedded_folder(NAME) / "preprocessor_config.json").is_file()

"""Processors of vision-language models: loaded from a folder on Pillow, and what they make of text and images."""

import json

import pytest
import vision_zoo
from PIL import Image

from gspo.errors import DataError
from gspo.models.vision.processor import load_processor
from gspo.types import ImageFile, Prompt, Request, SampleId, SamplingParams


@pytest.mark.parametrize("family", vision_zoo.FAMILIES)
def test_a_prompt_has_one_token_per_feature_and_prepares_the_same_inputs_again(family, tmp_path):
    processor = vision_zoo.processor(family, tmp_path)
    text = vision_zoo.text(family, "what ", 1, "and ", 1, "?")
    tokens, images = processor.prompt(text, [vision_zoo.image(16, 8, 1), vision_zoo.image(24, 24, 2)])
    config = vision_zoo.model(family).config
    token = getattr(config, "image_token_id", None) or config.image_token_index
    assert tokens.count(token) > 2
    assert images.sizes == ((16, 8), (24, 24))
    first = images.prepare()
    processor._kept.clear()
    again = images.prepare()
    assert first is not again
    assert first.keys() == again.keys()
    assert "pixel_values" in first
    assert all((first[name] == again[name]).all() for name in first)


def test_prepared_inputs_are_kept_up_to_a_limit(tmp_path, monkeypatch):
    processor = vision_zoo.processor("llava", tmp_path)
    text = vision_zoo.text("llava", 1)
    shown = [processor.prompt(text, [vision_zoo.image(8, 8, seed)])[1] for seed in range(3)]
    assert shown[0].prepare() is shown[0].prepare()
    monkeypatch.setattr("gspo.models.vision.processor._KEPT_BYTES", 1)
    processor.prompt(text, [vision_zoo.image(8, 8, 9)])
    assert len(processor._kept) == 1


def test_the_key_of_a_request_has_the_image(tmp_path):
    processor = vision_zoo.processor("llava", tmp_path)
    (tokens, one), (same, other) = (processor.prompt("<image>?", [vision_zoo.image(8, 8, seed)]) for seed in (1, 2))
    assert tokens == same
    assert one != other
    prompts = [Prompt(tokens, "", images=images) for images in (one, other, one, None)]
    requests = [Request(SampleId(0, 0), tokens, SamplingParams(4), origin=prompt) for prompt in prompts]
    assert len({request.key for request in requests}) == 3


@pytest.mark.parametrize(("text", "num"), [("<image>?", 0), ("?", 1), ("<image><image>", 1)])
def test_placeholders_and_images_must_be_equally_many(text, num, tmp_path):
    processor = vision_zoo.processor("llava", tmp_path)
    with pytest.raises(DataError, match=f"{text.count('<image>')} image placeholders .* and {num} images"):
        processor.prompt(text, [vision_zoo.image(8, 8, 1)] * num)


def test_text_alone_has_no_images(tmp_path):
    processor = vision_zoo.processor("qwen3_vl", tmp_path)
    assert processor.prompt("2+2=") == (tuple(processor.tokenizer.encode("2+2=")), None)


def test_an_image_that_changes_during_a_run_is_an_error(tmp_path):
    processor = vision_zoo.processor("llava", tmp_path / "model")
    file = tmp_path / "cat.png"
    Image.new("RGB", (8, 8), "red").save(file)
    images = processor.prompt("<image>", [ImageFile("cat.png", lambda: Image.open(file))])[1]
    processor._kept.clear()
    Image.new("RGB", (8, 8), "blue").save(file)
    with pytest.raises(DataError, match=r"cat\.png: the image is not the one"):
        images.prepare()
    file.write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"cat\.png: the image cannot be read"):
        images.prepare()


def test_a_saved_processor_can_be_loaded_again(tmp_path):
    processor = vision_zoo.processor("smolvlm", tmp_path / "model")
    (tmp_path / "copy").mkdir()
    processor.save(tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    again = load_processor(str(tmp_path / "copy"), vision_zoo.tokenizer())
    shown = [vision_zoo.image(16, 8, 1)]
    assert again.prompt("<image>?", shown)[0] == processor.prompt("<image>?", shown)[0]


def test_a_folder_without_image_settings_has_no_processor(tmp_path):
    vision_zoo.write_folder("llava", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").unlink()
    assert load_processor(str(tmp_path), vision_zoo.tokenizer()) is None


@pytest.mark.parametrize("entry", [{"auto_map": {"AutoImageProcessor": "x.Y"}}, {"image_processor_type": "../x"}])
def test_settings_of_images_that_would_run_code_are_refused(entry, tmp_path):
    vision_zoo.write_folder("llava", tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(entry))
    with pytest.raises(DataError, match=next(iter(entry))):
        load_processor(str(tmp_path), vision_zoo.tokenizer())

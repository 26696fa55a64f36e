"""Tiny random vision-language models with the processors of their families: those of `gspo models check`."""

import json

import torch

from gspo.models import load_processor
from lab.zoo.images import FAMILIES, HYBRID, image, model, processor, text, tokenizer, write_folder

__all__ = ["FAMILIES", "HYBRID", "image", "load_processor", "model", "processor", "text", "tokenizer", "write_folder"]


def model_folder(folder, name="qwen3_vl"):
    """A model and its processor on disk."""
    write_folder(name, folder)
    model(name, torch.float32).save_pretrained(folder)
    return folder


def shown_rows(folder, count):
    """A file of problems, each with an image beside it."""
    file = folder / "rows.jsonl"
    for number in range(count):
        image(16, 16, number).open().save(folder / f"{number}.png")
    rows = [{"prompt": "what?", "image": f"{number}.png", "answer": "7"} for number in range(count)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file

"""Tiny random vision-language models with the processors of their families: those of `gspo models check`."""

from gspo.models import load_processor
from lab.zoo.images import FAMILIES, HYBRID, image, model, processor, text, tokenizer, write_folder

__all__ = ["FAMILIES", "HYBRID", "image", "load_processor", "model", "processor", "text", "tokenizer", "write_folder"]

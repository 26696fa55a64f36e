"""The embedded models: built here, warm-started by a few supervised steps, cached and checksummed. No download.

`embedded:tiny` is a Qwen3 of under a million parameters with a character tokenizer for `embedded:arithmetic`. Its
teacher is careless on purpose: it forgets most carries, so the model knows how to work and has something to unlearn.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo import rng
from gspo.errors import DataError
from gspo.tasks import arithmetic

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *arithmetic.ALPHABET)

# What defines each model; a change of any value is another model, in another cache folder.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "embedded:tiny": {
        "config": {
            "vocab_size": 32,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": None,
        },
        "digits": arithmetic.DIGITS,
        "warm": {"steps": 300, "batch": 48, "lr": 3e-3, "warmup": 20, "decay": 80, "seed": 1, "forgets": 0.7},
    }
}


def shape(name: str) -> Mapping[str, Any]:
    """The fields of a model's config.json, without building it. Torch-free."""
    return {"model_type": "qwen3", **_recipe(name)["config"]}


def digest(name: str) -> str:
    """A name for the recipe: the cache folder, and part of a run's identity."""
    text = json.dumps([_recipe(name), VOCABULARY], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def folder(name: str) -> Path:
    """Where a built model lies: $GSPO_CACHE, or ~/.cache/gspo."""
    root = Path(os.environ.get("GSPO_CACHE") or Path.home() / ".cache" / "gspo")
    return root / f"{name.replace(':', '-')}-{digest(name)}"


def build(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, from the cache if it is whole, else built anew (some 25 s on 2 cores)."""
    from transformers import Qwen3ForCausalLM

    path = folder(name)
    if not _is_whole(path):
        _make(name, path)
    with _quiet():
        model = Qwen3ForCausalLM.from_pretrained(path, use_safetensors=True)
    return model, tokenizer()


def tokenizer() -> PreTrainedTokenizerBase:
    """One token per character of the task."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    inner.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def warm_start(name: str) -> PreTrainedModel:
    """Random weights, then supervised steps on the `warm` problems (which neither RL nor the test ever sees)."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    recipe = _recipe(name)
    warm = recipe["warm"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(warm["seed"])
        model = Qwen3ForCausalLM(Qwen3Config(**recipe["config"]))
    encode = {word: i for i, word in enumerate(VOCABULARY)}
    stream = arithmetic.problems("warm", seed=warm["seed"], digits=recipe["digits"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm["lr"], weight_decay=0.0, fused=True)
    model.train()
    for step in range(warm["steps"]):
        drawn = [_careless(p, step, i, warm) for i, p in enumerate(islice(stream, warm["batch"]))]
        rows = [[encode[c] for c in p.question + p.solution] + [encode[EOS]] for p in drawn]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        # The question is given, not learnt; padding comes after the end and needs no attention mask.
        labels = tokens.clone()
        for i, (p, row) in enumerate(zip(drawn, rows, strict=True)):
            labels[i, : len(p.question)] = -100
            labels[i, len(row) :] = -100
        for group in optimizer.param_groups:
            # The fall at the end settles the model: where it stops does not hang on the last batches.
            group["lr"] = warm["lr"] * min(1.0, (step + 1) / warm["warmup"], (warm["steps"] - step) / warm["decay"])
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.eval()


def _careless(problem: arithmetic.Problem, step: int, row: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """The problem with a share of its carries forgotten."""
    operands = [int(x) for x in problem.question.rstrip("=").split("+")]
    u = rng.uniform(warm["seed"], "careless", step, row, range(len(str(max(operands)))))
    return arithmetic.worked(operands, (u < warm["forgets"]).tolist())


def _recipe(name: str) -> Mapping[str, Any]:
    if name not in RECIPES:
        raise DataError(f"actor.path {name!r}: the embedded models are {', '.join(RECIPES)}")
    return RECIPES[name]


def _make(name: str, path: Path) -> None:
    """Build beside the place and rename: a killed build leaves nothing that looks whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        with _quiet():
            warm_start(name).save_pretrained(aside, safe_serialization=True)
            tokenizer().save_pretrained(aside)
        sums = {file.name: _sha256(file) for file in sorted(aside.iterdir())}
        (aside / "SHA256.json").write_text(json.dumps(sums, indent=1))
        if _is_whole(path):
            return  # another process was faster, and someone may be reading its model
        if path.exists():
            shutil.rmtree(path)
        try:
            aside.rename(path)
        except OSError:
            # Another process was faster; its model is the same recipe.
            if not _is_whole(path):
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_whole(path: Path) -> bool:
    try:
        sums = json.loads((path / "SHA256.json").read_text())
        return bool(sums) and all(_sha256(path / name) == value for name, value in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers' own progress bars do not belong into a one-second load."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()

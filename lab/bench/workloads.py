"""The workloads of the benchmark: random weights, prompts of a fixed number of tokens, completions of a fixed length.

Both sides use the same model folder, tokenizer, prompts and reward; two updates per rollout batch, no KL.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo import rng
from lab.bench import vision

TINY = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
# The shape of SmolLM2-135M.
SMALL = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
# Prompts that cost more than completions, in a model whose head costs little
DOOR = {
    **TINY,
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "head_dim": 64,
}
EOS, PAD = 0, 1


@dataclass(frozen=True)
class Workload:
    """The size of a rollout batch, and how many of its groups have equal rewards."""

    name: str
    model: dict[str, Any]
    num_prompts: int
    num_samples: int
    prompt_tokens: int  # words; those of an image are not among them
    new_tokens: int
    flat_of_8: int = 0  # of every eight groups, those with equal rewards
    goal: float = 0.0  # TRL's time ÷ ours
    steps: int = 2  # of one process; the first warms caches up and is not counted
    rounds: int = 1  # processes of each side, alternating
    num_minibatches: int = 2
    visual_tokens: int = 0  # features of the image of each prompt; 0: text alone
    frozen: bool = False  # the vision tower is not trained
    num_turns: int = 1  # answers of an episode, `new_tokens` each
    reply_tokens: int = 0  # that the environment appends after each turn but the last

    @property
    def text(self) -> dict[str, Any]:
        """The config of the text model."""
        return self.model.get("text_config", self.model)

    @property
    def all_prompt_tokens(self) -> int:
        return self.prompt_tokens + (self.visual_tokens + 2 if self.visual_tokens else 0)

    @property
    def sampled_tokens(self) -> int:
        """Of one sequence."""
        return self.num_turns * self.new_tokens

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens, and those of the environment between them."""
        return self.sampled_tokens + (self.num_turns - 1) * self.reply_tokens

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_samples


# `gspo.trl.GSPOTrainer` beside TRL's trainer, on the same script.
DOORS = {
    w.name: w
    for w in (
        Workload("door-prompts", DOOR, 4, 8, 370, 24, steps=3, rounds=2),
        Workload("door-small", SMALL, 4, 8, 44, 48, steps=3, rounds=2),
    )
}
WORKLOADS = {
    w.name: w
    for w in (
        Workload("tiny", TINY, 32, 8, 16, 32, goal=6, steps=8, rounds=3),
        Workload("small", SMALL, 4, 8, 44, 48, goal=3, steps=3, rounds=2),
        Workload("long", SMALL, 2, 8, 512, 32, goal=8),
        Workload("sparse", SMALL, 8, 8, 44, 48, flat_of_8=7, goal=7),
        Workload("episode", SMALL, 2, 8, 64, 16, goal=3, num_turns=4, reply_tokens=32),
        Workload("vision", vision.QWEN_VL, 4, 8, 12, 32, goal=6, visual_tokens=1024),
        Workload("vision-frozen", vision.QWEN_VL, 4, 8, 12, 32, goal=10, visual_tokens=1024, frozen=True),
    )
}


def workload_rows(workload: Workload, count: int) -> list[dict[str, Any]]:
    """`count` prompts of exactly `prompt_tokens` words, of which `flat_of_8` in eight have a constant reward."""
    vocabulary = vision.WORDS if workload.visual_tokens else workload.model["vocab_size"]
    words = 2 + (rng.uniform(1, "bench", range(count * workload.prompt_tokens)) * (vocabulary - 2)).astype(int)
    grid = words.reshape(count, workload.prompt_tokens)
    made = [
        {"prompt": " ".join(f"w{w}" for w in line), "flat": i % 8 < workload.flat_of_8} for i, line in enumerate(grid)
    ]
    if not workload.visual_tokens:
        return made
    shown = vision.images(count, workload.visual_tokens)
    return [{**row, "image": image} for row, image in zip(made, shown, strict=True)]


def reward(completions: Sequence[Any], flat: Sequence[bool], **_: Any) -> list[float]:
    """A cheap value in [0, 1) that differs within a group; 0 for rows with `flat`.

    Below 1, because `actor.reward_clip` would make larger ones equal, and their groups would be skipped.
    """
    # TRL passes the answer to a chat as a list of messages.
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [0.0 if f else sum(map(ord, c)) % 97 / 97 for c, f in zip(texts, flat, strict=True)]


def write_workload_model(workload: Workload, folder: Path) -> None:
    """The model and a word tokenizer (`w17` is token 17), as a folder that transformers can load."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    fields = dict(workload.model)
    ends = {"eos_token_id": EOS, "pad_token_id": PAD, "bos_token_id": None}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, **ends)
    torch.manual_seed(0)
    model_class(workload).from_config(config).save_pretrained(folder)
    special = vision.special_tokens() if workload.visual_tokens else {}
    names = [f"w{i}" for i in range(2, workload.text["vocab_size"] - len(special))]
    words = {word: i for i, word in enumerate(["<eos>", "<pad>", *names, *special.values()])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    # The default decoder joins words with spaces.
    inner.decoder = decoders.WordPiece(prefix="##")  # pyright: ignore[reportAttributeAccessIssue]
    more = {"extra_special_tokens": special} if special else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", **more)
    tokenizer.save_pretrained(folder)
    if special:
        vision.write_bench_processor(folder)
    (folder / "workload.json").write_text(json.dumps(workload.name))


def model_class(workload: Workload) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if workload.visual_tokens else AutoModelForCausalLM


def flops(workload: Workload) -> tuple[float, float]:
    """The minimum of floating-point operations: to decode one token of one row, and to train one step.

    2 per weight and token forward, 4 backward; prompts once per group, the head at trained positions only; attention is
    left out (a few per cent here), so shares of the GEMM rate are slightly low.
    """
    m = workload.text
    head_dim = m.get("head_dim") or m["hidden_size"] // m["num_attention_heads"]
    attention = m["hidden_size"] * head_dim * (2 * m["num_attention_heads"] + 2 * m["num_key_value_heads"])
    trunk = m["num_hidden_layers"] * (attention + 3 * m["hidden_size"] * m["intermediate_size"])
    head = m["hidden_size"] * m["vocab_size"]
    trained_prompts = workload.num_prompts * (8 - workload.flat_of_8) / 8
    inputs = trained_prompts * (workload.all_prompt_tokens + workload.num_samples * (workload.completion_tokens - 1))
    targets = trained_prompts * workload.num_samples * workload.sampled_tokens
    train = 6.0 * (trunk * inputs + head * targets)
    if workload.visual_tokens and not workload.frozen:
        train += 3.0 * trained_prompts * vision.tower_flops(workload.model["vision_config"], workload.visual_tokens)
    return 2.0 * (trunk + head), train


def gemm_rate(rows: int = 2048, inner: int = 1024, columns: int = 1536, weights: int = 1) -> float:
    """GFLOP/s of rows × inner × columns products with this process's threads: the median of 40.

    The median and not the best: a core that has just been idle is faster than one that trains. With several `weights`
    the products use them in turn, as the layers of a model do, so that none stays in the cache.
    """
    import statistics
    import time

    import torch

    left, right = torch.randn(rows, inner), [torch.randn(columns, inner) for _ in range(weights)]
    seconds = []
    for i in range(40):
        start = time.perf_counter()
        torch.mm(right[i % weights], left.t())
        seconds.append(time.perf_counter() - start)
    return 2 * rows * inner * columns / statistics.median(seconds) / 1e9

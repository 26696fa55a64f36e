"""Train a reward model on pairs of completions, as a folder for `reward.functions: [{name: reward_model, path: …}]`.

    python examples/reward_model/reward_model.py runs/quickstart/gspo --base embedded:tiny --to runs/reward_model/model
    python examples/reward_model/reward_model.py pairs.jsonl --base Qwen/Qwen3-0.6B --to my-reward-model

Pairs are rows of a JSONL file with prompt, chosen and rejected (strings), or the samples of a run: completions of one
prompt with different rewards. The model is a sequence classifier of transformers with one label: its score r is the
logit at the last token. The loss is that of Bradley and Terry, the negative log-likelihood that the chosen one wins:

    L = −mean log σ( r(x, y_chosen) − r(x, y_rejected) )

Every tenth prompt is held out; the share of its pairs in which the chosen one has the higher score is printed.
"""

from __future__ import annotations

import argparse
import random
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from gspo.errors import DataError
from gspo.models import EMBEDDED, embedded, load_tokenizer, locate
from gspo.report import training_rows
from gspo.system import read_jsonl

PER_PROMPT = 8  # pairs of one prompt, at most


class Pair(NamedTuple):
    prompt: str
    chosen: str
    rejected: str


def pairs_of_file(file: Path) -> list[Pair]:
    rows = read_jsonl(file)
    if wrong := [n for n, row in enumerate(rows, 1) if not all(isinstance(row.get(k), str) for k in Pair._fields)]:
        raise DataError(f"{file}, line {wrong[0]}: a pair has prompt, chosen and rejected, all of them strings")
    return [Pair(*(row[name] for name in Pair._fields)) for row in rows]


def pairs_of_run(run: Path, seed: int = 0) -> list[Pair]:
    """Pairs of the samples of one prompt: the higher reward is chosen, the lower one rejected."""
    answers: dict[str, list[tuple[str, float]]] = {}
    for row in training_rows(run, [], best=False):
        if isinstance(row["prompt"], str) and row["origin"]["reward"] is not None:
            answers.setdefault(row["prompt"], []).append((row["completion"], row["origin"]["reward"]))
    draw, pairs = random.Random(seed), []
    for prompt, own in answers.items():
        ranked = [Pair(prompt, a, b) for (a, high), (b, low) in product(own, own) if high > low]
        pairs += draw.sample(ranked, min(len(ranked), PER_PROMPT))
    return pairs


def text_of(tokenizer: Any, prompt: str, completion: str) -> list[int]:
    """As the reward `reward_model` renders it: by the chat template, if the tokenizer has one."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.encode(prompt + completion)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return tokenizer.encode(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)


def scores(model: Any, texts: list[list[int]]) -> torch.Tensor:
    """r of every text, [B]; padded on the right."""
    width, pad = max(map(len, texts)), model.config.get_text_config().pad_token_id
    tokens = torch.tensor([text + [pad] * (width - len(text)) for text in texts])  # [B, T]
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    return model(input_ids=tokens, attention_mask=mask).logits[:, 0]


def train_reward_model(
    pairs: list[Pair],
    base: str,
    to: Path,
    *,
    layers: int | None = None,
    steps: int = 150,
    batch: int = 32,
    lr: float = 1e-3,
    seed: int = 0,
) -> float:
    """Write the folder of a reward model; returns the share of held-out pairs that it orders as they are."""
    prompts = sorted({pair.prompt for pair in pairs})
    held_out = {prompt for number, prompt in enumerate(prompts) if number % 10 == 0}
    known, rest = ([pair for pair in pairs if (pair.prompt in held_out) == held] for held in (False, True))
    if len(prompts) < 10 or not known:
        raise DataError(f"{len(pairs)} pairs of {len(prompts)} prompts: at least 10 prompts with a pair are needed")
    tokenizer, model = load_tokenizer(base), _classifier(base, layers, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    draw = random.Random(seed)
    for step in range(steps):
        drawn = [draw.choice(known) for _ in range(batch)]
        texts = [text_of(tokenizer, p.prompt, p.chosen) for p in drawn]
        texts += [text_of(tokenizer, p.prompt, p.rejected) for p in drawn]
        chosen, rejected = scores(model, texts).chunk(2)  # [B] each
        loss = -logsigmoid(chosen - rejected).mean()
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 10, (steps - step) / (0.3 * steps))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0:
            print(f"step {step:4d}/{steps}  loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        gaps = [scores(model, [text_of(tokenizer, p.prompt, y) for y in p[1:]]) for p in rest]
    right = sum(bool(chosen > rejected) for chosen, rejected in gaps) / max(len(gaps), 1)
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)
    print(f"{right:.1%} of {len(gaps)} held-out pairs are ordered as they are; written to {to}")
    return right


def _classifier(base: str, layers: int | None, seed: int) -> PreTrainedModel:
    folder = locate(base, "--base")
    if folder.startswith(EMBEDDED):
        embedded.build(folder)
        folder = str(embedded.embedded_folder(base))
    torch.manual_seed(seed)  # of the new head
    first = {} if layers is None else {"num_hidden_layers": layers}
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, use_safetensors=True, **first)
    text = model.config.get_text_config()
    # transformers finds the last token of a text by its padding.
    text.pad_token_id = load_tokenizer(base).pad_token_id if text.pad_token_id is None else text.pad_token_id
    return model.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="a JSONL file with prompt, chosen, rejected, or a run directory")
    parser.add_argument("--base", required=True, help="model to start from: folder, hub name or embedded model")
    parser.add_argument("--to", required=True, type=Path, help="folder to write")
    parser.add_argument("--layers", type=int, help="use only the first N layers of the base, which is faster")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=32, help="pairs per step")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    pairs = pairs_of_run(args.pairs) if args.pairs.is_dir() else pairs_of_file(args.pairs)
    settings = {"layers": args.layers, "steps": args.steps, "batch": args.batch, "lr": args.lr}
    train_reward_model(pairs, args.base, args.to, **settings)


if __name__ == "__main__":
    main()

"""What the run directory stores of a step's samples: one JSON row per sequence, and token tensors of some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gspo.learner import Batch, StepReport
from gspo.types import Images, Prompt, Sample, Score


def sample_rows(
    batch: Batch, report: StepReport, step: int, decode: Callable[[Sequence[int]], str]
) -> list[Mapping[str, Any]]:
    """One object per sequence, for samples/step_*.jsonl."""
    # Most tokens occur many times in a batch, and decoding is slow.
    piece = cache(lambda token: decode([token]))
    rows: list[Mapping[str, Any]] = []
    index = 0
    for group in batch.groups:
        for sample, text, outcome in zip(group.samples, group.texts, group.outcomes, strict=True):
            # `index` numbers the sequences as in the arrays of the batch and the report, [n].
            for branch, sequence in enumerate(sample.sequences):
                clipped = report.clipped_low[index] + report.clipped_high[index]
                versions = sequence.versions
                rows.append(
                    {
                        "step": step,
                        "sequence": index,
                        "submission": sample.id.submission,
                        "sample": sample.id.sample,
                        "prompt": group.prompt.text if sequence.prompt is None else decode(list(sequence.prompt)),
                        "completion": text
                        if sequence.mask.all() and not sample.rest
                        else decode(sequence.tokens.tolist()),
                        "answer": group.prompt.answer,
                        # A completion of the data set has no reward.
                        "reward": batch.rewards[index] if group.prompt.target is None else None,
                        "reward_parts": dict(outcome.parts) if isinstance(outcome, Score) else None,
                        "failure": None if isinstance(outcome, Score) else f"{outcome.kind}: {outcome.message}",
                        "advantage": batch.advantages[index],
                        "length": int(batch.trained_tokens[index]),
                        "finish": sequence.finish,
                        "log_s": report.log_s[index],
                        "clipped": bool(clipped > 0) if np.isfinite(clipped) else None,
                        "minibatch": int(batch.minibatch[index]),
                        "version": int(versions[-1]) if len(versions) else None,
                        "oldest_version": int(versions.min()) if len(versions) else None,
                        "pieces": [piece(t) for t in sequence.tokens[sequence.mask].tolist()]
                        if index in report.logp
                        else None,
                        **question_of(group.prompt),
                        **messages_of(group.prompt),
                        **images_of(group.prompt),
                        **turns_of(sample, sequence, branch, batch.token_advantages, index, decode),
                    }
                )
                index += 1
    return rows


def messages_of(prompt: Prompt) -> dict[str, Any]:
    """The conversation of a prompt that is more than one question of the user; empty for others."""
    said = [message for message in prompt.messages if message.get("role") != "system"]
    return {"messages": list(prompt.messages)} if len(said) > 1 else {}


def question_of(prompt: Prompt) -> dict[str, str]:
    """The last message of a prompt that a chat template rendered; empty for plain text."""
    content = prompt.messages[-1].get("content") if prompt.messages else None
    if isinstance(content, (list, tuple)):  # parts: images and text
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = "".join(text for text in texts if isinstance(text, str))
    return {"question": content} if isinstance(content, str) and content != prompt.text else {}


def images_of(prompt: Prompt) -> dict[str, Any]:
    """The digest of a prompt's images, and where each is from and its size; never pixels. Empty for text alone."""
    if prompt.images is None:
        return {}
    pairs = zip(prompt.images.names, prompt.images.sizes, strict=True)
    return {"images": {"sha256": prompt.images.digest, "from": [{"name": name, "size": size} for name, size in pairs]}}


def shown_text(images: Images | None) -> str:
    """Size and digest of each image, for one line of the terminal.

    >>> shown_text(Images("9f86d081884c7d65", dict, names=("cat.png",), sizes=((448, 336),)))
    '[448×336 9f86d081] '
    """
    if images is None:
        return ""
    return f"[{', '.join(f'{width}×{height}' for width, height in images.sizes)} {images.digest[:8]}] "


def turns_of(
    sample: Sample,
    sequence: Sample,
    branch: int,
    advantages: Mapping[int, NDArray[Any]] | None,
    index: int,
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """The spans of an episode in order, each by the model or the environment; empty for a plain completion."""
    if not sample.is_episode:
        return {}
    spans: list[dict[str, Any]] = []
    # A span is a run of tokens of one turn, all sampled or all from the environment.
    # marks: [2, T]. A cut is where the turn or the mask changes.
    marks = np.stack([sequence.turns.astype(np.int64), sequence.mask.astype(np.int64)])
    cuts = [0, *(np.flatnonzero((np.diff(marks) != 0).any(0)) + 1).tolist(), len(sequence.tokens)]
    place = np.cumsum(sequence.mask) - 1  # [T] position of a token among the trained ones
    for begin, end in pairwise(cuts):
        if begin == end:
            continue
        trained, turn = bool(sequence.mask[begin]), int(sequence.turns[begin])
        span: dict[str, Any] = {"turn": turn, "by": "model" if trained else "environment"}
        span |= {"text": decode(sequence.tokens[begin:end].tolist()), "length": end - begin}
        if trained:
            span["reward"] = sample.turn_rewards.get(turn)
            if advantages is not None and index in advantages:
                span["advantage"] = float(advantages[index][place[begin]])
        spans.append(span)
    return {"branch": branch, "turns": spans}


def token_tensors(batch: Batch, report: StepReport) -> dict[str, np.ndarray]:
    """Per-token values of the kept sequences: `<sequence>/tokens`, `/behavior_logp`, `/logp`, `/entropy`."""
    out: dict[str, np.ndarray] = {}
    for index in sorted(report.logp):
        sample = batch.samples[index]
        # All four tensors: [trained tokens of the sequence].
        out[f"{index}/tokens"] = np.ascontiguousarray(sample.tokens[sample.mask])
        out[f"{index}/behavior_logp"] = np.ascontiguousarray(sample.behavior_logp[sample.mask])
        out[f"{index}/logp"] = report.logp[index]
        out[f"{index}/entropy"] = report.token_entropy[index]
    return out

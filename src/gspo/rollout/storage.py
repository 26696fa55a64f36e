"""Pending groups as a checkpoint stores them: arrays for safetensors, everything else for JSON.

The prompt is not stored: it follows from the submission index and the data, whose digest is part of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from gspo.learner import Command
from gspo.types import TOKEN_ARRAYS, Extras, Failure, Group, Outcome, Prompt, Sample, SampleId, Score, cut


def pack_groups(groups: Sequence[Group]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The arrays of all samples, concatenated, and one JSON row per group."""
    samples = [sequence for group in groups for sample in group.samples for sequence in sample.sequences]
    arrays: dict[str, np.ndarray] = {}
    # Arrays of all sequences one after another: [all tokens, …]. The rows hold the lengths to split them.
    if samples:
        arrays = {name: np.concatenate([getattr(sample, name) for sample in samples]) for name in TOKEN_ARRAYS}
        arrays |= Extras.arrays([sample.extras for sample in samples], [len(sample.tokens) for sample in samples])
    rows = [
        {
            "submission": group.submission,
            "samples": [
                {**_sequence(s), **_episode(s), "text": text}
                for s, text in zip(group.samples, group.texts, strict=True)
            ],
            "outcomes": [_outcome(outcome) for outcome in group.outcomes],
        }
        for group in groups
    ]
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}, rows


def unpack_groups(
    arrays: Mapping[str, torch.Tensor], rows: Sequence[Mapping[str, Any]], prompt_of: Callable[[int], Prompt]
) -> tuple[Group, ...]:
    """The groups that `pack_groups` was given, bit for bit."""
    prompts = {row["submission"]: prompt_of(row["submission"]) for row in rows}
    parts = [
        (row["submission"], part) for row in rows for each in row["samples"] for part in (each, *each.get("rest", ()))
    ]
    lengths = [part["length"] for _, part in parts]
    # A sequence without a prompt of its own has the prompt of its group.
    prompt_lengths = [len(part.get("prompt") or prompts[submission].tokens) for submission, part in parts]
    flat = {name: array.numpy() for name, array in arrays.items()}
    extras = Extras.of_arrays(flat, lengths, prompt_lengths)
    columns = [cut(flat[name], lengths) for name in TOKEN_ARRAYS] if parts else []
    owns = [tuple(part["prompt"]) if "prompt" in part else None for _, part in parts]
    sequences = iter(
        Sample(SampleId(submission, *part["id"]), *values, finish=part["finish"], extras=more, prompt=own)
        for (submission, part), own, more, *values in zip(parts, owns, extras, *columns, strict=True)
    )
    return tuple(_group(row, prompts[row["submission"]], sequences) for row in rows)


def _group(row: Mapping[str, Any], prompt: Prompt, sequences: Iterator[Sample]) -> Group:
    """The group of a row; takes its sequences."""
    samples = tuple(
        replace(
            next(sequences),
            rest=tuple(islice(sequences, len(each.get("rest", ())))),
            outcome=None if each.get("outcome") is None else _read(each["outcome"]),
            turn_rewards={int(turn): value for turn, value in each.get("turn_rewards", {}).items()},
        )
        for each in row["samples"]
    )
    outcomes = tuple(_read(outcome) for outcome in row["outcomes"])
    return Group(row["submission"], prompt, samples, tuple(each["text"] for each in row["samples"]), outcomes)


def pack_batch(content: Mapping[str, Any], groups: Sequence[Group]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A batch for the other ranks (`World.broadcast_command`): groups with their prompts' tokens, and `content`."""
    arrays, rows = pack_groups(groups)
    prompts = [list(group.prompt.tokens) for group in groups]
    return {**content, "rows": rows, "prompts": prompts}, {name: array.numpy() for name, array in arrays.items()}


def unpack_batch(command: Command) -> tuple[Group, ...]:
    """The groups that rank 0 broadcast; their prompts hold tokens only, which is what training needs."""
    rows = command.content["rows"]
    prompts = {row["submission"]: Prompt(tuple(p), "") for row, p in zip(rows, command.content["prompts"], strict=True)}
    return unpack_groups({name: torch.from_numpy(a) for name, a in command.arrays.items()}, rows, prompts.__getitem__)


def _sequence(sample: Sample) -> dict[str, Any]:
    row: dict[str, Any] = {"id": list(sample.id[1:]), "length": len(sample.tokens), "finish": sample.finish}
    return row if sample.prompt is None else row | {"prompt": list(sample.prompt)}


def _episode(sample: Sample) -> dict[str, Any]:
    """The fields that only episodes have; empty for a single completion."""
    row: dict[str, Any] = {}
    if sample.rest:
        row["rest"] = [_sequence(part) for part in sample.rest]
    if sample.outcome is not None:
        row["outcome"] = _outcome(sample.outcome)
    if sample.turn_rewards:
        row["turn_rewards"] = {str(turn): value for turn, value in sample.turn_rewards.items()}
    return row


def _outcome(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Score):
        row = {"value": outcome.value, "parts": dict(outcome.parts)}
        return row | ({"weights": dict(outcome.weights)} if outcome.weights else {})
    return {"failure": outcome.kind, "message": outcome.message}


def _read(row: Mapping[str, Any]) -> Outcome:
    if "failure" in row:
        return Failure(row["failure"], row["message"])
    return Score(row["value"], row["parts"], row.get("weights", {}))

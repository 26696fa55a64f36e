"""Pending groups as a checkpoint stores them: arrays for safetensors, everything else for JSON.

The prompt is not stored: it follows from the submission index and the data, whose digest is part of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gspo.learner.ranks.commands import Command
from gspo.types import TOKEN_ARRAYS, Failure, Group, Kept, Outcome, Prompt, Sample, SampleId, Score

_ARRAYS = (*TOKEN_ARRAYS, "routes", "prompt_routes")


def pack_groups(groups: Sequence[Group]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The arrays of all samples, concatenated, and one JSON row per group."""
    samples = [sequence for group in groups for sample in group.samples for sequence in sample.sequences]
    arrays: dict[str, torch.Tensor] = {}
    # Arrays of all sequences one after another: [all tokens, …]. The rows hold the lengths to split them.
    for name in _ARRAYS:
        parts = [getattr(sample, name) for sample in samples]
        # An optional array is stored only if every sequence has it.
        if parts and all(part is not None for part in parts):
            arrays[name] = torch.from_numpy(np.ascontiguousarray(np.concatenate(parts)))
    if any(sample.kept is not None for sample in samples):
        kept = Kept.concatenate([sample.kept or Kept.whole(len(sample.tokens)) for sample in samples])
        arrays |= {"kept_counts": torch.from_numpy(kept.counts), "kept_ids": torch.from_numpy(kept.ids)}
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
    return arrays, rows


def unpack_groups(
    arrays: Mapping[str, torch.Tensor], rows: Sequence[Mapping[str, Any]], prompt_of: Callable[[int], Prompt]
) -> tuple[Group, ...]:
    """The groups that `pack_groups` was given, bit for bit."""
    flat = {name: array.numpy() for name, array in arrays.items()}
    prompts = flat.pop("prompt_routes", None)  # one row per prompt token, not per completion token
    counts, ids = flat.pop("kept_counts", None), flat.pop("kept_ids", np.zeros(0, dtype=np.int32))
    begin, read, groups = 0, 0, []  # first completion token and first prompt token that have not been read

    def sequence(each: Mapping[str, Any], submission: int, **more: Any) -> Sample:
        nonlocal begin, read, ids
        end, own = begin + each["length"], each.get("prompt")
        # Copies: a slice would keep the arrays of all groups in memory.
        values: dict[str, Any] = {name: array[begin:end].copy() for name, array in flat.items()}
        if prompts is not None:
            # A sequence without a prompt of its own has the prompt of its group.
            num_prompt = len(prompt_of(submission).tokens if own is None else own)
            values["prompt_routes"] = prompts[read : read + num_prompt].copy()
            read += num_prompt
        if counts is not None and counts[begin:end].any():
            num_ids = int(counts[begin:end].sum())
            values["kept"], ids = Kept(counts[begin:end].copy(), ids[:num_ids].copy()), ids[num_ids:]
        begin = end
        values["prompt"] = None if own is None else tuple(own)
        return Sample(SampleId(submission, *each["id"]), finish=each["finish"], **values, **more)

    for row in rows:
        samples = []
        for each in row["samples"]:
            # In the order of the arrays: the sample itself, then its other sequences.
            first = sequence(
                each,
                row["submission"],
                outcome=None if each.get("outcome") is None else _read(each["outcome"]),
                turn_rewards={int(turn): value for turn, value in each.get("turn_rewards", {}).items()},
            )
            rest = tuple(sequence(part, row["submission"]) for part in each.get("rest", ()))
            samples.append(replace(first, rest=rest) if rest else first)
        groups.append(
            Group(
                row["submission"],
                prompt_of(row["submission"]),
                tuple(samples),
                tuple(each["text"] for each in row["samples"]),
                tuple(_read(outcome) for outcome in row["outcomes"]),
            )
        )
    return tuple(groups)


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

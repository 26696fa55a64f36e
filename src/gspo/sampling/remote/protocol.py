"""The format between a trainer and a sampler server, and the values that both must share.

JSON, with arrays as base64 of their little-endian bytes, so float32 log-probs arrive bit for bit. Parsing is strict: a
field that is missing, or has another type or length, is a WireError.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gspo.models import num_experts, route_shape, routers
from gspo.sampling.api import Experts
from gspo.types import Extras, Kept, Request, Routes, Sample, SampleId, SamplingParams


def context_limit(model: Any, max_tokens: int | None) -> int:
    """Longest prompt + completion: gconfig.max_tokens if set, else the model's limit."""
    return max_tokens or getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def sampler_identity(
    model: Any, *, seed: int, ends: Collection[int], max_context: int, dtype: torch.dtype
) -> dict[str, Any]:
    """What is compared when a trainer attaches to a server. Weights of a LoRA adapter are not counted."""
    text = model.config.get_text_config()
    return {
        "model": text.model_type,
        "num_vocab": int(text.vocab_size),
        "num_parameters": sum(p.numel() for n, p in model.named_parameters() if ".lora_" not in n),
        "dtype": str(dtype),
        "seed": seed,
        "ends": sorted(ends),
        "max_context": max_context,
    }


def experts_of(model: Any, needed: bool) -> Experts:
    """The expected form of a sample's expert routes. `needed`: a sample without routes is invalid."""
    found = routers(model)
    num_layers, per_token, _ = route_shape(found)
    return Experts(num_layers, per_token, num_experts(found), needed)


_COLUMNS = {"tokens": "<i4", "behavior_logp": "<f4", "versions": "<i4", "mask": "|u1", "turns": "<i2"}
_ROUTES = ("|u1", "<i2")  # expert numbers: up to 256 experts, or more
_FINISH = ("stop", "length", "abort")


class WireError(ValueError):
    """A message does not follow the format."""


def loads(body: bytes) -> dict[str, Any]:
    """A JSON object, or WireError."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as cause:
        raise WireError(f"the body is not JSON: {type(cause).__name__}") from None
    if not isinstance(value, dict):
        raise WireError(f"the body is a JSON {type(value).__name__}; it must be an object")
    return value


def field(body: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """`body[name]` if it has that type, else WireError. A bool does not count as an int."""
    value = body.get(name)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
        raise WireError(f"{name} must be {names}, got {type(value).__name__}")
    return value


def portions(items: Iterable[Any], max_count: int, max_bytes: int) -> Iterator[list[Any]]:
    """Split packed items into lots of at most about that size; an item that is larger is a lot of its own.

    >>> items = ["a" * 10, "b" * 200, "c" * 10, "d" * 10, "e" * 10]
    >>> [[item[0] for item in lot] for lot in portions(items, max_count=2, max_bytes=100)]
    [['a'], ['b'], ['c', 'd'], ['e']]
    """
    lot: list[Any] = []
    total = 0
    for item in items:
        size = _num_bytes(item)
        if lot and (len(lot) == max_count or total + size > max_bytes):
            yield lot
            lot, total = [], 0
        lot.append(item)
        total += size
    if lot:
        yield lot


def _num_bytes(packed: Any) -> int:
    """About the length of the JSON text. Nearly all of it are arrays, which are strings here."""
    if isinstance(packed, dict):
        return sum(len(name) + 6 + _num_bytes(value) for name, value in packed.items())
    if isinstance(packed, list | tuple):
        return sum(2 + _num_bytes(value) for value in packed)
    return len(packed) + 2 if isinstance(packed, str) else 12


def pack_sample(sample: Sample) -> dict[str, Any]:
    """
    >>> unpack_sample(pack_sample(Sample.of(SampleId(7, 1), [4, 9], [-0.1, -0.7], 3))).behavior_logp.tolist()
    [-0.10000000149011612, -0.699999988079071]
    """
    packed = {"id": list(sample.id), "finish": sample.finish}
    packed |= {name: _pack(getattr(sample, name), kind) for name, kind in _COLUMNS.items()}
    if (routes := sample.extras.routes) is not None:
        for name, experts in (("routes", routes.own), ("prompt_routes", routes.prompt)):
            kind = _ROUTES[experts.dtype.itemsize > 1]
            packed[name] = {"type": kind, "shape": list(experts.shape), "data": _pack(experts, kind)}
    if (kept := sample.extras.kept) is not None:
        packed["kept"] = {"counts": _pack(kept.counts, "<i4"), "ids": _pack(kept.ids, "<i4")}
    return packed


def unpack_sample(body: Any) -> Sample:
    if not isinstance(body, dict):
        raise WireError(f"a sample must be an object, got {type(body).__name__}")
    if (finish := body.get("finish")) not in _FINISH:
        raise WireError(f"finish must be one of {', '.join(_FINISH)}, got {finish!r}")
    columns = {name: _unpack(body, name, kind) for name, kind in _COLUMNS.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise WireError(f"the columns of a sample have different lengths: {lengths}")
    if ((mask := columns["mask"]) > 1).any():
        raise WireError("mask must hold 0 and 1")
    return Sample(
        id=_id(body),
        tokens=columns["tokens"],
        behavior_logp=columns["behavior_logp"],
        versions=columns["versions"],
        mask=mask.astype(np.bool_),
        turns=columns["turns"],
        finish=finish,  # pyright: ignore[reportArgumentType]
        extras=Extras(_routes(body, len(mask)), _kept(body, len(mask))),
    )


def pack_request(request: Request) -> dict[str, Any]:
    """
    >>> request = Request(SampleId(0, 0), (1, 2, 3), SamplingParams(max_new_tokens=8))
    >>> unpack_request(json.loads(json.dumps(pack_request(request)))) == request
    True
    """
    packed: dict[str, Any] = {
        "id": list(request.id),
        "prompt": _pack(np.array(request.prompt, dtype=np.int32), "<i4"),
        "params": {n: list(v) if isinstance(v, tuple) else v for n, v in asdict(request.params).items()},
    }
    if request.prefix is not None:
        packed["prefix"] = pack_sample(request.prefix)
    return packed


def unpack_request(body: Any) -> Request:
    if not isinstance(body, dict):
        raise WireError(f"a request must be an object, got {type(body).__name__}")
    prefix = unpack_sample(body["prefix"]) if body.get("prefix") is not None else None
    prompt = tuple(_unpack(body, "prompt", "<i4").tolist())
    return Request(_id(body), prompt, _params(field(body, "params", dict)), prefix)


def _params(body: Mapping[str, Any]) -> SamplingParams:
    known = {f.name for f in fields(SamplingParams)}
    if unknown := sorted(set(body) - known):
        raise WireError(f"params has no field {unknown[0]!r}")
    values: dict[str, Any] = {}
    # Check each field's type, as a client can send anything.
    for name in known & set(body):
        if name in ("greedy", "ignore_eos", "record_kept"):
            values[name] = field(body, name, bool)
        elif name in ("temperature", "top_p", "min_p"):
            values[name] = float(field(body, name, (int, float)))
        elif name == "stop_token_ids":
            values[name] = tuple(_ints(body, name))
        elif name == "stop":
            values[name] = tuple(field({"stop": text}, "stop", str) for text in field(body, name, list))
        else:
            values[name] = field(body, name, int)
    if "max_new_tokens" not in values:
        raise WireError("params has no max_new_tokens")
    return SamplingParams(**values)


def _id(body: Mapping[str, Any]) -> SampleId:
    numbers = _ints(body, "id")
    if len(numbers) != 4:
        raise WireError(f"id must be [submission, sample, turn, attempt], got {len(numbers)} numbers")
    return SampleId(*numbers)


def _ints(body: Mapping[str, Any], name: str) -> list[int]:
    return [field({name: value}, name, int) for value in field(body, name, list)]


def _routes(body: Mapping[str, Any], num: int) -> Routes | None:
    if body.get("routes") is None and body.get("prompt_routes") is None:
        return None
    routes = Routes(_experts(body, "prompt_routes"), _experts(body, "routes"))
    if len(routes.own) != num:
        raise WireError(f"routes of {len(routes.own)} tokens for {num}")
    return routes


def _experts(body: Mapping[str, Any], name: str) -> NDArray[Any]:
    packed = field(body, name, dict)
    kind, shape = packed.get("type"), _ints(packed, "shape")
    if kind not in _ROUTES:
        raise WireError(f"{name} must be of type {' or '.join(_ROUTES)}, got {kind!r}")
    flat = _unpack(packed, "data", kind)
    if len(shape) != 3 or min(shape) < 0 or math.prod(shape) != len(flat):
        raise WireError(f"{name} of shape {shape} with {len(flat)} numbers")
    return flat.reshape(shape)


def _kept(body: Mapping[str, Any], num: int) -> Kept | None:
    if body.get("kept") is None:
        return None
    packed = field(body, "kept", dict)
    kept = Kept(_unpack(packed, "counts", "<i4"), _unpack(packed, "ids", "<i4"))
    total = int(kept.counts.sum(dtype=np.int64))
    if len(kept.counts) != num or kept.counts.min(initial=0) < 0 or total != len(kept.ids):
        raise WireError(
            f"kept: {len(kept.counts)} counts with the sum {total} for {num} tokens and {len(kept.ids)} ids"
        )
    return kept


def pack_rows(rows: Iterable[Any], kind: str) -> list[str]:
    """Arrays of one type and any lengths.

    >>> [row.tolist() for row in unpack_rows({"tokens": pack_rows([[1, 2], [3]], "<i4")}, "tokens", "<i4")]
    [[1, 2], [3]]
    """
    return [_pack(np.asarray(row), kind) for row in rows]


def unpack_rows(body: Mapping[str, Any], name: str, kind: str) -> list[NDArray[Any]]:
    return [_unpack({name: row}, name, kind) for row in field(body, name, list)]


def _pack(array: NDArray[Any], kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode("ascii")


def _unpack(body: Mapping[str, Any], name: str, kind: str) -> NDArray[Any]:
    try:
        data = base64.b64decode(field(body, name, str), validate=True)
        array = np.frombuffer(data, dtype=kind)
    except (binascii.Error, ValueError) as cause:
        raise WireError(f"{name} is not an array of {kind}: {cause}") from None
    return array.astype(np.dtype(kind).newbyteorder("="))  # native byte order, and writable

"""Writes the files of the conformance suite: `python -m lab.conformance.make [FOLDER]`, default the package's own.

Inputs are rounded to the type of the case first, so that every implementation starts from the numbers that the answers
were computed from. Answers are float64 and come from the loops of `gspo.conformance.paper`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gspo.conformance import VECTORS, paper
from lab.conformance.cases import Case, cases

VERSION = 1
# Of a value relative to its scale (docs/conformance.md, Format).
TOLERANCE = {"float64": 1e-10, "float32": 5e-6, "float16": 4e-3, "bfloat16": 3e-2}
FLAGS = ("mask", "turn", "groups", "tokens")


def rounded(case: Case) -> dict[str, Tensor]:
    """The inputs as they are stored: exact in the type of the case."""
    kept = torch.float64 if case.dtype == "float64" else torch.float32
    found = {}
    for name, values in case.batch.items():
        if name in FLAGS:
            found[name] = torch.tensor(values, dtype=torch.int32)
        elif isinstance(values, list):
            is_input = name.endswith("logp")  # advantages and rewards are float32 in the narrow types, too
            found[name] = torch.tensor(values, dtype=torch.float64)
            found[name] = found[name].to(getattr(torch, case.dtype) if is_input else kept).to(kept)
    return found


def answers(case: Case, inputs: Mapping[str, Tensor]) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """(name, numbers), arrays: of the first answer, then of the other known ones."""
    plain = {name: x.to(torch.float64).tolist() for name, x in inputs.items()}
    for name, how in {case.first: {}, **case.others, **variants(case)}.items():
        if how is None or name == "not finite":
            yield {"name": name, "loss": None}, {}
        elif case.kind == "advantage":
            found = paper.group_advantage(plain["rewards"], plain["groups"], **how)
            yield {"name": name}, {"advantage": torch.tensor(found, dtype=torch.float64)}
        elif case.kind == "logp":
            rows = zip(plain["logits"], inputs["tokens"].tolist(), strict=True)
            logp = [paper.token_logp(row, token, case.batch["temperature"]) for row, token in rows]
            yield {"name": name}, {"logp": torch.tensor(logp, dtype=torch.float64)}
        else:
            found = answer(case, plain, name, how)
            yield numbers(name, found, plain["mask"]), arrays(found)


def variants(case: Case) -> dict[str, Mapping[str, Any]]:
    """Losses that go under the name of GSPO and are not that of the paper: a difference is shown by its name."""
    is_mean = paper.OBJECTIVES.get(case.objective, ("", ""))[1] == "sequence_mean"
    if not is_mean or case.kind in ("advantage", "logp") or case.name == "trained_nan":
        return {}
    found: dict[str, Mapping[str, Any]] = {"token mean": {"aggregation": "token_mean"}}
    if case.name in ("clean", "epsilon_wide"):
        found |= {"sum over tokens": {"aggregation": "sequence_sum"}, "token ratio": {"objective": "grpo"}}
        found |= {"no root |y|": {"objective": "product"}}
    return found


def answer(case: Case, plain: Mapping[str, Any], name: str, how: Mapping[str, Any]) -> paper.Answer:
    terms, aggregation = paper.OBJECTIVES.get(how.get("objective", case.objective), (paper.product, "sequence_mean"))
    aggregation = how.get("aggregation", aggregation)
    settings = {**case.settings, **how.get("settings", {})}
    bound = float(name.removeprefix("bound e^")) if name.startswith("bound e^") else math.inf
    if "rows" in how:
        settings["denominator"] = len(how["rows"])
    # A bounded ratio is a constant: its row has log s at the bound, and no gradient.
    first = paper.evaluate(plain, terms, aggregation, settings)
    over = [i for i, log_s in enumerate(first.log_s) if abs(log_s) > bound]
    old = [[x - bound for x in row] if i in over else plain["proximal_logp"][i] for i, row in enumerate(plain["logp"])]
    found = paper.evaluate({**plain, "proximal_logp": old}, terms, aggregation, settings)
    for i in over:
        found.gradient[i] = [0.0] * len(found.gradient[i])
    return found


def numbers(name: str, found: paper.Answer, mask: list[list[float]]) -> dict[str, Any]:
    trained = [sum(row) for row in mask]
    any_clipped = [any(row) for row in found.clipped]
    return {
        "name": name,
        "loss": found.loss,
        "scale": found.scale,
        "clip_fraction_sequences": sum(any_clipped) / sum(n > 0 for n in trained),
        "clip_fraction_tokens": sum(map(sum, found.clipped)) / sum(trained),
    }


def arrays(found: paper.Answer) -> dict[str, Tensor]:
    return {
        "gradient": torch.tensor(found.gradient, dtype=torch.float64),
        "clipped": torch.tensor(found.clipped, dtype=torch.uint8),
        "log_s": torch.tensor(found.log_s, dtype=torch.float64),
    }


def main(folder: Path) -> None:
    entries, tensors = [], {}
    for case in cases():
        inputs = rounded(case)
        tensors |= {f"{case.name}/{name}": x for name, x in inputs.items()}
        entry = {name: getattr(case, name) for name in ("name", "kind", "objective", "dtype", "decided")}
        entry |= {name: getattr(case, name) for name in ("claim", "source", "meaning", "bites")}
        entry["settings"] = {} if case.kind in ("advantage", "logp") else dict(case.settings)
        entry |= {"parts": case.parts} if case.parts else {}
        entry |= {name: x for name, x in case.batch.items() if isinstance(x, float)}  # the temperature
        entry["answers"] = []
        for number, (values, found) in enumerate(answers(case, inputs)):
            entry["answers"].append(values)
            tensors |= {f"{case.name}/answer{number}/{name}": x for name, x in found.items()}
        entries.append(entry)
    suite = {"version": VERSION, "tolerance": TOLERANCE, "cases": entries}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "arrays.safetensors")
    (folder / "arrays.safetensors").chmod(0o644)
    text = json.dumps(suite, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "suite.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else VECTORS)

"""Peak memory by setting: measured in a fresh process each, beside the estimate of `gspo doctor`."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.config import load
from gspo.doctor import explain
from lab.bench.compare import Say, run_side
from lab.bench.ours import run_settings
from lab.bench.workloads import SMALL, Workload, write_workload_model

WORKLOAD = Workload("memory", SMALL, 4, 8, 44, 24)
_LORA = ("actor.use_lora=true", "actor.lora_rank=16")
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "all weights, AdamW": (),
    "all weights, adamw8bit": ("actor.optimizer.type=adamw8bit",),
    "all weights, SGD": ("actor.optimizer.type=sgd",),
    "all weights, gradient checkpointing": ("actor.gradient_checkpointing=true",),
    "all weights, 128 tokens per micro-batch": ("actor.mb_spec.max_tokens_per_mb=128",),
    "LoRA": _LORA,
    "LoRA, gradient checkpointing": (*_LORA, "actor.gradient_checkpointing=true"),
    "LoRA on 8 bits": (*_LORA, "actor.lora_base_bits=8"),
    "LoRA on 4 bits": (*_LORA, "actor.lora_base_bits=4"),
    "LoRA on 4 bits, gradient checkpointing": (
        *_LORA,
        "actor.lora_base_bits=4",
        "actor.gradient_checkpointing=true",
    ),
}


def measure_settings(say: Say, names: Sequence[str] = (), workload: Workload = WORKLOAD) -> list[dict[str, Any]]:
    """One row per setting: its overrides, the measured and the estimated peak in bytes."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_workload_model(workload, Path(folder))
        for name in names or SETTINGS:
            needs_package = any("base_bits=4" in word for word in SETTINGS[name])
            if needs_package and importlib.util.find_spec("bitsandbytes") is None:
                say(f"memory, {name}: skipped, bitsandbytes is not installed")
                continue
            overrides = [*SETTINGS[name], f"train_dataset.max_length={workload.prompt_tokens}"]
            measured = run_side("ours", workload, folder, overrides)["peak_bytes"]
            row = {
                "setting": name,
                "overrides": list(SETTINGS[name]),
                "measured": measured,
                "estimated": estimated_peak(workload, folder, overrides),
            }
            say(f"memory, {name}: {measured / 1e9:.2f} GB, estimated {row['estimated'] / 1e9:.2f}")
            rows.append(row)
    return rows


def estimated_peak(workload: Workload, folder: str, overrides: Sequence[str]) -> float:
    """The doctor's estimate: the sampler's cache is freed before the trainer's passes."""
    found = explain(load(None, [*run_settings(workload, folder, folder), *overrides]), num_gpus=0).sections["memory"]
    return max(found["totals"]["trainer"], found["least"] + found["totals"]["sampler"])


def memory_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The section of docs/performance.md."""
    first, w = rows[0]["measured"], WORKLOAD
    return [
        "## Memory by setting",
        "",
        "Peak resident memory of a training process on this CPU, each setting in a fresh process: SmolLM2-135M's",
        f"config in float32, {w.num_prompts} × {w.num_samples} completions of {w.new_tokens} tokens, two updates.",
        "Beside it the estimate of `gspo doctor`. Remade by `gspo bench --workload memory --no-peer --write docs`.",
        "What the settings do: [memory.md](memory.md).",
        "",
        "| setting | peak | of the first | doctor's estimate | error |",
        "|---|---|---|---|---|",
        *(
            f"| {row['setting']} | {row['measured'] / 1e9:.2f} GB | {row['measured'] / first:.0%} | "
            f"{row['estimated'] / 1e9:.2f} GB | {row['estimated'] / row['measured'] - 1:+.0%} |"
            for row in rows
        ),
    ]

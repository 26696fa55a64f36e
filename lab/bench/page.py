"""docs/performance.md and its plot, generated from docs/performance.json, which `gspo bench` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.studies import markdown_table
from lab.bench.sampler import sampler_table
from lab.memory import memory_lines

# Further goals of `small`: shares of the GEMM rate, and of TRL's memory.
TRAIN_GOAL, DECODE_GOAL, MEMORY_GOAL = 0.75, 0.45, 0.50
_MODELS = {
    "tiny": "Qwen3, 4 layers × 128, vocabulary 64",
    "vision": "Qwen2.5-VL, text 6 layers × 256, tower 6 × 128, vocabulary 4096",
    "vision-frozen": "the same, the tower is not trained",
}
_LEAN = ("small", "long", "vision", "vision-frozen")  # workloads with MEMORY_GOAL
LABELS = {"prompt_tokens": "prompt tokens", "num_samples": "samples per prompt, G", "new_tokens": "new tokens"}


def merge(path: Path, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """The earlier results, with the newly measured parts replaced; `dates` has the day of each part."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    before = dict.fromkeys(_parts(known), known["machine"]["date"]) if known else {}
    return {
        **known,
        **fresh,
        "workloads": {**known.get("workloads", {}), **fresh.get("workloads", {})},
        "dates": {**before, **known.get("dates", {}), **dict.fromkeys(_parts(fresh), fresh["machine"]["date"])},
    }


def _parts(results: Mapping[str, Any]) -> list[str]:
    return [*results.get("workloads", {}), *(name for name in ("sampler", "memory", "sweep") if name in results)]


def write_performance(folder: Path, results: Mapping[str, Any]) -> None:
    """performance.json, performance.md and img/performance_sweep.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "performance.json").write_text(json.dumps(results, indent=1) + "\n")
    if results.get("sweep"):
        (folder / "img").mkdir(exist_ok=True)
        plot(results["sweep"], folder / "img" / "performance_sweep.png")
    (folder / "performance.md").write_text(performance_page(results))


def workload_table(results: Mapping[str, Any]) -> list[list[str]]:
    """A heading, then one line per workload, for the terminal and for the page."""
    head = ["workload", "ours", "TRL", "TRL ÷ ours", "goal", "rollout tok/s", "train tok/s", "memory", "of GEMM rate"]
    lines = [head]
    for name, r in results["workloads"].items():
        ours, trl = r["ours"], r.get("trl")
        lines.append(
            [
                name,
                f"{ours['step_s']:.2f} s",
                f"{trl['step_s']:.2f} s" if trl else "–",
                f"{r['ratio']:.1f}" if trl else "–",
                f"≥ {r['workload']['goal']:g}" if r["workload"]["goal"] else "–",
                _pair(ours, trl, "rollout_tokens_s", "{:,.0f}"),
                _pair(ours, trl, "train_tokens_s", "{:,.0f}"),
                _pair(ours, trl, "peak_bytes", "{:.1f}", 1e9) + " GB",
                f"train {ours['train_share']:.0%}, decode {ours['decode_share']:.0%}",
            ]
        )
    return lines


def _pair(ours: Mapping[str, Any], trl: Mapping[str, Any] | None, key: str, form: str, unit: float = 1.0) -> str:
    return " / ".join(form.format(side[key] / unit) for side in (ours, trl) if side)


def unmet(results: Mapping[str, Any]) -> list[str]:
    """Every goal that was not reached, with the limit that follows from the number of floating-point operations."""
    found = []
    for name, r in results["workloads"].items():
        ours, goal = r["ours"], r["workload"]["goal"]
        if "ratio" in r and r["ratio"] < goal:
            limit = r["trl"]["step_s"] / ours["floor_s"]
            found.append(
                f"**{name}: {r['ratio']:.1f} of {goal:g}.** The matrix products that every trainer must compute take "
                f"{ours['floor_s']:.2f} s at this process's GEMM rate of {ours['gemm_gflops']:.0f} GFLOP/s; ours takes "
                f"{ours['step_s']:.2f} s. At that limit the ratio would be {limit:.1f}.{_shares(r)}"
            )
        if name in _LEAN and r.get("memory_ratio", 0.0) > MEMORY_GOAL:
            found.append(
                f"**{name}: memory {r['memory_ratio']:.0%} of TRL's, goal {MEMORY_GOAL:.0%}.** Weights, gradients and "
                f"AdamW's two moments alone are {_state_bytes(r) / 1e9:.1f} GB, Python with torch and transformers 0.4."
            )
        for share, wanted in (("train_share", TRAIN_GOAL), ("decode_share", DECODE_GOAL)):
            if name == "small" and ours[share] < wanted:
                what = share.partition("_")[0]
                line = f"**{name}: {what} at {ours[share]:.0%} of the GEMM rate, goal {wanted:.0%}.**"
                if share == "train_share":
                    line += _shares(r, ("train",))
                if share == "decode_share":
                    rows = r["workload"]["num_prompts"] * r["workload"]["num_samples"]
                    line += (
                        f" A product of {rows} rows with this model's matrices runs at "
                        f"{ours['decode_gemm_gflops']:.0f} of {ours['gemm_gflops']:.0f} GFLOP/s, so "
                        f"{ours['decode_gemm_gflops'] / ours['gemm_gflops']:.0%} is the limit. The table of a step's "
                        "time below shows the rest: operators on a few thousand numbers each, and Python."
                    )
                found.append(line)
    return found


def _state_bytes(result: Mapping[str, Any]) -> float:
    return 16.0 * result["ours"]["num_parameters"]


def performance_page(results: Mapping[str, Any]) -> str:
    m = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in m["packages"].items())
    out = [
        "# Performance",
        "",
        "<!-- Generated by `gspo bench --write docs`. Do not edit. -->",
        "",
        "The same work on the same machine: `gspo train` and TRL's `GRPOTrainer` with",
        '`importance_sampling_level="sequence"`, alternately, each in its own process. Random weights,',
        "completions of a fixed length, two optimizer updates per rollout batch, no KL, float32. Pairs are ours / TRL.",
        "",
        f"{m['date']}, {m['processor']}, {m['threads']} threads, {m['memory_bytes'] / 2**30:.0f} GiB, no GPU.",
        f"{versions}.",
        *_older(results.get("dates", {}), m["date"]),
        "",
        *markdown_table(workload_table(results)),
        "",
        *markdown_table(_sizes_table(results["workloads"])),
        "",
        "TRL runs with the settings that made it fastest here: one device batch per mini-batch, one generation per",
        "rollout batch, no gradient accumulation or checkpointing, no reference model. GEMM rate: the median of",
        "products of 2048 × 1024 × 1536 in the same process, before and after. Shares count the products of",
        "weights only, prompts once per group.",
        *_remarks(results["workloads"]),
    ]
    if missed := unmet(results):
        out += ["", "## Goals not met, and why", "", *(f"- {line}" for line in missed)]
    out += _profile_section(results["workloads"])
    if results.get("sampler"):
        out += [
            "",
            "## Sampling alone",
            "",
            "SmolLM2-135M's config, alternately, each in its own process; completions of a fixed length, log-probs",
            "recorded. The last column is the others' CPU seconds ÷ ours.",
            "",
            *markdown_table(sampler_table(results["sampler"])),
        ]
    if results.get("memory"):
        out += ["", *memory_lines(results["memory"])]
    if results.get("sweep"):
        out += ["", "## How cost grows", "", "![seconds per step](img/performance_sweep.png)", ""]
        out += [
            "Tiny's model, 8 prompts. Sizes that are not varied: 64 prompt tokens, G = 8, 32 new tokens.",
            "Slopes by least squares. Not shared: plain packing with the model's own attention over the whole row.",
            "",
            *markdown_table(_sweep_table(results["sweep"])),
        ]
    return "\n".join(out) + "\n"


def _older(dates: Mapping[str, str], newest: str) -> list[str]:
    """A sentence about the parts that were measured before the date of the page, perhaps with other versions."""
    old = ", ".join(f"{part} ({date})" for part, date in dates.items() if date != newest)
    return [f"Measured earlier, with the versions of that day: {old}."] if old else []


def _sizes_table(workloads: Mapping[str, Any]) -> list[list[str]]:
    """The size of each workload, and the seconds of every round."""
    rows = [["workload", "model", "prompts × G", "prompt / new tokens", "seconds per step, each round: ours, TRL"]]
    for name, r in workloads.items():
        w = r["workload"]
        model = _MODELS.get(name, "SmolLM2-135M's config")
        if w["flat_of_8"]:
            model += f", {w['flat_of_8']} of 8 groups with equal rewards"
        rounds = ", ".join(f"{s:.2f}" for s in r["ours"]["rounds_s"])
        if "trl" in r:
            rounds += "; " + ", ".join(f"{s:.2f}" for s in r["trl"]["rounds_s"])
        shown = f" + {w['visual_tokens']} of an image" if w.get("visual_tokens") else ""
        new = str(w["new_tokens"])
        if w.get("num_turns", 1) > 1:
            new = f"{w['num_turns']} turns of {new}, {w['reply_tokens']} of the environment between them"
        prompts = f"{w['num_prompts']} × {w['num_samples']}"
        rows.append([name, model, prompts, f"{w['prompt_tokens']}{shown} / {new}", rounds])
    return rows


def _remarks(workloads: Mapping[str, Any]) -> list[str]:
    out = [
        f"Images through the vision tower per step of {name}: {r['ours']['tower_images']:g} / "
        f"{r['trl']['tower_images']:g}. CPU seconds: {r['ours']['cpu_s']:.1f} / {r['trl']['cpu_s']:.1f}."
        for name, r in workloads.items()
        if r["workload"].get("visual_tokens") and "trl" in r
    ]
    tiny = workloads.get("tiny", {})
    if "trl_default" in tiny:
        out.append(
            f"With TRL's default device batch of 8, tiny takes {tiny['trl_default']['step_s']:.2f} s per step, "
            f"{tiny['ratio_default']:.1f} times ours."
        )
    return out


def _profile_section(workloads: Mapping[str, Any]) -> list[str]:
    profiled = {name: r["breakdown"] for name, r in workloads.items() if "breakdown" in r}
    if not profiled:
        return []
    out = [
        "",
        "## Where a step's time goes",
        "",
        "Self time of one step by kind of work, from the timeline that `profile=true` writes. Recording slows",
        "small operators down, so the time outside operators (Python, allocation) is an upper bound.",
        "",
        *markdown_table(_breakdown_table(profiled)),
    ]
    tiny_share = workloads.get("tiny", {}).get("ours", {}).get("bookkeeping_share")
    if tiny_share is not None:
        out += ["", f"Bookkeeping (metrics, sample files) takes {tiny_share:.1%} of a step of tiny."]
    return out


def _breakdown_table(profiled: Mapping[str, Any]) -> list[list[str]]:
    kinds = max((list(shares) for phases in profiled.values() for shares in phases.values()), key=len)
    rows = [["workload", "phase", *kinds]]
    for name, phases in profiled.items():
        # Older timelines have fewer kinds.
        rows += [[name, phase, *(f"{shares.get(kind, 0):.0%}" for kind in kinds)] for phase, shares in phases.items()]
    return rows


def _sweep_table(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    arms = list(lines[0]["slope"])
    rows = [["one more", *(f"{arm}, ms" for arm in arms)]]
    names = {"prompt_tokens": "prompt token", "num_samples": "sample per prompt", "new_tokens": "new token"}
    return rows + [[names[line["axis"]], *(f"{line['slope'][arm] * 1e3:.2f}" for arm in arms)] for line in lines]


def _shares(result: Mapping[str, Any], phases: Sequence[str] = ("rollout", "train")) -> str:
    """The parts of a step's time by the profile, as a sentence; empty without a profile."""
    found = [
        f"{phase} is {shares['matrix products'] + shares.get('compiled layers', 0.0):.0%} matrix products and compiled "
        f"layers, {shares['other operators']:.0%} small operators and {shares['outside operators']:.0%} Python"
        for phase, shares in result.get("breakdown", {}).items()
        if phase in phases
    ]
    return f" In the profile, {'; '.join(found)}." if found else ""


def plot(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Seconds per step against each length, measured points and fitted lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(1, len(lines), figsize=(4 * len(lines), 3.4), layout="constrained")
    colours = {"ours": "#0072B2", "ours, prefix not shared": "#56B4E9", "TRL": "#D55E00"}
    for axis, line in zip(np.atleast_1d(axes), lines, strict=True):
        x = np.array(line["values"])
        for arm, seconds in line["seconds"].items():
            slope = line["slope"][arm]
            fitted = np.mean(seconds) + slope * (x - x.mean())
            axis.plot(x, seconds, "o", color=colours[arm], label=arm)
            axis.plot(x, fitted, color=colours[arm], linewidth=1)
        axis.set_xlabel(LABELS[line["axis"]])
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    np.atleast_1d(axes)[0].set_ylabel("seconds per step")
    np.atleast_1d(axes)[0].legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)

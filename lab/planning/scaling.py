"""How a run scales from 8 to 4,096 GPUs, simulated: `python -m lab.planning.scaling` writes docs/scaling.md.

Nothing here was measured on a GPU. One batch size for all clusters (strong scaling): 512 prompts × 16 samples. Results
are kept in docs/results/scaling.json after each cluster; a second call simulates only what is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.planning.search import PlannedJob, best_bound, best_plan
from lab.planning.simulation import GPUS, LEADER, MODELS, SerialCost, Work, lognormal_lengths
from lab.planning.validate import write_section

SIZES = (8, 32, 128, 512, 2048, 4096)
BOUND_SIZES = (32, 128, 512, 1024, 2048, 4096)
FEWEST_PLANNED = 128  # the plan is for large clusters
ETA = 4
# Most new tokens → mean and spread of the lengths (log-normal, cut).
LENGTHS = {2048: (1000.0, 0.6), 32768: (8000.0, 0.8)}
# Rank 0 as the only producer costs LEADER per sample; with eight producers each has an eighth of the samples.
EIGHTH = SerialCost(LEADER.sample_s / 8, LEADER.token_s / 8)
MODES = {
    "synchronous": "η = 0, all GPUs sample, then all train",
    "asynchronous": f"η = {ETA}, the best split of the GPUs",
    "planned": f"η = {ETA}, after the plan of docs/scaling.md: pipelined weights, eight producers",
}
BEGIN, END = "<!-- simulated: `python -m lab.planning.scaling` -->", "<!-- end of simulated -->"
# Published runs: GPU, GPUs, mean and spread of lengths, most new tokens, η, seconds per step without and with η.
# verl's lengths follow from its synchronous rows (docs/scaling.md); AReaL's are not published.
PUBLISHED = (
    ("verl, 7B", "H20", 32, 1640.0, 0.75, 28672, 1, 790.1, 294.8),
    ("verl, 7B", "H20", 64, 1640.0, 0.75, 28672, 1, 365.3, 189.3),
    ("verl, 7B", "H20", 128, 1640.0, 0.75, 28672, 1, 356.3, 150.6),
    ("AReaL, 7B", "H800", 192, 5000.0, 0.8, 27648, 4, 207.7, 91.4),
)


def job_on(model: str, gpu: str, num_gpus: int, mean: float, spread: float, most: int) -> PlannedJob:
    work = Work(512, 16, 256, lognormal_lengths(mean, spread, most), num_steps=5)
    mb_tokens = max(16384, most + 256)
    return PlannedJob(MODELS[model], GPUS[gpu], num_gpus, work, mean, most + 256, mb_tokens=mb_tokens)


def cell_job(model: str, most: int, num_gpus: int, mode: str) -> PlannedJob:
    job = job_on(model, "H100", num_gpus, *LENGTHS[most], most)
    return replace(job, pipelined=True, leader=EIGHTH) if mode == "planned" else job


def simulate_cell(model: str, most: int, num_gpus: int, mode: str) -> dict[str, Any] | None:
    """None if the model does not fit on so few GPUs."""
    return _row(cell_job(model, most, num_gpus, mode), 0 if mode == "synchronous" else ETA)


def _row(job: PlannedJob, eta: int) -> dict[str, Any] | None:
    found = best_plan(job, eta, num_simulated=2)
    if found is None:
        return None
    result = found.result
    return {
        "step_s": result.step_s,
        "tokens_per_s": result.tokens_per_s,
        "trainers": found.trainers,
        "servers": found.samplers,
        "gpus_per_server": found.tensor_parallel,
        "limit": found.limit,
        "busy": {name: round(share, 3) for name, share in result.busy.items()},
        "staleness": result.staleness,
        "weights_s": found.parts.weights,
    }


def scaling_table(results: Mapping[str, Any]) -> list[str]:
    """One line per model, length and cluster."""
    lines = [
        "| model | most tokens | GPUs | synchronous, s/step | asynchronous | gain | train : servers | limit | "
        "efficiency | planned, s/step | limit |",
        "|" + "---|" * 11,
    ]
    for model in MODELS:
        for most in LENGTHS:
            sizes = [n for n in SIZES if f"{model}/{most}/{n}/asynchronous" in results]  # those simulated so far
            cells = {n: {m: results.get(f"{model}/{most}/{n}/{m}") for m in MODES} for n in sizes}
            first = next((n for n in sizes if cells[n]["asynchronous"]), None)
            lines += [_line(model, most, n, cells[n], first, cells) for n in sizes]
    return lines


def _line(model: str, most: int, n: int, cell: Mapping[str, Any], first: int | None, cells: Mapping[int, Any]) -> str:
    turns, ahead, planned = (cell[mode] for mode in MODES)
    words = [model, f"{most // 1024}k", f"{n:,}", f"{turns['step_s']:.0f}" if turns else "–"]
    if ahead is None or first is None:
        return f"| {' | '.join([*words, *['–'] * 7])} |"
    gain = f"{turns['step_s'] / ahead['step_s']:.1f}" if turns else "–"
    base = cells[first]["asynchronous"]
    efficiency = ahead["tokens_per_s"] / n / (base["tokens_per_s"] / first)
    split = f"{ahead['trainers']:,} : {ahead['servers']:,} × {ahead['gpus_per_server']}"
    words += [f"{ahead['step_s']:.0f}", gain, split, ahead["limit"], f"{efficiency:.0%}"]
    words += [f"{planned['step_s']:.0f}", planned["limit"]] if planned else ["–", "–"]
    return f"| {' | '.join(words)} |"


def bound_table() -> list[str]:
    """Seconds per step if nothing ever waits, and the slowest component: computed at once, for all sizes."""
    lines = [f"| model | most tokens | {' | '.join(f'{n:,} GPUs' for n in BOUND_SIZES)} |", "|---" * 8 + "|"]
    for model in MODELS:
        for most in LENGTHS:
            for mode in ("asynchronous", "planned"):
                found = [best_bound(cell_job(model, most, n, mode), ETA) for n in BOUND_SIZES]
                shown = [f"{one[0]:.0f} ({one[1].removeprefix('trainer: ')})" if one else "–" for one in found]
                lines.append(f"| {model}{', planned' * (mode == 'planned')} | {most // 1024}k | {' | '.join(shown)} |")
    return lines


def published_table(results: Mapping[str, Any]) -> list[str]:
    lines = [
        "| run | GPUs | synchronous: published / simulated, s | asynchronous | gain: published / simulated |",
        "|---|---|---|---|---|",
    ]
    for name, gpu, n, *_, turns, ahead in PUBLISHED:
        cell = results.get(f"{name}/{n}")
        if cell:
            ours, theirs = cell["synchronous"]["step_s"], cell["asynchronous"]["step_s"]
            lines.append(
                f"| {name} | {n} × {gpu} | {turns:.0f} / {ours:.0f} | {ahead:.0f} / {theirs:.0f} | "
                f"{turns / ahead:.1f} / {ours / theirs:.1f} |"
            )
    return lines


def plot_scaling(results: Mapping[str, Any], path: Path) -> None:
    """Tokens per second against GPUs, one panel per model and length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [(model, most) for model in MODELS for most in LENGTHS]
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.4), layout="constrained", sharex=True)
    colours = {"synchronous": "#999999", "asynchronous": "#0072B2", "planned": "#D55E00"}
    for axis, (model, most) in zip(axes, panels, strict=True):
        for mode, colour in colours.items():
            found = {n: cell for n in SIZES if (cell := results.get(f"{model}/{most}/{n}/{mode}"))}
            axis.plot(list(found), [c["tokens_per_s"] for c in found.values()], "o-", color=colour, label=mode)
            if mode == "asynchronous" and found:
                n, cell = next(iter(found.items()))
                ideal = [cell["tokens_per_s"] / n * size for size in SIZES]
                axis.plot(SIZES, ideal, ":", color="#000000", linewidth=1, label="linear")
        axis.set(
            xscale="log", yscale="log", xlabel="GPUs (H100)", title=f"{MODELS[model].name}, {most // 1024}k tokens"
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("sampled tokens/s, simulated")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _simulate_missing(results: Mapping[str, Any], keep: Callable[[str, Any, float], None]) -> None:
    for name, gpu, n, mean, spread, most, eta, *_ in PUBLISHED:
        if f"{name}/{n}" not in results:
            begin, job = time.monotonic(), job_on("7B", gpu, n, mean, spread, most)
            keep(f"{name}/{n}", {"synchronous": _row(job, 0), "asynchronous": _row(job, eta)}, begin)
    for cell in [(model, most, n, mode) for n in SIZES for model in MODELS for most in LENGTHS for mode in MODES]:
        name = "/".join(map(str, cell))
        if name not in results and (cell[2] >= FEWEST_PLANNED or cell[3] != "planned"):
            begin = time.monotonic()
            keep(name, simulate_cell(*cell), begin)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.planning.scaling", description=__doc__)
    parser.add_argument("--docs", type=Path, default=Path("docs"), metavar="DIR", help="folder of scaling.md")
    parser.add_argument("--fresh", action="store_true", help="simulate again what is in results/scaling.json")
    parser.add_argument("--table", action="store_true", help="simulate nothing; write the page from the results")
    args = parser.parse_args(argv)
    file = args.docs / "results" / "scaling.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() and not args.fresh else {}

    def keep(name: str, cell: Any, begin: float) -> None:
        results[name] = cell
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

    if not args.table:
        _simulate_missing(results, keep)
    page = args.docs / "scaling.md"
    lines = ["![tokens per second](img/scaling.png)", "", *scaling_table(results), "", "## Bounds", ""]
    lines += ["Seconds per step if no component ever waits for another, and the slowest one; no simulation.", ""]
    lines += [*bound_table(), "", "## Beside published runs", "", *published_table(results)]
    write_section(page, BEGIN, END, lines)
    plot_scaling(results, args.docs / "img" / "scaling.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`gspo bench`: arguments and output of the measurements of a step, beside TRL's trainer or another commit."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from gspo.cli.common import console
from gspo.errors import ConfigError
from gspo.system import install_command
from lab.bench.workloads import WORKLOADS


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload",
        action="append",
        choices=[*WORKLOADS, "door", "sampler", "memory", "sweep"],
        help="default: all; may be repeated",
    )
    parser.add_argument("--no-peer", action="store_true", help="do not measure TRL")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="processes per trainer (default: depends on the workload)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps per process; the first is not counted")
    parser.add_argument(
        "--write", metavar="DIR", help="write performance.md, performance.json and the plot to this folder"
    )
    parser.add_argument(
        "--compare", metavar="REF", help="compare this tree with a commit, step by step; exit code 1 if it is slower"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.05,
        metavar="X",
        help="with --compare: slower by more than this share (default: 0.05)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def bench(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from rich.table import Table

    from lab.bench import compare, door, page, sampler
    from lab.memory import measure_settings

    if (args.steps is not None and args.steps < 2) or (args.rounds is not None and args.rounds < 1):
        raise ConfigError("--steps must be 2 or more (the first is not counted), --rounds 1 or more")
    if args.compare:
        return _bench_commits(args)
    peer = not args.no_peer
    if peer and not compare.has_peer():
        raise ConfigError(f"TRL is not installed: run {install_command('bench')}, or leave TRL out with --no-peer")
    if args.write and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--write draws a plot, and matplotlib is not installed: {install_command('bench')}")

    fresh: dict[str, Any] = {"machine": compare.machine(), "workloads": {}}
    for name in args.workload or [*WORKLOADS, "door", "sampler", "memory", "sweep"]:
        if name == "sweep":
            fresh["sweep"] = compare.sweep(peer=peer, say=say)
        elif name == "memory":
            fresh["memory"] = measure_settings(say)
        elif name == "door":
            fresh["door"] = door.compare_doors(args.rounds, say)
        elif name == "sampler":
            fresh["sampler"] = sampler.compare_samplers(args.rounds, say)
        else:
            w = WORKLOADS[name]
            w = replace(w, rounds=args.rounds or w.rounds, steps=args.steps or w.steps)
            fresh["workloads"][name] = compare.compare_with_trl(w, peer=peer, say=say)
        if args.write:  # after each workload, so that an interruption loses only one
            page.write_performance(Path(args.write), page.merge(Path(args.write) / "performance.json", fresh))
    if args.json:
        print(json.dumps(fresh))
        return 0
    tables = [page.workload_table(fresh)] if fresh["workloads"] else []
    tables += [door.door_table(fresh["door"])] if "door" in fresh else []
    for head, *body in [*tables, *([sampler.sampler_table(fresh["sampler"])] if "sampler" in fresh else [])]:
        view = Table(*head, box=None, pad_edge=False)
        for row in body:
            view.add_row(*row)
        console().print(view)
    for line in page.unmet(fresh):
        console().print(line.replace("**", ""))
    return 0


def _bench_commits(args: argparse.Namespace) -> int:
    """`gspo bench --compare REF`: 1 if a workload is slower than before."""
    from dataclasses import replace

    from lab.bench.commits.compare import compare_commits, line_of

    names = args.workload or ["tiny"]
    if {"sweep", "door", "sampler", "memory"} & set(names) or args.write or args.no_peer or args.threshold < 0:
        raise ConfigError(
            "--compare takes --workload (a trained one), --rounds, --steps, --json and --threshold of 0 or more; it "
            "measures no other trainer and writes no page"
        )
    found = []
    for name in names:
        w = WORKLOADS[name]
        w = replace(w, rounds=args.rounds or w.rounds, steps=args.steps or max(w.steps, 5))
        found.append(compare_commits(w, args.compare, threshold=args.threshold, say=say))
    if args.json:
        print(json.dumps(found))
    else:
        for one in found:
            print(line_of(one))
    return 1 if any(one["slower"] for one in found) else 0


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

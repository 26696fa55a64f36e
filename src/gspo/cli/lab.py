"""`gspo bench`, `gspo study`, `gspo plan`: speed beside TRL, experiments on the paper's claims, simulated clusters."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.table import Table

from gspo.cli.common import console, load_config
from gspo.errors import ConfigError


def study(args: argparse.Namespace) -> int:
    from gspo.studies import Choice, command

    if args.what not in ("list", "run", "show", "page"):  # gspo study clipping: run it
        args.names, args.what = [args.what, *args.names], "run"
    if args.what == "run":
        if args.jobs < 1 or (args.seeds is not None and args.seeds < 1):
            raise ConfigError("--jobs and --seeds must be 1 or more")
        return command.run_studies(
            args.names,
            Choice(args.full, args.only, args.seeds),
            docs=Path(args.docs),
            runs=Path(args.runs),
            num_parallel=args.jobs,
            console=console(),
        )
    if args.what == "page":
        print(command.generate_page(Path(args.docs)))
    elif args.what == "show":
        command.show(args.names, Path(args.docs), console())
    else:
        command.listing(Path(args.docs), console())
    return 0


def plan(args: argparse.Namespace) -> int:
    from gspo.planner import job_of, lengths_of_run, parse_gpus, plans, row_of

    gpu, num_gpus = parse_gpus(args.gpus)
    if args.length is not None and args.run is not None:
        raise ConfigError("--length and --run are two sources of the same lengths: give one of them")
    job = job_of(
        load_config(args).config,
        gpu,
        num_gpus,
        model=args.model,
        mean_length=args.length,
        prompt_tokens=args.prompt,
        recorded=lengths_of_run(args.run) if args.run else (),
        reward_s=args.reward_s,
    )
    found = [row_of(job, one) for one in plans(job)]
    if args.json:
        print(json.dumps({"simulated": True, "model": job.model.name, "gpus": args.gpus, "plans": found[: args.top]}))
        return 0
    table = Table(title=f"Simulated, not measured: {job.model.name} on {num_gpus} × {gpu.name}", title_justify="left")
    for name in ("train", "sample", "η", "s/step", "tokens/s/GPU", "busy: sampler, trainer", "limit", "staleness"):
        table.add_column(name)
    for row in found[: args.top]:
        servers = f"{row['servers']} × {row['gpus_per_server']}"
        table.add_row(
            f"{row['trainer_gpus']}{' (same GPUs)' if row['in_turns'] else ''}",
            servers,
            str(row["max_head_offpolicyness"]),
            f"{row['step_s']:.1f}",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['busy']['sampler']:.0%}, {row['busy']['trainer']:.0%}",
            row["limit"],
            f"{row['staleness']:.1f}",
        )
    console().print(table)
    print(
        "train: trainer GPUs; sample: servers × GPUs each; η: rollout.max_head_offpolicyness.\n"
        "docs/planning.md lists what is assumed."
    )
    return 0

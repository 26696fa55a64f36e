"""`python -m gspo.launcher.ranks --ranks N -- COMMAND…`: the ranks of one machine, started by torch's elastic launcher.

What is added to torchrun: signals reach every rank and the group is then waited for, the exit code is the first failed
rank's own, rank 0 speaks and the others write to files, and no rank outlives this process.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from gspo.system.process import tied

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gspo.launcher.ranks")
    parser.add_argument("--ranks", type=int, required=True, help="ranks on this machine")
    parser.add_argument("--nodes", type=int, default=1, help="machines with ranks")
    parser.add_argument("--meet", default="127.0.0.1:0", help="host:port of the first machine's store")
    parser.add_argument("--first", action="store_true", help="this machine holds the store")
    parser.add_argument("--logs", required=True, help="folder for what ranks other than the first say")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return run(command, args.ranks, args.nodes, args.meet, args.first, Path(args.logs))


def run(command: list[str], ranks: int, nodes: int, meet: str, first: bool, logs: Path) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # a rank's own words are the first to be read
    for number in FORWARDED:
        signal.signal(number, _forward)
    logs.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=os.environ.get("GSPO_RUN_ID", "gspo"),
        role="trainer",
        rdzv_backend="c10d",
        rdzv_endpoint=meet,
        # Said, not guessed: torch would compare names, which a machine may have several of.
        rdzv_configs={} if nodes == 1 else {"is_host": str(first)},
        max_restarts=0,  # who starts it again is the launcher's decision, for all machines together
        local_addr="127.0.0.1" if nodes == 1 else None,
        logs_specs=DefaultLogsSpecs(str(logs), redirects=dict.fromkeys(range(1, ranks), Std.ALL)),
        signals_to_handle="SIGHUP",  # the others are forwarded, and ranks then end by themselves
    )
    entry, *arguments = tied(command)
    try:
        elastic_launch(config, entry)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code not in (0, 130):
            what = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            print(f"gspo: rank {rank} {what}{_last_words(rank, failure.local_rank, logs)}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    return 0


def _forward(number: int, _: object) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for pid in children:
        os.kill(int(pid), number)


def _last_words(rank: int, local_rank: int, logs: Path) -> str:
    """The end of a rank's log; rank 0 has said it already."""
    if local_rank == 0:
        return ""
    files = sorted(logs.glob(f"*/attempt_*/{local_rank}/stderr.log"), key=lambda file: file.stat().st_mtime)
    words = files[-1].read_text(errors="replace").strip().splitlines()[-15:] if files else []
    return "".join(f"\n  {line}" for line in words)


if __name__ == "__main__":
    sys.exit(main())

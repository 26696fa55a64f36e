"""`python -m gspo.launcher.ranks --ranks N -- COMMAND…`: the ranks of one machine, started by torch's elastic launcher.

Added to torchrun: signals are forwarded to every rank, the exit code is that of the first failed rank, rank 0 writes to
the terminal and the others to files, and all ranks are killed when this process ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from gspo.system import describe_exit, dying_with_parent, last_lines, own_children, program, shell_code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gspo.launcher.ranks")
    parser.add_argument("--ranks", type=int, required=True, help="ranks on this machine")
    parser.add_argument("--nodes", type=int, default=1, help="machines with ranks")
    parser.add_argument("--rendezvous", default="127.0.0.1:0", help="host:port of torch's store on the first machine")
    parser.add_argument("--is-host", action="store_true", help="this machine runs the store")
    parser.add_argument("--logs", required=True, help="folder for the output of all ranks but the first")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return run_ranks(command, args.ranks, args.nodes, args.rendezvous, args.is_host, Path(args.logs))


def run_ranks(command: list[str], ranks: int, nodes: int, rendezvous: str, is_host: bool, logs: Path) -> int:
    stopped_by: list[int] = []

    def forward(number: int, _: object) -> None:
        stopped_by.append(number)
        for pid in own_children():
            os.kill(pid, number)

    # Before torch is imported, which takes seconds.
    for number in program.STOP_SIGNALS:
        signal.signal(number, forward)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # a rank's own error is shown instead
    logs.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=os.environ.get("GSPO_RUN_ID", "gspo"),
        role="trainer",
        rdzv_backend="c10d",
        rdzv_endpoint=rendezvous,
        # Explicit: torch would compare host names, and a machine may have several.
        rdzv_configs={} if nodes == 1 else {"is_host": str(is_host)},
        max_restarts=0,  # restarts are the launcher's decision, for the ranks of all machines together
        local_addr="127.0.0.1" if nodes == 1 else None,
        logs_specs=DefaultLogsSpecs(str(logs), redirects=dict.fromkeys(range(1, ranks), Std.ALL)),
        signals_to_handle="SIGHUP",  # the other signals are forwarded, and the ranks then end by themselves
    )
    if stopped_by:
        return program.INTERRUPTED
    entry, *arguments = dying_with_parent(command)
    try:
        elastic_launch(config, entry)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if -code in stopped_by:  # the signal came before the rank could handle it
            return program.INTERRUPTED
        if code not in (0, program.INTERRUPTED):
            log = _end_of_log(failure.local_rank, logs)
            print(f"gspo: rank {rank} {describe_exit(code)}{log}", file=sys.stderr)
        return shell_code(code)
    return 0


def _end_of_log(local_rank: int, logs: Path) -> str:
    """The last lines of a rank's log; none for the first rank, which writes to the terminal."""
    files = sorted(logs.glob(f"*/attempt_*/{local_rank}/stderr.log"), key=lambda file: file.stat().st_mtime)
    return last_lines(files[-1], 15) if files and local_rank else ""


if __name__ == "__main__":
    sys.exit(main())

"""`python -m gspo.launcher --config RESOLVED [--on ray] -- COMMAND…`: launch a command that trains with this config.

For programs: `Trainer.train()` in a script relaunches the script with it, and a Slurm job starts its run with it.
"""

from __future__ import annotations

import argparse
import sys

from gspo.config import load
from gspo.errors import ConfigError, GspoError
from gspo.launcher.start import LAUNCHERS, launch, run_here, with_scheduler
from gspo.system import program


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gspo.launcher", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", required=True)
    parser.add_argument("--on", choices=LAUNCHERS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        return run_here(launch(with_scheduler(load(args.config), args.on), command), command)
    except GspoError as error:
        print(f"gspo: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("gspo: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    program.run_main(main)

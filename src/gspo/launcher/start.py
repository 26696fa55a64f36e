"""Launch a config on this machine, on Ray or on Slurm: make a plan of its processes, then run the plan.

Three ways to start the same run, all of which end in `launch`:

    python3 -m gspo.launcher.ray examples/math/gsm8k_rl.py --config examples/math/gsm8k_gspo.yaml [key=value …]
    python3 examples/math/gsm8k_rl.py --config examples/math/gsm8k_gspo.yaml scheduler.type=ray
    gspo train examples/math/gsm8k_gspo.yaml --on ray

Imports are inside the functions so that `--help` and `--dry-run` start without torch and Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gspo.config import Config, Layout, Loaded
    from gspo.launcher.plan import LaunchPlan

LAUNCHERS = ("local", "ray", "slurm")


def launch(loaded: Loaded, command: Sequence[str], *, dry_run: bool = False) -> int | None:
    """Run `command`, the trainer's command line, with the launcher that scheduler.type names.

    Returns the exit code, or None if the plan is one process on this machine: the caller then runs it itself.
    """
    # Imports inside functions keep the start of the command fast.
    from gspo.launcher.plan import make_launch_plan, plan_text
    from gspo.lint import check
    from gspo.system import visible_gpus

    # A dry run prints the plan without checking the config.
    if not dry_run:
        check(loaded)
    config = loaded.config
    on, restarts = config.scheduler.type or "local", config.scheduler.restarts
    plan = make_launch_plan(config, command, visible_gpus())
    if not dry_run and on == "local":
        require_machine(config, plan.layout, visible_gpus())
    if dry_run:
        print(plan_text(plan, on))
        if on == "slurm":
            from gspo.launcher.slurm import render

            print("\n" + render(plan, config.scheduler.slurm, command, restarts), end="")
        return 0
    if on == "local":
        if plan.layout.is_one_process:
            return None
        from gspo.launcher import local

        with _write_launch_files(loaded, plan):
            return local.run(plan, restarts=restarts, say=_say)
    if on == "ray":
        from gspo.launcher import ray

        with _write_launch_files(loaded, plan):
            return ray.run(plan, restarts=restarts, say=_say)
    # A job may wait for days, and its own launcher takes the lock.
    _write_launch_files(loaded, plan).close()
    from gspo.launcher import slurm

    return slurm.run(plan, config.scheduler.slurm, command, restarts=restarts, say=_say)


def require_machine(config: Config, layout: Layout, num_gpus: int) -> None:
    """ConfigError if this machine lacks GPUs or the inference engine, before any process is started."""
    from gspo.config import ENGINES, check_engine, flags_of
    from gspo.errors import ConfigError

    stated, sampler = config.cluster.n_gpus_per_node, layout.sampler
    if sampler is not None and ENGINES[sampler.name].is_external:
        on_cpu = not layout.gpus_per_node
        check_engine(sampler.name, flags_of(config), config.actor.path, on_cpu=on_cpu, count=sampler.data)
    if stated is not None and stated > num_gpus:
        raise ConfigError(
            f"cluster.n_gpus_per_node is {stated}, but this machine has {num_gpus} GPUs; remove the key (the number is "
            "detected), or set scheduler.type to ray or slurm. For several processes without GPUs set "
            "rollout.backend: local:d1 and actor.backend: fsdp:d2"
        )


def _write_launch_files(loaded: Loaded, plan: LaunchPlan) -> contextlib.ExitStack:
    """Create the folders and write the resolved config, which samplers and Slurm jobs read.

    Returns the lock of the launcher's folder: a second launcher would replace the servers of this one before its
    trainer has the lock of the run directory.
    """
    from gspo.config import dump
    from gspo.errors import ConfigError
    from gspo.runs import RunLock

    try:
        # Only tested here: the trainer takes this lock when it starts.
        plan.path.mkdir(parents=True, exist_ok=True)
        RunLock(plan.path).close()
        # 0700: the files name addresses of servers of this run.
        for folder in (plan.folder, plan.sampler_folder) if plan.samplers else (plan.folder,):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.ExitStack() as opened:
            opened.enter_context(contextlib.closing(RunLock(plan.folder)))
            # Registrations of an earlier launch would lead the trainer to servers that no longer exist.
            for stale in (*plan.sampler_folder.glob("sampler_*.json"), *plan.sampler_folder.glob("sampler_*.gone")):
                stale.unlink()
            # Written and renamed, so that a sampler never reads half a config.
            tmp = plan.config_file.with_suffix(".tmp")
            tmp.write_text(dump(loaded), encoding="utf-8")
            tmp.replace(plan.config_file)
            return opened.pop_all()
    except OSError as error:
        raise ConfigError(f"{plan.folder} cannot be written: {error.strerror}; set cluster.fileroot") from error


def _say(message: str) -> None:
    with contextlib.suppress(OSError):  # the terminal was closed; the run goes on
        print(f"gspo: {message}", file=sys.stderr, flush=True)


def main(on: str, argv: Sequence[str] | None = None) -> int:
    """`python3 -m gspo.launcher.<on> [--dry-run] SCRIPT --config YAML [key=value …]`; returns the exit code."""
    from gspo.config import load
    from gspo.errors import ConfigError, GspoError

    parser = argparse.ArgumentParser(
        prog=f"python3 -m gspo.launcher.{on}",
        description=f"Run a training script with scheduler.type={on}. The script takes --config and overrides.",
        allow_abbrev=False,
    )
    parser.add_argument("--dry-run", action="store_true", help="print the plan and exit")
    parser.add_argument("script", help="for example examples/math/gsm8k_rl.py")
    parser.add_argument("--config", required=True, metavar="YAML")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    command = [sys.executable, args.script, "--config", args.config, *args.overrides]
    try:
        loaded = with_scheduler(load(args.config, args.overrides), on)
        return run_here(launch(loaded, command, dry_run=args.dry_run), command)
    except GspoError as error:
        _say(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def run_here(code: int | None, command: Sequence[str]) -> int:
    """Return the exit code of `launch`; if it is None, replace this process by the command."""
    if code is None:
        from gspo.launcher.local import exec_process
        from gspo.launcher.plan import Process
        from gspo.system import Launched

        exec_process(Process("trainer", 0, tuple(command), Launched(is_launched=True).write()))
    return code or 0


def with_scheduler(loaded: Loaded, on: str | None) -> Loaded:
    """The config with scheduler.type set to `on`, if the command line gave one."""
    if on is None or loaded.config.scheduler.type == on:
        return loaded
    from gspo.config import Origin

    scheduler = loaded.config.scheduler.model_copy(update={"type": on})
    config = loaded.config.model_copy(update={"scheduler": scheduler})
    return replace(loaded, config=config, origins={**loaded.origins, "scheduler.type": Origin("command line")})

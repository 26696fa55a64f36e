"""`gspo train`: launch the processes of a config, or be one of them; then print the results."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from gspo.cli.common import console, display, load_config
from gspo.config import Config, Loaded, load
from gspo.errors import ConfigError
from gspo.faults import reached
from gspo.launcher import launch, with_scheduler
from gspo.lint import check
from gspo.system import beat, inert, install_command


def train(args: argparse.Namespace) -> int:
    loaded = with_scheduler(load_config(args), args.on)
    if args.new:
        # As an override, so that the processes of a launcher and a resume get the same name.
        args.words.append(f"trial_name={free_trial_name(loaded.config)}")
        loaded = with_scheduler(load_config(args), args.on)
        print(f"gspo: the run is {loaded.config.run_path}", file=sys.stderr, flush=True)
    teacher = loaded.config.teacher
    for key, path in (("actor.path", loaded.config.actor.path), ("teacher.path", teacher and teacher.path)):
        if path and (model := model_of_run(path, key)) is not None:
            args.words.append(f"{key}={json.dumps(str(model))}")
            loaded = with_scheduler(load_config(args), args.on)
    # Imports and the report may take long on a slow disk; the trainer sets the exact limit for its own part.
    return _train(args, loaded) if args.seeds is None else _train_seeds(args, loaded.config)


def _train_seeds(args: argparse.Namespace, config: Config) -> int:
    """`--seeds N`: trial_name-s1 … -sN, one after the other; then their mean and its interval over the seeds."""
    if args.seeds < 1 or args.new:
        raise ConfigError("--seeds must be 1 or more, and not with --new: pass another trial_name for new runs")
    given, runs = args.words, list[Path]()
    for seed in range(1, args.seeds + 1):
        args.words = [*given, f"seed={seed}", f"trial_name={config.trial_name}-s{seed}"]
        loaded = with_scheduler(load_config(args), args.on)
        runs.append(loaded.config.run_path)
        if code := _train(args, loaded):
            print(f"gspo: run {seed} of {args.seeds} has not ended; the same command resumes it", file=sys.stderr)
            return code
    if not args.dry_run:
        from gspo.report import compare, compare_view

        console().print(compare_view(compare(runs), display()["width"], inert))
    return 0


def model_of_run(path: str, key: str) -> Path | None:
    """The best checkpoint of a run directory as a model folder, exported if it is not there; None: not a run.

    So that a run can start where another one ended: `actor.path: runs/sft_then_gspo/sft`.
    """
    from gspo.report import choose_step, is_run

    run = Path(path)
    if not is_run(run):
        return None
    step = choose_step(run, "best") or choose_step(run, "last")
    to = run / f"model_step_{step:06d}"
    if not to.is_dir():
        from gspo.train import export

        config = load(run / "config.yaml").config
        export(config, run, step, to, merge=config.actor.use_lora)
    print(f"gspo: {key} is the run {run}; using its step {step}, {to}", file=sys.stderr, flush=True)
    return to


def _train(args: argparse.Namespace, loaded: Loaded) -> int:
    from gspo.train import is_launched

    given = [*(["--config", args.config] if args.config else []), *args.words, *(["--on", args.on] if args.on else [])]
    if args.dry_run or not is_launched():
        code = launch(loaded, [sys.executable, "-m", "gspo", "train", *given], dry_run=args.dry_run)
        if code is not None:
            return code
    check(loaded)  # errors are raised here, before torch is imported; the loop prints the warnings
    config = loaded.config
    _announce_build(config.actor.path)
    path = config.run_path
    again = shlex.join(["gspo", "train", *given])
    beat("importing torch")
    reached("start.import")
    from gspo.report import advise, best_step, read_metrics, summarise
    from gspo.train import run

    before = max((row["step"] for row in read_metrics(path)), default=0)
    try:
        summary = run(loaded)
    except KeyboardInterrupt:
        print(f"gspo: interrupted; to resume from the last checkpoint, if there is one:\n  {again}", file=sys.stderr)
        return 130
    if int(os.environ.get("RANK", "0")):
        return 0  # only rank 0 reports; another exit code here would make torch kill rank 0 while it does
    if not summary.finished:
        show_run(path, f"Stopped and saved after step {summary.steps}.", {"resume": again})
        return 130  # stopped by a signal; the run can be resumed
    said = "Finished."
    if summary.steps == before:
        said = "This run was already finished; nothing was trained. Raise total_train_steps, or set another trial_name."
    advice = advise(path)
    if advice is not None and advice["verdict"] == "bad":
        show_run(path, said, {"what next": f"{advice['text']} {advice['more']}"})
        return 0
    if summarise(path).collapsed:
        show_run(path, f"{said} The reward or the held-out score ended below half of its best.", {})
        return 0
    name, step = shlex.quote(str(path)), "" if best_step(path) else " --step last"  # step 0 cannot be exported
    show_run(path, said, {"next": f"gspo eval {name} --samples 8", "": f"gspo export {name}{step}"})
    return 0


def preview(args: argparse.Namespace) -> int:
    if args.prompts < 1 or args.samples < 1:
        raise ConfigError("--prompts and --samples must be at least 1")
    loaded = load_config(args)
    check(loaded)
    _announce_build(loaded.config.actor.path)
    from gspo.train import preview

    shown = preview(loaded.config, args.prompts, args.samples)
    for number, item in enumerate(shown, 1):
        print(f"── prompt {number}, {item.num_tokens} tokens\n{inert(item.prompt)}")
        for text, reward in item.completions:
            print(f"── completion, reward {inert(reward)}\n{inert(text)}")
        print()
    rewards = {reward for item in shown for _, reward in item.completions}
    if len(rewards) == 1 and sum(len(item.completions) for item in shown) > 1:
        print(f"Every reward is {inert(rewards.pop())}: groups with equal rewards teach nothing. Check the reward.")
    return 0


def free_trial_name(config: Config) -> str:
    """The trial_name of the config, or with the first number from 2 on whose run directory does not exist."""
    name, number, parent = config.trial_name, 2, config.run_path.parent
    while (parent / name).exists():
        name, number = f"{config.trial_name}-{number}", number + 1
    return name


def _announce_build(model: str) -> None:
    """Say at once that a model is built first: importing torch alone takes seconds."""
    from gspo.models import cache, embedded

    if model in embedded.RECIPES and not cache.is_whole(embedded.embedded_folder(model)):
        print(f"gspo: first start: {model} is built on this machine, then training begins", file=sys.stderr, flush=True)


def show_run(path: Path, said: str, commands: Mapping[str, str]) -> None:
    """Print the results of a run, write its plot and page, and suggest the next commands."""
    from gspo.cli.reports import write_report_of
    from gspo.report import plot_run, run_view, summarise

    beat("writing the plot and the report")
    reached("end.report")
    try:
        drawn = str(plot_run(path) or "no step yet")
    except ImportError:
        drawn = f"training.png needs matplotlib: {install_command('report')}"
    look = f"gspo report {shlex.quote(str(path))} --open"
    try:
        write_report_of(path)
    except OSError as problem:
        look = f"report.html could not be written: {problem.strerror}"
    places = {"run": str(path), "plot": drawn, "report": look, **commands}
    print()
    console().print(run_view(said, summarise(path), {name: inert(text) for name, text in places.items()}), crop=False)

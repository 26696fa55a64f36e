"""`gspo eval`, `export` and `checkpoints`: what a run has made."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.cli.common import console, progress
from gspo.errors import ConfigError

if TYPE_CHECKING:
    from gspo.config.load import Loaded


def eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN|MODEL [key=value …]",
        help="a run directory, or a model: folder, hub name, .gguf file, smollm2-135m, embedded:tiny",
    )
    parser.add_argument(
        "--step", default="best", metavar="best|last|N", help="which checkpoint of a run; 0: before training"
    )
    parser.add_argument(
        "--data", metavar="PATH", help="problems: file, folder, hub name, embedded:arithmetic (valid_dataset.path)"
    )
    parser.add_argument("--split", metavar="NAME", help="test unless said; all: every row (valid_dataset.split)")
    parser.add_argument("--problems", metavar="N", help="how many, or all (evaluator.size)")
    parser.add_argument(
        "--samples", metavar="N", help="per problem; more than one are drawn, not greedy (eval_gconfig.n_samples)"
    )
    parser.add_argument("--greedy", action="store_true", help="the most likely token (eval_gconfig.greedy)")
    parser.add_argument("--temperature", metavar="T", help="draw at this temperature (eval_gconfig.temperature)")
    parser.add_argument("--max-new-tokens", metavar="N", help="longest completion (eval_gconfig.max_new_tokens)")
    parser.add_argument("--name", help="a run's result goes to RUN/eval_NAME.json")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object")


def evaluate(args: argparse.Namespace) -> int:
    target, loaded, run = _examined(args)
    step = 0
    if run is not None:
        from gspo.report.read import choose_step

        step = choose_step(run, args.step)
    from gspo.system.files import to_json, write_run_file
    from gspo.train.evaluate_run import examine

    with progress("answering") as tell:
        result = examine(loaded.config, run, step, tell)
    problems = result.pop("problems")
    file = None
    if run is not None:
        other = f"_{re.sub(r'[^A-Za-z0-9.]+', '-', args.data)}" if args.data else ""
        several = f"_n{result['num_samples']}" if result["num_samples"] > 1 else ""
        file = run / f"eval_{args.name or f'step_{step:06d}{other}{several}'}.json"
        with write_run_file(file) as tmp:
            tmp.write_text(to_json({"run": str(run), **result, "problems": problems}) + "\n", encoding="utf-8")
    if args.json:
        print(to_json({"target": target, **result}))
    else:
        from gspo.report.terminal import examination_view
        from gspo.system.text import inert

        console().print(examination_view(inert(_heading(target, result)), result))
        if file is not None:
            print(inert(f"written to {file}"))
    return 0


def _examined(args: argparse.Namespace) -> tuple[str, Loaded, Path | None]:
    """Who is examined and how: a run by its config, a model by the defaults; options are spellings of overrides."""
    from gspo.config.load import load
    from gspo.report.read import is_run, open_run

    words = list(args.words)
    if not words or "=" in words[0]:
        raise ConfigError("whom? Give a run directory (runs/quickstart/gspo) or a model (embedded:tiny, a folder)")
    target = words.pop(0)
    several = (args.samples or "1") != "1" or args.temperature is not None
    if args.greedy and several:
        raise ConfigError("--greedy gives the same completion every time: leave out --samples and --temperature")
    given = {
        "valid_dataset.path": args.data and json.dumps(args.data),
        "valid_dataset.split": args.split,
        "evaluator.size": "null" if args.problems == "all" else args.problems,
        "eval_gconfig.n_samples": args.samples,
        "eval_gconfig.temperature": args.temperature,
        "eval_gconfig.greedy": "true" if args.greedy else "false" if several else None,
        "eval_gconfig.max_new_tokens": args.max_new_tokens,
    }
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None] + words
    folder = Path(target)
    if is_run(folder):
        if args.data and not args.split:
            overrides.insert(0, "valid_dataset.split=test")
        return target, load(folder / "config.yaml", overrides), folder
    looks_like_a_path = target.startswith((".", "/", "~")) or target.count("/") > 1
    is_gguf = target.endswith(".gguf") and not folder.is_dir()
    if (folder.is_dir() or looks_like_a_path) and not is_gguf and not (folder / "config.json").is_file():
        open_run(folder)  # says what is missing and which runs are nearby
    if not any(word.startswith(("valid_dataset.path=", "train_dataset.path=")) for word in overrides):
        raise ConfigError(
            f"which problems should {target} answer? Give --data: a file, a hub name, embedded:arithmetic"
        )
    return target, load(None, [f"actor.path={json.dumps(target)}", *overrides]), None


def _heading(target: str, result: Mapping[str, Any]) -> str:
    """Who answered what, and how."""
    sampling, step = result["sampling"], result["step"]
    how = "greedy" if sampling["greedy"] else f"temperature {sampling['temperature']:g}"
    at = "" if step is None else ", before training" if step == 0 else f", step {step}"
    of = f"{result['num_problems']:,} problems of {result['data']} ({result['split']})"
    return f"{target}{at}: {of}, {result['num_samples']} × {how}"


def export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--step", default="best", metavar="best|last|N", help="which checkpoint")
    parser.add_argument("--to", metavar="DIR", help="a new or empty folder; unless said, RUN/model_step_N")
    parser.add_argument("--merge", action="store_true", help="of a LoRA run: a plain model, the adapter merged into it")


def export(args: argparse.Namespace) -> int:
    from gspo.config.load import load
    from gspo.report.read import choose_step, open_run

    run = open_run(args.run)
    step = choose_step(run, args.step)
    if step == 0:
        raise ConfigError(
            f"{run}: step 0 is the model before training{', and the best' if args.step == 'best' else ''}; "
            "there is nothing to export. Give --step last"
        )
    config = load(run / "config.yaml").config
    is_adapter = config.actor.use_lora and not args.merge
    to = Path(args.to) if args.to else run / f"{'adapter' if is_adapter else 'model'}_step_{step:06d}"
    from gspo.train.export import export

    export(config, run, step, to, merge=args.merge)
    print(f"step {step} of {run} → {to}\n  AutoModelForCausalLM.from_pretrained({str(to)!r})")
    if is_adapter:
        print("  This is the adapter alone: peft must be installed to load it. A plain model folder: --merge")
    return 0


def checkpoints_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare it with the manifest's sha256"
    )


def checkpoints(args: argparse.Namespace) -> int:
    from gspo.report.read import open_run, read_checkpoints
    from gspo.report.terminal import checkpoints_view

    run = open_run(args.run)
    found = read_checkpoints(run)
    damage = {c.step: _damage(c.path) for c in found} if args.verify else {}
    console().print(checkpoints_view(found, {step: what or "whole" for step, what in damage.items()}))
    return 1 if any(damage.values()) else 0


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by its manifest."""
    from gspo.errors import CheckpointError
    from gspo.runs.checkpoint import verify
    from gspo.system.text import inert

    try:
        verify(checkpoint)
    except CheckpointError as problem:
        return inert(f"DAMAGED: {problem}")
    return None

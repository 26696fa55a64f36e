"""The `gspo` command. Each verb imports what it needs when it runs, so help and doctor stay torch-free."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gspo import __version__
from gspo.cli import common, doctor, lists, look, measure, results, train
from gspo.errors import ConfigError, GspoError


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
        from gspo.system.text import inert

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
        raise ConfigError(f"{words[0]!r} is no verb{common.nearest(words[0], VERBS)}. `gspo --help` lists the verbs")
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


VERBS: dict[str, Verb] = {
    "train": Verb(
        "train CONFIG [--on local|ray|slurm] [--dry-run] [key=value …]",
        "train as a config says; the same command again goes on",
        train.train_arguments,
        train.train,
    ),
    "eval": Verb(
        "eval RUN|MODEL [--data PATH] [--samples N] [--step best|last|N] [key=value …]",
        "answer held-out problems: avg@n and pass@k with intervals",
        results.eval_arguments,
        results.evaluate,
    ),
    "report": Verb(
        "report RUN [--out FILE] [--open] [--max-mb MB]",
        "write what a run came to as one page: curves, clipping, samples",
        look.report_arguments,
        look.report,
    ),
    "watch": Verb(
        "watch RUN|DIR [--port N] [--open]",
        "the same page, live, from this machine alone",
        look.watch_arguments,
        look.watch,
    ),
    "export": Verb(
        "export RUN [--step best|last|N] [--to DIR] [--merge]",
        "write a run's weights as a folder that transformers loads",
        results.export_arguments,
        results.export,
    ),
    "models": Verb(
        "models [list | fetch NAME [--from FILE]]",
        "pretrained models: what can be fetched, what is here; fetch one",
        lists.models_arguments,
        lists.models,
    ),
    "bench": Verb(
        "bench [--workload NAME …] [--no-peer] [--json] [--write DIR]",
        "seconds, tokens/s and memory of a step beside TRL's trainer on equal work",
        measure.bench_arguments,
        measure.bench,
    ),
    "study": Verb(
        "study [list | run [NAME …] [--full] [--jobs N] [--only ARM] [--seeds N] | show [NAME …] | page]",
        "put the paper's claims to the test; results and docs/baselines.md",
        measure.study_arguments,
        measure.study,
    ),
    "checkpoints": Verb(
        "checkpoints RUN [--verify]",
        "list a run's checkpoints; with --verify, check every byte",
        results.checkpoints_arguments,
        results.checkpoints,
    ),
    "compare": Verb(
        "compare RUN RUN… [--out compare.html] [--metric NAME …]",
        "runs side by side: seeds as bands, keys that differ, what each came to",
        look.compare_arguments,
        look.compare,
    ),
    "doctor": Verb(
        "doctor CONFIG [key=value …] [--json] | --probe RUN|CONFIG [--step N] | --selftest [CONFIG]",
        "explain a config; --probe: the sampler's noise; --selftest: this machine",
        doctor.doctor_arguments,
        doctor.doctor,
    ),
    "objectives": Verb(
        "objectives [NAME]",
        "the table of objectives, or one's formula, paper and defaults",
        lists.objectives_arguments,
        lists.objectives,
    ),
    "config": Verb(
        "config CONFIG [key=value …]",
        "print the resolved config: every key, as a run writes it down",
        common.config_arguments,
        lists.config,
    ),
}

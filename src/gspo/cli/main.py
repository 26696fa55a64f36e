"""The `gspo` command: the table of verbs and their help. A verb imports its modules when it runs, so help is fast."""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gspo import __version__
from gspo.cli import chat, common, doctor, lab, project, reports, runs, train
from gspo.errors import ConfigError, GspoError
from gspo.system import heartbeat, laboratory, program

# The commands with a deadline: they end after the stall timeout without progress. The others wait for the user, or for
# runs that have their own, or do little.
_WATCHED = frozenset(
    ("train", "preview", "eval", "report", "export", "chat", "checkpoints", "compare", "doctor", "audit")
)


class Verb(NamedTuple):
    usage: str
    line: str  # one line for `gspo --help`
    arguments: Callable[[argparse.ArgumentParser], Any]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 failed run, 2 bad usage or config, 130 interrupted."""
    program.wait_without_spinning()
    if argv is None and sys.argv[1:2] and sys.argv[1] in _WATCHED:
        # Exits: signals and the stall timeout cover the rest of the process. Training shows its progress itself.
        program.run_main(lambda: main(sys.argv[1:]), math.inf if sys.argv[1] == "train" else heartbeat.NOTICE_S)
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # formulas on a terminal without UTF-8
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except GspoError as error:
        from gspo.shipped import with_pages
        from gspo.system import inert

        print(f"gspo: {inert(with_pages(str(error)))}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        # The reader of stdout (`| head`) has left, or else another pipe is broken, which is an error.
        if not program.stdout_is_closed():
            raise
        program.drop_stdout()
        return 0
    except KeyboardInterrupt:
        print("gspo: interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if words[0] in ("-V", "--version", "version"):
        print(f"gspo {__version__}")
        return 0
    verb = VERBS.get(words[0])
    if verb is None:
        raise ConfigError(
            f"unknown command {words[0]!r}{common.did_you_mean(words[0], VERBS)} `gspo --help` lists the commands"
        )
    heartbeat.beat(f"the start of gspo {words[0]}")
    # Intermixed: options may come between overrides.
    return verb.run(parser_of(words[0], verb).parse_intermixed_args(words[1:]))


def parser_of(name: str, verb: Verb) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"gspo {name}", usage=f"gspo {verb.usage}", description=verb.line, allow_abbrev=False
    )
    verb.arguments(parser)
    return parser


def available_verbs() -> dict[str, Verb]:
    """The table without the verbs of a clone, if this is an installed package; those say where they are."""
    return {name: verb for name, verb in VERBS.items() if name != "bench" or laboratory() is not None}


def help_text() -> str:
    verbs = "\n".join(f"  {name:<12} {verb.line}" for name, verb in available_verbs().items())
    from gspo.shipped import shipped

    pages = shipped("docs")
    return f"""\
gspo {__version__}: reinforcement-learning post-training for language models
with Group Sequence Policy Optimization (GSPO) and related objectives.

Quickstart (on a CPU, no download):
  gspo train quickstart                        train a tiny model to add; takes a minute or two
  gspo report runs/quickstart/gspo --open      write and open a page: curves, clipping, samples
  gspo eval runs/quickstart/gspo --samples 8   evaluate the best checkpoint: pass@k
  gspo export runs/quickstart/gspo             write the weights as a folder that transformers loads

Before you train your own model:
  gspo init my-project --task math             write a project: config, reward, test, data
  gspo examples                                list the example configs; copy one to change it
  gspo doctor gsm8k_gspo                       explain and check a config without running it
  gspo config actor.eps_clip                   explain one key
  gspo objectives gspo                         show the formula, the paper and the defaults of GSPO

Commands:
{verbs}

`gspo COMMAND --help` lists the options of a command.
Any config key can be set on the command line: `gspo doctor run.yaml gconfig.n_samples=16`.
`~key` resets a key to its default; `+key=value` and `++key=value` are the same as `key=value`.
Ctrl-C saves a checkpoint; run the same command again to resume.
Documentation: {pages}
Exit codes: 0 done, 1 failed run, 2 bad usage or config, 130 interrupted."""


def command_page() -> str:
    """docs/cli.md: every command with its arguments, from the parsers that read them."""
    lines = [
        "# Commands",
        "",
        "<!-- Written by `make docs` from src/gspo/cli. -->",
        "",
        "`gspo COMMAND --help` prints the same text. A config is a YAML file or the name of an example.",
        "Any key of a config can be set on the command line: `key=value`; `~key` resets it to its default.",
        "",
        "Exit codes: 0 done, 1 failed run, 2 bad usage or config, 130 interrupted.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`gspo {name}`](#gspo-{name}) | {verb.line} |" for name, verb in available_verbs().items()),
    ]
    for name, verb in available_verbs().items():
        # argparse has no public list of a parser's arguments.
        actions = [a for a in parser_of(name, verb)._actions if a.dest != "help" and a.help != argparse.SUPPRESS]
        lines += ["", f"## gspo {name}", "", f"{verb.line[0].upper()}{verb.line[1:]}."]
        lines += ["", "```", f"gspo {verb.usage}", "```", "", *map(_argument_line, actions)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _argument_line(action: argparse.Action) -> str:
    value = str(action.metavar or "|".join(map(str, action.choices or [action.dest])))
    names = ", ".join(action.option_strings)
    takes_none = action.nargs == 0
    return f"- `{names if takes_none else f'{names} {value}'.strip()}`: {action.help}"


VERBS: dict[str, Verb] = {
    "init": Verb(
        "init DIR [--task math|code|chat|tools|vision|sft]",
        "write a small project: config with comments, reward with a test, data, README",
        project.init_arguments,
        project.init,
    ),
    "train": Verb(
        "train CONFIG [--new] [--on local|ray|slurm] [--dry-run] [key=value …]",
        "train from a config; run the same command again to resume",
        train.train_arguments,
        train.train,
    ),
    "preview": Verb(
        "preview CONFIG [--prompts N] [--samples N] [key=value …]",
        "show prompts as the model sees them, completions and rewards, before training",
        train.preview_arguments,
        train.preview,
    ),
    "eval": Verb(
        "eval RUN|MODEL [--data PATH] [--samples N] [--step best|last|N] [--out FILE] [key=value …]",
        "evaluate a run or a model on held-out problems: reward, avg@n, pass@k, intervals",
        runs.eval_arguments,
        runs.evaluate,
    ),
    "report": Verb(
        "report RUN [--out FILE] [--open] [--max-mb MB] | RUN --samples [--held-out] [--step N] [--num N] | "
        "RUN --samples [--best] [--filter CONDITION …] > rows.jsonl",
        "write a run's report as one HTML page; --samples prints its samples instead",
        reports.report_arguments,
        reports.report,
    ),
    "watch": Verb(
        "watch RUN|DIR [--port N] [--open]",
        "serve the report page live, on this machine only",
        reports.watch_arguments,
        reports.watch,
    ),
    "export": Verb(
        "export RUN [--step best|last|N] [--to DIR] [--merge]",
        "write a run's weights as a folder that transformers loads",
        runs.export_arguments,
        runs.export,
    ),
    "chat": Verb(
        "chat RUN|MODEL [--step best|last|N] [--system TEXT] [--temperature T] [key=value …]",
        "talk to a run or a model in the terminal",
        chat.chat_arguments,
        chat.chat,
    ),
    "models": Verb(
        "models [list | check TYPE|PATH … | check --all]",
        "list the models of this machine, or check which layout and sampler a model gets",
        common.models_arguments,
        common.models,
    ),
    "plan": Verb(
        "plan CONFIG --gpus NAME:N [--model 7B|30B-A3B|PATH] [--length N | --run RUN] [key=value …]",
        "simulate a run on a cluster: seconds per step, idle GPUs, the best split",
        lab.plan_arguments,
        lab.plan,
    ),
    "bench": Verb(
        "bench [--workload NAME …] [--compare REF] [--no-peer] [--json] [--write DIR]",
        "measure time and memory of a step; compare with TRL's trainer, or with another commit",
        lab.bench_arguments,
        lab.bench,
    ),
    "study": Verb(
        "study [list | run [NAME …] [--full] [--jobs N] [--only ARM] [--seeds N] | show [NAME …] | page]",
        "repeat the experiments of docs/baselines.md, which test the paper's claims",
        lab.study_arguments,
        lab.study,
    ),
    "checkpoints": Verb(
        "checkpoints RUN [--verify]",
        "list a run's checkpoints; --verify checks every byte",
        runs.checkpoints_arguments,
        runs.checkpoints,
    ),
    "compare": Verb(
        "compare RUN RUN… [--out compare.html] [--metric NAME …]",
        "compare runs: results, keys that differ, curves with bands over seeds",
        reports.compare_arguments,
        reports.compare,
    ),
    "doctor": Verb(
        "doctor CONFIG [key=value …] [--quick] [--json] | --reward CONFIG [--model] | --probe RUN|CONFIG [--step N] | "
        "--selftest [CONFIG]",
        "explain a config, check that it can run here; --reward, --probe, --selftest measure",
        doctor.doctor_arguments,
        doctor.doctor,
    ),
    "examples": Verb(
        "examples [copy NAME [DIR]]",
        "list the example configs, or copy one, with the files it uses",
        common.examples_arguments,
        common.examples,
    ),
    "audit": Verb(
        "audit PATH… [--out DIR] [--open]",
        "explain a run of TRL, verl or ms-swift from its files: objective, clipping, samples",
        doctor.audit_arguments,
        doctor.audit,
    ),
    "objectives": Verb(
        "objectives [NAME]",
        "list the objectives, or show the formula, paper and defaults of one",
        common.objectives_arguments,
        common.objectives,
    ),
    "config": Verb(
        "config CONFIG [key=value …] | KEY | --schema",
        "print a config with all keys; explain a key or a section; print the JSON schema",
        common.config_verb_arguments,
        common.config,
    ),
    "completion": Verb(
        "completion bash|zsh|fish",
        "print a script that completes commands, options and keys in a shell",
        project.completion_arguments,
        project.completion,
    ),
}

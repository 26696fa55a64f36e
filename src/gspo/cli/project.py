"""`gspo init` and `completion`: the first commands on a new machine."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gspo.cli.schema import json_schema
from gspo.config import known_keys
from gspo.errors import ConfigError
from gspo.shipped import example_files, shipped
from gspo.system import inert

if TYPE_CHECKING:
    from gspo.data import Split

SCHEMA = "gspo.schema.json"
# Rows of each split, and the digits of the numbers to add.
_USUAL: Mapping[Split, int] = {"train": 512, "test": 128}
_ROWS: Mapping[str, Mapping[Split, int]] = {
    "vision": {"train": 512, "test": 128},
    "sft": {"train": 2000, "test": 128},
}
_DIGITS = {"tools": (5, 5), "sft": (2, 3)}


def init(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    write_project(folder, args.task)
    print(inert(f"{folder} has train.yaml, reward.py with its test, data/ and README.md. Next:"))
    print(inert(f"  cd {shlex.quote(str(folder))}"))
    for command in re.findall(r"^gspo .*?(?=  |$)", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE):
        print(f"  {command}")
    return 0


def write_project(folder: Path, task: str) -> None:
    """Write config, reward with its test, data, README and the schema for editors.

    ConfigError if the folder is not empty; then nothing is written.
    """

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; gspo does not overwrite it: pass another name")
    source = shipped("examples") / "projects"
    files = {f.name: f for place in (source, source / task) for f in place.iterdir() if f.is_file()}
    texts = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    # The first line is the schema's; the next ones say what is trained and what to expect.
    head = itertools.takewhile(lambda line: line.startswith("# "), texts["train.yaml"].splitlines()[1:])
    about = " ".join(line.removeprefix("# ") for line in head).replace(" `gspo config KEY` explains a key.", "")
    (trial,) = re.findall(r"^trial_name: (\w+)", texts["train.yaml"], re.MULTILINE)
    # Made before anything is written: a package may be missing.
    data = {path: content for split in _USUAL for path, content in _data(task, split)}
    try:
        (folder / "data").mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            text = re.sub(r"\bABOUT\b", lambda _: about, text)
            text = re.sub(r"\bNAME\b", lambda _: project_name(folder), re.sub(r"\bTRIAL\b", trial, text))
            (folder / name).write_text(text, encoding="utf-8")
        for path, content in data.items():
            (folder / "data" / path).parent.mkdir(exist_ok=True)
            (folder / "data" / path).write_bytes(content)
        (folder / SCHEMA).write_text(json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        (folder / ".gitignore").write_text("runs/\n__pycache__/\n", encoding="utf-8")
    except OSError as cause:
        raise ConfigError(f"{folder} cannot be written: {cause.strerror}; pass another folder") from cause


def project_name(folder: Path) -> str:
    """The name of a project: that of its folder, in characters that need no quotes.

    >>> project_name(Path("work/my project")), project_name(Path("/"))
    ('my-project', 'project')
    """
    return re.sub(r"[^\w.-]+", "-", folder.absolute().name, flags=re.ASCII).strip(".-") or "project"


def _data(task: str, split: Split) -> Iterator[tuple[str, bytes]]:
    """The files of a split below data/: rows of additions in the form that the task needs, and images."""
    from gspo.data import arithmetic, digits

    count = _ROWS.get(task, _USUAL)[split]
    rows: Sequence[Mapping[str, Any]]
    if task == "vision":
        rows = digits.digit_rows(split, count, seed=1)
        names = [f"images/{split}_{number:03d}.png" for number in range(len(rows))]
        yield from ((name, row["image"]["bytes"]) for name, row in zip(names, rows, strict=True))
        rows = [{**row, "image": name} for name, row in zip(names, rows, strict=True)]
    else:
        sizes = _DIGITS.get(task, arithmetic.DIGITS)
        problems = arithmetic.distinct_problems(split, count, digits=sizes)
        rows = [_row(task, problem) for problem in problems]
    yield f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()


def _row(task: str, problem: Any) -> dict[str, Any]:
    if task == "code":
        return {
            "question": problem.question,
            "entry_point": "add",
            "tests": [{"args": [], "expected": int(problem.answer)}],
        }
    if task == "chat":
        return {"messages": [{"role": "user", "content": problem.question}], "answer": problem.answer}
    row = {"question": problem.question, "answer": problem.answer}
    return {**row, "solution": problem.solution} if task == "sft" else row


# -- Shell completion -----------------------------------------------------------------------------------------


def completion(args: argparse.Namespace) -> int:
    print(completion_script(args.shell), end="")
    return 0


class _Completed(NamedTuple):
    """What can be typed after a verb."""

    line: str
    options: list[argparse.Action]
    words: list[str]  # choices of positional arguments, names of examples
    takes_keys: bool  # key=value


def completion_script(shell: str) -> str:
    """The completion of verbs, options, their choices, example names and config keys, made from the table of verbs."""
    from gspo.cli.main import available_verbs, parser_of

    examples = [name for name, file in example_files().items() if file.suffix == ".yaml"]
    table: dict[str, _Completed] = {}
    for name, verb in available_verbs().items():
        actions = [action for action in parser_of(name, verb)._actions if action.help != argparse.SUPPRESS]
        words = [str(word) for action in actions if not action.option_strings for word in action.choices or ()]
        words += examples if "CONFIG" in verb.usage or name == "examples" else []
        options = [action for action in actions if action.option_strings]
        table[name] = _Completed(verb.line, options, words, "key=value" in verb.usage)
    keys = [f"{key.name}=" for key in known_keys().values() if key.section is None]
    if shell == "fish":
        return _fish(table, keys)
    return "autoload -U +X bashcompinit && bashcompinit\n" * (shell == "zsh") + _bash(table, keys)


def _bash(table: Mapping[str, _Completed], keys: Sequence[str]) -> str:
    values, words = list[str](), list[str]()
    for verb, found in table.items():
        for action in found.options:
            if action.nargs != 0:  # it takes a value; without choices: a file, by `-o default`
                pattern = "|".join(f"'{verb} {name}'" for name in action.option_strings)
                choices = " ".join(map(str, action.choices or ()))
                reply = f"""COMPREPLY=( $(compgen -W '{choices}' -- "$cur") ); """ if choices else ""
                values.append(f"    {pattern}) {reply}return ;;")
        options = " ".join(name for action in found.options for name in action.option_strings)
        words.append(
            f"    {verb}) options='{options}'; words='{' '.join(found.words)}'; keys={int(found.takes_keys)} ;;"
        )
    filled = {"VERBS": " ".join(table), "VALUES": "\n".join(values), "WORDS": "\n".join(words), "KEYS": " ".join(keys)}
    script = Path(__file__).with_name("completion.bash").read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda found: filled[found[1]], script)


def _fish(table: Mapping[str, _Completed], keys: Sequence[str]) -> str:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    lines = []
    for verb, found in table.items():
        after = f"complete -c gspo -n '__fish_seen_subcommand_from {verb}'"
        lines.append(f"complete -c gspo -f -n __fish_use_subcommand -a {verb} -d {quoted(found.line)}")
        for action in found.options:
            flags = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in action.option_strings)
            choices = " ".join(map(str, action.choices or ()))
            value = f" -x -a {quoted(choices)}" if choices else " -r" * (action.nargs != 0)
            lines.append(f"{after} {flags}{value} -d {quoted(action.help or '')}")
        words = [*found.words, *(keys if found.takes_keys else ())]
        if words:
            lines.append(f"{after} -a {quoted(' '.join(words))}")
    return "\n".join(lines) + "\n"

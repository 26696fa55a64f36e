"""The example configs and the pages that travel with the package; in a clone they are the repository's own folders."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path


def shipped(name: str) -> Path:
    """The folder `examples` or `docs`: of the installed package, else of the clone.

    >>> (shipped("examples") / "quickstart.yaml").is_file(), (shipped("docs") / "config.md").is_file()
    (True, True)
    """
    package = Path(__file__).resolve().parent
    return package / name if (package / name).is_dir() else package.parents[1] / name


def example_files() -> dict[str, Path]:
    """The examples by name: configs without suffix and folder (with the folder if two are alike), then scripts.

    >>> names = list(example_files())
    >>> names[0], names[-2:]
    ('agent', ['minimal_loop.py', 'objective_demo.py'])
    """
    root = shipped("examples")
    files = [file for file in root.rglob("*.yaml") if "projects" not in file.relative_to(root).parts]  # `gspo init`
    times = Counter(file.stem for file in files)
    configs = {f.stem if times[f.stem] == 1 else str(f.relative_to(root).with_suffix("")): f for f in files}
    return dict(sorted(configs.items())) | {file.name: file for file in sorted(root.glob("*.py"))}


def find_config(name: str) -> Path | None:
    """The shipped config that `quickstart`, `quickstart.yaml` or `examples/quickstart.yaml` stands for.

    >>> find_config("examples/math/gsm8k_gspo.yaml") == find_config("gsm8k_gspo"), find_config("my.yaml")
    (True, None)
    """
    root = shipped("examples")
    for short, file in example_files().items():
        if file.suffix == ".yaml" and name in (short, f"{short}.yaml", f"examples/{file.relative_to(root)}"):
            return file
    return None


def installed_path(text: str) -> str:
    """A path below `examples/` that a shipped config names: as it is if it exists from here, else the shipped file's.

    >>> installed_path("embedded:tiny"), installed_path("examples/no-such-file.py:f")
    ('embedded:tiny', 'examples/no-such-file.py:f')
    """
    name, colon, rest = text.partition(":")
    file = shipped("examples").parent / name
    if not name.startswith("examples/") or Path(name).exists() or not file.exists():
        return text
    return f"{file}{colon}{rest}"


def copy_example(file: Path, to: Path) -> list[Path]:
    """Copy an example and the files below `examples/` that it names into a folder; return the written files.

    The copies name each other by their new paths, so that they run from the current directory.
    FileExistsError if one of them exists; then nothing is written.
    """
    root, here = shipped("examples").parent, file.parent
    text = file.read_text(encoding="utf-8")
    # A name in a comment counts, too: the header of a config names the scripts that use it.
    named = (root / name.rstrip("./") for name in re.findall(r"\bexamples/[\w./-]+", text))
    found = {file: to / file.name}
    for place in (place for place in named if place.is_relative_to(here) and place.exists()):
        inside = [p for p in place.rglob("*") if p.is_file()] if place.is_dir() else [place]
        found |= {each: to / each.relative_to(here) for each in inside if "__pycache__" not in each.parts}
    for target in found.values():
        if target.exists():
            raise FileExistsError(target)
    old, new = f"{here.relative_to(root)}/", "" if to == Path() else f"{to}/"
    for source, target in found.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    return list(found.values())


def with_pages(text: str) -> str:
    """A message with `docs/page.md` and `examples/script.py` replaced by their installed paths, unless they are here.

    >>> with_pages("see docs/no-such-page.md")
    'see docs/no-such-page.md'
    """
    for folder, ending in (("docs", "md"), ("examples", "py")):
        if not Path(folder).is_dir():
            found = {file.name: str(file) for file in shipped(folder).glob(f"*.{ending}")}
            name = rf"(?<![\w/]){folder}/([\w-]+\.{ending})\b"
            text = re.sub(name, lambda match, found=found: found.get(match[1], match[0]), text)
    return text

"""The code blocks of the pages run.

A fenced block whose first line is a comment with a file name (`# reward.py`) is written to the page's scratch folder. A
block whose first line starts with `$ ` is a shell session: its commands run there, in order. Each must exit with 0, or
with the number in a comment at its end (`# exit 2`). Lines below a command are lines of its output; `…` stands
for any text. Other blocks are not run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml|jsonl|csv|txt))")
QUICK = ("launching",)  # pages whose commands take a second each; the others are in the long suite


def blocks(text: str) -> list[str]:
    """The blocks that are run: files and sessions."""
    return [block for block in FENCE.findall(text) if block.startswith("$ ") or FILE.fullmatch(block.split("\n", 1)[0])]


def pages() -> list[Path]:
    found = [*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("README.md"), ROOT / "README.md"]
    return sorted(page for page in found if any(block.startswith("$ ") for block in blocks(page.read_text())))


def commands(session: str) -> list[tuple[str, list[str]]]:
    """(command, expected lines) of a session; a command may continue after a backslash."""
    found: list[tuple[str, list[str]]] = []
    for line in session.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found[-1][0].endswith("\\"):
            found[-1] = (found[-1][0] + "\n" + line, [])
        else:
            found[-1][1].append(line)
    return found


def missing_line(expected: list[str], output: str) -> str | None:
    """The first expected line that the output does not have after the one before it; None if it has all."""
    lines = iter(" ".join(line.split()) for line in output.splitlines())
    for line in (" ".join(line.split()) for line in expected):
        pattern = ".*".join(map(re.escape, line.split("…")))
        if line and line != "…" and not any(re.fullmatch(pattern, each) for each in lines):
            return line
    return None


def run_blocks(text: str, folder: Path) -> int:
    """Run a page's blocks in a folder; returns the number of commands."""
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONIOENCODING": "utf-8",
        "COLUMNS": "120", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    # One core, so one thread: on a busy machine two threads of a small model wait for each other most of the time.
    cores = sorted(os.sched_getaffinity(0))
    core = {cores[os.getpid() % len(cores)]}
    count = 0
    for block in blocks(text):
        if named := FILE.fullmatch(block.split("\n", 1)[0]):
            (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
            (folder / named[1]).write_text(block.split("\n", 1)[1])
            continue
        for command, expected in commands(block):
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600,
                check=False, preexec_fn=lambda: os.sched_setaffinity(0, core),
            )  # fmt: skip
            said = f"$ {command}\n{done.stdout}{done.stderr}"
            code = int(found[1]) if (found := re.search(r"# exit (\d+)$", command)) else 0
            assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{said}"
            lost = missing_line(expected, done.stdout + done.stderr)
            assert lost is None, f"the output lacks the line {lost!r}\n{said}"
            count += 1
    return count


def test_a_block_that_does_not_do_what_it_shows_is_found(tmp_path, monkeypatch):
    seen = []

    def fake(command, **_):
        seen.append(command[-1])
        return subprocess.CompletedProcess(command, 3 if "bad" in command[-1] else 0, "one 1\ntwo 2\n", "")

    monkeypatch.setattr(subprocess, "run", fake)
    page = "```\n# a/b.py\nx = 1\n```\n\n```\nnot run\n```\n\n"
    page += "```console\n$ first \\\n    --more\none …\n$ bad # exit 3\n```\n"
    assert run_blocks(page, tmp_path) == 2
    assert seen == ["first \\\n    --more", "bad # exit 3"]
    assert (tmp_path / "a" / "b.py").read_text() == "x = 1\n"
    with pytest.raises(AssertionError, match="exit code 3, not 0"):
        run_blocks("```\n$ bad\n```\n", tmp_path)
    with pytest.raises(AssertionError, match="lacks the line 'three'"):
        run_blocks("```\n$ good\ntwo …\nthree\n```\n", tmp_path)
    with pytest.raises(AssertionError, match="lacks the line 'one 1'"):  # lines have an order
        run_blocks("```\n$ good\ntwo 2\none 1\n```\n", tmp_path)


def _tier(page: Path):
    name = page.stem if page.parent.name == "docs" else page.parent.name
    marks = pytest.mark.run if page.stem in QUICK else (pytest.mark.full, pytest.mark.timeout(1800))
    return pytest.param(page, id=name, marks=marks)


@pytest.mark.parametrize("page", map(_tier, pages()))
def test_the_blocks_of_a_page_run(page, tmp_path):
    assert run_blocks(page.read_text(), tmp_path) > 0


def test_a_file_of_a_page_is_used_by_a_command_or_by_another_file():
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        found = blocks(page.read_text())
        for block in found:
            if named := FILE.fullmatch(block.split("\n", 1)[0]):
                others = "".join(other for other in found if other is not block)
                assert named[1] in others, f"{page}: nothing uses {named[1]}"
                assert "$ " in others, f"{page}: it has files and no command"


def test_there_are_pages_with_blocks():
    assert {"quickstart", "python", "data", "models", "report"} <= {page.stem for page in pages()}

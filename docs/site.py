"""Hooks of mkdocs: pages and files outside docs/ belong to the site too, and links between them work in both places.

The repository's pages link to each other by path (docs/data.md to ../examples/summarise/README.md). In the site, docs/
is the root and the examples lie below it.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")  # or an image: ![…](…)


def _title(page: Path) -> str:
    return re.sub(r"[`*]", "", page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# "))


def on_files(files: Files, config: Any) -> Files:
    """Add the examples with their pages, the log and the contributor's page."""
    # examples/projects are templates of `gspo init`, not pages.
    left_out = {"__pycache__", "projects"}
    inside = [file for file in (ROOT / "examples").rglob("*") if file.is_file() and not left_out & {*file.parts}]
    for file in [*inside, ROOT / "LOG.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"]:
        files.append(File.generated(config, str(file.relative_to(ROOT)), abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Links by path in the repository become links in the site; a file that the site lacks becomes plain text."""
    source = Path(page.file.abs_src_path or "").parent

    def link(found: re.Match[str]) -> str:
        image, text, path, anchor = found[1], found[2], found[3], found[4] or ""
        target = os.path.relpath((source / path).resolve(), ROOT)
        uri = target.removeprefix("docs/")
        if (ROOT / target).exists() and files.get_file_from_path(uri) is None:
            return text
        if text == Path(target).name and target.endswith(".md"):
            text = _title(ROOT / target)  # in the site, pages have titles and no file names
        return f"{image}[{text}]({os.path.relpath(uri, Path(page.file.src_uri).parent)}{anchor})"

    return LINK.sub(link, markdown)


FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas of a page, which arithmatex has marked, as MathML."""

    def formula(found: re.Match[str]) -> str:
        shown = "block" if found[2] == "[" else "inline"
        return f'<{found[1]} class="formula">{convert(html.unescape(found[3]).strip(), display=shown)}</{found[1]}>'

    return FORMULA.sub(formula, content)

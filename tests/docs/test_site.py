"""The pages hold together: every link and anchor exists, every page is in the site's contents, and the site builds."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from gspo.cli.main import VERBS
from lab.pages import command_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# examples/projects are templates of `gspo init`, not examples.
EXAMPLES = [
    path for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name[0] != "_" and path.name != "projects"
]
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(folder / "README.md" for folder in EXAMPLES)]
PAGES += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md", "LOG.md")]
LINK = re.compile(r"\]\(([^)\s]+)\)")
SITE = ROOT / ".venv-docs" / "bin" / "mkdocs"


class _Loader(yaml.SafeLoader):
    """mkdocs.yml names Python functions by tags."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def nav_pages(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    return [page for child in children for page in nav_pages(child)]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """As GitHub and the site make them of headings."""
    heads = re.findall(r"^#+ +(.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    plain = (re.sub(r"[`*]|\]\([^)]*\)|\[", "", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    for link in LINK.findall(without_code(page.read_text())):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target}"
        assert not anchor or anchor in anchors(target.read_text()), f"{link}: no such heading"


def test_every_page_is_in_the_sites_contents():
    nav = nav_pages(yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"])
    assert len(nav) == len(set(nav))
    listed = {page for page in nav if not page.startswith(("examples/", "notebooks/"))}
    assert listed == {page.name for page in DOCS.glob("*.md")} | {
        "LOG.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "ARCHITECTURE.md",
    }
    assert {page for page in nav if page.startswith("examples/")} == {
        f"examples/{it.name}/README.md" for it in EXAMPLES
    }


def test_every_example_folder_has_a_page_and_is_in_the_gallery():
    gallery = (DOCS / "gallery.md").read_text()
    for folder in EXAMPLES:
        assert (folder / "README.md").is_file(), folder
        assert f"../examples/{folder.name}/README.md" in gallery, folder


def test_the_page_of_the_commands_is_what_the_parsers_say():
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == command_page(), "run: python -m gspo.cli > docs/cli.md"
    assert all(f"\n## gspo {name}\n" in command_page() for name in VERBS)
    assert "`--on local|ray|slurm`: how processes are launched" in command_page()


def test_the_readme_is_short_and_every_command_in_it_exists():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 150
    verbs = re.findall(r"^(?:\$ )?gspo (\w+)", text, re.MULTILINE)
    assert verbs
    assert set(verbs) <= set(VERBS)


@pytest.mark.full
@pytest.mark.skipif(not SITE.exists(), reason="make docs-site installs mkdocs into .venv-docs")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path):
    done = subprocess.run(
        [SITE, "build", "--strict", "--site-dir", tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=250,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = re.compile(
        r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*rel=\"(?:stylesheet|preconnect)\"[^>]*//"
    )
    for page in tmp_path.rglob("*.html"):
        assert not (found := loaded.search(page.read_text())), f"{page}: {found[0]}"

"""Extras of pyproject.toml: every optional import has one, and every message that names one is right."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import gspo
from gspo.rewards import PRELOAD

SOURCE = Path(gspo.__file__).parent
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
# Modules whose distribution has another name.
NAMED = {
    "PIL": "pillow", "yaml": "pyyaml", "huggingface_hub": "transformers", "tokenizers": "transformers",
    "annotated_types": "pydantic", "pydantic_core": "pydantic",
}  # fmt: skip
# Not ours to install: the notebook's kernel, tables for those who have pandas (else `gspo.Run` gives columns), other
# people's environments, an engine and our extension inside it.
OTHERS = {"IPython", "pandas", "verifiers", "openenv", "vllm", "gspo_collective"}
USER_EXTRAS = {"report", "tasks", "models", "lora", "vision", "envs", "ray", "loggers"}


def project():
    return tomllib.loads(PYPROJECT.read_text())["project"]


def packages(requirements) -> set[str]:
    """Distributions of a list of requirements; `gspo[a,b]` stands for those of the extras a and b."""
    extras, found = project()["optional-dependencies"], set()
    for requirement in requirements:
        name, extra = re.fullmatch(r"([\w.-]+)(?:\[([\w,-]+)\])?.*", requirement).groups()
        found |= set().union(*(packages(extras[e]) for e in extra.split(","))) if name == "gspo" else {name.lower()}
    return found


def imported(file: Path):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def distribution(module: str) -> str:
    return NAMED.get(module, module.replace("_", "-")).lower()


def test_every_package_that_the_code_imports_is_a_dependency_or_in_an_extra():
    known = packages(project()["dependencies"]).union(*map(packages, project()["optional-dependencies"].values()))
    modules = {name for file in SOURCE.rglob("*.py") for name in imported(file)}
    unknown = {m for m in modules if m not in sys.stdlib_module_names and m != "gspo" and distribution(m) not in known}
    assert unknown - OTHERS == set()


def test_messages_name_extras_that_exist_and_only_install_command_writes_the_command():
    extras = set(project()["optional-dependencies"])
    used = {extra for _, _, extra in PRELOAD.values()}
    for file in SOURCE.rglob("*.py"):
        text = file.read_text()
        used |= set(re.findall(r"install_command\(['\"]([\w-]+)['\"]\)", text))
        if file.name not in ("imports.py", "plot.py"):  # the function itself, and a docstring
            assert "pip install 'gspo[" not in text, file
    assert used - {"x"} <= extras
    assert {"report", "tasks", "models", "lora", "vision", "envs", "ray"} <= used


@pytest.mark.parametrize(("reward", "needs"), PRELOAD.items())
def test_the_extra_of_a_reward_has_its_package(reward, needs):
    _, package, extra = needs
    assert packages([package]) <= packages(project()["optional-dependencies"][extra])


def test_names_of_version_0_1_install_what_they_did():
    extras = project()["optional-dependencies"]
    assert extras.keys() >= USER_EXTRAS | {"plot", "text", "agent", "tensorboard", "wandb", "trackio"}
    assert "matplotlib" in packages(extras["plot"])
    assert packages(extras["text"]) >= {"rouge-score", "sacrebleu", "py3langid"}
    assert packages(extras["loggers"]) == {"tensorboard", "wandb", "trackio"}
    assert "openai" in packages(extras["agent"])

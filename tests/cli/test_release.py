"""What a release consists of: reproducible archives, pinned versions, the image, and CI on GitHub."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import gspo
from gspo.cli import main as cli

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_changelog_begins_with_this_version_and_the_package_is_typed():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first[1] == gspo.__version__
    assert (Path(gspo.__file__).parent / "py.typed").is_file()


def test_every_dependency_has_a_version_in_the_constraints_that_it_allows():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if line and line[0] != "#")
    assert pins["torch"] == "2.13.0"  # no +cpu: such a pin is found on one index only
    extras = PROJECT["optional-dependencies"]
    wanted = [Requirement(text) for text in PROJECT["dependencies"]]
    wanted += [Requirement(text) for extra in extras if extra != "robotics" for text in extras[extra]]
    for requirement in wanted:
        if requirement.name != "gspo":
            assert requirement.specifier.contains(pins[requirement.name.lower()]), requirement
    makefile = (ROOT / "Makefile").read_text()
    assert makefile.count("-c constraints.txt") >= 2


def steps_of(file):
    """Instructions of a Dockerfile by stage; a line that ends with a backslash continues."""
    stages, stage = {}, None
    text = re.sub(r"\\\n", " ", (ROOT / file).read_text())
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            stage = re.fullmatch(r"\S+ AS (\w+)", rest)[1]
            stages[stage] = []
        elif word and not word.startswith("#"):
            assert word in ("RUN", "COPY", "WORKDIR", "ENV", "USER", "ENTRYPOINT", "CMD"), line
            stages[stage].append((word, rest))
    return stages


def test_the_image_copies_what_exists_installs_extras_that_exist_and_runs_gspo():
    stages = steps_of("Dockerfile")
    assert set(stages) == {"wheel", "cpu", "cuda"}
    copied = [path for step, rest in stages["wheel"] if step == "COPY" for path in rest.split()[:-1]]
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {path.split("/")[1] for path in built["include"]} <= set(copied)  # all that the wheel is built from
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)
    for name, steps in stages.items():
        for step, rest in steps:
            words = rest.split()
            if step == "COPY" and not words[0].startswith("--from="):
                assert all((ROOT / path).exists() for path in words[:-1]), rest
            elif step == "COPY":
                assert words[0].removeprefix("--from=") in stages
            elif step == "RUN":
                for extra in re.findall(r"gspo\[([\w,]+)\]", rest):
                    assert set(extra.split(",")) <= PROJECT["optional-dependencies"].keys()
                assert set(re.findall(r"torch==([\d.]+)", rest)) <= {"2.13.0"}
        if name != "wheel":
            assert ("ENTRYPOINT", '["gspo"]') in steps
            assert any(step == "USER" and rest != "root" for step, rest in steps)
    (usage,) = set(re.findall(r"gspo:cpu (\w+)", (ROOT / "Dockerfile").read_text()))
    assert usage in cli.VERBS


def test_ci_on_github_runs_our_own_ci_with_the_torch_and_python_of_the_makefile_and_the_image():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    ours, makefile = (ROOT / ".ci" / "run").read_text(), (ROOT / "Makefile").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    targets = re.findall(r"^make ([\w-]+)", ours, re.MULTILINE)
    assert targets == ["test", "check"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert set(re.findall(r"torch==([\d.]+)", " ".join(commands))) == set(re.findall(r"torch==([\d.]+)", makefile))
    # The system of .ci/run, whose packages are Debian's, is that of the image.
    assert job["container"]["image"] == "python:3.11-bookworm"
    assert "FROM python:3.11-slim-bookworm AS cpu" in (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def hatchling(tmp_path_factory):
    """A folder with the build backend, as pyproject.toml wants it."""
    place = tmp_path_factory.mktemp("hatchling")
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(place), *wanted]
    if subprocess.run(pip, capture_output=True, timeout=240, check=False).returncode:
        pytest.skip("hatchling cannot be downloaded")
    return place


@pytest.mark.full
def test_wheel_and_sdist_are_the_same_bytes_from_two_copies_at_two_times(hatchling, tmp_path):
    found = []
    for number, name in enumerate(("one", "another/place")):
        copy = tmp_path / name
        for part in ("src", "examples", "docs"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt"):
            shutil.copy(ROOT / file, copy / file)
        for file in copy.rglob("*"):
            os.utime(file, (10**9 * (1 + number / 2),) * 2)
        command = [
            sys.executable,
            "-m",
            "hatchling",
            "build",
            "-t",
            "sdist",
            "-t",
            "wheel",
            "-d",
            str(tmp_path / f"{number}"),
        ]
        environment = {**os.environ, "PYTHONPATH": str(hatchling), "SOURCE_DATE_EPOCH": "1700000000"}
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        archives = sorted((tmp_path / f"{number}").iterdir())
        found.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in archives})
    assert found[0] == found[1]
    assert list(found[0]) == [f"gspo-{gspo.__version__}-py3-none-any.whl", f"gspo-{gspo.__version__}.tar.gz"]
    wheel = zipfile.ZipFile(tmp_path / "0" / f"gspo-{gspo.__version__}-py3-none-any.whl")
    names = set(wheel.namelist())
    assert {"gspo/py.typed", "gspo/examples/projects/math/train.yaml", "gspo/docs/install.md"} <= names
    assert not [name for name in names if "lab/" in name]

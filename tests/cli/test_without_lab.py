"""The package alone, as a wheel installs it: without the repository and its folder lab/."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gspo

pytestmark = pytest.mark.run

SOURCE = Path(gspo.__file__).parent
PLACE = "this needs the folder lab/ of gspo's repository"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs `gspo` of a copy of the package, beside which there is no clone."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(SOURCE, site / "gspo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SOURCE.parents[1] / "examples", site / "gspo" / "examples")

    def gspo_alone(*words, folder=site, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "gspo", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(site), "GSPO_CACHE": str(site / "cache")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stderr + done.stdout
        return " ".join((done.stdout + done.stderr).split())

    return gspo_alone


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "--workload", "tiny"),
        ("study",),
        ("study", "run"),
        ("study", "run", "clipping"),
        ("study", "page"),
        ("models", "check", "--all"),
    ],
    ids=" ".join,
)
def test_a_verb_that_needs_the_laboratory_says_where_it_is(run, words):
    assert PLACE in run(*words, code=2)


def test_help_and_completion_list_the_verbs_that_are_there(run):
    assert " bench " not in run("--help")
    assert " study " in run("--help")
    assert "study" in run("completion", "bash")


def test_a_study_of_the_user_needs_no_laboratory(run, tmp_path):
    (tmp_path / "base.yaml").write_text(
        "{algorithm: gspo, total_train_steps: 1, threads: 1, actor: {path: 'embedded:nothing'}}"
    )
    (tmp_path / "mine.yaml").write_text(
        "{claim: c, about: a, base: base.yaml, seeds: [1], arms: {one: {}}, measures: [final]}"
    )
    assert "not run yet" in run("study", "show", "mine.yaml", folder=tmp_path)
    # The worker of a run finds the study: what fails is its model.
    assert "embedded:nothing" in run("study", "run", "mine.yaml", "--seeds", "1", folder=tmp_path, code=1)


def test_what_is_fetched_by_a_script_is_named_by_its_installed_path(run, tmp_path):
    said = run("eval", "smollm2-135m", folder=tmp_path, code=2)
    assert "gspo/examples/fetch.py smollm2-135m" in said

"""The wheel alone, outside of the repository: it has the examples and the pages."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
SMALL = ("total_train_steps=1", "train_dataset.batch_size=2", "actor.ppo_n_minibatches=2", "evaluator.size=4")


@pytest.fixture(scope="module")
def gspo(tmp_path_factory):
    """Runs `gspo` of a wheel, installed into an environment of its own; its dependencies are those of this one."""
    place = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(ROOT)]
    built = subprocess.run(pip, capture_output=True, text=True, timeout=240)
    if built.returncode and "hatchling" in built.stderr:
        pytest.skip("hatchling cannot be downloaded")
    assert not built.returncode, built.stderr
    (wheel,) = place.glob("*.whl")
    venv = place / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    # The dependencies of this environment; .pth files in that folder (the editable gspo) are not read.
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(venv),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    subprocess.run(pip, check=True, timeout=120)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(folder, *words, code=0):
        command = [str(venv / "bin" / "gspo"), *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout + done.stderr

    return run


def test_a_wheel_lists_explains_and_copies_without_the_repository(gspo, tmp_path):
    assert str(ROOT) not in gspo(tmp_path, "--help")
    assert "quickstart" in gspo(tmp_path, "examples")
    assert "at most 1; default null" in gspo(tmp_path, "config", "actor.eps_clip")
    assert str(Path("gspo", "examples", "agent", "solver.py")) in gspo(tmp_path, "config", "agent")
    gspo(tmp_path, "examples", "copy", "agent", "mine")
    assert (tmp_path / "mine" / "solver.py").is_file()
    assert 'agent: "mine/solver.py:solve"' in gspo(tmp_path, "config", "mine/agent.yaml")
    said = gspo(tmp_path, "config", "quickstart", "zzz=1", code=2)
    page = said.partition("remove it (")[2].partition(" lists all keys")[0]
    assert Path(page).is_file()
    assert Path(page).is_absolute()


def test_a_wheel_trains_the_quickstart_by_name_and_by_the_path_of_the_repository(gspo, tmp_path, tiny):
    assert "Finished." in gspo(tmp_path, "train", "quickstart", *SMALL)
    assert "already finished" in gspo(tmp_path, "train", "examples/quickstart.yaml", *SMALL)
    assert (tmp_path / "runs" / "quickstart" / "gspo" / "report.html").is_file()

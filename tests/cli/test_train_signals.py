"""SIGTERM, SIGINT and SIGUSR1 end `gspo train` with exit code 130 in every phase of the process, also on two ranks."""

import os
import signal
import subprocess
import sys
import time

import pytest
from training_runs import SMALL, path_of

pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.run]
FULL = pytest.mark.full
FEW = ("total_train_steps=1", "evaluator.at_start=false", "evaluator.size=4", "train_dataset.size=40")


def start(root, *overrides, fault):
    (root / "run.yaml").write_text("{}\n")
    return subprocess.Popen(
        [sys.executable, "-m", "gspo", "train", str(root / "run.yaml"), *SMALL, *FEW, f"cluster.fileroot={root}",
         *overrides],
        env={**os.environ, "GSPO_FAULT": fault, "GSPO_FAULT_LOG": str(root / "fired"), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for_fault(process, root):
    until = time.monotonic() + 150
    while not (root / "fired").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("site", "name"),
    [
        pytest.param(site, name, marks=() if (site, name) == ("end.report", "term") else FULL)
        for site in ("start.import", "start.data", "end.report")
        for name in ("term", "int", "usr1")
    ],
)
def test_a_signal_in_any_phase_of_the_command_gives_the_documented_exit_code(tmp_path, site, name):
    process = start(tmp_path, fault=f"{site}:1:{name}")
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 130, said
    assert (tmp_path / "fired").read_text() == f"{site}:1:{name}\n"
    assert "Traceback" not in said
    if site == "end.report":
        assert (path_of(tmp_path) / "checkpoints" / "step_000001" / "manifest.json").exists()


@pytest.mark.full
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("site", ["start.model", "start.data", "end.report"])
def test_a_signal_to_the_launcher_of_two_ranks_ends_them_in_any_phase(tmp_path, site, name):
    process = start(tmp_path, "actor.backend=fsdp:d2", fault=f"{site}:1:hang")
    wait_for_fault(process, tmp_path)
    process.send_signal(signal.Signals[name])
    said = process.communicate(timeout=100)[0]
    assert process.returncode == 130, said


@pytest.mark.full
def test_a_signal_to_one_of_two_ranks_that_start_ends_both(tmp_path):
    process = start(tmp_path, "actor.backend=fsdp:d2", fault="start.data:1:term")
    said = process.communicate(timeout=200)[0]
    assert (tmp_path / "fired").exists(), said
    assert process.returncode == 130, said


@pytest.mark.full
def test_a_signal_to_the_launcher_before_a_rank_can_handle_it_is_no_failure(tmp_path):
    """Sent again and again from the start on, as an impatient user does."""
    (tmp_path / "fired").touch()
    for wait_s in (0.3, 1.0, 3.0):
        process = start(tmp_path, "actor.backend=fsdp:d2", fault="checkpoint.replace:9:kill")
        time.sleep(wait_s)
        process.terminate()
        said = process.communicate(timeout=100)[0]
        # Before Python has installed a handler, the signal kills the launcher itself; of an interrupt that Python does
        # not catch, the exit status is that of SIGINT, which a shell shows as 130, too.
        assert process.returncode in (130, -signal.SIGTERM, -signal.SIGINT), said

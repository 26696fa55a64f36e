"""From a config to processes: counts, places, GPUs, command lines, and what `--dry-run` prints."""

import subprocess
from pathlib import Path

import pytest

from gspo.cli import main as cli
from gspo.config import layout_of, load
from gspo.errors import ConfigError
from gspo.launcher import slurm
from gspo.launcher import start as launcher
from gspo.launcher.plan import make_launch_plan, plan_text

ROOT = Path(__file__).parents[2]
GSPO = str(ROOT / "examples" / "math" / "gsm8k_gspo.yaml")
GRPO = str(ROOT / "examples" / "math" / "gsm8k_grpo.yaml")
SCRIPT = str(ROOT / "examples" / "math" / "gsm8k_rl.py")


def config(*overrides: str, path: str | None = None):
    return load(path, overrides).config


def plan(*overrides: str, num_gpus: int = 0):
    return make_launch_plan(config(*overrides), ["train.py", "--config", "x.yaml"], num_gpus)


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "ranks", "servers"),
    [
        ([], 0, 1, 0),
        ([], 1, 1, 0),
        ([], 2, 1, 1),
        ([], 7, 4, 3),
        ([], 8, 4, 4),
        (["actor.backend=fsdp"], 8, 4, 4),
        (["actor.backend=fsdp:d2"], 8, 2, 6),
        (["actor.backend=fsdp:d8"], 8, 8, 0),
        (["rollout.backend=local"], 8, 8, 0),
        (["rollout.backend=local:d1"], 0, 1, 1),
        (["rollout.backend=local:d3"], 0, 1, 3),
        (["rollout.backend=local:d2", "actor.backend=fsdp:d2"], 0, 2, 2),
        (["rollout.backend=vllm:d2t2"], 8, 4, 2),
        (["allocation_mode=sglang:d4+fsdp:d4"], 8, 4, 4),
        (["allocation_mode=local.d2+d2"], 0, 2, 2),
        (["cluster.n_gpus_per_node=8"], 0, 4, 4),
        (["cluster.n_nodes=2", "cluster.n_gpus_per_node=8", "scheduler.type=ray"], 0, 8, 8),
    ],
)
def test_backend_strings_decide_how_many_ranks_and_servers_there_are(overrides, num_gpus, ranks, servers):
    layout = layout_of(config(*overrides), num_gpus)
    assert (layout.ranks, layout.num_samplers) == (ranks, servers)


@pytest.mark.parametrize(("path", "num_gpus"), [(GSPO, 8), (GRPO, 8), (GSPO, 1), (GSPO, 0)])
def test_the_shipped_configs_fill_a_node_half_and_half_and_a_cpu_with_one_process(path, num_gpus):
    layout = layout_of(config(path=path), num_gpus)
    assert (layout.ranks, layout.num_samplers) == {8: (4, 4), 1: (1, 0), 0: (1, 0)}[num_gpus]


def test_no_gpu_has_two_processes_and_none_is_idle():
    made = plan(num_gpus=8)
    gpus = [gpu for process in made.processes for gpu in process.gpus]
    assert sorted(gpus) == list(range(8))
    assert made.trainers[0].gpus == (0, 1, 2, 3)
    assert [process.gpus for process in made.samplers] == [(4,), (5,), (6,), (7,)]


def test_ranks_fill_machines_in_order_and_no_sampler_lies_across_two():
    asked = ["cluster.n_nodes=3", "cluster.n_gpus_per_node=4", "scheduler.type=slurm"]
    made = plan(*asked, "actor.backend=fsdp:d5", "rollout.backend=vllm:d3t2")
    assert [(p.node, p.ranks, p.gpus) for p in made.trainers] == [(0, 4, (0, 1, 2, 3)), (1, 1, (0,))]
    assert [(p.node, p.gpus) for p in made.samplers] == [(1, (1, 2)), (2, (0, 1)), (2, (2, 3))]
    assert all("--rendezvous" in process.argv for process in made.trainers)
    with pytest.raises(ConfigError, match="must be on one machine"):
        plan(*asked, "actor.backend=fsdp:d5", "rollout.backend=vllm:d1t6")


def test_without_gpus_processes_are_spread_over_the_machines():
    made = plan("cluster.n_nodes=2", "scheduler.type=ray", "actor.backend=fsdp:d2", "rollout.backend=local:d2")
    assert [(p.role, p.node) for p in made.processes] == [("trainer", 0), ("sampler", 1), ("sampler", 1)]
    assert all(process.argv[-2:] == ("--host", "{address}") for process in made.samplers)


def test_only_the_trainer_of_rank_0_publishes_weights_and_only_to_servers():
    asked = ("scheduler.type=ray", "cluster.n_nodes=2", "actor.backend=fsdp:d4")
    made = plan(*asked, "rollout.backend=local:d2")
    assert len(made.trainers) == 2
    assert [bool(process.publishes) for process in made.processes] == [True, False, False, False]
    assert made.trainers[0].publishes[1] == made.path / "weights"
    assert not any(process.publishes for process in plan(*asked).processes)


def test_the_trainer_is_told_of_its_samplers_and_no_argv_has_a_secret():
    made = plan("rollout.backend=local:d2")
    assert made.trainers[0].argv == ("train.py", "--config", "x.yaml")
    assert made.trainers[0].env["GSPO_SAMPLERS"] == "2"
    assert made.trainers[0].env["GSPO_SAMPLER_DIR"] == str(made.sampler_folder)
    assert all(process.env["GSPO_LAUNCHED"] == "1" for process in made.processes)
    for index, process in enumerate(made.samplers):
        assert process.argv[1:3] == ("-m", "gspo.launcher.serve.own")
        assert process.argv[process.argv.index("--index") + 1] == str(index)
        assert process.argv[process.argv.index("--register") + 1] == str(made.sampler_folder)
    assert not any("TOKEN" in word for process in made.processes for word in (*process.argv, *process.env))


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "said"),
    [
        (["rollout.backend=vllm:d4", "actor.backend=fsdp:d8"], 8, "take 12 GPUs"),
        (["cluster.n_nodes=2"], 0, "scheduler.type"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_key_to_set(overrides, num_gpus, said):
    with pytest.raises(ConfigError, match=said):
        plan(*overrides, num_gpus=num_gpus)


# The three spellings


@pytest.mark.parametrize("on", launcher.LAUNCHERS)
def test_dry_run_prints_the_plan_and_starts_nothing(on, tmp_path, capsys):
    root = f"cluster.fileroot={tmp_path}"
    assert launcher.main(on, ["--dry-run", SCRIPT, "--config", GSPO, root, "cluster.n_gpus_per_node=8"]) == 0
    by_module = capsys.readouterr().out
    assert "4 ranks train, 4 local servers sample" in by_module
    assert by_module.count("gspo.launcher.serve.own") == 4
    assert ("#SBATCH --gpus-per-node=8" in by_module) == (on == "slurm")
    assert cli.main(["train", GSPO, root, "cluster.n_gpus_per_node=8", "--on", on, "--dry-run"]) == 0
    by_command = capsys.readouterr().out
    ours = f"-m gspo train {GSPO} {root} cluster.n_gpus_per_node=8 --on {on}"
    assert by_command.replace(ours, "IT") == by_module.replace(
        f"{SCRIPT} --config {GSPO} {root} cluster.n_gpus_per_node=8", "IT"
    )
    assert not list(tmp_path.iterdir())


def test_an_engine_that_is_not_installed_is_planned_and_refused(tmp_path, capsys):
    asked = ["train", GSPO, "rollout.backend=vllm:d4", "cluster.n_gpus_per_node=8", f"cluster.fileroot={tmp_path}"]
    asked.append("vllm.python=/nowhere/python")
    assert cli.main([*asked, "--dry-run"]) == 0
    assert "4 vllm servers" in capsys.readouterr().out
    assert cli.main(asked) == 2
    assert "vllm.python" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_one_gpu_is_shared_by_the_trainer_and_a_vllm_server():
    made = plan("rollout.backend=vllm:d1", num_gpus=1)
    assert [process.gpus for process in made.processes] == [(0,), (0,)]
    assert all(process.env["GSPO_COLOCATED"] == "1" for process in made.processes)
    two = plan("rollout.backend=vllm:d1", num_gpus=2)
    assert [process.gpus for process in two.processes] == [(0,), (1,)]
    assert not any("GSPO_COLOCATED" in process.env for process in two.processes)


def test_vllm_servers_are_planned_on_a_machine_without_gpus():
    made = plan("rollout.backend=vllm:d2")
    assert [process.gpus for process in made.samplers] == [(), ()]
    assert all("gspo.launcher.serve.vllm" in process.argv for process in made.samplers)


def test_the_plan_says_who_runs_what_where():
    text = plan_text(plan("rollout.backend=local:d2", num_gpus=4), "local")
    assert "1 machine with 4 GPUs" in text
    assert "2 ranks train, 2 local servers sample" in text
    assert "sampler_1    node 0, GPU 3" in text


# The job script


def script_of(*overrides: str) -> str:
    c = config("scheduler.type=slurm", *overrides)
    return slurm.render(make_launch_plan(c, ["train.py"], 0), c.scheduler.slurm, ["train.py"], c.scheduler.restarts)


@pytest.mark.run
def test_the_job_script_is_valid_bash_and_asks_for_what_the_config_says(tmp_path):
    text = script_of(
        "cluster.n_nodes=2", "cluster.n_gpus_per_node=4",
        "scheduler.slurm.sbatch=[--time=1:00:00, --partition=long, --account=us, --mem=8G, --exclusive]",
        "scheduler.slurm.setup=[module load cuda]",
        f"cluster.fileroot={tmp_path}/a b",
    )  # fmt: skip
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {
        "--nodes=2", "--gpus-per-node=4", "--partition=long", "--time=1:00:00", "--account=us", "--mem=8G",
        "--exclusive", "--requeue", "--signal=B:USR1@120", "--cpus-per-task=4",
    } <= set(asked)  # fmt: skip
    assert "\nmodule load cuda\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_unset_keys_leave_no_line_in_the_job_script():
    text = script_of()
    assert not any(name in text for name in ("--partition", "--account", "--time", "--gpus-per-node", "None"))

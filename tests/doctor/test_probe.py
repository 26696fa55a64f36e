"""`gspo doctor --probe` and `--selftest`: what they measure, and that they can fail."""

import copy
import json
import math
from functools import partial
from pathlib import Path

import model_zoo
import numpy as np
import pytest
import torch
from training_runs import train

from gspo.cli import main as cli
from gspo.config import load
from gspo.doctor import checks
from gspo.doctor import checks as probe_module
from gspo.doctor.checks import one_of_each
from gspo.learner import PolicyModule, judge_noise
from gspo.sampling import LocalSampler
from gspo.types import SamplingParams

pytestmark = pytest.mark.run

QUICKSTART = str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")
TINY = (
    "algorithm=gspo", "actor.path=embedded:tiny", "train_dataset.path=embedded:arithmetic:2-3", "threads=1",
    "gconfig.n_samples=4", "gconfig.max_new_tokens=24",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _threads():
    """What a command sets for its run is put back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def probed(tmp_path, *overrides):
    return probe_module.measure_noise(load(None, [*TINY, *overrides]), None, 0, tmp_path)


# The probe


def test_the_noise_of_a_sampler_grows_as_its_weights_get_coarser(tmp_path):
    exact, bf16, int8 = (probed(tmp_path, f"rollout.sampler_precision={p}") for p in ("none", "bf16", "int8"))
    assert exact["log_s_p95_abs"] < 1e-5 < bf16["log_s_p95_abs"] < int8["log_s_p95_abs"]
    assert exact["num_sequences"] == 8 * 4
    assert (exact["verdict"], exact["sampler"]) == ("fine", "in process")
    for found in (exact, bf16, int8):
        assert found["verdict"] == judge_noise(found["log_s_p95_abs"], found["eps"])
        assert sum(row["num_sequences"] for row in found["by_length"]) == found["num_sequences"]
        assert abs(found["token_mean"]) <= found["token_max_abs"]


def test_a_constant_error_per_token_is_the_mean():
    draw = np.random.default_rng(0)
    theirs = [-draw.exponential(1.0, num) for num in (1, 3, 8, 30, 2)]
    found = probe_module.noise_figures([row - 0.02 for row in theirs], theirs, 1e-3)
    assert found["log_s_mean"] == pytest.approx(-0.02)
    assert found["log_s_p95_abs"] == pytest.approx(0.02)
    assert found["verdict"] == "above"


def test_independent_errors_shrink_with_length_as_its_square_root():
    draw = np.random.default_rng(1)
    theirs = [np.zeros(num) for num in [4] * 400 + [400] * 400]
    found = probe_module.noise_figures([row + draw.normal(0, 0.01, len(row)) for row in theirs], theirs, None)
    short, long = found["by_length"][0], found["by_length"][-1]
    assert (short["tokens"], long["tokens"]) == ([4, 4], [400, 400])
    assert short["std"] / long["std"] == pytest.approx(math.sqrt(100), rel=0.15)
    assert found["verdict"] == "fine"  # no clip range


def test_a_run_is_probed_at_its_checkpoint_with_its_own_config(tmp_path, capsys):
    _, path = train(tmp_path, "total_train_steps=1", "rollout.sampler_precision=int8", "saver.freq_steps=1")
    capsys.readouterr()
    found = {}
    for step in ("0", "last"):
        assert cli.main(["doctor", "--probe", str(path), "--step", step, "--json"]) == 0
        found[step] = json.loads(capsys.readouterr().out)
    assert (found["0"]["step"], found["last"]["step"]) == (0, 1)
    assert found["0"]["log_s_mean"] != found["last"]["log_s_mean"]  # other weights
    assert {f["sampler"] for f in found.values()} == {"in process, on weights rounded to int8"}
    assert cli.main(["doctor", "--probe", str(path), "--step", "7"]) == 2
    assert "no checkpoint of step 7" in capsys.readouterr().err


def test_the_command_says_what_would_be_refused_and_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [*TINY, "rollout.sampler_precision=int8", "actor.prox_logp_method=rollout", "actor.eps_clip=1e-6"]
    (tmp_path / "run.yaml").write_text("actor: {path: embedded:tiny}\n")
    assert cli.main(["doctor", "--probe", "run.yaml", *given]) == 1
    said = capsys.readouterr().out
    assert "Refused" in said
    assert "actor.prox_logp_method=recompute" in " ".join(said.split())
    assert cli.main(["doctor", "--probe", "run.yaml", *given, "actor.prox_logp_force=true", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "above"
    assert not list(tmp_path.glob("runs*"))  # nothing is left behind


@pytest.mark.parametrize(
    "words",
    [["--probe"], ["--probe", "--selftest"], ["--selftest", "--step", "3"], ["x.yaml", "--step", "3"]],
)
def test_a_question_that_makes_no_sense_exits_2_before_torch_is_asked(words, capsys):
    assert cli.main(["doctor", *words]) == 2
    assert capsys.readouterr().err.startswith("gspo: ")


# Which processes


@pytest.mark.parametrize(
    ("backend", "gpus", "with_server", "want"),
    [
        ("local", 0, False, "local"),
        ("local", 0, True, "local:d1"),
        ("auto", 1, True, "local"),  # the only GPU is the trainer's
        ("auto", 8, False, "local:d1"),
        ("vllm:d4t2", 8, True, "vllm:d1t2"),
        ("vllm:d1", 0, False, "vllm:d1"),
    ],
)
def test_one_rank_and_at_most_one_server_of_the_config_are_asked(tmp_path, backend, gpus, with_server, want):
    loaded = load(None, ["algorithm=gspo", f"rollout.backend={backend}", "scheduler.type=slurm", "cluster.n_nodes=2"])
    config = one_of_each(loaded, tmp_path, gpus, with_server=with_server).config
    assert (config.rollout.backend, config.actor.backend) == (want, "fsdp:d1")
    assert (config.scheduler.type, config.cluster.n_nodes, config.cluster.fileroot) == ("local", 1, str(tmp_path))


# The self-test: each check is passed by what is right and failed by what is wrong


@pytest.fixture
def policy(exact):
    return PolicyModule(model_zoo.build("qwen3"))


class Tepid(PolicyModule):
    """Forgets the temperature."""

    def forward(self, packed, *, temperature=1.0, **how):
        return super().forward(packed, temperature=1.0, **how)


class Leaky(PolicyModule):
    """Packs plainly, without positions that begin anew."""

    def hidden(self, packed):
        packed = packed.to("cpu")
        packed.positions[:] = torch.arange(len(packed.positions))
        return super().hidden(packed)


@pytest.mark.parametrize("check", [checks.gradients, checks.packings])
def test_packing_is_passed_by_the_policy_and_failed_by_one_that_leaks_or_forgets_the_temperature(check, policy):
    figure, bound = check(policy)
    assert figure <= 1e-10 < bound
    for kind in (Tepid, Leaky):
        figure, bound = check(kind(policy.model))
        assert figure > 1e3 * bound


def test_gradients_are_compared_where_some_sequences_are_clipped_and_some_are_not(policy, monkeypatch):
    seen, loss = [], checks.objectives.loss

    def looked(*args, **settings):
        seen.append(made := loss(*args, **settings))
        return made

    monkeypatch.setattr(checks.objectives, "loss", looked)
    checks.gradients(policy)
    packed, padded = seen
    assert 0 < int(packed.clipped.sum()) < len(packed.clipped)
    assert float((packed.loss - padded.loss).detach().abs()) < 1e-12


def test_sampler_parity_is_failed_by_a_sampler_that_draws_at_another_temperature(monkeypatch):
    policy = PolicyModule(model_zoo.build("qwen3").float())
    sampler = LocalSampler(policy.model, seed=0, eos_token_ids=[1])
    figure, bound = checks.parity(policy, sampler, torch.float32)
    assert figure <= bound
    monkeypatch.setattr(checks, "SamplingParams", lambda max_new_tokens, temperature: SamplingParams(max_new_tokens))
    figure, bound = checks.parity(policy, sampler, torch.float32, first=4)
    assert figure > bound


def test_weight_sync_is_failed_by_a_copy_that_takes_nothing_or_half(monkeypatch, tmp_path):
    policy = PolicyModule(model_zoo.build("qwen3").float())
    sync = partial(checks.copied, policy, lambda: copy.deepcopy(policy.model), tmp_path)
    right = checks._line("weight sync", "all of it", sync)
    assert right.ok
    assert not right.skipped
    assert not list(tmp_path.glob("weights/*"))
    copy_weights = checks.load.copy_weights
    monkeypatch.setattr(checks.load, "copy_weights", lambda model, tensors: None)
    assert str(checks._line("weight sync", "nothing", sync)).startswith("FAILED")
    monkeypatch.setattr(checks.load, "copy_weights", lambda model, tensors: copy_weights(model, list(tensors)[1:]))
    half = checks._line("weight sync", "half", sync)
    assert not half.ok
    assert "WeightSyncError" in half.failure


def test_a_line_is_ok_only_with_a_finite_figure_within_its_bound():
    assert checks.SelfCheck("a", "b", 1e-3, 1e-3).ok
    assert not checks.SelfCheck("a", "b", float("nan"), 1e-3).ok
    assert not checks.SelfCheck("a", "b", 2e-3, 1e-3).ok
    assert not checks.SelfCheck("a", "b", failure="it broke").ok
    assert str(checks.SelfCheck("a", "b", skipped="no GPU")).startswith("skipped")


@pytest.mark.parametrize("kind", [(), ("actor.use_lora=true", "actor.lora_rank=4")])
def test_the_self_test_passes_here(tmp_path, kind):
    lines = list(checks.selftest(load(None, [*TINY, *kind]), tmp_path))
    *done, server = lines
    assert all(line.ok and not line.skipped for line in done), lines
    assert len(done) == 4
    assert server.skipped  # nobody started one


@pytest.mark.full
@pytest.mark.parametrize("kind", [[], [QUICKSTART, "actor.use_lora=true", "actor.weight_update_mode=broadcast"]])
def test_the_self_test_passes_here_with_a_real_server_process(capfd, kind):
    assert cli.main(["doctor", "--selftest", *kind]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok"] * 5, lines
    assert "sampler server" in lines[-1]

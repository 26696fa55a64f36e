"""Seconds and bytes on given hardware, by hand; and the split that a search finds."""

import json

import pytest

from gspo.cli import main as cli
from gspo.errors import ConfigError
from lab.planning import simulation
from lab.planning.command import model_size
from lab.planning.search import PlannedJob, best_bound, best_plan, bound, plans
from lab.planning.simulation import (
    GPUS,
    MODELS,
    Gpu,
    ModelSize,
    Work,
    parse_gpus,
    publish_s,
    sampler_cost,
    smallest_engine,
    trainer_bytes,
    trainer_parts,
)

ROUND = Gpu("round", flops=1e12, bandwidth=1e12, memory=100e9, link=1e11, network=1e10)
MODEL = ModelSize("1B", 1e9, 1e9, layers=10, hidden=1000, kv_bytes=1000)


def test_a_decode_step_reads_the_weights_and_the_keys_and_values_once():
    cost = sampler_cost(MODEL, ROUND, 1, context=1000, longest=2000)
    read = (2e9 + 4 * 500 * 1000) / (1e12 * simulation.BANDWIDTH_SHARE)
    assert cost.decode(4, 500) - simulation.STEP_S == pytest.approx(max(read, 2 * 1e9 * 4 / 5e11))


def test_many_rows_are_bound_by_arithmetic():
    cost = sampler_cost(MODEL, ROUND, 1, context=1000, longest=2000)
    assert cost.decode(256, 0) - simulation.STEP_S == pytest.approx(2 * 1e9 * 256 / (1e12 * simulation.PREFILL_SHARE))


def test_rows_are_bound_by_memory():
    # 90 GB − 2 GB of weights; a sequence of 2,000 tokens has 2e6 bytes of keys and values.
    small = Gpu("small", 1e12, 1e12, 3e9, 1e11, 1e10)
    assert sampler_cost(MODEL, small, 1, context=1000, longest=2000).max_rows == 256
    assert sampler_cost(MODEL, small, 1, context=50_000, longest=100_000).max_rows == int(0.7e9 // 1e8)


def test_one_row_of_a_mixture_reads_its_experts_and_many_rows_read_all():
    mixture = MODELS["30B-A3B"]
    assert mixture.touched(1) == pytest.approx(mixture.active, rel=1e-6)
    assert mixture.touched(10_000) == pytest.approx(mixture.parameters, rel=1e-6)
    assert mixture.active < mixture.touched(16) < mixture.parameters


def test_training_counts_five_forwards_per_token():
    parts = trainer_parts(MODEL, ROUND, 4, context=0, batch_tokens=1e9, num_updates=1, mb_tokens=10**6)
    assert parts.cost(1e9).token_s == pytest.approx(5 * 2e9 / (4 * 1e12 * simulation.TRAIN_SHARE))
    assert parts.limit == "arithmetic"


def test_small_micro_batches_are_bound_by_the_network():
    many = trainer_parts(MODEL, ROUND, 64, context=0, batch_tokens=1e6, num_updates=1, mb_tokens=10)
    gathers = 1e6 / (64 * 10)
    assert many.cost(1e6).token_s == pytest.approx(4 * gathers * 2e9 / 1e10 / 1e6)
    assert many.limit == "all-gathers"


def test_every_update_gathers_the_weights_however_many_ranks_there_are():
    few, many = (
        trainer_parts(MODEL, ROUND, n, context=0, batch_tokens=1e6, num_updates=4, mb_tokens=10**6) for n in (16, 4096)
    )
    assert few.all_gathers == many.all_gathers == pytest.approx(4 * 4 * 2e9 / 1e10)


def test_rank_0_sends_the_weights_to_each_server_and_a_pipeline_sends_them_once():
    # 2 GB of weights: a digest, then 0.2 s for each server.
    assert publish_s(MODEL, ROUND, 100) == pytest.approx(2e9 / simulation.DIGEST + 100 * 0.2)
    assert publish_s(MODEL, ROUND, 100, pipelined=True) == pytest.approx(0.5 + 0.2)


def test_the_split_that_looks_best_is_nearly_the_best_of_all():
    best = plans(job(32), (4,))[0]
    likely = best_plan(job(32), 4)
    assert likely is not None
    assert likely.result.step_s <= best.result.step_s * 1.05


def test_a_simulated_step_is_not_faster_than_its_bound():
    found = plans(job(32), (4,))[0]
    seconds, _ = bound(job(32), (found.trainers, found.samplers, found.tensor_parallel), 4)
    assert found.result.step_s >= seconds * 0.98
    smallest = best_bound(job(32), 4)
    assert smallest is not None
    assert smallest[0] <= seconds


def test_memory_of_training_is_sharded():
    assert trainer_bytes(MODEL, 8, 0) == pytest.approx(16e9 / 8 + 2 * 2e9 / 10)


def test_the_smallest_engine_holds_the_weights():
    assert smallest_engine(MODELS["7B"], GPUS["H100"], 4096) == 1
    assert smallest_engine(ModelSize("70B", 70e9, 70e9, 80, 8192, 327_680), GPUS["H100"], 4096) == 4


def job(num_gpus, tokens=400, **more):
    work = Work(16, 4, 64, lambda submission, sample: tokens, num_steps=6)
    return PlannedJob(MODELS["7B"], GPUS["H100"], num_gpus, work, tokens, 512, **more)


def test_the_best_split_is_no_slower_than_any_other_and_has_both_modes():
    found = plans(job(8), (0, 2))
    assert found[0].result.step_s == min(plan.result.step_s for plan in found)
    assert {plan.in_turns for plan in found} == {True, False}


def test_more_gpus_are_not_slower_unless_each_server_costs_rank_0_time():
    few, many = plans(job(8, pipelined=True), (2,))[0], plans(job(32, pipelined=True), (2,))[0]
    assert many.result.step_s <= few.result.step_s
    # Of a job this small, sending the weights to more servers takes longer than sampling.
    slow = plans(job(32), (2,))[0]
    assert slow.result.step_s > many.result.step_s
    assert slow.limit == "trainer: weights"


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs():
    large = ModelSize("400B", 400e9, 400e9, 100, 16384, 500_000)
    work = Work(4, 2, 64, lambda submission, sample: 8)
    with pytest.raises(ConfigError, match="400B does not fit: training needs 128 H100"):
        plans(PlannedJob(large, GPUS["H100"], 8, work, 8, 72, mb_tokens=1024))
    with pytest.raises(ConfigError, match=r"lower actor\.mb_spec"):
        plans(PlannedJob(large, GPUS["H100"], 8, work, 8, 72, mb_tokens=65536))


@pytest.mark.parametrize("text", ["H100", "H100:1", "X:4", "H100:-3", "H100:99999999"])
def test_unknown_hardware_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="for example H100:64"):
        parse_gpus(text)


def test_the_size_of_an_embedded_mixture_is_counted():
    size = model_size("embedded:tiny-moe")
    assert (size.experts, size.experts_per_token) == (16, 2)
    # 14 idle experts per layer, 3 × 64 × 48 weights each.
    assert size.parameters - size.active == 14 * 3 * 64 * 48 * 6


def test_the_command_prints_plans_as_json(capsys):
    words = ["plan", "examples/quickstart.yaml", "--gpus", "H100:8", "--model", "7B", "--json", "--length", "20"]
    words += ["gconfig.n_samples=2", "train_dataset.batch_size=4"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated"] is True
    assert found["plans"][0]["step_s"] <= found["plans"][-1]["step_s"]


def test_a_mean_length_above_the_most_is_refused(capsys):
    words = ["plan", "examples/quickstart.yaml", "--gpus", "H100:8", "--model", "7B", "--length", "20000"]
    assert cli.main(words) == 2
    assert "gconfig.max_new_tokens" in capsys.readouterr().err

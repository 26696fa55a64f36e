"""The simulated pipeline: times that can be computed by hand, and bounds that must hold."""

import pytest

from lab.planning.simulation import (
    SamplerCost,
    SerialCost,
    SharedCores,
    TrainerCost,
    Work,
    lognormal_lengths,
    simulate,
)


def sampler(step_s=1.0, row_s=0.0, max_rows=64, prefill=0.0, load_s=0.0):
    return SamplerCost(lambda rows, context: step_s + row_s * rows, prefill, max_rows, load_s)


def work(eta=0, steps=12, tokens=10, groups=4):
    return Work(groups, 2, 5, lambda submission, sample: tokens, max_staleness=eta, num_steps=steps)


def test_a_synchronous_step_is_sampling_then_training():
    # 10 tokens at 1 s, then 4 groups × 2 × 10 tokens at 0.05 s = 4 s, 20 prompt tokens at 0.1 s = 2 s, 3 s and 1 s.
    found = simulate(work(), sampler(), TrainerCost(0.05, 0.1, fixed_s=3.0, publish_s=1.0), in_process=True)
    assert found.step_s == pytest.approx(10 + 4 + 2 + 3 + 1)
    assert found.staleness == 0
    assert found.busy["trainer"] == pytest.approx(0.5)


def test_prefill_is_paid_once_per_group():
    found = simulate(work(), sampler(prefill=0.1), TrainerCost(0.0, 0.0), in_process=True)
    assert found.step_s == pytest.approx(4 * 5 * 0.1 + 10)


def test_rows_beyond_the_most_wait_for_free_ones():
    found = simulate(work(), sampler(max_rows=4), TrainerCost(0.0, 0.0), in_process=True)  # 8 samples, 4 at a time
    assert found.step_s == pytest.approx(20)


def test_a_step_of_more_rows_takes_longer():
    found = simulate(work(), sampler(row_s=0.5), TrainerCost(0.0, 0.0), in_process=True)
    assert found.step_s == pytest.approx(10 * (1 + 0.5 * 8))


def test_with_staleness_the_slower_side_decides():
    # Sampling a batch takes 10 s alone; training 40 s. Ahead of the trainer, sampling is hidden.
    slow_trainer = TrainerCost(0.5, 0.0)
    alone = simulate(work(eta=0), sampler(), slow_trainer)
    ahead = simulate(work(eta=1), sampler(), slow_trainer)
    assert alone.step_s == pytest.approx(50)
    assert ahead.step_s == pytest.approx(40)
    assert ahead.limit == "trainer"


def test_a_slow_sampler_is_the_limit():
    found = simulate(work(eta=4, steps=30), sampler(max_rows=8), TrainerCost(0.01, 0.0))
    assert found.limit == "sampler"
    assert found.step_s == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("eta", [0, 1, 3, 8])
def test_staleness_never_exceeds_its_bound(eta):
    varied = Work(4, 2, 5, lognormal_lengths(20, 1.0, 200), max_staleness=eta, num_steps=40)
    found = simulate(varied, sampler(max_rows=4), TrainerCost(0.2, 0.0), num_servers=3)
    assert 0 <= found.staleness <= found.max_staleness <= eta


def test_two_servers_take_half_the_time_of_one_that_is_full():
    one = simulate(work(groups=8), sampler(max_rows=8), TrainerCost(0.0, 0.0), num_servers=1)
    two = simulate(work(groups=8), sampler(max_rows=8), TrainerCost(0.0, 0.0), num_servers=2)
    assert one.step_s == pytest.approx(20)
    assert two.step_s == pytest.approx(10)


def test_the_longest_sample_decides_a_synchronous_step_and_staleness_hides_it():
    tail = Work(4, 2, 5, lambda i, k: 100 if (i, k) == (4 * (i // 4), 0) else 10, num_steps=20)
    hidden = Work(tail.num_groups, 2, 5, tail.length, max_staleness=8, num_steps=20)
    waits = simulate(tail, sampler(), TrainerCost(0.0, 0.0, fixed_s=1.0))
    ahead = simulate(hidden, sampler(), TrainerCost(0.0, 0.0, fixed_s=1.0))
    assert waits.step_s == pytest.approx(101)
    assert ahead.step_s < 40


def test_new_weights_cost_a_load_and_the_tokens_of_open_rows():
    # The sampler is the limit: 30 s a row, three batches in flight.
    free = simulate(work(eta=2, tokens=30, steps=30), sampler(), TrainerCost(0.02, 0.0))
    paid = simulate(work(eta=2, tokens=30, steps=30), sampler(load_s=2.0, prefill=0.01), TrainerCost(0.02, 0.0))
    assert paid.step_s > free.step_s + 2.0


def test_the_leader_is_a_limit_if_it_is_slow():
    found = simulate(work(eta=8, steps=30), sampler(), TrainerCost(0.0, 0.0), leader=SerialCost(sample_s=3.0))
    assert found.limit == "leader"
    assert found.step_s == pytest.approx(8 * 3.0, rel=0.1)


def test_processes_on_one_core_take_turns():
    # Sampler and trainer both need 20 s a step: side by side on two cores 20 s, on one core 40 s.
    cost = work(eta=2, tokens=20, steps=30), sampler(), TrainerCost(20 / 160, 0.0)
    one = simulate(*cost, cores=SharedCores(servers=[0], trainer=0))
    two = simulate(*cost, cores=SharedCores(servers=[1], trainer=0))
    slow = simulate(*cost, cores=SharedCores(servers=[1], trainer=0, slowdown=1.5))
    assert one.step_s == pytest.approx(40, rel=0.1)
    assert two.step_s == pytest.approx(20, rel=0.1)
    assert slow.step_s == pytest.approx(30, rel=0.1)


def test_two_servers_on_one_core_are_as_fast_as_one():
    cores = SharedCores(servers=[1, 1], trainer=0)
    one = simulate(work(groups=8), sampler(max_rows=8), TrainerCost(0.0, 0.0))
    two = simulate(work(groups=8), sampler(max_rows=8), TrainerCost(0.0, 0.0), num_servers=2, cores=cores)
    assert two.step_s == pytest.approx(one.step_s)


def test_an_idle_server_begins_after_its_latency_and_a_busy_one_at_once():
    late = SamplerCost(lambda rows, context: 1.0, 0.0, 64, latency_s=2.0)
    assert simulate(work(), late, TrainerCost(0.0, 0.0, fixed_s=1.0)).step_s == pytest.approx(2 + 10 + 1)
    busy = simulate(work(eta=4, steps=30), late, TrainerCost(0.0, 0.0, fixed_s=1.0))
    assert busy.step_s < 5


def test_lengths_have_their_mean_and_their_bound():
    draw = lognormal_lengths(100, 0.5, 400)
    found = [draw(i, k) for i in range(500) for k in range(4)]
    assert sum(found) / len(found) == pytest.approx(100, rel=0.05)
    assert max(found) <= 400
    assert found == [draw(i, k) for i in range(500) for k in range(4)]

"""Training runs whose sampler servers are real processes that are killed, stopped and started again."""

import signal
import threading
import time
from collections import Counter

import episode_envs
import pytest
from processes import until
from served_runs import TOKEN, Servers, Starter
from slow_links import SlowLink
from training_runs import build_fast, make_trainer, metrics, path_of, samples, train

from gspo.config import dump, load
from gspo.errors import RolloutError
from gspo.models import embedded
from gspo.sampling import registered, weight_folders
from gspo.system import Launched

pytestmark = pytest.mark.run

# π_old is the trainer's own: then the sampler's last bits, which depend on who else is in its batch, reach no gradient
# and two runs with the same tokens have the same weights, bit for bit.
RUN = ("actor.prox_logp_method=recompute", "total_train_steps=2", "evaluator.size=4", "rollout.request_timeout=120")


@pytest.fixture(scope="module")
def baseline(tiny, tmp_path_factory):
    """The same run, sampled in the trainer's process."""
    return train(tmp_path_factory.mktemp("baseline"), *RUN)[1]


@pytest.fixture(scope="module")
def starter():
    starter = Starter()
    yield starter
    starter.close()


@pytest.fixture
def launched(tiny, tmp_path, monkeypatch, starter):
    """Start servers for a run in tmp_path, and tell the trainer of them; everything ends with the test."""
    started = []

    def launch(count, *overrides, by=starter, ready=False, **how):
        config = tmp_path / "resolved.yaml"
        trainer = make_trainer(tmp_path, *RUN, *overrides)
        config.write_text(dump(trainer.loaded))
        assert load(config).config == trainer.config
        servers = Servers(by, tmp_path, config, count, **how)
        started.append(servers)
        until(lambda: not ready or all(registered(servers.folder, i) for i in range(count)), 120)
        told = Launched(is_launched=True, num_samplers=count, sampler_folder=servers.folder, token=TOKEN)
        for name, value in told.write().items():
            monkeypatch.setenv(name, value)
        return servers

    yield launch
    for servers in started:
        servers.close()


def assert_same_run(path, baseline, steps=2):
    """Every trained sample is that of the run without servers, once; and so are the weights."""
    for step in range(1, steps + 1):
        rows, expected = samples(path, step), samples(baseline, step)
        assert Counter(map(_who, rows)) == Counter(map(_who, expected))
        assert [_told(row) for row in rows] == [_told(row) for row in expected]
    name = f"checkpoints/step_{steps:06d}/model.safetensors"
    assert (path / name).read_bytes() == (baseline / name).read_bytes()


def assert_same_checkpoint(path, expected):
    for name in ("model.safetensors", "optimizer.safetensors"):
        file = f"checkpoints/step_000002/{name}"
        assert (path / file).read_bytes() == (expected / file).read_bytes()


def _who(row):
    return row["prompt"], row["completion"]


def _told(row):
    return {key: row[key] for key in ("prompt", "completion", "reward", "advantage")}


def log(path):
    return (path / "log.txt").read_text()


@pytest.mark.full
def test_a_sampler_killed_while_it_generates_changes_nothing_and_serves_again(launched, baseline, tmp_path):
    servers = launched(2, faults=["rollout.token:20:kill"])
    for folder in weight_folders(path_of(tmp_path)):
        folder.mkdir(parents=True)
        (folder / "weights_00000009.safetensors").touch()  # what a killed trainer has left
    _, path = train(tmp_path, *RUN)
    assert servers.fired() == ["rollout.token:20:kill"]
    assert_same_run(path, baseline)
    assert len(servers.started[0]) == 2
    assert "requests go to the others" in log(path)
    # Nothing of the weights' journey is left, on disk or in memory.
    assert not list(path.rglob("weights_*"))
    assert not any(folder.exists() for folder in weight_folders(path))


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    ["sampler.start:1:kill", "sampler.register:1:kill", "sampler.load:2:kill", "weights.copy:30:kill",
     "sampler.collect:1:kill", "rollout.token:50:kill"],
)  # fmt: skip
def test_one_of_two_samplers_killed_anywhere_changes_nothing(launched, baseline, tmp_path, fault):
    servers = launched(2, faults=[fault])
    _, path = train(tmp_path, *RUN)
    assert servers.fired() == [fault]
    assert_same_run(path, baseline)


@pytest.mark.full
@pytest.mark.parametrize(
    "how",
    [{"delay_s": 0.05}, {"delay_s": 0.005, "cuts": 3}, {"delay_s": 0.005, "silent_s": 6.0}],
    ids=["slow", "cut", "silent"],
)
def test_a_slow_link_that_is_cut_changes_nothing(launched, baseline, tmp_path, how):
    servers = launched(2, ready=True)
    # A request may be lost three times, so only one of the links is cut, three times.
    links = [SlowLink(servers.folder, 0, **how), SlowLink(servers.folder, 1, **{**how, "cuts": 0})]
    try:
        _, path = train(tmp_path, *RUN)
    finally:
        for link in links:
            link.close()
    assert all(link.num_parts > 40 for link in links)
    assert links[0].num_cut == how.get("cuts", 0)
    assert_same_run(path, baseline)


@pytest.mark.full
@pytest.mark.parametrize("env", [episode_envs.ask_again, episode_envs.forgetful])
def test_episodes_over_servers_of_which_one_is_killed_are_those_of_one_process(
    launched, tmp_path, tmp_path_factory, env
):
    _, alone = train(tmp_path_factory.mktemp("alone"), *RUN, env=env)
    servers = launched(2, faults=["rollout.token:20:kill"])
    _, path = train(tmp_path, *RUN, env=env)
    assert servers.fired() == ["rollout.token:20:kill"]
    assert_same_run(path, alone)
    assert [row["turns"] for row in samples(path, 1)] == [row["turns"] for row in samples(alone, 1)]


@pytest.mark.full
@pytest.mark.parametrize("fault", ["rollout.token:20:kill", "sampler.load:2:kill"])
def test_both_samplers_killed_and_started_again_change_nothing(launched, baseline, tmp_path, fault):
    servers = launched(2, faults=[fault, fault])
    _, path = train(tmp_path, *RUN)
    assert servers.fired() == [fault, fault]
    assert_same_run(path, baseline)
    assert log(path).count("serves, with verified weights") >= 4


@pytest.mark.full
def test_both_samplers_killed_for_good_end_the_run_in_time_and_by_name(launched, tmp_path):
    servers = launched(2, faults=["rollout.token:20:kill"] * 2, restarts=0, ready=True)
    gone = []

    def watch():
        while servers.alive():
            time.sleep(0.05)
        gone.append(time.monotonic())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with pytest.raises(RolloutError, match=r"sampler 0 .*sampler 1 .*rollout\.request_timeout"):
        make_trainer(tmp_path, *RUN, "rollout.request_timeout=8").train()
    ended = time.monotonic()
    watcher.join()
    assert servers.fired() == ["rollout.token:20:kill"] * 2
    assert ended - gone[0] < 8 + 10


@pytest.mark.full
@pytest.mark.parametrize("fault", ["rollout.token:20:stop", "sampler.load:2:stop", "sampler.collect:1:stop"])
def test_a_sampler_that_is_stopped_is_given_up_and_its_work_done_by_the_other(launched, baseline, tmp_path, fault):
    servers = launched(2, faults=[fault], ready=True)
    _, path = train(tmp_path, *RUN, "rollout.request_timeout=24")
    assert servers.fired() == [fault]
    assert_same_run(path, baseline)
    assert len(servers.alive()) == 2  # it is there, and stands still


@pytest.mark.full
def test_a_stopped_sampler_alone_ends_the_run_in_time(launched, tmp_path):
    servers = launched(1, faults=["rollout.token:20:stop"], ready=True)
    begin = time.monotonic()
    with pytest.raises(RolloutError, match=r"sampler 0 .*no answer in 4 s.*rollout\.request_timeout"):
        make_trainer(tmp_path, *RUN, "rollout.request_timeout=12").train()
    assert servers.fired() == ["rollout.token:20:stop"]
    assert time.monotonic() - begin < 120


@pytest.mark.full
def test_a_sampler_killed_while_idle_gets_the_last_weights_before_it_serves(launched, baseline, tmp_path):
    """Killed from outside between two steps; a resumed run attaches to servers that another trainer had used."""
    servers = launched(2)
    _, path = train(tmp_path, *RUN, "total_train_steps=1")
    first = registered(servers.folder, 0)
    servers.signal(0, signal.SIGKILL)
    until(lambda: registered(servers.folder, 0) != first, 60)
    _, path = train(tmp_path, *RUN)
    assert_same_run(path, baseline)
    assert f"sampler 0 ({registered(servers.folder, 0).url}) serves, with verified weights of version 1" in log(path)
    assert "version 1" in log(path).split("sampler 1")[-1]


@pytest.mark.full
def test_one_server_is_the_run_of_one_process_bit_for_bit(launched, tiny, tmp_path, tmp_path_factory):
    how = ("actor.prox_logp_method=rollout",)  # the sampler's own log-probs, to the last bit, reach the gradient
    _, expected = train(tmp_path_factory.mktemp("alone"), *RUN, *how)
    launched(1, *how)
    _, path = train(tmp_path, *RUN, *how)
    assert_same_checkpoint(path, expected)


@pytest.mark.full
def test_one_server_of_a_mixture_has_its_routes_replayed_as_the_process_has(launched, tmp_path, monkeypatch):
    name = "embedded:tiny-moe"
    build_fast(monkeypatch, tmp_path / "cache", name)
    model, tokenizer = embedded.build(name)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    how = (
        f"actor.path={tmp_path / 'model'}", "actor.routing_replay=rollout", "actor.prox_logp_method=rollout",
        "gconfig.max_new_tokens=8", "actor.ppo_n_minibatches=2", "train_dataset.batch_size=4", "gconfig.n_samples=4",
    )  # fmt: skip
    _, expected = train(tmp_path / "alone", *RUN, *how, reward=some_reward)
    assert metrics(expected)[-1]["moe/expert_flip_rate"] is not None
    launched(1, *how)
    _, path = train(tmp_path, *RUN, *how, reward=some_reward)
    assert "serves, with verified weights" in log(path)
    assert_same_checkpoint(path, expected)
    for name in ("moe/expert_flip_rate", "moe/sampler_flip_rate"):
        assert [row.get(name) for row in metrics(path)] == [row.get(name) for row in metrics(expected)]


def some_reward(completions, **_):
    """Differs inside a group whatever an untrained model says."""
    return [float(sum(map(ord, c)) % 3) for c in completions]


@pytest.mark.full
def test_servers_end_with_whoever_started_them(launched, tmp_path):
    starter = Starter()
    servers = launched(2, restarts=0, by=starter, ready=True)
    assert len(servers.alive()) == 2
    starter.close()
    until(lambda: not servers.alive(), 10)

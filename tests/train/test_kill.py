"""Kill it anywhere, run it again: the run is the uninterrupted one, bit for bit (promise P1, test 1; P2, test 2)."""

import json
import time

import pytest
import torch
import vision_zoo
from killed_runs import Runs, fired
from training_runs import RANKED, SFT, digests, metrics, path_of

from gspo import rng
from gspo.faults import SITES
from gspo.runs import checkpoint

pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.run]

# How often a run of 20 steps comes by each site, at least. `replace` needs a damaged checkpoint and has its own test.
VISITS = {
    "rollout.token": 400, "reward.submit": 80, "reward.wait": 20, "train.backward": 12, "train.optimizer": 40,
    "train.updated": 40, "record.samples": 20, "record.metrics": 20, "eval.begin": 4, "checkpoint.file": 28,
    "checkpoint.sync": 42, "checkpoint.rename": 7, "checkpoint.prune": 4, "start.model": 1, "start.data": 1,
    "start.sampler": 1, "end.close": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny):
    server = Runs()
    yield server
    server.close()


@pytest.fixture(scope="module")
def straight(tmp_path_factory, runs):
    """Twenty steps without interruption."""
    root = tmp_path_factory.mktemp("straight")
    assert runs.run(root) == 0
    return digests(path_of(root))


def killed_then_finished(runs, root, faults):
    """One kill after another, each asserted to have happened, then to the end."""
    for number, fault in enumerate(faults, 1):
        assert runs.run(root, fault=f"{fault}:kill") == -9, (root / "out.txt").read_text()[-2000:]
        assert len(fired(root)) == number
    assert runs.run(root) == 0, (root / "out.txt").read_text()[-2000:]
    return digests(path_of(root))


def moments(count, seed):
    """`count` seeded (site, visit) pairs, every site in turn; early visits, so that a resumed run gets there too."""
    sites = list(VISITS)
    draws = rng.uniform(seed, "kill", range(count))
    return [f"{site}:{1 + int(u * VISITS[site])}" for i, u in enumerate(draws) for site in [sites[i % len(sites)]]]


def test_every_site_of_the_injector_is_killed_at_or_has_a_test_of_its_own():
    servers = {site for site in SITES if site.startswith(("sampler.", "weights."))}  # test_sampler_faults.py
    command = {"start.import", "end.report"}  # tests/cli/test_train_signals.py
    assert set(SITES) == {*VISITS, *servers, *command, "checkpoint.replace"}


@pytest.mark.parametrize(
    "fault",
    ["rollout.token:90", "checkpoint.sync:9",
     *(pytest.param(site, marks=pytest.mark.full)
       for site in ("reward.submit:31", "train.backward:9", "train.updated:9", "checkpoint.prune:1"))],
)  # fmt: skip
def test_a_run_killed_at_a_phase_and_run_again_is_the_uninterrupted_one(runs, straight, tmp_path, fault):
    assert killed_then_finished(runs, tmp_path, [fault]) == straight


@pytest.mark.full
def test_a_supervised_run_killed_between_two_updates_is_the_uninterrupted_one(runs, tmp_path):
    short = ("total_train_steps=4", "saver.freq_steps=1", "saver.keep=9", "evaluator.freq_steps=0", *SFT)
    scheduled = (*short, "actor.optimizer.lr_scheduler_type=linear", "actor.ppo_n_minibatches=2")
    assert runs.run(tmp_path / "straight", *scheduled) == 0
    rates = [row["optimizer/lr"] for row in metrics(path_of(tmp_path / "straight")) if row["step"]]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 4
    # Update 6 is the second one of step 3; step 2 was saved.
    assert runs.run(tmp_path / "killed", *scheduled, fault="train.updated:6:kill") == -9
    assert fired(tmp_path / "killed") == ["train.updated:6:kill"]
    assert runs.run(tmp_path / "killed", *scheduled) == 0
    assert digests(path_of(tmp_path / "killed")) == digests(path_of(tmp_path / "straight"))


@pytest.mark.full
def test_a_run_killed_in_a_second_pass_over_its_batch_is_the_uninterrupted_one(runs, tmp_path):
    """Two mini-batches and two passes: update 15 is the first one of the second pass of step 4, after a save at 3."""
    short = ("actor.ppo_epochs=2", "total_train_steps=5", RANKED)
    assert runs.run(tmp_path / "straight", *short) == 0
    whole = digests(path_of(tmp_path / "straight"))
    root = tmp_path / "killed"
    assert runs.run(root, *short, fault="train.updated:15:kill") == -9
    assert fired(root) == ["train.updated:15:kill"]
    assert [row["step"] for row in metrics(path_of(root))][-1] == 3
    assert runs.run(root, *short) == 0
    assert digests(path_of(root)) == whole
    assert runs.run(tmp_path / "one pass", *short[1:]) == 0
    assert digests(path_of(tmp_path / "one pass"))["model.safetensors"] != whole["model.safetensors"]


@pytest.mark.full
def test_a_run_with_images_that_is_killed_and_run_again_is_the_uninterrupted_one(runs, tmp_path):
    vision_zoo.write_folder("qwen3_vl", tmp_path / "model")
    vision_zoo.model("qwen3_vl", torch.float32).save_pretrained(tmp_path / "model")
    lines = []
    for number in range(16):
        vision_zoo.image(16, 16, number).open().save(tmp_path / f"{number}.png")
        lines.append(json.dumps({"prompt": "what?", "image": f"{number}.png", "answer": "a"}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    shown = (f"actor.path={tmp_path / 'model'}", f"train_dataset.path={tmp_path / 'rows.jsonl'}", RANKED)
    shown += ("train_dataset.size=null", "total_train_steps=5", "gconfig.max_new_tokens=6")
    assert runs.run(tmp_path / "straight", *shown) == 0, (tmp_path / "straight" / "out.txt").read_text()[-2000:]
    whole = digests(path_of(tmp_path / "straight"))
    for fault in ("rollout.token:20", "train.updated:9"):
        root = tmp_path / fault.replace(":", "-")
        assert runs.run(root, *shown, fault=f"{fault}:kill") == -9
        assert runs.run(root, *shown) == 0
        assert digests(path_of(root)) == whole


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_run_killed_at_50_seeded_moments_is_the_uninterrupted_one(runs, straight, tmp_path):
    faults = moments(50, seed=1)
    assert {f.split(":")[0] for f in faults} == set(VISITS)
    for number, fault in enumerate(faults):
        assert killed_then_finished(runs, tmp_path / str(number), [fault]) == straight, fault


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_run_killed_again_and_again_from_outside_is_the_uninterrupted_one(runs, straight, tmp_path):
    began = time.monotonic()
    assert runs.run(tmp_path / "timed") == 0
    whole = time.monotonic() - began
    # Two kills early in the run, on a fast machine as on a slow one.
    kills, seconds = 0, 0.2 * whole
    for u in rng.uniform(2, "when", range(60)):
        # Longer each time, or a run whose checkpoints are far apart would never get on.
        seconds += 0.05 * whole
        code = runs.run(tmp_path, seconds=seconds * (0.5 + float(u)))
        if code == 0:
            break
        assert code == -9
        kills += 1
    else:
        assert runs.run(tmp_path) == 0
    assert kills >= 2
    assert digests(path_of(tmp_path)) == straight


@pytest.mark.full
def test_a_seed_that_is_forgotten_on_resume_is_seen(runs, straight, tmp_path):
    assert runs.run(tmp_path, fault="train.backward:9:kill") == -9
    assert runs.run(tmp_path, forget=True) == 0
    found = digests(path_of(tmp_path))
    assert found["metrics"] != straight["metrics"]
    assert found["model.safetensors"] != straight["model.safetensors"]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_crash_at_every_operation_of_a_save_leaves_the_step_or_the_one_before(runs, straight, tmp_path):
    """The second save of a run: four files, six syncs, the rename, and the first removal after the third."""
    each = {"checkpoint.file": range(5, 9), "checkpoint.sync": range(7, 13), "checkpoint.rename": [2]}
    for site, visits in each.items():
        for visit in visits:
            root = tmp_path / f"{site}_{visit}"
            assert runs.run(root, fault=f"{site}:{visit}:kill") == -9
            assert fired(root) == [f"{site}:{visit}:kill"]
            folder = path_of(root) / "checkpoints"
            _, manifest = next(checkpoint.latest(folder))
            steps = checkpoint.steps(folder)
            assert isinstance(manifest, dict)
            assert manifest["step"] == steps[-1]
            assert len(steps) in (1, 2)
            assert runs.run(root) == 0
            assert not list(folder.glob(".*"))
            assert digests(path_of(root)) == straight


@pytest.mark.full
def test_a_kill_while_an_older_checkpoint_of_the_step_is_replaced_loses_nothing(runs, straight, tmp_path):
    """A run that resumed from an older checkpoint, because the newest is damaged, replaces that one in time."""
    root = tmp_path
    assert runs.run(root, fault="rollout.token:260:kill") == -9
    folder = path_of(root) / "checkpoints"
    newest = folder / f"step_{checkpoint.steps(folder)[-1]:06d}"
    state = newest / "state.json"
    state.write_text(state.read_text().replace("1", "2", 1))
    assert runs.run(root, fault="checkpoint.replace:1:kill") == -9
    assert fired(root)[-1] == "checkpoint.replace:1:kill"
    assert runs.run(root) == 0
    assert digests(path_of(root)) == straight


FULL = pytest.mark.full
PHASES = (
    "rollout.token:60", "reward.wait:4", "train.backward:7", "train.optimizer:12", "record.samples:5",
    "record.metrics:6", "eval.begin:2", "checkpoint.file:2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "site"),
    [
        pytest.param(name, site, marks=() if (name, i) == ("term", 4) else FULL)  # one of them in `make test`
        for name in ("term", "int", "usr1")
        for i, site in enumerate(PHASES)
    ],
)
def test_a_signal_in_any_phase_saves_ends_as_documented_and_resumes_to_the_same_end(
    runs, straight, tmp_path, site, name
):
    assert runs.run(tmp_path, fault=f"{site}:{name}") == 3  # not finished, and no error
    assert fired(tmp_path) == [f"{site}:{name}"]
    assert runs.run(tmp_path) == 0
    assert digests(path_of(tmp_path)) == straight


@pytest.mark.parametrize(
    "site",
    [
        "checkpoint.file:6",
        *(pytest.param(site, marks=FULL) for site in ("record.samples:4", "record.metrics:5", "checkpoint.rename:2")),
    ],
)
def test_a_full_disk_is_a_typed_error_and_the_same_command_goes_on(runs, straight, tmp_path, site):
    assert runs.run(tmp_path, fault=f"{site}:full") == 1
    assert fired(tmp_path) == [f"{site}:full"]
    said = (tmp_path / "out.txt").read_text()
    assert "No space left" in said
    assert "cluster.fileroot" in said
    assert runs.run(tmp_path) == 0
    assert digests(path_of(tmp_path)) == straight


@pytest.mark.full
def test_hash_seeds_and_worker_counts_do_not_reach_the_run(runs, straight, tmp_path):
    """Scheduling noise: promise table, test 13. Thread count is part of a run's identity."""
    for workers in (1, 3):
        root = tmp_path / str(workers)
        assert runs.run(root, f"reward.workers={workers}") == 0
        assert digests(path_of(root)) == straight


def test_a_fault_is_armed_by_the_environment_alone_and_a_wrong_one_is_refused():
    from gspo.errors import ConfigError
    from gspo.faults import parse_fault

    for wrong in ("nowhere:1:kill", "train.backward:0:kill", "train.backward:x:kill", "train.backward:1:explode", "x"):
        with pytest.raises(ConfigError, match="GSPO_FAULT"):
            parse_fault(wrong)
    assert json.dumps(parse_fault("train.backward:2:hang")) == '["train.backward", 2, "hang"]'


@pytest.mark.full
def test_a_run_that_stands_still_ends_itself_names_the_phase_and_dumps_its_stacks(runs, straight, tmp_path):
    begin = time.monotonic()
    assert runs.run(tmp_path, "stall_timeout=2", fault="reward.wait:3:hang") == 1
    assert time.monotonic() - begin < 30
    assert fired(tmp_path) == ["reward.wait:3:hang"]
    said, log = (tmp_path / "out.txt").read_text(), (path_of(tmp_path) / "log.txt").read_text()
    assert "stalled: no progress for 2 s after 'reward'" in said
    assert "stall_timeout" in said
    assert "producer.py" in log  # where it stood
    assert runs.run(tmp_path) == 0
    assert digests(path_of(tmp_path)) == straight


@pytest.mark.parametrize(
    ("site", "what"),
    [
        ("start.data", "loading the data (train_dataset, valid_dataset)"),
        pytest.param("start.model", "loading the model (actor.path)", marks=FULL),
        pytest.param("start.sampler", "starting the sampler", marks=FULL),
        pytest.param("end.close", "closing the run", marks=FULL),
    ],
)
def test_a_run_that_hangs_while_it_starts_or_ends_ends_itself_and_names_what_it_did(runs, tmp_path, site, what):
    overrides = ("stall_timeout=5", "total_train_steps=1", "evaluator.size=4")
    assert runs.run(tmp_path, *overrides, fault=f"{site}:1:hang") == 1
    assert fired(tmp_path) == [f"{site}:1:hang"]
    said, log = (tmp_path / "out.txt").read_text(), (path_of(tmp_path) / "log.txt").read_text()
    assert f"stalled: no progress for 5 s after {what!r}" in said
    assert "stall_timeout" in said
    assert "faults.py" in log  # where it stood


@pytest.mark.full
def test_a_chat_template_that_never_ends_is_ended_and_the_row_is_named(runs, tmp_path):
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    code = runs.run(tmp_path, "stall_timeout=5", f"train_dataset.chat_template='{loops}'")
    assert code == 1
    said = (tmp_path / "out.txt").read_text()
    assert "stalled: no progress for 5 s after 'rendering row 0 of train_dataset'" in said


@pytest.mark.parametrize(
    ("name", "site"),
    [
        pytest.param(name, site, marks=() if (name, site) == ("usr1", "start.data") else FULL)
        for name in ("term", "int", "usr1")
        for site in ("start.model", "start.data", "start.sampler")
    ],
)
def test_a_signal_while_the_run_starts_ends_it_at_once_and_the_same_command_runs_it(
    runs, straight, tmp_path, site, name
):
    assert runs.run(tmp_path, fault=f"{site}:1:{name}") == 130
    assert fired(tmp_path) == [f"{site}:1:{name}"]
    assert runs.run(tmp_path) == 0
    assert digests(path_of(tmp_path)) == straight


@pytest.mark.full
def test_a_signal_after_the_last_step_leaves_the_run_finished(runs, straight, tmp_path):
    assert runs.run(tmp_path, fault="end.close:1:term") == 0
    assert fired(tmp_path) == ["end.close:1:term"]
    assert digests(path_of(tmp_path)) == straight


@pytest.mark.full
def test_a_renamed_run_directory_goes_on_under_its_new_name(runs, straight, tmp_path):
    assert runs.run(tmp_path, fault="train.backward:9:kill") == -9
    (tmp_path / "other").mkdir()
    path_of(tmp_path).rename(tmp_path / "other" / "renamed")
    assert runs.run(tmp_path, "experiment_name=other", "trial_name=renamed") == 0
    assert digests(tmp_path / "other" / "renamed") == straight


@pytest.mark.full
def test_a_second_trainer_is_refused_although_the_lock_file_was_deleted(runs, straight, tmp_path):
    """A trainer that is busy, its `.lock` deleted as people do with stale locks, and another trainer."""
    from gspo.runs import RunDir

    first = RunDir(path_of(tmp_path))
    (path_of(tmp_path) / ".lock").unlink()
    assert runs.run(tmp_path) == 1
    assert "in use by another trainer" in (tmp_path / "out.txt").read_text()
    first.close()
    assert runs.run(tmp_path) == 0
    assert digests(path_of(tmp_path)) == straight

"""Kill it anywhere, run it again: the run is the uninterrupted one, bit for bit (promise P1, test 1; P2, test 2)."""

import json
import time

import pytest
import vision_zoo
from killed_runs import Runs, fired
from tiers import brief
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
    return finished(runs, tmp_path_factory.mktemp("straight"))


def killed_then_finished(runs, root, faults, *overrides):
    """One kill after another, each asserted to have happened, then to the end."""
    for number, fault in enumerate(faults, 1):
        assert runs.run(root, *overrides, fault=f"{fault}:kill") == -9, (root / "out.txt").read_text()[-2000:]
        assert fired(root)[number - 1 :] == [f"{fault}:kill"]
    return finished(runs, root, *overrides)


def finished(runs, root, *overrides):
    assert runs.run(root, *overrides) == 0, (root / "out.txt").read_text()[-2000:]
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


SIGNALS = ("term", "int", "usr1")
PHASES = (
    "rollout.token:60", "reward.wait:4", "train.backward:7", "train.optimizer:12", "record.samples:5",
    "record.metrics:6", "eval.begin:2", "checkpoint.file:2",
)  # fmt: skip
KILLED = (
    "rollout.token:90", "checkpoint.sync:9", "reward.submit:31", "train.backward:9", "train.updated:9",
    "checkpoint.prune:1",
)  # fmt: skip
FULL = ("record.samples:4", "record.metrics:5", "checkpoint.file:6", "checkpoint.rename:2")
# Of every fault: the exit code, and what the run says.
FAULTS = {
    **{f"{site}:kill": (-9, ()) for site in KILLED},
    **{f"{site}:{name}": (3, ()) for site in PHASES for name in SIGNALS},  # saved: not finished, and no error
    **{f"start.{what}:1:{name}": (130, ()) for what in ("model", "data", "sampler") for name in SIGNALS},  # at once
    "end.close:1:term": (0, ()),  # after the last step: finished
    **{f"{site}:full": (1, ("No space left", "cluster.fileroot")) for site in FULL},
}
QUICK = ("rollout.token:90:kill", "checkpoint.sync:9:kill", "record.samples:5:term", "start.data:1:usr1")


@pytest.mark.parametrize("fault", brief(FAULTS, *QUICK, "checkpoint.file:6:full"))
def test_a_kill_a_signal_and_a_full_disk_end_a_run_as_documented_and_the_same_command_goes_on_to_the_same_end(
    runs, straight, tmp_path, fault
):
    code, words = FAULTS[fault]
    assert runs.run(tmp_path, fault=fault) == code
    assert fired(tmp_path) == [fault]
    said = (tmp_path / "out.txt").read_text()
    assert all(word in said for word in words)
    assert (digests(path_of(tmp_path)) if code == 0 else finished(runs, tmp_path)) == straight


SHORT = ("total_train_steps=5", RANKED)
SCHEDULED = ("actor.optimizer.lr_scheduler_type=linear", "actor.ppo_n_minibatches=2")
# Of other kinds of runs: what they change, and where they are killed.
KINDS = {
    # Update 6 is the second one of step 3; step 2 was saved.
    "supervised, between two updates": (
        ("total_train_steps=4", "saver.freq_steps=1", "saver.keep=9", "evaluator.freq_steps=0", *SFT, *SCHEDULED),
        ["train.updated:6"],
    ),
    # Two mini-batches and two passes: update 15 is the first one of the second pass of step 4, after a save at 3.
    "in a second pass over its batch": (("actor.ppo_epochs=2", *SHORT), ["train.updated:15"]),
    "with images": (
        (*SHORT, "actor.path={folder}/model", "train_dataset.path={folder}/rows.jsonl", "train_dataset.size=null",
         "gconfig.max_new_tokens=6"),
        ["rollout.token:20", "train.updated:9"],
    ),
    "with groups waiting": (
        ("rollout.max_head_offpolicyness=2", "actor.use_decoupled_loss=true", "total_train_steps=8"),
        [f"{site}:{visit}" for site, visits in {
            "checkpoint.file": (5, 8, 11), "rollout.token": (20, 90), "reward.submit": (15, 25), "reward.wait": (4,),
            "train.backward": (5,), "train.updated": (7,), "record.metrics": (5,), "eval.begin": (2,),
            "checkpoint.sync": (9,), "checkpoint.rename": (2,), "checkpoint.prune": (1,),
        }.items() for visit in visits],
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_another_kind_that_is_killed_and_run_again_is_the_uninterrupted_one(runs, tmp_path, kind):
    overrides, faults = KINDS[kind]
    if kind == "with images":
        vision_zoo.model_folder(tmp_path / "model"), vision_zoo.shown_rows(tmp_path, 16)
        overrides = [override.format(folder=tmp_path) for override in overrides]
    whole = finished(runs, tmp_path / "straight", *overrides)
    for fault in faults:
        assert killed_then_finished(runs, tmp_path / fault, [fault], *overrides) == whole, fault
    if kind == "supervised, between two updates":
        rates = [row["optimizer/lr"] for row in metrics(path_of(tmp_path / "straight")) if row["step"]]
        assert rates == sorted(rates, reverse=True)
        assert len(set(rates)) == 4
    if kind == "in a second pass over its batch":
        assert runs.run(tmp_path / "killed", *overrides, fault=f"{faults[0]}:kill") == -9
        assert [row["step"] for row in metrics(path_of(tmp_path / "killed"))][-1] == 3
        assert finished(runs, tmp_path / "one pass", *SHORT)["model.safetensors"] != whole["model.safetensors"]


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
            assert finished(runs, root) == straight
            assert not list(folder.glob(".*"))


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
    assert finished(runs, root) == straight


@pytest.mark.full
def test_hash_seeds_and_worker_counts_do_not_reach_the_run(runs, straight, tmp_path):
    """Scheduling noise: promise table, test 13. Thread count is part of a run's identity."""
    for workers in (1, 3):
        assert finished(runs, tmp_path / str(workers), f"reward.workers={workers}") == straight


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
    assert finished(runs, tmp_path) == straight


HANGS = {
    "start.data": "loading the data (train_dataset, valid_dataset)",
    "start.model": "loading the model (actor.path)",
    "start.sampler": "starting the sampler",
    "end.close": "closing the run",
}


@pytest.mark.parametrize("site", brief(HANGS, "start.data"))
def test_a_run_that_hangs_while_it_starts_or_ends_ends_itself_and_names_what_it_did(runs, tmp_path, site):
    overrides = ("stall_timeout=5", "total_train_steps=1", "evaluator.size=4")
    assert runs.run(tmp_path, *overrides, fault=f"{site}:1:hang") == 1
    assert fired(tmp_path) == [f"{site}:1:hang"]
    said, log = (tmp_path / "out.txt").read_text(), (path_of(tmp_path) / "log.txt").read_text()
    assert f"stalled: no progress for 5 s after {HANGS[site]!r}" in said
    assert "stall_timeout" in said
    assert "faults.py" in log  # where it stood


@pytest.mark.full
def test_a_chat_template_that_never_ends_is_ended_and_the_row_is_named(runs, tmp_path):
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"
    code = runs.run(tmp_path, "stall_timeout=5", f"train_dataset.chat_template='{loops}'")
    assert code == 1
    said = (tmp_path / "out.txt").read_text()
    assert "stalled: no progress for 5 s after 'rendering row 0 of train_dataset'" in said


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
    assert finished(runs, tmp_path) == straight

"""Metrics beside the run directory: really written, read back by each logger's reader, and never in the run's way."""

import gc
import json
import os
import struct
import subprocess
import sys
import threading
import time

import pytest
from training_runs import metrics, train

from gspo.config import load
from gspo.errors import ConfigError
from gspo.lint import check
from gspo.monitor import loggers
from gspo.monitor.loggers import Loggers, _redirect_trackio
from gspo.runs import RunDir

pytestmark = pytest.mark.run

NAMED = {"project": "arithmetic", "name": "trial"}
EVERY = {"tensorboard": {}, "wandb": {**NAMED, "mode": "offline"}, "trackio": NAMED}


def row(step, **more):
    return {"step": step, "reward/mean": step / 8, "policy/proximal": "sampler", "eval/accuracy": None, **more}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 3\nactor:\n  path: embedded:tiny\n")
    return tmp_path


@pytest.fixture
def run(path):
    opened = RunDir(path)
    yield opened
    opened.close()


def write(path, settings, rows, resumed_at=-1):
    """As the loop does; what was said."""
    said = []
    run = RunDir(path)
    run.cut_back(resumed_at)
    sinks = Loggers(path, settings, said.append)
    for one in rows:
        run.metrics(one)
        sinks.write(one)
    sinks.close()
    run.close()
    return [line for line in said if not line.startswith("waiting")]


def from_tensorboard(path):
    """{tag: [(step, value)]} by TensorBoard's reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(path / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in seen.Scalars(tag)] for tag in seen.Tags()["scalars"]}


def from_wandb(path):
    """(run ids, config, [history rows]) of the transaction logs: LevelDB's log format around wandb's own messages."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # as at the end of the process: its service writes the last bytes after `finish` has returned
    ids, config, rows = set(), {}, []
    for file in sorted(path.glob("wandb/offline-run-*/*.wandb")):
        data, at, message = file.read_bytes(), 7, b""
        assert data[:4] == b":W&B"
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:  # a block's end is filled up
                at += 32768 - at % 32768
                continue
            _, size, kind = struct.unpack("<IHB", data[at : at + 7])
            message += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                record, message = Record.FromString(message), b""
                if record.WhichOneof("record_type") == "run":
                    ids.add(record.run.run_id)
                    config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                elif record.WhichOneof("record_type") == "history":
                    named = {item.key or "/".join(item.nested_key): item for item in record.history.item}
                    rows.append({name: json.loads(item.value_json) for name, item in named.items()})
    return ids, config, rows


def from_trackio(path):
    """Rows by Trackio's own storage, in a process whose TRACKIO_DIR is the run's."""
    code = "import json; from trackio.sqlite_storage import SQLiteStorage as S; "
    code += f"print(json.dumps(S.get_logs({NAMED['project']!r}, {NAMED['name']!r})))"
    env = {**os.environ, "TRACKIO_DIR": str(path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True, timeout=120
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_an_import_in_another_thread_does_not_disturb_the_start_of_trackio(path):
    pytest.importorskip("trackio")
    added = []

    def import_something(phase, info):
        added.append(f"imported_meanwhile_{len(added)}")
        sys.modules[added[-1]] = sys

    # A garbage collection is where another thread can take over while a list of all modules is built.
    threshold = gc.get_threshold()
    gc.callbacks.append(import_something)
    gc.set_threshold(1)
    try:
        _redirect_trackio(path, [])
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(import_something)
        for name in added:
            del sys.modules[name]
    assert added


@pytest.mark.full
def test_every_logger_holds_what_metrics_jsonl_holds(path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    first = [row(0, **{"eval/accuracy": 0.25}), row(1), row(2), row(3)]
    assert write(path, EVERY, first) == []
    (first_id,), config, rows = from_wandb(path)
    assert config["actor"] == {"path": "embedded:tiny"}
    assert [r["_step"] for r in rows] == [0, 1, 2, 3]

    # A kill after step 3, a resume from the checkpoint of step 1: steps 2 and 3 are lived again, otherwise.
    again = [row(2, **{"reward/mean": 7.0}), row(3, **{"reward/mean": 8.0}), row(4, **{"eval/accuracy": 0.5})]
    assert write(path, EVERY, again, resumed_at=1) == []
    rewards = [(0, 0.0), (1, 0.125), (2, 7.0), (3, 8.0), (4, 0.5)]
    accuracies = [(0, 0.25), (4, 0.5)]

    seen = from_tensorboard(path)
    assert (seen["reward/mean"], seen["eval/accuracy"]) == (rewards, accuracies)
    assert "policy/proximal" not in seen  # no chart shows a word

    ids, _, rows = from_wandb(path)
    assert ids == {first_id}  # one run of Weights & Biases, whatever happened to ours
    assert [(r["_step"], r["reward/mean"]) for r in rows] == rewards
    assert [(r["_step"], r["eval/accuracy"]) for r in rows if "eval/accuracy" in r] == accuracies
    assert {r["policy/proximal"] for r in rows} == {"sampler"}

    rows = from_trackio(path)
    assert [(r["step"], r["reward/mean"]) for r in rows] == rewards
    assert [(r["step"], r["eval/accuracy"]) for r in rows if "eval/accuracy" in r] == accuracies


def test_a_real_run_is_followed_and_goes_on_where_it_was(tmp_path):
    pytest.importorskip("tensorboard")
    wanted = ("stats_logger.tensorboard=true", "evaluator.size=4", "train_dataset.batch_size=4")
    _, path = train(tmp_path, *wanted, "total_train_steps=1")
    assert [step for step, _ in from_tensorboard(path)["reward/mean"]] == [1]
    _, path = train(tmp_path, *wanted, "total_train_steps=2")
    seen = from_tensorboard(path)
    for name in ("reward/mean", "grad/norm", "eval/accuracy"):
        stored = [(row["step"], row[name]) for row in metrics(path) if row.get(name) is not None]
        assert seen[name] == [(step, pytest.approx(value, rel=1e-6)) for step, value in stored]
    assert [step for step, _ in seen["grad/norm"]] == [1, 2]
    assert not [line for line in (path / "log.txt").read_text().splitlines() if "stats_logger" in line]


def test_a_logger_that_fails_is_told_once_and_the_others_go_on(path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("trackio")
    (path / "trackio").write_text("a file where the folder should be")
    said = write(path, {"trackio": NAMED, "tensorboard": {}}, [row(step) for step in range(4)])
    assert len(said) == 1
    assert "trackio failed" in said[0]
    assert "Training continues" in said[0]
    assert [step for step, _ in from_tensorboard(path)["reward/mean"]] == [0, 1, 2, 3]
    assert "Traceback" in (path / loggers.LOG).read_text()


class Stuck:
    """A sink that hangs in its first row until the test ends."""

    release = threading.Event()

    def __init__(self, run):
        pass

    def write(self, row):
        self.release.wait(60)

    def close(self):
        pass


@pytest.fixture
def stuck(monkeypatch):
    Stuck.release.clear()
    monkeypatch.setitem(loggers.SINKS, "stuck", Stuck)
    yield Stuck
    Stuck.release.set()


def test_a_hanging_sink_costs_no_step_is_dropped_once_and_the_others_continue(run, monkeypatch, stuck):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(loggers, "MAX_PENDING", 8)
    said = []
    sinks = Loggers(run.path, {"stuck": {}}, said.append)
    started = time.monotonic()
    for step in range(1000):
        sinks.write(row(step))
    assert time.monotonic() - started < 10
    assert len(said) == 1
    assert "stuck is 8 rows behind and was dropped" in said[0]
    sinks.close()
    assert len(said) == 1


def test_a_sink_that_hangs_at_the_end_is_dropped_after_a_while(run, monkeypatch, stuck):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(loggers, "PATIENCE_S", 0.5)
    said = []
    sinks = Loggers(run.path, {"stuck": {}, "tensorboard": {}}, said.append)
    for step in range(3):
        sinks.write(row(step))
    sinks.close()
    assert [line for line in said if "was dropped" in line] == [line for line in said if "stuck did not write" in line]
    assert len(said) == 2  # that it waits, and that it was dropped
    assert [step for step, _ in from_tensorboard(run.path)["reward/mean"]] == [0, 1, 2]


def test_a_process_ends_while_a_sink_hangs(run):
    code = f"""
import pathlib, time
from gspo.monitor import loggers
class Stuck:
    def __init__(self, run): pass
    def write(self, row): time.sleep(3600)
    def close(self): pass
loggers.SINKS["stuck"], loggers.PATIENCE_S = Stuck, 0.1
sinks = loggers.Loggers(pathlib.Path({str(run.path)!r}), {{"stuck": {{}}}}, print)
sinks.write({{"step": 0}})
sinks.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "was dropped" in done.stdout


def test_no_logger_starts_no_thread(run):
    before = threading.active_count()
    sinks = Loggers(run.path, {}, print)
    sinks.write(row(0))
    assert threading.active_count() == before
    sinks.close()
    assert not (run.path / loggers.LOG).exists()


def test_a_run_without_a_row_leaves_no_complaint(path):
    pytest.importorskip("tensorboard")
    assert write(path, {"tensorboard": {}}, []) == []


@pytest.mark.parametrize(
    ("override", "package"),
    [
        ("stats_logger.tensorboard=true", "tensorboard"),
        ("stats_logger.wandb.mode=offline", "wandb"),
        ("stats_logger.trackio=true", "trackio"),
    ],
)
def test_a_logger_without_its_package_is_refused_before_the_run(override, package, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a))
    base = ["experiment_name=e", "trial_name=t", "algorithm=gspo"]
    check(load(None, base))
    with pytest.raises(ConfigError, match=rf"pip install .*\[{package}\]'"):
        check(load(None, [*base, override]))


@pytest.mark.full
def test_offline_loggers_work_where_there_is_no_network(run):
    """In a network namespace of its own there is not even a loopback address."""
    pytest.importorskip("wandb")
    pytest.importorskip("trackio")
    try:
        subprocess.run(["unshare", "-rn", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as why:
        pytest.skip(f"no network namespace here: {why}")
    code = f"""
import pathlib
from gspo.monitor.loggers import Loggers
from gspo.monitor.loggers import _redirect_trackio
sinks = Loggers(pathlib.Path({str(run.path)!r}), {EVERY!r}, print)
for step in range(3):
    sinks.write({{"step": step, "reward/mean": 0.5}})
sinks.close()
"""
    command = ["unshare", "-rn", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "stats_logger" not in done.stdout  # no failure was reported
    assert [r["_step"] for r in from_wandb(run.path)[2]] == [0, 1, 2]
    assert [r["step"] for r in from_trackio(run.path)] == [0, 1, 2]
    assert [step for step, _ in from_tensorboard(run.path)["reward/mean"]] == [0, 1, 2]

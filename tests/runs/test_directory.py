import errno
import fcntl
import os
import stat

import numpy as np
import pytest
from made_runs import strict
from processes import files_up_to
from safetensors.numpy import load_file

from gspo.errors import CheckpointError, ConfigError
from gspo.report import read_metrics
from gspo.runs.directory import RunDir
from gspo.system import read_jsonl, to_json, versions_and_hardware, write_run_file


@pytest.fixture
def run(tmp_path):
    directory = RunDir(tmp_path / "experiment" / "trial")
    yield directory
    directory.close()


def test_only_strict_json_is_written_and_text_survives():
    row = {
        "nan": float("nan"), "inf": np.float64("inf"), "f32": np.float32(0.5), "int": np.int64(7),
        "bool": np.bool_(True), "text": "a\nb\u2028\x1b[31m \ud800 é", "deep": [{"x": (1, float("-inf"))}],
        3: None, "odd": {1, 2},
    }  # fmt: skip
    line = to_json(row)
    assert "\n" not in line
    back = strict(line)
    assert back["nan"] is back["inf"] is back["deep"][0]["x"][1] is None
    assert (back["f32"], back["int"], back["bool"], back["3"]) == (0.5, 7, True, None)
    assert back["text"] == "a\nb\u2028\x1b[31m \\ud800 é"
    line.encode("utf-8")


def test_floats_come_back_to_the_last_bit():
    values = [0.1, 1e-300, 5.5191986159108784e-08, 2**53 + 1.0]
    assert strict(to_json({"v": values}))["v"] == values


def test_rows_and_samples_are_cut_back_to_a_step_and_a_torn_line_is_forgotten(run):
    for step in range(4):
        run.metrics({"step": step, "reward/mean": 0.1 * step})
        if step:
            run.samples(step, [{"step": step}], {"0/logp": np.zeros(2, np.float32)})
    run.samples(9, [{"step": 9}], {})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rewa')
    (run.path / "samples" / ".step_000004.jsonl.tmp").write_text("half")
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    run.cut_back(2)
    assert (run.path / "metrics.jsonl").read_text().splitlines() == lines[:3]  # byte for byte
    names = {p.name for p in (run.path / "samples").glob("step_*")}
    assert names == {f"step_00000{i}.{kind}" for i in (1, 2) for kind in ("jsonl", "safetensors")}
    run.cut_back(-1)
    assert read_jsonl(run.path / "metrics.jsonl") == []


def test_rows_go_on_after_a_torn_line_was_cut(tmp_path):
    run = RunDir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    run.cut_back(1)
    run.metrics({"step": 2})
    run.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


def test_samples_hold_every_row_and_the_kept_tokens(run):
    run.samples(12, [{"a": 1}, {"a": float("nan")}], {"3/logp": np.array([0.5, 1.5], np.float32)})
    assert [strict(x) for x in (run.path / "samples/step_000012.jsonl").read_text().splitlines()] == [
        {"a": 1},
        {"a": None},
    ]
    assert load_file(run.path / "samples/step_000012.safetensors")["3/logp"].tolist() == [0.5, 1.5]
    run.samples(13, [], {})
    assert not (run.path / "samples/step_000013.safetensors").exists()


def test_samples_up_to_a_step_are_forgotten_and_nothing_else(run):
    for step in (1, 2, 3):
        run.samples(step, [{"step": step}], {"0/tokens": np.zeros(1, np.int32)})
    (run.path / "samples" / "notes.txt").write_text("mine")
    run.delete_samples(2)
    left = sorted(file.name for file in (run.path / "samples").iterdir())
    assert left == ["notes.txt", "step_000003.jsonl", "step_000003.safetensors"]
    run.delete_samples(-5)
    assert len(list((run.path / "samples").iterdir())) == 3


def test_two_trainers_in_one_directory_are_refused_until_the_first_is_done(run):
    with pytest.raises(ConfigError, match=r"in use by another trainer.*trial_name"):
        RunDir(run.path)
    run.close()
    RunDir(run.path).close()


def test_the_lock_holds_after_its_file_was_deleted(run):
    (run.path / ".lock").unlink()
    with pytest.raises(ConfigError, match="in use by another trainer"):
        RunDir(run.path)
    run.metrics({"step": 1})  # the first trainer goes on


def test_without_locks_on_directories_the_first_trainer_writes_nothing_once_another_has_the_lock(run, monkeypatch):
    """Some network file systems lock files only."""
    flock = fcntl.flock

    def files_only(handle, how):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "no locks on directories")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", files_only)
    first = RunDir(run.path.parent / "other")
    with pytest.raises(ConfigError, match="in use by another trainer"):
        RunDir(first.path)
    (first.path / ".lock").unlink()
    first.metrics({"step": 1})  # nobody else is there: it takes the lock again
    with pytest.raises(ConfigError, match="in use by another trainer"):
        RunDir(first.path)
    (first.path / ".lock").unlink()
    second = RunDir(first.path)
    for write in (lambda: first.metrics({"step": 2}), lambda: first.samples(2, [{"step": 2}], {})):
        with pytest.raises(CheckpointError, match=r"another trainer uses the directory.*trial_name"):
            write()
    assert read_jsonl(first.path / "metrics.jsonl") == [{"step": 1}]
    assert not list((first.path / "samples").iterdir())
    first.close()
    second.metrics({"step": 2})
    second.close()


@pytest.mark.parametrize("how", ["moved", "replaced"])
def test_a_directory_that_was_moved_or_replaced_while_the_trainer_runs_gets_nothing_more(run, how):
    run.metrics({"step": 1})
    moved = run.path.rename(run.path.with_name("moved"))
    if how == "replaced":
        run.path.mkdir()
    with pytest.raises(CheckpointError, match=r"was moved, removed or replaced.*trial_name"):
        run.metrics({"step": 2})
    with pytest.raises(CheckpointError, match="was moved, removed or replaced"):
        run.lock.check()  # as before every checkpoint
    assert read_jsonl(moved / "metrics.jsonl") == [{"step": 1}]
    assert not run.path.exists() or not list(run.path.iterdir())


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "config.yaml", ".lock", "samples/step_000001.jsonl"])
@pytest.mark.parametrize("kind", ["directory", "fifo"])
def test_a_directory_or_a_fifo_where_a_file_belongs_is_an_error_that_names_it(tmp_path, name, kind):
    """Opening a FIFO would wait for its other end."""
    RunDir(tmp_path).close()
    (tmp_path / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).mkdir()
    # The lock's own file is opened first; the operating system names the reason.
    with pytest.raises(ConfigError, match=rf"{name}.* (is|move)|cannot be written: Is a directory"):
        RunDir(tmp_path)
    (tmp_path / name).rmdir() if kind == "directory" else (tmp_path / name).unlink()
    RunDir(tmp_path).close()  # the lock was released


@pytest.mark.parametrize("read", [read_metrics, lambda run: read_jsonl(run / "metrics.jsonl")])
def test_metrics_that_are_a_directory_or_a_fifo_are_not_read(tmp_path, read):
    for make, remove in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
        make(tmp_path / "metrics.jsonl")
        with pytest.raises((ConfigError, OSError), match="not a regular file; move it away"):
            read(tmp_path)
        remove(tmp_path / "metrics.jsonl")


def test_a_root_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cluster\.fileroot"):
        RunDir(tmp_path / "file" / "experiment")


def test_an_atomic_write_that_fails_leaves_the_file_as_it_was_and_no_debris(tmp_path):
    target = tmp_path / "config.yaml"
    target.write_text("before")

    def write():
        with write_run_file(target) as tmp:
            tmp.write_text("half")
            assert target.read_text() == "before"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write()
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
    assert target.read_text() == "before"


def test_a_full_disk_is_an_error_that_names_the_file_and_the_key_and_closes(tmp_path):
    run = RunDir(tmp_path)
    run.metrics({"step": 1})
    with files_up_to(200):
        for write in (
            lambda: run.metrics({"step": 2, "text": "x" * 400}),
            lambda: run.samples(2, [{"text": "x" * 400}], {}),
            lambda: run.samples(2, [], {"a": np.zeros(400)}),
        ):
            with pytest.raises(CheckpointError, match=r"could not write .*(metrics|step_000002).*cluster\.fileroot"):
                write()
        run.log("x" * 400)  # best effort: the error that is being told matters more
        run.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert {p.name for p in (tmp_path / "samples").iterdir()} <= {"step_000002.jsonl"}
    again = RunDir(tmp_path)
    again.cut_back(1)
    again.metrics({"step": 2})
    again.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.run
def test_the_environment_says_what_a_run_depends_on():
    found = versions_and_hardware("cpu", 3)
    assert found["threads"] == 3
    assert found["packages"].keys() == {"gspo", "torch", "transformers", "safetensors", "numpy"}
    strict(to_json(found))

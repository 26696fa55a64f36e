import json
import resource

import numpy as np
import pytest
from safetensors.numpy import load_file

from gspo.errors import CheckpointError, ConfigError
from gspo.runs.directory import RunDir, environment
from gspo.system.files import read_jsonl, to_json, write_run_file


@pytest.fixture
def run(tmp_path):
    directory = RunDir(tmp_path / "experiment" / "trial")
    yield directory
    directory.close()


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


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
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        for write in (
            lambda: run.metrics({"step": 2, "text": "x" * 400}),
            lambda: run.samples(2, [{"text": "x" * 400}], {}),
            lambda: run.samples(2, [], {"a": np.zeros(400)}),
        ):
            with pytest.raises(CheckpointError, match=r"could not write .*(metrics|step_000002).*cluster\.fileroot"):
                write()
        run.log("x" * 400)  # best effort: the error that is being told matters more
        run.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert {p.name for p in (tmp_path / "samples").iterdir()} <= {"step_000002.jsonl"}
    again = RunDir(tmp_path)
    again.cut_back(1)
    again.metrics({"step": 2})
    again.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.run
def test_the_environment_says_what_a_run_depends_on():
    found = environment("cpu", 3)
    assert found["threads"] == 3
    assert found["packages"].keys() == {"gspo", "torch", "transformers", "safetensors", "numpy"}
    strict(to_json(found))

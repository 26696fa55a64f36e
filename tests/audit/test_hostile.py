"""`gspo audit` of files made to break it: an explanation, or one error that names the file. Never a hang or a crash."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import sys
import time
import types
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gspo.audit import samples
from gspo.audit.disk import audit_files, files, read_training_args
from gspo.audit.foreign import Draft
from gspo.errors import ConfigError, GspoError

FILES = Path(__file__).parent / "files"
SECONDS = 10.0  # far more than any of these needs
ODD = [
    None, True, "", "abc", "1e999", "${a}", "²", [], {}, [[]], {"a": []}, 0, -1, 2**53, 2**63, 10**400, -(10**400),
    0.0, -0.5, 1e308, -1e308, float("nan"), float("inf"), "x" * 100_000, [1, [2, [3]]], ["a"], "\ud800", "9" * 400,
]  # fmt: skip
ODD_VALUES = st.one_of(st.sampled_from(ODD), st.floats(), st.integers(), st.text(max_size=5))


def saved(folder: Path, data: bytes, **how) -> Path:
    """A training_args.bin with these bytes as its pickle."""
    with zipfile.ZipFile(folder / "training_args.bin", "w", **how) as archive:
        archive.writestr("training_args/data.pkl", data)
    return folder / "training_args.bin"


def pickled(values: dict) -> bytes:
    module = types.ModuleType("trl_config")
    module.GRPOConfig = type("GRPOConfig", (), {"__module__": "trl_config", "__qualname__": "GRPOConfig"})
    sys.modules["trl_config"] = module
    config = module.GRPOConfig()
    config.__dict__.update(values)
    return pickle.dumps(config, protocol=2)


def in_time(paths, run: Path) -> dict | None:
    """The explanation, or None for an error of ours; anything else fails the test."""
    shutil.rmtree(run, ignore_errors=True)
    began = time.process_time()
    try:
        return audit_files(paths, run)
    except GspoError:
        return None
    finally:
        assert time.process_time() - began < SECONDS


# -- Pickles

TRL = {
    "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.2, "epsilon_high": None, "beta": 0.0,
    "num_generations": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 1,
    "per_device_train_batch_size": 8, "max_steps": 10, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
    "scale_rewards": "group", "reward_weights": [1.0], "use_bias_correction_kl": False, "delta": None,
    "generation_batch_size": 64, "learning_rate": 1e-6, "vllm_importance_sampling_mode": "token_truncate",
    "use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 2.0,
    "max_grad_norm": 1.0, "max_completion_length": 16, "world_size": 1,
}  # fmt: skip
SHARED = b"]" + b"".join(b"q\x06h\x06\x86" for _ in range(60))  # 2^60 leaves of one list
HEAD, TAIL = b"\x80\x02ctrl\nGRPOConfig\n)\x81}", b"ub."


def text(name: str) -> bytes:
    return b"X" + len(name).to_bytes(4, "little") + name.encode()


@pytest.mark.parametrize(
    "items",
    [
        *(text(name) + SHARED for name in ("loss_type", "use_bias_correction_kl", "epsilon", "reward_weights", "x")),
        SHARED + text("value"),
        text("a") + b"]" + b"q\x06(h\x06h\x06e" * 60,  # a list in itself
        text("a") + b"}" + b"q\x06h\x06h\x06s" * 60,  # a dict as its own key
        text("a") + b"]" + b"(" * 100_000 + b"l" * 5,
        text("a") + b"(" + b"K\x01" * 15_000 + b"t" + b"q\x01h\x01" * 5_000,
        text("a") + b"(" * 15_000 + b"t" * 15_000,
        text("a") + b"\x8b" + (1 << 20).to_bytes(4, "little") + b"\x7f" * (1 << 20),  # an integer of 8 million bits
        text("epsilon") + b"I" + b"9" * 1_000_000 + b"\n",
        text("gradient_accumulation_steps") + b"\x8b" + (4000).to_bytes(4, "little") + b"\x7f" * 4000,
        b"cos\nsystem\n" + text("true") + b"\x85R" + text("x"),
    ],
    ids=range(15),
)
def test_a_small_pickle_ends_in_time(tmp_path, items):
    saved(tmp_path, HEAD + b"(" + items + TAIL)
    in_time([tmp_path], tmp_path / "run")


@given(st.sampled_from(sorted(TRL)), ODD_VALUES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("gradient_accumulation_steps", 0)
@example("num_generations", 0)
@example("reward_weights", ["a"])
@example("scale_rewards", [[]])
def test_an_odd_value_in_a_config_of_trl_is_explained_or_named(tmp_path, name, value):
    saved(tmp_path, pickled({**TRL, name: value}))
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"global_step": 1, "log_history": [{"step": 1, "loss": 1}]})
    )
    in_time([tmp_path], tmp_path / "run")


@given(
    st.binary(max_size=300)
    | st.lists(st.sampled_from([bytes([i]) for i in range(256)] + [text("a")]), max_size=80).map(b"".join)
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_pickle_of_any_bytes_is_named(tmp_path, data):
    file = saved(tmp_path, HEAD + b"(" + data + TAIL)
    with contextlib.suppress(ConfigError):
        read_training_args(file)


def zips(tmp_path: Path):
    good = io.BytesIO()
    with zipfile.ZipFile(good, "w") as archive:
        archive.writestr("a/data.pkl", pickled(TRL))
    content = good.getvalue()
    header, central = content.index(b"PK\x03\x04"), content.index(b"PK\x01\x02")

    def patched(at: int, value: bytes) -> bytes:
        changed = bytearray(content)
        for start, shift in ((header, 0), (central, 2)):
            changed[start + at + shift : start + at + shift + len(value)] = value
        return bytes(changed)

    yield "encrypted", patched(6, b"\x01\x00")
    yield "method 99", patched(8, b"\x63\x00")
    yield "lzma", patched(8, b"\x0e\x00")
    yield "damaged", content[:60] + b"\xff" * 20 + content[80:]
    yield "cut", content[: len(content) // 2]
    yield "empty", b""
    yield "not a zip", b"\x80\x02}q\x00."
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\0" * 300_000_000)
    yield "bomb", bomb.getvalue()
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w") as archive:
        for number in range(2000):
            archive.writestr(f"{number}/data.pkl", b"")
    yield "many members", many.getvalue()


def test_every_kind_of_damaged_zip_is_one_error_with_its_name(tmp_path):
    for kind, content in zips(tmp_path):
        file = tmp_path / "training_args.bin"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"training_args\.bin") as caught:
            read_training_args(file)
        assert not isinstance(caught.value.__cause__, MemoryError), kind
        in_time([tmp_path], tmp_path / "run")
    file.unlink()
    with open(file, "wb") as stream:
        stream.truncate(300 * 2**30)  # sparse
    with pytest.raises(ConfigError, match="has 322,122,547,200 bytes"):
        read_training_args(file)


# -- YAML, JSON and JSON lines


def aliases(levels: int, width: int) -> str:
    lines = ["a0: &a0 {k: 1}"]
    lines += [f"a{i + 1}: &a{i + 1} {{{', '.join(f'k{j}: *a{i}' for j in range(width))}}}" for i in range(levels)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        aliases(8, 9),
        "a: &c0 [b]\nb: &b [*c0, *c0]\n" + "\n".join(f"c{i + 1}: &c{i + 1} [*c{i}, *b]" for i in range(300)),
        "a0: &a0 {k: 1}\n" + "".join(f"a{i + 1}: &a{i + 1}\n  <<: [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)),
        "a: &a {b: *a}\n",
        "a: &a [*a]\n",
        "x: " + "[" * 60_000,
        "x: " + "{a: " * 60_000,
        "x: " + ":".join(["1"] * 400_000) + "\n",  # a number in base 60
        "x: {" + ", ".join(f"{i * (2**61 - 1)}: 1" for i in range(60_000)) + "}\n",  # equal hashes
        "x: 0x" + "f" * 1_000_000 + "\n",
        "x: !!timestamp 9999-99-99\n",
        "x: !!int ''\n",
        "x: !!float .\n",
        "x: !!binary ü\n",
        "x: !!python/object/apply:os.system [true]\n",
        "x: 1\n---\nx: 2\n",
        "x: \x00\n",
        "x: *nothing\n",
        "? [a]\n: 1\n",
    ],
    ids=range(19),
)
def test_a_hydra_config_ends_in_time(tmp_path, content):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("actor_rollout_ref: {actor: {clip_ratio: 0.2}}\n" + content)
    in_time([tmp_path], tmp_path / "run")


VERL = {
    "actor_rollout_ref": {
        "actor": {"policy_loss": {"loss_mode": "gspo"}, "clip_ratio": 0.2, "ppo_mini_batch_size": 8, "ppo_epochs": 1},
        "rollout": {"n": 4, "top_p": 1.0, "top_k": -1, "temperature": 1.0},
    },
    "data": {"train_batch_size": 16},
    "trainer": {"total_training_steps": 3},
    "algorithm": {"adv_estimator": "grpo", "rollout_correction": {"bypass_mode": False, "rollout_is": "token"}},
}


def changed(tree: dict, path: tuple[str, ...], value) -> dict:
    name, *rest = path
    return {**tree, name: changed(tree[name], tuple(rest), value) if rest else value}


def paths(tree: dict, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [above] if above else []
    for name, value in tree.items():
        found += paths(value, (*above, name)) if isinstance(value, dict) else [(*above, name)]
    return found


@given(st.sampled_from(paths(VERL)), ODD_VALUES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(("actor_rollout_ref", "actor", "ppo_mini_batch_size"), 0)
@example(("data", "train_batch_size"), float("inf"))
@example(("actor_rollout_ref", "rollout", "top_p"), "abc")
def test_an_odd_value_in_a_config_of_verl_is_explained_or_named(tmp_path, path, value):
    (tmp_path / ".hydra").mkdir(exist_ok=True)
    (tmp_path / ".hydra" / "config.yaml").write_text(yaml.safe_dump(changed(VERL, path, value)))
    (tmp_path / "1.jsonl").write_text(json.dumps({"input": "a", "output": "b", "score": 1.0, "step": 1}) + "\n")
    in_time([tmp_path], tmp_path / "run")


SWIFT = {"swift_version": "4", "rlhf_type": "grpo", "epsilon": 0.2, "num_generations": 4, "reward_weights": [1.0]}
LOG = {"global_step/max_steps": "1/3", "loss": 0.1, "reward": 1.0, "rewards/a/mean": 1.0, "kl": 0.0}
SAMPLES = {
    "step": ["1"] * 4,
    "prompt": ["a"] * 4,
    "completion": ["b"] * 4,
    "a": [1.0, 0.0, 1.0, 0.0],
    "advantages": [1.0] * 4,
}
DUMP = {"input": "a", "output": "b", "score": 1.0, "step": 1, "gts": "c", "acc": 1}
STATE = {"global_step": 1, "log_history": [{"step": 1, "loss": 0.1, "reward": 1.0, "rewards/a/mean": 1.0}]}


@given(st.sampled_from(["args", "log", "samples", "dump", "state"]), st.data())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_odd_value_in_a_log_is_explained_or_named(tmp_path, place, data):
    files_of = {"args": SWIFT, "log": LOG, "samples": SAMPLES, "dump": DUMP, "state": STATE}
    content = dict(files_of[place])
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(content)))
        value = data.draw(ODD_VALUES)
        if isinstance(content[name], list) and data.draw(st.booleans()):
            value = [value if i == 0 else old for i, old in enumerate(content[name])]
        content[name] = value
    folder = tmp_path / place
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if place == "dump":
        (folder / "1.jsonl").write_text(json.dumps(content) + "\n")
    elif place == "state":
        saved(folder, pickled(TRL))
        (folder / "trainer_state.json").write_text(json.dumps(content))
        (folder / "b").mkdir()
        (folder / "b" / "trainer_state.json").write_text(json.dumps(STATE))
    else:
        (folder / "args.json").write_text(json.dumps(content if place == "args" else SWIFT))
        (folder / "logging.jsonl").write_text(json.dumps(content if place == "log" else LOG) + "\n")
        (folder / "completions.jsonl").write_text(json.dumps(content if place == "samples" else SAMPLES) + "\n")
    in_time([folder], tmp_path / "run")


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000, '[1, {"a": ' * 900 + "1" + "}]" * 900])
def test_deep_json_is_one_error_or_a_line_that_is_skipped(tmp_path, deep):
    (tmp_path / "trainer_state.json").write_text(deep)
    with pytest.raises(ConfigError, match=r"trainer_state\.json cannot be read: .*(deeper than 100|Expecting)"):
        audit_files([tmp_path], tmp_path / "run")
    (tmp_path / "trainer_state.json").unlink()
    (tmp_path / "1.jsonl").write_text(
        json.dumps(DUMP) + "\n" + deep + "\n" + json.dumps(DUMP | {"input": [deep]}) + "\n"
    )
    assert in_time([tmp_path], tmp_path / "run") is not None


@pytest.mark.parametrize("kind", ["rows", "values", "categories"])
def test_a_small_table_that_describes_a_huge_one_is_not_read(tmp_path, kind):
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    if kind == "rows":
        column = pyarrow.array(np.ones(30_000_000, np.int8))
    else:  # one value of 100 kB, 100,000 times
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(100_000, np.int8)), ["x" * 100_000])
    saved(tmp_path, pickled(TRL))
    file = tmp_path / "completions_00001.parquet"
    parquet.write_table(pyarrow.table({"step": column}), file, compression="zstd", store_schema=kind == "categories")
    assert (tmp_path / "completions_00001.parquet").stat().st_size < 3_000_000
    found = in_time([tmp_path], tmp_path / "run")
    assert any("completions_00001.parquet" in line for line in found["unknown"])


@pytest.mark.parametrize("seed", range(40))
def test_a_table_with_a_flipped_byte_is_read_or_named(tmp_path, seed):
    pytest.importorskip("pyarrow")
    table = next((FILES / "trl").rglob("completions_*.parquet"))
    content = bytearray(table.read_bytes())
    at = zlib.crc32(bytes([seed])) % len(content)
    content[at] ^= 1 << (seed % 8)
    saved(tmp_path, pickled(TRL))
    (tmp_path / table.name).write_bytes(content)
    in_time([tmp_path], tmp_path / "run")


@pytest.mark.parametrize("name", ["a1²2b", "a٣", "a" + "9" * 200, "-1", "checkpoint-1e5"])
def test_folders_of_odd_names_are_sorted(tmp_path, name):
    for folder in (name, "checkpoint-10", "checkpoint-9"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "args.json").touch()
    found = [file.parent.name for file in files([tmp_path], "args.json")]
    assert sorted(found) == sorted([name, "checkpoint-10", "checkpoint-9"])
    assert found.index("checkpoint-9") < found.index("checkpoint-10")


def test_many_reward_names_cost_linear_time():
    log = [{"step": 1, "loss": 0.5, f"rewards/r{i}/mean": i} for i in range(10_000)]
    names = [f"r{i}" for i in range(10_000)]
    began = time.process_time()
    (row,) = samples.trl_rows(log, Draft("TRL", "f", {}), [])
    rows = samples._grouped(1, [({"prompt": "a", "r7": 2.0}, 0.0)] * 10_000, Draft("TRL", "f", {}), names, None)
    assert time.process_time() - began < 3  # each with each: more than 10 s
    assert row["reward/part_r7"] == 7
    assert rows[-1]["reward_parts"] == {"r7": 2.0}

"""Hostile model folders: refused by file and name before transformers opens them; nothing is executed or unpickled."""

import json
import os
import pickle
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from word_tokenizers import tokenizer_of

from gspo.errors import DataError
from gspo.launcher import as_folder, without_weights
from gspo.models.loading import load_model, load_tokenizer
from gspo.rewards import RewardModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    config = tf.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer_of((f"t{i}" for i in range(32)), unk_token="t0").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "model"))


def change(file: Path, **values):
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | values))


def with_index(folder, name=SHARD, **changes):
    """Move the weights to a shard with an index; `changes` are keys of the index."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).rename(folder / SHARD)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name), **changes}
    (folder / INDEX).write_text(json.dumps(index))
    return tensors


class Bomb:
    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


# Names in the index (B3, B4)


def test_an_index_of_plain_names_loads(folder):
    before = load_model(str(folder)).state_dict()
    with_index(folder)
    after = load_model(str(folder)).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "name",
    ["pytorch_model-00001.bin", "x.pt", "x.pkl", "../outside.safetensors", "/etc/x.safetensors", "sub/x.safetensors",
     "..\\x.safetensors", "x.safetensors\u202e.bin", "x\x00.safetensors", ".safetensors", "-x.safetensors",
     "model.safetensors.index.json", "x.SAFETENSORS", "\uff4dodel.safetensors", "", None, 5, ["x.safetensors"]],
)  # fmt: skip
def test_an_index_names_only_safetensors_files_of_its_folder(folder, tmp_path, name):
    canary = tmp_path / "canary"
    shutil.copy(folder / SINGLE, tmp_path / "outside.safetensors")
    for pickled in ("pytorch_model-00001.bin", "x.pt", "x.pkl"):
        (folder / pickled).write_bytes(pickle.dumps(Bomb(canary)))
    with_index(folder, name)
    with pytest.raises(DataError, match=r"index\.json: weight_map\['.*'\] is .*safetensors"):
        load_model(str(folder))
    assert not canary.exists()


def test_an_index_that_is_inconsistent_is_named(folder):
    tensors = with_index(folder)
    names = dict.fromkeys(tensors, SHARD)
    first = next(iter(tensors))
    save_file({first: tensors[first]}, folder / "b.safetensors")
    for content, says in (
        ({"metadata": {}}, "weight_map must be an object"),
        ({"metadata": {}, "weight_map": []}, "weight_map must be an object"),
        ({"weight_map": names}, "metadata must be an object"),
        ({"metadata": {}, "weight_map": {**names, "x": "absent.safetensors"}}, "absent.safetensors, which is not in"),
        ({"metadata": {}, "weight_map": {**names, "x": SHARD}}, f"x should be in {SHARD}, but is not"),
        ({"metadata": {}, "weight_map": {**names, first: "b.safetensors"}}, f"'{first}' is in b.safetensors and in "),
        ({"metadata": {}, "weight_map": {**names, "x": SHARD.upper()[:-11] + "safetensors"}}, "upper and lower case"),
    ):
        (folder / INDEX).write_text(json.dumps(content))
        with pytest.raises(DataError, match=r".*") as error:
            load_model(str(folder))
        assert says in str(error.value)
    (folder / INDEX).write_text(
        f'{{"metadata": {{}}, "weight_map": {{"{first}": "{SHARD}", "{first}": "b.safetensors"}}}}'
    )
    with pytest.raises(DataError, match=f"index.json is not readable JSON: the key '{first}' occurs twice"):
        load_model(str(folder))


def test_two_sets_of_weights_are_refused(folder):
    tensors = with_index(folder)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"has both model\.safetensors and model\.safetensors\.index\.json"):
        load_model(str(folder))
    (folder / INDEX).unlink()
    save_file(tensors, folder / "shard-00000-model-00001-of-00001.safetensors")  # transformers prefers this one
    with pytest.raises(DataError, match=r"shard-00000.* is a part of a distributed checkpoint"):
        load_model(str(folder))


def test_only_the_files_of_a_model_are_opened(folder, tmp_path):
    """The planted pickles and programs are not even opened, whatever their names."""
    canary = tmp_path / "canary"
    planted = (
        "pytorch_model.bin", "adapter_model.bin", "optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth",
        "vocab.pkl", "tokenizer.pkl", ".metadata", "__0_0.distcp", "modeling_llama.py", "tokenization_llama.py",
        "custom_generate/generate.py", "__init__.py", "model.gguf", "tf_model.h5", "flax_model.msgpack",
    )  # fmt: skip
    for name in planted:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(pickle.dumps(Bomb(canary)))
    opened = set()

    def listen(event, arguments):
        if recording and event == "open" and isinstance(arguments[0], str):
            opened.add(arguments[0])
        assert not (recording and event == "pickle.find_class")

    recording = True
    sys.addaudithook(listen)  # cannot be removed; it does nothing after this test
    try:
        load_model(str(folder), tokenizer=load_tokenizer(str(folder)))
    finally:
        recording = False
    names = {str(Path(path).relative_to(folder)) for path in opened if path.startswith(str(folder))}
    assert {"config.json", "tokenizer.json", SINGLE} <= names
    assert not names & set(planted)
    assert not canary.exists()


# Links and special files


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_not(folder, tmp_path):
    for name in (SINGLE, "config.json", "tokenizer.json", "chat_template.jinja"):
        inside, outside = folder / name, tmp_path / f"outside-{name}"
        if inside.exists():
            inside.rename(outside)
        else:
            outside.write_text("{{ messages }}")
        inside.symlink_to(outside)
        with pytest.raises(DataError, match=rf"model/{name} is a link to .*outside-{name}, outside of the folder"):
            load_model(str(folder), tokenizer=load_tokenizer(str(folder)))
        inside.unlink()
        outside.rename(inside)
    (folder / "real.safetensors").write_bytes((folder / SINGLE).read_bytes())
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to("real.safetensors")
    load_model(str(folder))
    (tmp_path / "link").symlink_to(folder)  # the folder itself may be a link
    load_model(str(tmp_path / "link"))


@pytest.mark.parametrize(
    "name", ["config.json", SINGLE, "tokenizer.json", "merges.txt", "additional_chat_templates/x.jinja"]
)
def test_a_pipe_a_device_or_a_broken_link_is_not_opened(folder, name):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    for make in (lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero"), lambda: file.symlink_to("nowhere")):
        file.unlink(missing_ok=True)
        make()
        with pytest.raises(DataError, match=rf"{Path(name).name} (is neither a file nor a folder|cannot be read)"):
            load_model(str(folder), tokenizer=load_tokenizer(str(folder)))


@pytest.mark.parametrize("shared", [False, True])
def test_the_hub_caches_own_links_are_followed_by_name_and_by_folder(folder, tmp_path, monkeypatch, shared):
    cache = tmp_path / "hub"
    repository = cache / "models--owner--name"
    snapshot = repository / "snapshots" / "abc"
    for place in (snapshot, repository / "blobs", repository / "refs", cache / "blobs"):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    for i, file in enumerate(sorted(folder.iterdir())):
        blob = repository / "blobs" / str(i)
        if shared:
            file.rename(cache / "blobs" / str(i))
            blob.symlink_to(f"../../blobs/{i}")
        else:
            file.rename(blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{i}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    for path in ("owner/name", str(snapshot)):
        load_model(path, tokenizer=load_tokenizer(path))
    change(snapshot / "config.json", auto_map={"AutoModelForCausalLM": "x.Y"})
    with pytest.raises(DataError, match="auto_map would run"):
        load_model("owner/name")


# Settings that fetch or run code (B19, U6)


@pytest.mark.parametrize(
    ("file", "values", "says"),
    [
        ("config.json", {"auto_map": {"AutoConfig": "x.Y"}}, "auto_map would run the folder's own Python code"),
        ("config.json", {"text_config": {"auto_map": {"AutoConfig": "x.Y"}}}, "auto_map would run"),
        ("generation_config.json", {"auto_map": {"X": "x.Y"}}, "auto_map would run"),
        ("generation_config.json", {"custom_generate": "owner/name"}, "custom_generate would run"),
        ("tokenizer_config.json", {"auto_map": ["x.Y", None]}, "auto_map would run"),
        ("tokenizer_config.json", {"tokenizer_class": "evil.Evil"}, "tokenizer_class is 'evil.Evil'"),
        ("tokenizer_config.json", {"tokenizer_class": ["x"]}, "tokenizer_class is ['x']"),
        ("config.json", {"tokenizer_class": "../evil"}, "tokenizer_class is '../evil'"),
        ("config.json", {"_attn_implementation": "kernels-community/evil"}, "_attn_implementation is 'kernels-comm"),
        ("config.json", {"attn_implementation": "owner/name:fn"}, "attn_implementation is 'owner/name:fn'"),
        ("config.json", {"_attn_implementation_internal": "flash_attention_2"}, "is 'flash_attention_2', and a folder"),
        ("config.json", {"_attn_implementation": {"text_config": "a/b"}}, "_attn_implementation is 'a/b'"),
        ("config.json", {"_attn_implementation": 5}, "_attn_implementation is 5"),
        ("config.json", {"_experts_implementation": "owner/moe"}, "_experts_implementation is 'owner/moe'"),
        ("config.json", {"quantization_config": {"quant_method": "evil"}}, "quantization_config ('evil') means"),
        ("config.json", {"quantization_config": "x"}, "quantization_config means quantized weights"),
        ("config.json", {"transformers_weights": "../x.safetensors"}, "transformers_weights names another weight"),
        ("config.json", {"use_pretrained_backbone": True, "backbone": "a/b"}, "use_pretrained_backbone would load"),
        ("config.json", {"model_type": "../evil"}, "model_type is '../evil'"),
        ("config.json", {"return_dict": False}, "return_dict is False"),
        ("config.json", {"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ("tokenizer_config.json", {"tokenizer_class": "AutoModelForCausalLM"}, "is 'AutoModelForCausalLM'; it must be"),
        (
            "tokenizer_config.json",
            {"fast_tokenizer_files": ["../tokenizer.4.0.0.json"]},
            "names of files in this folder",
        ),
        ("tokenizer_config.json", {"model_max_length": "x"}, "model_max_length is 'x'; it must be a number"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id is 'x'"),
        ("generation_config.json", {"eos_token_id": [[1]]}, "eos_token_id is [[1]]"),
        ("generation_config.json", {"eos_token_id": {"a": 1}}, "eos_token_id is {'a': 1}"),
        ("generation_config.json", {"eos_token_id": 10**12}, "eos_token_id is 1000000000000"),
        ("config.json", {"model_type": "no-such-model"}, "has model_type 'no-such-model', which transformers"),
    ],
)
def test_a_folder_cannot_ask_for_code_kernels_or_other_files(folder, file, values, says):
    change(folder / file, **values)
    with pytest.raises(DataError) as error:
        load_model(str(folder), tokenizer=load_tokenizer(str(folder)))
    assert says in str(error.value)
    assert file in str(error.value)


def test_harmless_values_of_the_same_settings_are_not_refused(folder):
    change(folder / "config.json", _attn_implementation="sdpa", auto_map={}, quantization_config=None)
    assert load_model(str(folder)).config._attn_implementation == "sdpa"


def test_an_adapter_beside_the_model_is_refused(folder, tmp_path):
    change(folder / "adapter_config.json", base_model_name_or_path="/etc", peft_type="LORA")
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "canary")))
    with pytest.raises(DataError, match=r"contains an adapter beside its model.*remove adapter_config\.json"):
        load_model(str(folder))
    assert not (tmp_path / "canary").exists()


# Broken and hostile values (B17, B18)


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", INDEX]
)
def test_json_that_is_deep_broken_or_no_object_is_an_error_with_its_file(folder, file):
    if file == INDEX:
        with_index(folder)
    for content in ('{"a":' * 100_000, "[" * 100_000, "{", "[]", "\xff", '{"a": 1, "a": 2}', ""):
        (folder / file).write_text(content, encoding="latin-1")
        with pytest.raises(DataError) as error:
            load_model(str(folder), tokenizer=load_tokenizer(str(folder)))
        assert file in str(error.value) or (file == "tokenizer.json" and "the tokenizer in" in str(error.value))


def test_a_settings_file_that_is_too_large_is_not_read(folder):
    with open(folder / "config.json", "ab") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(DataError, match=r"config\.json has 1,099,511,627,776 bytes"):
        load_model(str(folder))


@pytest.mark.parametrize(
    "values",
    [{"num_hidden_layers": "2"}, {"num_hidden_layers": 10**7}, {"num_hidden_layers": -1, "layer_types": ["x"]},
     {"hidden_act": "evil.x"}, {"num_attention_heads": 0}, {"vocab_size": True},
     {"rope_parameters": {"rope_type": "x"}}, {"num_labels": 10**9}, {"hidden_size": 10**30},
     {"rms_norm_eps": float("nan")}, {"pad_token_id": 10**6}, {"eos_token_id": "x"}, {"num_local_experts": 10**8},
     {"hidden_size": -16}],
)  # fmt: skip
def test_a_value_that_cannot_be_is_an_error_with_file_and_key(folder, values):
    change(folder / "config.json", **values)
    with pytest.raises(DataError, match=rf"config\.json: ({'|'.join(values)}) is "):
        load_model(str(folder))


@pytest.mark.parametrize("from_scratch", [False, True])
@pytest.mark.parametrize("values", [{"head_dim": 10**9}, {"vocab_size": 10**11}, {"intermediate_size": 10**10}])
def test_sizes_that_do_not_fit_are_refused_before_memory_is_allocated(folder, values, from_scratch):
    change(folder / "config.json", **values)
    with pytest.raises(DataError, match=r"config\.json describes [\d,]+ parameters"):
        load_model(str(folder), from_scratch=from_scratch)


def test_a_position_table_that_does_not_fit_is_refused(tmp_path):
    config = tf.GPTJConfig(vocab_size=8, n_positions=16, n_embd=16, n_layer=1, n_head=2, rotary_dim=4)
    tf.GPTJForCausalLM(config).save_pretrained(tmp_path)
    change(tmp_path / "config.json", n_positions=10**11)
    with pytest.raises(DataError, match="describes masks and position tables"):
        load_model(str(tmp_path))


# Weight files


def header(content: bytes, size=None) -> bytes:
    return struct.pack("<Q", len(content) if size is None else size) + content


@pytest.mark.parametrize(
    "data",
    [header(b"{}", 2**40), header(b"{}", 2**63), header(b"[" * 10**5), header(b"{"), b"", b"\x00" * 7,
     b"PK\x03\x04" * 50,
     header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}') + b"\0" * 4,
     header(b'{"a":{"dtype":"F32","shape":[4611686018427387905,4],"data_offsets":[0,16]}}') + b"\0" * 16,
     header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}') + b"\0" * 4,
     header(b'{"a":{"dtype":"EVIL","shape":[1],"data_offsets":[0,4]}}') + b"\0" * 4,
     header(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}') + b"\0" * 4],
    ids=range(12),
)  # fmt: skip
def test_a_hostile_header_is_refused_with_its_file(folder, data):
    (folder / SINGLE).write_bytes(data)
    with pytest.raises(DataError, match=r"model\.safetensors is damaged"):
        load_model(str(folder))


def test_a_git_lfs_pointer_is_named(folder):
    (folder / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(DataError, match=r"Git LFS pointer.*git lfs pull"):
        load_model(str(folder))


def rewrite(folder, **tensors):
    """These tensors in place of the folder's own; None: the file does not have it."""
    found = load_file(folder / SINGLE) | tensors
    save_file({n: t for n, t in found.items() if t is not None}, folder / SINGLE, metadata={"format": "pt"})


def norm(value, dtype=torch.float32):
    return {"model.norm.weight": torch.full((16,), value, dtype=dtype)}


NOT_FINITE = r"not finite: model\.norm\.weight hold NaN or inf \(read as torch\."
NO_NUMBERS = r"not floating-point numbers: model\.norm\.weight \([A-Z]+\d*\)"


@pytest.mark.parametrize(
    ("tensors", "dtype", "says"),
    [
        (norm(float("nan")), torch.float32, NOT_FINITE),
        (norm(float("-inf")), torch.bfloat16, NOT_FINITE),
        (norm(1e6), torch.float16, NOT_FINITE),
        *((norm(1, kind), None, NO_NUMBERS) for kind in (torch.int64, torch.bool, torch.complex64, torch.uint8)),
        # transformers reads it as model.norm.weight
        ({"norm.weight": torch.ones(16)}, None, r"has norm\.weight also as model\.norm\.weight"),
        ({"lm_head.weight": None}, None, r"missing tensors: lm_head\.weight"),
    ],
)
def test_tensors_that_are_no_weights_of_this_model_are_named(folder, tensors, dtype, says):
    rewrite(folder, **tensors)
    with pytest.raises(DataError, match=says):
        load_model(str(folder), dtype)


@pytest.mark.parametrize(("value", "dtype"), [(3e38, torch.float32), (1e6, torch.bfloat16)])  # 3e38: the sum overflows
def test_large_finite_weights_are_not_called_infinite(folder, value, dtype):
    rewrite(folder, **norm(value))
    load_model(str(folder), dtype)


# The same checks everywhere


@pytest.mark.parametrize(
    "load",
    [lambda path: as_folder(path, weights=True), without_weights, lambda path: RewardModel(path=path, key="reward")],
    ids=["engine", "identity", "reward model"],
)
def test_engines_and_reward_models_read_folders_with_the_same_checks(folder, load):
    change(folder / "config.json", auto_map={"AutoModelForSequenceClassification": "x.Y"})
    with pytest.raises(DataError, match="auto_map would run"):
        load(str(folder))


def test_a_reward_model_in_a_pickle_or_with_nan_is_refused(folder, tmp_path):
    config = tf.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    tf.LlamaForSequenceClassification(config).save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    tensors["score.weight"][0, 0] = float("nan")
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"reward: reward_model\.path: .*not finite: score\.weight"):
        RewardModel(path=str(folder), key="reward")
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "canary")))
    with pytest.raises(DataError, match=r"pickle files \(pytorch_model.bin\)"):
        RewardModel(path=str(folder), key="reward")
    assert not (tmp_path / "canary").exists()

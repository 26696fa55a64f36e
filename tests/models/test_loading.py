import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from word_tokenizers import tokenizer_of

from gspo.errors import DataError
from gspo.models import embedded
from gspo.models.find import locate
from gspo.models.loading import load_model, load_tokenizer
from lab.zoo.text import tiny_config


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    config = tf.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config.tie_word_embeddings = True
    tf.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def save_tokenizer(folder, size):
    tokenizer_of((f"t{i}" for i in range(size)), unk_token="t0").save_pretrained(folder)


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_folder_with_tied_weights_loads_as_it_was_saved(folder):
    saved = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in saved
    model = load_model(str(folder), torch.float64)
    assert model.dtype == torch.float64
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(model.model.norm.weight, saved["model.norm.weight"].double())


def test_missing_foreign_and_misshapen_tensors_are_named(folder):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.7.stray"] = torch.zeros(2)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 16)

    edit(folder, change)
    with pytest.raises(DataError) as error:
        load_model(str(folder))
    for part in (
        "actor.path",
        "missing tensors: model.norm.weight",
        "unexpected tensors: model.layers.7.stray",
        "up_proj.weight (file (3, 16)",
    ):
        assert part in str(error.value)


def test_pickled_weights_are_refused_by_name_and_not_opened(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(DataError, match=r"pickle files \(pytorch_model.bin\)"):
        load_model(str(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(DataError, match=r"no \*.safetensors"):
        load_model(str(folder))


def test_a_damaged_file_is_an_error_that_says_so(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"damaged|cannot be loaded"):
        load_model(str(folder))


def test_a_name_that_cannot_be_reached_says_what_to_do():
    for load in (load_model, load_tokenizer):
        with pytest.raises(DataError, match=r"was not found.*embedded:tiny"):
            load("nobody/no-such-model")
        with pytest.raises(DataError, match="there is no folder '/no/such/folder'"):
            load("/no/such/folder")


def test_from_scratch_takes_the_config_alone_and_is_fixed_by_its_seed(folder):
    (folder / "model.safetensors").unlink()
    first, same, other = (load_model(str(folder), from_scratch=True, seed=seed) for seed in (3, 3, 4))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first.state_dict()[name], same.state_dict()[name])
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


def test_an_embedded_model_from_scratch_has_random_weights_and_is_not_built(monkeypatch):
    monkeypatch.setattr(embedded, "build", None)
    first, same, other = (load_model("embedded:tiny", from_scratch=True, seed=seed).state_dict() for seed in (3, 3, 4))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], same[name])
    assert not torch.equal(first[name], other[name])


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(folder):
    save_tokenizer(folder, 32)
    load_model(str(folder), tokenizer=load_tokenizer(str(folder)))
    save_tokenizer(folder, 33)
    with pytest.raises(DataError, match=r"ids up to 32 but .* embeddings for 32"):
        load_model(str(folder), tokenizer=load_tokenizer(str(folder)))


def test_an_adapters_folder_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"an adapter, not a model: actor\.path .*--merge"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("key", ["actor.path", "ref.path", "critic.path"])
def test_a_model_of_another_vocabulary_is_refused_by_its_key(key):
    tokenizer = load_tokenizer("embedded:tiny-tools")
    load_model("embedded:tiny-tools", from_scratch=True, tokenizer=tokenizer, key=key)
    with pytest.raises(DataError, match=rf"{key}: 'embedded:tiny' has another vocabulary .*: 16 tokens and 18 tokens"):
        load_model("embedded:tiny", from_scratch=True, tokenizer=tokenizer, key=key)


def test_a_model_whose_vocabulary_holds_the_tokenizers_passes():
    load_model("embedded:tiny-tools", from_scratch=True, tokenizer=load_tokenizer("embedded:tiny"))


def test_a_hub_name_is_asked_for_once_and_a_snapshot_is_used_without_network(folder, tmp_path, monkeypatch):
    place = tmp_path / "hub" / "models--owner--name" / "snapshots" / "abc"
    place.parent.mkdir(parents=True)
    place.symlink_to(folder)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert locate("owner/name") == str(place)
    with pytest.raises(DataError, match=r"ref\.path: the model 'owner/other' was not found"):
        locate("owner/other", "ref.path")


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_encoder_decoder_model_is_refused_by_name(family, tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=f"{family} is an encoder-decoder model.*set actor.path"):
        load_model(str(tmp_path), from_scratch=True)


@pytest.mark.parametrize("family", ["roberta", "xlm"])
def test_the_pad_token_in_a_text_is_a_token_like_others_and_positions_count_from_0(family, tmp_path):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        plain = tf.AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    plain.save_pretrained(tmp_path)
    loaded, pad = load_model(str(tmp_path)), plain.config.pad_token_id
    positions = torch.arange(4)[None]  # [1, 4]
    # What the plain model computes if it is told that nothing is padding.
    said = {"position_ids": positions + pad + 1} if family == "roberta" else {"lengths": torch.tensor([4])}
    with torch.no_grad():
        for tokens in ([[5, 8, 9, 7]], [[5, pad, 9, 7]]):
            want = plain(input_ids=torch.tensor(tokens), **said).logits
            for given in ({}, {"position_ids": positions}):
                torch.testing.assert_close(loaded(input_ids=torch.tensor(tokens), **given).logits, want)
        assert (plain(input_ids=torch.tensor([[5, pad, 9, 7]])).logits - want).abs().max() > 1e-3

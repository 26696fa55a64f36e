"""The compiled layer of a decode step computes what the model's own does, row by row; other layers keep their own."""

import shutil
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.sampling.local.choose import Borrowed
from gspo.sampling.local.engine import LocalSampler
from gspo.sampling.native import decode, few_rows, library
from gspo.types import Request, SampleId, SamplingParams

pytestmark = [
    pytest.mark.run,  # compiling starts a process
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]
# One layer of 2^18 weights makes a model large enough; sizes are no multiples of a tile or a block.
SHAPE = {
    "vocab_size": 700, "hidden_size": 330, "intermediate_size": 810, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 256, "pad_token_id": None,
}  # fmt: skip
PARAMS = SamplingParams(6, ignore_eos=True)


def build(kind, **more):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **more}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # 1 and 0 would hide a missing norm or bias
                weight.normal_(1.0, 0.3)
    return model


def requests(groups=3, samples=4):
    """Prompts of different lengths."""
    return [
        Request(SampleId(g, k), tuple(range(5 + 7 * g, 12 + 13 * g)), PARAMS)
        for g in range(groups)
        for k in range(samples)
    ]


def sampled(model, asked, *, compiled=True):
    sampler = LocalSampler(model, seed=3, eos_token_ids=[0])
    num = len(sampler._borrowed._layers)
    if not compiled:
        sampler._borrowed._layers = {}
    sampler.submit(asked)
    return num, {s.id: s for s in sampler.completed()}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_samples_are_those_of_the_layers_own_forward(kind):
    model = build(kind, **({"sliding_window": None} if kind == "mistral" else {}))
    num, ours = sampled(model, requests())
    _, theirs = sampled(model, requests(), compiled=False)
    assert num == 2
    assert len(ours) == 12
    for name, sample in ours.items():
        assert np.array_equal(sample.tokens, theirs[name].tokens)
        np.testing.assert_allclose(sample.behavior_logp, theirs[name].behavior_logp, atol=2e-5)
    different = any(not np.array_equal(s.behavior_logp, theirs[i].behavior_logp) for i, s in ours.items())
    assert different  # else the compiled layer was never called


@contextmanager
def threads(num):
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 9, 45, 70])  # the last with more rows than a compiled call takes
def test_a_sample_does_not_depend_on_the_rows_beside_it_or_on_the_threads(rows):
    model = build("qwen3")
    asked = [replace(r, params=SamplingParams(40, ignore_eos=True)) for r in requests(groups=5, samples=14)]
    with threads(1):
        _, together = sampled(model, asked[:rows])
    with threads(2):
        _, few = sampled(model, asked[:3])
    # Heads, prompts and more than 64 rows are computed by other products, which round differently.
    for name in few.keys() & together.keys():
        assert np.array_equal(few[name].tokens, together[name].tokens)
        np.testing.assert_allclose(few[name].behavior_logp, together[name].behavior_logp, atol=2e-5)


def test_one_layer_is_equal_bit_for_bit_whatever_the_other_rows_are():
    from gspo.sampling.local.attention import DecodePlan, KVStore, make_grid

    model = build("llama")
    layers = decode.CompiledLayers(model)
    layer = model.model.layers[0]
    x, cos, sin = torch.randn(1, 40, 330), torch.randn(1, 40, 24), torch.randn(1, 40, 24)
    prompt, own = torch.randn(2, 2, 9, 24), torch.randn(40, 2, 5, 24)

    def run(rows, num_threads, x=x):
        store = KVStore()
        store.prompt[0] = (prompt, -prompt)
        store.own[0] = (own[rows].clone(), own[rows].clone())
        rows = np.array(rows)
        plan = DecodePlan(make_grid(rows % 2, np.ones(len(rows), dtype=bool)), 3 + rows % 7, rows % 5)
        with threads(num_threads):
            return layers._compiled(layer, x[:, rows], store, plan, cos[:, rows], sin[:, rows])[0]

    everyone = run(list(range(40)), 1)
    assert torch.isfinite(everyone).all()
    assert torch.equal(run(list(range(40)), 2), everyone)
    for rows in ([0], [39], list(range(17)), [38, 3, 20]):
        assert torch.equal(run(rows, 1), everyone[rows])
    # A row that is not a number stays one, and the others are not changed.
    broken = x.clone()
    broken[0, 7, 3] = float("nan")
    made, others = run(list(range(40)), 2, broken), [i for i in range(40) if i != 7]
    assert made[7].isnan().all()
    assert torch.equal(made[others], everyone[others])


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("granite", {"residual_multiplier": 0.3}),  # another residual
        ("gemma", {}),  # norms with 1 + w, another activation
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"head_dim": 20}),  # no multiple of eight
        ("olmo2", {}),  # norms after the attention
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 2}),  # queries with a gate: q_proj has twice the outputs
    ],
)
def test_a_layer_that_computes_something_else_keeps_its_own_forward(kind, more):
    num, samples = sampled(build(kind, **more), requests(groups=1, samples=2))
    assert num == 0
    assert len(samples) == 2


def test_a_layer_without_rotation_keeps_its_own_forward():
    model = build("smollm3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0])
    num, ours = sampled(model, requests())
    _, theirs = sampled(model, requests(), compiled=False)
    assert num == 2
    assert all(np.array_equal(s.tokens, theirs[i].tokens) for i, s in ours.items())


def test_a_norm_without_a_weight_and_another_weight_are_found():
    class Unit(torch.nn.Module):
        eps = 1e-6

        def forward(self, x):
            return x

    model = build("llama")
    model.model.layers[0].input_layernorm = Unit()
    model.model.layers[1].self_attn.sinks = torch.nn.Parameter(torch.zeros(6))
    assert not Borrowed(model)._layers


def test_the_default_type_and_the_weights_do_not_decide():
    model = build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()  # as some trainers begin: attention would not be seen
    torch.set_default_dtype(torch.float64)
    try:
        assert len(Borrowed(model)._layers) == 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_sliding_window_is_obeyed():
    model = build("mistral", sliding_window=30)
    asked = [replace(r, prompt=tuple(range(3, 31))) for r in requests(groups=1)]
    num, ours = sampled(model, asked)
    assert num == 2  # of keys within the window it computes the same
    _, theirs = sampled(model, asked, compiled=False)
    assert all(np.array_equal(s.behavior_logp, theirs[i].behavior_logp) for i, s in ours.items())


def test_an_adapter_is_not_left_out():
    peft = pytest.importorskip("peft")
    model = build("llama")
    with_adapter = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert not Borrowed(with_adapter)._layers


def test_new_weights_are_used_at_the_next_token():
    model = build("llama")
    sampler = LocalSampler(model, seed=3, eos_token_ids=[0])
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.data = weight.data * 1.5  # other memory, as after a load
    sampler.submit(requests())
    ours = {s.id: s for s in sampler.completed()}
    _, theirs = sampled(model, requests(), compiled=False)
    assert all(np.array_equal(s.tokens, theirs[i].tokens) for i, s in ours.items())


def test_a_layer_that_was_compiled_wrongly_is_not_used(native_anew, monkeypatch, tmp_path):
    wrong = shutil.copytree(library._FOLDER, tmp_path / "sources")
    source = wrong / "decode_layer.c"
    text = source.read_text()
    source.write_text(text.replace("high * cos[d + half] + low", "high * cos[d + half] - low"))
    assert source.read_text() != text
    monkeypatch.setattr(library, "_FOLDER", wrong)
    assert few_rows.load_native().product is not None
    assert not Borrowed(build("llama"))._layers


def test_the_model_is_given_back_as_it_was():
    model = build("llama")
    borrowed, ids = Borrowed(model), torch.arange(20)[None]
    before = model(ids).logits
    with borrowed.engaged("sdpa"):
        assert all("forward" in vars(layer) for layer in model.model.layers)
        # A forward outside the sampler's plan is the layer's own.
        torch.testing.assert_close(model(ids).logits, before, atol=1e-4, rtol=1e-4)
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    assert torch.equal(model(ids).logits, before)

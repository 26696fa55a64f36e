"""Each family of transformers gets a layout whose gradients are those of plain padded rows, in float64."""

import numpy as np
import pytest
import torch
from padded_rows import UNEVEN, gap, gradients, make_items, policy_gradients, reference_gradients
from safetensors.torch import load_file
from tiers import brief
from transformers import AutoModelForCausalLM, XLNetConfig
from transformers.cache_utils import LinearAttentionLayer

from gspo.errors import DataError
from gspo.learner.critic import ValueModule
from gspo.learner.policy import FORK_TOKENS
from gspo.learner.policy.forking import fork_batches, pays
from gspo.learner.policy.module import PolicyModule, weight_names
from gspo.learner.policy.packing import Completion, PackItem, micro_batches, pack
from gspo.learner.policy.probe import probe
from gspo.models import add_adapter, routed, routers
from lab.zoo.text import CAUSAL_TYPES, tiny_config, tiny_model

# One or two of each form of attention, state and head.
SHARED = ("llama", "gpt_oss", "llama4_text", "deepseek_v3", "stablelm", "minicpm3", "opt", "bert")
PADDED = ("qwen3_next", "qwen3_5_text", "falcon_h1", "mamba2", "lfm2", "bloom")
NAMED = {**dict.fromkeys(SHARED, "shared"), **dict.fromkeys(PADDED, "padded"), "gptj": "packed"}
BRIEF = ("gpt_oss", "llama4_text", "deepseek_v3", "minicpm3", "qwen3_next", "lfm2", "gptj", "xglm", "xlstm")
# XGLM writes the smallest float64 into a tensor of torch's default dtype, and xLSTM has states in that dtype: here
# float32. `gspo models check` changes the default.
ONLY_FLOAT32 = ("xglm", "xlstm")


@pytest.mark.parametrize("family", brief(sorted(CAUSAL_TYPES), *BRIEF))
def test_a_family_has_its_layout_and_the_gradients_of_padded_rows(family, request):
    try:
        tiny_config(family)
    except DataError as reason:
        pytest.skip(str(reason))
    if family not in ONLY_FLOAT32:
        request.getfixturevalue("exact")
    layout = probe(PolicyModule(tiny_model(family))).layout
    assert layout == NAMED.get(family, layout)
    model = tiny_model(family, torch.float32 if family in ONLY_FLOAT32 else torch.float64)
    _, want = reference_gradients(model, UNEVEN)
    policy = PolicyModule(model)
    assert probe(policy).layout == layout
    _, _, grads = policy_gradients(policy, [UNEVEN])
    assert gap(grads, want) <= (1e-5 if family in ONLY_FLOAT32 else 1e-8)


def padded_policy(family="qwen3_next", **how):
    policy = PolicyModule(tiny_model(family, torch.float64), **how)
    policy.layout = "padded"
    return policy


def forking_policy(family, **how):
    """In float64, with groups of any size forked."""
    policy = PolicyModule(tiny_model(family, torch.float64), **how)
    probe(policy)
    policy.fork_tokens = 0
    return policy


# Longer than a chunk of the kernels (64 tokens, 256 in falcon_h1), and not a multiple of it.
LONG = make_items([(150, (100, 7, 70)), (300, (5, 2))])


@pytest.mark.parametrize(
    ("family", "items", "max_tokens"),
    [
        ("qwen3_5_text", UNEVEN, None),
        ("qwen3_5_text", UNEVEN, 24),
        ("falcon_h1", UNEVEN, None),
        pytest.param("qwen3_5_text", LONG, None, marks=pytest.mark.full),
        pytest.param("falcon_h1", LONG, None, marks=pytest.mark.full),
        pytest.param("lfm2", UNEVEN, None, marks=pytest.mark.full),
        pytest.param("mamba2", UNEVEN, None, marks=pytest.mark.full),
    ],
)
def test_a_prompt_that_is_computed_once_has_the_gradients_of_padded_rows(family, items, max_tokens, exact):
    policy = forking_policy(family)
    assert policy.forks
    assert "long prompt is computed once" in policy.layout_line
    want_logp, want = reference_gradients(policy.model, items)
    batches = [items]
    if max_tokens is not None:
        forked, rest = fork_batches(items, max_tokens, 0)
        assert len(forked[0][0].completions) < len(items[0].completions)  # the first group is cut
        batches = [*forked, *micro_batches(rest, max_tokens, layout="padded")]
    packs = [policy.pack(batch) for batch in batches]
    assert any(bool((packed.parent >= 0).any()) for packed in packs)
    assert sum(packed.num_tokens for packed in packs) < pack(items, share_prefix=False).num_tokens
    logp, _, grads = policy_gradients(policy, batches)
    assert logp.keys() == want_logp.keys()
    for index, (wanted, _) in want_logp.items():
        torch.testing.assert_close(logp[index], wanted, rtol=0, atol=1e-10)
    assert gap(grads, want) <= 1e-8


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen3_5_text", {"gradient_checkpointing": True}),  # transformers makes no cache
        ("qwen3_next", {}),  # its experts are recorded
        ("mamba", {}),  # its scan of several tokens begins with a zero state
        ("bamba", {}),
        ("llama", {}),  # shares prefixes
    ],
)
def test_prompts_are_repeated_where_a_copied_state_is_not_exact(family, how):
    policy = PolicyModule(tiny_model(family), **how)
    probe(policy)
    assert not policy.forks


def test_a_state_without_gradient_is_not_copied(monkeypatch):
    policy = PolicyModule(tiny_model("qwen3_5_text"))
    update = LinearAttentionLayer.update_recurrent_state
    monkeypatch.setattr(
        LinearAttentionLayer,
        "update_recurrent_state",
        lambda self, state, *a, **k: update(self, state.detach(), *a, **k),
    )
    probe(policy)
    assert not policy.forks


def test_a_prompt_is_computed_once_only_where_it_saves_enough():
    def group(num_prompt, *lengths):
        made = [Completion(np.zeros(n, int), np.ones(n, bool), i) for i, n in enumerate(lengths)]
        return PackItem(np.zeros(num_prompt, int), tuple(made))

    assert pays(group(512, *[64] * 8), FORK_TOKENS)
    assert not pays(group(200, *[2000] * 8), FORK_TOKENS)  # a tenth of the tokens
    assert not pays(group(40, *[20] * 8), FORK_TOKENS)  # fewer than FORK_TOKENS
    assert not pays(group(512, 64), 0)
    assert not pays(group(100, 10, 1000), 0)  # the short row would be padding


def test_an_adapter_on_a_padded_model_has_the_gradients_of_its_own_forward(exact):
    policy = padded_policy(gradient_checkpointing=True)
    add_adapter(policy.model, rank=3, alpha=6, target_modules=["q_proj", "in_proj_qkvz"], seed=1)
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, generator=torch.Generator().manual_seed(len(name)))
    policy.model.double()
    assert probe(policy).layout == "padded"
    _, want = reference_gradients(policy.model, UNEVEN)
    _, _, grads = policy_gradients(policy, [UNEVEN])
    assert gap(grads, want) <= 1e-8
    assert all("lora" in name for name in grads)


def test_a_critic_on_padded_rows_has_the_values_and_gradients_of_packed_ones(exact):
    found = []
    for layout in ("packed", "padded"):
        module = ValueModule(PolicyModule(tiny_model("llama", torch.float64)))
        torch.nn.init.normal_(module.head.weight, generator=torch.Generator().manual_seed(5))
        module.policy.layout = layout
        values = module(module.policy.pack(UNEVEN))
        (values * torch.linspace(-1, 1, len(values), dtype=torch.float64)).sum().backward()
        found.append((values.detach(), gradients(module)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-10)
    assert gap(found[1][1], found[0][1]) <= 1e-8


def test_experts_are_recorded_and_replayed_on_padded_rows(exact):
    policy = PolicyModule(tiny_model("qwen3_moe", torch.float64))
    found = routers(policy.model)
    packed = pack(UNEVEN, share_prefix=False)
    results = {}
    for layout in ("packed", "padded"):
        policy.layout = layout
        with routed(found) as own:
            policy(packed)
        # Other experts than the routers choose, for every second token.
        given = torch.from_numpy(own.routes().astype("int64"))
        given[::2] = (given[::2] + 1) % 4
        given[1] = -1
        with routed(found, given) as replayed:
            logp = policy(packed).logp
        results[layout] = own.routes(), replayed.routes(), logp.detach()
    for packed_one, padded_one in zip(results["packed"], results["padded"], strict=True):
        torch.testing.assert_close(torch.as_tensor(padded_one), torch.as_tensor(packed_one), rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_a_hybrid_exports_the_names_of_its_checkpoint(family, tmp_path):
    policy = padded_policy(family)
    policy.model.save_pretrained(tmp_path)
    saved, named = load_file(tmp_path / "model.safetensors"), dict(weight_names(policy))
    assert named.keys() == saved.keys()
    assert all(torch.equal(named[name], saved[name]) for name in saved)
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_training_mode_has_no_dropout_in_layers_that_apply_it_themselves():
    policy = PolicyModule(tiny_model("opt"), gradient_checkpointing=True).train()
    layer = policy.model.model.decoder.layers[0]
    assert layer.training
    packed = pack(UNEVEN)
    assert torch.equal(policy(packed).logp, policy(packed).logp)


def test_a_model_that_embeds_positions_before_rows_is_not_taken_for_one_that_leaks():
    config = XLNetConfig(vocab_size=61, d_model=32, n_layer=2, n_head=4, d_inner=48, attn_type="uni")
    probed = probe(PolicyModule(AutoModelForCausalLM.from_config(config)))
    assert probed.layout == "padded"
    assert probed.gradient_gap is not None
    assert probed.gradient_gap < 1e-4


@pytest.mark.parametrize("family", ["bart", "musicgen", "blt", "gemma3"])
def test_what_has_no_tiny_text_model_is_named_with_its_reason(family):
    with pytest.raises(DataError, match=family):
        tiny_config(family)

import contextlib
import weakref

import model_zoo
import numpy as np
import pytest
import torch
from padded_rows import (
    UNEVEN,
    assert_same_gradients,
    by_index,
    gradients,
    make_items,
    policy_gradients,
    reference,
    reference_gradients,
    sequence_loss,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gspo.errors import DataError
from gspo.learner.policy.module import PolicyModule, weight_names
from gspo.learner.policy.packing import Completion, PackItem, forest, pack
from gspo.learner.policy.probe import probe
from gspo.learner.world import World
from gspo.models import current_layout


@pytest.mark.parametrize("name", model_zoo.WINDOWED)
def test_the_window_of_the_windowed_models_really_cuts(name):
    narrow, wide = (
        model_zoo.build(name, sliding_window=window) for window in (model_zoo.build(name).config.sliding_window, 64)
    )
    with torch.no_grad():
        packed = pack(UNEVEN)
        difference = PolicyModule(narrow)(packed).logp - PolicyModule(wide)(packed).logp
    assert float(difference.abs().max()) > 1e-3


def test_dropout_is_off_in_training_mode():
    model = model_zoo.build("llama", attention_dropout=0.5)
    policy = PolicyModule(model, gradient_checkpointing=True).train()
    assert policy.training
    packed = pack(UNEVEN)
    torch.testing.assert_close(policy(packed).logp, policy(packed).logp, rtol=0, atol=0)
    torch.testing.assert_close(policy(packed).logp, policy.eval()(packed).logp, rtol=0, atol=0)


def test_a_tree_of_depth_three_equals_its_unrolled_sequences(exact):
    """root → (a, b), a → (c, d), d → e; sequences are root·a·c, root·a·d·e, root·b; b and e end in a target."""
    draw = np.random.default_rng(5)
    sizes, parents = {"root": 6, "a": 4, "b": 3, "c": 5, "d": 2, "e": 3}, {"a": "root", "b": "root", "c": "a"}
    parents |= {"d": "a", "e": "d"}
    names = list(sizes)
    tokens = {n: draw.integers(0, model_zoo.VOCAB, k) for n, k in sizes.items()}
    starts = dict(zip(names, np.cumsum([0, *sizes.values()])[:-1].tolist(), strict=True))
    segments = [(tokens[n], names.index(parents[n]) if n in parents else -1) for n in names]
    sequences, items = [], []
    for index, path in enumerate((["root", "a", "c"], ["root", "a", "d", "e"], ["root", "b"])):
        row = np.concatenate([starts[n] + np.arange(sizes[n]) for n in path])
        ids = np.append(np.concatenate([tokens[n] for n in path]), draw.integers(0, model_zoo.VOCAB))
        num_prompt = sizes["root"]
        sequences.append((row[num_prompt - 1 :], ids[num_prompt:], index))
        num = len(ids) - num_prompt
        items.append(PackItem(ids[:num_prompt], (Completion(ids[num_prompt:], np.ones(num, bool), index),)))
    for name in ("llama", "mistral_window", "gemma2"):
        model = model_zoo.build(name)
        want, want_grads = reference_gradients(model, items)
        model.zero_grad()
        packed = forest(segments, sequences)
        logp = by_index(packed, PolicyModule(model)(packed).logp)
        sequence_loss(logp).backward()
        for index, (want_logp, _) in want.items():
            torch.testing.assert_close(logp[index], want_logp, rtol=0, atol=1e-10)
        assert_same_gradients(gradients(model), want_grads)


def test_entropy_is_detached_unless_its_gradient_is_asked_for(exact):
    model = model_zoo.build("gemma2")
    policy, packed = PolicyModule(model, chunk_size=5), pack(UNEVEN)
    assert not policy(packed).entropy.requires_grad
    assert len(policy(packed, with_entropy=False).entropy) == 0
    model.zero_grad()
    out = policy(packed, temperature=0.8, entropy_grad=True)
    weight = torch.linspace(-1, 2, packed.num_targets, dtype=torch.float64)
    (out.entropy * weight + out.logp * weight.flip(0)).sum().backward()
    grads = gradients(model)
    model.zero_grad()
    want = reference(model, UNEVEN, 0.8)
    logp, entropy = (torch.cat([want[i][k] for i in packed.index.tolist()]) for k in (0, 1))
    (entropy * weight + logp * weight.flip(0)).sum().backward()
    assert_same_gradients(grads, gradients(model))


class LargestAllocation(TorchDispatchMode):
    """Largest single tensor, and most elements of large tensors alive at once."""

    def __init__(self):
        super().__init__()
        self.largest, self.alive, self.peak, self.seen = 0, 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.seen:
                    num = storage.nbytes() // tensor.element_size()
                    self.seen.add(storage._cdata)
                    self.largest = max(self.largest, num)
                    self.alive += num
                    self.peak = max(self.peak, self.alive)
                    weakref.finalize(storage, self._gone, storage._cdata, num)
        return out

    def _gone(self, key, num):
        self.alive -= num
        self.seen.discard(key)


def test_no_tensor_of_targets_by_vocabulary_is_ever_allocated():
    model = model_zoo.build("llama", vocab_size=4001)
    items = make_items([(8, (40,) * 8)])
    packed = pack(items)
    chunk = 16
    for size in (chunk, packed.num_targets):
        mode = LargestAllocation()
        with mode:
            out = PolicyModule(model, chunk_size=size)(packed)
            out.logp.sum().backward()
        model.zero_grad()
        weights = 4001 * 32
        bound = max(size * 4001, weights)
        assert mode.largest <= bound, size
    # The instrument sees what it is there to see: one chunk of everything is a [targets, vocabulary] tensor.
    assert mode.largest > 0.9 * packed.num_targets * 4001 > 10 * chunk * 4001


def test_a_batch_without_targets_gives_empty_results_that_can_be_driven_backward():
    items = make_items([(4, (3, 2))], holes={0: slice(0, 3), 1: slice(0, 2)})
    packed = pack(items)
    assert (packed.num_tokens, packed.cu_seqlens.tolist()) == (0, [0, 0, 0])
    policy = PolicyModule(model_zoo.build("llama"))
    out = policy(packed)
    out.logp.sum().backward()
    assert out.logp.shape == out.entropy.shape == (0,)


@pytest.mark.parametrize("fp32_head", [True, False])
def test_half_precision_trunks_give_float32_log_probs_near_the_exact_ones(fp32_head):
    exact = model_zoo.build("llama", initializer_range=0.1)
    half = model_zoo.build("llama", torch.bfloat16, initializer_range=0.1)
    half.load_state_dict(exact.state_dict())
    packed = pack(UNEVEN)
    out = PolicyModule(half, fp32_head=fp32_head)(packed)
    assert out.logp.dtype == out.entropy.dtype == torch.float32
    out.logp.sum().backward()
    want = PolicyModule(exact)(packed).logp
    want.sum().backward()
    assert float((out.logp - want).detach().abs().max()) < 0.1
    got, grad = (m.lm_head.weight.grad.double().flatten() for m in (half, exact))
    assert float(torch.cosine_similarity(got, grad, dim=0)) > 0.99


@pytest.mark.parametrize("name", model_zoo.NAMES)
def test_the_probe_accepts_the_listed_models_with_shared_prefixes(name):
    policy = PolicyModule(model_zoo.build(name, torch.float32))
    found = probe(policy)
    assert found.layout == policy.layout == "shared"
    assert found.reason.startswith("shared prefixes: ")
    assert 0 < found.gradient_gap < 1e-4
    assert not any(p.grad is not None for p in policy.parameters())


@contextlib.contextmanager
def altered(model, forward):
    """Every attention module of this model answers through `forward(original, hidden_states, **kwargs)`."""
    for layer in model.model.layers:
        original = layer.self_attn.forward
        layer.self_attn.forward = lambda hidden_states, original=original, **kw: forward(original, hidden_states, **kw)
    yield model


def test_the_probe_pads_a_model_whose_attention_ignores_the_interface(exact):
    def blind(original, hidden_states, **kwargs):
        # A running mean over the row: what a linear-attention layer does with packed sequences.
        steps = torch.arange(1, hidden_states.shape[1] + 1, dtype=hidden_states.dtype)[None, :, None]
        return hidden_states.cumsum(1) / steps, None

    with altered(model_zoo.build("llama"), blind) as model:
        policy = PolicyModule(model)
        assert probe(policy).layout == "padded"
        _, want = reference_gradients(model, UNEVEN)
        _, _, grads = policy_gradients(policy, [UNEVEN])
        assert_same_gradients(grads, want)


@pytest.mark.parametrize(("ranks", "size"), [(1, 1e-9), (2, 1.5e-4)])
def test_the_probe_finds_a_leak_that_is_smaller_than_rounding(ranks, size):
    def leaky(original, hidden_states, **kwargs):
        out, weights = original(hidden_states, **kwargs)
        # The tokens before, also those of another sequence, as a short convolution with tiny weights sees them.
        return out + size * hidden_states.roll(1, 1) * (torch.arange(hidden_states.shape[1]) > 0)[
            None, :, None
        ], weights

    with altered(model_zoo.build("llama", torch.float32), leaky) as model:
        policy = PolicyModule(model)
        policy.world = World()
        policy.world.size = ranks
        found = probe(policy)
    assert found.layout == "padded"
    assert "plain packing: a sequence depends on tokens of another one" in found.reason
    assert (found.gradient_gap is None) == (ranks > 1)


def test_the_probe_names_weights_that_are_not_finite():
    model = model_zoo.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(DataError, match=r"LlamaForCausalLM has weights that are NaN.*model\.layers\.1\.mlp\.up_proj"):
        probe(PolicyModule(model))


def test_the_probe_falls_back_to_plain_packing_where_the_tree_is_not_understood(exact):
    def strict(original, hidden_states, **kwargs):
        if current_layout() is not None:
            raise TypeError("unknown attention")
        return original(hidden_states, **kwargs)

    with altered(model_zoo.build("llama"), strict) as model:
        policy = PolicyModule(model)
        assert probe(policy).layout == "packed"
        with pytest.raises(ValueError, match="does not share prefixes"):
            policy(pack(UNEVEN))
        want, _ = reference_gradients(model, UNEVEN)
        packed = policy.pack(UNEVEN)
        for index, logp in by_index(packed, policy(packed).logp).items():
            torch.testing.assert_close(logp, want[index][0], rtol=0, atol=1e-10)


def test_the_probe_refuses_logits_changed_in_an_unknown_way():
    model = model_zoo.build("llama")
    original = model.forward

    def forward(**kwargs):
        out = original(**kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = forward
    with pytest.raises(DataError, match="transforms its logits"):
        probe(PolicyModule(model))


@pytest.mark.parametrize("name", ["qwen3", "llama", "mixtral", "qwen3_moe"])
def test_weight_names_are_those_of_the_checkpoint_with_tied_weights_once(name, tmp_path):
    from safetensors.torch import load_file

    model = model_zoo.build(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    named = dict(weight_names(PolicyModule(model)))
    assert named.keys() == saved.keys()
    for key, tensor in named.items():
        torch.testing.assert_close(tensor, saved[key], rtol=0, atol=0)
    assert ("lm_head.weight" in named) == (name != "qwen3")
    assert not any(tensor.requires_grad for tensor in named.values())

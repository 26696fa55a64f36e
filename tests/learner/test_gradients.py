"""However a batch is laid out, its log-probs, entropies and gradients are those of plain padded rows, to 1e-10.

A new layout, or a new part of the policy module, is a row of CASES. Families of transformers: test_layouts.py.
"""

from dataclasses import dataclass, field

import model_zoo
import pytest
import torch
from padded_rows import UNEVEN, assert_same_gradients, policy_gradients, reference_gradients

from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import micro_batches
from gspo.learner.policy.probe import probe
from gspo.models import add_adapter


@dataclass
class Case:
    model: str
    layout: str = "shared"
    max_tokens: int | None = None  # per micro-batch
    settings: dict = field(default_factory=dict)  # of the policy module
    adapter: tuple = ()  # its target modules


CHECKPOINTING = {"gradient_checkpointing": True}
ADAPTERS = (
    ("qwen3", ("all-linear",)), ("gemma2", ("all-linear",)), ("mixtral_window", ("all-linear",)),
    ("mixtral_window", ("all-linear", "experts")), ("qwen3_moe", ("experts",)),
)  # fmt: skip
CASES = {
    **{f"shared prefixes, {name}": Case(name) for name in model_zoo.NAMES},
    "packed": Case("qwen2_window", "packed"),
    "padded": Case("qwen2_window", "padded"),
    **{f"{layout}, micro-batches of {most}": Case("qwen3_moe", layout, max_tokens=most)
       for layout in ("shared", "padded") for most in (1, 20, 31, 45, None)},
    **{f"head in chunks of {size}, {name}": Case(name, settings={"chunk_size": size})
       for name in ("llama_tied", "gemma2") for size in (1, 3, 7, 1000)},
    **{f"checkpointing, {layout}, {name}": Case(name, layout, settings=CHECKPOINTING)
       for name in ("qwen3", "mixtral_window", "gemma2") for layout in ("shared", "packed", "padded")},
    **{f"adapter on {'+'.join(targets)} of {name}": Case(name, adapter=targets) for name, targets in ADAPTERS},
    **{f"checkpointing, adapter on {'+'.join(targets)} of {name}": Case(name, settings=CHECKPOINTING, adapter=targets)
       for name, targets in ADAPTERS},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_those_of_padded_rows(case, exact):
    model = model_zoo.build(case.model)
    if case.adapter:
        add_adapter(model, rank=3, alpha=6, target_modules=list(case.adapter), seed=1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.2)
    want, want_grads = reference_gradients(model, UNEVEN, temperature=0.7)
    policy = PolicyModule(model, **case.settings)
    if case.adapter:
        assert probe(policy).layout == case.layout
    policy.layout = case.layout
    batches = micro_batches(UNEVEN, case.max_tokens, layout=case.layout)
    assert (len(batches) > 1) == (case.max_tokens is not None)
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    logp, entropy, grads = policy_gradients(policy, batches, temperature=0.7)
    assert len(calls) == len(batches) * (2 if case.settings == CHECKPOINTING else 1)  # forward, again in backward
    assert model.config._attn_implementation == "eager"
    assert logp.keys() == want.keys()
    for index, (want_logp, want_entropy) in want.items():
        torch.testing.assert_close(logp[index], want_logp, rtol=0, atol=1e-10)
        torch.testing.assert_close(entropy[index], want_entropy, rtol=0, atol=1e-10)
    assert_same_gradients(grads, want_grads)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert grads.keys() == trained
    assert bool(case.adapter) == all(".lora_" in name for name in trained)

"""Freed memory goes back to the system between layers: the same gradients, a lower peak."""

import json
import subprocess
import sys

import model_zoo
import pytest
import torch

from gspo.learner.policy import module
from gspo.learner.policy.module import return_memory_between_layers


@pytest.fixture
def calls(monkeypatch):
    """How often freed memory was returned."""
    made = []
    really = module.return_freed_memory

    def counted():
        made.append(1)
        really()

    monkeypatch.setattr(module, "return_freed_memory", counted)
    monkeypatch.setattr(module, "MIN_WEIGHTS", 1)
    return made


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_equal_bit_for_bit(calls, checkpointing):
    model = model_zoo.build("llama", torch.float32)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plain = model_zoo.gradients(model)
    num = return_memory_between_layers(model)
    assert num == model.config.num_hidden_layers
    again = model_zoo.gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert len(calls) >= 2 * num  # forward and backward; recomputed layers once more


def test_a_pass_without_gradients_returns_nothing(calls):
    model = model_zoo.build("llama", torch.float32)
    return_memory_between_layers(model)
    with torch.no_grad():
        model(input_ids=model_zoo.TOKENS)
    assert not calls


def test_small_models_are_left_alone():
    assert return_memory_between_layers(model_zoo.build("llama")) == 0


PASS = """
import json, resource, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from gspo.learner.policy.module import return_memory_between_layers
from gspo.learner.policy.module import recompute_gated_products
torch.set_num_threads(1)
config = AutoConfig.for_model(
    "llama", vocab_size=64, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3,
)
model = AutoModelForCausalLM.from_config(config)
recompute_gated_products(model)
num = return_memory_between_layers(model) if sys.argv[1] == "with" else 0
for _ in range(2):
    model.zero_grad()
    model(input_ids=torch.arange(480).reshape(1, -1) % 64).logits.mean().backward()
print(json.dumps([num, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


@pytest.mark.full
def test_the_peak_of_a_pass_is_lower():
    def peak(how):
        done = subprocess.run([sys.executable, "-c", PASS, how], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    (none, plain), (num, returned) = peak("without"), peak("with")
    assert (none, num) == (0, 3)
    assert returned < 0.95 * plain

"""Vision-language models in training: a packed row with images is the model's own forward, gradients included."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import vision_zoo
from made_batches import make_batch, sampled_groups
from made_steps import make_plan, sgd, weights

from gspo.errors import ConfigError
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import Completion, PackItem, by_sequence, micro_batches
from gspo.learner.policy.probe import image_prompts, probe
from gspo.learner.step import train_step
from gspo.models import Place, Vision, add_adapter, freeze_vision, vision_parameters
from gspo.sampling import LocalSampler
from gspo.types import Prompt, SamplingParams, ShownPrompt

OTHERS = tuple(family for family in vision_zoo.FAMILIES if family != "qwen3_vl")


def items_of(processor, family, *, with_text=True):
    """A prompt with one image, one with two of other sizes, and one of text alone; 3, 2 and 2 completions."""
    draw, index, found = np.random.default_rng(5), 0, []
    prompts = [
        processor.prompt(vision_zoo.text(family, "what ", 1, "is?"), [vision_zoo.image(16, 8, 1)]),
        processor.prompt(
            vision_zoo.text(family, "a ", 1, "and ", 1, "?"), [vision_zoo.image(24, 24, 2), vision_zoo.image(8, 16, 3)]
        ),
        *([processor.prompt("2+2=")] if with_text else []),
    ]
    for (tokens, images), lengths in zip(prompts, ((5, 1, 8), (7, 3), (2, 4)), strict=False):
        completions = []
        for num in lengths:
            completions.append(Completion(draw.integers(0, 40, num), np.ones(num, bool), index))  # no special token
            index += 1
        found.append(PackItem(np.array(tokens), tuple(completions), images and ShownPrompt(tokens, images)))
    return found


def gradients(policy, logp):
    """Of one number that depends on every log-prob in its own way."""
    policy.zero_grad()
    weights = torch.linspace(-1, 1, len(logp), dtype=logp.dtype).cos()
    (logp * weights).sum().backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def assert_equals_plain(policy, items, bound=1e-9):
    reference = PolicyModule(copy.deepcopy(policy.model))
    reference.model.gradient_checkpointing_disable()
    plain = reference.plain_logp(items)
    want = gradients(reference, plain)
    out = policy(policy.pack(items), with_entropy=False).logp
    got = gradients(policy, out)
    assert float((out - plain).detach().abs().max()) < 1e-10
    assert got.keys() == want.keys()
    # In the tower as well, whose gradient is not 0.
    assert any("vis" in name and bool(grad.any()) for name, grad in got.items())
    scale = max(float(grad.abs().max()) for grad in want.values())
    worst = {name: float((got[name] - want[name]).abs().max()) / scale for name in want}
    assert max(worst.values()) < bound, max(worst.items(), key=lambda pair: pair[1])


def policy_of(family, layout="shared", **settings):
    policy = PolicyModule(vision_zoo.model(family), **settings)
    policy.layout = layout
    return policy


def check(family, folder, layout, **settings):
    # On text alone, PaliGemma's own forward is not causal.
    items = items_of(vision_zoo.processor(family, folder), family, with_text=family != "paligemma")
    assert_equals_plain(policy_of(family, layout, **settings), items)


def test_a_packed_row_with_images_is_exact(tmp_path, exact):
    check("qwen3_vl", tmp_path, "shared")


@pytest.mark.full
@pytest.mark.parametrize("family", OTHERS)
def test_a_packed_row_with_images_is_exact_in_every_family(family, tmp_path, exact):
    check(family, tmp_path, "shared")


@pytest.mark.full
@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("family", vision_zoo.FAMILIES)
def test_layouts_without_shared_prefixes_are_exact(family, layout, tmp_path, exact):
    if (family, layout) == ("paligemma", "packed"):
        pytest.skip("transformers gives all prompts of a packed row one block")
    check(family, tmp_path, layout)


@pytest.mark.full
def test_a_model_with_linear_attention_is_exact_in_padded_rows(tmp_path, exact):
    check(vision_zoo.HYBRID, tmp_path, "padded")
    policy = policy_of(vision_zoo.HYBRID)
    found = probe(policy, processor=vision_zoo.processor(vision_zoo.HYBRID, tmp_path))
    assert (found.layout, policy.images_refused) == ("padded", "")


@pytest.mark.full
@pytest.mark.parametrize("family", vision_zoo.FAMILIES)
def test_gradient_checkpointing_is_exact_in_tower_and_text(family, tmp_path, exact):
    check(family, tmp_path, "shared", gradient_checkpointing=True)


@pytest.mark.full
@pytest.mark.parametrize("family", vision_zoo.FAMILIES)
def test_a_placeholder_that_a_completion_contains_keeps_its_own_embedding(family, tmp_path, exact):
    """As in decoding, where a sampled token has no image: compared with embeddings that are put together by hand."""
    policy, processor = policy_of(family), vision_zoo.processor(family, tmp_path)
    item = items_of(processor, family, with_text=False)[0]
    said = replace(item.completions[2], tokens=np.where(np.arange(8) == 3, policy.vision.token, 7))
    plain = replace(said, tokens=np.full(8, 7))
    embeddings = policy.model.get_input_embeddings()
    with torch.no_grad():
        # The embedding of token 7 becomes that of the placeholder: then both rows are the same.
        embeddings.weight[7] = embeddings.weight[policy.vision.token]
        for layout in ("shared", "padded"):
            policy.layout = layout
            rows = [policy.pack([replace(item, completions=(item.completions[0], c))]) for c in (said, plain)]
            hidden = [policy.hidden(row) for row in rows]
            assert float((hidden[0] - hidden[1]).abs().max()) < 1e-12


def test_the_tower_runs_once_for_a_prompt_and_pass(tmp_path):
    policy = policy_of("qwen3_vl")
    items = items_of(vision_zoo.processor("qwen3_vl", tmp_path), "qwen3_vl")
    packed = policy.pack(items)
    policy(packed)
    assert policy.vision.num_encoded == 2
    policy(packed)
    assert policy.vision.num_encoded == 4
    # One sequence per row: the images of a prompt are encoded once for all of its rows.
    policy.layout = "padded"
    policy(policy.pack([replace(item, completions=(c,)) for item in items for c in item.completions]))
    assert policy.vision.num_encoded == 6
    policy.layout = "shared"
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_("visual" not in name)
    policy(packed)
    policy(packed)
    assert policy.vision.num_encoded == 8  # a frozen tower: features are kept


def test_micro_batches_of_a_group_show_its_images(tmp_path):
    policy = policy_of("qwen3_vl")
    items = items_of(vision_zoo.processor("qwen3_vl", tmp_path), "qwen3_vl")
    with torch.no_grad():
        whole = by_sequence(packed := policy.pack(items), policy(packed).logp)
        found = {}
        for part in (parts := micro_batches(items, 20)):
            found |= by_sequence(packed := policy.pack(part), policy(packed).logp)
    assert len(parts) > len(items)  # a group was cut
    assert all(np.abs(found[i] - whole[i]).max() < 1e-5 for i in whole)


def test_the_same_tokens_with_another_image_have_other_log_probs(tmp_path):
    policy, processor = policy_of("qwen3_vl"), vision_zoo.processor("qwen3_vl", tmp_path)
    text = vision_zoo.text("qwen3_vl", 1, "?")
    found = []
    for seed in (1, 2):
        tokens, images = processor.prompt(text, [vision_zoo.image(16, 16, seed)])
        completion = Completion(np.array([3, 4]), np.ones(2, bool), 0)
        found.append(
            policy(policy.pack([PackItem(np.array(tokens), (completion,), ShownPrompt(tokens, images))])).logp.detach()
        )
    assert float((found[0] - found[1]).abs().max()) > 0.01


@pytest.mark.full
@pytest.mark.parametrize("family", vision_zoo.FAMILIES)
def test_the_probe_admits_shared_prefixes_with_images(family, tmp_path, exact):
    policy = policy_of(family)
    found = probe(policy, processor=vision_zoo.processor(family, tmp_path))
    assert (found.layout, policy.images_refused) == ("shared", "")
    assert policy.vision is not None


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_a_model_with_wrong_positions_or_masks_of_images_trains_on_text_only(family, tmp_path, monkeypatch, exact):
    monkeypatch.setattr("gspo.models.vision.tower.Vision._find_place", lambda self, prompt: Place(None, 0, None, None))
    policy = policy_of(family)
    found = probe(policy, processor=vision_zoo.processor(family, tmp_path))
    assert found.layout == "shared"
    assert policy.vision is None
    assert "its log-probs are not those of its own forward pass" in policy.images_refused


def test_probe_prompts_have_images_of_several_sizes(tmp_path):
    one, two = image_prompts(vision_zoo.processor("qwen2_5_vl", tmp_path))
    assert (len(one.images.names), len(two.images.names)) == (1, 2)


def groups_of(model, processor, family, vision=None):
    """Two prompts with the same tokens and other images, four samples each."""
    text = vision_zoo.text(family, "what ", 1, "is?")
    made = [processor.prompt(text, [vision_zoo.image(16, 16, seed)]) for seed in (1, 2)]
    prompts = [Prompt(tokens, text, images=images) for tokens, images in made]
    assert prompts[0].tokens == prompts[1].tokens
    sampler = LocalSampler(model, seed=3, eos_token_ids=(), verify=False, vision=vision)
    return sampled_groups(
        sampler, prompts, SamplingParams(6, temperature=0.8, ignore_eos=True), lambda _, number: number
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_trains_the_tower_unless_it_is_frozen(frozen, tmp_path):
    model, processor = vision_zoo.model("qwen3_vl"), vision_zoo.processor("qwen3_vl", tmp_path)
    if frozen:
        freeze_vision(model)
    policy, before = PolicyModule(model), weights(model)
    batch = make_batch(groups_of(model, processor, "qwen3_vl", policy.vision), 2)
    assert policy.vision.num_encoded == 2
    plan = make_plan(num_minibatches=2)
    report = train_step(policy, sgd(policy), batch, plan, proximal="recompute", learning_rates=[0.1] * 2)
    # Sampler and trainer agree, so each prompt was read with its own image.
    assert np.nanmax(np.abs(report.noise_log_s)) < 1e-6
    # Sampling, π_old of mini-batch 2 and both updates; a frozen tower runs for the sampler only.
    assert policy.vision.num_encoded == (2 if frozen else 5)
    tower = set(vision_parameters(model))
    changed = {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])}
    assert changed - tower
    assert bool(changed & tower) is not frozen


def test_the_vision_part_is_tower_and_projector():
    for family in vision_zoo.FAMILIES:
        names = vision_parameters(vision_zoo.model(family))
        assert any("vis" in name for name in names), family
        assert not any("language_model" in name or "text_model.layers" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize(("targets", "vision"), [(["all-linear"], False), (["q_proj", "vision"], True)])
def test_an_adapter_is_on_the_language_part_unless_vision_is_named(targets, vision):
    pytest.importorskip("peft")
    model = vision_zoo.model("gemma3", torch.float32)
    add_adapter(model, rank=2, alpha=2, target_modules=targets, seed=0)
    adapted = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("language_model" in name for name in adapted)
    assert any("vision_tower" in name for name in adapted) is vision
    assert Vision.of(model).is_frozen is not vision


def test_a_layer_that_the_language_part_does_not_have_is_an_error():
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"has no linear layer 'fc1'.*vision the layers of the tower"):
        add_adapter(vision_zoo.model("gemma3"), rank=2, alpha=2, target_modules=["fc1"], seed=0)

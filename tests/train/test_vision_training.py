"""Runs whose prompts show images: trained, resumed and exported like runs of text, and refused before they start."""

import json
from dataclasses import replace

import model_zoo
import pytest
import torch
import vision_zoo
from training_runs import RANKED, metrics, train, without_clocks
from transformers import MllamaConfig, MllamaForConditionalGeneration

from gspo.config import load
from gspo.data import make_dataset
from gspo.errors import ConfigError, DataError
from gspo.learner import PolicyModule
from gspo.models import load_model, load_processor
from gspo.train.build.data import refuse_images
from gspo.train.build.learner import processor_of, set_trained_part, with_tower
from gspo.train.commands import export
from gspo.types import Images, Prompt


def data_of(processor, first, key="train_dataset"):
    """Eight prompts with the same text and other images."""
    rows = [{"prompt": vision_zoo.text("qwen3_vl", 1, "?")} for _ in range(8)]
    data = make_dataset(rows, tokenizer=processor.tokenizer, chat_template=False, key=key)
    for row in range(8):
        tokens, images = processor.prompt(rows[row]["prompt"], [vision_zoo.image(16, 16, first + row)])
        data._prompts[row] = Prompt(tokens, rows[row]["prompt"], data.rows[row], data.source, row, images=images)
    return data


def run_of(folder, runs, *overrides):
    """The trainer and the run directory of a short run."""
    processor = load_processor(str(folder), vision_zoo.tokenizer())
    settings = [f"actor.path={folder}", "train_dataset.batch_size=2", "gconfig.max_new_tokens=6", "evaluator.size=4"]
    settings += ["evaluator.freq_steps=2", "saver.freq_steps=1", "total_train_steps=2", RANKED]
    given = {"dataset": data_of(processor, 0), "valid": data_of(processor, 50, "valid_dataset")}
    return train(runs, *settings, *overrides, **given)


@pytest.mark.run
def test_a_run_with_images_trains_resumes_and_exports_with_its_processor(tmp_path):
    folder = vision_zoo.model_folder(tmp_path / "model")
    trainer, whole = run_of(folder, tmp_path / "whole")
    # Two steps in one process, and one step in each of two: the same numbers.
    run_of(folder, tmp_path / "parts", "total_train_steps=1")
    _, parts = run_of(folder, tmp_path / "parts")
    assert without_clocks(metrics(whole)[-1]) == without_clocks(metrics(parts)[-1])
    samples = [json.loads(line) for line in (whole / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert {sample["images"]["from"][0]["name"][:6] for sample in samples} == {"image "}
    assert len({sample["images"]["sha256"] for sample in samples}) == 2
    assert all(abs(sample["log_s"]) < 1e-2 for sample in samples if sample["log_s"] is not None)
    made = export(trainer.config, whole, 2, tmp_path / "export")
    shown = [vision_zoo.image(16, 16, 1)]
    text = vision_zoo.text("qwen3_vl", 1, "?")
    # The weights of tower and text are those of the policy.
    trained = dict(trainer.parts.learner.policy.model.named_parameters())
    loaded = dict(load_model(str(made)).named_parameters())
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], trained[name]) for name in loaded)
    processors = [load_processor(str(place), vision_zoo.tokenizer()) for place in (folder, made)]
    assert processors[0].prompt(text, shown)[0] == processors[1].prompt(text, shown)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "overrides",
    [
        ["actor.kl_loss_coef=0.01", "ref.path={folder}"],
        ["actor.use_lora=true", "actor.kl_loss_coef=0.01", "ref.path={folder}"],
        ["actor.use_lora=true", "actor.target_modules=[q_proj, vision]"],
        ["actor.gradient_checkpointing=true", "actor.share_prefix=false"],
        ["rollout.max_head_offpolicyness=1", "actor.use_decoupled_loss=true"],
        ["actor.prox_logp_method=recompute", "actor.ppo_epochs=2"],
        ["rollout.sampler_precision=bf16", "actor.prox_logp_method=recompute"],
    ],
)
def test_variants_of_a_run_train_with_images(overrides, tmp_path):
    folder = vision_zoo.model_folder(tmp_path / "model")
    _, run = run_of(folder, tmp_path / "runs", *(override.format(folder=folder) for override in overrides))
    rows = [row for row in metrics(run) if row["step"] > 0]
    assert len(rows) == 2
    assert all(row["grad/norm"] > 0 for row in rows)


@pytest.mark.full
def test_a_frozen_tower_encodes_every_prompt_of_a_run_once(tmp_path):
    folder = vision_zoo.model_folder(tmp_path / "model")
    trainer, _ = run_of(folder, tmp_path / "runs", "actor.freeze_vision=true", "actor.ppo_epochs=2")
    # Two steps of two prompts, four held-out ones, and the two prompts of the probe.
    assert trainer.parts.learner.policy.vision.num_encoded == 4 + 4 + 2


@pytest.mark.parametrize(("content", "reason"), [(None, "has no image processor"), ("[]", "must be an object of JSON")])
def test_a_folder_without_a_usable_processor_trains_on_text(content, reason, tmp_path):
    folder = tmp_path / "model"
    vision_zoo.write_folder("qwen3_vl", folder)
    (folder / "preprocessor_config.json").unlink()
    if content is not None:
        (folder / "preprocessor_config.json").write_text(content)
    policy = PolicyModule(vision_zoo.model("qwen3_vl", torch.float32))
    assert processor_of(policy, str(folder), vision_zoo.tokenizer()) is None
    assert policy.vision is None
    assert reason in policy.images_refused


def test_a_model_with_an_optional_tower_is_loaded_with_it_if_freeze_vision_is_set(tmp_path):
    vision_zoo.model_folder(tmp_path, vision_zoo.HYBRID)
    for given, name in ([], "Qwen3_5ForCausalLM"), (["false"], "Qwen3_5ForConditionalGeneration"):
        overrides = [f"actor.path={tmp_path}", *(f"actor.freeze_vision={value}" for value in given)]
        model = load_model(str(tmp_path), images=with_tower(load(None, overrides).config))
        assert type(model).__name__ == name


def test_freezing_the_tower_of_a_model_of_text_is_an_error(tmp_path):
    config = load(None, ["actor.freeze_vision=true", "actor.path=embedded:tiny"]).config
    with pytest.raises(ConfigError, match=r"actor\.freeze_vision is true, but embedded:tiny .* has no vision tower"):
        set_trained_part(config, model_zoo.build("llama"))


def shown_data():
    data = make_dataset([{"prompt": "2+2="}] * 2, tokenizer=vision_zoo.tokenizer(), chat_template=False)
    data._prompts[1] = replace(data.prompt(0), images=Images("0", dict))
    return data


@pytest.mark.parametrize(
    ("overrides", "has_environment", "match"),
    [
        (["actor.backend=fsdp:d2"], False, "several trainer ranks take text alone; set actor.backend"),
        (["rollout.backend=local:d1"], False, "sampler servers take text alone; set rollout.backend: local"),
        (["algorithm=ppo", "critic.optimizer.lr=1e-3"], False, "a critic takes text alone; set algorithm"),
        ([], True, "episodes take text alone"),
    ],
)
def test_parts_that_take_text_alone_are_refused_by_name(overrides, has_environment, match):
    config = load(None, overrides).config
    with pytest.raises(ConfigError, match=match):
        refuse_images(config, (shown_data(), None), has_environment=has_environment, policy=None)


def test_a_model_with_cross_attention_to_images_is_refused_by_name():
    layers = {"num_hidden_layers": 2, "cross_attention_layers": [1]}
    tower = {"num_hidden_layers": 1, "num_global_layers": 1, "intermediate_layers_indices": [0]}
    with torch.device("meta"):
        model = MllamaForConditionalGeneration(MllamaConfig(text_config=layers, vision_config=tower))
    with pytest.raises(DataError, match="MllamaForConditionalGeneration takes text alone: transformers cannot run"):
        refuse_images(load(None, []).config, (shown_data(),), has_environment=False, policy=PolicyModule(model))


def test_a_model_that_takes_no_images_is_refused_by_name(tmp_path):
    config, policy = load(None, []).config, PolicyModule(model_zoo.build("llama"))
    with pytest.raises(DataError, match="LlamaForCausalLM takes text alone: it has no vision tower"):
        refuse_images(config, (shown_data(),), has_environment=False, policy=policy)
    policy.images_refused = "log-probs differ by 0.3"
    with pytest.raises(DataError, match="takes text alone: log-probs differ"):
        refuse_images(config, (shown_data(),), has_environment=False, policy=policy)


def test_text_is_not_refused():
    data = make_dataset([{"prompt": "2+2="}], tokenizer=vision_zoo.tokenizer(), chat_template=False)
    refuse_images(
        load(None, ["algorithm=ppo", "critic.optimizer.lr=1e-3"]).config,
        (data, None),
        has_environment=False,
        policy=None,
    )


@pytest.mark.full
def test_a_file_of_rows_with_images_trains(tmp_path):
    folder = vision_zoo.model_folder(tmp_path / "model")
    lines = []
    for number in range(12):
        vision_zoo.image(16, 16, number).open().save(tmp_path / f"{number}.png")
        lines.append(json.dumps({"prompt": "what?", "image": f"{number}.png", "answer": "a"}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    settings = [f"actor.path={folder}", f"train_dataset.path={tmp_path / 'rows.jsonl'}", "train_dataset.batch_size=2"]
    settings += ["gconfig.max_new_tokens=6", "evaluator.size=2", "total_train_steps=1", RANKED]
    _, run = train(tmp_path / "runs", *settings, "train_dataset.chat_template=none", "train_dataset.size=null")
    samples = [json.loads(line) for line in (run / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert {sample["images"]["from"][0]["name"][-4:] for sample in samples} == {".png"}

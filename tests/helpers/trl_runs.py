"""A real TRL GRPOTrainer on a tiny random model, for the audit's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 32
GROUP = 4
UPDATES = 20
GSPO = {"epsilon": 2e-3, "epsilon_high": 3e-3}  # reached by some sequences at a learning rate of 1e-4
PLAIN = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True,
}  # fmt: skip


def reward(completions: list[str], **_: Any) -> list[float]:
    """A function of the text, so that a test can tell which text a reward belongs to."""
    return [text_reward(text) for text in completions]


def text_reward(text: str) -> float:
    return sum((int(word[1:]) * (at + 1)) % 17 for at, word in enumerate(text.split())) / 100


def tiny_model() -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            **sizes,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=False,
            # Weights of the usual 0.02 would give a nearly uniform policy, whose log-probs say little.
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    )


def tiny_tokenizer(**settings: Any) -> Any:
    from word_tokenizers import tokenizer_of

    words = ["<bos>", "<eos>", "<pad>", *(f"w{i}" for i in range(3, VOCAB))]
    return tokenizer_of(words, "<pad>", bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", **settings)


def make_trainer(
    folder: Path,
    trainer_class: Any = None,
    config_class: Any = None,
    more: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """A rollout batch has 4 prompts × 4 completions, in 2 mini-batches of 2 micro-batches each; `settings` override.

    `more`: further arguments of the trainer, TRL's by default.
    """
    import torch
    from datasets import Dataset
    from transformers import Qwen3ForCausalLM

    import trl

    model = tiny_model()
    if settings.get("beta"):  # TRL loads its reference from the policy's path
        model.save_pretrained(folder / "model")
        model = Qwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    args = (
        {
            "output_dir": str(folder),
            "importance_sampling_level": "sequence",
            "loss_type": "grpo",
            "epsilon": 0.2,
            "beta": 0.0,
            "num_generations": GROUP,
            "generation_batch_size": 4 * GROUP,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "max_completion_length": 12,
            "generation_kwargs": {"suppress_tokens": [0, 2]},  # <bos> and <pad>, which no text shows
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "max_steps": 6,
            "logging_steps": 1,
            "log_completions": True,
            "num_completions_to_print": 0,
        }
        | PLAIN
        | settings
    )
    given = {"model": model, "reward_funcs": reward, "processing_class": tiny_tokenizer(padding_side="left")}
    # Prompts of 2 to 5 tokens.
    prompts = [" ".join(["w4", *[f"w{3 + i}"] * (1 + i % 4)]) for i in range(16)]
    data = Dataset.from_list([{"prompt": prompt, "answer": f"a{i}"} for i, prompt in enumerate(prompts)])
    return (trainer_class or trl.GRPOTrainer)(
        **given | {"args": (config_class or trl.GRPOConfig)(**args), "train_dataset": data} | (more or {})
    )


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Two answers of the model with four tokens of a tool between them."""
    import torch

    tokenizer, ids, masks = trainer.processing_class, [], []
    prompt_ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for at, prompt in enumerate(prompt_ids):
        tool = [3 + (at + k) % 20 for k in range(4)]
        first = torch.randint(3, 30, (1 + at % 4,)).tolist()
        with torch.no_grad():
            out = trainer.model.generate(
                input_ids=torch.tensor([[*prompt, *first, *tool]]), generation_config=trainer.generation_config
            )
        second = out[0, len(prompt) + len(first) + 4 :].tolist()
        ids.append([*first, *tool, *second])
        masks.append([1] * len(first) + [0] * 4 + [1] * len(second))
    logprobs = [[-1.0] * len(each) for each in ids]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logprobs, "env_mask": masks}


def trained(folder: Path, trainer_class: Any, settings: dict[str, Any], **more: Any) -> Any:
    """A trainer after its training; `more` are arguments of the trainer."""
    given: dict[str, Any] = dict(more)
    settings = {"learning_rate": 1e-4, "max_steps": UPDATES, "log_completions": False} | settings
    if settings.pop("lora", False):
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    if settings.pop("rollout", False):
        given["rollout_func"] = rollout
    config_class = settings.pop("config_class", None)
    trainer = make_trainer(folder, trainer_class, config_class, given, **settings)
    trainer.train()
    return trainer


def write_files(folder: Path) -> None:
    """What a run with ε 0.2 and sequence ratios leaves on disk, without weights: tests/audit/files/trl."""
    trainer = make_trainer(folder, save_strategy="steps", save_steps=6)
    trainer.train()
    kept = {"trainer_state.json", "training_args.bin", "README.md"}
    for file in folder.rglob("*"):
        if file.is_file() and file.name not in kept and file.suffix != ".parquet":
            file.unlink()


def train_recorded(folder: Path) -> None:
    """A recorded run, for a process of several: `torchrun trl_runs.py FOLDER --recorded`."""
    import json

    from gspo.audit import TRLCallback

    trainer = make_trainer(folder / "out", epsilon=2e-3, epsilon_high=3e-3, per_device_train_batch_size=2)
    trainer.add_callback(TRLCallback(trainer, folder / "run"))
    trainer.train()
    if trainer.accelerator.is_main_process:
        (folder / "history.json").write_text(json.dumps(trainer.state.log_history))


def train_compared(folder: Path) -> None:
    """Runs of TRL's trainer and of ours with the same seed: `torchrun trl_runs.py FOLDER --compared`."""
    import json

    import trl
    from gspo.trl import GSPOTrainer

    for trainer_class in (trl.GRPOTrainer, GSPOTrainer):
        name = trainer_class.__name__
        trainer = make_trainer(
            folder / name, trainer_class, epsilon=2e-3, epsilon_high=3e-3, per_device_train_batch_size=2,
            learning_rate=1e-4, log_completions=False,
        )  # fmt: skip
        trainer.train()
        if trainer.accelerator.is_main_process:
            weights = [number for p in trainer.model.parameters() for number in p.detach().flatten().tolist()]
            found = {"history": trainer.state.log_history, "weights": weights}
            (folder / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    import sys

    verbs = {"--recorded": train_recorded, "--compared": train_compared}
    verbs.get(sys.argv[-1], write_files)(Path(sys.argv[1]))

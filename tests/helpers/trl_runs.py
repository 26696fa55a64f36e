"""A real TRL GRPOTrainer on a tiny random model, for the audit's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 32
GROUP = 4


def reward(completions: list[str], **_: Any) -> list[float]:
    """A function of the text, so that a test can tell which text a reward belongs to."""
    return [text_reward(text) for text in completions]


def text_reward(text: str) -> float:
    return sum((int(word[1:]) * (at + 1)) % 17 for at, word in enumerate(text.split())) / 100


def make_trainer(
    folder: Path, trainer_class: Any = None, config_class: Any = None, more: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """A rollout batch has 4 prompts × 4 completions, in 2 mini-batches of 2 micro-batches each; `settings` override.

    `more`: further arguments of the trainer, TRL's by default.
    """
    import torch
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            **sizes,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=False,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=2,
        )
    )
    if settings.get("beta"):  # TRL loads its reference from the policy's path
        model.save_pretrained(folder / "model")
        model = Qwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    words = {"<bos>": 0, "<eos>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    args = {
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
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | settings
    processing_class = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )
    given = {"model": model, "reward_funcs": reward, "processing_class": processing_class}
    # Prompts of 2 to 5 tokens.
    prompts = [" ".join(["w4", *[f"w{3 + i}"] * (1 + i % 4)]) for i in range(16)]
    data = Dataset.from_list([{"prompt": prompt, "answer": f"a{i}"} for i, prompt in enumerate(prompts)])
    return (trainer_class or trl.GRPOTrainer)(
        **given | {"args": (config_class or trl.GRPOConfig)(**args), "train_dataset": data} | (more or {})
    )


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


if __name__ == "__main__":
    import sys

    (train_recorded if "--recorded" in sys.argv else write_files)(Path(sys.argv[1]))

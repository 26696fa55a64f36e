"""A real TRL GRPOTrainer on a tiny random model, for the audit's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 32
GROUP = 4
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


def make_trainer(folder: Path, **settings: Any) -> Any:
    """A rollout batch has 4 prompts × 4 completions, in 2 mini-batches of 2 micro-batches each; `settings` override."""
    import trl
    from datasets import Dataset

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
    return trl.GRPOTrainer(
        model=tiny_model(),
        reward_funcs=reward,
        args=trl.GRPOConfig(**args),
        train_dataset=Dataset.from_list([{"prompt": f"w{3 + i} w4", "answer": f"a{i}"} for i in range(16)]),
        processing_class=tiny_tokenizer(padding_side="left"),
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

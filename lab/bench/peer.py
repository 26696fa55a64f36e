"""TRL's side of the comparison, as a process: `python -m lab.bench.peer WORKLOAD_JSON FOLDER [DEVICE_BATCH] [TRAINER]`.

Its GRPOTrainer with importance_sampling_level="sequence" and the settings that made it fastest here: one generation of
the whole rollout batch, two optimizer updates on it, no gradient accumulation, no KL, no reference model. DEVICE_BATCH
is TRL's per_device_train_batch_size (TRL's default is 8; 0: a mini-batch); if it is less than a mini-batch, gradients
are accumulated. TRAINER is one of TRAINERS: the same script with `gspo.trl.GSPOTrainer`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

from gspo.models import freeze_vision
from lab.bench.episode import play_turns
from lab.bench.vision import count_tower_images
from lab.bench.workloads import Workload, gemm_rate, model_class, reward, workload_rows

TRAINERS = ("trl", "gspo", "gspo-sampler")  # plain; ours; ours with sampler="gspo"


def measure_trl(w: Workload, folder: str, device_batch: int = 0, trainer_name: str = "trl") -> dict[str, float]:
    """Seconds per rollout batch of TRL's trainer, or of ours in its place, on the same work."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    starts: list[float] = []
    cpu_s: list[float] = []
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = model_class(w).from_pretrained(folder, dtype=torch.float32)
    data = workload_rows(w, w.num_prompts * w.steps)
    if w.visual_tokens:
        tokenizer = _processor(folder, tokenizer)
        data = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in data]
    if w.frozen:
        freeze_vision(model)

    class Ticks(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            starts.append(time.perf_counter())
            cpu_s.append(time.process_time())

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.on_step_begin(args, state, control)

    generation_s: list[float] = []
    sampling_cpu_s: list[float] = []  # of generation alone, without log-probs and rewards
    with (
        tempfile.TemporaryDirectory() as root,
        contextlib.redirect_stdout(sys.stderr),
        contextlib.ExitStack() as counting,
    ):
        num_images = counting.enter_context(count_tower_images(w.visual_tokens)) if w.visual_tokens else lambda: 0
        rate = gemm_rate()
        trainer_class, args = _trainer(
            trainer_name, _arguments(w, root, device_batch or w.num_sequences // w.num_minibatches)
        )
        trainer = trainer_class(
            model=model,
            processing_class=tokenizer,
            reward_funcs=reward,  # pyright: ignore[reportArgumentType]
            train_dataset=Dataset.from_list(data),
            callbacks=[Ticks()],
            rollout_func=play_turns(w),
            args=args,
        )
        generate = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            start = time.perf_counter()
            out = generate(inputs)
            generation_s.append(time.perf_counter() - start)
            return out

        single_turn = trainer._generate_single_turn

        def sampled(*inputs: Any, **named: Any) -> Any:
            start = time.process_time()
            out = single_turn(*inputs, **named)
            sampling_cpu_s.append(time.process_time() - start)
            return out

        trainer._generate_and_score_completions, trainer._generate_single_turn = timed, sampled
        trainer.train()
        rate = (rate + gemm_rate()) / 2
    batches = starts[:: w.num_minibatches]  # the last one is the end of training
    per_batch = [b - a for a, b in pairwise(batches)]
    cpu = [b - a for a, b in pairwise(cpu_s[:: w.num_minibatches])]
    step = statistics.median(per_batch[1:] or per_batch)
    rollout = statistics.median(generation_s[1:] or generation_s)
    cpu_sampling = statistics.median(sampling_cpu_s[1:] or sampling_cpu_s or [0.0])
    return {
        "step_s": step,
        "cpu_s": statistics.median(cpu[1:] or cpu),
        "cpu_training_s": statistics.median(cpu[1:] or cpu) - cpu_sampling,
        "tower_images": num_images() / w.steps,
        "rollout_s": rollout,
        "train_s": step - rollout,
        "rollout_tokens_s": w.num_sequences * w.sampled_tokens / rollout,
        "train_tokens_s": w.num_sequences * (w.all_prompt_tokens + w.completion_tokens) / max(step - rollout, 1e-9),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        "gemm_gflops": rate,
    }


def _trainer(name: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The class, and its config."""
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    if name == "trl":
        return GRPOTrainer, GRPOConfig(**settings)
    from gspo.trl import GSPOConfig, GSPOTrainer

    return GSPOTrainer, GSPOConfig(**settings, run_dir="none", sampler="gspo" if name == "gspo-sampler" else "trl")


def _arguments(w: Workload, root: str, device_batch: int) -> dict[str, Any]:
    return {
        "output_dir": root,
        "per_device_train_batch_size": device_batch,
        "gradient_accumulation_steps": w.num_sequences // w.num_minibatches // device_batch,
        "generation_batch_size": w.num_sequences,
        "num_generations": w.num_samples,
        "max_completion_length": w.new_tokens,
        "generation_kwargs": {"min_new_tokens": w.new_tokens},
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "loss_type": "grpo",
        "beta": 0.0,
        "temperature": 1.0,
        "learning_rate": 1e-6,
        "max_steps": w.steps * w.num_minibatches,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "logging_steps": 10**6,
        "report_to": "none",
        "disable_tqdm": True,
    }


def _processor(folder: str, tokenizer: Any) -> Any:
    """transformers' processor of the model, as ours loads it: without torchvision."""
    from gspo.models import load_processor

    found = load_processor(folder, tokenizer)
    assert found is not None
    found.inner.chat_template = found.chat_template
    return found.inner


if __name__ == "__main__":
    workload, folder, *more = sys.argv[1:]
    device_batch, trainer_name = [*more, *["0", "trl"][len(more) :]]
    print(json.dumps(measure_trl(Workload(**json.loads(workload)), folder, int(device_batch), trainer_name)))

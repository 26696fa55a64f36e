"""Small runs of the real loop on the embedded model, and what is compared between two of them."""

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from gspo.config import load
from gspo.models import embedded
from gspo.rollout import single_turn
from gspo.system import read_jsonl
from gspo.train import FIRST, Leader, Trainer

SMALL = (
    "algorithm=gspo", "actor.path=embedded:tiny", "train_dataset.path=embedded:arithmetic:2-3",
    "train_dataset.size=400", "train_dataset.batch_size=8", "gconfig.n_samples=4", "gconfig.max_new_tokens=32",
    "actor.ppo_n_minibatches=2", "actor.optimizer.lr=2e-4", "actor.eps_clip=0.002", "evaluator.size=16",
    "total_train_steps=3", "threads=1",
)  # fmt: skip

# Supervised fine-tuning instead, on the worked solutions.
SFT = (
    "algorithm=sft", "~gconfig.n_samples", "~actor.ppo_n_minibatches", "~actor.eps_clip", "actor.optimizer.lr=1e-4",
    "train_dataset.columns.completion=solution",
)  # fmt: skip

# Which groups have equal rewards depends on the machine that built the model. Where a test needs an update of every
# mini-batch, this reward gives every sequence an advantage.
RANKED = "reward.functions=[loop_rewards:ranked]"


def make_trainer(root: Path, *overrides: str, kind: type[Leader] = Leader, **given) -> Any:
    """A trainer whose loop is of `kind`; after `train()` its `parts` can be looked at."""
    trainer: Any = Trainer(load(None, [*SMALL, f"cluster.fileroot={root}", *overrides]), **given)

    def leader(parts):
        trainer.parts = parts
        return kind(parts)

    trainer.leader = leader
    return trainer


def train(root: Path, *overrides: str, **given):
    """Run to the end (threads of the test process are put back); the trainer, closed, and its run directory."""
    threads = torch.get_num_threads()
    trainer = make_trainer(root, *overrides, **given)
    try:
        summary = trainer.train(report=False)
    finally:
        torch.set_num_threads(threads)
    return trainer, summary.path


def signals(version: int, number: int = signal.SIGINT):
    """A workflow during which this process gets a signal, once: in the first batch of this version of the weights."""
    sent: list[int] = []

    def workflow(requests, sampler):
        if sampler.version == version and requests[0].id.submission < FIRST and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return single_turn(requests, sampler)

    workflow.sent = sent
    return workflow


def stopping(step: int) -> type[Leader]:
    """A loop that is asked to stop during this step, as by SIGTERM."""

    class Stopping(Leader):
        def record(self, batch, report, clock):
            if self.parts.state.step == step:
                self.parts.stop.signal = signal.SIGTERM
            super().record(batch, report, clock)

    return Stopping


def assert_resumes(root: Path, *overrides: str, after: int, **given):
    """A run stopped in step `after` and started again is the uninterrupted one, bit for bit, whose trainer and
    directory are returned."""
    trainer, straight = train(root / "straight", *overrides, **given)
    _, stopped = train(root / "stopped", *overrides, kind=stopping(after), **given)
    assert metrics(stopped)[-1]["step"] == after
    train(root / "stopped", *overrides, **given)
    assert digests(stopped) == digests(straight)
    return trainer, straight


def build_fast(monkeypatch, cache: Path, name: str, **warm: int) -> None:
    """The embedded model `name` is built in `cache`, with a few warm steps: it need not be able to do anything."""
    recipe = embedded.RECIPES[name]
    monkeypatch.setitem(embedded.RECIPES, name, {**recipe, "warm": {**recipe["warm"], "steps": 2, **warm}})
    monkeypatch.setenv("GSPO_CACHE", str(cache))


def logits(model) -> torch.Tensor:
    """Of eight fixed tokens: what a test compares models by."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 4, 5, 12, 6, 7, 8, 13]])).logits[0]


def path_of(root: Path) -> Path:
    return root / "gspo" / "trial0"


def metrics(path: Path) -> list[dict]:
    return read_jsonl(path / "metrics.jsonl")


def without_clocks(row: dict) -> dict:
    return {k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))}


def digests(path: Path) -> dict:
    """Everything a run is, less wall-clock: weights, moments, state, metrics, samples."""
    newest = sorted((path / "checkpoints").glob("step_*"))[-1]
    state = json.loads((newest / "state.json").read_text())
    state.pop("seconds")
    files = [*newest.glob("*.safetensors"), *(path / "samples").iterdir()]
    evals = {f"evals/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in path.glob("evals/*")}
    return {
        "checkpoint": newest.name,
        "state": state,
        "metrics": [without_clocks(row) for row in metrics(path)],
        **evals,
        **{file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    }


def samples(path: Path, step: int) -> list[dict]:
    return read_jsonl(path / "samples" / f"step_{step:06d}.jsonl")


def asked(path: Path) -> set[str]:
    """Every prompt that was trained on."""
    return {row["prompt"] for file in (path / "samples").glob("*.jsonl") for row in read_jsonl(file)}

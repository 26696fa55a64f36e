"""examples/minimal_loop.py is what its text says: the trainer's algorithm, in one file."""

import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_runs import metrics, train

from gspo.models import load_model

pytestmark = pytest.mark.run

ROOT = Path(__file__).parents[2]
STEPS = 2


def test_its_losses_and_weights_are_the_trainers(tmp_path, tiny):
    loop = runpy.run_path(str(ROOT / "examples" / "minimal_loop.py"))
    small = loop["train"].__globals__
    small.update(NUM_PROMPTS=8, GROUP_SIZE=4, LEARNING_RATE=5e-4)
    model, losses = loop["train"](num_steps=STEPS, dtype=torch.float64)
    _, path = train(
        tmp_path, "actor.dtype=float64", "actor.prox_logp_method=recompute", f"total_train_steps={STEPS}",
        "train_dataset.path=embedded:arithmetic", "train_dataset.size=null", "seed=1",
        f"train_dataset.batch_size={small['NUM_PROMPTS']}", f"gconfig.n_samples={small['GROUP_SIZE']}",
        f"gconfig.max_new_tokens={loop['MAX_NEW_TOKENS']}", f"actor.ppo_n_minibatches={loop['NUM_MINIBATCHES']}",
        f"actor.optimizer.lr={small['LEARNING_RATE']}", f"actor.optimizer.gradient_clipping={loop['MAX_GRAD_NORM']}",
        f"actor.eps_clip={loop['CLIP_LOW']}", f"actor.eps_clip_higher={loop['CLIP_HIGH']}",
    )  # fmt: skip
    rows = [row for row in metrics(path) if row["step"]]
    assert sum(row["clip/sequences_low"] + row["clip/sequences_high"] for row in rows) > 0
    mean = [sum(losses[2 * i : 2 * i + 2]) / 2 for i in range(STEPS)]
    assert [row["loss/mean"] for row in rows] == pytest.approx(mean, abs=1e-7)  # a sequence's share is about 1
    trained = load_file(path / "checkpoints" / f"step_{STEPS:06d}" / "model.safetensors")
    trained = {name.removeprefix("model."): weight for name, weight in trained.items()}  # a PolicyModule's names
    start, ours = load_model(tiny, torch.float64).state_dict(), model.state_dict()
    apart = max(float((weight - ours[name]).abs().max()) for name, weight in trained.items())
    moved = max(float((weight - start[name]).abs().max()) for name, weight in trained.items())
    # transformers computes norms and rotary positions in float32 even here: rounding is 1e-8, not 1e-16.
    assert apart < 1e-6
    assert moved > 1000 * apart

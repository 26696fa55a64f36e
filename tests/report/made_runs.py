"""Run directories as the loop writes them, made by hand."""

import json


def step_row(step: int, **changes) -> dict:
    """A row as the loop writes it."""
    row = {
        "step": step, "reward/mean": 0.1 * step, "clip/sequences_low": 0.1, "clip/sequences_high": 0.05,
        "clip/eps_low": 0.002, "clip/eps_high": 0.0025, "ratio/log_s_p05": -2e-3, "ratio/log_s_p50": 1e-5,
        "ratio/log_s_p95": 2e-3, "ratio/log_s_std": 1e-3, "ratio/log_s_max_abs": 8e-3, "noise/log_s_p95_abs": 1e-7,
        "length/mean": 30.0, "length/max": 40, "length/clipped_mean": 31.0, "length/truncated": 0.0,
        "policy/entropy": 0.05, "grad/norm": 0.3, "time/step_s": 2.0, "time/rollout_s": 1.0, "time/train_s": 0.5,
        "throughput/rollout_tokens_s": 1000.0 * step, "throughput/train_tokens_s": 500.0, "policy/proximal": "sampler",
    }  # fmt: skip
    return row | changes


def eval_row(accuracy: float, problems: int = 512, k: int = 1) -> dict:
    return {"eval/accuracy": accuracy, "eval/accuracy_ci": 0.02, "eval/k": k, "eval/problems": problems}


def make_run(path, rows, steps=(), config="algorithm: gspo\n"):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(config)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in steps:
        folder = path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x" * 1000)
    return path

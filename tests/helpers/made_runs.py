"""Run directories as the loop writes them, made by hand."""

import json


def strict(text: str):
    """What is written, if it is JSON in the strict sense."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def step_row(step: int, **changes) -> dict:
    """A row as the loop writes it."""
    row = {
        "step": step, "reward/mean": 0.1 * step, "clip/sequences_low": 0.1, "clip/sequences_high": 0.05,
        "clip/num_sequences": 100, "clip/eps_low": 0.002, "clip/eps_high": 0.0025,
        "ratio/log_s_p05": -2e-3, "ratio/log_s_p50": 1e-5,
        "ratio/log_s_p95": 2e-3, "ratio/log_s_std": 1e-3, "ratio/log_s_max_abs": 8e-3, "noise/log_s_p95_abs": 1e-7,
        "length/mean": 30.0, "length/max": 40, "length/clipped_mean": 31.0, "length/truncated": 0.0,
        "policy/entropy": 0.05, "grad/norm": 0.3, "time/step_s": 2.0, "time/rollout_s": 1.0, "time/train_s": 0.5,
        "throughput/rollout_tokens_s": 1000.0 * step, "throughput/train_tokens_s": 500.0, "policy/proximal": "sampler",
    }  # fmt: skip
    return row | changes


def eval_row(accuracy: float, problems: int = 512, k: int = 1) -> dict:
    return {"eval/accuracy": accuracy, "eval/accuracy_ci": 0.02, "eval/k": k, "eval/problems": problems}


def graded_row(reward: float, ci: float) -> dict:
    """An evaluation whose rewards are not 0 or 1: no answer is correct."""
    return eval_row(0.0) | {"eval/reward": reward, "eval/reward_ci": ci, "eval/graded": 1.0}


def make_run(path, rows, steps=(), config="algorithm: gspo\n", origins=None):
    path.mkdir(parents=True, exist_ok=True)
    if origins is not None:  # key → (kind, detail)
        named = {key: {"kind": kind, "detail": detail} for key, (kind, detail) in origins.items()}
        (path / "origins.json").write_text(json.dumps(named))
    (path / "config.yaml").write_text(config)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in steps:
        folder = path / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x" * 1000)
    return path


def sample_row(step: int, sequence: int, **changes) -> dict:
    """A sample as the loop writes it: groups of 4, 4 mini-batches of a batch of 16."""
    row = {
        "step": step, "sequence": sequence, "submission": 100 * step + sequence // 4, "sample": sequence % 4,
        "prompt": f"{step}+{sequence // 4}=", "completion": f"answer {sequence} of step {step}", "answer": "7",
        "reward": float(sequence % 2), "reward_parts": {"final": float(sequence % 2)}, "failure": None,
        "advantage": 1.0 if sequence % 2 else -1.0, "length": 10 + sequence % 7, "finish": "stop",
        "log_s": 1e-4 * (sequence % 11 - 5) if sequence >= 4 else 0.0, "clipped": sequence % 8 == 7,
        "minibatch": sequence // 4 % 4, "version": step - 1, "pieces": None,
    }  # fmt: skip
    return row | changes


def write_samples(run, step, rows, tokens=None):
    """samples/step_*.jsonl as the loop writes it: aside, then renamed; ASCII keeps every text, lone surrogates too."""
    folder = run / "samples"
    folder.mkdir(exist_ok=True)
    aside = folder / "aside"
    aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if tokens:
        from safetensors.numpy import save_file

        save_file(tokens, folder / f"step_{step:06d}.safetensors")
    aside.replace(folder / f"step_{step:06d}.jsonl")


def write_answers(run, step, rows):
    """evals/step_*.jsonl as the loop writes it."""
    (run / "evals").mkdir(exist_ok=True)
    (run / "evals" / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def answer_row(step: int, row: int, **changes) -> dict:
    """A held-out answer as the loop writes it."""
    found = {
        "step": step, "row": row, "source": "rows", "prompt": f"<u>{row}+1=<a>", "question": f"{row}+1=",
        "answer": str(row + 1), "sample": 0, "completion": f"it is {row + 1}", "reward": row / 10,
        "reward_parts": {"digits": row / 10}, "failure": None, "correct": False, "length": 4, "finish": "stop",
    }  # fmt: skip
    return found | changes


def make_trial(root, num_steps, ends_at=None):
    """The run exp/trial: 16 samples of each step, 30 % of the held-out problems before the first step, and `ends_at`
    of them after the last one."""
    last = {} if ends_at is None else eval_row(ends_at)
    steps = range(1, num_steps + 1)
    rows = [step_row(step, **(last if step == num_steps else {})) for step in steps]
    run = make_run(root / "exp" / "trial", [{"step": 0, **eval_row(0.3)}, *rows])
    for step in steps:
        write_samples(run, step, [sample_row(step, i) for i in range(16)])
    return run


def append_metrics(run, *rows):
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# Texts that would act if they were read as anything but text: promise 16.
HOSTILE = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>",
    "</script><script>window.pwned = 3</script><!-- <script>",
    "\x1b[31mred\x1b]0;title\x07\x1b[2J\x00\x9b",
    "user\u202egnirts\u2066hidden\u2069\u200f",
    "lone \ud800 and \udfff surrogates",
    "javascript:window.pwned=4//\u2028\u2029{{data}}&lt;b&gt;",
)

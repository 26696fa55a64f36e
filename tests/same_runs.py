"""Record what short seeded runs compute, or compare two recordings: proof that a refactoring moved no number.

    python tests/same_runs.py record FOLDER [NAME …]    # run each config by `gspo train`, write FOLDER/NAME.json
    python tests/same_runs.py compare BEFORE AFTER      # exit 1 and name every difference

A record holds every metric of every step (less times, throughput and memory), the sha256 of each sample file and of
each tensor file of each checkpoint. Floats of one machine are not those of another, so records are not committed.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHORT = ["total_train_steps=6", "evaluator.size=64", "saver.freq_steps=3", "saver.keep=9", "threads=1"]
QUICK = "examples/quickstart.yaml"
RUNS = {
    "quickstart": [QUICK, "threads=1"],
    "lora": [QUICK, *SHORT, "actor.use_lora=true", "actor.optimizer.lr=1e-3"],
    "critic": ["examples/variants/ppo.yaml", *SHORT],
    "kl": ["examples/variants/kl.yaml", *SHORT],
    "refill": ["examples/variants/dynamic.yaml", *SHORT],
    "ahead": [QUICK, *SHORT, "rollout.max_head_offpolicyness=2", "actor.use_decoupled_loss=true"],
    "mixture": ["examples/mixture.yaml", *SHORT],
    "tools": ["examples/tools/calculator.yaml", *SHORT],
    "moe": [QUICK, *SHORT, "actor.path=embedded:tiny-moe", "rollout.sampler_precision=int8"],
    "replay": [QUICK, *SHORT, "actor.path=embedded:tiny-moe", "algorithm=grpo", "actor.routing_replay=proximal"],
}
NOT_COMPARED = ("time/", "throughput/", "memory/")


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def record(name: str, folder: Path) -> None:
    """Train one config from scratch and write what it computed."""
    with tempfile.TemporaryDirectory() as scratch:
        words = [*RUNS[name], f"cluster.fileroot={scratch}", "experiment_name=e", "trial_name=t"]
        done = subprocess.run([sys.executable, "-m", "gspo", "train", *words], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: gspo train ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr}")
        run = next(Path(scratch).rglob("metrics.jsonl")).parent
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        metrics = [{k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)} for line in lines]
        files = [*run.glob("samples/*"), *run.glob("checkpoints/*/*.safetensors")]
        digests = {str(file.relative_to(run)): sha256(file) for file in sorted(files)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"metrics": metrics, "files": digests}, indent=1))
    print(f"{name}: {len(metrics)} steps, {len(digests)} files", flush=True)


def differences(before: Path, after: Path) -> list[str]:
    found = []
    for file in sorted(before.glob("*.json")):
        other = after / file.name
        if not other.exists():
            found.append(f"{file.stem}: not recorded in {after}")
            continue
        old, new = json.loads(file.read_text()), json.loads(other.read_text())
        if len(old["metrics"]) != len(new["metrics"]):
            found.append(f"{file.stem}: {len(old['metrics'])} against {len(new['metrics'])} steps")
        for a, b in zip(old["metrics"], new["metrics"], strict=False):
            keys = [key for key in sorted({*a, *b}) if a.get(key, "absent") != b.get(key, "absent")]
            found += [f"{file.stem} step {a['step']} {key}: {a.get(key)} against {b.get(key)}" for key in keys]
        names = {*old["files"], *new["files"]}
        found += [f"{file.stem}: {n} differs" for n in sorted(names) if old["files"].get(n) != new["files"].get(n)]
    return found


def main() -> int:
    verb, *words = sys.argv[1:]
    if verb == "record":
        for name in words[1:] or RUNS:
            record(name, Path(words[0]))
        return 0
    found = differences(Path(words[0]), Path(words[1]))
    print("\n".join(found) or "equal")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

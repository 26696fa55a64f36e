"""`make accept-gpu`: one command for the first person with a GPU, and one report to attach to an issue.

Every check is a command that a user would run, in a process of its own with a time limit. A check whose component is
absent is skipped with the reason. Writes accept.json and accept.md; exits with 1 if a check failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gspo.system import describe_exit

_LIMIT_S = 1800.0  # for one check
_FEW = ("total_train_steps=5", "evaluator.size=64", "train_dataset.batch_size=16")


@dataclass(frozen=True)
class Trial:
    """A command line, when it can run, and what its run directory or its output must show."""

    name: str
    words: Sequence[str]
    absent: str = ""  # the reason why it cannot run here
    judge: Callable[[Path, str], dict[str, Any]] = field(default=lambda folder, out: {})  # figures; raises if wrong


@dataclass(frozen=True)
class AcceptOutcome:
    name: str
    command: str
    status: str  # passed, failed, skipped
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


def this_machine() -> dict[str, Any]:
    """Versions and devices."""
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    packages = ("torch", "transformers", "vllm", "trl", "gspo")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda,
        "gpus": [f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus],
        "packages": {name: version for name in packages if (version := _version(name))},
    }


def checks(num_gpus: int) -> list[Trial]:
    """The checks for a machine with so many GPUs; with none they run on the CPU, where that means something."""
    no_gpu = "" if num_gpus else "there is no GPU"
    # The benchmark runs TRL on the CPU only: beside a GPU the ratio would mean nothing.
    no_trl = [] if importlib.util.find_spec("trl") and not num_gpus else ["--no-peer"]
    return [
        Trial("self-test", ["doctor", "--selftest", "--json"], judge=_selftest),
        Trial("quick-start", ["train", "quickstart"], judge=_learned),
        Trial("resume", ["train", "quickstart", "total_train_steps=62"], judge=_resumed),
        Trial("bfloat16", ["train", "quickstart", "actor.dtype=bfloat16", *_FEW, "trial_name=bf16"], no_gpu, _steps),
        Trial("servers", ["train", "quickstart", "rollout.backend=local:d1", *_FEW, "trial_name=sampler"], "", _steps),
        Trial("two ranks", ["train", "quickstart", "actor.backend=fsdp:d2", *_FEW, "trial_name=ranks"],
              "one GPU only: NCCL needs two" if num_gpus == 1 else "", _steps),
        Trial("vLLM", ["train", "quickstart", "rollout.backend=vllm:d1", *_FEW, "trial_name=vllm"],
              no_gpu or _without_vllm(), _steps),
        Trial("bench", ["bench", "--workload", "tiny", "--rounds", "1", "--json", *no_trl], judge=_bench),
    ]  # fmt: skip


def _without_vllm() -> str:
    """Why no server of vLLM can start; empty if one can. vLLM may have an environment of its own."""
    from gspo.config import python_of
    from gspo.errors import ConfigError

    try:
        python_of("vllm", {})
    except ConfigError:
        return "vLLM is not installed"
    return ""


def run(check: Trial, folder: Path) -> AcceptOutcome:
    shown = " ".join(["gspo", *check.words])
    if check.absent:
        return AcceptOutcome(check.name, shown, "skipped", reason=check.absent)
    is_run = check.words[0] == "train"
    words = [*check.words, *([f"cluster.fileroot={folder / 'runs'}"] if is_run else [])]
    begin = time.monotonic()
    with open(folder / f"{check.name.replace(' ', '_')}.log", "w+", encoding="utf-8") as log:
        try:
            done = subprocess.run(  # wait: 1800 s, the user of make accept
                [sys.executable, "-m", "gspo", *words], stdout=subprocess.PIPE, stderr=log, text=True,
                timeout=_LIMIT_S, check=False, cwd=folder,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return AcceptOutcome(check.name, shown, "failed", _LIMIT_S, reason=f"not finished after {_LIMIT_S:.0f} s")
        seconds = time.monotonic() - begin
        log.seek(0)
        tail = "\n".join((done.stdout + log.read()).strip().splitlines()[-8:])
    if done.returncode:
        return AcceptOutcome(check.name, shown, "failed", seconds, reason=f"{describe_exit(done.returncode)}\n{tail}")
    try:
        return AcceptOutcome(check.name, shown, "passed", seconds, check.judge(folder, done.stdout))
    except (AssertionError, LookupError, ValueError, OSError) as error:
        return AcceptOutcome(check.name, shown, "failed", seconds, reason=f"{error}\n{tail}")


def _selftest(folder: Path, out: str) -> dict[str, Any]:
    lines = json.loads(out)
    wrong = [line["name"] for line in lines if not line["ok"]]
    assert not wrong, f"not within bounds: {', '.join(wrong)}"
    return {line["name"]: line["figure"] for line in lines if line["figure"] is not None}


def _rows(folder: Path, trial: str) -> list[dict[str, Any]]:
    file = folder / "runs" / "quickstart" / trial / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _learned(folder: Path, out: str) -> dict[str, Any]:
    rows = _rows(folder, "gspo")
    found = [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None]
    assert found[-1] > 0.9, f"held-out accuracy {found[0]:.3f} → {found[-1]:.3f}; expected more than 0.9"
    step_s = sorted(row["time/step_s"] for row in rows[1:])
    return {"accuracy": [found[0], found[-1]], "step_s": step_s[len(step_s) // 2]}


def _resumed(folder: Path, out: str) -> dict[str, Any]:
    steps = [row["step"] for row in _rows(folder, "gspo")]
    assert steps == list(range(63)), f"expected the steps 0 to 62 once each, got {len(steps)} rows to {steps[-1]}"
    return {"steps": steps[-1]}


def _steps(folder: Path, out: str) -> dict[str, Any]:
    newest = max((folder / "runs" / "quickstart").iterdir(), key=lambda path: path.stat().st_mtime)
    rows = _rows(folder, newest.name)
    assert rows[-1]["step"] == 5, f"{newest.name} ended at step {rows[-1]['step']} of 5"
    noise = [row["noise/log_s_p95_abs"] for row in rows if row.get("noise/log_s_p95_abs") is not None]
    return {"step_s": rows[-1]["time/step_s"], **({"noise": max(noise)} if noise else {})}


def _bench(folder: Path, out: str) -> dict[str, Any]:
    found = json.loads(out)["workloads"]["tiny"]
    return {"step_s": found["ours"]["step_s"], **({"ratio": found["ratio"]} if "ratio" in found else {})}


def to_markdown(about: dict[str, Any], outcomes: Sequence[AcceptOutcome]) -> str:
    """The report, for an issue."""
    lines = ["# Acceptance", "", f"{time.strftime('%Y-%m-%d')}, {about['platform']}, {about['cores']} cores", ""]
    lines += [f"GPUs: {', '.join(about['gpus']) or 'none'}; CUDA {about['cuda']}", ""]
    lines += [", ".join(f"{name} {version}" for name, version in about["packages"].items()), ""]
    lines += ["| check | outcome | seconds | figures | command |", "|---|---|---|---|---|"]
    for one in outcomes:
        figures = ", ".join(f"{name} {_short(value)}" for name, value in one.figures.items())
        said = figures or one.reason.partition("\n")[0]
        lines.append(f"| {one.name} | {one.status} | {one.seconds:.0f} | {said} | `{one.command}` |")
    for one in outcomes:
        if one.status == "failed":
            lines += ["", f"## {one.name}", "", "```", one.reason, "```"]
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " → ".join(map(_short, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.accept", description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpu", action="store_true", help="fail if there is no GPU")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this check only; may be repeated")
    parser.add_argument(
        "--out", type=Path, default=Path("."), metavar="DIR", help="where accept.json and .md are written"
    )
    args = parser.parse_args(argv)
    about = this_machine()
    if args.gpu and not about["gpus"]:
        print("accept: PyTorch finds no GPU; `make accept` runs the checks on the CPU", file=sys.stderr)
        return 2
    wanted = checks(len(about["gpus"]))
    if unknown := set(args.only or ()) - {check.name for check in wanted}:
        print(f"accept: no check {unknown.pop()!r}; there are {', '.join(c.name for c in wanted)}", file=sys.stderr)
        return 2
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gspo-accept-") as folder:
        for check in wanted:
            if args.only and check.name not in args.only:
                continue
            outcomes.append(run(check, Path(folder)))
            one = outcomes[-1]
            why = one.reason.partition("\n")[0]
            print(f"{one.status:<8} {one.name:<12} {one.seconds:6.0f} s  {why}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"machine": about, "checks": [asdict(one) for one in outcomes]}
    (args.out / "accept.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    (args.out / "accept.md").write_text(to_markdown(about, outcomes), encoding="utf-8")
    print(f"wrote {args.out / 'accept.md'} and accept.json: attach both to an issue")
    return 1 if any(one.status == "failed" for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure two commits alternately, step by step, and compare the medians.

Both sides run at the same time, each in its own process with its own sources and the same interpreter and packages, and
take turns: while one does a step, the other waits. Load of other programs that changes within seconds affects both
alike, and CPU seconds count only the process itself.
"""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

import gspo
from gspo.errors import ConfigError, GspoError
from gspo.system import last_lines, stop_group
from lab.bench.commits import side
from lab.bench.ours import run_settings
from lab.bench.workloads import Workload, workload_rows, write_workload_model

Say = Callable[[str], None]
MEASURES = ("cpu_s", "wall_s")
_STEP_S = 3600.0  # limit for one step, and for the start
_GIT_S = 120.0


def compare_commits(workload: Workload, ref: str, *, threshold: float, say: Say) -> dict[str, Any]:
    """Medians of this tree (`new`) and of `ref` (`old`), their ratio with a 95 % interval, and whether it is slower."""
    if workload.visual_tokens or workload.num_turns > 1:
        raise ConfigError(f"--compare measures workloads of text and one turn; {workload.name} is none")
    seconds: dict[str, list[dict[str, float]]] = {"new": [], "old": []}
    with tempfile.TemporaryDirectory(prefix="gspo-compare-") as folder:
        sources = {"new": own_source(), "old": source_of(ref, Path(folder) / "old")}
        model = Path(folder) / "model"
        model.mkdir()
        write_workload_model(workload, model)
        for number in range(workload.rounds):
            order = ["new", "old"] if number % 2 else ["old", "new"]
            for name, times in _round(workload, model, sources, order, Path(folder)).items():
                seconds[name] += times
            found = ratio_of(seconds, "cpu_s")
            say(f"{workload.name}, round {number + 1} of {workload.rounds}: CPU seconds × {_text(found)}")
    ratios = {measure: ratio_of(seconds, measure) for measure in MEASURES}
    return {
        "workload": workload.name,
        "ref": ref,
        "pairs": len(seconds["new"]),
        **{name: {m: float(np.median([t[m] for t in times])) for m in MEASURES} for name, times in seconds.items()},
        **{measure.replace("_s", "_ratio"): ratio for measure, ratio in ratios.items()},
        "slower": is_slower(ratios["cpu_s"], threshold),
    }


def line_of(found: dict[str, Any]) -> str:
    """One comparison as a line for the terminal."""
    parts = [
        f"{found['old'][m]:.3f} → {found['new'][m]:.3f} {what} s, × {_text(found[m.replace('_s', '_ratio')])}"
        for m, what in zip(MEASURES, ("CPU", "wall"), strict=True)
    ]
    end = "  SLOWER" if found["slower"] else ""
    return f"{found['workload']}: {found['ref']} → this tree, {found['pairs']} pairs of steps: {'; '.join(parts)}{end}"


def ratio_of(seconds: dict[str, list[dict[str, float]]], measure: str) -> list[float]:
    """Median of `new` ÷ median of `old`, and its 95 % interval by resampling pairs of steps.

    >>> pairs = {"new": [{"cpu_s": 2.0}] * 4, "old": [{"cpu_s": 1.0}] * 4}
    >>> ratio_of(pairs, "cpu_s")
    [2.0, 2.0, 2.0]
    """
    pairs = np.array([[t[measure] for t in seconds[name]] for name in ("new", "old")])  # [2, n]
    drawn = np.random.default_rng(0).integers(pairs.shape[1], size=(2000, pairs.shape[1]))
    new, old = np.median(pairs[:, drawn], axis=-1)  # [2000] each
    low, high = np.quantile(new / old, (0.025, 0.975))
    middle = np.median(pairs, axis=-1)
    return [float(middle[0] / middle[1]), float(low), float(high)]


def is_slower(ratio: Sequence[float], threshold: float) -> bool:
    """Slower by more than the threshold, and not by chance.

    >>> is_slower([1.08, 1.06, 1.11], 0.05), is_slower([1.08, 0.97, 1.2], 0.05), is_slower([1.03, 1.02, 1.04], 0.05)
    (True, False, False)
    """
    middle, low, _ = ratio
    return middle > 1 + threshold and low > 1


def own_source() -> Path:
    """The folder of the sources that run now."""
    return Path(gspo.__file__).parents[1]


def source_of(ref: str, folder: Path) -> Path:
    """Write the sources of a commit to `folder`; returns what belongs on PYTHONPATH."""
    top = _git(own_source(), "rev-parse", "--show-toplevel")
    if top.returncode:
        raise ConfigError(f"--compare needs a git clone; {own_source()} is in none: {top.stderr.decode().strip()}")
    done = _git(Path(top.stdout.decode().strip()), "archive", "--format=tar", ref, "src")
    if done.returncode:
        raise ConfigError(f"--compare {ref}: git has no sources of this commit: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def _git(folder: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    # wait: 120 s, gspo bench --compare
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, timeout=_GIT_S, check=False)


def _round(
    workload: Workload, model: Path, sources: dict[str, Path], order: Sequence[str], folder: Path
) -> dict[str, list[dict[str, float]]]:
    """One process per side; the sides' steps alternate, and so does the order within a pair."""
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    with ExitStack() as started:
        sides = {name: started.enter_context(_Side(name, workload, model, sources[name], folder)) for name in order}
        for one in sides.values():
            one.step_times()  # both have loaded the model and done a first step
        for number in range(workload.steps - 1):
            for name in order if number % 2 else reversed(order):
                sides[name].go_on()
                seconds[name].append(sides[name].step_times())
    return seconds


class _Side:
    """The process of one commit."""

    def __init__(self, name: str, workload: Workload, model: Path, source: Path, folder: Path) -> None:
        self._log = folder / f"{name}.log"
        self._what = f"{workload.name} with the sources of {'this tree' if name == 'new' else 'the other commit'}"
        longer = replace(workload, steps=workload.steps + 1)  # the last step is never done: the process is stopped
        root = tempfile.mkdtemp(prefix=f"{name}-", dir=folder)
        self._job = {
            "settings": [*run_settings(longer, str(model), root), "evaluator.freq_steps=1000"],
            "source": str(source),
            "num_minibatches": workload.num_minibatches,
            "rows": workload_rows(workload, workload.num_prompts * longer.steps),
        }
        # The package is another commit's, but this file is ours: it is imported under its own name.
        scripts = folder / "scripts"
        scripts.mkdir(exist_ok=True)
        (scripts / "bench_side.py").write_text(Path(str(side.__file__)).read_text())
        # Threads that wait by spinning would count as CPU seconds, so one thread unless the user asks for more.
        self._env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": f"{source}{os.pathsep}{scripts}"}

    def __enter__(self) -> _Side:
        command = [sys.executable, "-c", "import bench_side; bench_side.main()"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._write(json.dumps(self._job))
        return self

    def __exit__(self, *_: object) -> None:
        stop_group(self._process, 0.0)

    def go_on(self) -> None:
        self._write("")

    def step_times(self) -> dict[str, float]:
        """Wait for the end of the step."""
        out = _pipe(self._process.stdout)
        # wait: none, gspo bench after _STEP_S: select comes first
        line = out.readline() if select.select([out], [], [], _STEP_S)[0] else b""
        if not line:
            raise GspoError(f"bench: {self._what} ended or took more than {_STEP_S:g} s:\n{last_lines(self._log, 8)}")
        return json.loads(line)

    def _write(self, line: str) -> None:
        pipe = _pipe(self._process.stdin)
        pipe.write(f"{line}\n".encode())
        pipe.flush()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _text(ratio: Sequence[float]) -> str:
    return "{:.3f} ({:.3f} … {:.3f})".format(*ratio)

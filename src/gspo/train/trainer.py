"""The front door: `Trainer(config, reward=…, dataset=…, env=…).train()` is the Python interface.

If no launcher started the process, `Trainer.train()` replaces it by `python -m gspo.launcher`, which runs the script's
command line again, once per rank, with GSPO_LAUNCHED set. The launcher is on a higher floor than training, so it is
called by its command line and not imported.
"""

from __future__ import annotations

import html
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.config import Loaded, algorithm_in, dump, is_supervised, layout_of, load
from gspo.errors import ConfigError, GspoError
from gspo.monitor import curve_svgs, in_notebook
from gspo.system import Launched, StopRequest, by_name, read_jsonl, visible_gpus, wait_without_spinning
from gspo.train.build.given import Given, code_files, find_environment, find_filter

if TYPE_CHECKING:
    from gspo.learner import World
    from gspo.rollout import Filter, Workflow
    from gspo.train.loop import Follower, Leader


def is_launched() -> bool:
    """Whether gspo's launcher or torchrun started this process. Then it is a rank and starts no further processes."""
    return bool(Launched.read().is_launched or os.environ.get("RANK"))


def relaunch(loaded: Loaded) -> None:
    """Return if this process should train; otherwise replace it by the launcher and never return."""
    config = loaded.config
    if is_launched():
        return
    elsewhere = config.scheduler.type in ("ray", "slurm")
    layout = layout_of(config, visible_gpus())
    if layout.is_one_process and not elsewhere:
        return
    # An interactive session has no command line that a launcher could run again.
    if hasattr(sys, "ps1") or in_notebook():
        if not elsewhere and config.rollout.backend == config.actor.backend == "auto":
            return  # auto, at a prompt: what can be done here
        raise ConfigError(
            f"{layout}, scheduler.type {config.scheduler.type}: that takes processes of their own, which an "
            "interactive session cannot start; put the lines into a script, or use `gspo train`"
        )
    run = Path(config.cluster.fileroot) / config.experiment_name / config.trial_name
    file = run.absolute() / "launch" / "config.yaml"
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The config object may have been changed in Python, so the launcher gets the resolved one as a file.
    file.write_text(dump(loaded), encoding="utf-8")
    again = [sys.executable, *sys.orig_argv[1:]]
    # execv discards buffered output.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "gspo.launcher", "--config", str(file), "--", *again])


REPORT_S = 600.0  # limit for writing a report

_SHOW = "import sys, pathlib; from gspo.cli.train import show_run; show_run(pathlib.Path(sys.argv[1]), sys.argv[2], {})"
SHOWN = {"reward": "reward/mean", "accuracy": "eval/accuracy", "held_out_reward": "eval/reward"}


@dataclass(frozen=True)
class Summary:
    """The result of a run. `finished` is False if a signal ended it; the same call resumes it."""

    path: Path
    steps: int
    seconds: float
    finished: bool
    rank: int = 0  # the rank of this process

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one per step: `pandas.DataFrame(summary.rows())`."""
        try:
            return read_jsonl(self.path / "metrics.jsonl")
        except OSError:
            return []

    @property
    def metrics(self) -> dict[str, float]:
        """First and last value of reward, held-out accuracy and held-out reward: `reward_start`, `reward_end`, …"""
        found: dict[str, float] = {}
        rows = self.rows()
        for name, metric in SHOWN.items():
            values = [row[metric] for row in rows if row.get(metric) is not None]
            if values:
                found |= {f"{name}_start": values[0], f"{name}_end": values[-1]}
        return found

    def report(self) -> Path:
        """Write report.html and training.png (needs matplotlib) and print the table, as `gspo train` does."""
        # In a process of its own: report is on a higher floor than training.
        said = "Finished." if self.finished else f"Stopped and saved after step {self.steps}. Train again to resume."
        # -P: a file of the user's folder (types.py, rich.py) does not replace a module.
        command = [sys.executable, "-P", "-c", _SHOW, str(self.path), said]
        try:
            # wait: 600 s, the caller
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=REPORT_S)
        except subprocess.TimeoutExpired:
            raise GspoError(f"the report of {self.path} was not written within {REPORT_S:g} s") from None
        if done.returncode:
            raise GspoError(f"the report could not be written: {done.stderr.strip()}")
        print(done.stdout, flush=True)
        return self.path / "report.html"

    def __str__(self) -> str:
        state = "finished" if self.finished else "stopped, can be resumed"
        metrics = self.metrics
        changes = []
        for name in (name for name in SHOWN if f"{name}_start" in metrics):
            # A value that was measured once, or did not change, is not a change.
            ends = dict.fromkeys(f"{metrics[f'{name}_{end}']:.3f}" for end in ("start", "end"))
            changes.append(f"{name.replace('_', ' ')} {' → '.join(ends)}")
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        return ", ".join([f"{self.path}: {steps} in {self.seconds:.0f} s, {state}", *changes])

    def _repr_html_(self) -> str:
        """The panel that Jupyter shows."""
        return f"<div>{html.escape(str(self))}<br>{curve_svgs(self.rows())}</div>"


OWN_OBJECTIVE = "gspo.train.build.own_objective"  # imported for a function of the user only


class Trainer:
    """Trains one policy by one config.

    config      a YAML path or a dict of keys (with `overrides`), or what `gspo.config.loading` returned
    reward      a function, a name, or a list of them; None: the config's, else the task's own
    dataset     rows (mappings with a prompt and what the reward needs), a pandas DataFrame, a data set of Hugging Face
                or a `gspo.data.dataset.Dataset`; None: train_dataset
    valid       the same for held-out problems; None: valid_dataset, else the held-out split of the training data
    env         an environment, `async (client, data)` (docs/episodes.md); None: env.path, else one completion
    workflow    how requests become samples (`rollout.workflow.Workflow`); None: by env, or one completion per prompt
    dynamic_filter_fn  which groups to train on (`rollout.workflow.Filter`); None: rollout.dynamic_filter_fn
    objective   a loss of your own in place of `algorithm` (docs/algorithms.md#your-own-objective)
    """

    leader: type[Leader] | None = None  # a subclass of `train.loop.Leader` that replaces acts of the loop

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | Loaded,
        *,
        reward: Any = None,
        dataset: Any = None,
        valid: Any = None,
        env: Any = None,
        workflow: Workflow | None = None,
        dynamic_filter_fn: Filter | None = None,
        objective: Callable[..., Any] | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        if objective is not None:
            config = by_name(f"{OWN_OBJECTIVE}:load_with")(config, overrides, objective)
        self.loaded = config if isinstance(config, Loaded) else load(config, overrides)
        self.config = self.loaded.config
        # Everything that can fail because of the config or the arguments fails here, before any process starts.
        environment = find_environment(self.config, env)
        if workflow is not None and not callable(workflow):
            raise ConfigError(f"workflow must be a function (requests, sampler), got {workflow!r:.80}")
        if environment is not None and workflow is not None:
            raise ConfigError("an environment (env=…, env.path) and a workflow are given; only one can make samples")
        if is_supervised(self.config) and (workflow or environment or dynamic_filter_fn) is not None:
            raise ConfigError(
                "algorithm sft trains on the completions of the data set: remove env, workflow and dynamic_filter_fn, "
                "which are about samples"
            )
        self.given = Given(
            self.loaded,
            by_name("gspo.lint:check")(self.loaded),
            reward,
            dataset,
            valid,
            environment,
            workflow,
            find_filter(self.config, dynamic_filter_fn),
            code_files(self.config, reward, env, dynamic_filter_fn, objective),
            self._find_objective(objective),
        )
        self.stop = StopRequest()

    def _find_objective(self, given: Callable[..., Any] | None) -> Any:
        """The function of the user in place of a preset, called once on small tensors; None: a preset."""
        if not algorithm_in(self.config).of_user:
            return None
        wait_without_spinning()  # torch is imported now
        return by_name(f"{OWN_OBJECTIVE}:find_objective")(self.loaded, given)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.config.run_path

    def __repr__(self) -> str:
        config = self.config
        sources = [source.path for source in config.train_dataset.mixture] or [config.train_dataset.path]
        data = "+".join(sources) if self.given.dataset is None else "the caller's rows"
        return f"Trainer({config.algorithm}, {config.actor.path}, {data}, run {self.path})"

    def train(self, *, report: bool = True) -> Summary:
        """Run to the end, or to a signal; the same call resumes from the last checkpoint.

        report      write report.html and training.png at the end and print the table, as `gspo train` does
        """
        # If the config needs several processes, this call replaces the current process by the launcher and does not
        # return.
        relaunch(self.loaded)
        wait_without_spinning()  # before torch is imported
        from gspo.learner import joined
        from gspo.train.build.learner import num_ranks

        with joined(num_ranks(self.config), self.config.stall_timeout, self.stop) as world:
            with self.open(world) as loop:
                summary = loop.run()
            # After rank 0 has closed its parts. The other ranks wait for this command and return the same summary.
            end = {"steps": summary.steps, "seconds": summary.seconds, "finished": summary.finished}
            world.broadcast_command("end", end)
        if report and summary.rank == 0:
            try:
                summary.report()
            except GspoError as error:  # the run itself is complete
                print(f"gspo: {error}", file=sys.stderr, flush=True)
        return summary

    @contextmanager
    def open(self, world: World | None = None) -> Iterator[Leader | Follower]:
        """The loop of this rank with all its parts open, before its first step."""
        from gspo.learner import ALONE
        from gspo.train.loop import Follower, Leader
        from gspo.train.opening import LeaderParts, open_parts

        with open_parts(self.given, world or ALONE, self.stop) as parts:
            yield (self.leader or Leader)(parts) if isinstance(parts, LeaderParts) else Follower(parts)


def run(loaded: Loaded) -> Summary:
    """`gspo train`."""
    return Trainer(loaded).train(report=False)  # the command reports in its own process

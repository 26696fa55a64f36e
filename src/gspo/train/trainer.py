"""The front door: `Trainer(config, reward=…, dataset=…, env=…).train()` is the Python interface."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.config import Loaded, algorithm_in, is_supervised, load
from gspo.errors import ConfigError, GspoError
from gspo.system.imports import by_name
from gspo.system.program import StopRequest, wait_without_spinning
from gspo.train.build.given import Given, code_files, find_environment, find_filter
from gspo.train.relaunch import relaunch
from gspo.train.summary import Summary

if TYPE_CHECKING:
    from gspo.learner.ranks.world import World
    from gspo.rollout.workflow import Filter, Workflow
    from gspo.train.loop import Follower, Leader

OWN_OBJECTIVE = "gspo.train.build.own_objective"  # imported for a function of the user only


class Trainer:
    """Trains one policy by one config.

    config      a YAML path or a dict of keys (with `overrides`), or what `gspo.config.load` returned
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
        from gspo.train.build.compute import join_ranks

        with join_ranks(self.config, self.stop) as world:
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
        from gspo.learner.ranks.world import ALONE
        from gspo.train.loop import Follower, Leader
        from gspo.train.open import open_parts
        from gspo.train.parts import LeaderParts

        with open_parts(self.given, world or ALONE, self.stop) as parts:
            yield (self.leader or Leader)(parts) if isinstance(parts, LeaderParts) else Follower(parts)


def run(loaded: Loaded) -> Summary:
    """`gspo train`."""
    return Trainer(loaded).train(report=False)  # the command reports in its own process

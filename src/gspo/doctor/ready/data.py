"""Data sets, rewards and environments: read and imported as a run would."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from gspo.config import Loaded, algorithm_in
from gspo.config.schema import Config, held_out
from gspo.config.schema.dataset import ENVIRONMENT_ROWS
from gspo.data.sources import is_on_hub
from gspo.doctor.ready.check import ReadyCheck
from gspo.doctor.shapes import ModelFields, find_source
from gspo.errors import ConfigError, GspoError
from gspo.models.locate import find_here, hub_problem
from gspo.rewards.functions.builtin import BUILTIN, PRELOAD, SCORERS
from gspo.rewards.functions.judge import Judge
from gspo.rewards.functions.reward_model import check_classifier
from gspo.rewards.pool import RewardPool
from gspo.system.imports import by_name, install_command

ROWS = 1000  # prompts that are rendered to find the longest one


def look_at_objective(loaded: Loaded) -> str:
    """A function of the user in place of a preset, called on small tensors as before a run."""
    if not algorithm_in(loaded.config).of_user:
        return ""
    by_name("gspo.train.build.own_objective:find_objective")(loaded)
    return f"{loaded.config.algorithm} was called on small tensors; its loss and its gradient are finite"


def look_at_rewards(config: Config) -> str:
    """Libraries, keys of judges, reward models, and the user's functions, which a worker imports."""
    from gspo.train.build.rewards import reward_specs

    parts = [part for spec in reward_specs(config).values() for part in spec]
    for part in parts:
        module, package, extra = PRELOAD.get(part.name, ("", "", ""))
        if module and importlib.util.find_spec(module.partition(".")[0]) is None:
            raise ConfigError(f"the reward {part.name!r} needs {package}: {install_command(extra)}")
        if part.name == "reward_model":
            _look_at_classifier(part.kwargs["path"])
        elif part.is_scorer:
            with closing(by_name(SCORERS[part.name])(**part.kwargs, key="reward")) as scorer:
                if isinstance(scorer, Judge):
                    scorer.check_reachable()
    own = {part.name: part for part in parts if part.name not in BUILTIN and not part.is_scorer}
    if own:
        with RewardPool(tuple(own.values()), workers=1, log_path=os.devnull) as pool:
            pool.wait_ready()
    return ", ".join(dict.fromkeys(part.label for part in parts))


def _look_at_classifier(path: str) -> None:
    import torch

    if find_here(str(Path(path).expanduser()), "reward: reward_model.path") is not None:
        check_classifier(path, torch.float32, "reward")


def look_at_environment(config: Config) -> str:
    """The environment or agent; its code is imported."""
    from gspo.train.build.given import find_environment

    env = config.env
    return "" if find_environment(config, None) is None else str(env.path or env.agent)


def check_data(config: Config, tokenizer: Any) -> Iterator[ReadyCheck]:
    """Rows, columns, the held-out part, and the longest prompt if the tokenizer is here."""
    from gspo.train.build.data import make_data, refuse_images, refuse_long_prompts
    from gspo.train.build.given import find_environment
    from gspo.train.build.policy import alphabet_warning, limit_context, make_reader
    from gspo.train.build.rewards import default_rewards, scores_answers
    from gspo.train.build.sampler import evaluation_params

    elsewhere = list(_hub_data(config))
    yield from elsewhere
    if elsewhere:
        return
    try:
        readable = config if tokenizer is not None else _without_rendering(config)
        environment = find_environment(config, None)
        reader = None if tokenizer is None else make_reader(config, tokenizer)
        data, valid = make_data(readable, None, None, reader, environment)
        both = [part for part in (data, valid) if part is not None]
        if tokenizer is not None:
            refuse_images(config, both, has_environment=environment is not None, policy=None)
        if environment is None and scores_answers(config, None, both):
            default_rewards(config, None, both)
        sizes = "; ".join(line for part in (data, valid) if part is not None for line in part.describe().splitlines())
        if tokenizer is None:
            yield ReadyCheck("data", "ok", sizes)
            yield ReadyCheck("prompt lengths", "unknown", "the tokenizer is not on this machine")
            return
        source = find_source(config.actor.path)
        limit = limit_context(config, source.context if isinstance(source, ModelFields) else None)
        refuse_long_prompts(data, limit, config.gconfig.max_new_tokens, most=ROWS)
        longest = max(len(data.prompt(row).tokens) for row in range(min(len(data), ROWS)))
        if valid is not None:
            refuse_long_prompts(valid, limit, evaluation_params(config)[0].max_new_tokens, "eval_gconfig", most=ROWS)
        few = "" if len(data) <= ROWS else f" among the first {ROWS:,}"
        unreadable = "".join(f"; {line}" for line in alphabet_warning(config, data.prompt(0).text))
        yield ReadyCheck("data", "ok", f"{sizes}; longest prompt{few}: {longest:,} tokens{unreadable}")
    except GspoError as error:
        yield ReadyCheck("data", "failed", str(error))


def _hub_data(config: Config) -> Iterator[ReadyCheck]:
    """Data sets that are not on this machine, and those that are nowhere."""
    valid = None if config.valid_dataset is None else held_out(config)
    for section, spec in (("train_dataset", config.train_dataset), ("valid_dataset", valid)):
        key = f"{section}.path"
        for path in dict.fromkeys([s.path for s in spec.mixture] or [spec.path]) if spec is not None else ():
            if path == ENVIRONMENT_ROWS:
                continue
            try:
                if not is_on_hub(path, section):
                    continue
            except GspoError as error:
                yield ReadyCheck(key, "failed", str(error))
                continue
            if importlib.util.find_spec("datasets") is None:
                yield ReadyCheck(
                    key,
                    "failed",
                    f"{key}: {path} is not on this machine; the hub needs a package: {install_command('tasks')}",
                )
            elif problem := hub_problem(path.partition(":")[0], "dataset"):
                remedy = f"set {key} to a file or folder, or GSPO_DATA to its parent folder"
                yield ReadyCheck(
                    key,
                    "failed",
                    f"{key}: {path} was not found: there is no such file or folder, and the hub did not provide it "
                    f"({problem}); {remedy}",
                )
            else:
                yield ReadyCheck(key, "unknown", f"{path} is on the hub; its rows and columns were not read")


def _without_rendering(config: Config) -> Config:
    """The config whose data sets need no tokenizer."""
    plain = {"max_length": None, "chat_template": "none"}

    def stripped(spec: Any, **own: Any) -> Any:
        return spec and spec.model_copy(
            update={**own, "mixture": [source.model_copy(update=plain) for source in spec.mixture]}
        )

    sections = {
        "train_dataset": stripped(config.train_dataset, **plain),
        "valid_dataset": stripped(config.valid_dataset),
    }
    return config.model_copy(update=sections)

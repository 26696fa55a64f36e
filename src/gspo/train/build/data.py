"""Training and held-out problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gspo.config.layout import layout_of
from gspo.config.objective import algorithm_in, is_supervised
from gspo.config.schema import Config, DatasetSpec, MixtureSource, held_out
from gspo.config.schema.dataset import ENVIRONMENT_ROWS
from gspo.data.columns import owner_of
from gspo.data.curriculum import Curriculum
from gspo.data.dataset import Dataset, DataSettings, load_dataset, make_dataset
from gspo.data.mixture import DATA_TYPES, Data, Mixture, make_mixture
from gspo.data.split import divide
from gspo.errors import ConfigError, DataError
from gspo.learner.policy.module import PolicyModule
from gspo.rollout.producer import RolloutProducer
from gspo.rollout.workflow import RejectReason, Workflow
from gspo.system.clock import Every
from gspo.system.gpus import visible_gpus
from gspo.train.build.run import make_every
from gspo.train.build.sampler import evaluation_params
from gspo.train.evaluate import Evaluator, given_groups, is_correct
from gspo.types import Group, Prompt

_FIRST_ROWS = 8  # that are rendered to see whether a data set has images


def make_data(
    config: Config, given: Any, given_valid: Any, tokenizer: Any, environment: Any = None
) -> tuple[Data, Data | None]:
    """Training and held-out problems: the caller's data sets or rows, else those the config names.

    Held-out problems are None if evaluation is switched off. Without explicit held-out problems, the held-out part of
    the training data is used: its test split, or 5 % of the caller's rows.
    """
    is_off = config.evaluator.freq_steps == 0
    data = _one(config, given, config.train_dataset, "train", tokenizer, "train_dataset", environment)
    if given_valid is None and config.valid_dataset is None and given is not None:
        # Also without evaluation: which rows are trained on must not depend on evaluator, which a resume may change.
        data, valid = _divide(data)
        return data, None if is_off else valid
    if is_off:
        return data, None
    return data, _one(config, given_valid, held_out(config), "test", tokenizer, "valid_dataset", environment)


def open_data(
    config: Config, given: Any, given_valid: Any, tokenizer: Any, max_context: int, environment: Any = None
) -> tuple[Data, Data | None]:
    """`make_data`, after a check that every prompt leaves room for its completion, or every row fits."""
    data, valid = make_data(config, given, given_valid, tokenizer, environment)
    refuse_long_prompts(data, max_context, config.gconfig.max_new_tokens)
    if valid is not None:
        refuse_long_prompts(valid, max_context, evaluation_params(config)[0].max_new_tokens, "eval_gconfig")
    return data, valid


def make_curriculum(config: Config, data: Data, begin: Mapping[str, Any] | None) -> Curriculum | None:
    """How rows are drawn by their pass rates (train_dataset.shuffle: pass_rate); None: in the order of epochs."""
    if config.train_dataset.shuffle != "pass_rate":
        return None
    return Curriculum(config.seed, len(data), partial(data.candidates, config.seed), begin)


def record_visit(curriculum: Curriculum | None, reason: RejectReason | None) -> RejectReason | None:
    """`reason`, after the curriculum has recorded the result of the group."""
    if curriculum is None:
        return reason

    def decide(group: Group) -> str | None:
        curriculum.record(group.submission, map(is_correct, group.outcomes))
        why = None if reason is None else reason(group)
        if why is not None:
            curriculum.close([group.submission])
        return why

    return decide


def prompt_stream(config: Config, data: Data, curriculum: Curriculum | None = None) -> Callable[[int], Prompt]:
    """The prompt of a submission index: epoch after epoch, each in its own order, or as a curriculum draws it."""
    if curriculum is not None:
        return lambda submission: data.prompt(curriculum.row(submission))
    seed, shuffle = config.seed, bool(config.train_dataset.shuffle)
    return lambda submission: data.prompt(data.row_of(seed, submission, shuffle=shuffle))


def make_evaluator(
    config: Config,
    valid: Data | None,
    producer: RolloutProducer,
    decode: Callable[[Sequence[int]], str],
    workflow: Workflow,
    *,
    total_steps: int,
    steps_per_epoch: int,
    samples: bool,
) -> Evaluator | None:
    """Evaluation during training, by the sampler and the rewards of training; None: it is switched off.

    samples: whether held-out problems are answered and scored. In supervised fine-tuning the held-out loss is measured
    in any case.
    """
    if valid is None or not (samples or is_supervised(config)):
        return None
    params, num_samples = evaluation_params(config)
    return Evaluator(
        valid if samples else None,
        rows=given_groups(valid, config.evaluator.size, decode) if is_supervised(config) else (),
        at_start=config.evaluator.at_start,
        every=_evaluation_steps(config, total_steps, steps_per_epoch),
        best=_best_metric(config.evaluator.best, valid),
        max_failure_fraction=config.reward.max_failure_fraction,
        num_problems=config.evaluator.size,
        num_samples=num_samples,
        params=params,
        sampler=producer.sampler,
        rewards=producer.rewards,
        decode=decode,
        workflow=workflow,
    )


def _evaluation_steps(config: Config, total_steps: int, steps_per_epoch: int) -> Every:
    keys = config.evaluator
    if keys.freq_steps is None:
        # A curve of about ten points. Not more often than every 10 steps, so that evaluation stays a small part of the
        # time: by default it samples 512 completions, and a step 256.
        return Every(steps=max(total_steps // 10, 10))
    return make_every(keys, steps_per_epoch)


def _best_metric(metric: str | None, valid: Data) -> str | None:
    """The metric that evaluator.best names; ConfigError for a source that is not in the held-out data."""
    source = (metric or "").removeprefix("eval/").rpartition("/")[0]
    names = valid.names if isinstance(valid, Mixture) else ()
    if source and source not in names:
        known = f"its sources are {', '.join(names)}" if names else "the held-out data are not a mixture"
        raise ConfigError(f"evaluator.best is {metric}, but there is no source {source!r}: {known}; set eval/reward")
    return metric


def _one(
    config: Config, given: Any, spec: DatasetSpec, split: str, tokenizer: Any, key: str, environment: Any = None
) -> Data:
    if isinstance(given, DATA_TYPES):
        if is_supervised(config) and not given.supervised:
            raise ConfigError(f"algorithm sft needs completions: give {key} rows, or make_dataset(…, supervised=True)")
        return replace(given, key=key)  # messages name the section that it stands for
    if given is not None:
        # Rows of the caller: mappings, or a table of pandas or polars.
        if hasattr(given, "columns") and hasattr(given, "to_dict"):
            given = given.to_dict("records") if not hasattr(given, "to_dicts") else given.to_dicts()
        how = _settings(config, spec, spec)
        return make_dataset(given, how, tokenizer=tokenizer, source="the caller's rows", split=split, key=key)
    return load_data(config, spec, split, tokenizer, key, environment)


def _divide(data: Data) -> tuple[Data, Data]:
    if not isinstance(data, Dataset):
        raise ConfigError("a mixture given as dataset= has no held-out part of its own; give valid=… too")
    held, note = divide([data.text(row) for row in range(len(data))])
    valid = replace(data, split="test", key="valid_dataset", note=note)
    if held is None:
        return data, valid
    sides = [[row for row, out in zip(data.rows, held, strict=True) if out == side] for side in (False, True)]
    train = replace(data, rows=sides[0], _prompts={}, note=f"{len(sides[1]):,} of {len(data):,} rows are held out")
    return train, replace(valid, rows=sides[1], _prompts={})


def refuse_long_prompts(
    data: Data, limit: int, max_new_tokens: int, section: str = "gconfig", *, most: int | None = None
) -> None:
    """DataError if one of the first `most` prompts (None: all) leaves no room for its completion.

    Rows of supervised fine-tuning have their completion; prompt and completion must fit together.
    """
    if data.supervised:
        return _refuse_long_rows(data, limit, most)
    room = limit - max_new_tokens
    if room < 1:
        raise DataError(
            f"{section}.max_new_tokens is {max_new_tokens}, but the context is {limit} tokens for prompt and "
            f"completion together; lower {section}.max_new_tokens"
        )
    for row in range(min(len(data), len(data) if most is None else most)):
        if length := data.excess(row, room):
            raise DataError(
                f"{data.key}, row {row}: the prompt has {length}; with {section}.max_new_tokens = "
                f"{max_new_tokens} the context of {limit} leaves {room}. Lower {section}.max_new_tokens, "
                f"or set {owner_of(data.key)}.max_length={room} to drop such rows"
            )


def _refuse_long_rows(data: Data, limit: int, most: int | None) -> None:
    for row in range(min(len(data), len(data) if most is None else most)):
        if length := data.excess(row, limit):
            raise DataError(
                f"{data.key}, row {row}: prompt and completion have {length} together, and the context is {limit}. "
                f"Set {owner_of(data.key)}.max_length={limit} to drop such rows"
            )


def shows_images(data: Data | None) -> bool:
    """Whether one of the first prompts shows an image."""
    return data is not None and any(data.prompt(row).images is not None for row in range(min(len(data), _FIRST_ROWS)))


def refuse_images(
    config: Config, parts: Sequence[Data | None], *, has_environment: bool, policy: PolicyModule | None
) -> None:
    """ConfigError or DataError if prompts show images that a part of the run cannot take.

    `policy` is None where no model is loaded (`gspo doctor`).
    """
    shown = next((part for part in parts if part is not None and shows_images(part)), None)
    if shown is None:
        return
    layout, what = layout_of(config, visible_gpus()), f"{shown.key} shows images"
    if layout.ranks > 1:
        raise ConfigError(f"{what}, and several trainer ranks take text alone; set actor.backend: fsdp:d1")
    if layout.num_samplers:
        raise ConfigError(f"{what}, and sampler servers take text alone; set rollout.backend: local")
    if config.critic is not None and algorithm_in(config).advantage == "gae":
        raise ConfigError(
            f"{what}, and a critic takes text alone; set algorithm: gspo, or another one without a critic"
        )
    if config.teacher is not None and config.teacher.is_server:
        raise ConfigError(f"{what}, and a teacher on a server takes text alone; set teacher.path to a model")
    if has_environment:
        raise ConfigError(f"{what}, and episodes take text alone; remove env, or the images")
    if policy is not None and policy.vision is None:
        reason = policy.images_refused or (
            "transformers cannot run its vision tower apart from its text part"
            if hasattr(policy.model.base_model, "get_image_features") or hasattr(policy.model.config, "vision_config")
            else "it has no vision tower"
        )
        raise DataError(f"{what}, and {type(policy.model).__name__} takes text alone: {reason}; set another actor.path")


def load_data(config: Config, spec: DatasetSpec, split: str, tokenizer: Any, key: str, environment: Any = None) -> Data:
    """The data set of a config section, or its mixture; a source inherits the shared keys that it does not set."""
    if not spec.mixture:
        return _load_source(config, spec, spec, split, tokenizer, key, environment)
    sources = [
        _load_source(config, source, spec, split, tokenizer, f"{key}.mixture[{number}]", environment)
        for number, source in enumerate(spec.mixture)
    ]
    return make_mixture(sources, [s.weight for s in spec.mixture], [s.name for s in spec.mixture], key)


def _load_source(
    config: Config,
    source: DatasetSpec | MixtureSource,
    shared: DatasetSpec,
    split: str,
    tokenizer: Any,
    key: str,
    environment: Any,
) -> Dataset:
    settings, split = _settings(config, source, shared), source.split or shared.split or split
    if source.path == ENVIRONMENT_ROWS:
        rows = _rows_of_environment(environment, split, source.size, key)
        return make_dataset(rows, settings, tokenizer=tokenizer, source="the environment", split=split, key=key)
    if "path" not in source.model_fields_set and callable(getattr(environment, "rows", None)):
        raise ConfigError(
            f"the environment has a method rows, and {key}.path is not set: set {key}.path: env to use its rows, or "
            f"{key}.path: {source.path} if these are the problems"
        )
    return load_dataset(source.path, split, settings, tokenizer=tokenizer, key=key)


def _settings(config: Config, source: DatasetSpec | MixtureSource, shared: DatasetSpec) -> DataSettings:
    return DataSettings(
        max_length=source.max_length or shared.max_length,
        size=source.size,
        seed=config.seed,
        system_prompt=shared.system_prompt if source.system_prompt is None else source.system_prompt,
        columns={name: str(column) for name, column in source.columns.items() if column is not None},
        chat_template=shared.chat_template if source.chat_template is None else source.chat_template,
        template_kwargs=source.chat_template_kwargs or shared.chat_template_kwargs,
        options=source.options,
        supervised=is_supervised(config),
    )


def _rows_of_environment(environment: Any, split: str, size: int | None, key: str) -> list[dict[str, Any]]:
    rows: Any = getattr(environment, "rows", None)
    if not callable(rows):
        raise ConfigError(
            f"{key}.path is env, but the environment has no rows of its own: name a data set in {key}.path, or give "
            "the environment a method rows(split, size)"
        )
    found: Any = rows(split, size)
    return [dict(row) for row in found]

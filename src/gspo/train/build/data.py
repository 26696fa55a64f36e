"""Training and held-out problems, their rewards by source, and how prompts are answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gspo.config import (
    ENVIRONMENT_ROWS,
    Config,
    DatasetSpec,
    MixtureSource,
    algorithm_in,
    held_out,
    is_supervised,
    layout_of,
)
from gspo.data import (
    DATA_TYPES,
    Curriculum,
    Data,
    Dataset,
    DataSettings,
    Mixture,
    default_reward,
    distinct_names,
    divide,
    load_dataset,
    make_dataset,
    make_mixture,
    owner_of,
)
from gspo.errors import ConfigError, DataError, TrainingError
from gspo.learner import Learner, PolicyModule
from gspo.rewards import (
    NEEDS_ANSWER,
    GivenRewards,
    NoRewards,
    RewardPool,
    RewardRouter,
    Rewards,
    RewardSpec,
    reward_spec,
)
from gspo.rollout import RejectReason, RolloutProducer, Workflow
from gspo.system import Every, Launched, by_name, visible_gpus
from gspo.train.build.given import Given
from gspo.train.build.rollout import evaluation_params, make_single_turn, make_workflow
from gspo.train.build.run import make_every
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


ANY_SOURCE = ""
CHECKED_ROWS = 4  # rows of reward.check before training
PROCEDURAL = ("embedded:", "reasoning_gym:")  # tasks with a reward of their own


def make_rewards(config: Config, given: Any, log_path: str | None) -> Rewards:
    """The reward functions of the caller, of the config, or of the task; for a mixture, one set per source.

    A worker has imported the user's functions when this returns: a missing one is found before a model is loaded.
    """
    reward = config.reward
    settings = {"workers": reward.workers, "timeout_s": reward.timeout, "log_path": log_path}
    specs = reward_specs(config, given)
    # One data set for training and one for evaluation need one pool of workers.
    one = specs.get(ANY_SOURCE)
    rewards = RewardRouter(specs, **settings) if one is None else RewardPool(one, key="reward", **settings)
    try:
        rewards.check_functions()
    except BaseException:
        rewards.close()
        raise
    return rewards


def reward_specs(config: Config, given: Any = None) -> dict[str, RewardSpec]:
    """The rewards by name of their source; ANY_SOURCE is the only name if there is no mixture."""
    reward, train, common = config.reward, config.train_dataset, _common(config, given)

    def ready(spec: RewardSpec) -> RewardSpec:
        if not any(part.name == "code" for part in spec):
            return spec
        prepare = by_name("gspo.rewards.functions.code:prepare")
        return prepare(spec, allow_unsandboxed=reward.allow_unsandboxed_code, timeout_s=reward.timeout)

    if not (train.mixture or held_out(config).mixture):
        return _refuse_gates({ANY_SOURCE: ready(common or reward_spec(default_reward(train.path)))}, reward.normalize)
    # Rewards are selected by the source's name, so a name must mean one reward in both mixtures.
    specs, others = _rewards_by_source(train, "train_dataset"), _rewards_by_source(held_out(config), "valid_dataset")
    if common is None and (twice := [name for name in specs if others.get(name, specs[name]) != specs[name]]):
        raise ConfigError(
            f"valid_dataset.mixture and train_dataset.mixture give {twice[0]} different rewards; name one of them "
            "otherwise"
        )
    specs |= others
    return _refuse_gates({name: ready(common or spec) for name, spec in specs.items()}, reward.normalize)


def _refuse_gates(specs: dict[str, RewardSpec], normalize: str) -> dict[str, RewardSpec]:
    """The specs; ConfigError for a gate if each reward is normalised apart, because a gate is no term of the sum."""
    gate = next((part.label for spec in specs.values() for part in spec if part.gate), None)
    if gate is not None and normalize == "each":
        raise ConfigError(
            f"reward.normalize: each normalises every reward of the sum apart, but {gate} is a gate, which multiplies "
            f"the sum; set reward.normalize: sum, or give {gate} a weight instead of gate: true"
        )
    return specs


def scores_answers(config: Config, given: Any, data: Sequence[Data]) -> bool:
    """Whether answers are scored. Fine-tuning and distillation do so only if a reward is configured."""
    needs_rewards = algorithm_in(config).advantage not in ("one", "teacher")
    if needs_rewards or _common(config, given) is not None:
        return True
    # Procedural tasks have a reward of their own; a mixture may name one per source.
    chosen = _chosen(config)
    return all(name in chosen or source.source.startswith(PROCEDURAL) for one in data for name, source in _sources(one))


def reward_problems(given: Given, answering: Answering, data: Data, tokenizer: Any) -> list[str]:
    """reward.check: what is wrong with the reward, by known answers to a few rows; TrainingError with `stop`.

    Judges and reward models are not asked: their calls are expensive, and `gspo doctor --reward` asks them.
    """
    config = given.loaded.config
    specs = reward_specs(config, given.reward)
    names = {part.name for spec in specs.values() for part in spec}
    if not answering.checks_reward or config.reward.check == "off" or names & {"judge", "reward_model", "code"}:
        return []
    prompts = [data.prompt(row) for row in range(min(CHECKED_ROWS, len(data)))]
    encode = partial(tokenizer.encode, add_special_tokens=False)
    from gspo.rewards import check_reward, diagnose

    lines = check_reward(prompts, answering.rewards, markers=answer_markers(specs), encode=encode, until_failure=True)
    found = diagnose(lines, config.reward.timeout)
    fatal = [problem.text for problem in found if problem.is_fatal]
    if fatal and config.reward.check == "stop":
        raise TrainingError(f"stopped by reward.check: stop: {fatal[0]}; `gspo doctor --reward` shows the scores")
    return [f"warning: {text}; `gspo doctor --reward` shows more" for text in fatal]


def answer_markers(specs: Mapping[str, RewardSpec]) -> list[str]:
    """What the rewards expect before an answer: the settings `marker`, and their default."""
    given = [part.kwargs["marker"] for spec in specs.values() for part in spec if "marker" in part.kwargs]
    return list(dict.fromkeys([*map(str, given), ">"]))


def default_rewards(config: Config, given: Any, data: Sequence[Data]) -> list[str]:
    """Names the rewards that are used because none is configured; ConfigError if one needs answers that are missing."""
    common, said, train, valid = _common(config, given), list[str](), config.train_dataset, held_out(config)
    own = {**_rewards_by_source(train, "train_dataset"), **_rewards_by_source(valid, "valid_dataset")}
    chosen = _chosen(config)
    for name, source in (pair for one in data for pair in _sources(one)):
        # A data set of the caller has no name in the config; its rewards are those of train_dataset.
        spec = common or own.get(name) or reward_spec(default_reward(config.train_dataset.path))
        is_default = common is None and name not in chosen
        comparing = next((part.name for part in spec if part.name in NEEDS_ANSWER), None)
        if comparing is not None and not source.has_references:
            why = "no reward is configured" if is_default else f"the reward `{comparing}` needs the right answer"
            raise ConfigError(
                f"{why}, and the rows of {source.source} have no answer column (its columns are "
                f"{', '.join(source.columns)}). Set reward.functions to a function that needs no answer, for example "
                f"[my_module:my_function], or {source.key}.columns.answer to the column with the answer"
            )
        if is_default and not source.source.startswith(PROCEDURAL):
            said.append(f"no reward is configured; using `{spec[0].name}` for {source.source} (reward.functions)")
    return list(dict.fromkeys(said))


def _common(config: Config, given: Any) -> RewardSpec | None:
    """The reward of all data: the caller's functions, else reward.functions; None: each data set has its default."""
    if given is not None:
        return reward_spec(given)
    reward = config.reward
    return reward_spec(reward.functions, weights=reward.weights, key="reward.functions") if reward.functions else None


def _chosen(config: Config) -> set[str]:
    """The sources of mixtures that name their reward."""
    specs = (config.train_dataset, held_out(config))
    return {name for spec in specs for name, source in _named(spec).items() if source.reward}


def _sources(data: Data) -> list[tuple[str, Dataset]]:
    if isinstance(data, Dataset):
        return [(data.source, data)]
    return list(zip(data.names, data.sources, strict=True))


def _rewards_by_source(spec: DatasetSpec, key: str) -> dict[str, RewardSpec]:
    if not spec.mixture:
        return {spec.path: reward_spec(default_reward(spec.path))}
    return {
        name: reward_spec(source.reward or default_reward(source.path), key=f"{key}.mixture[{number}].reward")
        for number, (name, source) in enumerate(_named(spec).items())
    }


def _named(spec: DatasetSpec) -> dict[str, MixtureSource]:
    names = distinct_names([source.path for source in spec.mixture], [source.name for source in spec.mixture])
    return dict(zip(names, spec.mixture, strict=True))


@dataclass(frozen=True)
class Answering:
    """How prompts are answered and scored, in training and in evaluations."""

    rewards: Rewards
    workflow: Workflow
    evaluation_workflow: Workflow
    scores: bool  # False: no reward (fine-tuning and distillation without reward.functions)
    checks_reward: bool  # whether reward.check can score known answers: the reward is a function of prompt and answer
    messages: list[str] = field(default_factory=list)  # about rewards that are used by default
    count_episodes: Callable[[], Mapping[str, float]] = dict[str, float]  # what the environment counted
    close: Callable[[], None] = lambda: None


def make_answering(
    given: Given, rewards: Rewards, learner: Learner, data: Data, valid: Data | None, max_context: int
) -> Answering:
    """An environment may give its own rewards; supervised fine-tuning needs none."""
    config, environment = given.loaded.config, given.environment
    both = [data, *([valid] if valid else [])]
    refuse_images(config, both, has_environment=environment is not None, policy=learner.policy)
    if environment is not None:
        episodes = make_episodes(config, environment, data, learner.tokenizer, max_context)
        return Answering(
            GivenRewards(rewards),
            episodes,
            episodes,
            scores=True,
            checks_reward=False,
            count_episodes=episodes.metrics,
            close=episodes.close,
        )
    scores = scores_answers(config, given.reward, both)
    messages = default_rewards(config, given.reward, both) if scores else []
    rewards = rewards if scores else NoRewards()
    workflow = given.workflow or make_workflow(config)
    if is_supervised(config):
        # Rows bring their own completion in training; evaluations sample.
        return Answering(GivenRewards(rewards), workflow, make_single_turn(config), scores, False, messages)
    return Answering(rewards, workflow, workflow, scores, checks_reward=scores, messages=messages)


def make_episodes(config: Config, environment: Any, data: Data, tokenizer: Any, max_context: int) -> Any:
    """The workflow that runs episodes; it renders messages with the chat template of the data set."""
    first = data if isinstance(data, Dataset) else data.sources[0]
    # A data set says True for the tokenizer's own template.
    chat = by_name("gspo.envs.chat:Chat")(tokenizer, None if first.chat is True else first.chat, first.template_kwargs)
    return by_name("gspo.envs.driver:Episodes")(
        environment,
        chat,
        max_context=max_context,
        max_turns=config.env.max_turns,
        timeout_s=config.env.timeout,
        rounds=not Launched.read().num_samplers,
        request_timeout_s=config.rollout.request_timeout,
        at_once=config.rollout.max_concurrent_rollouts or getattr(environment, "at_once", 256),
    )

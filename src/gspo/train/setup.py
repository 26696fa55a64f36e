"""From a resolved config to the parts of a trainer. Only here and in the loop are config keys read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gspo.config import Loaded, effective_objective
from gspo.config.schema import Config, DatasetSpec, Frequency, Generation, Norm
from gspo.errors import ConfigError, DataError
from gspo.models.loading import load_model, load_tokenizer
from gspo.rewards.pool import RewardPool
from gspo.rewards.spec import reward_spec
from gspo.rollout.local import LocalSampler
from gspo.tasks.dataset import Dataset, default_reward, load_dataset, make_dataset
from gspo.tasks.sources import in_held_out
from gspo.train.batch import Shaping
from gspo.train.optim import learning_rate, make_optimizer
from gspo.train.policy import PolicyModule
from gspo.train.step import Plan
from gspo.types import SamplingParams


def device_and_dtype(config: Config) -> tuple[torch.device, torch.dtype]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = config.actor.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return device, getattr(torch, name)


def set_threads(config: Config) -> int:
    """Thread count is part of a run's identity: sums over threads round differently."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(config.threads or cores or 1)
    return torch.get_num_threads()


def make_policy(config: Config, sequence_level: bool) -> tuple[PolicyModule, Any]:
    """The policy and its tokenizer, checked against a plain forward pass."""
    actor = config.actor
    device, dtype = device_and_dtype(config)
    tokenizer = load_tokenizer(config.tokenizer_path or actor.path)
    model = load_model(
        actor.path, dtype, device, from_scratch=actor.init_from_scratch, seed=config.seed, tokenizer=tokenizer
    )
    policy = PolicyModule(
        model,
        chunk_size=actor.logprobs_chunk_size,
        fp32_head=sequence_level if actor.fp32_lm_head is None else actor.fp32_lm_head,
        gradient_checkpointing=actor.gradient_checkpointing,
    )
    policy.probe()
    policy.share_prefix = policy.share_prefix and actor.share_prefix
    return policy, tokenizer


def make_sampler(config: Config, policy: PolicyModule, tokenizer: Any, version: int) -> LocalSampler:
    """The in-process sampler on the policy's own weights."""
    generation = getattr(policy.model, "generation_config", None)
    ends = {tokenizer.eos_token_id}
    configured = getattr(generation, "eos_token_id", None)
    ends.update(configured if isinstance(configured, list) else [configured])
    return LocalSampler(
        policy.model,
        seed=config.seed,
        eos_token_ids=sorted(e for e in ends if e is not None),
        decode=decoder(tokenizer),
        max_rows=config.rollout.max_concurrent_rollouts or 256,
        max_context=config.gconfig.max_tokens,
        version=version,
    )


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True)


def sampling_params(g: Generation) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=g.max_new_tokens,
        min_new_tokens=g.min_new_tokens,
        temperature=g.temperature,
        top_p=g.top_p,
        top_k=g.top_k,
        greedy=g.greedy,
        stop_token_ids=tuple(g.stop_token_ids),
        stop=tuple(g.stop),
        ignore_eos=g.ignore_eos,
    )


def make_data(config: Config, given: Any, given_valid: Any, tokenizer: Any) -> tuple[Dataset, Dataset]:
    """Training and held-out problems: the caller's data sets or rows, else those the config names.

    Where nobody names held-out problems they are the training data's held-out part, never its training part: its own
    test split, or a twentieth of the caller's rows. Both are the same object where few rows leave none to hold out.
    """
    data = _one(given, config.train_dataset, "train", tokenizer, config.seed, "train_dataset")
    if given_valid is None and config.valid_dataset is None and given is not None:
        return _divide(data)
    return data, _one(given_valid, held_out(config), "test", tokenizer, config.seed, "valid_dataset")


def held_out(config: Config) -> DatasetSpec:
    """Which held-out problems the config means: valid_dataset, or the whole test split of the training data."""
    return config.valid_dataset or replace(config.train_dataset, split="test", size=None)


def _one(given: Any, spec: DatasetSpec, split: str, tokenizer: Any, seed: int, key: str) -> Dataset:
    if isinstance(given, Dataset):
        return given
    if given is not None:
        return make_dataset(given, tokenizer=tokenizer, source="the caller's rows", split=split, key=key)
    return load_data(spec, split, tokenizer, seed, key)


def _divide(data: Dataset) -> tuple[Dataset, Dataset]:
    sides: tuple[list[Any], list[Any]] = [], []
    for index, row in enumerate(data.rows):
        sides[in_held_out(data.prompt(index).text, 0.05)].append(row)
    if not all(sides):
        return data, data
    train, valid = (replace(data, rows=rows, _prompts={}) for rows in sides)
    return train, replace(valid, split="test", key="valid_dataset")


def context_length(config: Config, policy: PolicyModule) -> int:
    """Longest prompt + completion: the model's context, or less where gconfig.max_tokens says so."""
    own = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None) or 2**31
    asked = config.gconfig.max_tokens
    if asked is not None and asked > own:
        raise ConfigError(f"gconfig.max_tokens is {asked}, but the context of {config.actor.path} is {own}; set {own}")
    return asked or own


def refuse_long_prompts(data: Dataset, limit: int, max_new_tokens: int, section: str = "gconfig") -> None:
    """A prompt that leaves no room for its completion is an error now, not in the middle of the night."""
    room = limit - max_new_tokens
    for row in range(len(data)):
        if (length := len(data.prompt(row).tokens)) > room:
            raise DataError(
                f"{data.key}, row {row}: the prompt has {length} tokens; with {section}.max_new_tokens = "
                f"{max_new_tokens} the context of {limit} leaves {max(room, 0)}. Set {section}.max_new_tokens lower, "
                f"or {data.key}.max_length={max(room, 1)} to drop such rows"
            )


def load_data(spec: DatasetSpec, split: str, tokenizer: Any, seed: int, key: str) -> Dataset:
    return load_dataset(
        spec.path,
        spec.split or split,
        tokenizer=tokenizer,
        max_length=spec.max_length,
        size=spec.size,
        seed=seed,
        system_prompt=spec.system_prompt,
        prompt_column=spec.prompt_column,
        answer_column=spec.answer_column,
        chat_template=None if spec.chat_template == "auto" else False,
        key=key,
    )


def make_rewards(config: Config, given: Any, log_path: str | None) -> RewardPool:
    """The reward functions of the caller, of the config, or of the task."""
    reward = config.reward
    if given is not None:
        spec = reward_spec(given)
    elif reward.functions:
        spec = reward_spec(reward.functions, weights=reward.weights, format_regex=reward.format_regex)
    else:
        spec = reward_spec(default_reward(config.train_dataset.path))
    return RewardPool(spec, workers=reward.workers, timeout_s=reward.timeout, log_path=log_path)


def make_plan(loaded: Loaded) -> tuple[Plan, str | Mapping[str, Any]]:
    """The update's plan, and how rewards become advantages."""
    config, objective = loaded.config, effective_objective(loaded)
    actor = config.actor
    plan = Plan(
        name=objective["name"],
        settings=objective["settings"],
        num_minibatches=actor.ppo_n_minibatches or 1,
        temperature=float(actor.temperature or config.gconfig.temperature or 1.0),
        max_tokens=actor.mb_spec.max_tokens_per_mb,
        min_micro_batches=actor.mb_spec.n_mbs or 1,
        max_norm=actor.optimizer.gradient_clipping,
        max_new_tokens=actor.max_new_tokens or config.gconfig.max_new_tokens,
    )
    if actor.reward_norm is not None:
        return plan, norm_settings(actor.reward_norm)
    return plan, objective["advantage"]


def norm_settings(norm: Norm) -> dict[str, Any]:
    return {
        "mean_level": norm.mean_level,
        "std_level": norm.std_level,
        "leave_one_out": norm.mean_leave1out,
        "unbiased": norm.std_unbiased,
        "eps": norm.eps,
    }


def make_shaping(config: Config) -> Shaping:
    actor, longest = config.actor, config.gconfig.max_new_tokens
    tail = (actor.overlong_tokens or max(longest // 5, 1)) if actor.overlong_reward_penalty else 0
    return Shaping(
        bias=actor.reward_bias,
        scaling=actor.reward_scaling,
        clip=actor.reward_clip,
        overlong_tokens=tail,
        overlong_factor=actor.overlong_penalty_factor,
        max_new_tokens=longest,
    )


def is_due(frequency: Frequency, step: int, steps_per_epoch: int, seconds_since: float) -> bool:
    """Whether something with this frequency happens after `step`."""
    return bool(
        (frequency.freq_steps and step % frequency.freq_steps == 0)
        or (frequency.freq_epochs and step % (frequency.freq_epochs * steps_per_epoch) == 0)
        or (frequency.freq_secs and seconds_since >= frequency.freq_secs)
    )


def make_trained_optimizer(config: Config, policy: PolicyModule) -> torch.optim.Optimizer:
    o = config.actor.optimizer
    return make_optimizer(
        policy.parameters(),
        kind=o.type,
        lr=float(o.lr or 0.0),
        weight_decay=o.weight_decay,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
    )


def learning_rates(config: Config, first: int, count: int, total: int) -> list[float]:
    """The rates of `count` updates from number `first` on."""
    o = config.actor.optimizer
    return [
        learning_rate(
            first + k,
            total,
            peak=float(o.lr or 0.0),
            schedule=o.lr_scheduler_type,
            warmup_proportion=o.warmup_steps_proportion,
            min_ratio=o.min_lr_ratio,
        )
        for k in range(count)
    ]


def evaluation_params(config: Config) -> tuple[SamplingParams, int]:
    """How held-out problems are answered, and how often each."""
    how = config.eval_gconfig
    if how is not None:
        return sampling_params(how), how.n_samples
    return replace(sampling_params(config.gconfig), greedy=True, temperature=1.0, top_p=1.0, top_k=0), 1

"""The rules of `lint`, one function per subject: contradictions are errors, suspicious settings are warnings.

Every finding names the key, what is wrong with it, and the remedy.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from gspo.algorithms import ALGORITHMS
from gspo.config import engine_flags as foreign_engines
from gspo.config.backends import TRAINERS, parse_backend
from gspo.config.layout import layout_of
from gspo.config.lint.facts import Facts, Finding
from gspo.config.schema import Norm
from gspo.errors import ConfigError
from gspo.system.text import number

WIDE_EPS = 0.05  # a geometric mean over more than FEW_TOKENS tokens practically never moves this far from 1
FEW_TOKENS = 8
FLOAT32_EPS = 1e-5  # float32 rounding alone moves log s by about 1e-6
SAMPLER_NOISE = 2e-3  # published sampler-trainer KL per token: 6e-4 dense, 1.5e-3 MoE
HIGH_LR = {"full": 1e-4, "lora": 1e-3}
GROUP_ADVANTAGES = frozenset({"group_std", "group_mean", "leave_one_out"})
ENVIRONMENTS = ("tools", "self_correct")  # of `envs/find.py`
FILE_ENDINGS = frozenset({".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt"})


# The ratio and its gate


def clip_range(f: Facts) -> Iterator[Finding]:
    actor, longest = f.actor, f.config.gconfig.max_new_tokens
    if actor.eps_clip == "auto" and f.objective["gate"] != "clip":
        name = f.objective["name"]
        yield f.error("actor.eps_clip", f"auto steers a clip range, and {name} does not clip", "remove actor.eps_clip")
    elif actor.eps_clip == "auto" and not f.sequence_level:
        yield f.error(
            "actor.eps_clip",
            "auto follows quantiles of the sequence ratio, and this objective has one ratio per token",
            "set actor.importance_sampling_level: sequence, or give actor.eps_clip a number such as 0.2",
        )
    if f.clips is None:
        return
    low, high = f.clips
    if low >= 1:
        yield f.error(
            "actor.eps_clip",
            f"{number(low)} puts the lower bound at 1 − ε = {1 - low:g}, which no ratio of probabilities can reach",
            "set actor.eps_clip below 1 (and actor.eps_clip_higher for the upper side)",
        )
    if not f.sequence_level:
        return
    wide = [(key, eps) for key, eps in (("actor.eps_clip", low), ("actor.eps_clip_higher", high)) if eps >= WIDE_EPS]
    if wide and longest > FEW_TOKENS:
        sides = " and ".join(f"{number(eps)}" for eps in dict.fromkeys(eps for _, eps in wide))
        yield f.warn(
            wide[0][0],
            f"ε = {sides} is a token's scale; the mean over a completion of more than a few tokens (up to {longest:,} "
            "here) does not move that far, so nothing will ever be clipped",
            "leave actor.eps_clip unset for 3e-4 / 4e-4, or set about 3e-4 … 5e-3 and aim at 10–25 % clipped sequences",
        )
    if min(low, high) < FLOAT32_EPS and f.dtype != "float64":
        yield f.warn(
            "actor.eps_clip" if low < FLOAT32_EPS else "actor.eps_clip_higher",
            f"ε = {number(min(low, high))} is near the rounding of {f.dtype} log-probs: that decides who is clipped",
            "set ε to 1e-4 or more, or actor.dtype: float64",
        )


def ratio_always_one(f: Facts) -> Iterator[Finding]:
    own = f.objective["proximal"] in ("auto", "recompute") or f.recentred
    if f.num_minibatches > 1 or not own:
        return
    rest = "only the π_old/μ weight acts" if f.objective["corrected"] else "GSPO, GSPO-token and GRPO coincide"
    auto = ", and eps_clip: auto has nothing to follow" if f.objective["eps_auto"] else ""
    yield f.warn(
        "actor.ppo_n_minibatches",
        "one update per rollout batch with a recomputed π_old: every ratio is exactly 1, nothing is clipped, "
        f"{rest}{auto}",
        "set actor.ppo_n_minibatches: 4, as in the paper",
    )


def aggregation(f: Facts) -> Iterator[Finding]:
    chosen = f.objective["aggregation"]
    if f.sequence_level and chosen.startswith("token_"):
        yield f.warn(
            "actor.loss_aggregation",
            f"{chosen} weighs a completion by its length, under the name {f.objective['name']} with sequence ratios; "
            "the paper gives each completion one vote",
            "set actor.loss_aggregation: sequence_mean (the paper) or sequence_sum (LUSPO)",
        )


def flattened_advantages(f: Facts) -> Iterator[Finding]:
    if f.objective["level"] == "sequence" and f.actor.kl_ctl > 0:
        yield f.warn(
            "actor.kl_ctl",
            "a KL penalty in the reward differs per token, and one ratio per sequence takes the mean of it",
            "set algorithm: gspo_token, which keeps per-token advantages, or use actor.kl_loss_coef instead",
        )
    whole = f.actor.sequence_unit == "trajectory"
    if f.objective["level"] == "sequence" and f.config.env.turn_discount < 1 and whole:
        yield f.warn(
            "env.turn_discount",
            "credit differs from turn to turn, and one ratio per trajectory takes the mean of it",
            "set actor.sequence_unit: turn, or algorithm: gspo_token",
        )


def episodes(f: Facts) -> Iterator[Finding]:
    env = f.config.env
    if env.path is not None and ":" not in env.path and env.path not in ENVIRONMENTS:
        yield f.error(
            "env.path",
            f"{env.path!r} is no environment here; there are {', '.join(ENVIRONMENTS)}",
            "name your own as module:function or file.py:function",
        )
    own = env.options.get("max_turns", env.options.get("attempts"))
    if env.path in ENVIRONMENTS and isinstance(own, int) and own > env.max_turns:
        yield f.error(
            "env.max_turns",
            f"the environment may ask {own} times and every episode is bounded at {env.max_turns}: the longest would "
            "fail instead of ending",
            f"set env.max_turns={own}",
        )
    if env.path is not None and f.objective["advantage"] == "gae" and env.turn_discount < 1:
        yield f.error(
            "env.turn_discount", "GAE discounts by tokens, not by turns", "set actor.discount, or a group advantage"
        )


# The policies


def policies(f: Facts) -> Iterator[Finding]:
    actor, stale, proximal = f.actor, f.config.rollout.max_head_offpolicyness, f.objective["proximal"]
    if actor.use_decoupled_loss and proximal == "rollout":
        yield f.error(
            "actor.use_decoupled_loss",
            "π_old is the sampler's own policy μ (prox_logp_method rollout), so the weight π_old/μ is always 1",
            "set actor.prox_logp_method: recompute, or actor.use_decoupled_loss: false",
        )
    if stale > 0 and proximal != "rollout" and not f.objective["corrected"]:
        yield f.warn(
            "rollout.max_head_offpolicyness",
            f"samples may be {stale} versions old, and π_old from the trainer hides that: nothing corrects or clips it",
            "set actor.use_decoupled_loss: true, which weighs by π_old/μ",
        )
    if stale > 0 and proximal == "rollout" and f.clips:
        yield f.warn(
            "actor.prox_logp_method",
            f"the ratio is taken against samplers up to {stale} versions old, so their age alone uses up the clip "
            f"range (ε = {number(min(f.clips))}) before any update",
            "set actor.use_decoupled_loss: true, which clips against the trainer's own π_old and weighs by π_old/μ",
        )
    if stale > 0 and f.recentred:
        yield f.error(
            "actor.prox_logp_recenter",
            f"samples may be {stale} versions old: they differ by the policy's drift, which is no constant",
            "set rollout.max_head_offpolicyness: 0, or actor.use_decoupled_loss: true without prox_logp_method",
        )
    queue = f.config.rollout.queue_size
    if stale > 0 and queue is not None and queue < f.num_prompts:
        yield f.error(
            "rollout.queue_size",
            f"{queue:,} groups can never make a batch of {f.num_prompts:,}",
            f"set rollout.queue_size: {(stale + 1) * f.num_prompts}, or remove it",
        )
    gconfig = f.config.gconfig
    cuts = {"top_p": gconfig.top_p < 1, "top_k": gconfig.top_k > 0, "min_new_tokens": gconfig.min_new_tokens > 0}
    cut = [key for key, is_on in cuts.items() if is_on]
    if cut and (proximal not in ("auto", "recompute") or f.objective["corrected"]):
        yield f.warn(
            f"gconfig.{cut[0]}",
            f"{' and '.join(cut)} cut the sampled distribution, while its log-probs serve as π_old or in π_old/μ; "
            "the trainer's are of the whole distribution, so the ratio is wrong from the first token",
            "remove them from gconfig, or set actor.prox_logp_method: recompute without a correction",
        )
    if proximal == "rollout" and f.sequence_level and f.external_sampler and f.clips and min(f.clips) < SAMPLER_NOISE:
        yield f.warn(
            "actor.prox_logp_method",
            f"{f.external_sampler}'s log-probs differ from the trainer's by more per token (published: 6e-4 to 1.5e-3) "
            f"than ε = {number(min(f.clips))}: sequences are clipped before any update",
            "measure it with `gspo doctor --probe`; set actor.prox_logp_method: recompute, or an ε above the noise",
        )
    correction = actor.rejection_sampling
    if correction is None or not f.objective["corrected"]:
        return
    if correction.upper is None and correction.lower is None:
        yield f.warn(
            "actor.rejection_sampling.upper",
            "a correction without bounds neither drops nor truncates anything",
            "set actor.rejection_sampling.upper, for example 2.0, or a preset such as tis",
        )
    if (correction.level, correction.metric, correction.agg) == ("sequence", "ratio", "sum"):
        yield f.warn(
            "actor.rejection_sampling.agg",
            "the product of token ratios collapses with length (0.06 at 8k tokens), so long completions are dropped",
            "set actor.rejection_sampling.agg: mean",
        )


def references(f: Facts) -> Iterator[Finding]:
    actor = f.actor
    for key, coefficient in (("actor.kl_loss_coef", actor.kl_loss_coef), ("actor.kl_ctl", actor.kl_ctl)):
        if coefficient > 0 and f.config.ref is None:
            yield f.error(
                key,
                f"a KL coefficient of {number(coefficient)} needs a reference policy, and ref is null",
                f"add a ref section (ref.path={f.actor.path}), or set {key}: 0",
            )
    if actor.kl_loss_coef > 0 and actor.kl_ctl > 0:
        yield f.warn(
            "actor.kl_ctl",
            "the KL to the reference is counted twice: in the reward and in the loss",
            "set one of actor.kl_ctl and actor.kl_loss_coef to 0",
        )
    if actor.kl_loss_coef > 0 and actor.kl_estimator == "k1":
        yield f.warn(
            "actor.kl_estimator",
            "k1 in the loss has the gradient of the log-prob alone, which is 0 on average: it holds nothing back",
            "set actor.kl_estimator: k3 (the default in the loss) or k2, or use actor.kl_ctl, where k1 is right",
        )
    if f.objective["advantage"] == "gae" and f.config.critic is None:
        yield f.error(
            "algorithm",
            f"{f.objective['name']} takes its advantages from a value model, and critic is null",
            f"add a critic section (critic.path={f.actor.path}), or choose algorithm: gspo",
        )
    if f.objective["advantage"] != "gae" and f.config.critic is not None:
        yield f.warn(
            "critic",
            f"{f.objective['name']} takes its advantages from the group, so the critic is never used",
            "remove the critic section, or choose algorithm: ppo",
        )


# Batches


def batches(f: Facts) -> Iterator[Finding]:
    total, group = f.num_sequences, f.config.gconfig.n_samples
    owners = {"actor.ppo_n_minibatches": f.num_minibatches}
    if f.config.critic is not None and f.objective["advantage"] == "gae" and f.config.critic.ppo_n_minibatches:
        owners["critic.ppo_n_minibatches"] = f.config.critic.ppo_n_minibatches
    seen: set[int] = set()
    for key, parts in owners.items():
        if total % parts and parts not in seen:
            seen.add(parts)
            divisors = _around([n for n in range(1, min(total, 4096) + 1) if total % n == 0], parts)
            unit = parts // math.gcd(group, parts)
            prompts = [n for n in (f.num_prompts // unit * unit, (f.num_prompts // unit + 1) * unit) if n > 0]
            yield f.error(
                key,
                f"{f.num_prompts:,} prompts × {group:,} samples = {total:,} sequences do not divide into {parts:,} "
                "mini-batches; a mini-batch is a set of whole sequences and all are equally large",
                f"set {key}: {_either(divisors)}, or {f.prompts_key}: {_either(prompts)}",
            )
    longest = f.longest
    if longest is not None and longest > f.actor.mb_spec.max_tokens_per_mb:
        yield f.warn(
            "actor.mb_spec.max_tokens_per_mb",
            f"{f.actor.mb_spec.max_tokens_per_mb:,} is less than the longest sequence ({longest:,} tokens), which then "
            "makes a larger micro-batch of its own: the bound on memory does not hold",
            f"set actor.mb_spec.max_tokens_per_mb: {longest} or more, or shorten gconfig.max_new_tokens",
        )
    yield from _devices(f)


def _devices(f: Facts) -> Iterator[Finding]:
    layout, trainer = layout_of(f.config, f.num_gpus), parse_backend(f.config.actor.backend, TRAINERS)
    sampler = layout.sampler
    if layout.is_colocated:
        return
    named = sampler is not None and f.config.rollout.backend != "auto"
    needed = (sampler.world if sampler and named else 0) + (trainer.world if trainer.name == "fsdp" else 0)
    cluster = f.config.cluster
    if not needed or (cluster.n_gpus_per_node is None and (cluster.n_nodes > 1 or f.config.scheduler.type != "local")):
        return
    offered = cluster.n_nodes * (f.num_gpus if cluster.n_gpus_per_node is None else cluster.n_gpus_per_node)
    if offered == 0 and f.external_sampler != "sglang":
        return  # processes of a CPU run
    if needed > offered:
        stated = cluster.n_gpus_per_node is not None
        key = "cluster.n_gpus_per_node" if stated else "actor.backend" if trainer.name == "fsdp" else "rollout.backend"
        finding = f.error if stated and f.loaded.is_set("cluster.n_gpus_per_node") else f.warn
        yield finding(
            key,
            f"{f.config.rollout.backend} + {f.config.actor.backend} take {needed} GPUs, and "
            f"{'the cluster' if stated else 'this machine'} has {offered}",
            "set rollout.backend: auto and actor.backend: auto, or smaller sizes",
        )


def _around(choices: list[int], target: int) -> list[int]:
    below, above = [n for n in choices if n < target], [n for n in choices if n > target]
    return ([below[-1]] if below else []) + ([above[0]] if above else [])


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)


# Advantages and rewards


def advantages(f: Facts) -> Iterator[Finding]:
    actor, group = f.actor, f.config.gconfig.n_samples
    chosen, own = f.objective["advantage"], ALGORITHMS[f.objective["name"]].advantage
    norm = actor.reward_norm
    if chosen == "gae" and group == 1 and actor.zero_variance_groups in ("drop", "refill"):
        yield f.error(
            "actor.zero_variance_groups",
            f"{actor.zero_variance_groups} rejects groups of equal rewards, and a group of one always is",
            "set actor.zero_variance_groups: count, or gconfig.n_samples: 2 or more",
        )
    by_group = chosen in GROUP_ADVANTAGES or (chosen != "gae" and _uses_groups(norm))
    if group == 1 and by_group:
        yield f.error(
            "gconfig.n_samples",
            f"a group of one has nothing to be compared with: its {chosen} advantage is always 0",
            "set gconfig.n_samples: 8 (or more), or choose algorithm: reinforce_pp or ppo",
        )
    if norm is not None and f.loaded.is_set("algorithm") and own != "gae" and chosen != own:
        yield f.warn(
            "actor.reward_norm",
            f"replaces {f.objective['name']}'s own advantage ({own}) by {chosen}",
            "remove actor.reward_norm, or choose the algorithm whose advantage it is",
        )
    if by_group and _uses_groups(actor.adv_norm):
        yield f.warn(
            "actor.adv_norm",
            "advantages that are already normalised within their group are normalised within it again",
            "remove actor.adv_norm, or give it level batch",
        )
    tail, longest = actor.overlong_tokens, f.config.gconfig.max_new_tokens
    if actor.overlong_reward_penalty and tail is not None and tail > longest:
        yield f.error(
            "actor.overlong_tokens",
            f"a penalised tail of {tail:,} tokens is longer than the longest completion ({longest:,})",
            f"set actor.overlong_tokens: {max(1, longest // 5)}",
        )
    stops = f.config.gconfig.stop or f.config.gconfig.stop_token_ids
    if actor.mask_no_eos_with_zero and f.config.gconfig.ignore_eos and not stops:
        yield f.error(
            "actor.mask_no_eos_with_zero",
            "with gconfig.ignore_eos every completion is truncated, so every advantage would be 0",
            "set gconfig.ignore_eos: false, or actor.mask_no_eos_with_zero: false",
        )


def _uses_groups(norm: Norm | None) -> bool:
    return norm is not None and "group" in (norm.mean_level, norm.std_level)


def programs(f: Facts) -> Iterator[Finding]:
    reward = f.config.reward
    for entry in f.code_rewards:
        seconds = entry.get("timeout", 5.0)
        if isinstance(seconds, int | float) and seconds + 2 > reward.timeout:
            yield f.error(
                "reward.timeout",
                f"a program may take {seconds:g} s and its sandbox 2 more, its reward {reward.timeout:g} s in all",
                f"set reward.timeout={seconds + 2:g}, or a smaller timeout of `code`",
            )
    if f.code_rewards and reward.allow_unsandboxed_code:
        yield f.warn(
            "reward.allow_unsandboxed_code",
            "where bubblewrap does not work, model-written code runs with your own rights: files, network, keys",
            "install the Debian package bubblewrap and remove the key, or use a machine you can lose",
        )
    elif f.code_rewards and shutil.which("bwrap") is None:
        yield f.warn(
            "reward.functions",
            "`code` runs what the model wrote in a bubblewrap sandbox, and bwrap is not installed here",
            "install the Debian package bubblewrap; without it a run is refused (docs/sandbox.md)",
        )


def rewards(f: Facts) -> Iterator[Finding]:
    reward, path = f.config.reward, f.config.train_dataset.path
    if reward.weights and reward.functions and len(reward.weights) != len(reward.functions):
        yield f.error(
            "reward.weights",
            f"{len(reward.weights)} weights for {len(reward.functions)} functions",
            "give one weight per function, or remove reward.weights",
        )
    train = f.config.train_dataset
    own_rewards = [source.path for source in train.mixture if not source.reward] if train.mixture else [path]
    files = [source for source in own_rewards if _is_file(source)]
    if not reward.functions and files:
        yield f.warn(
            "reward.functions",
            f"{files[0]} is a file of rows, which brings no reward of its own; the task's guess will be used",
            "set reward.functions, for example [math], [numeric] or [my_module:my_function]",
        )
    valid = f.config.valid_dataset
    for key, data in (("train_dataset", train), ("valid_dataset", valid)):
        if data is not None and any(not source.path for source in data.mixture):
            yield f.error(f"{key}.mixture", "a source without a path has no rows", "give every source its path")
    for entry in (*reward.functions, *(entry for source in train.mixture for entry in source.reward)):
        if isinstance(entry, dict) and not isinstance(entry.get("name"), str):
            yield f.error(
                "reward.functions",
                f"{entry} does not say which reward it is",
                "write {name: judge, …}, {name: reward_model, …} or another name with its settings",
            )
    mixed = bool(train.mixture) or bool(valid and valid.mixture)
    if valid is not None and not mixed and (valid.path, valid.split) == (train.path, train.split):
        yield f.warn(
            "valid_dataset.split" if f.loaded.is_set("valid_dataset.split") else "valid_dataset.path",
            f"evaluation reads the training problems ({train.path}, split {train.split}): it cannot see overfitting",
            "set valid_dataset.split: test (or another file), or remove valid_dataset for the task's held-out split",
        )


def _is_file(path: str) -> bool:
    if ":" in path.split("/")[0]:
        return False
    try:
        return Path(path).suffix.lower() in FILE_ENDINGS or Path(path).is_file()
    except (OSError, ValueError):
        return False


# Sampling


def sampling(f: Facts) -> Iterator[Finding]:
    generation = f.config.gconfig
    for section, values in (("gconfig", generation), ("eval_gconfig", f.config.eval_gconfig)):
        derived = section == "eval_gconfig" and not (
            f.loaded.is_set("eval_gconfig.min_new_tokens") or f.loaded.is_set("eval_gconfig.max_new_tokens")
        )
        if values is not None and not derived and values.min_new_tokens > values.max_new_tokens:
            yield f.error(
                f"{section}.min_new_tokens",
                f"at least {values.min_new_tokens:,} and at most {values.max_new_tokens:,} new tokens contradict",
                f"set {section}.min_new_tokens: 0, or a larger {section}.max_new_tokens",
            )
    if generation.greedy or generation.temperature == 0:
        yield (f.warn if generation.greedy else f.error)(
            "gconfig.greedy" if generation.greedy else "gconfig.temperature",
            "training samples without randomness: all completions of a prompt are equal, all advantages 0",
            "set gconfig.greedy: false and gconfig.temperature: 1.0",
        )
    elif f.actor.temperature is not None and f.actor.temperature != generation.temperature:
        yield f.warn(
            "actor.temperature",
            f"the trainer takes log-probs at temperature {f.actor.temperature:g}, the sampler draws at "
            f"{generation.temperature:g}: they are of different distributions",
            "remove actor.temperature, which then follows gconfig.temperature",
        )
    prompt = f.config.train_dataset.max_length
    if f.context is not None and (prompt or 1) + generation.max_new_tokens > f.context:
        yield f.warn(
            "gconfig.max_new_tokens",
            f"{f.actor.path} has a context of {f.context:,} tokens, too few for {generation.max_new_tokens:,} new ones "
            f"after {'a prompt' if prompt is None else f'a prompt of {prompt:,}'}",
            f"set gconfig.max_new_tokens to at most {max(1, f.context - (prompt or f.context // 2))}",
        )
    limit = generation.max_tokens
    wanted = (prompt or 0) + generation.max_new_tokens
    if limit is not None and wanted > limit:
        yield f.error(
            "gconfig.max_tokens",
            f"{limit:,} is less than the longest prompt plus max_new_tokens ({wanted:,}): such a prompt is refused",
            "raise gconfig.max_tokens, or lower gconfig.max_new_tokens",
        )


# Weights and their optimizer


def weights(f: Facts) -> Iterator[Finding]:
    actor = f.actor
    lr, kind = actor.optimizer.lr or 0.0, "lora" if actor.use_lora else "full"
    if lr == 0:
        yield f.warn("actor.optimizer.lr", "0 changes no weight", "set actor.optimizer.lr: 1e-6, or 1e-5 with LoRA")
    fresh = actor.init_from_scratch or actor.path.startswith("embedded:")
    if lr > HIGH_LR[kind] and not fresh and actor.optimizer.type != "sgd":
        usual = "about 1e-5 for an adapter" if actor.use_lora else "about 1e-6 for all weights"
        yield f.warn(
            "actor.optimizer.lr",
            f"{number(lr)} is far above what reinforcement learning of a trained model usually bears ({usual})",
            f"set actor.optimizer.lr: {'1e-5' if actor.use_lora else '1e-6'}, or raise it from there",
        )
    if actor.use_lora and not actor.target_modules:
        yield f.error(
            "actor.target_modules", "an adapter on no module trains nothing", "set actor.target_modules: [all-linear]"
        )
    if actor.use_lora and actor.init_from_scratch:
        yield f.warn(
            "actor.init_from_scratch",
            "an adapter on random, frozen weights cannot learn much",
            "set actor.use_lora: false, or actor.init_from_scratch: false",
        )
    if actor.dtype in ("bfloat16", "float16") and f.on_cpu:
        yield f.warn(
            "actor.dtype",
            f"{actor.dtype} on a CPU is slow, and steps of a small learning rate round to nothing",
            "set actor.dtype: auto, which is float32 here",
        )
    if f.sequence_level and actor.fp32_lm_head is False and f.dtype in ("bfloat16", "float16"):
        yield f.warn(
            "actor.fp32_lm_head",
            f"{f.dtype} logits alone move a sequence ratio further than its clip band",
            "set actor.fp32_lm_head: true",
        )
    if not actor.disable_dropout:
        yield f.warn(
            "actor.disable_dropout",
            "with dropout on, the ratio of one policy to itself is not 1",
            "set actor.disable_dropout: true",
        )


def loggers(f: Facts) -> Iterator[Finding]:
    stats = f.config.stats_logger
    asked = (
        ("stats_logger.wandb.mode", stats.wandb.mode != "disabled", "wandb", "disabled"),
        ("stats_logger.tensorboard", stats.tensorboard, "tensorboard", "false"),
        ("stats_logger.trackio", stats.trackio, "trackio", "false"),
    )
    for key, is_asked, package, off in asked:
        if is_asked and importlib.util.find_spec(package) is None:
            yield f.error(key, f"{package} is not installed", f"pip install 'gspo[{package}]', or set {key}: {off}")


# Inference engines


def engines(f: Facts) -> Iterator[Finding]:
    engine, layout = f.external_sampler, layout_of(f.config, f.num_gpus)
    if engine is None:
        return
    options = getattr(f.config, engine)
    try:
        foreign_engines.flags(engine, options, f.actor.path)
        foreign_engines.environment_of(engine, options)
        foreign_engines.url_of(engine, options, 0, layout.num_samplers)
    except ConfigError as error:
        yield f.error(engine, str(error), f"everything below {engine} is a flag of the engine, by its own name")
    if layout.is_colocated and f.config.rollout.max_head_offpolicyness > 0:
        yield f.error(
            "rollout.max_head_offpolicyness",
            "one GPU is shared by turns: the engine sleeps while the trainer works, and cannot sample ahead",
            "set rollout.max_head_offpolicyness: 0",
        )


# Agents


def agents(f: Facts) -> Iterator[Finding]:
    env = f.config.env
    named = [f"env.{name}" for name in ("path", "agent", "command") if getattr(env, name)]
    if len(named) > 1:
        yield f.error(
            named[1], f"{' and '.join(named)} are given, and an episode is played by one", "remove the others"
        )
    if env.agent is not None and (file := env.agent.rpartition(":")[0]).endswith(".py") and not Path(file).is_file():
        yield f.error(
            "env.agent", f"there is no file {file}", "paths are taken from the folder that gspo is started in"
        )
    if env.command and shutil.which(env.command[0]) is None:
        yield f.error("env.command", f"there is no program {env.command[0]}", "give its path, or install it")


# Mixtures of experts


def experts(f: Facts) -> Iterator[Finding]:
    replay, rounded, proximal = f.actor.routing_replay, f.config.rollout.sampler_precision, f.objective["proximal"]
    if replay == "proximal" and proximal not in ("auto", "recompute"):
        yield f.error(
            "actor.routing_replay",
            f"proximal replays the routes of π_old's own forward, and prox_logp_method {proximal} makes none",
            "set actor.prox_logp_method: recompute, or actor.routing_replay: rollout",
        )
    if f.in_process:
        return
    if replay == "rollout" and f.external_sampler is not None:
        yield f.error(
            "actor.routing_replay",
            f"rollout replays the sampler's routes, and {f.external_sampler} does not tell them",
            "set rollout.backend: local:dN (servers of our own), or actor.routing_replay: proximal",
        )
    if rounded != "none":
        yield f.error(
            "rollout.sampler_precision",
            f"{rounded} rounds the weights of the in-process sampler, and servers sample here",
            "set rollout.backend: local, or rollout.sampler_precision: none",
        )
    engine = f.external_sampler
    by_file = engine == "sglang" or (engine is not None and getattr(f.config, engine).get("url") is not None)
    if f.actor.weight_update_mode == "broadcast" and by_file:
        yield f.error(
            "actor.weight_update_mode",
            "SGLang, and an engine that you run yourself, are given weights as files only",
            "set it to disk or auto",
        )


RULES = (
    references,
    batches,
    advantages,
    clip_range,
    ratio_always_one,
    aggregation,
    flattened_advantages,
    episodes,
    policies,
    sampling,
    rewards,
    programs,
    weights,
    loggers,
    engines,
    agents,
    experts,
)

"""`rollout`, `gconfig` and `eval_gconfig`: samplers, staleness and sampling parameters."""

from __future__ import annotations

from typing import Literal

from gspo.config.schema.key import Section, key


class Rollout(Section):
    backend: str = key(
        "auto", 'Sampler: auto, local, "local:d2", "vllm:d4t2", "sglang:d4". auto: in-process where there is no CUDA.'
    )
    max_concurrent_rollouts: int | None = key(
        None,
        "Sequences sampled at once, whole groups.",
        unset="as many as the sampler and the bounds below take",
        low=1,
    )
    max_head_offpolicyness: int = key(
        0, "η: how many weight versions a sample may be behind when it is trained on; 0: synchronous.", low=0
    )
    queue_size: int | None = key(
        None, "Groups sampled ahead, finished or not.", unset="max_head_offpolicyness + 1 rollout batches", low=1
    )
    dynamic_filter_fn: str | None = key(
        None, "module:function (or file.py:function) that says which groups to train on; the others are resampled."
    )
    dump_to_file: bool = key(True, "Write every sample to samples/step_*.jsonl.")
    sampler_precision: Literal["none", "bf16", "int8"] = key(
        "none",
        "Round the in-process sampler's weights (int8: per output channel) and compute as before: it then differs from "
        "the trainer as a faster sampler does. For studies; none: it samples from the trainer's own weights.",
    )
    request_timeout: float = key(3600.0, "Seconds until samplers that do not answer or sample fail the run.", above=0)
    request_retries: int = key(3, "How often a request that was lost with its sampler server is tried again.", low=0)


class EvalGeneration(Section):
    n_samples: int = key(8, "Completions per prompt: the group size G.", low=1)
    max_new_tokens: int = key(512, "Longest completion, in tokens.", low=1)
    greedy: bool = key(False, "Take the most likely token.")
    temperature: float = key(1.0, "Divides the logits before sampling.", low=0.0)
    top_p: float = key(1.0, "Keep the smallest set of tokens with this much probability.", above=0.0, high=1.0)
    top_k: int = key(0, "Keep this many tokens; 0: all.", low=0)


class Generation(EvalGeneration):
    min_new_tokens: int = key(0, "EOS and stop tokens are forbidden before this many tokens.", low=0)
    max_tokens: int | None = key(None, "Longest prompt + completion.", unset="the model's context", low=1)
    stop: list[str] = key([], "Strings that end a completion; the token that completes one stays.")
    stop_token_ids: list[int] = key([], "Token ids, beside EOS, that end a completion.")
    ignore_eos: bool = key(False, "Sample on after EOS, to max_new_tokens.")

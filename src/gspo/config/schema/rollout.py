"""`rollout`, `gconfig` and `eval_gconfig`: samplers, staleness and sampling parameters."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge

from gspo.config.backends import SAMPLERS
from gspo.config.schema.key import Section, key


class Rollout(Section):
    backend: str = key(
        "auto",
        f'Sampler: {", ".join(SAMPLERS)}; "local:d2" starts 2 servers, "vllm:d4t2" 4 servers of 2 GPUs each. With auto '
        "and no CUDA, the trainer's process samples.",
    )
    max_head_offpolicyness: int = key(
        0,
        "η, the staleness bound: a sample may be this many weight versions old when it is trained on; 0: synchronous.",
        low=0,
    )
    max_concurrent_rollouts: int | None = key(
        None,
        "Number of sequences sampled at the same time, in whole groups.",
        unset="as many as max_head_offpolicyness and the sampler allow (in process 256, up to 1,024 for small models)",
        low=1,
    )
    dump_to_file: bool | Annotated[int, Ge(1)] = key(
        True, "Write every sample to samples/step_*.jsonl. A number keeps the files of the last N steps only."
    )
    dynamic_filter_fn: str | None = key(
        None, "module:function or file.py:function that returns whether to train on a group; others are resampled."
    )
    request_timeout: float = key(3600.0, "The run fails if the samplers return nothing for this many seconds.", above=0)
    sampler_precision: Literal["none", "bf16", "int8"] = key(
        "none",
        "For studies: round the weights of the in-process sampler (int8: per output channel), so that it differs from "
        "the trainer as a faster sampler does. none: it uses the trainer's own weights.",
    )


class EvalGeneration(Section):
    n_samples: int = key(8, "Completions per prompt: the group size G.", low=1)
    max_new_tokens: int = key(512, "Maximum length of a completion, in tokens.", low=1)
    temperature: float = key(
        1.0, "Sampling temperature: the logits are divided by it. In an evaluation, 0 is greedy decoding.", low=0.0
    )
    top_p: float = key(
        1.0, "Nucleus sampling: keep the smallest set of tokens with this probability.", above=0.0, high=1.0
    )
    top_k: int = key(0, "Keep the k most likely tokens; 0: all.", low=0)
    min_p: float = key(
        0.0,
        "Keep the tokens whose probability is at least this fraction of the most likely token's; 0: all.",
        low=0.0,
        high=1.0,
    )


class Generation(EvalGeneration):
    max_tokens: int | None = key(
        None, "Maximum length of prompt and completion together, in tokens.", unset="the model's context", low=1
    )
    stop: list[str | int] = key(
        [], "What ends a completion besides EOS: strings, and token ids. The token that completes a string is kept."
    )
    min_new_tokens: int = key(0, "EOS and stop tokens are not sampled before this many tokens.", low=0)
    ignore_eos: bool = key(False, "Do not stop at EOS; sample max_new_tokens tokens.")

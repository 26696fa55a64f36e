"""The arithmetic of a batch: prompts, samples, mini-batches, micro-batches, ranks."""

from __future__ import annotations

import math
from typing import Any

from gspo.config.layout import layout_of
from gspo.config.objective import is_supervised
from gspo.lint.facts import Facts


def batch_section(f: Facts) -> dict[str, Any]:
    group, parts, total = f.config.gconfig.n_samples, f.num_minibatches, f.num_sequences
    ranks, longest = layout_of(f.config, f.num_gpus).ranks, f.longest
    each, spec = total / parts, f.actor.mb_spec
    tokens = math.ceil(each * (longest or f.config.gconfig.max_new_tokens))
    micro = max(1, math.ceil(tokens / ranks / spec.max_tokens_per_mb))
    steps = f.config.total_train_steps
    return {
        "supervised": is_supervised(f.config),
        "prompts": f.num_prompts,
        "group_size": group,
        "sequences": total,
        "minibatches": parts,
        "sequences_per_minibatch": int(each) if each.is_integer() else each,
        "divides": each.is_integer(),
        "tokens_per_minibatch_at_most": tokens,
        "prompt_length_known": longest is not None,
        "max_tokens_per_microbatch": spec.max_tokens_per_mb,
        "microbatches_at_most": micro,
        "ranks": ranks,
        "steps": steps,
        "epochs": f.actor.ppo_epochs,
        "updates": None if steps is None else steps * f.num_updates,
    }

"""The workload of several turns: after each answer the environment appends a fixed number of tokens.

Both sides keep all turns of an episode as one sequence, whose environment tokens are not trained. TRL generates each
turn as its own loop of tool calls does: the whole conversation is computed again. Ours continues it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lab.bench.workloads import Workload


def reply(turn: int, num_tokens: int) -> list[int]:
    """What the environment appends after a turn."""
    return [2 + (31 * turn + j) % 60 for j in range(num_tokens)]


def episode_environment(w: Workload) -> Callable[..., Any] | None:
    """Our side: an environment for `Trainer(env=…)`; None if the workload has one turn."""
    if w.num_turns == 1:
        return None

    async def env(client: Any, data: Any) -> None:
        tokens = list(client.prompt.tokens)
        for turn in range(w.num_turns):
            answer = await client.complete(tokens, max_new_tokens=w.new_tokens)
            tokens += [*answer.tokens, *reply(turn, w.reply_tokens)]
        # The last answer is scored by the workload's reward.

    return env


def play_turns(w: Workload) -> Callable[..., Any] | None:
    """TRL's side: a `rollout_func` of GRPOTrainer; None if the workload has one turn."""
    if w.num_turns == 1:
        return None

    def play(prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(text=list(prompts))["input_ids"]
        completions: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        for turn in range(w.num_turns):
            so_far = [[*p, *c] for p, c in zip(prompt_ids, completions, strict=True)]
            answers, _ = trainer._generate_single_turn(so_far, None, {}, w.num_samples)
            for i, answer in enumerate(answers):
                added = reply(turn, w.reply_tokens) if turn + 1 < w.num_turns else []
                completions[i] += [*answer, *added]
                masks[i] += [1] * len(answer) + [0] * len(added)
        assert {sum(mask) for mask in masks} == {w.num_turns * w.new_tokens}, "a turn ended early"
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None, "env_mask": masks}

    return play

"""`gspo doctor --reward`: score answers whose value is known, and say what is wrong with the reward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gspo.config import Config
from gspo.data import Data
from gspo.errors import ConfigError
from gspo.rewards import REFERENCE, AnswerScores, RewardProblem, Rewards, check_reward, diagnose
from gspo.rollout import sample_groups
from gspo.train import (
    FIRST,
    answer_markers,
    decoder,
    default_rewards,
    load_policy,
    make_data,
    make_reader,
    make_rewards,
    make_sampler,
    make_tokenizer,
    reward_specs,
    sampling_params,
)
from gspo.types import Failure, Score

ROWS = 64
MODEL_ROWS = 16


def examine_reward(config: Config, *, with_model: bool) -> tuple[list[AnswerScores], list[RewardProblem]]:
    """The scores of known answers to the first training rows, and what is wrong with them."""
    env = config.env
    if env.path or env.agent:
        raise ConfigError(
            "an environment gives its own rewards, which answers of one turn do not show; use gspo preview"
        )
    tokenizer = make_tokenizer(config)
    data, _ = make_data(config, None, None, make_reader(config, tokenizer))
    default_rewards(config, None, (data,))
    prompts = [data.prompt(row) for row in range(min(ROWS, len(data)))]
    with ExitStack() as stack:
        rewards = make_rewards(config, None, None)
        stack.callback(rewards.close)
        lines = check_reward(
            prompts,
            rewards,
            markers=answer_markers(reward_specs(config)),
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )
        found = diagnose(lines, config.reward.timeout)
        if all(line.answer != REFERENCE for line in lines):
            columns = ", ".join(name for name, value in prompts[0].data.items() if value is not None)
            text = f"no answer column found (columns: {columns}): the reference was not scored; set "
            found.append(RewardProblem(f"{text}train_dataset.columns.answer", False, is_open=True))
        if with_model:
            lines.append(_of_model(config, data, rewards))
    return lines, found


def _of_model(config: Config, data: Data, rewards: Rewards) -> AnswerScores:
    """The scores of the model's own greedy answers."""
    policy, tokenizer = load_policy(config, None, 0)
    sampler = make_sampler(config, policy, tokenizer, 0)
    try:
        groups = sample_groups(
            [(FIRST + row, data.prompt(row)) for row in range(min(MODEL_ROWS, len(data)))],
            num_samples=1,
            params=replace(sampling_params(config), greedy=True),
            sampler=sampler,
            rewards=rewards,
            decode=decoder(tokenizer),
        )
    finally:
        sampler.close()
    outcomes = [group.outcomes[0] for group in groups]
    return AnswerScores(
        "the model's, greedy",
        [outcome.value if isinstance(outcome, Score) else None for outcome in outcomes],
        [group.texts[0] for group in groups],
        [outcome for outcome in outcomes if isinstance(outcome, Failure)],
        seconds=0.0,
    )


def reward_view(lines: Sequence[AnswerScores], found: Sequence[RewardProblem], inert: Any) -> RenderableType:
    """The table of scores, and the diagnosis."""
    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for name in ("answer", "rows", "mean", "lowest", "highest", "failed", "ms per call"):
        table.add_column(name, justify="left" if name == "answer" else "right", no_wrap=True)
    for line in lines:
        known = [score for score in line.scores if score is not None]
        numbers = [f"{x:.3f}" for x in (line.mean or 0.0, min(known), max(known))] if known else ["–"] * 3
        spent = f"{1000 * line.seconds:.1f}" if line.seconds else "–"
        table.add_row(line.answer, str(len(line.scores)), *numbers, str(len(line.failures)), spent)
    words = [
        Text.assemble(
            ("✗ " if problem.is_fatal else "? " if problem.is_open else "! ", "red" if problem.is_fatal else "yellow"),
            inert(problem.text),
        )
        for problem in found
    ]
    good = Text("✓ the reference earns most, and wrong answers earn less", style="green")
    return Group(table, Text(), *(words or [good]))

"""Trivial baselines of a text task, and what runs earn beside them, as a table.

    python examples/summarise/figures.py examples/summarise/summarise.yaml
    python examples/summarise/figures.py examples/summarise/summarise.yaml runs/summarise/*

A baseline is scored by the rewards of the config on its held-out rows: the first ten words of the document, or the
source without a translation; the answer of another row; and the reference itself, the best that can be had. Runs are
shown before the first step and after the last one (the best checkpoint would be chosen by the same rows). Intervals are
95 %, over problems; the gain is paired: the same problems before and after.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gspo.config import load
from gspo.rewards import RewardItem, RewardPool, reward_spec
from gspo.stats import mean_interval
from gspo.system import read_jsonl
from gspo.types import Score


def main(config_file: str, *runs: str) -> None:
    config = load(config_file).config
    rows = read_jsonl(Path(config.train_dataset.path) / "test.jsonl")[: config.evaluator.size]
    spec = reward_spec(config.reward.functions, weights=config.reward.weights, key="reward.functions")
    names = [part.label for part in spec]
    print(f"{len(rows)} held-out rows of {config.train_dataset.path}\n")
    print("| |", " | ".join(["reward", *names, "gain"]), "|\n|" + "---|" * (len(names) + 3))
    with RewardPool(spec, timeout_s=config.reward.timeout) as pool:
        for what, texts in trivial(rows).items():
            items = [RewardItem(row["prompt"], (text,), data=row) for row, text in zip(rows, texts, strict=True)]
            show(what, [score for (score,) in pool.score(items) if isinstance(score, Score)], names)
    for run in map(Path, runs):
        answers = {int(file.stem.split("_")[1]): read_jsonl(file) for file in sorted((run / "evals").glob("*.jsonl"))}
        if not answers:
            print(f"{run} has no held-out answers yet", file=sys.stderr)
            continue
        before = {row["row"]: row["reward"] for row in answers[min(answers)]}
        for step in dict.fromkeys((min(answers), max(answers))):
            scored = [row for row in answers[step] if row["reward"] is not None]
            gains = [row["reward"] - before[row["row"]] for row in scored if before.get(row["row"]) is not None]
            what = f"{run.name}, {'before' if step == min(answers) else f'after step {step}'}"
            scores = [Score(row["reward"], row["reward_parts"]) for row in scored]
            show(what, scores, names, gains if step != min(answers) else ())


def trivial(rows: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Answers that need no model, by what they are."""
    half = len(rows) // 2  # not a neighbour: packages are in the order of their names
    found = {"another row's answer": [row["answer"] for row in [*rows[half:], *rows[:half]]]}
    if "document" in rows[0]:
        found["first ten words"] = [" ".join(row["document"].split()[:10]) for row in rows]
    if "source" in rows[0]:
        found["source, copied"] = [row["source"] for row in rows]
    return found | {"the reference": [row["answer"] for row in rows]}


def show(what: str, scores: Sequence[Score], names: Sequence[str], gains: Sequence[float] = ()) -> None:
    cells = [interval([score.value for score in scores])]
    cells += [f"{sum(score.parts[name] for score in scores) / max(len(scores), 1):.3f}" for name in names]
    print(f"| {what} |", " | ".join([*cells, interval(gains) if gains else ""]), "|")


def interval(values: Sequence[float]) -> str:
    mean, low, high = mean_interval(values)
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])

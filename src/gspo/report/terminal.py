"""Runs, evaluations and checkpoints on a terminal: values in, rich renderables out.

The caller makes untrusted text inert; nothing here is parsed as markup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gspo.report.read import Checkpoint, score_text
from gspo.report.samples import Block
from gspo.report.summary import RunSummary, summary_rows
from gspo.system import TextRows, duration, turns_text


def run_view(said: str, summary: RunSummary, places: Mapping[str, str]) -> RenderableType:
    """A sentence, the results, and the paths of the files."""
    rows = [
        (name, text, "bold" if name.startswith("held-out") else "")
        for name, text in (*summary_rows(summary), *places.items())
    ]
    return Group(Text(said, style="bold"), TextRows(rows, unwrapped=places.keys()))


def evaluation_view(head: str, result: Mapping[str, Any]) -> RenderableType:
    """Reward, avg@n and pass@k of `gspo eval`, one line each, then the same for each source of a mixture.

    Accuracies are shown if the rewards are 0 or 1, or if an answer was correct.
    """
    table = Table.grid(padding=(0, 2))
    for source, figures in (("", result), *result["sources"].items()):
        if source:
            table.add_row(Text(source))
        for name, share, graded in _scores(figures):
            if share["value"] is not None:
                ends = f"{score_text(share['low'], graded)} … {score_text(share['high'], graded)}"
                value = score_text(share["value"], graded)
                table.add_row(Text(name, style="dim"), Text(value, style="bold"), Text(ends, style="dim"))
    tail = f"95 % intervals over problems; {result['mean_tokens']:.1f} tokens per completion, "
    tail += f"{result['truncated']:.1%} truncated; {duration(result['seconds'])}"
    if result["reward_failures"]:
        tail += f"; {result['reward_failures']} rewards failed and are not counted"
    return Group(Text(head, style="bold"), table, Text(tail, style="dim"))


def _scores(figures: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """(name, interval, whether it is a reward); with one sample per problem, avg@1 and pass@1 are one line."""
    n, graded = figures["num_samples"], figures["graded"] > 0
    shares = {f"avg@{n}": figures["avg"]} | {f"pass@{k}": share for k, share in figures["pass"].items() if k != "1"}
    found = [("reward", figures["reward"], True)]
    if not graded or figures["avg"]["value"]:
        found += [(name, share, False) for name, share in shares.items()]
    return found


def probe_view(result: Mapping[str, Any]) -> RenderableType:
    """The errors that `gspo doctor --probe` measured, compared with ε, and a verdict."""
    at = f", step {result['step']}" if result["step"] else ""
    head = f"{result['model']}{at}: sampler {result['sampler']}; trainer {result['trainer']}; equal weights"
    table = Table.grid(padding=(0, 3))
    table.add_row(*(Text(name, style="dim") for name in ("tokens", "sequences", "mean log s", "sd", "p95 |log s|")))
    whole = {
        "num_sequences": result["num_sequences"],
        "mean": result["log_s_mean"],
        "std": result["log_s_std"],
        "p95_abs": result["log_s_p95_abs"],
    }
    for row, style in (*((row, "") for row in result["by_length"]), (whole, "bold")):
        span = "all" if "tokens" not in row else "–".join(map(str, dict.fromkeys(row["tokens"])))
        figures = f"{row['mean']:+.1e}", f"{row['std']:.1e}", f"{row['p95_abs']:.1e}"
        table.add_row(*(Text(cell, style=style) for cell in (span, str(row["num_sequences"]), *figures)))
    lines = [
        f"per token: mean {result['token_mean']:+.1e}, sd {result['token_std']:.1e}, "
        f"largest {result['token_max_abs']:.1e}"
    ]
    if result["cuts"]:
        lines.append(f"{' and '.join(result['cuts'])} change only the sampler's distribution: the numbers include this")
    return Group(Text(head, style="bold"), table, *(Text(line, style="dim") for line in lines), Text(_verdict(result)))


def _verdict(result: Mapping[str, Any]) -> str:
    eps, method = result["eps"], result["method"]
    if eps is None:
        return "This objective has no clip range to compare the error with."
    bound = f"ε {'may widen to' if result['eps_auto'] else '='} {eps:.1e}"
    if result["verdict"] == "fine":
        return f"Fine: {bound}, more than three times the error. The sampler's log-probs can be used as π_old."
    said = f"{result['words'][:1].upper()}{result['words'][1:]}."
    if method != "rollout":
        own = "auto uses them only if their error is far below ε" if method == "auto" else f"the config has {method}"
        return f"This concerns only actor.prox_logp_method: rollout ({own}). {said}"
    if result["verdict"] == "near":
        return f"Warning: {said}"
    return f"{'Forced' if result['forced'] else 'Refused'}: {said}"


def samples_view(block: Block, num_groups: int, clean: Callable[[str], str]) -> RenderableType:
    """Prompts of a step with their completions and rewards; prompts whose rewards differ come first.

    `clean` makes text of the model inert.
    """
    groups: dict[Any, list[int]] = {}
    for index, submission in enumerate(block["submission"]):
        groups.setdefault(submission, []).append(index)
    ordered = sorted(groups.values(), key=lambda members: len({block["reward"][i] for i in members}) < 2)
    parts: list[RenderableType] = []
    for members in ordered[:num_groups]:
        first = members[0]
        prompt = block["question"][first] or block["prompts"][block["prompt"][first]]
        answer = block["answer"][first]
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        # The best first; a failed reward is last.
        for index in sorted(members, key=lambda i: (block["reward"][i] is None, -(block["reward"][i] or 0.0))):
            reward = block["reward"][index]
            failed = "failed" if block["failure"][index] is not None else "–"
            turns = block["turns"][index]
            completion = turns_text(turns) if turns else block["completion"][index]
            text = block["failure"][index] or completion or "(empty)"
            row = [Text(failed if reward is None else f"{reward:.3g}", style="bold"), Text(clean(text))]
            # Each part of a reward that has several.
            if len(block["parts"]) > 1:
                values = {name: found[index] for name, found in block["parts"].items() if found[index] is not None}
                row.append(Text(clean(", ".join(f"{name} {value:.3g}" for name, value in values.items())), style="dim"))
            table.add_row(*row)
        known = [] if answer is None else [Text(f"answer: {clean(answer)}", style="dim")]
        if (shown := block["shown"][first]) is not None:
            image = block["images"][shown]
            known.insert(0, Text(clean(f"image: {image['words']}, sha256 {image['sha256'][:16]}"), style="dim"))
        parts += [Text(clean(prompt), style="cyan"), *known, table, Text()]
    what = "held-out problems after" if block["kind"] == "evals" else "prompts of"
    parts.append(Text(f"{min(num_groups, len(ordered))} of {len(ordered)} {what} step {block['step']}", style="dim"))
    if any(of_environment for turns in block["turns"] for of_environment, _ in turns or ()):
        parts.append(Text("‹…› was written by the environment", style="dim"))
    rewards = sorted(reward for reward in block["reward"] if reward is not None)
    if any(reward not in (0, 1) for reward in rewards):
        parts.append(Text(f"rewards of all {len(rewards)}: {distribution(rewards)}", style="dim"))
    return Group(*parts)


def distribution(ordered: Sequence[float]) -> str:
    """Quantiles of graded rewards, given in order.

    >>> distribution([0.0, 0.1, 0.2, 0.3, 1.0])
    'lowest 0, quartiles 0.1 0.2 0.3, highest 1'
    """
    low, *quartiles, high = (ordered[round(q * (len(ordered) - 1))] for q in (0, 0.25, 0.5, 0.75, 1))
    return f"lowest {low:.3g}, quartiles {' '.join(f'{q:.3g}' for q in quartiles)}, highest {high:.3g}"


def checkpoints_view(found: Sequence[Checkpoint], notes: Mapping[int, str]) -> RenderableType:
    """Step, size, date and a note for each checkpoint."""
    if not found:
        return Text("There is no checkpoint yet.")
    table = Table.grid(padding=(0, 3))
    table.add_row(*(Text(name, style="dim") for name in ("step", "size", "written", "")))
    for c in found:
        written = time.strftime("%Y-%m-%d %H:%M", time.localtime(c.written))
        words = [word for word in ("best" if c.best else "", notes.get(c.step, "")) if word]
        table.add_row(Text(str(c.step)), Text(f"{c.bytes / 1e6:,.1f} MB"), Text(written), Text(", ".join(words)))
    return table


def models_view(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Name, what it is, size, and where it is or how to get it."""
    shown = []
    for row in rows:
        size = f"{row['bytes'] / 1e6:,.1f} MB on disk:" if row["here"] else "not here:"
        shown += [(row["name"], row["what"], ""), ("", f"{size} {row['where']}", "dim")]
    return TextRows(shown)

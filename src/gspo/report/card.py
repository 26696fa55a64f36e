"""The model card of an exported run: README.md with the front matter that the Hugging Face hub reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gspo.errors import ConfigError
from gspo.report.page.data import config_lines
from gspo.report.read import Row, evaluations, is_graded, read_config, read_metrics, score_interval, sources_of
from gspo.report.summary import interval_text, summary_of, summary_rows
from gspo.system import inert, read_json

CONFIG = "gspo_config.yaml"  # the run's config in the exported folder
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Exported:
    """What is exported, for its card."""

    run: Path
    step: int
    name: str  # of the model
    version: str  # of gspo
    objective: str  # title and paper, in one line
    base_model: str | None = None  # its name on the hub; None: it is not there
    is_adapter: bool = False
    is_vision: bool = False


def model_card(made: Exported) -> str:
    """Front matter, what the model is, its results with intervals, how to load it, and how to train it again."""
    config, rows = read_config(made.run), read_metrics(made.run)
    graded = is_graded(rows)
    evals = {row["step"]: row for row in evaluations(rows, graded)}
    head = yaml.safe_dump(_front_matter(made, config, evals.get(made.step), graded), sort_keys=False)
    body = "\n".join(_body(made, config, rows, evals, graded))
    return f"---\n{head}---\n\n{inert(body)}\n"


def _front_matter(made: Exported, config: Row, row: Row | None, graded: bool) -> dict[str, Any]:
    head: dict[str, Any] = {"library_name": "peft" if made.is_adapter else "transformers"}
    head["pipeline_tag"] = "image-text-to-text" if made.is_vision else "text-generation"
    kind = "sft" if _is_supervised(config) else "reinforcement-learning"
    head["tags"] = list(dict.fromkeys(["gspo", kind, str(config.get("algorithm") or "gspo")]))
    if made.base_model:
        head["base_model"] = made.base_model
    data = [name for name in _data_sets(config) if _HUB_NAME.fullmatch(name) and not Path(name).exists()]
    if data:
        head["datasets"] = data
    if row is not None:
        value = score_interval(row, graded)[0]
        kind = "reward" if graded else "accuracy"
        result = {
            "task": {"type": head["pipeline_tag"]},
            "dataset": {"name": "held-out problems", "type": data[0] if data else "held-out"},
            "metrics": [{"type": kind, "value": round(value, 6), "name": f"held-out {kind}"}],
        }
        head["model-index"] = [{"name": made.name, "results": [result]}]
    return head


def _body(made: Exported, config: Row, rows: Sequence[Row], evals: Mapping[int, Row], graded: bool) -> Iterator[str]:
    actor = _section(config, "actor")
    sets = ", ".join(f"`{name}`" for name in _data_sets(config)) or "rows of its environment"
    yield f"# {made.name}\n"
    what = "fine-tuned (supervised)" if _is_supervised(config) else "trained by reinforcement learning"
    yield f"`{actor.get('path')}`, {what} with gspo {made.version}. Objective: {made.objective}."
    kind = " The folder has the adapter only." if made.is_adapter else ""
    yield f"These are the weights after step {made.step} of {max((row['step'] for row in rows), default=0)}.{kind}\n"
    yield "## Results\n"
    if evals:
        first, last = min(evals), made.step
        name = f"held-out {'reward' if graded else 'accuracy'}"
        before = "before training" if first == 0 else f"step {first}"
        yield f"| {name} | {before} | this model (step {last}) | problems |\n|---|---|---|---|"
        for source in ("", *filter(None, sources_of([evals[first]]))):
            cells = [_cell(evals.get(step), graded, source) for step in (first, last)]
            problems = (evals.get(last) or evals[first]).get(f"eval/{source}/problems" if source else "eval/problems")
            yield f"| {source or 'all'} | {' | '.join(cells)} | {problems} |"
        yield "\nIn parentheses: the 95 % interval over problems. It is one run: other seeds give other models.\n"
    else:
        yield "The run was not evaluated on held-out problems (`evaluator.freq_steps`).\n"
    for file in sorted(made.run.glob("eval_*.json")):
        yield from _evaluation(file, made.step)
    yield "Of the whole run:\n\n| | |\n|---|---|"
    by_sequence = actor.get("importance_sampling_level") != "token"
    yield from (f"| {name.strip()} | {text} |" for name, text in summary_rows(summary_of(rows, by_sequence)))
    yield "\n## Data and reward\n"
    functions = _section(config, "reward").get("functions") or []
    parts = [f"`{f.get('name') if isinstance(f, dict) else f}`" for f in functions]
    environment = _section(config, "env").get("path")
    yield f"Trained on {sets}. Reward: {', '.join(parts) or 'the default of the data'}."
    if environment:
        yield f"Episodes of the environment `{environment}`."
    yield "\n## Use\n"
    yield from _use(made)
    yield "\n## Reproduce\n"
    yield f"`{CONFIG}` has every key. A run is a function of its config, seed and number of threads; on another kind of"
    yield "processor the last digits differ. Data and reward functions that it names are not in this folder. Keys that"
    yield "were set by hand:\n\n```yaml"
    yield from (f"{line['key']}: {line['value']}" for line in config_lines(made.run) if line["by"] == "user")
    yield f"```\n\n```\npip install gspo=={made.version}\ngspo train {CONFIG}\n```"


def _use(made: Exported) -> Iterator[str]:
    if made.is_vision:
        yield f"```\ngspo chat {made.name}\n```"
        return
    yield "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
    yield f'tokenizer = AutoTokenizer.from_pretrained("{made.name}")'
    yield f'model = AutoModelForCausalLM.from_pretrained("{made.name}")\n```'


def _evaluation(file: Path, step: int) -> Iterator[str]:
    """The figures of a `gspo eval` of this step."""
    try:
        found = read_json(file, ConfigError)
        if found["step"] != step:
            return
        figures = {f"avg@{found['num_samples']}": found["avg"], **{f"pass@{k}": v for k, v in found["pass"].items()}}
        cells = [f"{name} {interval_text((x['value'], x['low'], x['high']), False)}" for name, x in figures.items()]
        yield f"`gspo eval` on {found['num_problems']} problems of `{found['data']}`: {', '.join(cells)}.\n"
    except (ConfigError, ValueError, KeyError, TypeError, AttributeError):
        return


def _cell(row: Row | None, graded: bool, source: str) -> str:
    if row is None:
        return "not measured"
    try:
        return interval_text(score_interval(row, graded, f"eval/{source}/" if source else "eval/"), graded)
    except (KeyError, TypeError):
        return "not measured"


def _data_sets(config: Row) -> list[str]:
    data = _section(config, "train_dataset")
    mixture = [str(part.get("path")) for part in data.get("mixture") or [] if isinstance(part, dict)]
    return mixture or ([str(data["path"])] if data.get("path") else [])


def _is_supervised(config: Row) -> bool:
    return config.get("algorithm") == "sft"


def _section(config: Row, name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}

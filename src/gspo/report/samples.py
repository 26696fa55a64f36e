"""The samples and held-out answers of a run: for the browser, as rows for fine-tuning, with their pictures.

Both may be edited or damaged. A picture is sent as WebP only, whatever its content; a browser decodes it or shows
nothing.

Files may be incomplete (the run is writing), deleted meanwhile, or malicious. A line that is not a sample is skipped; a
value of another type than documented becomes null.
"""

from __future__ import annotations

import base64
import contextlib
import json
import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gspo.errors import ConfigError
from gspo.system import read_jsonl, read_regular

MAX_BYTES = 128_000  # of one picture; ours have a few kB
BUDGET = 16_000_000  # bytes of pictures in one page
_NAME_LENGTH = 120


def shown_images(value: Any) -> tuple[str, str] | None:
    """The field `images` of a sample as sha256 and words; None if there is none or it is not as documented.

    >>> shown_images({"sha256": "ab" * 32, "from": [{"name": "cat.png", "size": [448, 336]}]})[1]
    'cat.png, 448 × 336'
    """
    if not isinstance(value, dict) or not is_digest(value.get("sha256")):
        return None
    given = value.get("from")
    words = [_words(one) for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    return value["sha256"], "; ".join(words)


def _words(one: dict[str, Any]) -> str:
    name, size = one.get("name"), one.get("size")
    parts = [name[-_NAME_LENGTH:]] if isinstance(name, str) else []
    if isinstance(size, list) and len(size) == 2 and all(type(number) is int for number in size):
        parts.append(f"{size[0]} × {size[1]}")
    return ", ".join(parts)


def is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def sample_picture(run: Path, digest: str) -> bytes | None:
    """The small picture of a prompt's images; None: the run has none, or the file is no WebP file of this size."""
    if not is_digest(digest):
        return None
    try:
        file = run / "images" / f"{digest}.webp"
        content = read_regular(file) if file.stat().st_size <= MAX_BYTES else b""
    except OSError:
        return None
    return content if content[:4] == b"RIFF" and content[8:12] == b"WEBP" else None


def pictures(run: Path, digests: Iterable[str], budget: int = BUDGET) -> dict[str, str]:
    """Pictures as data: addresses, by sha256, in the order given, until `budget` bytes are used."""
    found: dict[str, str] = {}
    for digest in dict.fromkeys(digests):
        if (content := sample_picture(run, digest)) is not None:
            address = f"data:image/webp;base64,{base64.b64encode(content).decode()}"
            budget -= len(address)
            if budget < 0:
                break
            found[digest] = address
    return found


Row = dict[str, Any]
Test = Callable[[Mapping[str, Any]], bool]

FIELDS = ("reward", "length", "advantage", "step", "version", "finish", "completion", "prompt")
_SIGNS = {
    ">=": operator.ge, "<=": operator.le, "!=": operator.ne, "==": operator.eq, "=": operator.eq,
    ">": operator.gt, "<": operator.lt,
}  # fmt: skip


def parse_filter(text: str) -> Test:
    """A condition on a sample: `reward>=1`, `length<200`, `finish=stop`, `reward_parts.format=1`.

    >>> parse_filter("reward >= 1")({"reward": 1.0}), parse_filter("finish=stop")({"finish": "length"})
    (True, False)
    """
    found = re.fullmatch(r"\s*(\w+(?:\.[\w@:.-]+)?)\s*(>=|<=|!=|==|=|>|<)\s*(.+?)\s*", text)
    name = "" if found is None else found[1]
    if found is None or not (name in FIELDS or name.startswith("reward_parts.")):
        raise ConfigError(
            f"--filter {text!r} is not a condition: write field, sign and value, for example reward>=1 or finish=stop; "
            f"the fields are {', '.join(FIELDS)} and reward_parts.NAME"
        )
    compare, wanted = _SIGNS[found[2]], _value(found[3])

    def test(row: Mapping[str, Any]) -> bool:
        head, _, part = name.partition(".")
        value = row.get(head)
        value = value.get(part) if part and isinstance(value, Mapping) else value
        # A value that is missing, or of another type than the wanted one, fulfils no condition.
        if isinstance(wanted, float):
            value = finite_number(value)
        return value is not None and type(value) is type(wanted) and bool(compare(value, wanted))

    return test


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text.strip("'\"")


def training_rows(run: Path, tests: Sequence[Test], *, best: bool) -> Iterator[Row]:
    """Rows {prompt, completion, answer, origin} of all kept steps; equal completions of a prompt once.

    best: of every prompt only the sample with the highest reward, if that is above 0; of equal ones the first.
    """
    found: dict[tuple[str, str], Row] = {}
    for row in (row for step in sample_steps(run) for row in read_samples(run, step)):
        if all(test(row) for test in tests) and (made := _row(row, run)) is not None:
            found.setdefault((json.dumps(made["prompt"]), made["completion"]), made)
    yield from _best(found) if best else found.values()


def _best(found: Mapping[tuple[str, str], Row]) -> Iterable[Row]:
    chosen: dict[str, Row] = {}
    for (prompt, _), row in found.items():
        reward = row["origin"]["reward"]
        if reward is not None and reward > 0 and (prompt not in chosen or reward > chosen[prompt]["origin"]["reward"]):
            chosen[prompt] = row
    return chosen.values()


def _row(sample: Row, run: Path) -> Row | None:
    """None for an episode, whose turns are not one completion, and for a sample whose end was cut off."""
    # `messages` is there if the prompt is more than one question; a prompt without a chat template has neither.
    completion, messages = sample.get("completion"), sample.get("messages")
    prompt = messages if isinstance(messages, list) else sample.get("question") or sample.get("prompt")
    if sample.get("turns") is not None or sample.get("finish") == "length" or not isinstance(completion, str):
        return None
    if not completion.strip() or not prompt:
        return None
    origin = {
        "run": str(run),
        "step": sample.get("step"),
        "submission": sample.get("submission"),
        "sample": sample.get("sample"),
        "version": sample.get("version"),
        "reward": finite_number(sample.get("reward")),
    }
    return {"prompt": prompt, "completion": completion, "answer": sample.get("answer"), "origin": origin}


Block = dict[str, Any]
Signature = tuple[int, ...]  # changes when a step's files do

Kind = Literal["samples", "evals"]  # the folder: training samples, or held-out answers
TEXTS = ("completion", "question", "answer", "failure", "finish")
NUMBERS = ("reward", "advantage", "log_s")
MAX_PARTS = 100  # of rewards, in a step: each has a value for each sample
COUNTS = ("sequence", "submission", "sample", "length", "minibatch", "version")


def sample_steps(run: Path, kind: Kind = "samples") -> dict[int, Signature]:
    """The steps whose samples or held-out answers are kept, with the signature of their files."""
    found: dict[int, Signature] = {}
    for file in (run / kind).glob("step_*.jsonl"):
        number = file.name[len("step_") : -len(".jsonl")]
        if number.isdigit() and number.isascii():
            signature: Signature = ()
            for part in (file, file.with_suffix(".safetensors")):
                with contextlib.suppress(OSError):
                    stat = part.stat()
                    # A file that was replaced has another inode, time or size. Every third entry is a size.
                    signature += (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            found[int(number)] = signature
    return dict(sorted(found.items()))


def choose_steps(sizes: Mapping[int, int], budget: int) -> list[int]:
    """As many steps as fit into `budget` bytes: the first, the last, and evenly spaced ones between them.

    >>> choose_steps({1: 10, 2: 10, 3: 10, 4: 10, 5: 10}, 30), choose_steps({7: 10}, 1)
    ([1, 3, 5], [7])
    """
    steps = sorted(sizes)

    def spread(count: int) -> list[int]:
        return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)] if count > 1 else steps[-1:]

    def is_too_much(count: int) -> bool:
        return sum(sizes[step] for step in spread(count)) > budget

    # The total size grows with the number of steps, so the largest number that fits is found by bisection.
    return spread(max(bisect_left(range(len(steps) + 1), True, lo=1, key=is_too_much) - 1, 1)) if steps else []


def choose_files(run: Path, budget: int) -> dict[tuple[Kind, int], Signature]:
    """Which steps of samples and of held-out answers a page shows; held-out answers get at most a quarter of it."""
    evals, samples = sample_steps(run, "evals"), sample_steps(run)
    sizes = {step: size_of(signature) for step, signature in evals.items()}
    few = choose_steps(sizes, budget // 4)
    left = budget - sum(sizes[step] for step in few)
    many = choose_steps({step: size_of(signature) for step, signature in samples.items()}, left)
    chosen: dict[tuple[Kind, int], Signature] = {("samples", step): samples[step] for step in many}
    for step in few:
        chosen["evals", step] = evals[step]
    return chosen


def size_of(signature: Signature) -> int:
    """Bytes of the files of a step."""
    return sum(signature[2::3])


def read_samples(run: Path, step: int, kind: Kind = "samples") -> list[dict[str, Any]]:
    """The lines of a step's file as they are; an incomplete or damaged line is left out."""
    with contextlib.suppress(OSError):
        return read_jsonl(run / kind / f"step_{step:06d}.jsonl")
    return []


def read_block(run: Path, step: int, kind: Kind = "samples") -> Block:
    """Every sample of a step, by column; prompts are stored once for their group."""
    rows = read_samples(run, step, kind)
    if kind == "evals":
        # Held-out answers have no number in a batch: they are numbered here, and grouped by their problem.
        problems: dict[str, int] = {}
        for index, row in enumerate(rows):
            problem = problems.setdefault(repr((row.get("source"), row.get("row"))), len(problems))
            row.update(sequence=index, submission=problem)
    # Values come from files that a user may have edited, so every type is checked.
    prompts: dict[str, int] = {}
    block: Block = {
        "step": step,
        "kind": kind,
        "prompt": [prompts.setdefault(_text(row.get("prompt")) or "", len(prompts)) for row in rows],
        "prompts": list(prompts),
        "clipped": [row["clipped"] if isinstance(row.get("clipped"), bool) else None for row in rows],
        **{name: [_text(row.get(name)) for row in rows] for name in TEXTS},
        **{name: [finite_number(row.get(name)) for row in rows] for name in NUMBERS},
        **{name: [_count(row.get(name)) for row in rows] for name in COUNTS},
    }
    shown = [shown_images(row.get("images")) for row in rows]
    images = {one: index for index, one in enumerate(dict.fromkeys(filter(None, shown)))}
    block["images"] = [{"sha256": digest, "words": words} for digest, words in images]
    block["shown"] = [None if one is None else images[one] for one in shown]  # index in `images`
    parts = [row["reward_parts"] if isinstance(row.get("reward_parts"), dict) else {} for row in rows]
    names = islice(dict.fromkeys(name for part in parts for name in part), MAX_PARTS)
    block["parts"] = {name: [finite_number(part.get(name)) for part in parts] for name in names}
    block["turns"] = [_turns(row.get("turns")) for row in rows]
    block["tokens"] = _tokens(run, step, rows) if kind == "samples" else {}
    return block


def _turns(spans: Any) -> list[tuple[bool, str]] | None:
    """The turns of an episode as (is from the environment, text); null for a plain completion."""
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        return None
    return [(span.get("by") == "environment", _text(span.get("text")) or "") for span in spans]


def _tokens(run: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per-token values of the sequences that have them: id, text, log-ratio against the sampler, entropy."""
    file = run / "samples" / f"step_{step:06d}.safetensors"
    if not file.is_file():
        return {}
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(file)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError):  # deleted meanwhile, or damaged
        return {}
    pieces = {str(row.get("sequence")): row.get("pieces") for row in rows}
    out: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name.partition("/")[0] for name in tensors):
        names = [f"{name}/{what}" for what in ("tokens", "behavior_logp", "logp", "entropy")]
        # Skip incomplete or damaged entries instead of failing the whole page.
        if any(each not in tensors or tensors[each].ndim != 1 for each in names):
            continue
        ids, behavior, logp, entropy = (tensors[each] for each in names)
        if not len(ids) == len(behavior) == len(logp) == len(entropy):
            continue
        texts = pieces.get(name)
        known = isinstance(texts, list) and len(texts) == len(ids) and all(isinstance(text, str) for text in texts)
        out[name] = {
            "id": np.nan_to_num(ids).astype(np.int64).tolist(),
            "text": texts if known else None,
            "logp": _rounded(logp),
            "ratio": _rounded(logp.astype(np.float64) - behavior),
            "entropy": _rounded(entropy),
        }
    return out


def _rounded(values: NDArray[Any]) -> list[float | None]:
    rounded = np.round(values.astype(np.float64), 6)
    return [value if finite else None for value, finite in zip(rounded.tolist(), np.isfinite(rounded), strict=True)]


def finite_number(value: Any) -> float | None:
    """A finite number with six significant digits; anything else is null.

    >>> [finite_number(value) for value in (0.123456789, float("nan"), True, "1")]
    [0.123457, None, None, None]
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(f"{value:.6g}")


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""Is the reward what its author means? Scores answers whose value is known, before any training.

For some rows, these answers are scored: the reference, nothing, another row's reference, the first half of the
reference, and the reference without its final answer (format only). `diagnose` says what is wrong with the scores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gspo.rewards.call import RewardItem
from gspo.rewards.route import Rewards
from gspo.types import Failure, Outcome, Prompt, Score

REFERENCE, EMPTY, OTHER, TRUNCATED, FORMAT = ANSWERS = (
    "reference", "empty", "another row's", "truncated", "format only",
)  # fmt: skip
WORKED = ("solution", "completion", "response", "output")  # columns with an answer as a model should write it
SLOW_S = 1.0  # per call; a batch has hundreds


class RewardProblem(NamedTuple):
    """What is wrong with a reward, in words.

    is_fatal: training by it makes no sense; is_open: the reward was not checked, and may be right.
    """

    text: str
    is_fatal: bool
    is_open: bool = False


@dataclass(frozen=True)
class AnswerScores:
    """The scores of one kind of answer."""

    answer: str
    scores: list[float | None]  # by row; None: the reward failed
    texts: list[str]
    failures: list[Failure]
    seconds: float  # per call

    @property
    def mean(self) -> float | None:
        known = [score for score in self.scores if score is not None]
        return sum(known) / len(known) if known else None


def answer_forms(prompt: Prompt, markers: Sequence[str] = (">",)) -> list[str]:
    """The right answer in the forms that rewards read, the most complete first; empty if the row has no answer.

    markers: what stands before an answer (`final`) or before each word of it (`finals`).
    """
    if prompt.answer is None:
        return []
    columns = [prompt.data.get(name) for name in (*WORKED, "answer")]
    short = str(prompt.answer)
    written = [text for text in columns if isinstance(text, str) and text.strip()]
    marked = [form for m in markers for form in (m + short, " ".join(m + word for word in short.split()))]
    return list(dict.fromkeys([*written, f"\\boxed{{{short}}}", f"#### {short}", *marked, short]))


def check_reward(
    prompts: Sequence[Prompt],
    rewards: Rewards,
    *,
    markers: Sequence[str] = (">",),
    encode: Callable[[str], Sequence[int]] = str.encode,
    until_failure: bool = False,
) -> list[AnswerScores]:
    """Score the answers of `ANSWERS` for these rows; rows without a known answer have the empty one only.

    until_failure: stop after the first kind of answer at which the reward failed, and begin with one call, so that a
    reward that hangs or always fails costs one timeout.
    """
    known = [prompt for prompt in prompts if answer_forms(prompt)]
    lines: list[AnswerScores] = []
    if known:
        # The form of a row that earns most is its reference: which forms a reward reads is its own matter.
        forms = [answer_forms(prompt, markers) for prompt in known]
        if until_failure:
            scored, seconds = _score(known[:1], [forms[0][:1]], rewards, encode)
            if isinstance(scored[0][0], Failure):
                return [_line(REFERENCE, scored[0], forms[0][:1], seconds)]
        scored, seconds = _score(known, forms, rewards, encode)
        best = [max(zip(row, texts, strict=True), key=_value) for row, texts in zip(scored, forms, strict=True)]
        outcomes, texts = [outcome for outcome, _ in best], [text for _, text in best]
        lines.append(_line(REFERENCE, outcomes, texts, seconds / max(sum(map(len, forms)), 1)))
    references = lines[0].texts if lines else []
    others = {
        EMPTY: [""] * len(prompts),
        OTHER: [_other(known, references, i) for i in range(len(known))],
        TRUNCATED: [text[: len(text) // 2] for text in references],
        FORMAT: [_without_answer(text, prompt) for text, prompt in zip(references, known, strict=True)],
    }
    for answer, texts in others.items():
        if not texts or (until_failure and any(line.failures for line in lines)):
            continue
        rows = prompts if answer == EMPTY else known
        scored, seconds = _score(rows, [[text] for text in texts], rewards, encode)
        lines.append(_line(answer, [row[0] for row in scored], texts, seconds / len(texts)))
    return lines


def _score(
    prompts: Sequence[Prompt], texts: Sequence[Sequence[str]], rewards: Rewards, encode: Callable[[str], Sequence[int]]
) -> tuple[list[tuple[Outcome, ...]], float]:
    """Outcomes by row and text, and the seconds that all of them took."""
    begin = time.perf_counter()
    for number, (prompt, row) in enumerate(zip(prompts, texts, strict=True)):
        item = RewardItem(
            prompt.text,
            tuple(row),
            prompt_ids=prompt.tokens,
            completion_ids=tuple(tuple(encode(text)) for text in row),
            data=prompt.data,
            reference=prompt.reference,
            messages=prompt.messages,
            source=prompt.source,
        )
        rewards.submit(number, item)
    found: Mapping[Any, tuple[Outcome, ...]] = dict(rewards.completed())
    return [found[number] for number in range(len(prompts))], time.perf_counter() - begin


def _line(answer: str, outcomes: Sequence[Outcome], texts: Sequence[str], seconds: float) -> AnswerScores:
    scores = [outcome.value if isinstance(outcome, Score) else None for outcome in outcomes]
    return AnswerScores(answer, scores, list(texts), [o for o in outcomes if isinstance(o, Failure)], seconds)


def _value(scored: tuple[Outcome, str]) -> float:
    return scored[0].value if isinstance(scored[0], Score) else -math.inf


def _other(prompts: Sequence[Prompt], references: Sequence[str], row: int) -> str:
    """The reference of the next row that has another answer; nothing if all have the same."""
    for step in range(1, len(prompts)):
        at = (row + step) % len(prompts)
        if prompts[at].answer != prompts[row].answer:
            return references[at]
    return ""


def _without_answer(text: str, prompt: Prompt) -> str:
    """The reference without its final answer: `#### 72` → `#### `."""
    answer = str(prompt.answer)
    head, found, tail = text.rpartition(answer)
    return head + tail if found else ""


def diagnose(lines: Sequence[AnswerScores], timeout_s: float) -> list[RewardProblem]:
    """What is wrong, the most serious first; empty: nothing was found."""
    by_answer = {line.answer: line for line in lines}
    found = list(_failures(lines))
    reference = by_answer.get(REFERENCE)
    all_scores = [score for line in lines for score in line.scores if score is not None]
    is_constant = len(lines) > 1 and len(all_scores) > 1 and len(set(all_scores)) == 1
    if is_constant and all_scores[0] > 0:  # if all are 0, the likely cause is that nothing is parsed
        found.append(RewardProblem(f"every answer earns {all_scores[0]:g}: the reward is constant", True))
    elif reference is not None and reference.mean is not None:
        found += _reference(reference)
        found += [problem for line in lines[1:] for problem in _compared(line, reference)]
    slow = max((line.seconds for line in lines), default=0.0)
    if slow > min(SLOW_S, timeout_s / 2):
        found.append(
            RewardProblem(f"a call takes {slow:.1f} s; a batch has hundreds (reward.timeout is {timeout_s:g})", False)
        )
    return found


def _failures(lines: Sequence[AnswerScores]) -> list[RewardProblem]:
    failures = [failure for line in lines for failure in line.failures]
    if not failures:
        return []
    total, named = sum(len(line.scores) for line in lines), ", ".join(line.answer for line in lines if line.failures)
    first = failures[0].message.partition("\n")[0]
    what = f"the reward failed on {len(failures)} of {total} answers ({named}): {failures[0].kind}: {first}"
    return [RewardProblem(what, len(failures) == total)]


def _reference(reference: AnswerScores) -> list[RewardProblem]:
    """Rows whose right answer earns nothing, or less than that of other rows."""
    known = [(score, text) for score, text in zip(reference.scores, reference.texts, strict=True) if score is not None]
    best = max(score for score, _ in known)
    bad = [text for score, text in known if score <= 0]
    if best < 0:  # such as −|length − 20|
        return [
            RewardProblem(f"no reference answer earns more than {best:g}: right if every reward is negative", False)
        ]
    if best == 0:
        # The reward may be right and read a form that was not tried, so this proves nothing.
        text = f"the reference could not be checked: no form of it earns more than 0, such as {_shown(known[0][1])}; "
        text += f"if the reward reads another form, show it in a column {WORKED[0]!r}"
        return [RewardProblem(text, False, is_open=True)]
    if not bad:
        return []
    share = len(bad) / len(known)
    return [
        RewardProblem(f"the reference answer earns 0 on {share:.0%} of rows: {_shown(bad[0])} is not parsed", False)
    ]


def _compared(line: AnswerScores, reference: AnswerScores) -> list[RewardProblem]:
    """An answer that should earn less than the reference."""
    right, mean = reference.mean, line.mean
    if right is None or mean is None or right <= 0 or mean < right / 2:
        return []
    words = {
        EMPTY: "an empty answer earns {mean} (the reference {right}): saying nothing is rewarded",
        OTHER: "another row's answer earns {mean} (the reference {right}): the reward does not compare with the answer",
        TRUNCATED: "the first half of the reference earns {mean} (the whole {right})",
        FORMAT: "the reference without its final answer earns {mean} (with it {right}): the format alone is rewarded",
    }
    text = words[line.answer].format(mean=f"{mean:.3g}", right=f"{right:.3g}")
    # Half of a text may contain the whole answer, so a truncated answer proves nothing by itself.
    return [RewardProblem(text, mean >= right and line.answer in (EMPTY, OTHER))]


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else "…" + text[-59:])

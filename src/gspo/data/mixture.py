"""Several data sets as one, drawn by weight. Each prompt has the name of its source, which selects its reward.

The order is a function of (seed, submission): a counter-based draw picks the source, and the number of earlier draws of
that source is the position in the source's own shuffled stream. There is no state to save for a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from gspo.data.columns import draw_source, order
from gspo.data.dataset import Dataset
from gspo.errors import DataError
from gspo.types import Prompt


@dataclass(frozen=True)
class Mixture:
    """Data sets with weights; has the methods of a `Dataset`.

    Rows are numbered by weight, too: the first N rows hold the sources in their proportions, so that an evaluation on N
    rows includes all of them. An epoch has as many prompts as all sources have rows.
    """

    sources: tuple[Dataset, ...]
    weights: tuple[float, ...]
    names: tuple[str, ...]
    key: str = "train_dataset"
    _prompts: dict[int, Prompt] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    @property
    def source(self) -> str:
        return " + ".join(self.names)

    @property
    def split(self) -> str:
        return self.sources[0].split

    @property
    def num_too_long(self) -> int:
        return sum(source.num_too_long for source in self.sources)

    @property
    def supervised(self) -> bool:
        return self.sources[0].supervised

    def prompt(self, row: int) -> Prompt:
        if row not in self._prompts:
            source, own = (int(x) for x in self._places[row])
            self._prompts[row] = replace(self.sources[source].prompt(own), source=self.names[source])
        return self._prompts[row]

    def excess(self, row: int, limit: int) -> str:
        """As `Dataset.excess`."""
        source, own = (int(x) for x in self._places[row])
        return self.sources[source].excess(own, limit)

    def row_of(self, seed: int, submission: int, *, shuffle: bool = True) -> int:
        """The row of submission number `submission`; the stream of submissions is endless."""
        source, position = draw_source(seed, self.weights, submission)
        # Another seed per source: sources of equal size would otherwise have the same order.
        own = order(seed + source, len(self.sources[source]), position, shuffle=shuffle)
        return int(self._numbers[source][own])

    def candidates(self, seed: int, submission: int) -> np.ndarray:
        """The rows that a curriculum may give a submission: those of its source, which the weights decide."""
        return self._numbers[draw_source(seed, self.weights, submission)[0]]

    def describe(self) -> str:
        """A line for each source."""
        total = sum(self.weights)
        return "\n".join(
            f"{source.describe()}, {100 * weight / total:.3g} % of prompts as {name}"
            for source, weight, name in zip(self.sources, self.weights, self.names, strict=True)
        )

    def digest(self) -> str:
        total = hashlib.sha256()
        for source, weight, name in zip(self.sources, self.weights, self.names, strict=True):
            total.update(f"{name} {weight!r} {source.digest()}".encode())
        return total.hexdigest()

    @cached_property
    def _places(self) -> np.ndarray:
        """[rows, 2]: source number and row in the source, for each row of the mixture."""
        sizes = [len(source) for source in self.sources]
        # places: [rows, 2]. Sort by (row + ½) / weight, so that a source with twice the weight appears twice as often
        # among the first rows. Ties are ordered by source.
        places = np.concatenate([np.column_stack((np.full(n, k), np.arange(n))) for k, n in enumerate(sizes)])
        weights = np.asarray(self.weights)
        return places[np.lexsort((places[:, 0], (places[:, 1] + 0.5) / weights[places[:, 0]]))]

    @cached_property
    def _numbers(self) -> list[np.ndarray]:
        """For each source: the row in the mixture for each of its rows."""
        return [np.flatnonzero(self._places[:, 0] == k) for k in range(len(self.sources))]


def make_mixture(
    sources: Sequence[Dataset],
    weights: Sequence[float] = (),
    names: Sequence[str | None] = (),
    key: str = "train_dataset",
) -> Mixture:
    """A mixture of loaded data sets; default weights are equal, default names are the last part of the path."""
    if not sources:
        raise DataError(f"{key}.mixture is empty; give at least one source, or set {key}.path")
    weights = tuple(float(w) for w in weights or [1.0] * len(sources))
    if len(weights) != len(sources) or not all(np.isfinite(w) and w > 0 for w in weights):
        raise DataError(f"{key}.mixture needs one positive weight per source ({len(sources)}), got {list(weights)}")
    return Mixture(tuple(sources), weights, distinct_names([s.source for s in sources], names), key)


def distinct_names(paths: Sequence[str], names: Sequence[str | None] = ()) -> tuple[str, ...]:
    """Names of sources in metrics: the given name, or the last part of the path; duplicates become `name#2`.

    >>> distinct_names(["openai/gsm8k", "reasoning_gym:chain_sum", "data/a.jsonl", "b/gsm8k", "embedded:arithmetic:2"])
    ('gsm8k', 'chain_sum', 'a', 'gsm8k#2', 'arithmetic:2')
    """
    chosen: list[str] = []
    for index, path in enumerate(paths):
        given = names[index] if index < len(names) else None
        # `reasoning_gym:task` → task; for paths, the last part without its extension.
        short = path.partition(":")[2] or path
        if ":" not in path:
            short = path.rstrip("/").rpartition("/")[2]
            short = short.rpartition(".")[0] or short
        name, copies = given or short, 2
        while name in chosen:
            name, copies = f"{given or short}#{copies}", copies + 1
        chosen.append(name)
    return tuple(chosen)


Data = Dataset | Mixture
DATA_TYPES: Any = (Dataset, Mixture)  # for isinstance

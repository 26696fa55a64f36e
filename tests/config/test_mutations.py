"""Two hundred damaged configs: each loads or is refused with a ConfigError; nothing else ever comes out."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from areal_files import NEW, OLD

from gspo.config import dump, effective_objective, load
from gspo.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples" / "math"
VALUES = [
    "null",
    "true",
    "-1",
    "0",
    "1e309",
    ".nan",
    "[]",
    "{}",
    "[1, [2]]",
    "{a: 1}",
    "''",
    "x",
    "${seed}",
    "${",
    "*a",
]
VALUES += ["!!python/name:os.system x", "&a 1", "9" * 400, "1:2:3", "0o17", "~", "- 1", "|", "'", "\ud7ff", "${actor}"]
KEYS = [
    "zzz: 1",
    "actor: 3",
    "<<: *a",
    "? [1]",
    "1: 2",
    "true: x",
    "null: y",
    "a.b.c: 1",
    "'': 1",
    "\tx: 1",
    "- y",
    "--- ",
]


def deleted(rng, lines):
    del lines[rng.randrange(len(lines))]


def doubled(rng, lines):
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))


def flipped(rng, lines):
    chosen = rng.choice([n for n, line in enumerate(lines) if ":" in line])
    lines[chosen] = lines[chosen].split(":")[0] + ": " + rng.choice(VALUES)


def added(rng, lines):
    at = rng.randrange(len(lines))
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    lines.insert(at, indent + rng.choice(KEYS))


def shifted(rng, lines):
    at = rng.randrange(len(lines))
    lines[at] = rng.choice(["  ", " ", "\t", "        "]) + lines[at]


def misspelled(rng, lines):
    at = rng.choice([n for n, line in enumerate(lines) if ":" in line])
    spot = rng.randrange(len(lines[at]) + 1)
    lines[at] = lines[at][:spot] + rng.choice("abcxyz_:#{}[]\"'&*!%@`$,") + lines[at][spot + rng.randrange(2) :]


MUTATIONS = [deleted, doubled, flipped, flipped, added, shifted, misspelled, misspelled]


def mutant(seed: int) -> bytes:
    rng = random.Random(seed)
    sources = [OLD, NEW, *(path.read_text() for path in sorted(EXAMPLES.glob("*.yaml")))]
    lines = rng.choice(sources).splitlines()
    for _ in range(rng.randint(1, 2)):
        rng.choice(MUTATIONS)(rng, lines)
    raw = "\n".join(lines).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        raw = raw[: rng.randrange(len(raw))]
    if rng.random() < 0.15:
        spot = rng.randrange(len(raw) + 1)
        raw = raw[:spot] + rng.randbytes(rng.randint(1, 8)) + raw[spot:]
    return raw


def outcome(path: Path) -> str:
    """What came of one file; anything but success and ConfigError fails the test by itself."""
    try:
        loaded = load(path)
    except ConfigError as error:
        return "refused" if str(error) else "refused without a word"
    effective_objective(loaded)
    path.write_text(dump(loaded), encoding="utf-8")
    assert load(path).config == loaded.config
    return "loaded"


def test_two_hundred_mutants_load_or_are_refused(tmp_path):
    path = tmp_path / "mutant.yaml"
    outcomes = []
    for seed in range(200):
        path.write_bytes(mutant(seed))
        outcomes.append(outcome(path))
    assert set(outcomes) == {"loaded", "refused"}
    # The mutations bite, but not all of them are deadly.
    assert 50 <= outcomes.count("refused") <= 180


@pytest.mark.parametrize("size", [1, 10, 100, 1000])
def test_random_bytes_are_refused_or_empty(tmp_path, size):
    rng = random.Random(size)
    path = tmp_path / "noise.yaml"
    for _ in range(25):
        path.write_bytes(rng.randbytes(size))
        outcome(path)


def test_mutated_overrides_never_give_a_traceback():
    rng = random.Random(5)
    seeds = ["actor.eps_clip=3e-4", "+gconfig.n_samples=4", "~ref", "vllm={a: [1, 2]}", "seed=${gconfig.n_samples}"]
    refused = 0
    for _ in range(300):
        text = list(rng.choice(seeds))
        for _ in range(rng.randint(1, 3)):
            text[rng.randrange(len(text))] = rng.choice("aB.=+~{}[]:$,'\" \t\n\0é&*!")
        try:
            load(None, ["".join(text)])
        except ConfigError:
            refused += 1
    assert refused > 100

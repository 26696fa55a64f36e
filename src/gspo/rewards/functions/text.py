"""Rewards for translations, summaries and other texts: likeness to a reference, and limits that a text has to keep.

`rouge`, `chrf` and `bleu` compare with the reference by the field's own libraries (extra `text`); 1.0 is equal. The
limits `language`, `length`, `repetition` and `overlap` give 1.0 to a text that keeps them, and less to one that does
not: they are meant as gates (`gate: true`) or as small terms of the sum. The settings come from the config only: a
column of the row that has the name of a setting is not one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

# The codes of py3langid 0.4.
_LANGUAGES = """
ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa fi fo fr fuv fy ga
gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka kab kik kk km kn ko ku ky la lb lg lij ln
lo lt ltg lv mg mk ml mn mr ms mt my ne nl nn no nso oc om or pa pcm pl ps pt qu ro ru rw sa sdh se si sk sl sn so sq sr
st sv sw ta te tg th tk tl tr tt ug uk ur uz uzs vec vi vo wa wuu xh yo yue zh zu zxx
"""
LANGUAGES = frozenset(_LANGUAGES.split())
_WORD = re.compile(r"\w+")
_UNITS = ("words", "characters", "tokens")


def rouge(
    text: str, *, answer: Any, kind: str = "rougeL", measure: str = "fmeasure", stemmer: bool = True, **_: Any
) -> float:
    """ROUGE by rouge-score; with several references the best one. It compares words of a–z and 0–9 only.

    kind: rouge1 … rouge9, rougeL, rougeLsum; measure: fmeasure, precision or recall; stemmer: compare English stems.
    """
    references = _references(answer)
    for reference in references:
        if not re.search("[a-z0-9]", reference.lower()):
            raise ValueError(
                f"the reference {reference[:80]!r} has no word of a–z or 0–9, and ROUGE compares no others: use chrf"
            )
    scorer = _rouge(kind, stemmer)
    return max(float(getattr(scorer.score(reference, text)[kind], measure)) for reference in references)


def chrf(
    text: str,
    *,
    answer: Any,
    char_order: int = 6,
    word_order: int = 0,
    beta: int = 2,
    lowercase: bool = False,
    **_: Any,
) -> float:
    """chrF of one completion by sacrebleu, divided by 100; `word_order: 2` is chrF++."""
    return _chrf(char_order, word_order, beta, lowercase).sentence_score(text, _references(answer)).score / 100


def bleu(
    text: str, *, answer: Any, tokenize: str = "13a", max_order: int = 4, lowercase: bool = False, **_: Any
) -> float:
    """BLEU of one completion by sacrebleu (exponential smoothing, effective order), divided by 100."""
    # Rounding: equal texts give 100.00000000000004.
    score = _bleu(tokenize, max_order, lowercase).sentence_score(text, _references(answer)).score
    return min(score / 100, 1.0)


def language(text: str, *, to: str, among: Sequence[str] = (), **_: Any) -> float:
    """1.0 if py3langid finds the text to be in the language `to`, among all languages or those in `among`.

    Use it for sentences: of five words and fewer every tenth is taken for another language. `among` helps there.
    """
    if not any(character.isalpha() for character in text):
        return 0.0  # py3langid would return the first language of its list
    return float(_identifier(tuple(among)).classify(text)[0] == to)


def length(
    text: str,
    *,
    least: float = 0,
    most: float | None = None,
    margin: float = 0,
    unit: str = "words",
    num_tokens: int | None = None,
    **_: Any,
) -> float:
    """1.0 for a length of `least` to `most`; outside it falls to 0.0, linearly over `margin` (0: at once).

    unit: words, characters (without spaces) or tokens, which include the end token.

    >>> [length("a b c d", most=most, margin=2) for most in (4, 3, 2)]
    [1.0, 0.5, 0.0]
    """
    if unit == "tokens":
        if num_tokens is None:
            raise ValueError("length in tokens needs the token ids of the completion")
        count = num_tokens
    else:
        count = len(_pieces(text, unit))
    outside = max(least - count, 0 if most is None else count - most, 0)
    return max(0.0, 1.0 - outside / margin) if margin else float(outside == 0)


def repetition(text: str, *, n: int = 3, most: float = 0.0, unit: str = "words", **_: Any) -> float:
    """1.0 while at most the share `most` of the n-grams repeats an earlier one, then linearly to 0.0 for all of them.

    >>> repetition("a b c a b c", n=3), repetition("a b a b a b a b", n=2), repetition("a b a b", n=2, most=0.5)
    (0.75, 0.2857142857142857, 1.0)
    """
    grams = _grams(_pieces(text, unit), n)
    return _within(1 - len(set(grams)) / len(grams) if grams else 0.0, most)


def overlap(
    text: str, *, column: str = "prompt", n: int = 2, most: float = 0.0, unit: str = "words", **columns: Any
) -> float:
    """1.0 while at most the share `most` of the n-grams also stands in `column`, then linearly to 0.0 for a copy.

    A text of fewer than n words is compared as a whole.

    >>> [overlap(text, source="le chat noir", column="source", n=1) for text in ("the cat", "the chat", "le chat")]
    [1.0, 0.5, 0.0]
    """
    source = columns.get(column)
    if not isinstance(source, str):
        found = "is no text" if column in columns else "does not exist"
        raise ValueError(
            f"the column {column!r} {found} in this row; its columns are {', '.join(map(str, sorted(columns)))}"
        )
    pieces = _pieces(text, unit)
    size = min(n, len(pieces))
    grams, known = _grams(pieces, size), set(_grams(_pieces(source, unit), size))
    return _within(sum(gram in known for gram in grams) / len(grams) if grams else 0.0, most)


def _references(answer: Any) -> list[str]:
    references = list(answer) if isinstance(answer, list | tuple) else [answer]
    if not references or not all(isinstance(one, str) and one.strip() for one in references):
        raise ValueError(f"the reference {str(answer)[:80]!r} is not a text, or a list of texts, to compare with")
    return references


def _pieces(text: str, unit: str) -> list[str]:
    text = text.casefold()
    return _WORD.findall(text) if unit == "words" else [character for character in text if not character.isspace()]


def _grams(pieces: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return list(zip(*(pieces[start:] for start in range(n)), strict=False)) if n else []


def _within(share: float, most: float) -> float:
    return 1.0 if share <= most else (1 - share) / (1 - most)


# One object for each set of settings: making one takes longer than a score.
@lru_cache(maxsize=16)
def _rouge(kind: str, stemmer: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=stemmer)


@lru_cache(maxsize=16)
def _chrf(char_order: int, word_order: int, beta: int, lowercase: bool) -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(char_order=char_order, word_order=word_order, beta=beta, lowercase=lowercase)


@lru_cache(maxsize=16)
def _bleu(tokenize: str, max_order: int, lowercase: bool) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(tokenize=tokenize, max_ngram_order=max_order, lowercase=lowercase, effective_order=True)


@lru_cache(maxsize=16)
def _identifier(among: tuple[str, ...]) -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    if among:
        identifier.set_languages(among)
    return identifier


def warm_up(name: str, settings: Mapping[str, Any]) -> None:
    """Load what a reward needs before its first call, which has the time limit of a call. Reads 4 MB for `language`."""
    if name == "language":
        _identifier(tuple(settings.get("among", ())))


def invalid_setting(name: str, settings: Mapping[str, Any]) -> str | None:
    """What is wrong with a setting of a reward of this file, or None.

    >>> invalid_setting("language", {"to": "french"})
    "to must be a language code such as en, fr or de, got 'french'; did you mean 'fr'?"
    """
    for setting, value in settings.items():
        is_valid, must = _RULES[name][setting]
        if not is_valid(value):
            near = (
                get_close_matches(value[:2].lower(), LANGUAGES, 1) if setting == "to" and isinstance(value, str) else ()
            )
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"{setting} must be {must}, got {value!r}{hint}"
    least, most = settings.get("least", 0), settings.get("most")
    if name == "length" and not least and most is None:
        return "least and most are not set; set one of them or both"
    if name == "length" and most is not None and most < least:
        return f"most must not be below least ({least}), got {most}"
    if settings.get("among") and settings["to"] not in settings["among"]:
        return f"among must contain to ({settings['to']!r}), got {settings['among']!r}"
    return None


Rule = tuple[Callable[[Any], bool], str]


def _number(low: float, high: float, kind: type = int, below: bool = False) -> Rule:
    """A number in low…high (`below`: high excluded); a bool is none."""
    types = (int,) if kind is int else (int, float)

    def is_valid(value: Any) -> bool:
        return type(value) in types and low <= value <= high and not (below and value == high)

    what = "a whole number" if kind is int else "a number"
    return is_valid, f"{what} from {low:g} to {'below ' * below}{high:g}"


def _one_of(*values: Any) -> Rule:
    return (lambda value: value in values), f"one of {', '.join(map(str, values))}"


_TEXT: Rule = (lambda value: isinstance(value, str) and bool(value), "the name of a column")
_FLAG: Rule = (lambda value: isinstance(value, bool), "true or false")
_SIZE = _number(0, 1e9, float)
_SHARE = _number(0, 1, float, below=True)
_CODE: Rule = (lambda value: isinstance(value, str) and value in LANGUAGES, "a language code such as en, fr or de")
_CODES: Rule = (
    lambda value: isinstance(value, list | tuple) and bool(value) and all(map(_CODE[0], value)),
    "a list of language codes such as [en, fr]",
)
_RULES: dict[str, dict[str, Rule]] = {
    "rouge": {
        "kind": _one_of(*(f"rouge{n}" for n in range(1, 10)), "rougeL", "rougeLsum"),
        "measure": _one_of("fmeasure", "precision", "recall"),
        "stemmer": _FLAG,
    },
    "chrf": {
        "char_order": _number(1, 20),
        "word_order": _number(0, 20),
        "beta": _number(1, 20),
        "lowercase": _FLAG,
    },
    # The other tokenizers of sacrebleu need further packages or a download.
    "bleu": {
        "tokenize": _one_of("13a", "intl", "zh", "char", "none"),
        "max_order": _number(1, 9),
        "lowercase": _FLAG,
    },
    "language": {"to": _CODE, "among": _CODES},
    "length": {"least": _SIZE, "most": _SIZE, "margin": _SIZE, "unit": _one_of(*_UNITS)},
    "repetition": {"n": _number(1, 20), "most": _SHARE, "unit": _one_of(*_UNITS[:2])},
    "overlap": {"column": _TEXT, "n": _number(1, 20), "most": _SHARE, "unit": _one_of(*_UNITS[:2])},
}

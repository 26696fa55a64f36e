"""Descriptions of Debian's packages: summaries (paragraph → synopsis) and translations (sentence → sentence).

The index of a release, InRelease, is signed and names the sha256 of the description files, main/i18n/Translation-*. A
description is under the licence of its package (`debian/copyright`); the index files state none of their own.
"""

from __future__ import annotations

import bz2
import lzma
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from gspo.errors import DataError
from registries.download import small_file, verified_file

MIRROR = "http://deb.debian.org/debian"  # plain HTTP, as apt does: the signature is what counts
SUITE = "bookworm"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Languages that part words by spaces and sentences by full stops; the name is used in the prompt.
NAMES = {
    "cs": "Czech", "da": "Danish", "de": "German", "en": "English", "es": "Spanish", "fi": "Finnish", "fr": "French",
    "hu": "Hungarian", "it": "Italian", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese",
    "pt_BR": "Brazilian Portuguese", "ru": "Russian", "sk": "Slovak", "sv": "Swedish", "uk": "Ukrainian",
}  # fmt: skip
DOCUMENT_WORDS, SYNOPSIS_WORDS, SENTENCE_WORDS = (20, 45), (4, 12), (4, 16)
HELD_OUT = 5  # per cent
MAX_UNPACKED = 256 * 2**20  # of descriptions; a language has at most 40 MB
TASK = "Summarize this in one short line, at most ten words:\n\n{}"
LICENCE = (
    "each description is under the licence of its Debian package (debian/copyright; all of main is DFSG-free); the "
    "index files state no licence of their own. Made for use on this machine"
)
_BOILERPLATE = re.compile(r"\b(?:this (?:\w+ )?package (?:contains|provides|includes|is)|dummy|transitional)\b", re.I)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-ZÀ-ÖØ-ÞА-Я])")
# What parts the packages of one family, which have much the same text: they are on one side of the split.
_PREFIX = re.compile(r"^(?:lib|python3?-|golang-|ruby-|node-|r-cran-|r-bioc-|haskell-|php-|fonts-|gir1\.2-|task-)+")


class Description(NamedTuple):
    package: str
    md5: str  # of the English text, in every language
    synopsis: str
    paragraphs: tuple[str, ...]  # "" in the place of a list or a verbatim paragraph


@dataclass(frozen=True)
class Release:
    """A verified index: the sha256 and size of its files, and its provenance."""

    files: Mapping[str, tuple[str, int]]
    facts: Mapping[str, Any]


Splits = dict[str, list[dict[str, Any]]]
Say = Callable[[str], None]


def summaries(*, say: Say, mirror: str = MIRROR, is_signed: bool = True) -> tuple[Splits, dict[str, Any]]:
    """Rows `document` → `answer`, with the prompt that asks for it."""
    release = read_release(mirror, is_signed, say)
    english, file = _descriptions(release, mirror, "en")
    rows, seen = list[dict[str, Any]](), set[str]()
    for one in english:
        document, synopsis = (one.paragraphs or ("",))[0], _plain_synopsis(one.synopsis)
        # Packages of one source share paragraphs or synopses: the first one is taken.
        if {document, synopsis.lower()} & seen or _BOILERPLATE.search(f"{one.synopsis} {document}"):
            continue
        if _fits(document, DOCUMENT_WORDS) and _fits(synopsis, SYNOPSIS_WORDS):
            seen |= {document, synopsis.lower()}
            row = {"prompt": TASK.format(document), "answer": synopsis, "document": document, "package": one.package}
            rows.append(row)
    rules = {"words of a document": list(DOCUMENT_WORDS), "words of a synopsis": list(SYNOPSIS_WORDS)}
    return _split(rows), {**release.facts, "sources": [file], "rules": rules, "licence": LICENCE}


def translations(pair: str, *, say: Say, mirror: str = MIRROR, is_signed: bool = True) -> tuple[Splits, dict[str, Any]]:
    """Rows `source` → `answer` of a pair such as fr-en, with a prompt that shows two translations before."""
    source, target = pair.split("-")
    release = read_release(mirror, is_signed, say)
    read = {code: _descriptions(release, mirror, code) for code in (source, target)}
    other = {one.md5: one for one in read[target][0]}
    pairs = [
        (one.package, *found)
        for one in read[source][0]
        if one.md5 in other
        for found in aligned(one.paragraphs, other[one.md5].paragraphs)
    ]
    rows, seen = list[dict[str, Any]](), set[str]()
    for package, text, answer in pairs:
        if {text, answer} & seen or text == answer or _BOILERPLATE.search(f"{text} {answer}"):
            continue
        seen |= {text, answer}
        rows.append({"prompt": "", "answer": answer, "source": text, "package": package})
    splits = _split(rows)
    # Two short training rows as examples, the same in every prompt, and not trained on.
    examples = sorted(splits["train"], key=lambda row: (abs(len(row["source"]) - 60), row["source"]))[:2]
    splits["train"] = [row for row in splits["train"] if row not in examples]
    shown = "".join(_shown(source, target, row["source"]) + f" {row['answer']}\n\n" for row in examples)
    for row in (row for part in splits.values() for row in part):
        row["prompt"] = shown + _shown(source, target, row["source"])
    rules = {
        "words of a sentence": list(SENTENCE_WORDS),
        "examples in the prompt": [row["package"] for row in examples],
    }
    files = [file for _, file in read.values()]
    return splits, {**release.facts, "sources": files, "rules": rules, "licence": LICENCE}


def _shown(source: str, target: str, text: str) -> str:
    return f"{NAMES[source]}: {text}\n{NAMES[target]}:"


def read_release(mirror: str, is_signed: bool, say: Say) -> Release:
    """Download InRelease, check its signature, and read which files it lists."""
    url = f"{mirror.rstrip('/')}/dists/{SUITE}/InRelease"
    say(f"reading the index {url}")
    content = small_file(url)
    if is_signed:
        text, signature = verified_text(content)
    else:
        text, signature = content.decode("utf-8", "replace"), "not checked (--unsigned)"
    say(f"signature: {signature}")
    fields = dict(re.findall(r"^(Origin|Codename|Version|Date): (.*)$", text, re.MULTILINE))
    section = re.search(r"^SHA256:\n((?: .*\n?)+)", text, re.MULTILINE)
    listed = re.findall(r"^ ([0-9a-f]{64}) +(\d+) (\S+)$", section[1] if section else "", re.MULTILINE)
    if not listed:
        raise DataError(f"{url} lists no files with their sha256; it is no index of a Debian release")
    files = {name: (digest, int(size)) for digest, size, name in listed}
    return Release(files, {"index": url, "release": fields, "signature": signature})


def verified_text(content: bytes) -> tuple[str, str]:
    """The signed text of InRelease and who signed it; DataError if the signature cannot be checked or is wrong."""
    gpgv = shutil.which("gpgv")
    if gpgv is None or not KEYRING.is_file():
        missing = "gpgv" if gpgv is None else str(KEYRING)
        raise DataError(
            f"the signature of Debian's index cannot be checked: {missing} is missing. Install the packages gpgv and "
            "debian-archive-keyring, or pass --unsigned: then only the sha256 of the index is checked, over plain HTTP"
        )
    with tempfile.TemporaryDirectory(prefix="gspo-fetch-") as scratch:
        signed, plain = Path(scratch) / "InRelease", Path(scratch) / "Release"
        signed.write_bytes(content)
        # --output: only what was signed is read, not text around it.
        command = [gpgv, "--keyring", str(KEYRING), "--output", str(plain), str(signed)]
        try:
            # wait: 60 s, gspo data fetch
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=60)
        except subprocess.TimeoutExpired:
            raise DataError("gpgv did not end within 60 s") from None
        who = re.findall(r'Good signature from "([^"]*)"', done.stderr)
        if done.returncode or not who or not plain.is_file():
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise DataError(
                f"the signature of Debian's index is wrong ({said:.200}). Nothing was stored; pass another --mirror"
            )
        return plain.read_text(encoding="utf-8", errors="replace"), f"good: {', '.join(who)}"


def _descriptions(release: Release, mirror: str, code: str) -> tuple[list[Description], dict[str, Any]]:
    """The descriptions of a language, and their source for the provenance."""
    for suffix in (".xz", ".bz2"):
        name = f"main/i18n/Translation-{code}{suffix}"
        if name in release.files:
            digest, size = release.files[name]
            # By hash: the mirror may be updated between the index and the file, and a partial file stays valid.
            url = f"{mirror.rstrip('/')}/dists/{SUITE}/main/i18n/by-hash/SHA256/{digest}"
            text = unpacked(verified_file(url, digest, size).read_bytes(), url, suffix).decode("utf-8", "replace")
            return list(parse_stanzas(text)), {"file": name, "url": url, "sha256": digest, "bytes": size}
    raise DataError(f"the index of {SUITE} has no descriptions in {NAMES[code]} (main/i18n/Translation-{code})")


def unpacked(content: bytes, url: str, suffix: str) -> bytes:
    """The content of an .xz or .bz2 file, which a few bytes can make as large as they like; DataError names it."""
    maker = lzma.LZMADecompressor(memlimit=MAX_UNPACKED) if suffix == ".xz" else bz2.BZ2Decompressor()
    try:
        found = maker.decompress(content, MAX_UNPACKED)
    except (lzma.LZMAError, OSError, EOFError, ValueError) as cause:
        raise DataError(f"{url} cannot be unpacked: {cause}; pass another --mirror") from cause
    if not maker.eof:
        why = "it is cut off" if maker.needs_input else f"it has more than {MAX_UNPACKED:,} bytes"
        raise DataError(f"{url} cannot be unpacked: {why}; pass another --mirror")
    return found


def parse_stanzas(text: str) -> Iterator[Description]:
    """The stanzas of a Translation file.

    >>> next(parse_stanzas("Package: a\\nDescription-md5: 1\\nDescription-fr: S\\n Un\\n deux.\\n .\\n  liste\\n"))
    Description(package='a', md5='1', synopsis='S', paragraphs=('Un deux.', ''))
    """
    for stanza in text.split("\n\n"):
        head, _, body = stanza.strip("\n").partition("\nDescription-")
        # Description-md5 comes before Description-xx.
        found = re.fullmatch(r"md5: (\w+)\nDescription-[\w@-]+: ([^\n]*)(?:\n(.*))?", body, re.DOTALL)
        package = re.search(r"^Package: (\S+)", head)
        if found and package:
            yield Description(package[1], found[1], found[2].strip(), tuple(_paragraphs(found[3] or "")))


def _paragraphs(text: str) -> Iterator[str]:
    for block in re.split(r"^ \.$", text, flags=re.MULTILINE):
        lines = block.strip("\n").split("\n")
        # Two spaces mark lists and verbatim lines; a bullet is a list, too.
        is_plain = all(re.match(r" [^\s*•-]", line) for line in lines)
        yield " ".join(" ".join(lines).split()) if is_plain else ""


def aligned(one: Sequence[str], other: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of sentences of two texts with equally many paragraphs, from paragraphs with equally many sentences.

    >>> list(aligned(["Un chat noir dort. Il ne rêve de rien."], ["A black cat sleeps. It dreams of nothing."]))
    [('Un chat noir dort.', 'A black cat sleeps.'), ('Il ne rêve de rien.', 'It dreams of nothing.')]
    """
    if len(one) != len(other):
        return
    for pair in zip(one, other, strict=True):
        left, right = (_SENTENCE_END.split(paragraph) for paragraph in pair)
        if len(left) == len(right):
            for a, b in zip(left, right, strict=True):
                is_near = 0.5 <= len(a) / max(len(b), 1) <= 2
                if is_near and _fits(a, SENTENCE_WORDS) and _fits(b, SENTENCE_WORDS) and a[-1] in ".!?":
                    yield a, b


def _plain_synopsis(synopsis: str) -> str:
    """Without brackets and what follows a dash, which say what the paragraph does not: "… - daemon (64 bit)"."""
    return re.sub(r"\s*[(\[].*?[)\]]", "", synopsis.partition(" - ")[0]).strip()


def _fits(text: str, words: tuple[int, int]) -> bool:
    return words[0] <= len(text.split()) <= words[1]


def family(package: str) -> str:
    """What the names of the packages of one family have in common.

    >>> family("libreoffice-writer"), family("python3-numpy-dev"), family("libnumpy2")
    ('reoffice', 'numpy', 'numpy')
    """
    return re.split(r"[-.+]|(?<=\D)\d", _PREFIX.sub("", package) or package)[0]


def _split(rows: Sequence[dict[str, Any]]) -> Splits:
    """Held-out rows by a hash of the package's family: similar texts are on one side."""
    splits: Splits = {"train": [], "test": []}
    for row in rows:
        draw = int.from_bytes(sha256(family(row["package"]).encode()).digest()[:4], "big") % 100
        splits["test" if draw < HELD_OUT else "train"].append(row)
    return splits

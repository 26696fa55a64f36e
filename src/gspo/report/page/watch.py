"""`gspo watch`: a server on this machine for the report's page, which it updates while the run continues.

It reads run directories and writes nothing. It listens on loopback and answers only GET requests whose path begins with
its token; anything else is a 4xx. The page sends what it has (rows, sample steps) and gets what is new. If a resume cut
the run back, the reply has a new generation and the page starts over.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import Response

from gspo.errors import ConfigError
from gspo.report.cards import clip_story
from gspo.report.page.data import config_of, high_over_low, metric_table, overview
from gspo.report.page.page import BUDGET, html_page, inert_json
from gspo.report.read import Row, is_by_sequence, is_run, score_text, status_of
from gspo.report.samples import Kind, Signature, choose_files, pictures, read_block, sample_steps, size_of
from gspo.report.summary import change_text, summary_of
from gspo.system import HttpServer, parse_json, route

Doctor = Callable[[Path], Any]  # what `gspo doctor` prints about a run's config; report/ cannot import it
ANSWER = 4_000_000  # bytes of sample files in one reply: the page shows something soon and asks again
CONNECTIONS = 128
IDLE_S = 10.0  # a connection may be silent this long


class LiveRun:
    """What is known of one run: rows read so far, and which sample files were seen when.

    `generation` changes when what was read is no longer what the file begins with; `mark` counts changes of sample
    files, so that "all after mark 17" is a question without a list.
    """

    def __init__(self, run: Path, doctor: Doctor) -> None:
        self.run, self._doctor = run, doctor
        self._lock = threading.Lock()  # wait: none, held for reading new lines of regular files
        self._explained: tuple[Any, Row, Any] = (None, {}, None)  # config.yaml's signature, its values, doctor's words
        self._generation = secrets.randbits(30) << 10  # a page that outlives its server starts over
        self._forget()

    def _forget(self) -> None:
        self._generation += 1
        self._read = 0  # bytes of metrics.jsonl
        self._tail = b""  # the last line read: it tells a file that was cut and grew again
        self._rows: list[Row] = []
        self._seen: dict[tuple[Kind, int], tuple[Signature, int]] = {}  # (folder, step) → files, mark
        self._stories: dict[int, dict[str, Any]] = {}  # step → clipping of its samples
        self._gone: dict[tuple[Kind, int], int] = {}  # (folder, step) → mark
        self._mark = 0

    def news(self, generation: int | None, num_rows: int, mark: int) -> dict[str, Any]:
        """What is new to a page that has `num_rows` rows and everything up to `mark` of that generation."""
        with self._lock:
            self._follow_metrics()
            self._follow_samples()
            # The page knows another state of the files (a resumed run, a restarted server): send everything again.
            if generation != self._generation or num_rows > len(self._rows) or mark > self._mark:
                num_rows = mark = 0
            due = sorted((at, which) for which, (_, at) in self._seen.items() if at > mark)
            sent: list[tuple[Kind, int]] = []
            size = 0
            # Limit the size of one response; the page asks again while `more` is true. One step is always sent.
            for at, which in due:
                size += size_of(self._seen[which][0])
                if sent and size > ANSWER:
                    break
                sent.append(which)
                mark = at
            more = len(sent) < len(due)
            # Everything was sent: the page also knows of deletions up to the current mark.
            mark = mark if more else self._mark
            gone = [which for which, at in self._gone.items() if at <= mark and which not in self._seen]
            config, doctor = self._explain()
            ratio = high_over_low(self._rows)
            blocks = [read_block(self.run, step, kind) for kind, step in sent]
            for block in blocks:
                if block["kind"] == "samples":
                    self._stories[block["step"]] = clip_story(block, ratio)
            new = self._rows[num_rows:]
            changed = bool(new or blocks or generation != self._generation)
            return {
                "changed": changed,
                "generation": self._generation,
                "metrics": metric_table(new),
                "samples": blocks,
                "gone": gone,
                "mark": mark,
                "more": more,
                "age": self._age(),
                **({"overview": self._look(config, doctor)} if changed else {}),
            }

    def _follow_metrics(self) -> None:
        try:
            if not (self.run / "metrics.jsonl").is_file():
                raise FileNotFoundError  # also for a FIFO, which would block this thread
            with open(self.run / "metrics.jsonl", "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if self._read:
                    file.seek(self._read - len(self._tail))
                    # A resumed run cuts the file back and appends again. Its size alone does not show that, so the last
                    # line is compared.
                    if size < self._read or file.read(len(self._tail)) != self._tail:
                        self._forget()
                        file.seek(0)
                text = file.read()
        except FileNotFoundError:
            if self._rows:
                self._forget()
            return
        # The last line may be incomplete; it is read at the next call.
        whole = text[: text.rfind(b"\n") + 1]
        for line in whole.splitlines(keepends=True):
            self._read, self._tail = self._read + len(line), line
            with contextlib.suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    self._rows.append(row)

    def _follow_samples(self) -> None:
        # A long run has more samples than a page can hold, so a subset of its steps within BUDGET is shown.
        chosen = choose_files(self.run, BUDGET)
        for which in [which for which in self._seen if which not in chosen]:
            del self._seen[which]
            if which[0] == "samples":
                self._stories.pop(which[1], None)
            self._mark += 1
            self._gone[which] = self._mark
        for which in sorted(chosen):
            if which not in self._seen or self._seen[which][0] != chosen[which]:
                self._mark += 1
                self._seen[which] = (chosen[which], self._mark)
                self._gone.pop(which, None)
        self._kept = len(sample_steps(self.run))

    def _explain(self) -> tuple[Row, Any]:
        """The config and doctor's words about it; read again only when the file changes."""
        signature = None
        with contextlib.suppress(OSError):
            stat = (self.run / "config.yaml").stat()
            signature = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if signature != self._explained[0]:
            self._explained = (signature, config_of(self.run), self._doctor(self.run))
        return self._explained[1:]

    def _look(self, config: Row, doctor: Any) -> dict[str, Any]:
        stories = [story for step, story in self._stories.items() if ("samples", step) in self._seen]
        return overview(self.run, self._rows, config, stories, doctor) | {"kept_steps": self._kept}

    def line(self, name: str) -> dict[str, Any]:
        """The run in one line, for the list of runs."""
        with self._lock:
            self._follow_metrics()
            config, _ = self._explain()
            s = summary_of(self._rows, is_by_sequence(config))
            clipped = None if s.clipped_low is None or s.clipped_high is None else s.clipped_low + s.clipped_high
            algorithm = config.get("algorithm")
            return {
                "id": name,
                "algorithm": algorithm if isinstance(algorithm, str) else None,
                "steps": s.steps,
                "held_out": change_text(
                    score_text(s.score[0], s.graded), score_text(s.score_end[0], s.graded), s.evaluations
                )
                if s.score and s.score_end
                else None,
                "reward": None if s.reward is None else f"{s.reward:.3f} → {s.reward_end:.3f}",
                "clipped": None if clipped is None else f"{clipped:.1%}",
                "status": status_of(self.run, s.steps, config),
                "age": self._age(),
            }

    def _age(self) -> float | None:
        """Seconds since the last step was written."""
        with contextlib.suppress(OSError):
            return max(0.0, time.time() - (self.run / "metrics.jsonl").stat().st_mtime) if self._rows else None
        return None


class Watch(HttpServer):
    """Serves the runs of a folder, or one run, until `close`."""

    def __init__(self, path: Path, doctor: Doctor, port: int = 0) -> None:
        self.path, self.doctor = path, doctor
        self.single = is_run(path)
        self.token = secrets.token_urlsafe(24)
        self._followers: dict[Path, LiveRun] = {}
        self._lock = threading.Lock()  # wait: none, held for reading new lines of regular files
        try:
            super().__init__(
                [route("GET", "/{rest:path}", self._get)],
                port=port,
                max_connections=CONNECTIONS,
                idle_s=IDLE_S,
                head_s=IDLE_S,
                own_pages=True,
                headers=HEADERS,
            )
        except OSError as cause:
            raise ConfigError(f"cannot listen on port {port}: {cause.strerror}; pass another --port") from cause

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def authorize(self, request: Request) -> None:
        given = request.scope["path"].removeprefix("/").partition("/")[0]
        # compare_digest takes the same time for every input, so the token cannot be found by timing.
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode()):
            raise self.refusal(403, "token", "the address lacks the token that gspo watch printed")

    def _get(self, request: Request) -> Response:
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            raise self.refusal(413, "body", "a GET request cannot have a body")
        try:
            query = parse_qs(request.scope["query_string"].decode("latin-1"), max_num_fields=8)
        except ValueError:
            raise self.refusal(400, "query", "the query has too many fields") from None
        _, _, rest = request.path_params["rest"].partition("/")
        found = self.answer(rest, {name: given[-1] for name, given in query.items()})
        if found is None:
            raise self.refusal(404, "no_such_route", "there is no such page")
        return Response(found[1], media_type=found[0])

    def runs(self) -> dict[str, Path]:
        """Runs by the name their address has: paths below the folder, at most three deep."""
        if self.single:
            return {self.path.absolute().name: self.path}
        found = (file.parent for depth in ("*", "*/*", "*/*/*") for file in self.path.glob(f"{depth}/config.yaml"))
        return {str(run.relative_to(self.path)): run for run in found if is_run(run)}

    def answer(self, route: str, query: Mapping[str, str]) -> tuple[str, str] | None:
        """(content type, body) of a route below the token; None: there is no such thing."""
        if route == "" and self.single:
            return self._page(next(iter(self.runs())))
        if route == "":
            return "text/html", "".join(
                html_page("gspo watch", {"kind": "runs", "path": str(self.path)}, connect="'self'")
            )
        if route == "runs" and not self.single:
            return "application/json", inert_json({"runs": self._list()})
        # Only names that `runs` lists: a query cannot reach other paths.
        run = self.runs().get(query.get("run", "")) if route in ("page", "data", "image") else None
        if run is None:
            return None
        if route == "page":
            return self._page(query["run"])
        if route == "image":
            return "application/json", inert_json(pictures(run, [query.get("sha256", "")]))
        numbers = {name: int(value) for name, value in query.items() if name != "run" and _is_number(value)}
        news = self._follower(run).news(numbers.get("generation"), numbers.get("rows", 0), numbers.get("mark", 0))
        return "application/json", inert_json(news)

    def _page(self, name: str) -> tuple[str, str]:
        boot = {"kind": "live", "run": name, "list": not self.single}
        return "text/html", "".join(html_page(f"{name} · gspo watch", boot, connect="'self'"))

    def _follower(self, run: Path) -> LiveRun:
        with self._lock:
            return self._followers.setdefault(run, LiveRun(run, self.doctor))

    def _list(self) -> list[dict[str, Any]]:
        return sorted(
            (self._follower(run).line(name) for name, run in self.runs().items()),
            key=lambda line: (line["age"] is None, line["age"] or 0.0),
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}

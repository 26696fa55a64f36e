"""A language model as the judge, behind any endpoint that speaks OpenAI's chat completions.

Requests run in threads beside sampling, so many at a time as allowed. A judge that does not answer, or answers without
a score, is a `Failure`: the sample is masked, never worth 0. Equal questions are asked once; with `cache` also across
runs, which is what makes a resumed run repeatable. The API key comes from an environment variable, is sent to the one
address that was configured (redirects are not followed), and is cut out of every message.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import http.client
import json
import math
import os
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo import rng
from gspo.errors import ConfigError, RewardError
from gspo.rewards.call import Pending, Result

PROMPT = """Grade an answer to a question.

Question:
{prompt}

Reference answer (may be empty):
{answer}

Answer to grade:
{completion}

Think briefly. End with one line of the form `Score: N`, N from 0 (wrong) to 1 (fully right)."""
PATTERN = r"[Ss]core\W{0,4}(-?\d+(?:\.\d+)?)"
_RETRIED = {408, 409, 425, 429}  # and every 5xx: the same request may succeed later
_LONGEST_ANSWER = 1 << 20  # bytes
_LONGEST_WAIT_S = 30.0
_FIELD = re.compile(r"\{(\w+)\}")


class Judge:
    """Scores completions by asking a model; results are in 0…1, (score − min_score) / (max_score − min_score).

    url             `http://host:8000/v1`, or the whole address of chat/completions
    model           its name there
    prompt          the question to the judge; {prompt}, {completion}, {answer} and any column in braces are filled in
    system_prompt   the judge's system message
    pattern         regular expression whose last match's first group is the score
    api_key_env     environment variable that holds the API key; null: none is sent
    timeout         seconds for one request
    retries         further tries after a timeout, a dropped connection, 429, 5xx, or an answer without a score
    backoff         seconds before the first retry, doubled each time; a Retry-After header goes first
    concurrency     requests at once
    cache           file of scores by question, read at the start and added to; null: in memory only
    body            further fields of the request; null removes one of ours
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        prompt: str = PROMPT,
        system_prompt: str | None = None,
        pattern: str = PATTERN,
        min_score: float = 0.0,
        max_score: float = 1.0,
        api_key_env: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 512,
        timeout: float = 60.0,
        retries: int = 3,
        backoff: float = 1.0,
        concurrency: int = 16,
        cache: str | None = None,
        body: Mapping[str, Any] | None = None,
        key: str = "reward",
    ) -> None:
        self._url = _address(url, key)
        self._pattern = _pattern(pattern, key)
        _check(key, timeout=timeout > 0, concurrency=concurrency >= 1, retries=retries >= 0, backoff=backoff >= 0)
        _check(key, max_score=max_score > min_score, prompt="{completion}" in prompt, model=bool(model))
        self._prompt, self._system_prompt = prompt, system_prompt
        self._low, self._high = float(min_score), float(max_score)
        self._timeout, self._retries, self._backoff = float(timeout), retries, float(backoff)
        fields = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **(body or {})}
        self._body = {name: value for name, value in fields.items() if value is not None}
        self._secret = _secret(api_key_env, key)
        self._lock = threading.Lock()
        self._asked: dict[str, concurrent.futures.Future[Result]] = {}
        self._cache = None if cache is None else Path(cache).expanduser()
        self._known = _read_cache(self._cache, key)
        self._closing = threading.Event()
        self._threads = concurrent.futures.ThreadPoolExecutor(concurrency, thread_name_prefix="judge")
        # The environment's proxies count, redirects do not: they would carry the key elsewhere.
        self._opener = urllib.request.build_opener(_NoRedirect)

    def start(self, item: Any) -> Pending:
        """Ask about every completion of a group; its results wait for the answers."""
        futures = [self._ask(self._request(item, completion)) for completion in item.completions]
        return Pending(lambda: [future.result() for future in futures], lambda: all(f.done() for f in futures))

    def close(self) -> None:
        """Give up what is under way: requests not sent stay unsent, those on the wire end with their timeout."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _request(self, item: Any, completion: str) -> bytes:
        values = {**item.data, "prompt": question(item.messages, item.prompt), "completion": completion}
        values.setdefault("answer", "")
        # In one pass: braces inside a completion are its own.
        text = _FIELD.sub(lambda m: _shown(values[m[1]]) if m[1] in values else m[0], self._prompt)
        messages = [{"role": "user", "content": text}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return json.dumps({**self._body, "messages": messages}, sort_keys=True).encode()

    def _ask(self, request: bytes) -> concurrent.futures.Future[Result]:
        identity = "\n".join((self._url, self._pattern.pattern, repr(self._low), repr(self._high))).encode()
        digest = hashlib.sha256(identity + b"\n" + request).hexdigest()
        with self._lock:
            if digest in self._known:
                return _done(self._known[digest])
            if digest not in self._asked:
                self._asked[digest] = self._threads.submit(self._judge, digest, request)
            return self._asked[digest]

    def _judge(self, digest: str, request: bytes) -> Result:
        """One score, by as many tries as allowed. A failure is forgotten: the next time it is asked again."""
        result: Result = "infra", "judge: closed before it answered"
        for attempt in range(self._retries + 1):
            if self._closing.is_set():
                break
            result, wait_s = self._try(request)
            if not isinstance(result, tuple) or wait_s is None or attempt == self._retries:
                break
            # Spread by question and try: a server that was overrun is not overrun again by all at once.
            spread = 0.5 + float(rng.uniform(int(digest[:15], 16), "judge-backoff", attempt))
            self._closing.wait(min(max(self._backoff * 2**attempt * spread, wait_s), _LONGEST_WAIT_S))
        with self._lock:
            self._asked.pop(digest, None)
            if not isinstance(result, tuple):
                self._known[digest] = result
                self._write_cache(digest, result)
        return result

    def _try(self, request: bytes) -> tuple[Result, float | None]:
        """The result of one request, and the seconds to wait at least before another; None: there is no use."""
        headers = {"Content-Type": "application/json"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        deadline = time.monotonic() + self._timeout
        late = ("timeout", f"judge: no answer from {self._url} in {self._timeout:g} s (timeout)"), 0.0
        try:
            call = urllib.request.Request(self._url, request, headers, method="POST")
            with self._opener.open(call, timeout=self._timeout) as response:
                raw = b""
                while chunk := response.read1(1 << 16):
                    raw += chunk
                    if time.monotonic() > deadline:
                        return late
                    if len(raw) > _LONGEST_ANSWER:
                        return self._failed(f"an answer of more than {_LONGEST_ANSWER} bytes"), None
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(400).decode("utf-8", "replace")
            again = error.code in _RETRIED or error.code >= 500
            return self._failed(f"HTTP {error.code} {said}"), _retry_after(error.headers) if again else None
        except TimeoutError:
            return late
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            if isinstance(getattr(error, "reason", None), TimeoutError):
                return late
            return self._failed(f"{type(error).__name__}: {error}"), 0.0
        return self._read(raw)

    def _read(self, raw: bytes) -> tuple[Result, float | None]:
        try:
            text = json.loads(raw)["choices"][0]["message"]["content"] or ""
        except (ValueError, LookupError, TypeError):
            return self._failed(f"no chat completion: {raw[:200].decode('utf-8', 'replace')}"), 0.0
        found = list(self._pattern.finditer(str(text)))
        if not found:
            return self._failed(f"no score by pattern {self._pattern.pattern!r} in {str(text)[-200:]!r}"), 0.0
        try:
            score = float(found[-1][1])
        except (TypeError, ValueError):
            return self._failed(f"{found[-1][1]!r} is no number (pattern {self._pattern.pattern!r})"), 0.0
        if not self._low <= score <= self._high:
            return self._failed(f"score {score:g} is outside {self._low:g}…{self._high:g}"), 0.0
        return (score - self._low) / (self._high - self._low), None

    def _failed(self, what: str) -> tuple[str, str]:
        text = f"judge at {self._url}: {what}"
        # A server may repeat the request it refuses.
        return "infra", (text.replace(self._secret, "***") if self._secret else text)[:600]

    def _write_cache(self, digest: str, score: float) -> None:
        if self._cache is not None:
            try:
                with self._cache.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"question": digest, "score": score}) + "\n")
            except OSError as error:
                raise RewardError(f"judge.cache {self._cache} cannot be written: {error.strerror}") from error


def question(messages: Sequence[Mapping[str, Any]], rendered: str) -> str:
    """What the model was asked, for a reader: the one user message as it is, a conversation with its roles.

    >>> question([{"role": "user", "content": "2+2?"}], "<|im_start|>…"), question([], "2+2=")
    ('2+2?', '2+2=')
    """
    spoken = [m for m in messages if m.get("role") != "system"]
    if len(spoken) == 1:
        return _shown(spoken[0].get("content"))
    return "\n\n".join(f"{m.get('role')}: {_shown(m.get('content'))}" for m in spoken) or rendered


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


def _done(value: Result) -> concurrent.futures.Future[Result]:
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_result(value)
    return future


def _retry_after(headers: Any) -> float:
    try:
        wait_s = float(headers.get("Retry-After", 0))
    except (TypeError, ValueError):  # a date: the usual backoff will do
        return 0.0
    return wait_s if math.isfinite(wait_s) and wait_s > 0 else 0.0


def _address(url: str, key: str) -> str:
    parts = urllib.parse.urlsplit(str(url))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}: judge.url must be an http(s) address such as http://localhost:8000/v1, got {url!r}")
    if parts.username or parts.password:
        raise ConfigError(f"{key}: judge.url must not hold a password; name the key's variable in api_key_env")
    path = parts.path.rstrip("/")
    path = path if path.endswith("/chat/completions") else path + "/chat/completions"
    return urllib.parse.urlunsplit(parts._replace(path=path))


def _pattern(pattern: str, key: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(f"{key}: judge.pattern {pattern!r} is no regular expression: {error}") from None
    if not compiled.groups:
        raise ConfigError(f"{key}: judge.pattern {pattern!r} needs a group around the number, as in Score: (\\d+)")
    return compiled


def _secret(variable: str | None, key: str) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        shown = variable if re.fullmatch(r"[A-Z_][A-Z0-9_]{0,40}", variable) else "what it names"
        raise ConfigError(
            f"{key}: judge.api_key_env names an environment variable, and {shown} is not set; export it "
            "(the key itself never stands in a config), or remove api_key_env where the endpoint wants none"
        )
    return value


def _check(key: str, **is_right: bool) -> None:
    rules = {
        "timeout": "must be positive",
        "concurrency": "must be at least 1",
        "retries": "must not be negative",
        "backoff": "must not be negative",
        "max_score": "must be above min_score",
        "prompt": "must hold {completion}: the judge cannot grade what it is not shown",
        "model": "must name the model behind the endpoint",
    }
    for name, right in is_right.items():
        if not right:
            raise ConfigError(f"{key}: judge.{name} {rules[name]}")


def _read_cache(file: Path | None, key: str) -> dict[str, Result]:
    if file is None:
        return {}
    known: dict[str, Result] = {}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                row = json.loads(line)
                known[str(row["question"])] = float(row["score"])
            except (ValueError, LookupError, TypeError):
                continue  # a line that a kill tore; it is asked again
        with file.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: judge.cache {file} cannot be used: {error.strerror}") from error
    return known

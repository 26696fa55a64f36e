"""A language model as the judge, behind any endpoint with OpenAI's chat completions API.

Requests run in threads while sampling continues, at most `concurrency` at a time. If the judge does not answer, or
answers without a score, the result is a `Failure`: the sample is masked, its reward is not 0. Equal questions are sent
once; with `cache` also across runs, which makes a resumed run repeatable. The API key comes from an environment
variable, is sent only to the configured address (redirects are not followed), and is removed from every message.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import math
import os
import re
import threading
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo import rng
from gspo.errors import ConfigError, RewardError
from gspo.rewards.call import Pending, Result
from gspo.system import HttpClient, ReplyTooLargeError, parse_json, read_jsonl

PROMPT = """Grade an answer to a question.

Question:
{prompt}

Reference answer (may be empty):
{reference}

Answer to grade:
{completion}

Think briefly. End with one line of the form `Score: N`, N from 0 (wrong) to 1 (fully right)."""
PATTERN = r"[Ss]core\W{0,4}(-?\d+(?:\.\d+)?)"
_RETRIED = {408, 409, 425, 429}  # and every 5xx: the same request may succeed later
_CLOSED: Result = "infra", "judge: closed before it answered"
_MAX_REPLY = 1 << 20  # bytes
_MAX_WAIT_S = 30.0
_REACH_S = 5.0  # for an answer of any kind
_FIELD = re.compile(r"\{(\w+)\}")


class Judge:
    """Asks a model for scores. A result is (score − min_score) / (max_score − min_score), between 0 and 1.

    url             `http://host:8000/v1`, or the full address of chat/completions
    model           name of the judge model at that address
    prompt          template of the question; {prompt}, {completion}, {answer} and any {column} are filled in
    system_prompt   the judge's system message
    pattern         regular expression; the score is the first group of its last match
    api_key_env     environment variable that holds the API key; null: no key is sent
    timeout         seconds for one request
    retries         retries after a timeout, a dropped connection, 429, 5xx, or an answer without a score
    backoff         seconds before the first retry, doubled each time; a longer Retry-After header is obeyed
    concurrency     maximum number of concurrent requests
    cache           file of scores by question, read at the start and extended; null: in memory only
    body            more fields of the request; a null removes a default field
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
        # Check all arguments first, so that a wrong config fails before the first request.
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
        # The lock protects `_results`, `_known` and the cache file, which all request threads use.
        self._lock = threading.Lock()  # wait: none, held for appending a line to the cache file
        self._results: dict[str, concurrent.futures.Future[Result]] = {}
        self._cache = None if cache is None else Path(cache).expanduser()
        self._known = _read_cache(self._cache, key)
        self._closing = threading.Event()
        self._threads = concurrent.futures.ThreadPoolExecutor(concurrency, thread_name_prefix="judge")
        headers = {} if self._secret is None else {"Authorization": f"Bearer {self._secret}"}
        # A judge may be a service on the internet that only the environment's proxy can reach.
        try:
            self._http = HttpClient(headers=headers, max_reply=_MAX_REPLY, trust_env=True)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{key}: judge cannot use the environment's proxy (HTTPS_PROXY, …): {error}") from error

    def start(self, item: Any) -> Pending:
        """Send a request for every completion of a group; the results wait for the answers."""
        futures = [self._submit(self._request(item, completion)) for completion in item.completions]
        # wait: none, each request has timeout and retries
        return Pending(lambda: [future.result() for future in futures], lambda: all(f.done() for f in futures))

    def check_reachable(self) -> None:
        """ConfigError if nothing answers at the address. Any HTTP answer will do: the judge is not asked anything."""
        try:
            self._http.call("GET", self._url, timeout_s=min(self._timeout, _REACH_S))
        except ReplyTooLargeError:
            return
        except OSError as error:  # TimeoutError is one
            _, message = self._failed(f"nothing answers: {error}" if str(error) else f"no answer in {_REACH_S:g} s")
            raise ConfigError(f"reward: {message}") from error

    def close(self) -> None:
        """Cancel everything: queued requests are not sent, and requests under way end now."""
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()

    def _request(self, item: Any, completion: str) -> bytes:
        values = {**item.data, "prompt": question(item.messages, item.prompt), "completion": completion}
        values.setdefault("answer", "")
        values.setdefault("reference", values["answer"] if item.reference is None else item.reference)
        # One pass, so that braces inside a completion are not filled in.
        text = _FIELD.sub(lambda m: _shown(values[m[1]]) if m[1] in values else m[0], self._prompt)
        messages = [{"role": "user", "content": text}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return json.dumps({**self._body, "messages": messages}, sort_keys=True).encode()

    def _submit(self, request: bytes) -> concurrent.futures.Future[Result]:
        # The digest covers everything that decides the score: address, pattern, range and request.
        identity = "\n".join((self._url, self._pattern.pattern, repr(self._low), repr(self._high))).encode()
        digest = hashlib.sha256(identity + b"\n" + request).hexdigest()
        with self._lock:
            if digest in self._known:
                return _done(self._known[digest])
            # Equal questions that are under way share one request.
            if digest not in self._results:
                self._results[digest] = self._threads.submit(self._judge, digest, request)
            return self._results[digest]

    def _judge(self, digest: str, request: bytes) -> Result:
        """One score, with retries. A failure is not remembered: the next equal question is sent again."""
        result = _CLOSED
        for attempt in range(self._retries + 1):
            if self._closing.is_set():
                break
            result, wait_s = self._try(request)
            if not isinstance(result, tuple) or wait_s is None or attempt == self._retries:
                break
            # Each question waits another time, so that an overloaded server does not get all retries at once.
            spread = 0.5 + float(rng.uniform(int(digest[:15], 16), "judge-backoff", attempt))
            # An event instead of sleep: `close` ends the wait at once.
            # wait: _MAX_WAIT_S, close()
            self._closing.wait(min(max(self._backoff * 2**attempt * spread, wait_s), _MAX_WAIT_S))
        with self._lock:
            # Under one lock: another thread finds the result either in `_results` or in `_known`.
            self._results.pop(digest, None)
            if not isinstance(result, tuple):
                self._known[digest] = result
                self._write_cache(digest, result)
        return result

    def _try(self, request: bytes) -> tuple[Result, float | None]:
        """The result of one request, and the minimum wait in seconds before a retry; None: a retry cannot help."""
        try:
            reply = self._http.call("POST", self._url, request, timeout_s=self._timeout)
        except TimeoutError:
            return ("timeout", f"judge: no answer from {self._url} in {self._timeout:g} s (timeout)"), 0.0
        except ReplyTooLargeError as error:
            return self._failed(str(error)), None
        except OSError as error:
            return self._failed(str(error)), 0.0
        except concurrent.futures.CancelledError:
            return _CLOSED, None
        if not 200 <= reply.status < 300:
            # Other 4xx errors (a wrong key, a wrong model name) do not change by repeating the request.
            can_retry = reply.status in _RETRIED or reply.status >= 500
            text = reply.content[:400].decode("utf-8", "replace")
            return self._failed(f"HTTP {reply.status} {text}"), _retry_after(reply.headers) if can_retry else None
        return self._read(reply.content)

    def _read(self, raw: bytes) -> tuple[Result, float | None]:
        try:
            text = parse_json(raw)["choices"][0]["message"]["content"] or ""
        except (ValueError, LookupError, TypeError):
            return self._failed(f"no chat completion: {raw[:200].decode('utf-8', 'replace')}"), 0.0
        # The last match: a judge that explains its decision writes the final score at the end.
        found = list(self._pattern.finditer(str(text)))
        if not found:
            return self._failed(f"no score by pattern {self._pattern.pattern!r} in {str(text)[-200:]!r}"), 0.0
        try:
            score = float(found[-1][1])
        except (TypeError, ValueError):
            return self._failed(f"{found[-1][1]!r} is not a number (pattern {self._pattern.pattern!r})"), 0.0
        if not self._low <= score <= self._high:
            return self._failed(f"score {score:g} is outside {self._low:g}…{self._high:g}"), 0.0
        return (score - self._low) / (self._high - self._low), None

    def _failed(self, what: str) -> tuple[str, str]:
        text = f"judge at {self._url}: {what}"
        # A server may quote the key in its error message.
        return "infra", (text.replace(self._secret, "***") if self._secret else text)[:600]

    def _write_cache(self, digest: str, score: float) -> None:
        if self._cache is not None:
            try:
                with self._cache.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"question": digest, "score": score}) + "\n")
            except OSError as error:
                raise RewardError(f"judge.cache {self._cache} cannot be written: {error.strerror}") from error


def question(messages: Sequence[Mapping[str, Any]], rendered: str) -> str:
    """The question as text: a single user message as it is, a longer conversation with its roles.

    >>> question([{"role": "user", "content": "2+2?"}], "<|im_start|>…"), question([], "2+2=")
    ('2+2?', '2+2=')
    """
    spoken = [m for m in messages if m.get("role") != "system"]
    if len(spoken) == 1:
        return _shown(spoken[0].get("content"))
    return "\n\n".join(f"{m.get('role')}: {_shown(m.get('content'))}" for m in spoken) or rendered


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


def _done(value: Result) -> concurrent.futures.Future[Result]:
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_result(value)
    return future


def _retry_after(headers: Any) -> float:
    try:
        wait_s = float(headers.get("Retry-After", 0))
    except (TypeError, ValueError):  # a date; the usual backoff is used
        return 0.0
    return wait_s if math.isfinite(wait_s) and wait_s > 0 else 0.0


def _address(url: str, key: str) -> str:
    parts = urllib.parse.urlsplit(str(url))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{key}: judge.url must be an http(s) address such as http://localhost:8000/v1, got {url!r}")
    if parts.username or parts.password:
        raise ConfigError(
            f"{key}: judge.url must not hold a password; name the variable that holds the key in api_key_env"
        )
    # Both forms are accepted: the base address and the full path.
    path = parts.path.rstrip("/")
    path = path if path.endswith("/chat/completions") else path + "/chat/completions"
    return urllib.parse.urlunsplit(parts._replace(path=path))


def _pattern(pattern: str, key: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(f"{key}: judge.pattern {pattern!r} is not a regular expression: {error}") from None
    if not compiled.groups:
        raise ConfigError(f"{key}: judge.pattern {pattern!r} needs a group around the number, as in Score: (\\d+)")
    return compiled


def _secret(variable: str | None, key: str) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        # Do not print a key that was given in place of its variable.
        shown = variable if re.fullmatch(r"[A-Z_][A-Z0-9_]{0,40}", variable) else "that variable"
        raise ConfigError(
            f"{key}: judge.api_key_env names an environment variable, and {shown} is not set; export it "
            "(never put the key itself into a config), or remove api_key_env if the endpoint needs no key"
        )
    if not (value.isascii() and value.isprintable()):
        raise ConfigError(f"{key}: the API key in judge.api_key_env has characters that a header cannot hold")
    return value


def _check(key: str, **is_right: bool) -> None:
    rules = {
        "timeout": "must be positive",
        "concurrency": "must be at least 1",
        "retries": "must not be negative",
        "backoff": "must not be negative",
        "max_score": "must be above min_score",
        "prompt": "must hold {completion}, the text to grade",
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
        # A row that no judge wrote, or that a killed run cut off, is skipped: its question is sent again.
        for row in read_jsonl(file) if file.exists() else ():
            question, score = row.get("question"), row.get("score")
            if not isinstance(score, int | float) or isinstance(score, bool):
                continue
            if isinstance(question, str) and 0 <= score <= 1:
                known[question] = float(score)
        # Test at the start that the file can be written.
        with file.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: judge.cache {file} cannot be used: {error.strerror}") from error
    return known

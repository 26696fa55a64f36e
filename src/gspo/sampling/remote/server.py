"""The HTTP server of a sampler: any `Sampler` behind a small JSON interface, for trainers in other processes.

The server listens on loopback and requires a token by default; docs/samplers.md lists what is checked before a body is
read. `engine.py` has the calls.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gspo.errors import ConfigError, DataError, WeightSyncError
from gspo.sampling.remote import protocol as wire
from gspo.sampling.remote.engine import SamplerEngine
from gspo.system import MIN_TOKEN_CHARS, TOKEN, HttpServer, Json, RefusedCallError, bearer_key, route

MAX_BODY = 256 * 2**20  # a batch of 10⁴ requests with prompts of 10³ tokens takes 50 MB
CONNECTIONS = 128
IDLE_S = 3600.0  # a trainer's connection may be silent between two steps


class SamplerServer(HttpServer):
    """Serves an engine on `host`:`port` (0: a free one) to clients that have the token.

    name  the host's name for clients, if it is not `host`
    """

    def __init__(
        self, engine: SamplerEngine, token: str, *, host: str = "127.0.0.1", port: int = 0, name: str | None = None
    ) -> None:
        if len(token) < MIN_TOKEN_CHARS:
            raise ConfigError(f"a sampler server needs a token of {MIN_TOKEN_CHARS} characters or more in {TOKEN}")
        self.engine, self._token = engine, token.encode()
        self.calls: dict[tuple[str, str], Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]] = {
            ("GET", "/health"): self._health,
            ("GET", "/version"): self._version,
            ("POST", "/attach"): engine.attach,
            ("POST", "/generate"): engine.generate,
            ("POST", "/collect"): engine.collect,
            ("POST", "/abort"): engine.abort,
            ("POST", "/load_weights"): engine.load_weights,
            ("POST", "/score"): engine.score,
            ("GET", "/vocabulary"): engine.vocabulary,
            **{("POST", f"/{what}"): partial(engine.order, what) for what in ("pause", "resume", "sleep", "wake")},
        }
        super().__init__(
            [route(method, path, self._answer) for method, path in self.calls],
            host=host,
            port=port,
            names=(name or host, host, "127.0.0.1", "localhost"),
            max_connections=CONNECTIONS,
            max_body=MAX_BODY,
            idle_s=IDLE_S,
        )
        self.url = f"http://{name or host}:{self.port}"

    def authorize(self, request: Request) -> None:
        # compare_digest takes the same time for every wrong token.
        if not hmac.compare_digest(bearer_key(request), self._token):
            raise self.refusal(401, "invalid_api_key", f"the token of {TOKEN} is missing or wrong")

    def refusal(self, status: int, code: str, message: str) -> RefusedCallError:
        return RefusedCallError(status, _KINDS.get(code, code), message)

    def count(self, error: RefusedCallError, request: Request | None) -> None:
        self.refused += error.status not in (409, 422)  # a late trainer or a failed load is not abuse

    def close(self) -> None:
        self.engine.close()
        super().close()

    async def _answer(self, request: Request) -> Response:
        call = self.calls[request.method, request.scope["path"]]
        try:
            return Json(await call(wire.loads(await request.body()) if request.method == "POST" else {}))
        except (wire.WireError, DataError) as error:
            raise RefusedCallError(400, "request", str(error)) from None
        except WeightSyncError as error:
            raise RefusedCallError(422, "weights", str(error)) from None

    async def _health(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.engine.health(), "refused": self.refused}

    async def _version(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return self.engine.state()


# The guard's error codes → `kind` in this server's replies.
_KINDS = {
    "wrong_host": "host",
    "wrong_origin": "origin",
    "invalid_api_key": "token",
    "no_such_route": "route",
    "wrong_method": "method",
    "wrong_type": "type",
    "no_length": "length",
    "body_too_large": "length",
    "slow_body": "slow",
    "malformed_request": "http",
}

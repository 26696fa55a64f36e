"""A sampler server in front of an inference engine: the parts that do not depend on the engine.

The engine's server is started here as a child process and ends with this one, or the user runs it (`vllm.url`).
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gspo.config import Config, Layout, layout_of, load
from gspo.errors import ConfigError, GspoError, RolloutError
from gspo.faults import reached
from gspo.launcher.serve.own import register_and_serve
from gspo.sampling import EngineAddress, EngineSampler, SamplerEngine
from gspo.system import TOKEN, Launched, describe_exit, dying_with_parent, stop
from gspo.train import decoder, make_tokenizer

CHECK_S = 1.0  # between two checks of the child process
MEASURE_S = 5.0  # between two checks of the engine's progress
STOP_S = 5.0  # from SIGTERM to SIGKILL
BURST_S = 60.0  # errors of the engine within this time have one cause


class Start(NamedTuple):
    """How an engine's server is started."""

    argv: list[str]
    env: dict[str, str]  # added to this process's environment


def read_engine_config(config_path: Path, engine: str, dry_run: bool = False) -> tuple[Config, Layout]:
    """The run's config and layout; ConfigError if they are not for this engine."""
    if not dry_run:
        Launched.read().required_token()
        reached("sampler.start")
    config = load(config_path).config
    layout = layout_of(config, torch.cuda.device_count())
    if layout.sampler is None or layout.sampler.name != engine:
        raise ConfigError(f"rollout.backend is {config.rollout.backend}; this server is for {engine}:dN")
    if config.rollout.sampler_precision != "none":
        raise ConfigError("rollout.sampler_precision rounds the in-process sampler's weights only; set it to none")
    return config, layout


def serve_engine(
    config: Config,
    index: int,
    folder: Path,
    address: EngineAddress,
    start: Start | None,
    make: Callable[[], EngineSampler],
    identity: Mapping[str, Any],
    *,
    host: str,
    port: int,
) -> None:
    """Start the engine (`start` None: it runs already), check it, and serve until SIGTERM or the engine's end."""
    child = None if start is None else start_engine(start)
    try:
        # Check the engine before registering: the trainer sends requests as soon as a server is registered.
        await_ready(address, child, config.rollout.request_timeout)
        sampler, failures = make(), []
        report = sampler.check_server()
        engine = SamplerEngine(sampler, identity=identity, score=sampler.score, load=sampler.load_published)
        # Well below the trainer's request timeout, so that the server is restarted before requests fail.
        stalled_s = max(config.rollout.request_timeout / 3, 5.0)
        register_and_serve(
            engine,
            index,
            folder,
            host=host,
            port=port,
            words=f"{config.actor.path}, {sampler.engine} on {report['device']} at {address}",
            watch=partial(watch_engine, sampler, child, stalled_s, failures.append),
        )
        if failures:
            raise RolloutError(failures[0])
    except GspoError as error:
        reason = "" if child is None else child.last_error()
        if reason and reason not in str(error):
            raise type(error)(f"{error}. The engine's own error: {reason}") from error
        raise
    finally:
        if child is not None:
            stop(child, STOP_S)  # the launcher kills what the child leaves in our process group


def connect_engine(
    kind: Callable[..., EngineSampler],
    config: Config,
    identity: Mapping[str, Any],
    address: EngineAddress,
    can_sleep: bool,
) -> EngineSampler:
    return kind(
        address,
        seed=config.seed,
        num_vocab=identity["num_vocab"],
        max_context=identity["max_context"],
        eos_token_ids=identity["ends"],
        decode=decoder(make_tokenizer(config)),
        concurrent=max_running(config),
        can_sleep=can_sleep,
        load_s=config.rollout.request_timeout,
    )


def max_running(config: Config) -> int:
    return config.rollout.max_concurrent_rollouts or 256


class EngineProcess(subprocess.Popen[bytes]):
    """The engine's server. Its output is copied to ours, and its first error of the last minute is remembered.

    The first, because an engine has several processes: one fails with the reason, the others because of it.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        super().__init__(argv, env=env, **streams)
        self._error, self._error_at = "", -BURST_S
        self._copier = threading.Thread(target=self._copy, name="engine output", daemon=True)
        self._copier.start()

    def last_error(self) -> str:
        # After its end, the rest of its output; processes that it has left behind may keep the pipe open.
        if self.poll() is not None:
            self._copier.join(timeout=2.0)  # wait: 2 s, the sampler server
        return self._error

    def _copy(self) -> None:
        assert self.stdout is not None
        with self.stdout as output:
            for line in output:
                with suppress(OSError, ValueError):  # our own output was closed; the engine must not block on its pipe
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
                found, now = _EXCEPTION.match(line.decode("utf-8", "replace").strip()), time.monotonic()
                if found is not None and now - self._error_at > BURST_S:
                    self._error, self._error_at = found[1][:500], now


# The last line of a traceback, alone or behind vLLM's prefix: "(Worker pid=7) ERROR 11-17 11:57:22 [file.py:1] ".
_EXCEPTION = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)")


def start_engine(start: Start) -> EngineProcess:
    """Start the engine as a child that is killed with this process and writes to the same log."""
    env = {**os.environ, **start.env}
    env.pop(TOKEN, None)
    print(f"starting {shlex.join(start.argv)}", flush=True)
    return EngineProcess(dying_with_parent(start.argv), env)


def await_ready(address: EngineAddress, child: subprocess.Popen[bytes] | None, timeout_s: float) -> None:
    """Wait until GET /health answers 200. RolloutError if the engine ends first or takes too long."""
    begin = time.monotonic()
    with address.open() as http:
        while True:
            with suppress(OSError, ValueError):
                if http.call("GET", "/health", timeout_s=5.0).status == 200:
                    return
            if child is not None and (code := child.poll()) is not None:
                error = ConfigError if code == 2 else RolloutError  # 2: it rejected its flags
                raise error(f"the engine {describe_exit(code)} before it served; its messages are in this log")
            if time.monotonic() - begin > timeout_s:
                raise RolloutError(f"no engine answered at {address} within {timeout_s:g} s (rollout.request_timeout)")
            time.sleep(0.5)  # wait: 0.5 s, the server after rollout.request_timeout


def watch_engine(
    sampler: EngineSampler,
    child: subprocess.Popen[bytes] | None,
    stalled_s: float,
    fail: Callable[[str], None],
    stop: Callable[[], None],
) -> None:
    """Stop this server when the engine has ended, is broken, or makes no progress; the launcher then restarts both."""
    progress, progress_at, measured_at = -1.0, time.monotonic(), 0.0
    while True:
        time.sleep(CHECK_S)  # wait: CHECK_S, the server after rollout.request_timeout without a token
        now, why = time.monotonic(), sampler.broken
        if child is not None and (code := child.poll()) is not None:
            why = f"{sampler.engine} {describe_exit(code)}"
        # An idle engine makes no tokens; the time without progress counts only while requests run.
        elif not sampler.is_busy():
            progress_at = now
        elif now - measured_at > MEASURE_S:
            measured_at = now
            with suppress(GspoError):
                if (measured := sampler.progress()) != progress:
                    progress, progress_at = measured, time.monotonic()
        if now - progress_at > stalled_s:
            why = why or f"{sampler.engine} has requests but made no token for {stalled_s:g} s"
        if why:
            fail(why)
            stop()
            return

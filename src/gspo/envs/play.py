"""Run one environment to its end: what it returned or raised, as an outcome."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gspo.envs.client import Client, EpisodeError
from gspo.envs.outcome import outcome_of
from gspo.system.imports import described, user_lines
from gspo.types import Failure, Outcome

# async (client, data) → a reward, {"reward": …, parts…}, or None: the configured reward scores the last completion.
Environment = Callable[[Client, Mapping[str, Any]], Awaitable[Any]]

CANCELLED = Failure("crash", "environment: its task was cancelled")
_LONGEST = 2000  # most characters kept of an environment's error message


async def play(environment: Environment, client: Client) -> Outcome | None:
    """The outcome of one episode; nothing is raised."""
    try:
        # A copy of the row: an environment may change it, also inside its lists.
        row = copy.deepcopy({"reference": client.prompt.reference, **client.prompt.data})
        return outcome_of(await environment(client, row), client.turn_rewards)
    except EpisodeError as error:
        # Limits are reached in every run; an error has a line that must be mended.
        lines = user_lines(error) if error.kind == "crash" else ""
        return Failure(error.kind, f"environment: {error}"[:_LONGEST] + lines)
    except asyncio.CancelledError:
        # By the driver, which has recorded the end and ignores this message, or by the environment itself.
        return CANCELLED
    except BaseException as error:  # a SystemExit in the user's code must not end this thread
        return Failure("crash", f"environment: {described(error)}")

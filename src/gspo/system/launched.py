"""The environment variables that a launcher sets for the trainer ranks and the sampler servers it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gspo.errors import ConfigError

TOKEN = "GSPO_SAMPLER_TOKEN"
MIN_TOKEN_CHARS = 16


@dataclass(frozen=True)
class Launched:
    """What a process learns from its launcher. A process that no launcher started has the defaults."""

    is_launched: bool = False  # GSPO_LAUNCHED: a launcher started this process, so it must not launch others
    num_ranks: int = 1  # GSPO_RANKS: ranks that train; sampler servers cannot count them when a backend is `auto`
    is_colocated: bool = False  # GSPO_COLOCATED: trainer and sampler share the only GPU
    num_samplers: int = 0  # GSPO_SAMPLERS: sampler servers of this run; 0: the trainer samples in its own process
    sampler_folder: Path | None = None  # GSPO_SAMPLER_DIR: the folder in which the servers register
    token: str = field(default="", repr=False)  # GSPO_SAMPLER_TOKEN: the secret between trainer and servers

    @classmethod
    def read(cls, env: Mapping[str, str] = os.environ) -> Launched:
        folder = env.get("GSPO_SAMPLER_DIR")
        return cls(
            is_launched=bool(env.get("GSPO_LAUNCHED")),
            num_ranks=_count(env, "GSPO_RANKS", 1, "trainer ranks"),
            is_colocated=bool(env.get("GSPO_COLOCATED")),
            num_samplers=_count(env, "GSPO_SAMPLERS", 0, "sampler servers"),
            sampler_folder=Path(folder) if folder else None,
            token=env.get(TOKEN, ""),
        )

    def write(self) -> dict[str, str]:
        """The variables to set in a child's environment; a default is not written."""
        values = {
            "GSPO_LAUNCHED": "1" if self.is_launched else "",
            "GSPO_RANKS": str(self.num_ranks) if self.num_ranks > 1 else "",
            "GSPO_COLOCATED": "1" if self.is_colocated else "",
            "GSPO_SAMPLERS": str(self.num_samplers) if self.num_samplers else "",
            "GSPO_SAMPLER_DIR": str(self.sampler_folder or ""),
            TOKEN: self.token,
        }
        return {name: value for name, value in values.items() if value}

    def required_token(self) -> str:
        """The token; ConfigError if it is missing or too short."""
        if len(self.token) < MIN_TOKEN_CHARS:
            raise ConfigError(
                f"sampler servers need a secret of {MIN_TOKEN_CHARS} characters or more in {TOKEN}; set the same value "
                "for the servers and the trainer"
            )
        return self.token


def _count(env: Mapping[str, str], name: str, default: int, what: str) -> int:
    # An empty variable counts as unset.
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}; it must be the number of {what}")
    return int(text)

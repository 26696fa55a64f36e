"""`env`: multi-turn episodes, tools and agents."""

from __future__ import annotations

from typing import Any

from gspo.config.schema.key import Section, key


class Environment(Section):
    path: str | None = key(
        None,
        "Multi-turn episodes: tools, self_correct, module:function or file.py:function (docs/episodes.md).",
        unset="one completion per prompt",
    )
    agent: str | None = key(
        None,
        "An agent that speaks to an OpenAI-compatible address, in place of path: module:function or file.py:function "
        "of (base_url, api_key, data) (docs/agents.md).",
    )
    command: list[str] = key(
        [], "The same as a command line, one program per episode with OPENAI_BASE_URL and OPENAI_API_KEY: [node, a.js]."
    )
    model: str = key("policy", "The name by which agents ask for the model; other names are refused.")
    options: dict[str, Any] = key({}, "Settings of the environment, its keyword arguments: {tools: [calculator]}.")
    max_turns: int = key(16, "Answers of the model in one episode; an environment that asks for more fails.", low=1)
    timeout: float = key(
        60.0, "Seconds an environment may take from one answer to its next request; then its sample fails.", above=0
    )
    turn_discount: float = key(
        1.0, "γ by which a reward counts less for every turn between it and the turn that is credited.", low=0, high=1
    )

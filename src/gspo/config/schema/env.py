"""`env`: multi-turn episodes, tools and agents."""

from __future__ import annotations

from typing import Any

from gspo.config.schema.key import Section, key


class Environment(Section):
    path: str | None = key(
        None,
        "Environment of multi-turn episodes: tools, self_correct, module:function or file.py:function "
        "(docs/episodes.md); or of another system: gymnasium:<id>, openenv:<url or package>, trl:<module:Class>, "
        "verifiers:<environment> (docs/environments.md).",
        unset="one completion per prompt",
    )
    options: dict[str, Any] = key({}, "Settings of the environment, as keyword arguments: {tools: [calculator]}.")
    max_turns: int = key(
        16, "Maximum number of model answers in one episode. An episode that asks for more fails.", low=1
    )
    timeout: float = key(
        60.0,
        "Seconds that an environment may take between an answer and its next request; after that the sample fails.",
        above=0,
    )
    turn_discount: float = key(
        1.0, "Discount γ of a reward for every turn between the credited turn and the reward.", low=0, high=1
    )
    agent: str | list[str] | None = key(
        None,
        "Instead of path, an agent that calls an OpenAI-compatible address: module:function or file.py:function with "
        "the arguments (base_url, api_key, data); or a command line such as [node, a.js], started once per episode "
        "with OPENAI_BASE_URL and OPENAI_API_KEY in its environment (docs/agents.md).",
    )

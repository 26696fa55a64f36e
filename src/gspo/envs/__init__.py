"""Multi-turn episodes: environments, tools and agents."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.envs.adapters.common import ActionCodec, ObservationCodec, to_goal
    from gspo.envs.adapters.gymnasium import Gymnasium
    from gspo.envs.agents.agent import Agents, find_agent
    from gspo.envs.agents.endpoint import Endpoint, OpenEpisode, PER_EPISODE, ROUTES
    from gspo.envs.agents.openai_api import Answer
    from gspo.envs.builtin.self_correct import SelfCorrect
    from gspo.envs.builtin.tools import Tools
    from gspo.envs.chat import Chat, TemplateError
    from gspo.envs.client import Client, OutOfRoomError
    from gspo.envs.driver import Episodes
    from gspo.envs.episode import Exchange, assemble, episode_sample
    from gspo.envs.find import find_environment
    # fmt: on

__getattr__ = face(__name__)

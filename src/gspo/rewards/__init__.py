"""Rewards of completions: a weighted sum of built-in rewards, models, judges, and user functions in workers."""

from typing import TYPE_CHECKING

from gspo.system import face

if TYPE_CHECKING:
    # fmt: off
    from gspo.rewards.call import RewardItem
    from gspo.rewards.check import AnswerScores, REFERENCE, RewardProblem, check_reward, diagnose
    from gspo.rewards.functions.builtin import (
        BUILTIN, NEEDS_ANSWER, PRELOAD, SCORERS, TEXT, builtin, final, finals, overlong,
    )
    from gspo.rewards.functions.code import code
    from gspo.rewards.functions.judge import Judge
    from gspo.rewards.functions.reward_model import RewardModel, check_classifier
    from gspo.rewards.pool import RewardPool
    from gspo.rewards.route import GivenRewards, NoRewards, RewardRouter, Rewards
    from gspo.rewards.sandbox import box
    from gspo.rewards.sandbox.box import unavailable
    from gspo.rewards.spec import RewardSpec, import_name, reward_spec
    from gspo.rewards.workers import worker
    # fmt: on

__getattr__ = face(__name__)

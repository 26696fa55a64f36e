"""What the policy of reach.yaml sees, and what a step is worth."""

import numpy as np


def offset(observation):
    """From the gripper to the goal, in metres: three numbers."""
    return observation["desired_goal"] - observation["achieved_goal"]


def closeness(observation, reward, info):
    """The reward of one step: minus the distance to the goal."""
    return -float(np.linalg.norm(offset(observation)))

"""An exported folder is the policy: transformers computes the same logits and tokens from it."""

import json
import os

import pytest
import torch
from model_zoo import FAMILIES, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo.errors import CheckpointError, ConfigError
from gspo.train.export import export, write_model
from gspo.train.policy import PolicyModule
from gspo.train.restore import restore_policy

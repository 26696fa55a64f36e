"""Reinforcement-learning post-training for language models with GSPO at its centre."""

__version__ = "0.2.0"

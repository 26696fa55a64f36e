"""Rewards of completions: a weighted sum of built-in rewards, models, judges, and user functions in workers."""

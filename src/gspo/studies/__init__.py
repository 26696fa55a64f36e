"""The experiments of docs/baselines.md: declarative studies, runs by arm and seed, paired intervals, one page.

A study is a file of `catalog/`: a claim, arms (name → overrides of a base config), seeds, measures, and the checks that
would show the claim. All of these are fixed before the first run. `gspo study run` makes the runs; `gspo study show`
and docs/baselines.md show the results. Importing this package does not import torch.
"""

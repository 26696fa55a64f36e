"""The experiments of docs/baselines.md: declarative studies, runs by arm and seed, paired intervals, one page.

A study is a file of `catalog/`: a claim, arms (name → overrides of a base config), seeds, what is measured and what
would show the claim, all fixed before anything runs. `gspo study run` makes the runs, `gspo study show` and
docs/baselines.md say what came of them. Importing this room imports no torch.
"""

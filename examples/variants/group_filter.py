"""A filter of groups, named by `rollout.dynamic_filter_fn` or passed as `Trainer(…, dynamic_filter_fn=…)`."""


def not_almost_solved(group: dict) -> bool:
    """Train where a completion in eight is wrong. `group` has rewards, prompt, completions, lengths and data."""
    return bool(group["rewards"].mean() < 0.9)

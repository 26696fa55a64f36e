"""Per-token estimators of KL(π_θ ‖ π_ref), from tokens sampled from π_θ (Schulman 2020, "Approximating KL")."""

from __future__ import annotations

from torch import Tensor

from gspo.objectives.ratio import bounded

ESTIMATORS = ("k1", "k2", "k3")


def kl(logp: Tensor, reference_logp: Tensor, estimator: str) -> Tensor:
    """With d = log π_θ − log π_ref:  k1 = d,   k2 = d²/2,   k3 = e^(−d) − 1 + d.

    k1 and k3 are unbiased in value, k3 is never negative; only k2 has the KL's own gradient in expectation.
    """
    d = logp - reference_logp.detach()  # token-shaped
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        # expm1 keeps the second-order value where d is tiny and exp(−d) − 1 + d would cancel.
        return bounded(-d).expm1() + d
    raise ValueError(f"kl_estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")

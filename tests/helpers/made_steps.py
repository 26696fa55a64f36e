"""Training steps for tests: plans, optimizers, and the same updates without packing."""

import copy
from dataclasses import replace

import numpy as np
import torch
from made_batches import plain_logp

from gspo import objectives
from gspo.algorithms import ALGORITHMS
from gspo.learner import Plan, PolicyModule, make_optimizer, train_step

# Wide enough that some sequences are clipped and some are not after updates of this size.
CLIP = {"clip_low": 0.02, "clip_high": 0.03}


def make_plan(name="gspo", *, num_minibatches=1, max_tokens=8192, temperature=0.8, **changes):
    algorithm = ALGORITHMS[name]
    settings = {"level": algorithm.level, "aggregation": algorithm.aggregation}
    settings |= CLIP if algorithm.gate == "clip" else {}
    settings |= {"max_new_tokens": 11} if algorithm.aggregation == "token_sum" else {}
    settings |= changes.pop("settings", {})
    return replace(
        Plan(name, settings, num_minibatches, temperature, max_tokens, max_norm=0.0, max_new_tokens=11), **changes
    )


def sgd(policy, lr=1.0):
    return make_optimizer(policy.parameters(), kind="sgd", lr=lr, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)


def adamw(policy, weight_decay=0.0, lr=1e-2):
    return make_optimizer(
        policy.parameters(), kind="adamw", lr=lr, weight_decay=weight_decay, betas=(0.9, 0.999), eps=1e-8
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def descend(model, lr=1.0):
    """Gradient descent by hand."""
    with torch.no_grad():
        for p in model.parameters():
            p -= lr * (torch.zeros_like(p) if p.grad is None else p.grad)


def assert_same_weights(got, want, atol=1e-10):
    for (name, p), other in zip(got.named_parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=0, atol=atol, msg=name)


def run(model, batch, plan, *, proximal="recompute", lr=1.0, **more):
    policy = PolicyModule(model)
    return train_step(
        policy, sgd(policy), batch, plan, proximal=proximal, learning_rates=[lr] * plan.num_updates, **more
    )


def plain_step(model, batch, plan, *, proximal="recompute", lr=1.0):
    """The same updates the plain way: padded rows, every counted sequence, one backward per mini-batch, own counts."""
    start = copy.deepcopy(model)
    advantage = torch.from_numpy(batch.advantages)
    for k in range(plan.num_minibatches):
        which = batch.in_denominator & (batch.minibatch == k)
        model.zero_grad()
        if which.any():
            logp, mask = plain_logp(model, batch, which, plan.temperature)
            recorded = torch.zeros_like(logp)
            for b, i in enumerate(np.flatnonzero(which)):
                recorded[b, : len(batch.samples[i].tokens)] = torch.from_numpy(batch.samples[i].behavior_logp)
            if proximal == "rollout" or (k > 0 and proximal == "sampler"):
                old = recorded
            else:
                with torch.no_grad():
                    old = plain_logp(start, batch, which, plan.temperature)[0] if k else logp.detach()
            out = objectives.loss(
                plan.name, logp, old, advantage[torch.from_numpy(which)], mask, behavior_logp=recorded, **plan.settings
            )
            out.loss.backward()
        descend(model, lr)

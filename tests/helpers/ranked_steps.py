"""Training steps on several ranks, started by torchrun: `ranked_steps.py OUT CASE…`; rank 0 writes what came out.

The same functions run in the test's own process, where the world is one.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import model_zoo
import numpy as np
import torch
from made_batches import make_batch, make_group, uneven_groups, with_behavior
from made_steps import make_plan, sgd
from safetensors.torch import save_file

from gspo.errors import DataError
from gspo.learner import (
    ALONE,
    Credit,
    Critic,
    PolicyModule,
    Reference,
    ValueModule,
    full,
    joined,
    make_optimizer,
    reference_logp,
    shard,
    token_values,
    train_critic,
    train_step,
    with_token_advantages,
)
from gspo.models import adapter_off, add_adapter
from gspo.objectives import clip, clip_bounds, sequence_log_ratio, token_log_ratio
from gspo.system import StopRequest
from lab.zoo.text import tiny_model

# model, mini-batches, tokens per micro-batch, and what is special
CASES = {
    "plain": {"minibatches": 2, "max_tokens": 30},
    "own": {"minibatches": 2, "max_tokens": 30, "own": True},  # an objective of the user
    "one_sequence": {"minibatches": 1, "max_tokens": 8192, "groups": 1},  # fewer sequences than three ranks
    "tied": {"model": "llama_tied", "minibatches": 3, "max_tokens": 25, "proximal": "recompute"},
    "unshared": {"minibatches": 2, "max_tokens": 40, "layout": "packed"},
    "checkpointing": {"minibatches": 2, "max_tokens": 30, "checkpointing": True},
    "adapter": {"minibatches": 2, "max_tokens": 30, "lora": True, "reference": True},
    "reference": {"minibatches": 2, "max_tokens": 30, "reference": True},
    "experts": {"model": "qwen3_moe", "minibatches": 2, "max_tokens": 30},
    "experts_adapter": {
        "model": "qwen3_moe",
        "minibatches": 2,
        "max_tokens": 30,
        "lora": ["q_proj", "experts"],
        "reference": True,
        "checkpointing": True,
    },
    "clipped": {"minibatches": 2, "max_tokens": 30, "max_norm": 0.01, "adamw": True},
    "nonfinite": {"minibatches": 2, "max_tokens": 30, "adamw": True, "nonfinite": True},
    "critic": {"minibatches": 2, "max_tokens": 30, "critic": True},
    "padded": {"model": "qwen3_next", "layout": "padded", "minibatches": 2, "max_tokens": 40, "checkpointing": True},
    "padded_adapter": {
        "model": "mamba2",
        "layout": "padded",
        "minibatches": 1,
        "max_tokens": 60,
        "lora": ["in_proj"],
        "reference": True,
    },
    "padded_critic": {"layout": "padded", "minibatches": 2, "max_tokens": 40, "critic": True},
}
BROKEN = {"broken": {"minibatches": 2, "max_tokens": 30}}


def make_exact() -> None:
    """As the fixture `exact`: casts to float32 inside transformers go to float64."""
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double


def own_gspo(logp, proximal_logp, advantage, layout, eps_clip, eps_clip_higher):
    log_s = sequence_log_ratio(token_log_ratio(logp, proximal_logp, layout), layout)
    s, clipped = clip(log_s, *clip_bounds(advantage, eps_clip, eps_clip_higher, dtype=log_s.dtype))
    return -s * advantage, clipped


def _model(case: dict):
    name = case.get("model", "qwen3")
    return model_zoo.build(name) if name in model_zoo.NAMES else tiny_model(name, torch.float64)


def run(case: dict, world=ALONE) -> tuple[dict[str, torch.Tensor], dict]:
    """The weights after one step, and what was reported."""
    model = _model(case)
    plan = make_plan(
        num_minibatches=case["minibatches"],
        max_tokens=case["max_tokens"],
        max_norm=case.get("max_norm", 0.0),
        skip_zero_advantage="reference" not in case,
        settings={"kl_coef": 0.1} if "reference" in case else {},
    )
    if "own" in case:
        settings = {"eps_clip": 0.02, "eps_clip_higher": 0.03, "aggregation": "sequence_mean"}
        plan = replace(plan, function=own_gspo, settings=settings)
    groups = with_behavior(uneven_groups()[: case.get("groups")], model, plan.temperature)
    if "groups" in case:  # one live sequence in all
        groups = [make_group(0, [1.0, 0.0], [5, 1], prompt=(4, 5, 6))]
        groups = with_behavior(groups, model, plan.temperature)
    if case.get("lora"):
        targets = ["q_proj", "down_proj"] if case["lora"] is True else case["lora"]
        add_adapter(model, rank=3, alpha=6, target_modules=targets, seed=1)
        with torch.no_grad():
            for i, (name, p) in enumerate(model.named_parameters()):
                if "lora_B" in name:
                    p.copy_(torch.from_numpy(np.random.default_rng(i).normal(0, 0.05, tuple(p.shape))))
    policy = PolicyModule(model, gradient_checkpointing=case.get("checkpointing", False))
    policy.layout = case.get("layout", "shared")
    if world.size > 1:
        shard(policy, policy, world)
    batch = make_batch(groups, case["minibatches"])
    if "reference" in case:
        if case.get("lora"):
            reference = Reference(policy, 0.8, 30, context=lambda: adapter_off(model))
        else:
            other = PolicyModule(model_zoo.build("qwen3")).requires_grad_(False)
            if world.size > 1:
                shard(other, other, world)
            reference = Reference(other, 0.8, 30)
        batch = replace(batch, reference_logp=reference_logp(reference, batch))
    if case.get("nonfinite") and world.rank == world.size - 1:
        _break_first_backward(policy)
    if case.get("critic"):
        return _train_critic(case, batch, world)
    optimizer = sgd(policy)
    if case.get("adamw"):
        optimizer = make_optimizer(
            policy.parameters(), kind="adamw", lr=1e-2, weight_decay=0.1, betas=(0.9, 0.999), eps=1e-8
        )
    rates = [0.05] * case["minibatches"]
    report = train_step(
        policy, optimizer, batch, plan, proximal=case.get("proximal", "recompute"), learning_rates=rates,
        keep_tokens_of=frozenset({0, 3}),
    )  # fmt: skip
    weights = {name: full(p.detach()).clone() for name, p in policy.named_parameters()}
    weights |= {f"logp/{i}": torch.from_numpy(x) for i, x in report.logp.items()}
    told = {k: getattr(report, k) for k in ("losses", "grad_norms", "applied", "num_input_tokens", "num_skipped")}
    told |= {k: v.tolist() for k, v in vars(report).items() if isinstance(v, np.ndarray)}
    return weights, told


def _break_first_backward(policy) -> None:
    """The first loss of one rank, and of no other, is not a number."""
    forward, calls = policy.forward, []

    def broken(*args, **kwargs):
        out = forward(*args, **kwargs)
        if torch.is_grad_enabled() and not calls:
            calls.append(1)
            return out._replace(logp=out.logp * float("nan"))
        return out

    policy.forward = broken


def _train_critic(case, batch, world):
    trunk = PolicyModule(model_zoo.build("qwen3"))
    trunk.layout = case.get("layout", "shared")
    module = ValueModule(trunk)
    if world.size > 1:
        shard(module, trunk, world)
    optimizer = make_optimizer(module.parameters(), kind="sgd", lr=0.1, weight_decay=0, betas=(0, 0), eps=0)
    critic = Critic(module, optimizer, case["minibatches"], case["max_tokens"])
    batch = with_token_advantages(replace(batch, values=token_values(critic, batch)), Credit(gae_lambda=0.9))
    report = train_critic(critic, batch, [0.1] * case["minibatches"])
    return {name: full(p.detach()).clone() for name, p in module.named_parameters()}, vars(report)


def main(out: Path, names: list[str]) -> None:
    make_exact()
    with joined(None, 60.0, StopRequest()) as world:
        for name in names:
            if name in BROKEN and world.rank == 1:
                raise DataError("made to fail on rank 1")
            weights, told = run({**CASES, **BROKEN}[name], world)
            if world.is_first:
                save_file(weights, out / f"{name}.safetensors")
                (out / f"{name}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

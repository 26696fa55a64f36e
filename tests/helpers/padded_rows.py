"""The plain way to a gradient: right-padded rows through the model itself; and what a policy makes of the same rows."""

import model_zoo
import numpy as np
import torch

from gspo.learner import Completion, PackItem


def make_items(groups, seed=0, holes=()):
    """groups: (prompt length, completion lengths); holes: sequence index → untrained slice."""
    draw = np.random.default_rng(seed)
    items, index, holes = [], 0, dict(holes)
    for num_prompt, lengths in groups:
        completions = []
        for num in lengths:
            mask = np.ones(num, bool)
            if index in holes:
                mask[holes[index]] = False
            completions.append(Completion(draw.integers(0, model_zoo.VOCAB, num), mask, index))
            index += 1
        items.append(PackItem(draw.integers(0, model_zoo.VOCAB, num_prompt), tuple(completions)))
    return items


# Uneven groups; a one-token completion; a tool span in the middle (2), an untrained tail (3), an untrained
# head (5), nothing trained at all (7); a group of one; a group in which nothing is trained (10, 11).
UNEVEN = make_items(
    [(7, (6, 1, 9, 8)), (3, (2, 5)), (11, (4, 6, 1)), (5, (7,)), (4, (3, 2))],
    holes={2: slice(3, 6), 3: slice(5, 8), 5: slice(0, 2), 7: slice(0, 6), 10: slice(0, 3), 11: slice(0, 2)},
)


def reference(model, items, temperature=1.0):
    """Right-padded batch through the model itself; log-probs and entropy of trained tokens, per sequence index."""
    sequences = [(item.prompt, c) for item in items for c in item.completions]
    width = max(len(p) + len(c.tokens) for p, c in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    for i, (prompt, c) in enumerate(sequences):
        num = len(prompt) + len(c.tokens)
        ids[i, :num] = torch.from_numpy(np.concatenate([prompt, c.tokens]))
        attention[i, :num] = 1
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits / temperature
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    out = {}
    for i, (prompt, c) in enumerate(sequences):
        at = torch.from_numpy(np.flatnonzero(c.mask)) + len(prompt)
        out[c.index] = (logp[i, at - 1, ids[i, at]], entropy[i, at - 1])
    return out


def by_index(packed, values):
    bounds = packed.cu_seqlens.tolist()
    return {i: values[a:b] for i, a, b in zip(packed.index.tolist(), bounds[:-1], bounds[1:], strict=True)}


def sequence_loss(logp_of):
    """Nonlinear in each sequence and different for each token, so that no gradient can be right by symmetry."""
    total = 0.0
    for index in sorted(logp_of):
        logp = logp_of[index]
        if len(logp):
            weight = torch.linspace(0.5, 1.5, len(logp), dtype=logp.dtype) * (-1) ** index
            total = total + torch.exp((logp * weight).mean() * 0.3)
    return total


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def reference_gradients(model, items, temperature=1.0):
    model.zero_grad()
    out = reference(model, items, temperature)
    sequence_loss({i: logp for i, (logp, _) in out.items()}).backward()
    return out, gradients(model)


def policy_gradients(policy, batches, temperature=1.0):
    policy.zero_grad()
    logp_of, entropy_of = {}, {}
    for items in batches:
        packed = policy.pack(items)
        out = policy(packed, temperature=temperature)
        logp_of |= by_index(packed, out.logp)
        entropy_of |= by_index(packed, out.entropy)
        sequence_loss(by_index(packed, out.logp)).backward()
    return logp_of, entropy_of, gradients(policy.model)


def assert_same_gradients(got, want, tolerance=1e-10):
    assert got.keys() == want.keys()
    for name in want:
        scale = max(1.0, float(want[name].abs().max()))
        assert float((got[name] - want[name]).abs().max()) <= tolerance * scale, name


def gap(got, want):
    """Largest ‖a − b‖ / ‖b‖ of a parameter; parameters without a gradient must be the same."""
    assert got.keys() == want.keys()
    assert any(float(grad.abs().max()) > 0 for grad in want.values())
    size = max(float(grad.norm()) for grad in want.values())
    # Some gradients are 0 but for rounding: a bias of the keys moves all scores alike.
    least = size * (1e-6 if next(iter(want.values())).dtype == torch.float64 else 1e-2)
    return max(float((got[name] - want[name]).norm() / max(float(want[name].norm()), least)) for name in want)

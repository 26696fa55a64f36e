"""The value model: the policy's trunk layout with a scalar head.

V(x, y_<t) is computed from the hidden state that predicts y_t, on the same packed layout as the policy, so the G
completions of a prompt share the value of their common prefix. A new head is 0: an untrained critic predicts 0
everywhere, and the first advantages are plain returns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import Packed


class ValueModule(nn.Module):
    """A language model whose head predicts one number instead of the next token."""

    def __init__(self, policy: PolicyModule) -> None:
        """Uses the model of `policy` and replaces its language-model head."""
        super().__init__()
        self.policy = policy
        weight = policy.model.get_output_embeddings().weight  # pyright: ignore[reportOptionalMemberAccess]
        # At least float32: differences between returns are below bfloat16's resolution.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        # weight is [V, hidden]; the new head maps hidden to one value.
        head = nn.Linear(weight.shape[1], 1, dtype=dtype, device=weight.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        policy.model.set_output_embeddings(head)

    @property
    def head(self) -> nn.Linear:
        return self.policy.model.get_output_embeddings()  # pyright: ignore[reportReturnType]

    def forward(self, packed: Packed) -> Tensor:
        """V at the source of every target, [M]."""
        hidden = self.policy.hidden(packed).index_select(0, packed.source)  # [M, hidden]
        # clone(): FSDP registers a hook on the output, and does not support a view there.
        return self.head(hidden.to(self.head.weight.dtype))[:, 0].clone()

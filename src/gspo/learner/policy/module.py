"""PolicyModule: trunk and head of one model in one `forward(packed) → logp, entropy`, which sharding and hooks wrap.

A pass leaves holes in the C library's heap between the tensors that it keeps, and does not fill them again: 0.4 of
3.2 GB for SmolLM2-135M's shape, measured. The probable cause: PyTorch aligns tensors to 64 bytes, and glibc takes a
hole for an aligned block only if it is larger than the block. The pages of holes can be given back.

y = W_down ( act(g) · u ),   g = W_gate x,   u = W_up x

Autograd keeps g, u, act(g) and the product act(g) · u, each of the intermediate size: in a Llama more than half of all
activations. The last two are elementwise functions of the first two, so the backward pass can compute them again
for about a hundredth of its time. The operations are the same ones, so every bit of the gradients is the same.

Logits are computed for the targets only, in chunks (`head.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.errors import DataError
from gspo.learner.policy import FORK_TOKENS, HEAD_CHUNK
from gspo.learner.policy.head import ChunkedHead, HeadForm, Targets, logit_transform, measured_form, output_dtype
from gspo.learner.policy.packing import Layout, Packed, PackItem, filler, micro_batches, pack, split_over_ranks
from gspo.learner.policy.sharding import full
from gspo.learner.world import ALONE, World
from gspo.models import TREE, TreeLayout, current_layout, padded_routes, recomputing, use_attention, vision_of
from gspo.system import return_freed_memory

if TYPE_CHECKING:
    from gspo.learner.policy.divergence import Head
    from gspo.models import Placement, Processor


# For a smaller model the memory of Python and its libraries matters more.
MIN_WEIGHTS = 2**24
# Of a pass. The pages that are used again cost a fault each: with 5 a step of SmolLM2-135M's shape took 4 % longer,
# with 3 no longer than without.
NUM_RETURNS = 3


def return_memory_between_layers(model: nn.Module) -> int:
    """Return freed memory after every n-th layer, forward and backward; returns how many layers that are.

    0 if the model is small. It has no effect on a GPU, whose allocator reuses its holes.
    """
    if sum(weight.numel() for weight in model.parameters()) < MIN_WEIGHTS:
        return 0
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    last_of_parts = layers[:: -max(len(layers) // NUM_RETURNS, 1)]
    for layer in last_of_parts:
        layer.register_forward_hook(_return_memory)
    return len(last_of_parts)


def _return_memory(_layer: nn.Module, _inputs: Any, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    # Without gradients a pass keeps nothing, so that all it frees is one hole.
    if isinstance(hidden, Tensor) and hidden.requires_grad and hidden.device.type == "cpu":
        return_freed_memory()
        hidden.register_hook(lambda _gradient: return_freed_memory())


# Below this intermediate size a call of `checkpoint` costs more than the memory is worth.
MIN_WIDTH = 512
_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def recompute_gated_products(model: nn.Module) -> None:
    """Replace the forward pass of every gated MLP of the model that computes exactly the formula above."""
    for module in gated_mlps(model):
        module.forward = MethodType(_forward, module)


def gated_mlps(model: nn.Module) -> Iterator[Any]:
    """The wide MLPs whose forward pass is the formula, by a comparison on random numbers: one of each class."""
    same: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        found: Any = module
        if not all(hasattr(found, name) for name in _PARTS) or getattr(found.gate_proj, "out_features", 0) < MIN_WIDTH:
            continue
        if type(module) not in same:
            same[type(module)] = _computes_the_formula(found)
        if same[type(module)]:
            yield found


@torch.no_grad()
def _computes_the_formula(mlp: Any) -> bool:
    weight = mlp.gate_proj.weight
    x = torch.randn(2, mlp.gate_proj.in_features, generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, weight.dtype if weight.is_floating_point() else torch.float32)
    try:
        expected = type(mlp).forward(mlp, x)
    except Exception:  # more arguments, or another shape: not this formula
        return False
    return x.is_meta or (isinstance(expected, Tensor) and torch.equal(expected, _forward(mlp, x)))


def _forward(mlp: Any, x: Tensor) -> Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)  # [..., intermediate]

    def rest(gate: Tensor, up: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(gate) * up)

    if not torch.is_grad_enabled():
        return rest(gate, up)
    # The recomputation stops before the product with W_down: its input is the last tensor that was not kept.
    # Nothing here is random (dropout is off), so the state of the generators need not be kept.
    result = checkpoint(rest, gate, up, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(result, Tensor)
    return result


class PolicyOutput(NamedTuple):
    """Per target, in the order of `Packed.target`; float32, or float64 for a float64 model."""

    logp: Tensor  # [M]
    entropy: Tensor  # [M]; detached unless entropy_grad; empty if not computed
    divergence: Tensor | None = None  # [M], exact KL to a teacher, if there is one
    # [M] probability of the target's kept set under the softmax over the whole vocabulary; None without kept sets and
    # if the entropy is not computed.
    kept_mass: Tensor | None = None


class _AtHead(Exception):  # noqa: N818 - not an error
    """The forward pass has reached the head."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class PolicyModule(nn.Module):
    """Trunk and head of a causal language model, called on packed micro-batches.

    `layout` is how sequences enter the model (`packing.py`); `probe.py` chooses it by measurement. Dropout is always
    off: its noise would enter the ratio, which compares two evaluations of the same tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk_size: int = HEAD_CHUNK,
        fp32_head: bool = True,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.chunk_size = chunk_size
        self.fp32_head = fp32_head
        self.layout: Layout = "shared"
        self.layout_reason = ""
        self.forks = False  # whether padded rows compute a long prompt once (`forking.py`)
        self.fork_tokens = FORK_TOKENS
        self.logit_form = logit_transform(model.config)  # factor and soft cap of the logits
        self.stop_at_head = False  # whether something between `base_model` and the head changes the hidden states
        self.attention = TREE  # name of the attention implementation that shares prefixes
        self.world: World = ALONE  # the ranks that hold shards of the weights (`sharding.py`)
        self.compute_dtype: torch.dtype | None = None  # if layers compute in another dtype than the weights'
        self.vision = vision_of(model)  # None: text alone
        self.images_refused = ""  # why prompts cannot show images, though the model has a vision tower
        self.processor: Processor | None = None  # makes tokens and inputs of text and images
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise DataError(
                f"{type(model).__name__} has no plain linear head (got {type(head).__name__}): "
                "actor.path must be a causal language model"
            )
        if gradient_checkpointing:
            self.checkpoint_layers()
        else:
            recompute_gated_products(model)
        return_memory_between_layers(model)
        for module in self.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # These layers are in training mode (see `train`), and some apply dropout themselves (OPT, BART).
                for name, value in vars(module).items():
                    if "drop" in name and isinstance(value, float):
                        setattr(module, name, 0.0)
        self.train()

    def checkpoint_layers(self) -> None:
        """Recompute each layer in the backward pass."""
        # `forward` has restored the attention implementation by then, so the recomputation must select it and its
        # layout again. Experts are replayed from the forward pass: a router near a tie could choose others.
        self.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": self._recomputed})

    def train(self, mode: bool = True) -> PolicyModule:
        """Training mode without dropout: only the layers that use the mode for gradient checkpointing are set to it."""
        super().train(False)
        self.training = mode
        for module in self.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = mode
        return self

    @property
    def layout_line(self) -> str:
        """Which layout this model has, and why: one line for people."""
        return self.layout_reason + ("; a group's long prompt is computed once" if self.forks else "")

    def _head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()
        assert isinstance(head, nn.Linear)  # checked in __init__
        return head

    def _attention(self, layout: TreeLayout | None) -> contextlib.AbstractContextManager[None]:
        # The other layouts use the model's own attention. For plain packing transformers derives its masks from
        # positions that restart at 0.
        return (
            use_attention(self.model, self.attention, layout) if self.layout == "shared" else contextlib.nullcontext()
        )

    def _recomputed(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """The contexts around a layer's forward pass and around its recomputation in the backward pass."""
        attention, experts = self._attention(current_layout()), recomputing()

        @contextlib.contextmanager
        def both() -> Iterator[None]:
            with attention, experts:
                yield

        return contextlib.nullcontext(), both()

    def forward(
        self,
        packed: Packed,
        *,
        temperature: float = 1.0,
        with_entropy: bool = True,
        entropy_grad: bool = False,
        teacher: PolicyModule | None = None,
        forward_share: float = 0.0,
    ) -> PolicyOutput:
        """log softmax(logits / temperature) at the targets, and the entropy of that distribution.

        The softmax is over the target's kept set, if the sampler recorded one (truncated sampling).
        teacher: also the exact KL to this model over the vocabulary, `forward_share` of it forward (`divergence.py`).
        """
        head = self._head()
        if not packed.num_targets:
            # A leaf tensor, so that backward() works for a loss over no tokens.
            empty = torch.zeros(0, dtype=output_dtype(head.weight.dtype), device=head.weight.device)
            return PolicyOutput(empty.requires_grad_(torch.is_grad_enabled()), empty.detach())
        # Several targets can have the same source (the first tokens of a group): its logits are computed once.
        rows, order, begins = packed.by_source  # [U], [M], [U+1]
        hidden = self.hidden(packed).index_select(0, rows)  # [U, hidden]
        scale, softcap = self.logit_form
        kept_begins = None if packed.kept_counts is None else F.pad(packed.kept_counts.cumsum(0), (1, 0))
        # Sorted by source: log-probs [M] per target, entropy and mass [U] per hidden row.
        logp, entropy, mass = ChunkedHead.apply(
            hidden,
            head.weight,
            head.bias,
            Targets(
                packed.target[order], begins, scale / temperature, softcap, temperature, kept_begins, packed.kept_ids
            ),
            form := HeadForm(self.chunk_size, self.fp32_head, with_entropy or entropy_grad, entropy_grad),
        )  # pyright: ignore[reportGeneralTypeIssues]
        # Undo the sort, and give each target the entropy of its row.
        place = torch.empty_like(order)  # [M] inverse of `order`: back from sorted to the order of `Packed.target`
        place[order] = torch.arange(len(order), device=order.device)
        row_of_target = torch.repeat_interleave(begins.diff())  # [M]
        divergence = None
        if teacher is not None:
            from gspo.learner.policy.divergence import divergence_of

            with torch.no_grad():
                theirs = teacher.hidden(packed).index_select(0, rows)  # [U, hidden of the teacher]
            rows_kl = divergence_of(
                self._rows(hidden, temperature), teacher._rows(theirs, temperature), forward_share, form
            )  # [U]
            divergence = rows_kl[row_of_target][place]
        entropy = entropy[row_of_target][place] if len(entropy) else entropy
        # With kept sets every target has its own row, in the order of the targets: `mass` needs no reordering.
        return PolicyOutput(logp[place], entropy, divergence, mass if len(mass) else None)

    def _rows(self, hidden: Tensor, temperature: float) -> Head:
        """Hidden rows with this model's head."""
        from gspo.learner.policy.divergence import Head

        head, (scale, softcap) = self._head(), self.logit_form
        return Head(hidden, head.weight, head.bias, scale / temperature, softcap, temperature)

    def hidden(self, packed: Packed) -> Tensor:
        """The trunk's last hidden states, [N, hidden]."""
        if self.layout != "shared" and bool((packed.parent >= 0).any()):
            if self.forks:
                from gspo.learner.policy.forking import forked_hidden

                return forked_hidden(self.model.base_model, packed)
            raise ValueError("this model does not share prefixes: use PolicyModule.pack")
        inputs, layout = self._image_inputs(packed) if packed.shown is not None else ({}, packed.layout)
        if self.layout == "padded":
            ids, at = packed.padded  # [B, T], [N]
            with padded_routes(at):
                out = self.trunk(input_ids=ids, **inputs)  # [B, T, hidden]
            return out.flatten(0, 1).index_select(0, at)
        with self._attention(layout):
            return self.trunk(**{"input_ids": packed.tokens[None], "position_ids": packed.positions[None], **inputs})[0]

    def _image_inputs(self, packed: Packed) -> tuple[dict[str, Any], TreeLayout]:
        """The arguments of the trunk for a row with images, after a pass of the tower, and the attention's layout."""
        vision, shown, device = self.vision, packed.shown, packed.tokens.device
        assert shown is not None
        if vision is None:
            reason = self.images_refused or "it has no vision tower that transformers can run apart from its text part"
            raise DataError(f"{type(self.model).__name__} takes no images: {reason}")
        made = packed.__dict__.get("placement")
        if made is None or made[0] is not vision:
            tree = packed.layout
            placement = vision.lay_out(packed.tokens.cpu().numpy(), tree.positions, tree.start, tree.length, shown)
            layout = tree
            if placement.blocks is not None:
                layout = TreeLayout(tree.start, tree.length, tree.parent, placement.blocks)
            made = packed.__dict__["placement"] = (vision, placement, layout)
        _, placement, layout = made
        inputs: dict[str, Any] = {"mm_encoder_outputs": {"image": vision.encoder_output(shown.prompts, placement)}}
        positions = _rotary(placement, packed, self.layout)
        if positions is not None:
            inputs["position_ids"] = positions.to(device)
        # With shared prefixes, the layout has the blocks and transformers makes no mask.
        if placement.types is not None and self.layout != "shared":
            types = torch.from_numpy(placement.types).to(device)  # [N]
            if self.layout == "padded":
                ids, at = packed.padded  # [B, T], [N]
                types = torch.full_like(ids, placement.type_after).view(-1).index_copy_(0, at, types).view_as(ids)
            inputs["token_type_ids"] = types if self.layout == "padded" else types[None]
        return inputs, layout

    def trunk(self, **inputs: Any) -> Tensor:
        """The hidden states that enter the head, [B, T, hidden]."""
        if not self.stop_at_head:
            return self.model.base_model(use_cache=False, **inputs).last_hidden_state

        def stop(module: nn.Module, args: tuple[Tensor]) -> None:
            raise _AtHead(args[0])

        # The model's own forward up to the head: the exception saves the logits of all positions.
        handle = self._head().register_forward_pre_hook(stop)
        try:
            self.model(use_cache=False, **inputs)
        except _AtHead as reached:
            return reached.hidden
        finally:
            handle.remove()
        raise AssertionError("the model did not call its head")  # `inspect_head` has checked it

    def inspect_head(self, items: list[PackItem]) -> None:
        """Set `stop_at_head` if `base_model` does not give what the head reads, and `logit_form` by measurement."""
        ids = torch.from_numpy(items[0].prompt).to(self.model.device)[None]  # [1, P]
        inputs, outputs = [], []
        handle = self._head().register_forward_hook(
            lambda _, read, made: (inputs.append(read[0]), outputs.append(made), None)[-1]
        )
        try:
            logits = self.model(input_ids=ids, use_cache=False).logits
        finally:
            handle.remove()
        if not outputs:
            raise DataError(f"{type(self.model).__name__} does not call its own output embeddings")
        self.logit_form = measured_form(outputs[0], logits, self.logit_form)
        self.stop_at_head = False
        try:
            self.stop_at_head = not torch.equal(self.trunk(input_ids=ids), inputs[0])
        except (AttributeError, TypeError):  # `base_model` is the model itself, or has another output
            self.stop_at_head = True

    def pack(self, items: Sequence[PackItem]) -> Packed:
        """One micro-batch in this module's layout, on its device."""
        if self.forks:
            from gspo.learner.policy.forking import fork_items

            items = fork_items(items, self.fork_tokens)
        return pack(items, share_prefix=self.forks or self.layout == "shared").to(self._head().weight.device)

    def plain_logp(self, items: list[PackItem]) -> Tensor:
        """[M] log-probs of all completion tokens by the model's own forward: one sequence per call, no packing."""
        parts, device = [], self.model.device
        for item in items:
            for completion in item.completions:
                tokens = torch.from_numpy(np.concatenate([item.prompt, completion.tokens])).to(device)  # [P + T]
                more = self.plain_inputs(item, len(tokens) - 1)
                # [T, V]; the last prompt token predicts the first completion token
                out = self.model(input_ids=tokens[None, :-1], use_cache=False, **more)
                logits = out.logits[0, len(item.prompt) - 1 :]
                logp = logits.to(output_dtype(logits.dtype)).log_softmax(-1)  # [T, V]
                parts.append(logp.gather(1, tokens[len(item.prompt) :, None])[:, 0])  # [T]
        return torch.cat(parts)

    def plain_inputs(self, item: PackItem, num_tokens: int) -> dict[str, Tensor]:
        """What the model's own forward needs besides `num_tokens` tokens that begin with the prompt of `item`."""
        if item.shown is None or self.vision is None:
            return {}
        return self.vision.plain_inputs(item.shown, num_tokens)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """`weight_names` as unsharded tensors on the CPU, one at a time; all ranks must iterate together."""
        for name, tensor in weight_names(self):
            yield name, full(tensor).to("cpu", self.compute_dtype)


def _rotary(placement: Placement, packed: Packed, layout: Layout) -> Tensor | None:
    """The positions of a row with images in the form that its model takes; None: those of the row."""
    if placement.positions is None:
        return None
    positions = torch.from_numpy(placement.positions).to(packed.tokens.device)  # [D, N]
    if layout == "padded":
        ids, at = packed.padded  # [B, T], [N]
        made = positions.new_zeros(len(positions), ids.numel()).index_copy_(1, at, positions)
        made = made.view(-1, *ids.shape)  # [D, B, T]
    else:
        # In plain packing, a model with 3-D positions makes its masks from one more row: the positions of the text.
        is_4d = layout == "packed" and len(positions) > 1
        made = (torch.cat([packed.positions[None], positions]) if is_4d else positions)[:, None]  # [D or D + 1, 1, N]
    return made if len(positions) > 1 else made[0]


def weight_names(policy: PolicyModule) -> Iterator[tuple[str, Tensor]]:
    """(name as in the model's checkpoint on disk, tensor), tied weights once, for sync, export and checkpoints.

    transformers holds all experts of a layer in one tensor; names and shapes here are those of the files. A LoRA
    adapter is merged into copies of the weights that it changes, so the receiver needs no adapter.
    """
    from gspo.models import merged_state

    model = policy.model
    # A tied weight has two names and one tensor; it is sent and stored once.
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in merged_state(model).items() if name not in tied}
    yield from sorted(revert_weight_conversion(model, state).items())


def packed_parts(module: PolicyModule, items: Sequence[PackItem], max_tokens: int) -> list[Packed]:
    """This rank's micro-batches of some sequences, packed and on the module's device."""
    if not items:
        return []
    world, layout = module.world, module.layout
    if module.forks:  # one rank
        from gspo.learner.policy.forking import fork_batches

        forked, rest = fork_batches(items, max_tokens, module.fork_tokens)
        return [module.pack(part) for part in [*forked, *micro_batches(rest, max_tokens, layout=layout)]]
    split = partial(micro_batches, max_tokens=max_tokens, layout=layout)
    # Every rank computes the split of all ranks: all learn the largest number of micro-batches without communication.
    per_rank = split_over_ranks(items, world.size, layout=layout) if world.size > 1 else [items]
    splits = [split(own) if own else [] for own in per_rank]
    num, parts = max(len(parts) for parts in splits), splits[world.rank]
    if 0 < len(parts) < num:
        # Fewer micro-batches than another rank: a finer split of real work needs fewer fillers.
        parts = split(per_rank[world.rank], min_batches=num)
    packs = [module.pack(part) for part in parts]
    # FSDP all-gathers each layer on all ranks together, so every rank runs the same number of micro-batches.
    return packs + [filler().to(next(module.parameters()).device) for _ in range(num - len(packs))]

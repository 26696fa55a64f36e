"""Which layout a model gets: each is compared at load with the model's own forward pass, one sequence per call.

Shared prefixes first (on CUDA with the fused kernel, then without it), then plain packing, then padded rows. A layout
must give the same log-probs and the same gradients, and no gradient from a sequence to the tokens of another one. The
last test is exact in every dtype: state that leaks over the border of two sequences (linear attention, convolutions)
can change log-probs by less than the rounding of two correct computations. Several ranks compare no gradients; there,
the log-probs of a sequence must not change with the tokens of others.

A model with padded rows computes long prompts once per group (`forking.py`) if log-probs and gradients are those of its
plain padded rows.

A vision-language model is compared a second time, with images: text alone would pass a model whose image positions or
masks are wrong. One that fails then trains on text only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gspo import rng
from gspo.errors import DataError
from gspo.learner.policy.module import PolicyModule
from gspo.learner.policy.packing import Completion, Layout, Packed, PackItem
from gspo.models import TREE, routers
from gspo.sampling import leaves_of
from gspo.types import ImageFile, Prompt

if TYPE_CHECKING:
    from gspo.models import Processor

# Largest |log-prob difference| between two correct computations; attention across sequences gives far more.
LOGP_TOLERANCE = {torch.float64: 1e-8, torch.float32: 5e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
# Largest ‖a − b‖ / ‖b‖ of two correct gradients. Wide for 16 bits: one token with another expert moves it far.
GRADIENT_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.3}
_LEAK = "a sequence depends on tokens of another one"
WORDS: dict[Layout, str] = {"shared": "shared prefixes", "packed": "plain packing", "padded": "padded rows"}


class Probed(NamedTuple):
    """The layout that was chosen, and its differences from the model's own forward pass."""

    layout: Layout
    reason: str  # one line: which layout, and why no better one
    logp_gap: float  # largest |difference| of a log-prob
    gradient_gap: float | None  # ‖difference‖ / ‖gradient‖; None on several ranks, where it is not measured
    attention: str = TREE


def probe(policy: PolicyModule, *, share_prefix: bool = True, processor: Processor | None = None) -> Probed:
    """Set the layout of `policy` to the first one that agrees with the model's own forward, or raise DataError.

    `share_prefix=False` (actor.share_prefix) leaves out what computes a prompt once. With the `processor` of a
    vision-language model, prompts with images are compared too; if they fail, `policy.vision` is None afterwards.
    """
    policy.forks = False
    probed = _chosen(policy, share_prefix, processor)
    policy.forks = share_prefix and policy.layout == "padded" and _can_fork(policy)
    return probed


def _chosen(policy: PolicyModule, share_prefix: bool, processor: Processor | None) -> Probed:
    items = probe_items(policy.model.config.get_text_config().vocab_size)
    ways = _ways(policy, share_prefix)
    vision = policy.vision
    if policy.world.size > 1 and vision is not None:
        # FSDP cuts the tower too: all ranks would have to run it equally often.
        policy.vision, policy.images_refused = None, "with several ranks, prompts cannot show images: train on one GPU"
    if policy.vision is None or vision is None or processor is None:
        return _first_right(policy, items, ways)
    training = policy.training
    plain = _without(vision.token, items)
    on_text = None if vision.sees_prompts_both_ways else _first_right(policy, items, ways)
    try:
        shown = [
            PackItem(np.array(prompt.tokens), item.completions, prompt.shown)
            for prompt, item in zip(image_prompts(processor), plain, strict=True)
        ]
        if on_text is None:
            return _first_right(policy, shown, ways)
        # Text beside images, in one row. The layout may be a slower one than that of text alone.
        count = sum(len(item.completions) for item in shown)
        text = [replace(i, completions=tuple(replace(c, index=c.index + count) for c in i.completions)) for i in plain]
        return _first_right(policy, [*shown, *text], ways[ways.index((policy.attention, policy.layout)) :])
    except DataError as cause:
        if on_text is None:
            raise
        policy.vision, policy.images_refused = None, str(cause)
        policy.attention, policy.layout, policy.layout_reason = on_text.attention, on_text.layout, on_text.reason
        policy.train(training)
        return on_text


def _ways(policy: PolicyModule, share_prefix: bool) -> list[tuple[str, Layout]]:
    """The attentions and layouts that may be right, best first."""
    on_cuda = policy.model.device.type == "cuda"
    ways: list[tuple[str, Layout]] = [(TREE, "padded")]
    if not _why_padded(policy):
        ways.insert(0, (TREE, "packed"))
        if share_prefix:
            ways.insert(0, (TREE, "shared"))
            if on_cuda:
                from gspo.models import FLEX

                ways.insert(0, (FLEX, "shared"))
    return ways


def _why_padded(policy: PolicyModule) -> str:
    # Not measured for models that say so themselves: fused kernels of such layers may accept packed rows on one
    # machine and not on another.
    stateful = bool(getattr(policy.model, "_is_stateful", False))
    return "keeps state outside the attention" if stateful else _mask_table(policy.model)


def _first_right(policy: PolicyModule, items: list[PackItem], ways: list[tuple[str, Layout]]) -> Probed:
    name = type(policy.model).__name__
    training = policy.training
    policy.eval()  # no gradient checkpointing: one graph is differentiated several times
    with torch.no_grad():
        # [M] the reference: the model's own forward, without packing and without the code under test
        plain = policy.plain_logp(items)
        policy.inspect_head(items)
    if not bool(plain.isfinite().all()):
        raise DataError(_not_finite(policy))
    causes: dict[Layout, str] = {}
    # The loop variables are attributes of the module: the first way that agrees stays selected.
    for policy.attention, policy.layout in ways:
        try:
            logp_gap, gradient_gap = _gaps(policy, items, plain)
        except _LeakError as cause:
            causes[policy.layout] = str(cause)
            continue
        except Exception as cause:  # a third-party model may raise anything for an unknown argument
            causes[policy.layout] = f"{type(cause).__name__}: {cause}"
            continue
        if failure := _failure(policy, logp_gap, gradient_gap):
            causes[policy.layout] = failure
            continue
        policy.train(training)
        policy.layout_reason = _reason(name, policy.layout, logp_gap, causes, _why_padded(policy))
        return Probed(policy.layout, policy.layout_reason, logp_gap, gradient_gap, policy.attention)
    found = "; ".join(f"with {WORDS[layout]}, {cause}" for layout, cause in causes.items())
    raise DataError(
        f"{name} cannot be trained: its log-probs are not those of its own forward pass: {found}. The model transforms "
        "its logits in an unknown way, or is not causal; set actor.path to another architecture"
    )


def _reason(name: str, layout: Layout, gap: float, causes: dict[Layout, str], why_padded: str) -> str:
    words = f"{WORDS[layout]}: {name}"
    if layout == "shared":
        return f"{words} computes a group's prompt once; log-probs within {gap:.1g} of the model's own forward"
    if why_padded:
        return f"{words} {why_padded}"
    if not causes:
        return f"{words} repeats the prompt in every sequence, because actor.share_prefix is false"
    why = "; ".join(f"{WORDS[other]}: {cause}" for other, cause in causes.items())
    return f"{words} cannot use a faster layout ({why})"


def _mask_table(model: nn.Module) -> str:
    """Why rows must not be longer than the context; empty if they may be. A packed row holds several sequences."""
    tables = [b for b in model.buffers() if b.ndim == 4 and b.shape[-1] == b.shape[-2] > 1]
    return f"has an attention mask of {tables[0].shape[-1]} positions" if tables else ""


def _failure(policy: PolicyModule, logp_gap: float, gradient_gap: float | None) -> str:
    """Why a layout with these differences is not used; empty if it is."""
    dtype = policy.compute_dtype or policy.model.dtype
    allowed = LOGP_TOLERANCE.get(dtype, 0.1)
    if not logp_gap <= allowed:
        return f"log-probs differ by {logp_gap:.2g} (allowed {allowed:.2g})"
    allowed = GRADIENT_TOLERANCE.get(dtype, 0.5)
    # The gradient of plain padded rows is that of the model's own code.
    if (policy.layout != "padded" or policy.forks) and gradient_gap is not None and not gradient_gap <= allowed:
        return f"gradients differ by {gradient_gap:.2g} of their size (allowed {allowed:.2g})"
    return ""


def _gaps(policy: PolicyModule, items: list[PackItem], plain: Tensor) -> tuple[float, float | None]:
    """Largest difference of log-probs, and of the gradient with respect to the embeddings of the tokens, relative.

    Raises _LeakError if a sequence has a gradient at tokens that it does not contain.
    """
    packed = policy.pack(items)
    with torch.no_grad():
        logp_gap = float((policy(packed, with_entropy=False).logp - plain).abs().max())
    # Several ranks: FSDP's hooks reduce gradients, so leaks are looked for in the log-probs.
    if policy.world.size > 1:
        _check_leak(policy, packed)
        return logp_gap, None
    with _embedded(policy.model) as embedded:
        hidden = policy.hidden(packed).index_select(0, packed.source)  # [M, hidden]
    if not embedded:  # this model does not call its input embeddings as a module
        return logp_gap, None
    gap = 0.0
    completions = [(item, completion) for item in items for completion in item.completions]
    for b, (item, completion) in enumerate(completions):
        low, high = packed.cu_seqlens[b : b + 2].tolist()
        direction = torch.linspace(-1, 1, hidden[low:high].numel(), device=hidden.device).cos().to(hidden.dtype)
        direction = direction.view(high - low, -1)  # a different weight for every element
        (got,) = torch.autograd.grad((hidden[low:high] * direction).sum(), embedded[0], retain_graph=True)
        # The same sequence alone, by the model's own code: [1, L, hidden]
        alone = policy.pack([replace(item, completions=(completion,))])
        with _embedded(policy.model) as own:
            out = policy.trunk(input_ids=alone.tokens[None], **policy.plain_inputs(item, alone.num_tokens))[0]
        (want,) = torch.autograd.grad((out.index_select(0, alone.source) * direction).sum(), own[0])
        if policy.layout == "padded":
            ids, at = packed.padded  # [B, T], [N]
            # XLNet embeds [T, B].
            got = (got if got.shape[:2] == ids.shape else got.transpose(0, 1)).flatten(0, 1).index_select(0, at)[None]
        got, want = got.flatten(0, 1), want.flatten(0, 1)  # [N, hidden] in the order of the packed row, [L, hidden]
        rows = _rows(packed, b)  # [L]
        gap = max(gap, float((got[rows] - want).norm() / want.norm().clamp_min(1e-30)))
        got[rows] = 0
        if bool(got.any()):
            raise _LeakError(_LEAK)
    return logp_gap, gap


def _can_fork(policy: PolicyModule) -> bool:
    """Whether prompts that are computed once give the log-probs and gradients of plain padded rows."""
    model = policy.model
    if policy.world.size > 1 or policy.vision is not None or policy.stop_at_head:
        return False
    if model.is_gradient_checkpointing or routers(model):
        return False
    items = probe_items(model.config.get_text_config().vocab_size)
    from gspo.learner.policy.forking import fork

    training, least = policy.training, policy.fork_tokens
    policy.eval()
    try:
        # Exact in every dtype: no state of the prompt is cut off from its tokens.
        ids = torch.from_numpy(items[0].prompt).to(model.device)[None]  # [1, P]
        with _shifted(model):
            (cache,) = fork(model.base_model(input_ids=ids, use_cache=True), 2).values()
        if any(cache.is_sliding):  # these prompts are shorter than a window, so they would not test it
            return False
        states = [leaf for _, leaf in leaves_of(cache) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not states or not all(state.requires_grad for state in states):
            return False
        found = []
        for policy.forks, policy.fork_tokens in ((False, least), (True, 0)):
            packed = policy.pack(items)
            with torch.no_grad():
                logp = policy(packed, with_entropy=False).logp  # [M]
            with _shifted(model) as shift:
                hidden = policy.hidden(packed).index_select(0, packed.source)  # [M, hidden]
            direction = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).cos().to(hidden.dtype)
            (gradient,) = torch.autograd.grad((hidden * direction.view_as(hidden)).sum(), shift)
            found.append((logp, gradient))
        (want, want_gradient), (got, got_gradient) = found
        gradient_gap = float((got_gradient - want_gradient).norm() / want_gradient.norm().clamp_min(1e-30))
        return not _failure(policy, float((got - want).abs().max()), gradient_gap)
    except Exception:  # a third-party model may raise anything for a cache that continues with several tokens
        return False
    finally:
        policy.forks, policy.fork_tokens = False, least
        policy.train(training)


@contextlib.contextmanager
def _shifted(model: nn.Module) -> Iterator[Tensor]:
    """A leaf of zeros, [8, hidden], that is added to the input embeddings: row id % 8 for each token."""
    weight: Tensor = model.get_input_embeddings().weight  # pyright: ignore
    shift = torch.zeros(8, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)
    handle = model.get_input_embeddings().register_forward_hook(  # pyright: ignore
        lambda _, args, output: output + shift[args[0] % 8].to(output.dtype)
    )
    try:
        with torch.enable_grad():
            yield shift
    finally:
        handle.remove()


def _check_leak(policy: PolicyModule, packed: Packed) -> None:
    """Raise _LeakError if the log-probs of a sequence change with the tokens of others, by much less than is allowed.

    The same shapes and kernels compute both, so a dense model gives the same bits. Experts see other tokens beside.
    """
    allowed = LOGP_TOLERANCE.get(policy.compute_dtype or policy.model.dtype, 0.1) / 10
    with torch.no_grad():
        before = policy(packed, with_entropy=False).logp
    for b in range(len(packed.index)):
        low, high = packed.cu_seqlens[b : b + 2].tolist()
        # The same row with token 0 in place of all that the sequence must not see.
        tokens = torch.zeros_like(packed.tokens)
        rows = _rows(packed, b)
        tokens[rows] = packed.tokens[rows]
        with torch.no_grad():
            after = policy(replace(packed, tokens=tokens), with_entropy=False).logp
        if not float((after - before)[low:high].abs().max()) <= allowed:
            raise _LeakError(_LEAK)


class _LeakError(Exception):
    """A sequence depends on tokens of another one."""


def _rows(packed: Packed, b: int) -> Tensor:
    """[L] where the input tokens of sequence b are in the packed row, in their order."""
    start, length, parent = (x.tolist() for x in (packed.start, packed.length, packed.parent))
    last = int(packed.source[packed.cu_seqlens[b + 1] - 1])
    segment = next(s for s, begin in enumerate(start) if begin <= last < begin + length[s])
    parts = [torch.arange(start[segment], last + 1)]
    while (segment := parent[segment]) >= 0:
        parts.insert(0, torch.arange(start[segment], start[segment] + length[segment]))
    return torch.cat(parts).to(packed.tokens.device)


@contextlib.contextmanager
def _embedded(model: nn.Module) -> Iterator[list[Tensor]]:
    """The outputs of the input embeddings while the block runs, as tensors with a gradient."""
    found: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Tensor) -> Tensor:
        # With an adapter the embeddings are frozen.
        output = output if output.requires_grad else output.detach().requires_grad_()
        found.append(output)
        return output

    handle = model.get_input_embeddings().register_forward_hook(keep)  # pyright: ignore
    try:
        with torch.enable_grad():
            yield found
    finally:
        handle.remove()


def _not_finite(policy: PolicyModule) -> str:
    name = type(policy.model).__name__
    broken = [n for n, p in policy.model.named_parameters() if p.is_floating_point() and not bool(p.isfinite().all())]
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        return (
            f"{name} has weights that are NaN or infinite: {', '.join(broken[:3])}{more}; check the files of actor.path"
        )
    return f"{name} gives log-probs that are not finite in {policy.model.dtype}; set actor.dtype: float32"


def image_prompts(processor: Processor) -> list[Prompt]:
    """A prompt with one image, and one with two of other sizes; text is between two images."""
    from PIL import Image

    draw = rng.generator(0, "probe images")
    found = []
    for sizes in (((64, 48),), ((48, 64), (32, 32))):
        # Noise, so that no two patches are equal.
        pixels = [draw.integers(0, 256, (height, width, 3)).astype(np.uint8) for width, height in sizes]
        files = [ImageFile("probe", partial(Image.fromarray, array)) for array in pixels]
        text = "".join(f"{processor.placeholder} a " for _ in files)
        tokens, images = processor.prompt(text, files)
        found.append(Prompt(tokens, text, images=images))
    return found


def _without(token: int, items: list[PackItem]) -> list[PackItem]:
    """The items with another token in its place: the model's own forward would ask for a feature there."""

    def other(completion: Completion) -> Completion:
        return replace(completion, tokens=_replaced(completion.tokens, token))

    return [
        replace(item, prompt=_replaced(item.prompt, token), completions=tuple(map(other, item.completions)))
        for item in items
    ]


def _replaced(tokens: NDArray[Any], token: int) -> NDArray[Any]:
    return np.where(tokens == token, token - 1 if token else 1, tokens)


def probe_items(vocab_size: int) -> list[PackItem]:
    """Two groups of unequal lengths, one with a one-token completion: all edge cases of the packing."""
    draw = rng.generator(0, "probe")
    items, index = [], 0
    for num_prompt, lengths in ((9, (5, 1, 8)), (4, (7, 3))):
        completions = []
        for num in lengths:
            completions.append(Completion(draw.integers(0, vocab_size, num), np.ones(num, bool), index))
            index += 1
        items.append(PackItem(draw.integers(0, vocab_size, num_prompt), tuple(completions)))
    return items

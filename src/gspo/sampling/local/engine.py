"""The in-process sampler: continuous batching with the model that is trained.

A prompt is prefilled and stored once for its group. Between two tokens, finished rows leave and waiting requests join.
The weights are the trainer's own tensors, not a copy; attention implementation and train mode are changed for a call
and restored after it. Which token is drawn depends on the request's key and the weights, not on other requests.

Shapes: N rows of a forward, V vocabulary, P prompt tokens.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from gspo import rng
from gspo.errors import RolloutError
from gspo.faults import reached
from gspo.models.moe import route_shape, routed, routers
from gspo.sampling.local.cache import (
    ATTENTION,
    DecodePlan,
    ExtendPlan,
    Grid,
    KVStore,
    Plan,
    PrefillPlan,
    active,
    make_grid,
)
from gspo.sampling.local.draw import draw, warp
from gspo.sampling.local.rows import Rows
from gspo.sampling.requests import validate_request
from gspo.sampling.weights.load import copy_weights
from gspo.types import FinishReason, Request, Sample, SampleId, SamplingParams

Tokens = tuple[int, ...]


@dataclass(slots=True)
class _Group:
    """A prompt whose keys and values are stored."""

    slot: int
    logits: Tensor  # [V] at its last token; the first token of every row is drawn from them
    routes: NDArray | None  # [P, layers, top_k] experts of its positions; None for a dense model


@dataclass(slots=True)
class _Rule:
    """One set of sampling parameters, and values derived from it."""

    params: SamplingParams
    temperature: float
    ends_v: NDArray[np.bool_]  # [V] tokens that end a sample
    stop_bytes: int  # bytes of the longest stop string: at most as many tokens can be part of it


class LocalSampler:
    """Implements `gspo.sampling.api.Sampler` for any decoder-only transformers model with an attention interface.

    `decode` turns token ids into text; only stop strings need it. `max_context` defaults to the model's limit.
    `verify` compares a few log-probs with a plain forward, and refuses a model for which a packed forward is wrong.
    """

    def __init__(
        self,
        model: Any,
        *,
        seed: int,
        eos_token_ids: Collection[int],
        decode: Callable[[Sequence[int]], str] | None = None,
        max_rows: int = 256,
        max_context: int | None = None,
        pad_rows: int = 8,
        prefill_tokens: int = 8192,
        version: int = 0,
        verify: bool = True,
    ) -> None:
        if max_rows < 1:
            raise RolloutError(f"max_rows is {max_rows}: the sampler needs at least one row")
        self.version = version
        self._model, self._seed, self._decode_text = model, seed, decode
        self._eos = frozenset(eos_token_ids)
        self._max_rows, self._prefill_tokens = max_rows, prefill_tokens
        # Of a multimodal model, only the language part matters here.
        config = model.config.get_text_config()
        self._num_vocab = int(config.vocab_size)
        limit = getattr(config, "max_position_embeddings", None)
        self._max_context = max_context or limit or 2**31
        # A part of the model may have its own config object: the attention implementation is set on each of them.
        self._configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        # Plain nn.Linear only: adapters and quantised layers keep their own forward.
        linears = [m for m in model.modules() if type(m) is nn.Linear and m.weight.device.type == "cpu"]
        self._linears = [m for m in linears if m.weight.numel() >= _MANY_WEIGHTS]
        self._waiting: deque[Request] = deque()
        self._done: deque[Sample] = deque()
        self._references: Counter[Tokens] = Counter()  # outstanding requests of each prompt
        self._rules: dict[SamplingParams, int] = {}
        self._rule_list: list[_Rule] = []
        self._routers = routers(model)
        self._routes: NDArray | None = None  # [N, layers, top_k] of the last forward
        self._paused = self._asleep = self._closed = False
        self._counts: Counter[str] = Counter()
        self._pad_rows = pad_rows
        # The tables need the routers, and the check below needs the tables.
        self._clear()
        _refuse_unsupported(model)
        if verify and self._max_context >= 8:
            self._verify()

    def submit(self, requests: Sequence[Request]) -> None:
        if self._closed:
            raise RolloutError("the sampler is closed: nothing can be submitted")
        for request in requests:  # all are checked before any is queued
            validate_request(
                request,
                num_vocab=self._num_vocab,
                max_context=self._max_context,
                sees_text=self._decode_text is not None,
            )
        for request in requests:
            # The prefix already has all tokens it may have: there is nothing to sample.
            if request.prefix is not None and len(request.prefix.tokens) >= request.params.max_new_tokens:
                self._done.append(replace(request.prefix, id=request.id, finish="length"))
                continue
            # Requests share a rule if their parameters are equal: its [V] array is built once.
            if request.params not in self._rules:
                self._rules[request.params] = len(self._rule_list)
                self._rule_list.append(self._rule(request.params))
            self._references[request.prompt] += 1
            self._waiting.append(request)

    def completed(self, deadline_s: float | None = None) -> Iterator[Sample]:
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        moved = False
        while True:
            while self._done:
                yield self._done.popleft()
            if self._stopped() or (moved and deadline is not None and time.monotonic() >= deadline):
                return
            self._advance(deadline)
            moved = True  # at least one token per call: polling with a deadline of 0 makes progress

    def abort(self) -> list[Sample]:
        self._requeue()
        partial = [r.prefix or Sample.of(r.id, [], [], self.version) for r in self._waiting]
        partial = [replace(s, id=r.id, finish="abort") for s, r in zip(partial, self._waiting, strict=True)]
        self._waiting.clear()
        self._references.clear()
        return partial

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def sleep(self) -> None:
        self._requeue()
        self._asleep = True

    def wake(self) -> None:
        self._asleep = False

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]] | None) -> None:
        # `copy_weights` raises before it writes. Rows and caches are dropped only after it has succeeded.
        if tensors is not None:
            copy_weights(self._model, tensors)
        self._requeue()
        self.version = version

    def health(self) -> Mapping[str, Any]:
        """State, and counters of what was computed since the start."""
        return {
            "version": self.version,
            "running": int(self._rows.alive.sum()),
            "waiting": len(self._waiting),
            "paused": self._paused,
            "asleep": self._asleep,
            "closed": self._closed,
            "cache_bytes": self._store.num_bytes(),
            **{name: self._counts[name] for name in _COUNTERS},
        }

    def close(self) -> None:
        self.abort()
        self._done.clear()
        self._closed = True

    def _rule(self, params: SamplingParams) -> _Rule:
        ends = np.zeros(self._num_vocab, dtype=np.bool_)
        ids = [*params.stop_token_ids, *(() if params.ignore_eos else self._eos)]
        ends[[i for i in ids if 0 <= i < self._num_vocab]] = True
        # Greedy sampling allows temperature 0, but `warp` divides by it. The log-prob is then that of temperature 1.
        temperature = 1.0 if params.greedy and params.temperature <= 0 else params.temperature
        return _Rule(params, temperature, ends, max((len(s.encode()) for s in params.stop), default=0))

    def _clear(self) -> None:
        self._store, self._rows = KVStore(), Rows(self._pad_rows, route_shape(self._routers))
        self._groups: dict[Tokens, _Group] = {}
        self._grid: Grid | None = None

    def _requeue(self) -> None:
        """Put running rows back to the front of the queue, with their tokens as prefix, and drop all caches."""
        rows = self._rows
        # Backwards: `appendleft` reverses the order, and the requests must keep theirs.
        for slot in rows.living()[::-1]:
            request = rows.requests[slot]
            assert request is not None
            self._waiting.appendleft(replace(request, prefix=rows.take(int(slot), "abort")))
        self._clear()

    def _stopped(self) -> bool:
        return self._paused or self._asleep or self._closed or not (self._waiting or self._rows.alive.any())

    @contextmanager
    def _engaged(self, attention: str = ATTENTION) -> Iterator[None]:
        """The model in eval mode with this attention and without gradients; everything is restored afterwards."""
        training = [m for m in self._model.modules() if m.training] if self._model.training else []
        before = [config._attn_implementation for config in self._configs]
        try:
            for module in training:
                vars(module)["training"] = False  # .eval() uses Module.__setattr__, which is 30 times slower
            for config in self._configs:
                config._attn_implementation = attention
            for module in self._linears:
                vars(module)["forward"] = partial(_linear, module)
            with torch.no_grad():
                yield
        finally:
            for module in self._linears:
                vars(module).pop("forward", None)
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation
            for module in training:  # not .train(): some modules may have been in eval mode
                vars(module)["training"] = True

    def _verify(self) -> None:
        """Sample a few greedy tokens of two prompts, with new and continued rows, and compare with a plain forward."""
        # Any fixed tokens will do; the factor spreads them over the vocabulary.
        tokens = [int(i) for i in np.arange(1, 9) * 7919 % self._num_vocab]
        params = SamplingParams(3, greedy=True, ignore_eos=True)
        # The prefix covers `_extend`. Its log-probs are not compared: only the last token of each sample is.
        prefix = Sample.of(SampleId(0, 2), tokens[:2], [0.0, 0.0], self.version, "abort")
        requests = [
            Request(SampleId(0, 0), tuple(tokens[:5]), params),
            Request(SampleId(0, 1), tuple(tokens[5:]), params),
            Request(SampleId(0, 2), tuple(tokens[:5]), params, prefix),
        ]
        self.submit(requests)
        prompt_of, gap = {r.id: r.prompt for r in requests}, 0.0
        for sample in self.completed():
            ids = torch.tensor([[*prompt_of[sample.id], *sample.tokens.tolist()]], device=self._model.device)
            with self._engaged("eager"):
                logits = self._model(input_ids=ids, use_cache=False).logits[0, -2]  # [V]; predicts the last token
            expected = float(torch.log_softmax(logits.double(), -1)[int(sample.tokens[-1])])
            gap = max(gap, abs(expected - float(sample.behavior_logp[-1])))
        # health() must not count the tokens of this check.
        self._counts.clear()
        tolerance = 0.2 if self._model.dtype in (torch.bfloat16, torch.float16) else 5e-3
        if not gap <= tolerance:
            raise RolloutError(
                f"{type(self._model).__name__}: log-probs of a packed forward differ from a plain one by {gap:.2g} "
                f"(allowed {tolerance}), so the in-process sampler would not sample from the policy that is trained; "
                "use a server (rollout.backend: vllm)"
            )

    def _advance(self, deadline: float | None) -> None:
        """Decode until a sample finishes or the deadline passes."""
        try:
            with self._engaged():
                while not self._done and not self._stopped():
                    # Waiting requests join before the next token is decoded, so that the batch is as full as possible.
                    if not self._admit():
                        self._decode()
                    if deadline is not None and time.monotonic() >= deadline:
                        return
        except BaseException:
            self._requeue()  # caches may be incomplete; outstanding requests must not be lost
            raise

    def _forward(self, tokens: NDArray, positions: NDArray, plan: Plan, keep: int | Tensor) -> Tensor:
        """Logits [kept, V] of one packed forward of tokens [N] at positions [N]; `keep`: which of them get logits."""
        device = self._model.device
        with active(self._store, plan), routed(self._routers) if self._routers else nullcontext() as recorder:
            output = self._model(
                input_ids=torch.from_numpy(tokens.astype(np.int64))[None].to(device),
                position_ids=torch.from_numpy(positions.astype(np.int64))[None].to(device),
                use_cache=False,
                logits_to_keep=keep,
            )
        self._routes = None if recorder is None else recorder.routes()
        return output.logits[0]  # [kept, V]

    def _admit(self) -> bool:
        """Move waiting requests into free rows, prefill new prompts, draw first tokens; True if any request joined."""
        num = min(len(self._waiting), self._max_rows - len(self._rows.living()))
        if num <= 0:
            return False
        requests = [self._waiting.popleft() for _ in range(num)]
        try:
            # The requests of a group share one prefill; a prompt that is stored already needs none.
            self._prefill(list(dict.fromkeys(r.prompt for r in requests if r.prompt not in self._groups)))
        except BaseException:
            # A failed prefill must not lose requests: put them back in their order.
            self._waiting.extendleft(reversed(requests))
            raise
        groups = [self._groups[r.prompt] for r in requests]
        slots = self._rows.join(requests, [g.slot for g in groups], [self._rules[r.params] for r in requests])
        for slot, group in zip(slots, groups, strict=True):
            self._rows.prompt_routes[slot] = group.routes
        # The layout of groups has changed.
        self._grid = None
        self._extend(slots)
        # A continued row feeds its last token next; a new row draws its first token from the prompt's logits.
        fresh = np.flatnonzero(self._rows.count[slots] == 0)
        if len(fresh):
            routes = np.stack([groups[i].routes[-1] for i in fresh]) if self._routers else None  # pyright: ignore[reportOptionalSubscript]
            # torch.stack copies: `draw` overwrites its input, and later rows of the group need the prompt's logits.
            self._sample(slots[fresh], torch.stack([groups[i].logits for i in fresh]), routes)
        return True

    def _prefill(self, prompts: list[Tokens]) -> None:
        """Store keys and values of whole prompts, several per forward; logits only at their last positions."""
        if not prompts:
            return
        # New prompts take the lowest free group slots.
        taken = {g.slot for g in self._groups.values()}
        free = [slot for slot in range(len(taken) + len(prompts)) if slot not in taken]
        self._store.reserve(groups=max([*taken, *free]) + 1, prompt_len=max(map(len, prompts)))
        # `PrefillPlan` needs prompts of equal length next to each other.
        prompts = sorted(prompts, key=len)
        while prompts:
            # Each forward takes at least one prompt, and more of them up to the limit of tokens.
            num, total = 1, len(prompts[0])
            while num < len(prompts) and total + len(prompts[num]) <= self._prefill_tokens:
                total += len(prompts[num])
                num += 1
            part, prompts = prompts[:num], prompts[num:]
            slots, free = free[:num], free[num:]
            lengths = np.array([len(p) for p in part])
            ends = np.cumsum(lengths)  # [prompts]
            # One run per distinct length: (first token, number of prompts, length).
            values, first, counts = np.unique(lengths, return_index=True, return_counts=True)
            runs = [(int(ends[i] - lengths[i]), int(c), int(n)) for n, i, c in zip(values, first, counts, strict=True)]
            # Logits are computed at the last token of each prompt only.
            logits = self._forward(
                np.concatenate([np.array(p) for p in part]),
                np.concatenate([np.arange(n) for n in lengths]),
                PrefillPlan(runs, slots),
                torch.from_numpy(ends - 1).to(self._model.device),
            )
            self._counts["prefill_forwards"] += 1
            self._counts["prefill_tokens"] += total
            # [P, layers, top_k] per prompt
            routes = [None] * num if self._routes is None else np.split(self._routes, ends[:-1])
            for prompt, slot, row, chosen in zip(part, slots, logits, routes, strict=True):
                self._groups[prompt] = _Group(slot, row, chosen)

    def _extend(self, slots: NDArray[np.int64]) -> None:
        """Prefill the completion tokens of continued rows, except the last, which is their next input."""
        rows = self._rows
        most = int(rows.count[slots].max())
        # Room for some tokens at once: the store grows by half, so starting from one token would mean many copies.
        self._store.reserve(rows=rows.used, own_len=max(most, min(int(rows.tokens.shape[1]), 32)))
        continued = [int(s) for s in slots if rows.count[s] > 1]
        while continued:
            segments, tokens, positions, start = [], [], [], 0
            while continued and (not segments or start + rows.count[continued[0]] <= self._prefill_tokens):
                slot = continued.pop(0)
                length, prompt_len = int(rows.count[slot]) - 1, int(rows.prompt_len[slot])
                segments.append((start, length, slot, int(rows.group[slot]), prompt_len))
                tokens.append(rows.tokens[slot, :length])
                positions.append(prompt_len + np.arange(length))
                start += length
            # The logits are not used. 1 keeps those of one position; 0 would keep all.
            self._forward(np.concatenate(tokens), np.concatenate(positions), ExtendPlan(segments), 1)
            self._counts["prefill_forwards"] += 1
            self._counts["prefill_tokens"] += start

    def _decode(self) -> None:
        """Draw one token for every live row."""
        reached("rollout.token")
        rows, used = self._rows, self._rows.used
        living, alive = rows.living(), rows.alive[:used]
        # The grid is valid until rows join, leave or move.
        if self._grid is None:
            self._grid = make_grid(rows.group[:used], alive)
        count, prompt_len = rows.count[:used], rows.prompt_len[:used]  # [N] each
        # Free slots get the length of the longest row, so that they need no mask. Their output is not used.
        own_len = np.where(alive, count, count[living].max()) - 1  # [N] stored own tokens
        prompt_len = np.where(alive, prompt_len, prompt_len[living].max())  # [N]
        tokens = np.where(alive, rows.tokens[np.arange(used), own_len], 0)  # [N]
        self._store.reserve(own_len=int(own_len.max()) + 1)
        # `keep` 0: logits of every position.
        logits = self._forward(tokens, prompt_len + own_len, DecodePlan(self._grid, prompt_len, own_len), 0)  # [N, V]
        self._counts["decode_forwards"] += 1
        self._counts["decode_rows"] += used
        routes = None if self._routes is None else self._routes[living]
        # Only running rows draw a token; padding slots do not.
        logits = logits if len(living) == used else logits[torch.from_numpy(living).to(logits.device)]
        self._sample(living, logits, routes)

    def _sample(self, slots: NDArray[np.int64], logits_n_v: Tensor, routes: NDArray | None) -> None:
        """Draw a token for each row from its logits [N, V]; finished rows leave."""
        rows = self._rows
        submission, sample, turn, attempt = rows.key[slots].T  # [N] each
        # One uniform per row, from its request's key and its token count: it does not depend on the other rows.
        uniform = rng.uniform(self._seed, "sample", submission, sample, turn, rows.count[slots], attempt)
        token, logp = np.zeros(len(slots), dtype=np.int64), np.zeros(len(slots))
        ended, full = np.zeros(len(slots), dtype=np.bool_), np.zeros(len(slots), dtype=np.bool_)
        used_rules = np.unique(rows.rule[slots])
        # Rows with equal sampling parameters are processed together.
        for index in used_rules:
            rule = self._rule_list[index]
            part = slice(None) if len(used_rules) == 1 else np.flatnonzero(rows.rule[slots] == index)
            count = rows.count[slots[part]]
            forbidden = None
            # A row below min_new_tokens must not draw an end token.
            if (count < rule.params.min_new_tokens).any():
                forbidden = torch.from_numpy((count < rule.params.min_new_tokens)[:, None] & rule.ends_v)  # [rows, V]
                forbidden = forbidden.to(logits_n_v.device)
            scores = warp(
                logits_n_v[part],
                temperature=rule.temperature,
                top_p=rule.params.top_p,
                top_k=rule.params.top_k,
                forbidden=forbidden,
            )
            tokens, logps = draw(
                scores, None if rule.params.greedy else torch.from_numpy(uniform[part]).to(scores.device)
            )
            token[part], logp[part] = tokens.cpu().numpy(), logps.cpu().numpy()
            ended[part] = rule.ends_v[token[part]]
            full[part] = count + 1 >= rule.params.max_new_tokens
        # Before the rows change: a token drawn from non-finite logits must not become part of a sample.
        if not np.isfinite(logp).all():
            self._raise_non_finite(int(slots[np.flatnonzero(~np.isfinite(logp))[0]]))
        rows.append(slots, token, logp, self.version, routes)
        self._counts["sampled_tokens"] += len(slots)
        # After the append: the test for stop strings reads the new token from its row.
        if any(self._rule_list[i].params.stop for i in used_rules):
            ended |= np.array([self._ends_with_stop(int(s)) for s in slots])
        if (ended | full).any():
            self._retire(slots, ended, full)

    def _ends_with_stop(self, slot: int) -> bool:
        """Whether the row's last token completes a stop string. Only the tail that can hold one is decoded."""
        rows = self._rows
        rule, count = self._rule_list[rows.rule[slot]], int(rows.count[slot])
        if not rule.params.stop or count < rule.params.min_new_tokens or self._decode_text is None:
            return False
        tail = rows.tokens[slot, max(0, count - rule.stop_bytes - 8) : count].tolist()
        text = self._decode_text(tail)
        # A character that is cut in half decodes to U+FFFD: it was not part of the text before.
        before = len(self._decode_text(tail[:-1]).rstrip("\ufffd"))
        ends = (text.rfind(stop) + len(stop) for stop in rule.params.stop if stop in text)
        return any(end > before for end in ends)

    def _raise_non_finite(self, slot: int) -> None:
        request = self._rows.requests[slot]
        assert request is not None
        raise RolloutError(
            f"non-finite logits at token {int(self._rows.count[slot])} of sample {tuple(request.id)} under weight "
            f"version {self.version}: the weights hold NaN or inf, or overflow; check grad/norm of the last steps"
        )

    def _retire(self, slots: NDArray[np.int64], ended: NDArray[np.bool_], full: NDArray[np.bool_]) -> None:
        """Remove finished rows and prompts without outstanding requests, then compact the tables."""
        rows = self._rows
        for i in np.flatnonzero(ended | full):
            request = rows.requests[slots[i]]
            assert request is not None
            finish: FinishReason = "stop" if ended[i] else "length"
            self._done.append(rows.take(int(slots[i]), finish))
            # The prompt's cache is dropped with the last request that needs it.
            self._references[request.prompt] -= 1
            if self._references[request.prompt] == 0:
                del self._references[request.prompt]
                del self._groups[request.prompt]
        self._grid = None
        # Nothing runs and no prompt is stored: free all memory.
        if not rows.alive.any() and not self._groups:
            self._clear()
            return
        source, target = rows.compact()
        if source:
            self._store.move_rows(source, target, int(rows.count[target].max()))
        self._compact_groups()

    def _compact_groups(self) -> None:
        """Compact the table of groups when half of it is empty: an empty group slot still costs a matrix product."""
        groups = sorted(self._groups.values(), key=lambda g: g.slot)
        if not groups or groups[-1].slot + 1 < 2 * len(groups):
            return
        # Groups at slots ≥ len(groups) move into the holes below.
        holes = sorted(set(range(len(groups))) - {g.slot for g in groups})
        moving = [g for g in groups if g.slot >= len(groups)]
        source = [g.slot for g in moving]
        self._store.move_groups(source, holes)
        new_slot = np.arange(max(source, default=0) + 1)  # new slot of each old slot
        new_slot[source] = holes
        for group, slot in zip(moving, holes, strict=True):
            group.slot = slot
        living = self._rows.living()
        self._rows.group[living] = new_slot[self._rows.group[living]] if len(moving) else self._rows.group[living]


_COUNTERS = ("prefill_forwards", "prefill_tokens", "decode_forwards", "decode_rows", "sampled_tokens")
_FEW_ROWS, _MANY_WEIGHTS = 64, 2**18  # for fewer rows and more weights, `_linear` is faster than F.linear
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    """x·Wᵀ + b, computed as (W·xᵀ)ᵀ for few rows: x [1, N, in] → [1, N, out].

    A GEMM repacks its right operand, which is the weights in F.linear. For 32 rows on a CPU the repacking costs a
    quarter of the time (80 → 100 GFLOP/s without it; for a head of 49k words 57 → 79).
    """
    if x.dim() != 3 or x.shape[0] != 1 or x.shape[1] > _FEW_ROWS:  # a packed forward is one batch row
        return F.linear(x, module.weight, module.bias)
    columns = x[0].t()  # [in, N]
    if module.bias is None:
        return torch.mm(module.weight, columns).t().unsqueeze(0)
    return torch.addmm(module.bias[:, None], module.weight, columns).t().unsqueeze(0)


def _refuse_unsupported(model: Any) -> None:
    """RolloutError if layers keep state outside the attention interface: it would leak between packed rows."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        raise RolloutError(
            f"{type(model).__name__} has layers of kind {sorted(kinds)}: the in-process sampler supports only "
            f"{sorted(_LAYER_TYPES)}; use a server (rollout.backend: vllm)"
        )

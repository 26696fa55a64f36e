"""The in-process sampler: it samples with the model that is trained.

This file schedules requests, draws tokens and applies stop rules. A stepper (`packed.py`) runs the model; which one is
measured at load (`choose.py`). A prompt is computed once for its group. Between two tokens, finished rows leave and
waiting requests join. The weights are the trainer's own tensors, not a copy; attention implementation and train mode
are changed for a call and restored after it. Which token is drawn depends on the request's key and the weights, not on
other requests.

Shapes: N rows of a forward, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gspo import rng
from gspo.errors import DataError, GspoError, RolloutError
from gspo.faults import reached
from gspo.models import route_shape, routers, vision_of
from gspo.sampling.api import completed_by_prefix, completes_stop, interrupted, validate_request
from gspo.sampling.local.choose import Borrowed, ForwardComparison, choose, engines, refuse_encoder_decoder
from gspo.sampling.local.draw import SamplingRule, draw, kept_sets, rule_of
from gspo.sampling.local.packed import Engine, Finished
from gspo.sampling.local.rows import Rows
from gspo.types import FinishReason, Prompt, PromptKey, Request, Sample, SamplingParams

if TYPE_CHECKING:
    from gspo.models import Vision


class LocalSampler:
    """Implements `gspo.sampling.api.Sampler` for any decoder-only transformers model.

    `decode` turns token ids into text; only stop strings need it. `max_context` defaults to the model's limit.
    `verify` chooses the engine by a comparison with a plain forward; without it, continuous batching is used unchecked.
    `vision` is the trainer's, so that features of a frozen tower are computed once; `image_prompts` are prompts for the
    comparison.
    """

    in_process = True

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
        vision: Vision | None = None,
        image_prompts: Sequence[Prompt] = (),
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        if max_rows < 1:
            raise RolloutError(f"max_rows is {max_rows}: the sampler needs at least one row")
        self.version = version
        self._model, self._seed, self._decode_text, self._say = model, seed, decode, say
        self._eos = frozenset(eos_token_ids)
        self._max_rows, self._pad_rows = max_rows, pad_rows
        config = model.config.get_text_config()
        self._num_vocab = int(config.vocab_size)
        limit = getattr(config, "max_position_embeddings", None)
        self._model_context = limit or 2**31
        self._max_context = max_context or self._model_context
        self._waiting: deque[Request] = deque()
        self._done: deque[Sample] = deque()
        self._references: Counter[PromptKey] = Counter()  # outstanding requests of each prompt
        self._rules: dict[SamplingParams, int] = {}
        self._rule_list: list[SamplingRule] = []
        self._routers = routers(model)
        self._paused = self._asleep = self._closed = False
        self._counts: Counter[str] = Counter()
        refuse_encoder_decoder(model)
        self._borrowed = Borrowed(model)
        if (native := self._borrowed.native) is not None and native.product is None:
            say(f"sampling uses PyTorch's matrix products, not the faster compiled ones: {native.why}")
        if self._borrowed.num_compiled:
            say(f"sampling: {self._borrowed.num_compiled} layers run as compiled calls")
        self._vision, self._image_prompts = vision or vision_of(model), image_prompts
        self._engines = engines(model, self._routers, prefill_tokens, self._vision)
        self._engine = self._engines[0]
        self._clear()
        if verify:
            self._choose_engine()

    def submit(self, requests: Sequence[Request]) -> None:
        if self._closed:
            raise RolloutError("the sampler is closed: nothing can be submitted")
        for request in requests:  # all are checked before any is queued
            if request.shown is None and self._vision is not None and self._vision.sees_prompts_both_ways:
                raise DataError(
                    f"request {tuple(request.id)}: {type(self._model).__name__} needs an image in every prompt"
                )
            validate_request(
                request,
                num_vocab=self._num_vocab,
                max_context=self._max_context,
                sees_text=self._decode_text is not None,
                takes_images=self.takes_images,
            )
        for request in requests:
            whole = completed_by_prefix(request)
            if whole is not None:
                self._done.append(whole)
                continue
            # Requests share a rule if their parameters are equal: its [V] array is built once.
            if request.params not in self._rules:
                self._rules[request.params] = len(self._rule_list)
                self._rule_list.append(rule_of(request.params, self._num_vocab, self._eos))
            self._references[request.key] += 1
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
        partial = [interrupted(request, self.version) for request in self._waiting]
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
            from gspo.sampling.weights.load import copy_weights

            copy_weights(self._model, tensors)
        self._requeue()
        self.version = version

    def release(self, submission: int, sample: int) -> None:
        if self._stepper.kept.pop((submission, sample), None) is not None and not self._is_used():
            self._clear()

    @property
    def takes_images(self) -> bool:
        """Whether prompts may show images."""
        return self._vision is not None

    def health(self) -> Mapping[str, Any]:
        """State, and counters of what was computed since the start."""
        return {
            "version": self.version,
            "running": int(self._rows.alive.sum()),
            "waiting": len(self._waiting),
            "paused": self._paused,
            "asleep": self._asleep,
            "closed": self._closed,
            "engine": self._engine.name,
            "cache_bytes": self._stepper.num_bytes(),
            **{name: self._counts[name] for name in _FORWARD_COUNTERS},
        }

    def close(self) -> None:
        self.abort()
        self._done.clear()
        self._closed = True

    def _is_used(self) -> bool:
        """Whether a row runs, or a prompt or a row is stored."""
        return bool(self._rows.alive.any() or self._stepper.prompts or self._stepper.kept)

    def _clear(self) -> None:
        self._rows = Rows(self._pad_rows, route_shape(self._routers))
        self._stepper = self._engine.start(self._rows, self._counts)

    def _requeue(self) -> None:
        """Put running rows back to the front of the queue, with their tokens as prefix, and drop all caches."""
        rows = self._rows
        # Backwards: `appendleft` reverses the order, and the requests must keep theirs.
        for slot in rows.living()[::-1]:
            request = rows.requests[slot]
            assert request is not None
            prompt = self._stepper.prompts.get(request.key)
            partial = rows.take(int(slot), "abort", prompt and prompt.routes)
            self._waiting.appendleft(replace(request, prefix=partial))
        self._clear()

    def _stopped(self) -> bool:
        return self._paused or self._asleep or self._closed or not (self._waiting or self._rows.alive.any())

    def _choose_engine(self) -> None:
        # A model whose context is too short for the comparison is left to continuous batching.
        if self._model_context < 10:
            return
        self._engine = choose(self._model, self._engines, self._measure, self._say)
        self._clear()

    def _measure(self, engine: Engine) -> float:
        """The largest difference of sampled log-probs from a plain forward; NaN if one is not a number."""
        self._engine = engine
        self._clear()
        comparison = ForwardComparison(self._num_vocab, self._model_context, self._vision, self._image_prompts)
        requests = comparison.requests(self.version, is_packed=engine.is_packed)
        # The limit of a run may be below what this comparison needs.
        limit, self._max_context = self._max_context, self._model_context
        try:
            self.submit(requests)
            samples = list(self.completed())
            if self._stepper.kept:
                turns = comparison.second_turns(requests, samples)
                self.submit(turns)
                samples += self.completed()
                requests += turns
        finally:
            self._max_context = limit
            self.abort()
            self._done.clear()
            self._counts.clear()  # health() must not count the tokens of this comparison
        with self._borrowed.engaged("eager"):
            return comparison.largest_difference(self._model, requests, samples)

    def _advance(self, deadline: float | None) -> None:
        """Decode until a sample finishes or the deadline passes."""
        try:
            with self._borrowed.engaged(self._engine.attention):
                while not self._done and not self._stopped():
                    # Waiting requests join before the next token is decoded, so that the batch is as full as possible.
                    if not self._admit():
                        self._decode()
                    if deadline is not None and time.monotonic() >= deadline:
                        return
        except BaseException as error:
            self._requeue()  # caches may be incomplete; outstanding requests must not be lost
            # What a model's own code raises says nothing about the sampler: name both.
            if isinstance(error, GspoError | OSError | torch.OutOfMemoryError) or not isinstance(error, Exception):
                raise
            raise RolloutError(
                f"{type(self._model).__name__} failed while it was sampled in process with {self._engine.name}: "
                f"{type(error).__name__}: {error}; use a server (rollout.backend: vllm:d1)"
            ) from error

    def _admit(self) -> bool:
        """Move waiting requests into free rows, prefill new prompts, draw first tokens; True if any request joined."""
        num = min(len(self._waiting), self._max_rows - len(self._rows.living()))
        if num <= 0:
            return False
        requests = [self._waiting.popleft() for _ in range(num)]
        try:
            self._stepper.prefill(requests)
        except BaseException:
            # A failed prefill must not lose requests: put them back in their order.
            self._waiting.extendleft(reversed(requests))
            raise
        slots = self._rows.join(requests, [self._rules[r.params] for r in requests])
        prompts = [self._stepper.prompts.get(r.key) for r in requests]
        self._stepper.join(slots)
        # A continued row feeds its last token next; a new row draws its first token from the prompt's logits.
        fresh = [
            (slot, p) for slot, p in zip(slots, prompts, strict=True) if p is not None and not self._rows.count[slot]
        ]
        if fresh:
            routes = np.stack([p.routes[-1] for _, p in fresh]) if self._routers else None  # pyright: ignore[reportOptionalSubscript]
            # torch.stack copies: `draw` overwrites its input, and later rows of the group need the prompt's logits.
            self._sample(np.array([slot for slot, _ in fresh]), torch.stack([p.logits for _, p in fresh]), routes)
        return True

    def _decode(self) -> None:
        """Draw one token for every live row."""
        reached("rollout.token")
        step = self._stepper.step()
        self._sample(step.slots, step.logits, step.routes)

    def _sample(self, slots: NDArray[np.int64], logits_n_v: Tensor, routes: NDArray | None) -> None:
        """Draw a token for each row from its logits [N, V]; finished rows leave."""
        rows = self._rows
        submission, sample, turn, attempt = rows.key[slots].T  # [N] each
        # One uniform per row, from its request's key and its token count: it does not depend on the other rows.
        uniform = rng.uniform(self._seed, "sample", submission, sample, turn, rows.count[slots], attempt)
        token, logp = np.zeros(len(slots), dtype=np.int64), np.zeros(len(slots))
        ended, full = np.zeros(len(slots), dtype=np.bool_), np.zeros(len(slots), dtype=np.bool_)
        used_rules = np.unique(rows.rule[slots])
        for index in used_rules:
            rule = self._rule_list[index]
            part = slice(None) if len(used_rules) == 1 else np.flatnonzero(rows.rule[slots] == index)
            count = rows.count[slots[part]]
            scores = rule.scores(logits_n_v[part], count)
            # Before `draw`, which overwrites the scores.
            if rule.params.record_kept:
                rows.keep(slots[part], kept_sets(scores))
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
        rows = self._rows
        params, count = self._rule_list[rows.rule[slot]].params, int(rows.count[slot])
        if not params.stop or count < params.min_new_tokens or self._decode_text is None:
            return False
        return completes_stop(rows.tokens[slot, :count], params.stop, self._decode_text)

    def _raise_non_finite(self, slot: int) -> None:
        request = self._rows.requests[slot]
        assert request is not None
        raise RolloutError(
            f"non-finite logits at token {int(self._rows.count[slot])} of sample {tuple(request.id)} under weight "
            f"version {self.version}: the weights hold NaN or inf, or overflow; check grad/norm of the last steps"
        )

    def _retire(self, slots: NDArray[np.int64], ended: NDArray[np.bool_], full: NDArray[np.bool_]) -> None:
        """Remove finished rows and prompts without outstanding requests, then compact the tables."""
        rows, dropped, kept = self._rows, list[PromptKey](), list[Finished]()
        finished = np.flatnonzero(ended | full)
        for i in finished:
            request = rows.requests[slots[i]]
            assert request is not None
            finish: FinishReason = "stop" if ended[i] else "length"
            prompt = self._stepper.prompts.get(request.key)
            self._done.append(rows.take(int(slots[i]), finish, prompt and prompt.routes))
            # At most as many rows are kept as may run: this bounds the memory, and does not depend on timing.
            if request.keep_cache and request.shown is None and len(self._stepper.kept) + len(kept) < self._max_rows:
                kept.append(Finished(int(slots[i]), request, self._done[-1]))
            self._references[request.key] -= 1
            if self._references[request.key] == 0:
                del self._references[request.key]
                dropped.append(request.key)
        # Before rows move: a kept row copies its keys and values from its slot.
        self._stepper.keep(kept, dropped)
        self._stepper.leave(slots[finished], rows.compact(), dropped)
        if not self._is_used():
            self._clear()


_FORWARD_COUNTERS = (
    "prefill_forwards",
    "prefill_tokens",
    "prefill_images",
    "decode_forwards",
    "decode_rows",
    "sampled_tokens",
)

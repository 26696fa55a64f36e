"""GSPOTrainer: TRL's GRPOTrainer, of which it replaces how log-probs are computed, and what TRL's loss does not have.

TRL generates, scores, batches, logs and updates. Its policy, old and reference passes all call
`_get_per_token_logps_and_entropies`, which packs a group's completions behind one prompt here (`logprobs.py`). TRL
shuffles sequences over micro-batches; within an optimizer update they are sorted by prompt, which changes no sum. TRL's
metrics are computed by TRL's own code, on TRL's own micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

import trl
from gspo.audit import TRLCallback
from gspo.errors import GspoError
from gspo.objectives import clip_fractions, kl
from gspo.sampling import LocalSampler
from gspo.trl.config import GSPOConfig, settled
from gspo.trl.internals import check_batches, check_class, check_instance, why_not
from gspo.trl.logprobs import PackedModel, disagreement, pack_rows, probe_rows
from gspo.trl.objective import Loss
from gspo.types import Request, SampleId, SamplingParams
from trl import GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

VERSION = str(trl.__version__)
check_class(GRPOTrainer, VERSION)

ROW = "gspo_row"  # [B] place of a sequence among those of its update, in TRL's order
NUM_TOKENS = "gspo_num_tokens"  # trained tokens of the update, per process
STORED = ("gspo_logp", "gspo_entropy")  # [B, T] of the pass that is trained
# Values at masked tokens that TRL multiplies by 0, which leaves NaN.
PER_TOKEN = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")


class GSPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer: the same arguments, and the same numbers from less computation.

    `args` is a GSPOConfig, or a GRPOConfig as it is (docs/trl.md). Where log-probs cannot be computed from packed rows,
    TRL's own code computes them, and one line tells why.
    """

    _tag_names = ["trl", "gspo"]  # noqa: RUF012 - as in TRL
    _name = "GSPO"
    _paper = {"title": "Group Sequence Policy Optimization", "id": "2507.18071", "citation": ""}  # noqa: RUF012
    args: Any  # TRL's GRPOConfig, which its base class does not declare
    model: Any
    proximal = "recompute"  # where π_old comes from
    _reason = ""  # why log-probs are TRL's
    _samples_here = _skips_old = False
    _trained: Tensor | None = None  # [B, T] of the pass that runs; None: the completion's attention mask
    _stored: tuple[Tensor, Tensor] | None = None  # log-probs that TRL's metrics are computed from
    _sampler: LocalSampler | None = None
    _draws = 0

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *more: Any, **named: Any) -> None:
        self._said: set[str] = set()
        if args is None:
            path = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "")
            args = GSPOConfig(f"{path.split('/')[-1]}-GSPO")
        args = settled(args, self._say)
        self._packed: dict[int, PackedModel | None] = {}  # by id of the model; None: TRL's own path
        self._own_loss = Loss(args) if isinstance(args, GSPOConfig) and args.objective else None
        self._window: list[tuple[dict[str, Any], Tensor, Tensor]] = []  # micro-batches of the update that runs
        super().__init__(model, reward_funcs, args, *more, **named)
        check_instance(self, VERSION)
        self._reason = why_not(self)
        if self._reason:
            self._say(f"log-probs are computed by TRL's own code: {self._reason}")
        self._samples_here = isinstance(args, GSPOConfig) and args.sampler == "gspo" and self._can_sample()
        # Without the first end-of-sequence tokens, the sampler's distribution is not the trainer's.
        is_same = not (self.args.generation_kwargs or {}).get("min_new_tokens")
        self.proximal = "rollout" if self._samples_here and is_same else "recompute"
        folder = args.run_dir if isinstance(args, GSPOConfig) else "auto"
        if folder and folder != "none":
            path = Path(str(self.args.output_dir), "gspo") if folder == "auto" else folder
            self.add_callback(TRLCallback(self, path, numbered=folder == "auto"))

    def _say(self, line: str) -> None:
        """Print a line once, on the main process."""
        if line not in self._said and PartialState().is_main_process:
            print(f"gspo: {line}", flush=True)
        self._said.add(line)

    # -- log-probs

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self._stored is not None:
            return (*self._stored, None)
        if self._skips_old:  # π_old are the sampler's log-probs
            self._skips_old = False
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        logps, entropies, aux_loss = self._computed(
            model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss, **inputs
        )
        if self._trained is not None and entropies is not None:
            self._last = logps.detach(), entropies.detach()
        return logps, entropies, aux_loss

    def _computed(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None,
        compute_entropy: bool,
        compute_aux_loss: bool,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        packed = None if compute_aux_loss or any(x is not None for x in inputs.values()) else self._packed_of(model)
        if packed is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size=batch_size,
                compute_entropy=compute_entropy, compute_aux_loss=compute_aux_loss, **inputs,
            )  # fmt: skip
        trained = attention_mask[:, -logits_to_keep:].bool()  # [B, T]
        if self._trained is not None and self._trained.shape == trained.shape:
            trained = trained & self._trained
        trained = trained.cpu()
        # As many tokens at once as TRL would have had, padding included.
        max_tokens = (batch_size or len(input_ids)) * input_ids.shape[1]
        grad = self._entropy_bonus_enabled and torch.is_grad_enabled()
        with self.accelerator.autocast():
            logps, entropies = packed(
                model, pack_rows(input_ids, attention_mask, trained), trained,
                max_tokens=max_tokens, entropy=compute_entropy, grad=grad,
            )  # fmt: skip
        return logps, entropies, None

    def _packed_of(self, model: Any) -> PackedModel | None:
        """How the log-probs of a model are computed; None: by TRL."""
        if self._reason:
            return None
        base = self.accelerator.unwrap_model(model)
        base = base.get_base_model() if hasattr(base, "peft_config") else base
        if id(base) not in self._packed:
            found, reason = self._probed(base)
            self._packed[id(base)] = found
            if reason:
                self._say(f"log-probs are computed by TRL's own code: {type(base).__name__}: {reason}")
        return self._packed[id(base)]

    def _probed(self, base: Any) -> tuple[PackedModel | None, str]:
        """The model with packed rows, or why not: its log-probs must be those of TRL's own padded rows."""
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)
        original = base.forward
        try:
            with torch.enable_grad(), self.accelerator.autocast():  # the pass may be one without gradients
                packed = PackedModel(
                    base, checkpointing=self.args.gradient_checkpointing, temperature=self.temperature, dtype=mixed
                )
            num_vocab, pad = base.config.get_text_config().vocab_size, self._tokenizer.pad_token_id
            ids, seen, keep = probe_rows(num_vocab, pad, base.device)  # pyright: ignore[reportArgumentType]
            trained = seen[:, -keep:].bool().cpu()
            with torch.no_grad(), self.accelerator.autocast():
                ours, _ = packed(
                    base, pack_rows(ids, seen, trained), trained, max_tokens=ids.numel(), entropy=False, grad=False
                )
                theirs, _, _ = super()._get_per_token_logps_and_entropies(base, ids, seen, keep)
            if not (reason := disagreement(ours, theirs, trained, mixed or base.dtype)):
                return packed, ""
        except (GspoError, NotImplementedError) as problem:
            reason = str(problem)
        base.forward = original
        return None, reason

    # -- batches

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is before or not self.model.training:
            return inputs
        num = self.args.steps_per_generation
        check_batches(self._buffered_inputs, num, VERSION)
        self._buffered_inputs = [*self._together(self._buffered_inputs)]
        return self._buffered_inputs[self._step % num]

    def _together(self, batches: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The micro-batches with the sequences of each optimizer update sorted by prompt."""
        size = self._update_size()
        for begin in range(0, len(batches), size):
            update = batches[begin : begin + size]
            if self._own_loss is not None:
                # Of the whole update: a part of it if several generation batches make one update.
                local = torch.stack([trained_tokens(batch).sum() for batch in update]).sum()
                tokens: Any = self.accelerator.gather(local)
                tokens = tokens.sum() / self.accelerator.num_processes
                tokens = tokens * self.args.gradient_accumulation_steps / size
                update = [batch | {NUM_TOKENS: tokens} for batch in update]
            # TRL's own path computes row by row: there is nothing to gain from another order.
            yield from update if size == 1 or self._packed_of(self.model) is None else by_prompt(update)

    def _update_size(self) -> int:
        """How many consecutive micro-batches of a generation batch are in one update, and may exchange sequences."""
        num, accumulated = self.args.steps_per_generation, self.args.gradient_accumulation_steps
        # These terms of TRL's loss are means or quantiles over a micro-batch.
        by_micro_batch = self.loss_type == "bnpo" or self.top_entropy_quantile < 1 or self._entropy_bonus_enabled
        if by_micro_batch and self._own_loss is None:
            return 1
        return accumulated if num % accumulated == 0 else num if accumulated % num == 0 else 1

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._window and len(self._window) == self._update_size():
            self._log_as_trl(model)
        return loss

    def _log_as_trl(self, model: Any) -> None:
        """TRL's metrics of the micro-batches that TRL has made of these sequences."""
        whole = joined([batch | dict(zip(STORED, found, strict=True)) for batch, *found in self._window])
        order = torch.argsort(whole[ROW])
        size = len(order) // len(self._window)
        self._window = []
        for begin in range(0, len(order), size):
            batch = rows(whole, order[begin : begin + size])
            self._stored = tuple(batch[name] for name in STORED)
            with torch.no_grad():
                super()._compute_loss(model, batch)
        self._stored = None

    # -- loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        self._trained = trained_tokens(inputs)
        inputs = inputs | {name: zeroed(inputs[name], self._trained) for name in PER_TOKEN if name in inputs}
        try:
            if self._own_loss is not None:
                return self._loss_of_gspo(self._own_loss, model, inputs)
            if ROW not in inputs:
                return super()._compute_loss(model, inputs)
            kept, self._metrics["train"] = self._metrics["train"], defaultdict(list)
            try:
                loss = super()._compute_loss(model, inputs)
            finally:
                self._metrics["train"] = kept
            self._window.append((inputs, *self._last))
            return loss
        finally:
            self._trained = None

    def _loss_of_gspo(self, loss: Loss, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The loss of `objectives/`, with its metrics under TRL's names."""
        training, mask = self.model.training, trained_tokens(inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logp, entropy, _ = self._get_per_token_logps_and_entropies(
            model, ids, seen, mask.shape[1], compute_entropy=True
        )
        assert entropy is not None
        num_tokens = inputs[NUM_TOKENS] if training else mask.sum()
        scale = self.current_gradient_accumulation_steps if training else 1
        found = loss(logp, inputs, mask, entropy, scale, num_tokens)
        means = {"entropy": (entropy * mask).sum() / mask.sum().clamp(min=1)}
        if "clipped_low" in found.stats:  # not of every function of the user
            fractions, unit = clip_fractions(found.stats), "sequences" if found.clipped.dim() == 1 else "tokens"
            means |= {f"clip_ratio/{side}_mean": fractions[f"{unit}_{side}"] for side in ("low", "high")}
            means["clip_ratio/region_mean"] = fractions[unit]
        if (reference := inputs.get("ref_per_token_logps")) is not None:
            means["kl"] = (kl(logp.detach() * mask, reference * mask, "k3")).sum() / mask.sum().clamp(min=1)
        values: Any = self.accelerator.reduce(
            torch.stack([x.detach().float() for x in means.values()]), reduction="mean"
        )
        for name, value in zip(means, values.tolist(), strict=True):
            self._metrics["train" if training else "eval"][name].append(value)
        return found.loss

    # -- generation

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        try:
            output = super()._generate_and_score_completions(inputs)
        finally:
            self._trained, self._skips_old = None, False
        if self.proximal == "rollout":
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output

    def _generate(self, prompts: Any) -> Any:
        found = super()._generate(prompts)
        completions, tool_mask = found[1:3]
        if tool_mask is not None:
            self._trained = padded(tool_mask, completions, self.accelerator.device)
        per_generation = self.args.steps_per_generation * self.num_iterations
        self._skips_old = self.proximal == "rollout" and self.args.gradient_accumulation_steps % per_generation != 0
        return found

    def _can_sample(self) -> bool:
        args = self.args
        known = {"min_new_tokens"} >= set(args.generation_kwargs or {})
        plain = (args.top_p, args.top_k, args.min_p or 0, args.repetition_penalty) == (1, 0, 0, 1)
        reasons = {
            f"the device is {self.accelerator.device.type}": self.accelerator.device.type != "cpu",
            "completions come from vLLM, continuous batching or a rollout_func": (
                args.use_vllm or args.use_transformers_continuous_batching or self.rollout_func is not None
            ),
            "its log-probs would not be those of mixed precision; set bf16=False": self.accelerator.mixed_precision
            != "no",
            "top_p, top_k, min_p, repetition_penalty or generation_kwargs is set": not (known and plain),
            "the model takes images": self._is_vlm,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), "")
        if reason:
            self._say(f"sampler='gspo' is not used, TRL generates: {reason}")
        return not reason

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *more: Any, **named: Any
    ) -> Any:
        if not self._samples_here:
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, *more, **named)
        if self._sampler is None:
            base = self.accelerator.unwrap_model(self.model)
            self._sampler = LocalSampler(
                base.get_base_model() if hasattr(base, "peft_config") else base,
                seed=self.args.seed + self.accelerator.process_index,
                eos_token_ids=self.eos_token_ids,
            )
        params = SamplingParams(
            int(self.args.max_completion_length),
            min_new_tokens=(self.args.generation_kwargs or {}).get("min_new_tokens", 0),
            temperature=self.temperature,
        )
        # The key of the random numbers; a run that resumes does not repeat earlier ones.
        self._draws = max(self._draws + 1, self.state.global_step << 20)
        self._sampler.load_weights(self._draws, None)
        self._sampler.submit(
            [Request(SampleId(self._draws, i), tuple(ids), params) for i, ids in enumerate(prompt_ids)]
        )
        done = {sample.id.sample: sample for sample in self._sampler.completed()}
        ordered = [done[i] for i in range(len(prompt_ids))]
        tokens, logprobs = [s.tokens.tolist() for s in ordered], [s.behavior_logp.tolist() for s in ordered]
        return tokens, logprobs if self.proximal == "rollout" else None


# -- micro-batches of TRL: dicts of tensors with one row per sequence, of numbers, and of lists


def trained_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """[B, T] the tokens that are trained: those of the completion, without those of tools."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if inputs.get("tool_mask") is not None else mask).bool()


def zeroed(x: Any, trained: Tensor) -> Any:
    """The values of trained tokens [B, T], 0 elsewhere: 0 · NaN is NaN."""
    return torch.where(trained, x, 0.0) if isinstance(x, Tensor) and x.shape == trained.shape else x


def padded(masks: Any, completions: Any, device: Any) -> Tensor:
    """[B, T] the masks of completions, padded on the right."""
    assert [len(mask) for mask in masks] == [len(ids) for ids in completions], "a mask has one entry per token"
    found = torch.zeros(len(masks), max(map(len, masks)), dtype=torch.bool)
    for row, mask in zip(found, masks, strict=True):
        row[: len(mask)] = torch.tensor(mask, dtype=torch.bool)
    return found.to(device)


def by_prompt(update: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sequences of some micro-batches, sorted by prompt, in as many micro-batches."""
    whole = joined(update)
    num = len(whole["prompt_ids"])
    prompts = torch.cat([whole["prompt_ids"], whole["prompt_mask"]], 1)
    order = torch.argsort(torch.unique(prompts, dim=0, return_inverse=True)[1], stable=True)
    whole[ROW] = torch.arange(num, device=order.device)
    size = num // len(update)
    return [rows(whole, order[begin : begin + size]) for begin in range(0, num, size)]


def joined(batches: list[dict[str, Any]]) -> dict[str, Any]:
    def join(values: list[Any]) -> Any:
        if isinstance(values[0], Tensor) and values[0].dim():
            return torch.cat(values)
        return [each for value in values for each in value] if isinstance(values[0], list) else values[0]

    return {name: join([batch[name] for batch in batches]) for name in batches[0]}


def rows(batch: dict[str, Any], index: Tensor) -> dict[str, Any]:
    def choose(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim():
            return value[index]
        return [value[i] for i in index.tolist()] if isinstance(value, list) else value

    return {name: choose(value) for name, value in batch.items()}

"""A reward model: a sequence classifier with one label that scores prompt and completion.

It runs in the trainer's process and on its device, and scores all groups of a step together, sorted by length to reduce
padding. Equal texts are scored once. On a CPU the default is one text per forward pass: no padding is computed, and a
score depends on its text alone, bit for bit, so that cached and computed scores are equal, also after a resume.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.errors import ConfigError, DataError, RewardError
from gspo.rewards.call import Pending, Result, checked
from gspo.system import naming_panics

_CACHED = 65536  # texts whose scores are kept


class RewardModel:
    """Scores texts with the one logit of a classifier.

    path            folder (or hub name) of an AutoModelForSequenceClassification with one label, and its tokenizer
    batch_size      texts per forward pass; null: 1 on a CPU, 32 on CUDA. Above 1, the last bits of a score depend on
                    the other texts of its batch, and so on when checkpoints were written
    max_length      longest text in tokens; longer ones fail. null: the model's context
    chat_template   true or false; null: true if the tokenizer has one. false: prompt and completion as plain text
    device, dtype   null: CUDA and bfloat16 if CUDA is available, else cpu and float32
    """

    def __init__(
        self,
        *,
        path: str,
        batch_size: int | None = None,
        max_length: int | None = None,
        chat_template: bool | None = None,
        device: str | None = None,
        dtype: str | None = None,
        key: str = "reward",
    ) -> None:
        # Imported here, so that importing this module does not load torch.
        import torch

        self._torch = torch
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        on_cpu = self._device.type == "cpu"
        self._batch_size = batch_size or (1 if on_cpu else 32)
        kind = getattr(torch, dtype or ("float32" if on_cpu else "bfloat16"), None)
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            raise ConfigError(f"{key}: reward_model.dtype must be float32, bfloat16 or float16, got {dtype!r}")
        self._model, self._tokenizer = _load(path, kind, self._device, key)
        own = getattr(self._tokenizer, "chat_template", None)
        if chat_template and not own:
            raise DataError(
                f"{key}: reward_model.chat_template is true, but the tokenizer of {path} has none; set it to false"
            )
        self._chat = bool(own) if chat_template is None else chat_template
        context = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self._max_length = max_length or context or 1 << 30
        self._name = f"reward_model {path}"
        self._scores: OrderedDict[tuple[int, ...], Result] = OrderedDict()
        self._queued: list[tuple[int, ...]] = []

    def start(self, item: Any) -> Pending:
        """Queue a group; taking the first result scores all queued groups."""
        # Groups are only queued here, so that texts of several groups share a forward pass.
        texts = [self._encode(item, completion) for completion in item.completions]
        self._queued += texts
        results: list[Result] = []

        def finish() -> list[Result]:
            if not results:
                self._score_queued()
                results.extend(self._lookup(text) for text in texts)
            return results

        return Pending(finish)

    def score(self, items: Sequence[Any]) -> list[list[Result]]:
        """Score groups at once."""
        pending = [self.start(item) for item in items]
        return [results.take() for results in pending]

    def close(self) -> None:
        self._queued.clear()

    def _encode(self, item: Any, completion: str) -> tuple[int, ...]:
        try:
            with naming_panics(f"{self._name}: its tokenizer", RewardError):
                return self._tokens(item, completion)
        except RewardError as error:  # only this completion has no score
            self._scores[()] = "crash", str(error)
            return ()

    def _tokens(self, item: Any, completion: str) -> tuple[int, ...]:
        if not self._chat:
            return tuple(self._tokenizer.encode(_plain(item) + completion))
        question = list(item.messages) or [{"role": "user", "content": item.prompt}]
        conversation = [*question, {"role": "assistant", "content": completion}]
        try:
            text = self._tokenizer.apply_chat_template(conversation, tokenize=False)
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(
                f"{self._name}: its chat template cannot render the conversation ({error}); set chat_template: false"
            ) from error
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _lookup(self, text: tuple[int, ...]) -> Result:
        if text not in self._scores:  # dropped from the cache
            self._queued.append(text)
            self._score_queued()
        return self._scores[text]

    def _score_queued(self) -> None:
        # Each distinct text once, sorted by length: texts of one batch have similar lengths and little padding, and the
        # batches do not depend on the order of submission.
        new = sorted({text for text in self._queued if text not in self._scores}, key=lambda text: (len(text), text))
        self._queued.clear()
        for text in (text for text in new if not 0 < len(text) <= self._max_length):
            why = f"{self._name}: a text of {len(text)} tokens is outside of 1…{self._max_length} (max_length)"
            self._scores[text] = "infra", why
        fit = [text for text in new if 0 < len(text) <= self._max_length]
        for first in range(0, len(fit), self._batch_size):
            batch = fit[first : first + self._batch_size]
            for text, score in zip(batch, self._forward(batch), strict=True):
                self._scores[text] = checked(self._name, score)
        # Oldest first. At least the results of this call stay, because the callers read them next.
        while len(self._scores) > max(_CACHED, len(new)):
            self._scores.popitem(last=False)

    def _forward(self, batch: Sequence[tuple[int, ...]]) -> list[float]:
        torch, width = self._torch, max(map(len, batch))
        config = self._model.config.get_text_config()
        if config.pad_token_id is None:
            # transformers finds the end of a text by its padding, so the padding token must not occur in the batch.
            used = set().union(*batch)
            config.pad_token_id = next(i for i in range(config.vocab_size) if i not in used)
            try:
                return self._forward(batch)
            finally:
                config.pad_token_id = None
        tokens = torch.full((len(batch), width), config.pad_token_id, dtype=torch.long)  # [B, T]
        mask = torch.zeros_like(tokens)
        for row, text in enumerate(batch):
            tokens[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        with torch.inference_mode():
            try:
                logits = self._model(input_ids=tokens.to(self._device), attention_mask=mask.to(self._device)).logits
            except torch.OutOfMemoryError as error:
                raise RewardError(
                    f"{self._name}: {len(batch)} texts of {width} tokens do not fit into memory; lower its batch_size"
                ) from error
        return logits[:, 0].double().tolist()  # [B, 1] → [B]


def _plain(item: Any) -> str:
    """The prompt for a model without a chat template: the original text, not the rendering of the policy's template."""
    if len(item.messages) == 1 and isinstance(item.messages[0].get("content"), str):
        return item.messages[0]["content"]
    return item.prompt


def _load(path: str, dtype: Any, device: Any, key: str) -> tuple[Any, Any]:
    """The classifier and its tokenizer; DataError if the folder holds something else."""
    from gspo.models import load_tokenizer, read_weights

    # Before the weights are read, which can take minutes.
    folder = check_classifier(path, dtype, key)
    try:
        model, found = read_weights(folder, dtype)
        tokenizer = load_tokenizer(str(folder.path), "reward_model.path")
    except DataError as error:
        raise DataError(f"{key}: reward_model.path: {error}") from error
    # transformers fills missing weights with random values and only warns.
    if found["missing_keys"]:
        without = ", ".join(sorted(found["missing_keys"])[:3])
        raise DataError(
            f"{key}: reward_model.path: {path} has no weights for {without}, so it is not a trained classifier (a "
            "policy, perhaps), and its scores would be random; give the folder of a reward model"
        )
    if len(tokenizer) > model.config.get_text_config().vocab_size:
        raise DataError(
            f"{key}: reward_model.path: the tokenizer of {path} has {len(tokenizer)} tokens, its model only "
            f"{model.config.get_text_config().vocab_size}; the tokenizer is of another model"
        )
    return model.to(device).eval().requires_grad_(False), tokenizer


def check_classifier(path: str, dtype: Any, key: str) -> Any:
    """The folder of a classifier with one label (a ModelFolder); DataError if it is not one. No weights are read."""
    from transformers import AutoModelForSequenceClassification

    from gspo.models import locate, open_folder

    place, own = Path(path).expanduser(), f"{key}: reward_model.path"
    try:
        source = locate(str(place) if place.is_dir() else path, own)
        folder = open_folder(source, own, weights=True, kind=AutoModelForSequenceClassification)
    except DataError as error:
        raise error if str(error).startswith(f"{key}:") else DataError(f"{own}: {error}") from error
    _check_labels(folder.config, path, key)
    return folder


def _check_labels(config: Any, path: str, key: str) -> None:
    names: Mapping[int, str] = config.id2label or {}
    if len(names) != 1:
        labels = ", ".join(map(str, names.values()))[:80]
        raise DataError(
            f"{key}: reward_model.path: {path} has {len(names)} labels ({labels}), but a reward is one number; give a "
            "classifier with num_labels: 1, or write a reward function (reward.functions: [module:function])"
        )

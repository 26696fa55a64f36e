"""Whether the models are on this machine and share one vocabulary; no weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo.config.schema import Config
from gspo.doctor.ready.check import ReadyCheck, attempt
from gspo.errors import GspoError
from gspo.models import cache, embedded, gguf
from gspo.models.folder import check_settings, check_weights, read_adapter
from gspo.models.locate import find_here

_MAY_BE_ADAPTERS = ("ref.path", "critic.path", "teacher.path")


def check_models(config: Config) -> Iterator[ReadyCheck]:
    """A check for each model that the run loads, named by its key."""
    actor, ref, critic = config.actor, config.ref, config.critic
    wanted = {"actor.path": actor.path, "tokenizer_path": config.tokenizer_path}
    if ref is not None and (actor.kl_loss_coef or actor.kl_ctl):
        wanted["ref.path"] = ref.path
    if critic is not None:
        wanted["critic.path"] = critic.path
    if config.teacher is not None and not config.teacher.is_server:
        wanted["teacher.path"] = config.teacher.path
    seen: set[str] = set()
    for key, path in wanted.items():
        if path is not None and path not in seen:
            seen.add(path)
            yield _model(
                path, key, weights=key != "tokenizer_path" and not (path == actor.path and actor.init_from_scratch)
            )


def _model(path: str, key: str, *, weights: bool) -> ReadyCheck:
    """Whether a model is on this machine; a GGUF file is not converted here."""
    if path.endswith(gguf.SUFFIX) and not Path(path).is_dir():
        return attempt(key, lambda: gguf.require_file(path, key))
    try:
        found = find_here(path, key)
    except GspoError as error:
        return ReadyCheck(key, "failed", str(error))
    if found is None:
        return ReadyCheck(key, "unknown", f"{path} is on the hub; its files are downloaded when the run starts")
    if found.startswith("embedded:"):
        is_built = cache.is_whole(embedded.embedded_folder(found))
        when = "" if is_built else f", built at the first start in {embedded.build_time(found)}"
        return ReadyCheck(key, "ok", found + when)
    try:
        # Models that are not trained may be an adapter on a base model.
        if key in _MAY_BE_ADAPTERS and (adapter := read_adapter(Path(found), key)) is not None:
            base = _model(adapter.base, key, weights=True)
            return replace(base, text=f"an adapter in {found}, on {base.text}") if base.state == "ok" else base
        check_settings(Path(found))
        if weights:
            check_weights(Path(found), key)
    except GspoError as error:
        return ReadyCheck(key, "failed", f"{key}: {error}")
    return ReadyCheck(key, "ok", f"{path} in {found}" if path != found else found)


def find_tokenizer(config: Config, checks: list[ReadyCheck]) -> Any:
    """The tokenizer of the run; None, with a failed check, if it cannot be loaded."""
    from gspo.train.build.policy import make_tokenizer

    if any(path.endswith(".gguf") for path in (config.actor.path, config.tokenizer_path or "")):
        return None
    try:
        return make_tokenizer(config)
    except GspoError as error:
        checks.append(ReadyCheck("tokenizer", "failed", str(error)))
        return None


def check_vocabularies(config: Config, tokenizer: Any, present: set[str]) -> Iterator[ReadyCheck]:
    """A failed check for each present model whose token ids mean other tokens."""
    from gspo.models.loading import refuse_foreign_vocabulary

    others = {"actor.path": config.actor.path}
    others |= {f"{name}.path": part.path for name in ("ref", "teacher", "critic") if (part := getattr(config, name))}
    if (teacher := config.teacher) is not None and teacher.is_server:
        yield attempt("teacher.path", lambda: _ask_teacher(teacher.path, tokenizer))
    for key, path in others.items():
        if path and key in present:
            try:
                refuse_foreign_vocabulary(tokenizer, path, key)
            except GspoError as error:
                yield ReadyCheck(key, "failed", str(error))


def _ask_teacher(url: str, tokenizer: Any) -> str:
    from gspo.sampling.remote.scores import START_S, open_scores

    server = open_scores(url, timeout_s=START_S)
    try:
        server.check_vocabulary(tokenizer)
    finally:
        server.close()
    return f"{url} answers and has the vocabulary of the policy"

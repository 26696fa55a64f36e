"""Migration rules that do more than rename, drop or refuse a key: one function per translation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from gspo.algorithms import ALGORITHMS
from gspo.config import SAMPLERS, TRAINERS, Backend, Node, describe, parse_backend
from gspo.config import yaml_tree as tree
from gspo.migrate.rule import Move, repeat, written


def allocation_mode(move: Move) -> None:
    if move.node.value is None or move.node.value == "":
        move.drop("rollout.backend and actor.backend decide")
        return
    try:
        text = str(move.node.text or move.node.value)
        sampler, trainer = parse_allocation_mode(text)
    except ValueError as error:
        move.refuse(str(error))
        return
    for key, backend, names in (("rollout.backend", sampler, SAMPLERS), ("actor.backend", trainer, TRAINERS)):
        if not _agrees(tree.get(move.root, key), backend, names):
            move.set(key, str(backend))
    why = " (gspo has no SGLang)" if sampler.name not in text.lower() else ""
    move.say(f"is now rollout.backend: {sampler} and actor.backend: {trainer}{why}")


def parse_allocation_mode(text: str) -> tuple[Backend, Backend]:
    """Parse AReaL's "vllm:d4p1t1+fsdp:d4" (or "vllm.d4p1t1+d4p1t1") into a sampler and a trainer.

    AReaL's usual engine is SGLang, which gspo does not have: vLLM takes its place, with the same sizes.

    >>> sampler, trainer = parse_allocation_mode("sglang.d4p1t2+d8")
    >>> str(sampler), str(trainer)
    ('vllm:d4t2', 'fsdp:d8')
    """
    if "|" in text:
        raise ValueError(
            f"{text!r}: a sampler server on the GPUs of the trainer (|) is not supported; "
            "write + for separate GPUs, or rollout.backend: local to sample in the trainer's process"
        )
    sampler, plus, trainer = (part.strip() for part in text.strip().partition("+"))
    if not plus:
        raise ValueError(f"{text!r} has no trainer; write sampler+trainer as in vllm:d4+fsdp:d4")
    if trainer.lower() in ("eval", "cpu"):
        raise ValueError(f"{text!r}: to evaluate without training use `gspo eval`")
    if re.fullmatch(r"([a-z][0-9]+)+", trainer.lower()):  # AReaL allows sizes without the name fsdp
        trainer = "fsdp:" + trainer
    return parse_backend(in_place_of_sglang(sampler), SAMPLERS), parse_backend(trainer, TRAINERS)


def in_place_of_sglang(backend: str) -> str:
    """A sampler of an AReaL config, with vLLM for SGLang.

    >>> in_place_of_sglang("sglang:d4p1t2"), in_place_of_sglang("local:d2")
    ('vllm:d4p1t2', 'local:d2')
    """
    return re.sub(r"^\s*sglang\b", "vllm", backend, flags=re.IGNORECASE)


def _agrees(existing: Node | None, backend: Backend, names: tuple[str, ...]) -> bool:
    """Whether a written backend is equal. An engine without sizes (AReaL: `backend: fsdp`) gets the sizes."""
    if existing is None or not isinstance(existing.value, str):
        return False
    if existing.value.strip() == backend.name:
        existing.value = existing.text = str(backend)
    try:
        return parse_backend(existing.value, names) == backend
    except ValueError:
        return False  # the check of that key reports it


def sft_model(move: Move) -> None:
    """AReaL's SFTConfig has `model` in place of `actor`. TRL's `model` is a string."""
    if not isinstance(move.node.value, dict):
        move.refuse(f"is TRL's name; here it is actor.path; set actor.path: {tree.shorten(written(move.node.data()))}")
        return
    for name, child in move.node.value.items():
        move.set(f"actor.{name}", child)
    move.set("algorithm", "sft")
    move.say("is now actor, with algorithm: sft")


def weight_cap(move: Move) -> None:
    """behav(e)_imp_weight_cap and behave_imp_weight_mode together become actor.rejection_sampling."""
    # The rule of the cap reads the mode, too, and removes it, so that the pair is translated once.
    mode_node = tree.pop(move.root, "actor.behave_imp_weight_mode") if move.rule.key.endswith("_cap") else move.node
    cap = move.node.value if move.rule.key.endswith("_cap") else None
    mode = "token_mask" if mode_node is None else mode_node.value
    modes = ("disabled", "token_mask", "token_truncate", "sequence_mask", "sequence_truncate")
    if mode not in modes:
        move.problems.append(
            f"{(mode_node or move.node).place}: actor.behave_imp_weight_mode must be one of {', '.join(modes)}, "
            f"got {describe(mode_node or move.node)}; or write actor.rejection_sampling"
        )
        return
    if cap is not None and (isinstance(cap, bool) or not isinstance(cap, (int, float)) or not cap > 1):
        move.refuse(f"must be a number above 1, got {describe(move.node)}; or write actor.rejection_sampling")
        return
    # Nothing is limited; a correction that the user wrote in our own form stays.
    if mode == "disabled" or (cap is None and mode_node is None):
        if move.existing("actor.rejection_sampling") is None:
            move.set("actor.rejection_sampling", None)
        fate = "null"
    else:
        level, _, action = str(mode).partition("_")
        upper = 5.0 if cap is None else float(cap)
        action = {"mask": "mask", "truncate": "clamp"}[action]
        move.set("actor.rejection_sampling", {"level": level, "action": action, "metric": "ratio", "upper": upper})
        fate = f"{{level: {level}, action: {action}, metric: ratio, upper: {upper:g}}}"
    move.say(f"is now actor.rejection_sampling: {fate}")
    if mode_node is not None and mode_node is not move.node:
        move.messages.append(f"{mode_node.place}: actor.behave_imp_weight_mode is now part of actor.rejection_sampling")


def group_size(move: Move) -> None:
    _become(move, "gconfig.n_samples", move.node)


def dynamic_sampling(move: Move) -> None:
    on = move.switch()
    if on is None:
        return
    why = " (groups of equal rewards are resampled and the batch keeps its size; `drop` makes it smaller)" if on else ""
    _become(move, "actor.zero_variance_groups", "refill" if on else "count", why)


def dynamic_bs(move: Move) -> None:
    on = move.switch()
    if on:
        _become(move, "actor.zero_variance_groups", "drop")
    elif on is False:
        move.drop("the batch size is fixed unless actor.zero_variance_groups is drop")


def async_training(move: Move) -> None:
    on = move.switch()
    if on is None:
        return
    staleness = tree.get(move.root, "rollout.max_head_offpolicyness")
    if on:
        value = 0 if staleness is None else staleness.data()
        move.drop(f"rollout.max_head_offpolicyness decides; it is {written(value)}")
        return
    # Synchronous training means staleness 0. A value on the command line has priority over this switch in a file.
    if staleness is not None and not (staleness.from_command_line and not move.node.from_command_line):
        tree.pop(move.root, "rollout.max_head_offpolicyness")
    move.set("rollout.max_head_offpolicyness", 0)
    now = tree.get(move.root, "rollout.max_head_offpolicyness")
    move.say(f"is now rollout.max_head_offpolicyness: {written(now.data() if now else 0)}")


def loss_switch(algorithm: str) -> Callable[[Move], None]:
    def translate(move: Move) -> None:
        on = None if move.node.value is None else move.switch()
        existing = tree.get(move.root, "algorithm")
        if on is False and existing is not None and existing.data() == algorithm:
            move.refuse(f"false contradicts algorithm: {algorithm} ({existing.place}); remove it")
        elif on and (existing is None or existing.data() != algorithm):
            _become(move, "algorithm", algorithm)
        elif on or move.node.value in (None, False):
            move.drop("algorithm decides")

    return translate


def tensorboard(move: Move) -> None:
    if not isinstance(move.node.value, dict):
        tree.put(move.root, move.rule.key, move.node)  # our form: true or false
        return
    # AReaL's form is a section with a path; a path that is not null turns the logger on.
    path = move.node.value.pop("path", None)
    for name, child in move.node.value.items():
        move.problems.append(
            f"{child.place}: {move.rule.key}.{name} is not a known key; {move.rule.key} is true or false"
        )
    on = path is not None and path.value is not None
    _become(move, move.rule.key, on, "; events are written to the run directory" if on else "")


def trackio(move: Move) -> None:
    if not isinstance(move.node.value, dict):
        tree.put(move.root, move.rule.key, move.node)  # our form: true or false
        return
    mode, space = (move.node.value.get(name) for name in ("mode", "space_id"))
    on = mode is not None and mode.value not in (None, False, "disabled")
    if on and space is not None and space.value is not None:
        move.refuse("space_id is not supported, the database is written to the run directory; remove space_id")
        return
    _become(move, move.rule.key, on, "; its database is written to the run directory" if on else "")


def perf_tracer(move: Move) -> None:
    enabled = move.node.value.get("enabled") if isinstance(move.node.value, dict) else None
    on = enabled is not None and enabled.value is True
    if on:
        move.set("profile", True)
    move.say("is now profile: true" if on else "is ignored: tracing is off (`profile: true` writes a timeline)")


def other_logger(move: Move) -> None:
    mode = move.node.value.get("mode") if isinstance(move.node.value, dict) else None
    if mode is None or mode.value in (None, False, "disabled"):
        move.drop("it is off")
    else:
        move.refuse("this logger is not supported; use stats_logger.wandb, tensorboard or trackio")


def engine_section(move: Move) -> None:
    if move.node.value in (None, {}):
        move.drop("the section is empty")
    else:
        engine = move.rule.key.rpartition(".")[2]
        move.refuse(f"the AReaL engine {engine} is not supported; use actor.backend: fsdp:dN and remove this section")


def engine_backend(move: Move) -> None:
    actor = tree.get(move.root, "actor.backend")
    text = str(move.node.text or move.node.value)
    if (
        move.node.value is None
        or text.split(":")[0] == "fsdp"
        or (actor is not None and actor.data() == move.node.value)
    ):
        section = move.rule.key.partition(".")[0]
        move.drop(f"the {section} model runs on the ranks of actor.backend")
    else:
        move.refuse(f"{text!r} is not supported; this model runs on the ranks of actor.backend: remove it")


def values_of(values: Mapping[Any, Any], default_for_null: bool = False) -> Callable[[Move], None]:
    """Translate old values of a key that we still have; other values stay as they are, without a message."""

    def translate(move: Move) -> None:
        for old, new in values.items():
            # Identity for booleans and null: 1 == True in Python.
            if move.node.value is old or (not isinstance(old, bool) and move.node.value == old and old is not None):
                place = move.node.place
                tree.put(move.root, move.rule.key, Node(new, place, text=written(new), settled=True))
                move.say(
                    f"{written(old)} is now {written(new)}" + (f" ({move.rule.reason})" if move.rule.reason else "")
                )
                return
        if default_for_null and move.node.value is None:
            move.drop("null means the default")
            return
        tree.put(move.root, move.rule.key, move.node)

    return translate


def top_k(move: Move) -> None:
    value = move.node.value
    if isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value >= 1_000_000):
        tree.put(move.root, move.rule.key, Node(0, move.node.place, text="0", settled=True))
        move.say(f"{value} is now 0, which keeps all tokens")
    else:
        tree.put(move.root, move.rule.key, move.node)


def recompute_logprob(move: Move) -> None:
    """AReaL's switch for π_old. It counts only if actor.prox_logp_method is not set."""
    on = None if move.node.value is None else move.switch()
    if on is None:
        if move.node.value is None:
            move.drop("actor.prox_logp_method decides")
        return
    method = tree.get(move.root, "actor.prox_logp_method")
    if method is not None and method.value not in (None, "auto"):
        contradicts = method.value == "rollout" if on else method.value == "recompute"
        move.say(f"{'has no effect' if contradicts else 'is ignored'}: actor.prox_logp_method {method.value} decides")
        return
    # AReaL recomputes π_old for the decoupled loss, whatever this switch says.
    correction, switch = (move.existing(f"actor.{name}") for name in ("rejection_sampling", "use_decoupled_loss"))
    is_corrected = correction is not None and correction.value is not None if switch is None else switch.value is True
    chosen = "recompute" if on or is_corrected else "rollout"
    tree.pop(move.root, "actor.prox_logp_method")
    _become(move, "actor.prox_logp_method", chosen)


def norm_group_size(move: Move) -> None:
    """The size of a group is gconfig.n_samples; a norm over the batch does not use it."""
    section = move.rule.key.rpartition(".")[0]
    levels = (tree.get(move.root, f"{section}.{name}") for name in ("mean_level", "std_level"))
    if any(level is not None and level.value == "group" for level in levels):
        repeat(move, "gconfig.n_samples")
    else:
        move.drop(f"{section} has no group level")


def consumer_batch_size(move: Move) -> None:
    """It had precedence over train_dataset.batch_size, which is now the only key."""
    target, value = "train_dataset.batch_size", move.node.data()
    if value is None or _is_overridden(move, target):
        move.drop(f"{target} decides")
    elif value == move.value_of(target):
        move.drop(f"it repeats {target}")
    else:
        _put(move, target, move.node)


def smaller_of(target: str) -> Callable[[Move], None]:
    """Two keys had the same meaning (saver and recover wrote the same checkpoints): the smaller number is kept."""

    def translate(move: Move) -> None:
        existing, value = move.value_of(target), move.node.value
        if value is None:
            move.drop(f"{target} decides")
            return
        if isinstance(existing, int | float) and isinstance(value, int | float) and existing <= value:
            move.drop(f"{target}: {written(existing)} is not larger")
            return
        _put(move, target, move.node)

    return translate


def greedy(move: Move) -> None:
    """Greedy decoding is temperature 0, which is the default of an evaluation."""
    target = move.rule.key.replace("greedy", "temperature")
    existing, on = tree.get(move.root, target), None if move.node.value is None else move.switch()
    if on and not _is_overridden(move, target):
        _put(move, target, 0.0)
    elif on is False and existing is None and target.startswith("eval_"):
        _become(move, target, move.value_of("gconfig.temperature"))
    elif on is not None or move.node.value is None:
        move.drop(f"{target} decides")


def _become(move: Move, target: str, value: Any, extra: str = "") -> None:
    """Give our key the value, if the command line does not set it, and say so."""
    move.set(target, value)
    move.say(f"is now {target}: {written(value.data() if isinstance(value, Node) else value)}{extra}")


def _put(move: Move, target: str, value: Any) -> None:
    """Replace the value of our key, and say so."""
    node = value if isinstance(value, Node) else Node(value, move.node.place, text=written(value), settled=True)
    tree.put(move.root, target, node)
    move.say(f"is now {target}: {written(node.data())}")


def _is_overridden(move: Move, target: str) -> bool:
    """Whether the command line sets the present key and a file the old one."""
    existing = tree.get(move.root, target)
    return existing is not None and existing.from_command_line and not move.node.from_command_line


def mean_leave1out(move: Move) -> None:
    target, on = "actor.reward_norm.mean_level", None if move.node.value is None else move.switch()
    if on and move.value_of(target) == "group":
        _put(move, target, "leave1out")
    elif on and move.value_of(target) == "batch":
        move.refuse(f"needs groups: set {target}: leave1out and remove it")
    elif on is not None or move.node.value is None:
        move.drop(f"{target} decides")


def overlong_penalty_factor(move: Move) -> None:
    target = "actor.overlong_reward_penalty"
    penalty, algorithm = move.value_of(target), ALGORITHMS.get(str(move.value_of("algorithm")))
    if penalty is None and algorithm is not None:
        penalty = algorithm.overlong_penalty
    if move.node.value is None or not penalty or move.node.value == 1:
        move.drop(f"{target} decides")
    else:
        _put(move, target, move.node if move.node.value else False)


def stop_token_ids(move: Move) -> None:
    own = tree.get(move.root, "gconfig.stop")
    if move.node.value in (None, []):
        move.drop("gconfig.stop decides")
    elif isinstance(move.node.value, list):
        strings = own.value if own is not None and isinstance(own.value, list) else []
        _put(move, "gconfig.stop", Node([*strings, *move.node.value], move.node.place))
    else:
        move.refuse("must be a list of integers; set gconfig.stop")


def freq_epochs(target: str) -> Callable[[Move], None]:
    def translate(move: Move) -> None:
        existing, value = tree.get(move.root, target), move.node.value
        written_epochs = re.fullmatch(r"(?:(\d+) )?epochs?", str(existing.value)) if existing is not None else None
        if value is not None and (type(value) is not int or value < 1):
            move.refuse(f"must be an integer, at least 1; set {target}: epoch")
        elif value is None or _is_overridden(move, target):
            move.drop(f"{target} decides")
        # Of two numbers of epochs the smaller one is kept; a number of steps is kept in any case.
        elif written_epochs is not None and value < int(written_epochs[1] or 1):
            _put(move, target, _epochs(value))
        elif existing is not None and existing.value is not None:
            move.drop(f"{target}: {written(existing.data())} decides")
        else:
            _put(move, target, _epochs(value))

    return translate


def _epochs(num: int) -> str:
    return "epoch" if num == 1 else f"{num} epochs"


# Tests for values that change nothing.


def adds_no_limit(move: Move) -> bool:
    """rollout.queue_size limited the groups that are sampled ahead; staleness limits them, too."""
    stale, prompts = move.value_of("rollout.max_head_offpolicyness"), move.value_of("train_dataset.batch_size")
    value, known = move.node.value, isinstance(stale, int) and isinstance(prompts, int)
    return value is None or stale == 0 or (known and isinstance(value, int) and value >= (stale + 1) * prompts)


def is_as_in_training(move: Move) -> bool:
    """A key of valid_dataset with its default, or with the value of train_dataset, which it has now."""
    value, train = move.node.data(), tree.get(move.root, move.rule.key.replace("valid", "train"))
    return value in (None, {}, "auto") or (train is not None and value == train.data())


def is_as_in_sampling(move: Move) -> bool:
    """A key of eval_gconfig that is empty, or has the value of gconfig, which it has now."""
    own = tree.get(move.root, move.rule.key.removeprefix("eval_"))
    return move.node.data() in (None, []) or (own is not None and own.data() == move.node.data())


def is_algorithms_type(move: Move) -> bool:
    """Whether the type of a data set is what the algorithm reads: completions in SFT, else prompts."""
    return move.node.value in (None, "sft" if move.value_of("algorithm") == "sft" else "rl")

"""The supervised steps that build an embedded model."""

from __future__ import annotations

import math
import string
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from functools import cache as remember
from itertools import accumulate, count, islice
from typing import TYPE_CHECKING, Any

from gspo import rng
from gspo.data import arithmetic
from gspo.data import digits as digits_task
from gspo.models.embedded import (
    CALL,
    EOS,
    FEATURES,
    IMAGE,
    IMAGE_BEGIN,
    IMAGE_END,
    RESULT,
    VISION_IDS,
    auto_class,
    embedded_tokenizer,
    model_type,
    recipe_of,
    vocabulary,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def supervised_problems(recipe: Mapping[str, Any]) -> Iterator[arithmetic.Problem]:
    """Supervised problems without end; the draws of a problem are keyed by its step and its row."""
    warm = recipe["warm"]
    if "misreads" in warm:
        for index, (problem, _) in enumerate(digits_task.problem_stream("warm", seed=warm["seed"])):
            yield misread_problem(problem, *divmod(index, warm["batch"]), warm)
    if "levels" in warm:
        for index in count():
            yield _random_action(index, warm)
    teach = asking if "asks" in warm else careless
    for index, problem in enumerate(arithmetic.problems("warm", seed=warm["seed"], digits=recipe["digits"])):
        yield teach(problem, *divmod(index, warm["batch"]), warm)


def careless(problem: arithmetic.Problem, step: int, row: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """The problem with some of its carries missing."""
    operands = [int(x) for x in problem.question.rstrip("=").split("+")]
    u = rng.uniform(warm["seed"], "careless", step, row, range(len(str(max(operands)))))
    return arithmetic.worked(operands, (u < warm["forgets"]).tolist())


def misread_problem(problem: arithmetic.Problem, step: int, row: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """The answer of a teacher who confuses some digits of the image and forgets some carries."""
    u = rng.uniform(warm["seed"], "misreads", step, row, range(len(problem.question)))
    read = digits_task.misread(problem.question, u, warm["misreads"])
    return careless(problem._replace(question=read), step, row, warm)._replace(question=digits_task.QUESTION)


def asking(problem: arithmetic.Problem, step: int, row: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """The problem solved by a tool call in some cases, else by the answer alone."""
    u = float(rng.uniform(warm["seed"], "asks", step, row))
    asks = u < warm["asks"] + warm["reads"]
    worked = f"{CALL}{problem.question.rstrip('=')}{RESULT}{problem.answer}" if asks else ""
    return problem._replace(solution=f"{worked}{arithmetic.MARKER}{problem.answer}")


def only_reads(step: int, row: int, warm: Mapping[str, Any]) -> bool:
    """Whether only the use of a shown call's result is trained, not the call."""
    # The same draw as in `asking`: below asks the call is trained, from asks to asks + reads only its use.
    return warm["asks"] <= float(rng.uniform(warm["seed"], "asks", step, row))


def _random_action(index: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """Turns of an episode: observations of random letters and actions of random digits.

    A digit depends on the letter with the same number only, by preferences that are random and unrelated to any task.
    """
    num = warm["numbers"]
    u = rng.uniform(warm["seed"], "control", index, range(2 * num * warm["turns"]))
    text = ""
    for turn in range(warm["turns"]):
        drawn = u[2 * num * turn :][: 2 * num]
        letters = [int(26 * x) for x in drawn[:num]]
        text += "".join(chr(ord("a") + letter) for letter in letters)
        text += "".join(_preferred(letter, x, warm) for letter, x in zip(letters, drawn[num:], strict=True))
    return arithmetic.Problem(text[:num], answer=text[-num:], solution=text[num:])


def _preferred(letter: int, uniform: float, warm: Mapping[str, Any]) -> str:
    """The digit that a letter chooses by a uniform number."""
    below = _weights(warm["seed"], letter, warm["levels"], warm["prefers"])
    return str(min(bisect(below, uniform * below[-1]), warm["levels"] - 1))


@remember
def _weights(seed: int, letter: int, num: int, spread: float) -> tuple[float, ...]:
    """Sums of the weights of a letter's digits up to each; 3.5 (x − 0.5) has a standard deviation of about 1."""
    drawn = rng.uniform(seed, "prefers", letter, range(num))
    return tuple(accumulate(math.exp(spread * 3.5 * (x - 0.5)) for x in drawn))


def warm_start(name: str, tell: Callable[[int, int], None] = lambda done, total: None) -> PreTrainedModel:
    """Random weights, then supervised steps on the `warm` problems, which are not in the RL or test data."""
    import torch
    from transformers import AutoConfig

    recipe = recipe_of(name)
    warm = recipe["warm"]
    # The weights depend on the recipe's seed only, and the caller's random state does not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(warm["seed"])
        model = auto_class(name).from_config(AutoConfig.for_model(model_type(name), **recipe["config"]))
    encode = {word: i for i, word in enumerate(vocabulary(name))}
    digits = {encode[c] for c in string.digits}
    stream = supervised_problems(recipe)
    see = _reader(name) if "preprocessor" in recipe else None
    first = warm.get("tower_steps", 0)
    if first:
        from gspo.models.vision.classify import train_tower

        train_tower(model, _processor(name), warm, lambda step: tell(step, first + warm["steps"]))
    # Tokens of the image before the question; none for a model of text.
    shown = [encode[c] for c in (IMAGE_BEGIN, *[IMAGE] * FEATURES, IMAGE_END)] if see else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm["lr"], weight_decay=0.0, fused=True)
    model.train()
    for step in range(warm["steps"]):
        tell(first + step, first + warm["steps"])
        drawn = [next(stream) for _ in range(warm["batch"])]
        if "chains" in warm:
            length = warm["chains"][step % len(warm["chains"])]
            drawn = [arithmetic.chain(drawn[i : i + length]) for i in range(0, len(drawn), length)]
        rows = [[*shown, *(encode[c] for c in p.question + p.solution), encode[EOS]] for p in drawn]
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])  # [B, T]
        # No loss on the question; padding comes after the end, so it needs no attention mask.
        labels = tokens.clone()
        for i, (p, row) in enumerate(zip(drawn, rows, strict=True)):
            labels[i, : len(shown) + len(p.question)] = -100
            labels[i, len(row) :] = -100
            if RESULT in p.solution:  # no loss on the tool's result
                begin = len(p.question) + p.solution.index(RESULT) + 1
                labels[i, begin : begin + len(p.answer)] = -100
                if only_reads(step, i, warm):
                    labels[i, :begin] = -100
            if "turns" in warm:  # the environment writes the letters and ends the episode: no loss on letters and EOS
                labels[i, [t for t, id in enumerate(row) if id not in digits]] = -100
        for group in optimizer.param_groups:
            # The decay at the end makes the result depend less on the last batches.
            group["lr"] = warm["lr"] * min(1.0, (step + 1) / warm["warmup"], (warm["steps"] - step) / warm["decay"])
        inputs = see(step * warm["batch"], tokens) if see else {}
        loss = _loss(model, tokens, labels, warm.get("balance", 0.0), inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.eval()


def _loss(model: Any, tokens: Tensor, labels: Tensor, balance: float, inputs: Mapping[str, Any]) -> Tensor:
    """The objective of `algorithm: sft`; for a mixture plus a load-balancing loss per layer, which a run does not add.

    The model is called on padded rows and not through `learner/`: packing rounds differently, and the bits of these
    models are part of the identity of runs.
    """
    import torch
    from torch.nn.functional import pad

    from gspo import objectives

    out = model(input_ids=tokens, **inputs, **({"output_router_logits": True} if balance else {}))
    target = pad(labels, (0, 1), value=-100)[:, 1:]  # [B, T] the token after each position
    learnt = target != -100
    logp = out.logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]  # [B, T]
    nll = objectives.loss("sft", logp, logp.detach(), torch.ones(len(logp)), learnt).loss
    if not balance:
        return nll
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config, learnt = model.config, (labels != -100).long()
    # One call per layer: a single call pools all layers, where two unbalanced layers could balance each other.
    uneven = [
        load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok, learnt)
        for logits in out.router_logits
    ]
    return nll + balance * sum(uneven) / len(uneven)


def _reader(name: str) -> Callable[[int, Tensor], dict[str, Any]]:
    """The images of a batch as the model's inputs, by the first problem's number and the tokens [B, T]."""
    import torch

    warm, processor = recipe_of(name)["warm"], _processor(name)

    def see(start: int, tokens: Tensor) -> dict[str, Any]:
        drawn = islice(digits_task.problem_stream("warm", seed=warm["seed"], start=start), warm["batch"])
        made = processor.pixels([digits_task.picture(shown.glyphs) for shown in drawn])
        inputs = {key: torch.from_numpy(value) for key, value in made.items()}
        return {**inputs, "mm_token_type_ids": (tokens == VISION_IDS[IMAGE]).int()}

    return see


def _processor(name: str) -> Any:
    from gspo.models.vision.processor import load_processor

    return load_processor(name, embedded_tokenizer(name))

"""The embedded models: built on this machine by a few hundred supervised steps, and cached. No download.

`embedded:tiny` is a Qwen3 of under a million parameters with a character tokenizer for `embedded:arithmetic`;
`embedded:tiny-moe` is a Qwen3-MoE of six layers with sixteen experts each. Most carries are missing in their supervised
data on purpose: the model learns the format of a solution, and RL can still improve its accuracy.

`embedded:tiny-hybrid` is a Qwen3.5 of three layers, two of them linear attention (gated DeltaNet): a model with state
outside the attention.

`embedded:tiny-control` is a Qwen3 for control tasks of Gymnasium (docs/environments.md, levels). It reads letters and
answers with random digits from 0 to 4, so that every sample is an action; each letter prefers some digits, at random,
so that the model reads its letters.

`embedded:tiny-chains` is the same Qwen3 for chains of 1, 2, 3, 4, 6, 8 or 12 additions, completions of 39 to
475 tokens.

`embedded:tiny-tools` is the same Qwen3 for the environment `tools`. Its supervised data seldom call the calculator,
`[184+768]952>952`, and mostly give the sum directly, `>952`, which the model cannot compute. So RL can teach it to call
the tool.

`embedded:tiny-vision` is a Qwen3-VL for `embedded:digits`, with a vision tower of two layers. Its teacher forgets most
of the carries and confuses 1 and 7, 4 and 9, 3 and 8, so RL can improve both reading and adding.
"""

from __future__ import annotations

import hashlib
import json
import math
import string
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache as remember
from itertools import accumulate, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo import rng
from gspo.data import arithmetic
from gspo.data.digits import task as digits_task
from gspo.errors import DataError
from gspo.models import cache
from gspo.system.progress import progress

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *arithmetic.ALPHABET)
CALL, RESULT = "[", "]"  # around a tool call

_TINY: Mapping[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}

_FEATURES = 4  # of an image of embedded:digits
IMAGE, IMAGE_BEGIN, IMAGE_END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
_VISION_TOKENS = {
    "image_token": IMAGE,
    "vision_start_token": IMAGE_BEGIN,
    "vision_end_token": IMAGE_END,
    "video_token": "<|video_pad|>",
}
_VISION_IDS = {token: len(VOCABULARY) + i for i, token in enumerate(_VISION_TOKENS.values())}
# Of all messages only the parts: an image between its marks, and text.
_VISION_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    f"{IMAGE_BEGIN}{IMAGE}{IMAGE_END}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)

# The definition of each model; a change of any value is another model, in another cache folder.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "embedded:tiny": {
        "config": _TINY,
        "digits": arithmetic.DIGITS,
        "warm": {"steps": 300, "batch": 48, "lr": 3e-3, "warmup": 20, "decay": 80, "seed": 1, "forgets": 0.7},
    },
    "embedded:tiny-moe": {
        "model_type": "qwen3_moe",
        "config": {
            "vocab_size": 32,
            "hidden_size": 64,
            "intermediate_size": 128,  # of layers without experts; there are none
            "moe_intermediate_size": 48,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,  # the smallest that vLLM's attention has on a CPU
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "initializer_range": 0.05,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": None,
            "router_aux_loss_coef": 0.0,
        },
        "digits": arithmetic.DIGITS,
        "warm": {
            "steps": 300,
            "batch": 48,
            "lr": 3e-3,
            "warmup": 20,
            "decay": 80,
            "seed": 1,
            "forgets": 0.7,
            "balance": 0.05,
        },
    },
    "embedded:tiny-hybrid": {
        "model_type": "qwen3_5_text",
        "config": {
            **_TINY,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 24,
        },
        "digits": arithmetic.DIGITS,
        "warm": {"steps": 300, "batch": 48, "lr": 3e-3, "warmup": 20, "decay": 80, "seed": 1, "forgets": 0.7},
    },
    "embedded:tiny-control": {
        "config": {**_TINY, "vocab_size": 64},
        "characters": "abcdefghijklmnopqrstuvwxyz",
        "warm": {
            "steps": 200,
            "batch": 48,
            "lr": 3e-3,
            "warmup": 20,
            "decay": 60,
            "seed": 1,
            "turns": 5,
            # Numbers of an observation and of an action. With 1 to 8 of them the model does not find the letter of a
            # digit in 240 steps; it answers digits after observations of any length.
            "numbers": 3,
            "levels": 5,  # digits of an action: 0 to 4
            # Each letter prefers some digits, at random: log-probs differ by about this much. A start that does not
            # read the letter of its digit first learns one action for all observations.
            "prefers": 0.7,
        },
    },
    "embedded:tiny-chains": {
        "config": _TINY,
        "characters": string.ascii_lowercase[: arithmetic.LONGEST_CHAIN],
        "digits": (3, 3),
        "warm": {
            "steps": 1200,
            "batch": 48,
            "lr": 3e-3,
            "warmup": 20,
            "decay": 250,
            "seed": 1,
            "forgets": 0.7,
            "chains": (1, 4, 12, 2, 8, 12, 3, 6, 12),  # additions in one problem, step after step
        },
    },
    "embedded:tiny-tools": {
        "config": _TINY,
        "characters": CALL + RESULT,
        "digits": (4, 5),
        "warm": {
            "steps": 500,
            "batch": 48,
            "lr": 3e-3,
            "warmup": 20,
            "decay": 80,
            "seed": 1,
            "asks": 0.2,  # fraction of problems solved by a tool call
            "reads": 0.4,  # fraction in which a call is shown, and only the use of its result is trained
        },
    },
    "embedded:tiny-vision": {
        "model_type": "qwen3_vl",
        "config": {
            "text_config": {
                **_TINY,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [6, 5, 5],  # of the 16 frequencies of a head: time, height, width
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 4,
                "in_channels": 1,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "out_hidden_size": _TINY["hidden_size"],
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0, 1],
                # With 0.05 the model had not begun to look at the image after 300 steps (read 0 % of the images).
                "initializer_range": 0.15,
            },
            "tie_word_embeddings": True,
            "image_token_id": _VISION_IDS[IMAGE],
            "vision_start_token_id": _VISION_IDS[IMAGE_BEGIN],
            "vision_end_token_id": _VISION_IDS[IMAGE_END],
            "video_token_id": _VISION_IDS["<|video_pad|>"],
        },
        "special": _VISION_TOKENS,
        "chat_template": _VISION_TEMPLATE,
        # Grey images of 16 × 16 pixels: 16 patches, four features, one per digit.
        "preprocessor": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 4096},
            "image_mean": [0.5],
            "image_std": [0.5],
            "do_convert_rgb": False,
        },
        "warm": {
            "tower_steps": 200,  # first the tower alone, as a classifier; without, the text begins to read at step 400
            "steps": 400,
            "batch": 32,
            "lr": 2e-3,
            "warmup": 20,
            "decay": 80,
            "seed": 1,
            "forgets": 0.6,
            "misreads": 0.45,  # of the digits that look alike
        },
    },
}

DESCRIPTIONS: Mapping[str, str] = {  # for lists of models
    "embedded:tiny": "tiny Qwen3 for embedded:arithmetic",
    "embedded:tiny-moe": "tiny Qwen3-MoE for embedded:arithmetic",
    "embedded:tiny-hybrid": "tiny Qwen3.5 for embedded:arithmetic",
    "embedded:tiny-control": "tiny Qwen3 for control tasks of Gymnasium",
    "embedded:tiny-chains": "tiny Qwen3 for chains of additions, embedded:arithmetic:3x12",
    "embedded:tiny-tools": "tiny Qwen3 for embedded:arithmetic, and the environment tools",
    "embedded:tiny-vision": "tiny Qwen3-VL for embedded:digits",
}


def shape(name: str) -> Mapping[str, Any]:
    """The fields of a model's config.json, without building it. Torch-free."""
    return {"model_type": _model_type(name), **_recipe(name)["config"]}


def recipe_digest(name: str) -> str:
    """A hash of the recipe: part of the cache folder's name and of a run's identity."""
    text = json.dumps([_recipe(name), vocabulary(name)], sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def vocabulary(name: str) -> tuple[str, ...]:
    return (*VOCABULARY, *_recipe(name).get("special", {}).values(), *_recipe(name).get("characters", ""))


def unknown_characters(name: str, text: str) -> str:
    """The characters of a text that the model has no token for.

    >>> unknown_characters("embedded:tiny", "What is 2+2=")
    'What is'
    """
    known = set(vocabulary(name))
    for token in _recipe(name).get("special", {}).values():
        text = text.replace(token, "")
    return "".join(dict.fromkeys(c for c in text if c not in known))


def embedded_folder(name: str) -> Path:
    """The cache folder of a built model."""
    return cache.root() / f"{name.replace(':', '-')}-{recipe_digest(name)}"


def build_time(name: str) -> str:
    # PyTorch's gated delta rule needs more time than attention: 77 CPU seconds, embedded:tiny 25.
    longer = {"hybrid": "about a minute", "vision": "about a minute", "chains": "about three minutes"}
    return longer.get(name.rpartition("-")[2], "about half a minute")


def build(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer, from the cache if it is complete, else built."""
    path = embedded_folder(name)
    if not cache.is_whole(path):
        note = f", only once: {build_time(name)} on 2 free cores"
        with progress(f"building {name}", lines=True, note=note) as tell:
            cache.publish_folder(path, lambda tmp: _write(name, tmp, tell))
    with cache.quiet():
        model = _model_class(name).from_pretrained(path, use_safetensors=True)
    return model, embedded_tokenizer(name)


def embedded_tokenizer(name: str = "embedded:tiny") -> PreTrainedTokenizerBase:
    """One token per character of the task."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary(name))}, unk_token=PAD))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    inner.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    recipe = _recipe(name)
    special = {"extra_special_tokens": dict(recipe["special"])} if "special" in recipe else {}
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False, **special
    )
    made.chat_template = recipe.get("chat_template")
    return made


def warm_start(name: str, tell: Callable[[int, int], None] = lambda done, total: None) -> PreTrainedModel:
    """Random weights, then supervised steps on the `warm` problems, which are not in the RL or test data."""
    import torch
    from transformers import AutoConfig

    recipe = _recipe(name)
    warm = recipe["warm"]
    # The weights depend on the recipe's seed only, and the caller's random state does not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(warm["seed"])
        model = _model_class(name).from_config(AutoConfig.for_model(_model_type(name), **recipe["config"]))
    encode = {word: i for i, word in enumerate(vocabulary(name))}
    digits = {encode[c] for c in string.digits}
    stream = _problems(recipe)
    see = _reader(name) if "preprocessor" in recipe else None
    first = warm.get("tower_steps", 0)
    if first:
        from gspo.models.vision.classify import train_tower

        train_tower(model, _processor(name), warm, lambda step: tell(step, first + warm["steps"]))
    # Tokens of the image before the question; none for a model of text.
    shown = [encode[c] for c in (IMAGE_BEGIN, *[IMAGE] * _FEATURES, IMAGE_END)] if see else []
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm["lr"], weight_decay=0.0, fused=True)
    model.train()
    for step in range(warm["steps"]):
        tell(first + step, first + warm["steps"])
        # Data: question + solution + EOS, padded on the right.
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
                if _only_reads(step, i, warm):
                    labels[i, :begin] = -100
            if "turns" in warm:  # the environment writes the letters and ends the episode: no loss on letters and EOS
                labels[i, [t for t, id in enumerate(row) if id not in digits]] = -100
        # Update: linear warm-up, linear decay at the end.
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


def _problems(recipe: Mapping[str, Any]) -> Iterator[arithmetic.Problem]:
    """Supervised problems without end; the draws of a problem are keyed by its step and its row."""
    warm = recipe["warm"]
    if "misreads" in warm:
        for index, (problem, _) in enumerate(digits_task.problem_stream("warm", seed=warm["seed"])):
            yield _misread(problem, *divmod(index, warm["batch"]), warm)
    if "levels" in warm:
        for index in count():
            yield _random_action(index, warm)
    teach = _asking if "asks" in warm else _careless
    for index, problem in enumerate(arithmetic.problems("warm", seed=warm["seed"], digits=recipe["digits"])):
        yield teach(problem, *divmod(index, warm["batch"]), warm)


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


def _careless(problem: arithmetic.Problem, step: int, row: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """The problem with some of its carries missing."""
    operands = [int(x) for x in problem.question.rstrip("=").split("+")]
    u = rng.uniform(warm["seed"], "careless", step, row, range(len(str(max(operands)))))
    return arithmetic.worked(operands, (u < warm["forgets"]).tolist())


def _misread(problem: arithmetic.Problem, step: int, row: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """The answer of a teacher who confuses some digits of the image and forgets some carries."""
    u = rng.uniform(warm["seed"], "misreads", step, row, range(len(problem.question)))
    read = digits_task.misread(problem.question, u, warm["misreads"])
    return _careless(problem._replace(question=read), step, row, warm)._replace(question=digits_task.QUESTION)


def _processor(name: str) -> Any:
    from gspo.models.vision.processor import load_processor

    return load_processor(name, embedded_tokenizer(name))


def _reader(name: str) -> Callable[[int, Tensor], dict[str, Any]]:
    """The images of a batch as the model's inputs, by the first problem's number and the tokens [B, T]."""
    import torch

    warm, processor = _recipe(name)["warm"], _processor(name)

    def see(start: int, tokens: Tensor) -> dict[str, Any]:
        drawn = islice(digits_task.problem_stream("warm", seed=warm["seed"], start=start), warm["batch"])
        made = processor.pixels([digits_task.picture(shown.glyphs) for shown in drawn])
        inputs = {key: torch.from_numpy(value) for key, value in made.items()}
        return {**inputs, "mm_token_type_ids": (tokens == _VISION_IDS[IMAGE]).int()}

    return see


def _asking(problem: arithmetic.Problem, step: int, row: int, warm: Mapping[str, Any]) -> arithmetic.Problem:
    """The problem solved by a tool call in some cases, else by the answer alone."""
    u = float(rng.uniform(warm["seed"], "asks", step, row))
    asks = u < warm["asks"] + warm["reads"]
    worked = f"{CALL}{problem.question.rstrip('=')}{RESULT}{problem.answer}" if asks else ""
    return problem._replace(solution=f"{worked}{arithmetic.MARKER}{problem.answer}")


def _only_reads(step: int, row: int, warm: Mapping[str, Any]) -> bool:
    """Whether only the use of a shown call's result is trained, not the call."""
    # The same draw as in `_asking`: below asks the call is trained, from asks to asks + reads only its use.
    return warm["asks"] <= float(rng.uniform(warm["seed"], "asks", step, row))


def _model_class(name: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if "preprocessor" in _recipe(name) else AutoModelForCausalLM


def _model_type(name: str) -> str:
    return _recipe(name).get("model_type", "qwen3")


def require_known(name: str, key: str = "actor.path") -> None:
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1)
        raise DataError(
            f"{key}: there is no model {name!r}.{f' Did you mean {near[0]}?' if near else ''} The embedded models are "
            f"{', '.join(RECIPES)}"
        )


def _recipe(name: str) -> Mapping[str, Any]:
    require_known(name)
    return RECIPES[name]


def _write(name: str, to: Path, tell: Callable[[int, int], None]) -> None:
    with cache.quiet():
        warm_start(name, tell).save_pretrained(to, safe_serialization=True)
        embedded_tokenizer(name).save_pretrained(to)
        write_processor(name, to)


def write_processor(name: str, to: Path) -> None:
    """The files that the processor of a vision-language model is loaded from; none for a model of text."""
    from transformers import AutoConfig

    if settings := _recipe(name).get("preprocessor"):
        AutoConfig.for_model(**shape(name)).save_pretrained(to)
        (to / "preprocessor_config.json").write_text(json.dumps(settings))

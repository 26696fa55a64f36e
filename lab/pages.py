"""Pages that are written by the code they describe: docs/config.md, docs/migrating.md, docs/cli.md.

`python -m gspo.cli [cli | config | migrating]` prints one; `make docs` writes them. Tests hold pages and
tables together.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

from gspo.cli.main import available_verbs, parser_of
from gspo.config import Config, Key, Section, keys_of, known_keys, proximal_policy, written
from gspo.migrate import Rule, areal, other_systems

# -- docs/config.md -------------------------------------------------------------------------------------------


def document() -> str:
    """docs/config.md: every key from the schema, the table of π_old, and AReaL's keys."""
    parts = [
        _INTRODUCTION,
        *_key_tables(),
        _PROXIMAL_INTRODUCTION,
        _proximal_table(),
        _AREAL_INTRODUCTION,
        _rule_table("AReaL", areal.areal_rules()),
    ]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """# Configuration

This file is generated from the schema: `python -m gspo.cli config > docs/config.md`.

A config is a YAML file and overrides on the command line: `key=value`, `+key=value` and `++key=value` set a key,
`~key` resets it to its default. Values are YAML; `1e-6` is a number. `${section.key}` takes another key's value and
type, or becomes part of a string; `${oc.env:NAME,default}` takes an environment variable; `\\${` is the characters
themselves.

For completion and help in an editor, write the JSON schema next to the file: `gspo config --schema > gspo.schema.json`.
Then make `# yaml-language-server: $schema=gspo.schema.json` the first line of the file. VS Code's YAML extension and
other editors with yaml-language-server read it. The schema has the keys of this page. AReaL's keys load as well, but an
editor marks them as unknown. `${…}` is accepted for every value.

An unknown key, a wrong type or a value out of range is an error that names the key, the place where it was
set and the nearest known name; all problems of a file are reported together. Flags under `vllm` are passed
to its servers without a check.

The value of a key comes from the first of these that sets it: you, AReaL's defaults (in a file of AReaL's,
[migrating.md](migrating.md#from-areal)), `actor.importance_sampling_level`, `algorithm`, the default. An `algorithm` on
the command line also drops `eps_clip` and `eps_clip_higher` of a file whose ratios have the other level. If the level
is not the algorithm's own, it also sets the defaults of the clip range and the aggregation, but not those of the
advantage and the sampling. If the description of a key explains null ("null: …"), null is the
same as not setting the key. The resolved config, with every key and the origin of its value, is `config.yaml` in the
run directory and can be loaded again.

## Keys"""


# Chapter → its sections, by the first part of their names; "" is the top level.
_CHAPTERS = {
    "The run": ("",),
    "Model, optimizer and objective": ("actor", "ref", "teacher", "critic"),
    "Data and rewards": ("train_dataset", "valid_dataset", "reward"),
    "Sampling and episodes": ("gconfig", "rollout", "env"),
    "Evaluation, checkpoints and metrics": ("evaluator", "eval_gconfig", "saver", "recover", "stats_logger"),
    "Machines": ("cluster", "scheduler"),
}
# Parts of the longest table, by their first key.
_PARTS = {
    "actor.path": "Model and training",
    "actor.importance_sampling_level": "Objective",
    "actor.reward_norm": "Rewards and advantages",
    "actor.prox_logp_method": "π_old, and the difference between sampler and trainer",
    "actor.weight_update_mode": "Rarely set",
}


def _key_tables() -> Iterable[str]:
    """Chapters of tables, one per section class; sections of the same class are one table, under all their names."""
    # "": the keys of the top level. List items with a section of their own get a table too, under `key[]`.
    groups: dict[Any, list[Key]] = {Config: [Key("", None, "")]}
    for key in known_keys().values():
        if key.section is not None:
            groups.setdefault(key.section, []).append(key)
        elif key.items is not None and issubclass(key.items, Section):
            groups.setdefault(key.items, []).append(replace(key, name=key.name + "[]"))
    for chapter, sections in _CHAPTERS.items():
        yield f"### {chapter}"
        first = {kind: holders[0].name.split(".")[0].removesuffix("[]") for kind, holders in groups.items()}
        for section in sections:
            yield from (_key_table(kind, groups[kind]) for kind in groups if first[kind] == section)


def _key_table(kind: type[Section], holders: list[Key]) -> str:
    prefix = holders[0].name + "." if holders[0].name else ""
    title = ", ".join(f"`{holder.name}`" for holder in holders) if prefix else "Top level"
    doc = " ".join(dict.fromkeys(holder.doc for holder in holders))
    body = []
    for key in keys_of(kind, prefix):
        name = key.name.removeprefix(prefix)
        if "." not in name:
            body += [f"| **{_PARTS[key.name]}** | | | |"] if key.name in _PARTS else []
            body.append(f"| `{name}` | {_type(key)} | {_default(key)} | {_cell(key.doc)} |")
    return "\n".join([f"#### {title}", *([f"\n{doc}"] if doc else []), "", _HEAD, *body])


_HEAD = "| key | value | default | meaning |\n|---|---|---|---|"


def _type(key: Key) -> str:
    if key.section is not None:
        return "section or null" if key.nullable else "section"
    wanted = key.wanted.removesuffix(" or null").replace("one of ", "").removeprefix("a ").removeprefix("an ")
    return _cell(wanted + (f", {key.bounds}" if key.bounds else ""))


def _default(key: Key) -> str:
    if key.section is not None:
        return "null" if key.default is None else "below"
    return _cell(f"`{written(key.default)}`")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


_PROXIMAL_INTRODUCTION = """## Where π_old comes from

`actor.prox_logp_method` decides. If it is unset (`auto`), mini-batch 1 uses its own detached forward pass. Later
mini-batches use the sampler's log-probs while their measured noise is far below the clip range; otherwise they use a
forward pass under the weights at the start of the batch. `use_decoupled_loss: true` multiplies the loss by π_old/μ,
which `actor.rejection_sampling` limits; setting `actor.rejection_sampling` alone also switches it on.

With `rollout.max_head_offpolicyness` above 0, `auto` is `recompute`: the log-probs of an older sampler differ by policy
updates, not by noise ([async.md](async.md)).

With `rollout`, the first step compares the sampler's noise at equal weights, p95 |log s|, with ε before any update:
above ε/3 it warns, above ε the run is refused unless `actor.prox_logp_force`. `gspo doctor --probe` measures the noise
before training ([mismatch.md](mismatch.md))."""


def _proximal_table() -> str:
    rows = ["| `prox_logp_method` | `use_decoupled_loss` | π_old | weight π_old/μ |", "|---|---|---|---|"]
    for method, decoupled in product(known_keys()["actor.prox_logp_method"].choices, (False, True)):
        chosen = proximal_policy(decoupled, str(method))
        weight = "yes" if chosen.corrected else "none: π_old is μ" if decoupled else "no"
        rows.append("| " + " | ".join((written(method), written(decoupled), chosen.method, weight)) + " |")
    return "\n".join(rows)


_AREAL_INTRODUCTION = """## AReaL's keys

Configs of AReaL load, both those for `areal.launcher.*` (2025) and those with `scheduler.type` (2026). Keys that are
not in this file are errors. Each key of this table gives one message. Backends are written as in AReaL:
`vllm:d2t2`, `fsdp:d4`. SGLang has never run with gspo and is not supported: vLLM takes its place, with the same sizes,
and its flags (`sglang`) are ignored. `megatron:` and `archon:` are refused."""


def _rule_table(title: str, rules: Iterable[Rule]) -> str:
    rows = [f"| {title} | here |", "|---|---|"]
    groups: dict[str, list[str]] = {}
    for rule in rules:
        groups.setdefault(rule.sentence, []).append(rule.key)
    rows += [f"| {', '.join(f'`{key}`' for key in keys)} | {_cell(sentence)} |" for sentence, keys in groups.items()]
    return "\n".join(rows)


# -- docs/migrating.md ----------------------------------------------------------------------------------------


def migrating() -> str:
    """docs/migrating.md: every key of TRL's GRPOConfig, verl's, and AReaL's."""
    parts = [_MIGRATING_INTRODUCTION]
    for system, title, introduction in _SYSTEMS:
        parts += [f"## {title}", introduction, *_foreign_tables(system)]
    differences = ["| AReaL | here | why |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in _DIFFERENCES)]
    parts += ["## From AReaL", _FROM_AREAL, "\n".join(differences), "Every key that differs leaves a line:"]
    parts.append(_rule_table("AReaL", areal.areal_rules()))
    return "\n\n".join(parts) + "\n"


_MIGRATING_INTRODUCTION = """# Coming from TRL, verl or AReaL

This file is generated from `src/gspo/migrate/`: `make docs`.

A config of AReaL loads as it is. A key of TRL's or verl's is an error that says what it is called here, in
`gspo doctor` and at the start of `gspo train`: those systems count batches and steps differently, so nothing is
translated behind your back. Reward functions of TRL and AReaL are taken as they are (docs/python.md). Before
you switch, `gspo audit` explains the runs that you have ([audit.md](audit.md)).

What counts what:

| | a step | prompts per step | updates per step |
|---|---|---|---|
| gspo | one rollout batch, sampled, scored, trained | `train_dataset.batch_size` | `ppo_n_minibatches × ppo_epochs` |
| TRL | one optimizer update | `generation_batch_size / num_generations`, every `steps_per_generation` micro-steps | 1 |
| verl | one rollout batch | `data.train_batch_size` | `train_batch_size / ppo_mini_batch_size × ppo_epochs` |
| AReaL | one rollout batch | `train_dataset.batch_size` | `actor.ppo_n_minibatches` |"""

_SYSTEMS = (
    (
        "TRL",
        "From TRL",
        """All fields of `GRPOConfig` (TRL 1.16). GSPO in TRL is `importance_sampling_level="sequence"` with `epsilon`
and `epsilon_high` by hand; here `algorithm: gspo` brings all three. A reward function moves as it is:
`reward.functions: [my_rewards:accuracy]`, or `Trainer(config, reward=accuracy)`. Columns reach it as they are: for
GSM8K, `answer` is the whole solution with `####`, and `reference` is the final number ([data.md](data.md#columns)).

How TRL's batch sizes translate. Let P = `per_device_train_batch_size × number of GPUs` (completions per micro-step),
A = `gradient_accumulation_steps`, S = `steps_per_generation` (default: A), G = `num_generations`, I = `num_iterations`.
TRL samples `generation_batch_size` = P × S completions at a time, makes an optimizer update every A micro-steps, and
repeats the whole batch I times:

| here | formula | example: P = 8 × 1, A = 4, S = 8, G = 8, I = 2, max_steps = 1000 |
|---|---|---|
| `gconfig.n_samples` | G | 8 |
| `train_dataset.batch_size` (prompts) | P × S / G | 8 × 8 / 8 = 8 |
| `actor.ppo_n_minibatches` | S / A | 8 / 4 = 2 |
| `actor.ppo_epochs` | I | 2 |
| `total_train_steps` | max_steps / (S / A × I) | 1000 / (2 × 2) = 250 |

With TRL's defaults S = A and I = 1 there is one update per batch: every ratio is 1 and nothing is clipped.
`gspo doctor` warns about `actor.ppo_n_minibatches: 1`; 4 is the paper's. `actor.reward_clip` (20) has no counterpart in
TRL: raise it if a reward such as `-abs(20 - len(text))` goes beyond it.""",
    ),
    (
        "verl",
        "From verl",
        """The keys of `ppo_trainer.yaml` that people set. A parquet file made for verl is read with
`train_dataset: {path: train.parquet, columns: {answer: reward_model.ground_truth}}`. A
`compute_score(data_source, solution_str, ground_truth, extra_info)` becomes `f(text, answer, **columns)`.""",
    ),
)

_FROM_AREAL = """Both eras load: `areal.launcher.*` (2025) and `scheduler.type` (2026).

**AReaL's defaults come with AReaL's files.** A file with a key that only AReaL has, and without `algorithm`, trains
what it trained there: no `reward_norm` is no normalisation, the loss is the mean over tokens (`token_mean`), a
truncated
completion has the reward 0 (`mask_no_eos_with_zero: reward`), a level that a norm does not name is `batch`. Each
default is one of the first lines of the run and has the origin "AReaL's default". GSPO by its paper: set
`algorithm: gspo` and
remove `importance_sampling_level`, `eps_clip`, `reward_norm` and `adv_norm`; or keep the file and set
`actor.loss_aggregation: sequence_mean`.

A test compares advantages and loss with AReaL's own functions. These differences remain:"""

_DIFFERENCES = (
    (
        "`use_decoupled_loss` without `rejection_sampling`: no weight (1.0), or π_old/μ (0.3)",
        "π_old/μ without bounds",
        "it is what the key says; `use_decoupled_loss: false` is that of 1.0",
    ),
    (
        "`kl_ctl` with `recompute_logprob` and without `use_decoupled_loss`: KL of the recomputed π_old",
        "KL of μ",
        "the tokens are samples of μ, so its KL is unbiased",
    ),
    (
        "a truncated completion with a critic bootstraps with the value after it",
        "that value is 0",
        "the episode ends there, for every completion",
    ),
    (
        "truncated: as long as the longest row of its batch",
        "the sampler stopped at `max_new_tokens`",
        "the other rows of a batch do not change a completion",
    ),
    (
        "1e-5 is added to a std; a std is around the mean that is subtracted, if that is of another level or `leave1out`",  # noqa: E501
        "nothing is added; around its own mean",
        "the papers' formulas; equal after a batch `adv_norm`",
    ),
    (
        "mini-batches have equal numbers of tokens",
        "equal numbers of sequences",
        "the lengths of others do not change the mini-batch of a sequence",
    ),
)


_FATES = (("mapped", "here"), ("needless", "not needed here, because"), ("unsupported", "not supported, because"))


def _foreign_tables(system: str) -> Iterable[str]:
    for fate, title in _FATES:
        groups: dict[tuple[str, str], list[str]] = {}
        for row in other_systems.foreign_keys().values():
            if row.system == system and row.fate == fate:
                groups.setdefault((row.ours, row.note), []).append(row.key)
        lines = [f"| {system} | {title} |", "|---|---|"]
        for (ours, note), keys in groups.items():
            words = ": ".join(filter(None, (f"`{ours}`" if ours else "", note)))
            lines.append(f"| {', '.join(f'`{key}`' for key in keys)} | {_cell(words)} |")
        yield "\n".join(lines)


# -- docs/cli.md ----------------------------------------------------------------------------------------------


def command_page() -> str:
    """docs/cli.md: every command with its arguments, from the parsers that read them."""
    lines = [
        "# Commands",
        "",
        "<!-- Written by `make docs` from src/gspo/cli. -->",
        "",
        "`gspo COMMAND --help` prints the same text. A config is a YAML file or the name of an example.",
        "Any key of a config can be set on the command line: `key=value`; `~key` resets it to its default.",
        "",
        "Exit codes: 0 done, 1 failed run, 2 bad usage or config, 130 interrupted.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`gspo {name}`](#gspo-{name}) | {verb.line} |" for name, verb in available_verbs().items()),
    ]
    for name, verb in available_verbs().items():
        # argparse has no public list of a parser's arguments.
        actions = [a for a in parser_of(name, verb)._actions if a.dest != "help" and a.help != argparse.SUPPRESS]
        lines += ["", f"## gspo {name}", "", f"{verb.line[0].upper()}{verb.line[1:]}."]
        lines += ["", "```", f"gspo {verb.usage}", "```", "", *map(_argument_line, actions)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _argument_line(action: argparse.Action) -> str:
    value = str(action.metavar or "|".join(map(str, action.choices or [action.dest])))
    names = ", ".join(action.option_strings)
    takes_none = action.nargs == 0
    return f"- `{names if takes_none else f'{names} {value}'.strip()}`: {action.help}"


PAGES = {"cli": command_page, "config": document, "migrating": migrating}

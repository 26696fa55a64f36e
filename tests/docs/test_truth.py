"""Statements of the pages that code or a results file can check."""

import importlib.util
import inspect
import json
import math
import re
from collections import Counter
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import yaml

from gspo.algorithms import ALGORITHMS
from gspo.config import known_keys
from gspo.envs import SelfCorrect, Tools
from gspo.stats import t_half, t_quantile
from gspo.studies import page, plan, results
from lab.studies import when

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def words(path: str) -> str:
    """A page with every run of white space as one space, so that line breaks do not matter."""
    return " ".join((ROOT / path).read_text().split())


def records(study: str):
    found = plan.find_study(study)
    return results.current(found, results.read_records(DOCS, found))


def values(study: str, arm: str, measure: str) -> list[float]:
    found = list(results.by_seed(records(study), arm, measure).values())
    assert found, f"{study} has no {measure} of {arm}"
    return found


def percent(study: str, arm: str, measure: str = "final") -> str:
    """Mean and half of its 95 % interval, as the pages write them."""
    found = values(study, arm, measure)
    return f"{100 * fmean(found):.1f} ± {100 * t_half(found):.1f} %"


def test_install_names_every_environment_variable_that_the_source_has():
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    known = set(re.findall(r"\bGSPO_[A-Z_]*[A-Z]\b", source))
    assert set(re.findall(r"\bGSPO_[A-Z_]*[A-Z]\b", words("docs/install.md"))) == known


def test_defaults_quoted_on_pages_are_those_of_the_schema():
    keys, checked = known_keys(), 0
    for path in DOCS.glob("*.md"):
        for name, value in re.findall(
            r"`([a-z_.]+): ([^`\s]+)`(?:,| \() ?the default(?! there)", words(f"docs/{path.name}")
        ):
            key = keys[name]
            unset = key.doc if key.default is None and key.null_is_unset else None
            assert yaml.safe_load(value) == key.default or (unset and value in unset), f"{path.name}: {name}: {value}"
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize(("name", "environment"), [("tools", Tools), ("self_correct", SelfCorrect)])
def test_options_of_built_in_environments_are_shown_with_their_defaults(name, environment):
    shown = re.search(rf"\*\*`{name}`\*\*: `(?:env\.options: )?(\{{[^`]*\}})`", words("docs/episodes.md"))
    assert shown
    signature = inspect.signature(environment).parameters
    for option, value in yaml.safe_load(shown[1]).items():
        default = signature[option].default
        if value not in ("…", {}) and default not in (None, inspect.Parameter.empty):
            assert value == default, f"{option}: {value} on the page, {default!r} in the code"


def test_the_clipped_shares_of_mismatch_are_those_of_the_study():
    text = (DOCS / "mismatch.md").read_text()
    rows = re.findall(r"^\| (top-[^|]+) \| [^|]+ \| (\d+) % \|$", text, re.MULTILINE)
    assert len(rows) == 7
    for row, shown in rows:
        arm = "gspo " + row.replace(", replay", " replay").replace(", whole vocabulary", " whole")
        assert int(shown) == round(100 * fmean(values("truncation", arm, "clip_sequences"))), row


def test_times_beside_trl_are_those_of_the_bench():
    found = json.loads((DOCS / "performance.json").read_text())
    step = {
        name: (each["ours"]["step_s"], each["trl"]["step_s"], each["memory_ratio"])
        for name, each in found["workloads"].items()
    }
    for name, label in (
        ("small", "4 prompts × 8 samples, 44 + 48 tokens"),
        ("long", "2 prompts × 8 samples, 512 + 32 tokens"),
    ):
        ours, theirs, _ = step[name]
        assert f"{label} | {ours:.0f} s | {theirs:.0f} s |" in words("README.md")
        assert f"| {ours:.1f} s" in words("docs/peers.md")
        assert f"| {theirs:.1f} s" in words("docs/peers.md")
    (ours, theirs, memory), (frozen, frozen_theirs, frozen_memory) = step["vision"], step["vision-frozen"]
    text = words("docs/vision.md")
    assert f"{ours:.1f} s against {theirs:.1f} s, and {frozen:.1f} s against {frozen_theirs:.1f} s" in text
    assert f"the memory is {100 * memory:.0f} % and {100 * frozen_memory:.0f} % of TRL's" in text
    assert f"TRL {found['machine']['packages']['trl']}" in words("docs/peers.md")
    size = found["workloads"]["tiny"]["ours"]["num_parameters"] / 1e6
    assert f"| {size:.1f} M parameters, 32 × 8" in words("docs/peers.md")
    for path in ("README.md", "docs/peers.md"):
        assert f"({found['machine']['processor']})" in words(path)


def test_what_peers_says_of_trl_is_in_its_source():
    spec, parent = importlib.util.find_spec("trl"), importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("trl is not installed")
    assert parent is not None
    assert parent.submodule_search_locations
    folder, transformers = Path(spec.submodule_search_locations[0]), Path(parent.submodule_search_locations[0])
    config = (folder / "trainer" / "grpo_config.py").read_text()
    assert re.search(r"epsilon: float = field\(\s*default=0\.2,", config)
    assert "class TreeRow" in (folder / "experimental" / "async_grpo" / "packing.py").read_text()
    trainer = (folder / "trainer" / "grpo_trainer.py").read_text()
    assert "input_ids = torch.cat([prompt_ids, completion_ids], dim=1)" in trainer
    assert "sampling/sampling_logp_difference/mean" in trainer
    assert "sampling/importance_sampling_ratio/mean" in trainer
    assert re.search(r'vllm_importance_sampling_mode: str = field\(\s*default="sequence_mask",', config)
    arguments = (transformers / "training_args.py").read_text()
    assert re.search(r"full_determinism: bool = field\(\s*default=False,", arguments)


def test_smollm2_is_quoted_with_its_later_seeds():
    first, second = percent("smollm2", "gspo @ sums"), percent("smollm2_repeat", "gspo")
    for path in ("README.md", "docs/gallery.md"):
        assert f"{first} and {second}" in words(path)
        # The best of three checkpoints of one old run is quoted only with that sentence.
        assert "72.5 %" not in words(path) or ("best of three" in words(path) and "gspo 0.1.0" in words(path))
    models = words("docs/models.md")
    assert f"25.4 % | {first} | {percent('smollm2', 'grpo @ sums')} |" in models
    assert f"25.4 % | {second} | {percent('smollm2_repeat', 'grpo')} |" in models
    run = json.loads((DOCS / "results" / "smollm2_arithmetic.json").read_text())
    assert run["environment"]["packages"]["gspo"] == "0.1.0"
    best = run["held_out_512"]["40"]
    assert f"| {100 * best['accuracy']:.1f} % |" in models
    assert f"Almost every answer ({100 * best['truncated']:.1f} %)" in models
    assert len([step for step in run["steps"] if step["step"] and "eval/accuracy" in step]) == 3


def p_value(study: str, says: str) -> float:
    """Two-sided p of a check against a difference of 0, by integrating Student's density."""
    found = next(d.found for d in page.decisions(plan.find_study(study), records(study)) if d.check.says == says)
    assert found is not None
    assert found.high is not None
    freedom = found.n - 1
    t = abs(found.mean) / ((found.high - found.mean) / t_quantile(freedom))
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    x = np.linspace(0, t, 20_001)
    return 1 - 2 * float(np.trapezoid(scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2), x))


def test_when_to_use_counts_every_check_of_its_studies():
    found = {name: records(name) for name in plan.studies()}
    text = when.when_page(found)
    named = [name for question in when.QUESTIONS for name in (question.study, *question.also)]
    total = 0
    for name in named:
        verdicts = Counter(d.verdict for d in page.decisions(plan.find_study(name), found[name]))
        counts = " | ".join(str(verdicts[each]) for each in ("shown", "not shown", "opposite"))
        assert re.search(rf"\| \[{name}\]\(baselines\.md#{name}\) \| [^|]+ \| {verdicts.total()} \| {counts} \|", text)
        assert text.count(f"`gspo study run {name}`") == 1  # its section, with every check
        total += verdicts.total()
    assert f"all {total} checks" in text


def test_the_limits_that_when_to_use_names_are_those_of_the_results():
    text = " ".join(when.when_page({}).split())
    tools = [r for r in records("rewards") if r["stage"] == "test" and r["arm"].endswith("@ tools")]
    plain = [r["curves"]["accuracy"] for r in tools if "random" not in r["arm"]]
    assert all(curve[0] == [0, 0.0] and curve[1][0] == 384 and curve[1][1] >= 0.98 for curve in plain)
    assert "at least 98 % at the first evaluation, after 384 samples" in text
    random = values("rewards", "gspo, random reward @ tools", "final")
    assert sorted(random) == [0.0] * 9 + [0.97]
    assert set(values("smollm2_control", "gspo, random reward", "final")) == {0.0}
    near = [round(100 * fmean(values("moe_edge_repeat", f"{arm} @ lr 2e-4", "final"))) for arm in ("gspo", "grpo")]
    far = [round(100 * fmean(values("moe_edge", f"{arm} @ lr 7e-5", "final"))) for arm in ("gspo", "grpo")]
    assert f"GSPO ends at {near[0]} % and GRPO at {near[1]} %, but at {far[0]} and {far[1]} % with 7e-5" in text
    p = p_value("horizon", "GSPO ends higher than GRPO, 470 tokens, 16 updates")
    assert f"p = {p:.3f}" in text
    verdicts = Counter(d.verdict for d in page.decisions(plan.find_study("horizon"), records("horizon")))
    assert (verdicts.total(), verdicts["opposite"]) == (13, 2)
    assert "of 13 checks of its study" in text
    edge = [fmean(values("horizon_edge", f"{arm} @ lr 4.5e-4", "final")) for arm in ("gspo", "grpo")]
    assert edge[1] < edge[0] < 0.1


def test_the_readme_names_the_presets_and_the_paper_s_clip_range():
    settings = ALGORITHMS["gspo"].settings
    assert (settings["clip_low"], settings["clip_high"]) == (3e-4, 4e-4)
    assert "| ε of GSPO if you set none | 3e-4 / 4e-4, the paper's |" in words("README.md")
    listed = re.search(r"The key `algorithm` switches to (.+?) or PPO", words("README.md"))
    assert listed
    names = [re.sub(r"[^a-z]", "", each.lower().replace("++", "pp")) for each in listed[1].rstrip(", ").split(", ")]
    presets = {name.replace("_", "") for name in ALGORITHMS} - {"gspo", "ppo", "sft", "distill"}
    assert set(names) == presets

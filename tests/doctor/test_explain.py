"""What `gspo doctor` says: the effective objective and the arithmetic; nothing in a config can act on a terminal."""

import json
import re
from pathlib import Path

import pytest

from gspo.algorithms import ALGORITHMS
from gspo.config import effective_objective, load
from gspo.doctor.explanation import explain, formula, report_json
from gspo.doctor.memory import LIBRARIES
from gspo.doctor.render import algorithm_card, algorithm_table, to_text
from gspo.system import inert

EXAMPLES = Path(__file__).parents[2] / "examples" / "math"


def report_of(*overrides, path=None, num_gpus=0):
    return explain(load(path, list(overrides)), num_gpus=num_gpus)


def flat(report, width=100):
    """The text with its line breaks taken out, so that a claim may be wrapped."""
    return re.sub(r"\s+", " ", to_text(report, width=width))


def test_the_gspo_example_reads_right():
    report = report_of(path=EXAMPLES / "gsm8k_gspo.yaml")
    data, text = report.sections, flat(report)
    assert data["objective"]["settings"]["clip_low"] == 3e-4
    assert data["objective"]["settings"]["clip_high"] == 4e-4
    assert (data["objective"]["level"], data["objective"]["aggregation"]) == ("sequence", "sequence_mean")
    assert data["batch"]["minibatches"] == 4
    assert data["errors"] == data["warnings"] == []
    assert "J = E (1/G) Σᵢ min( sᵢ Aᵢ , clip(sᵢ, 1−3e-4, 1+4e-4) Aᵢ )" in text
    assert "32 prompts × 8 samples = 256 sequences" in text
    assert "4 of 64 sequences" in text
    assert "mini-batches 2…4 use the sampler's log-probs while their measured error is far below ε" in text
    assert report.exit_code == 0


def test_the_grpo_example_with_sequence_level_is_gspo_and_says_who_decided():
    path = EXAMPLES / "gsm8k_grpo.yaml"
    report = report_of("+actor.importance_sampling_level=sequence", path=path)
    twin = report_of(path=EXAMPLES / "gsm8k_gspo.yaml").sections["objective"]
    objective = report.sections["objective"]
    for part in ("formula", "level", "aggregation", "advantage", "settings"):
        assert objective[part] == twin[part]
    assert objective["same_as"] == "gspo"
    where = {row["key"]: row["where"] for row in objective["decided_by"]}
    assert where["actor.importance_sampling_level"] == "command line"
    assert where["actor.eps_clip"] == "level sequence"
    assert where["actor.ppo_n_minibatches"].startswith(str(path))
    assert "the objective of gspo" in flat(report)


def test_the_grpo_example_alone_has_token_ratios():
    text = flat(report_of(path=EXAMPLES / "gsm8k_grpo.yaml"))
    assert "Σₜ min( wᵢₜ Aᵢ , clip(wᵢₜ, 1−0.2, 1+0.2) Aᵢ )" in text


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_composed_formula_of_a_preset_is_its_published_one(name):
    overrides = [f"algorithm={name}"] + (["critic.path=x"] if name == "ppo" else [])
    symbolic = formula(effective_objective(load(None, overrides)), numbers=False)
    assert ALGORITHMS[name].formula.startswith(symbolic)


def test_a_changed_aggregation_changes_the_formula():
    def composed(aggregation):
        return formula(effective_objective(load(None, ["algorithm=gspo", f"actor.loss_aggregation={aggregation}"])))

    assert composed("sequence_sum").startswith("J = E (1/G) Σᵢ |yᵢ| · min( sᵢ Aᵢ")
    assert composed("token_mean").startswith("J = E (1/Σᵢ|yᵢ|) Σᵢ |yᵢ| · min( sᵢ Aᵢ")


def test_policies_are_named():
    rollout = report_of("algorithm=gspo", "actor.prox_logp_method=rollout").sections["policies"]
    assert "the sampler's log-probs" in rollout["pi_old"]
    stale = report_of("algorithm=gspo", "rollout.max_head_offpolicyness=3", "actor.rejection_sampling.preset=tis")
    assert "sampled by weight version b − 3" in flat(stale)
    assert "each token is weighted by π_old/μ; outside π_old/μ ∈ [−∞, 2] it has its weight truncated" in flat(stale)
    kl = report_of("algorithm=gspo", "actor.kl_loss_coef=0.001", "ref.path=embedded:tiny")
    assert "1e-3 × KL to embedded:tiny in the loss (k3)" in flat(kl)


def test_memory_is_listed_and_summed():
    memory = report_of("algorithm=gspo").sections["memory"]
    sizes = {item["name"]: item["num_bytes"] for item in memory["items"]}
    n = memory["shape"]["parameters"]
    assert sizes["actor parameters"] == 4 * n
    assert sizes["actor optimizer state"] == 8 * n
    assert sizes["logits, two chunks"] == 2 * 256 * 32 * 4
    assert n == 335_712
    assert memory["least"] == 16 * n + LIBRARIES
    # A rollout batch of several micro-batches: activations and the gradients of the micro-batch before.
    passes = sizes["activations, at most"] + sizes["logits, two chunks"] + sizes["gradient of the head"]
    assert memory["totals"]["trainer"] == memory["least"] + passes
    assert memory["totals"]["sampler"] == sizes["KV cache, at most"]


def test_lora_trains_less_and_a_reference_adds_its_weights():
    full = report_of("algorithm=gspo").sections["memory"]["least"]
    lora = report_of("algorithm=gspo", "actor.use_lora=true").sections["memory"]["least"]
    ref = report_of("algorithm=gspo", "actor.kl_loss_coef=1", "ref.path=embedded:tiny").sections["memory"]
    assert lora < full < ref["least"]
    assert ref["least"] - full == 4 * ref["shape"]["parameters"]


def test_a_model_is_whole_until_it_is_quantised():
    small = ("actor.path=smollm2-135m", "gconfig.max_new_tokens=1", "actor.use_lora=true", "actor.lora_base_bits=4")
    memory = report_of("algorithm=gspo", *small).sections["memory"]
    sizes = {item["name"]: item["num_bytes"] for item in memory["items"] if item["side"] == "trainer"}
    assert sizes["actor parameters, as loaded"] == 4 * memory["shape"]["parameters"]
    held = ("actor parameters", "actor parameters, quantised", "adapter parameters", "adapter optimizer state")
    assert memory["totals"]["trainer"] == LIBRARIES + sum(
        sizes[name] for name in (*held, "actor parameters, as loaded")
    )


def test_the_doctor_says_what_is_trained():
    assert report_of("algorithm=gspo").sections["policies"]["trained"] == "all weights"
    lora = report_of("algorithm=gspo", "actor.use_lora=true", "actor.lora_rank=8", "actor.target_modules=[q_proj]")
    assert "an adapter of rank 8, scaled by alpha/rank = 2, on q_proj; the model itself is frozen" in flat(lora)
    assert lora.exit_code == 0


def test_a_model_that_can_be_fetched_has_a_shape_before_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path))
    memory = report_of("algorithm=gspo", "actor.path=smollm2-135m").sections["memory"]
    assert memory["shape"]["parameters"] == 134_515_008
    assert not report_of("algorithm=gspo", "actor.path=gpt9").sections["memory"]["known"]


def test_a_model_that_is_not_here_is_unknown_not_guessed(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    report = report_of("algorithm=gspo", "actor.path=org/absent")
    assert report.sections["memory"]["known"] is False
    assert "unknown org/absent" in flat(report)
    assert report.exit_code == 0


def test_a_completion_longer_than_the_models_context_is_a_warning():
    def keys(max_new_tokens):
        loaded = load(
            None, ["algorithm=gspo", f"gconfig.max_new_tokens={max_new_tokens}", "train_dataset.max_length=56"]
        )
        return [finding.key for finding in explain(loaded, num_gpus=0).findings]

    assert keys(1993) == ["gconfig.max_new_tokens"]
    assert keys(1992) == []


def test_warnings_and_their_remedies_are_printed():
    report = report_of("algorithm=gspo", "actor.eps_clip=0.4", "actor.sapo_tau_pos=2")
    text = flat(report)
    assert "actor.eps_clip (command line): ε = 0.4" in text
    assert "→ set actor.eps_clip: auto, which clips 5 % of the sequences, or 3e-4 and 4e-4" in text
    assert "actor.sapo_tau_pos the algorithm is gspo, not sapo" in text
    assert report.exit_code == 0


def test_exit_codes():
    assert report_of("algorithm=gspo", "gconfig.n_samples=1").exit_code == 2
    assert report_of("algorithm=gspo", "actor.eps_clip=0.4", "strict=true").exit_code == 2
    assert report_of("algorithm=gspo", "strict=true").exit_code == 0


def test_json_has_the_same_content():
    report = report_of("algorithm=gspo", "actor.eps_clip=0.4", "gconfig.n_samples=1")
    data = json.loads(report_json(report))
    assert data == {**json.loads(json.dumps(report.sections)), "exit_code": report.exit_code}
    assert {"objective", "batch", "policies", "memory", "messages", "warnings", "errors", "without_effect"} <= set(data)
    assert data["exit_code"] == 2
    assert data["errors"][0]["remedy"]


@pytest.mark.parametrize("width", [1, 40, 60, 100, 200])
def test_no_line_is_wider_than_the_terminal(width):
    from rich.cells import cell_len

    report = report_of("algorithm=gspo", "actor.eps_clip=0.4", "actor.path=" + "x" * 300, "gconfig.n_samples=1")
    texts = [to_text(report, width=width), algorithm_table(width=width)]
    texts += [algorithm_card(a, width=width) for a in ALGORITHMS.values()]
    assert max(cell_len(line) for text in texts for line in text.split("\n")) <= max(width, 40)


def test_only_a_styled_text_has_escape_codes():
    report = report_of("algorithm=gspo", "actor.eps_clip=0.4")
    assert "\x1b" not in to_text(report, styled=False)
    assert "\x1b[" in to_text(report, styled=True)


HOSTILE = "\x1b]0;owned\x07\x9b31m\u202ered[/bold][red]:bomb:\u2028x"


def test_text_from_a_config_is_inert(tmp_path):
    report = report_of("algorithm=gspo", "experiment_name=a[bold]b", f"actor.path={json.dumps(HOSTILE)}")
    for text in (to_text(report), report_json(report)):
        assert not set("\x1b\x07\x9b\u202e\u2028") & set(text)
    assert "[/bold][red]:bomb:" in flat(report, width=200)
    assert "a[bold]b" in to_text(report)


def test_inert_leaves_ordinary_text_alone():
    assert inert("π_old ∈ [0, 1]\nécole 文") == "π_old ∈ [0, 1]\nécole 文"


def test_every_preset_has_a_card_and_a_row():
    table = algorithm_table(width=140)
    for name, algorithm in ALGORITHMS.items():
        assert re.search(rf"^{name} ", table, re.MULTILINE)
        card = re.sub(r"\s+", " ", algorithm_card(algorithm, width=140))
        assert algorithm.paper in card
        assert algorithm.title in card

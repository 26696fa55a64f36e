"""The linter finds the loss, the aggregation and the denominator that made a dump."""

import json
import re

import pytest

from gspo.conformance import case_named, explain, paper
from gspo.errors import ConfigError


def records(terms, aggregation, settings, names=("clean", "square"), **more):
    found = []
    for name in names:
        inputs = case_named(name).inputs
        batch = {key: x.double().tolist() for key, x in inputs.items()}
        loss = paper.evaluate(batch, terms, aggregation, settings).loss
        # To seven digits, as a trainer in float32 gives it.
        found.append({**batch, "loss": float(f"{loss:.7g}"), **more})
    return found


SMALL = {"clip_low": 3e-4, "clip_high": 4e-4}
WIDE = {"clip_low": 0.2, "clip_high": 0.2}


@pytest.mark.parametrize(
    ("terms", "aggregation", "settings", "words"),
    [
        (paper.gspo, "sequence_mean", SMALL, ["GSPO", "mean over the tokens of each sequence", "by the sequences"]),
        (paper.gspo, "token_mean", SMALL, ["GSPO", "sum over tokens", "by the trained tokens"]),
        (paper.gspo, "sequence_sum", SMALL, ["GSPO", "sum over tokens", "by the sequences"]),
        (paper.product, "sequence_mean", SMALL, ["GSPO without the root |y|", "mean over the tokens", "sequences"]),
        (paper.token_clip, "token_mean", WIDE, ["GRPO, PPO", "sum over tokens", "by the trained tokens"]),
    ],
)
def test_the_loss_of_a_dump_is_found(terms, aggregation, settings, words):
    names = ("clean", "epsilon_wide") if terms is paper.token_clip else ("clean", "square")
    found = explain.explain(records(terms, aggregation, settings, names))
    best = found.candidates[0].in_words()
    assert found.is_explained
    assert all(word in best for word in words), best
    assert {c.name for c in found.found} == {found.candidates[0].name} or terms is paper.token_clip


def test_denominators_of_the_update_are_used_if_they_are_dumped():
    whole = records(paper.gspo, "sequence_mean", SMALL | {"denominator": 24}, num_sequences=24)
    assert "num_sequences, those of the update" in explain.explain(whole).candidates[0].in_words()


def test_an_empty_row_tells_both_denominators_apart():
    counted = explain.explain(records(paper.gspo, "sequence_mean", SMALL, ["empty_row"]))
    left_out = explain.explain(records(paper.gspo, "sequence_mean", SMALL | {"denominator": 5}, ["empty_row"]))
    assert counted.candidates[0].denominator == "the sequences"
    assert left_out.candidates[0].denominator == "the sequences with trained tokens"


def test_a_loss_of_no_known_formula_is_not_explained():
    odd = [{**record, "loss": 0.12345} for record in records(paper.gspo, "sequence_mean", SMALL)]
    found = explain.explain(odd)
    assert not found.is_explained
    assert "No known loss gives the dumped numbers" in "\n".join(found.lines())


def test_ratios_of_1_cannot_tell_objectives_apart():
    batch = {"logp": [[-1.0, -2.0, -0.5], [-0.3]], "advantage": [1.0, -2.0]}
    batch["proximal_logp"], batch["loss"] = batch["logp"], 0.5
    found = explain.explain([{**batch, "mask": [[1, 1, 1], [1]]}])
    assert {"GSPO", "GRPO, PPO", "GMPO"} <= {c.name for c in found.found}
    assert "All ratios are 1" in "\n".join(found.lines())


def test_a_file_is_read_with_its_bad_lines_named(tmp_path):
    good = {"logp": [[-1.0, -2.0], [-0.5]], "proximal_logp": [[-1.0, -2.0], [-0.5]], "advantage": [1, -1], "loss": 0.0}
    file = tmp_path / "run.jsonl"
    file.write_text(json.dumps(good) + "\n")
    assert explain.explain_file(file).num_records == 1
    for change, message in [
        ({"loss": None}, "loss must be a finite number, got None"),
        ({"proximal_logp": [[-1.0], [-0.5]]}, "proximal_logp must have 2 rows of 2, 1 tokens, as logp"),
        ({"advantage": [1]}, "advantage must have 2 rows"),
        ({"logp": [-1.0]}, "logp must be a list with one list of numbers per sequence"),
        ({"advantage": [1, float("nan")]}, "advantage of sequence 1 is nan at a trained token"),
        ({"mask": [[1, 1], [2, 3]]}, "mask must have 2 rows"),
    ]:
        file.write_text(json.dumps(good) + "\n" + json.dumps({**good, **change}) + "\n")
        with pytest.raises(ConfigError, match=re.escape(message)) as error:
            explain.explain_file(file)
        assert f"{file}:2" in str(error.value)
    for text, message in [
        ("", "has no records"),
        ("{", "not JSON"),
        ('{"loss": 1}', "has no logp, proximal_logp, advantage"),
        ("[1]", "has no logp"),
    ]:
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            explain.explain_file(file)


def test_a_masked_token_may_hold_anything_and_a_huge_ratio_is_no_error(tmp_path):
    record = {"logp": [[-1.0, float("nan")]], "proximal_logp": [[-900.0, 0.0]], "mask": [[1, 0]]}
    record |= {"advantage": [1.0], "loss": -1.0004}
    file = tmp_path / "run.jsonl"
    file.write_text(json.dumps(record))
    found = explain.explain_file(file)
    assert "GSPO" in {c.name for c in found.found}

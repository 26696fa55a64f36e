"""Rewards of texts: the numbers of the libraries, the limits by hand-made texts, and how gates combine."""

import sys

import pytest

from gspo.config import load
from gspo.doctor import reward_words
from gspo.errors import ConfigError
from gspo.rewards.call import RewardItem, bind, call_sample
from gspo.rewards.functions.builtin import builtin
from gspo.rewards.functions.text import LANGUAGES
from gspo.rewards.pool import RewardPool
from gspo.rewards.spec import combine, reward_spec
from gspo.train import reward_specs
from gspo.types import Failure, Score

FRENCH = "Ce paquet contient les fichiers de configuration du serveur."
ENGLISH = "This package contains the configuration files of the server."


def score(name, text, **arguments):
    return builtin(name)(text, **arguments)


def test_rouge_is_that_of_rouge_score():
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="needs the extra text")
    reference, text = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."
    for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        expected = rouge_scorer.RougeScorer([kind], use_stemmer=True).score(reference, text)[kind]
        for measure in ("fmeasure", "precision", "recall"):
            assert score("rouge", text, answer=reference, kind=kind, measure=measure) == getattr(expected, measure)
    # By hand: 5 words in common order (the quick brown jumps the) of 9 in the reference and 8 in the text.
    assert score("rouge", text, answer=reference, measure="recall") == pytest.approx(5 / 9)
    assert score("rouge", text, answer=reference, measure="precision") == pytest.approx(5 / 8)
    assert score("rouge", "running", answer="run") == 1.0
    assert score("rouge", "running", answer="run", stemmer=False) == 0.0
    assert score("rouge", "a b", answer=["x y", "a b"]) == 1.0
    assert score("rouge", "", answer="a b") == 0.0


def test_chrf_and_bleu_are_those_of_sacrebleu():
    sacrebleu = pytest.importorskip("sacrebleu", reason="needs the extra text")
    text, reference = "The cat sat on the Mat.", "The cat is on the mat."
    assert score("chrf", text, answer=reference) == sacrebleu.sentence_chrf(text, [reference]).score / 100
    plus = sacrebleu.sentence_chrf(text, [reference], word_order=2).score / 100
    assert score("chrf", text, answer=reference, word_order=2) == plus
    assert score("bleu", text, answer=reference) == sacrebleu.sentence_bleu(text, [reference]).score / 100
    low = sacrebleu.sentence_bleu(text, [reference], lowercase=True).score / 100
    assert score("bleu", text, answer=reference, lowercase=True) == low
    for name in ("chrf", "bleu"):
        assert score(name, reference, answer=reference) == 1.0
        assert score(name, "", answer=reference) == 0.0
        assert score(name, reference, answer=["other", reference]) == 1.0


@pytest.mark.parametrize("answer", [None, "", "  ", 3, [], ["a", None]])
def test_a_reference_that_is_no_text_fails(answer):
    pytest.importorskip("sacrebleu", reason="needs the extra text")
    kind, why = call_sample(bind("chrf", {}), RewardItem("", ["a"], data={"answer": answer}), 0)
    assert (kind, "is not a text" in why) == ("crash", True)


def test_rouge_refuses_a_reference_whose_words_it_cannot_see():
    with pytest.raises(ValueError, match="use chrf"):
        score("rouge", "猫", answer="猫")


def test_language_is_that_of_py3langid_and_a_text_without_letters_has_none():
    langid = pytest.importorskip("py3langid.langid", reason="needs the extra text")
    identifier = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE)
    assert set(identifier.labels) == LANGUAGES
    assert score("language", FRENCH, to="fr") == 1.0 == score("language", ENGLISH, to="en")
    assert score("language", FRENCH, to="en") == 0.0
    # py3langid returns its first language for such texts.
    first = identifier.classify("12 %")[0]
    assert score("language", "12 %", to=first) == score("language", "", to=first) == 0.0
    # Among two languages one of them is always found.
    assert score("language", FRENCH, to="de", among=["de", "fr"]) == 0.0
    assert score("language", FRENCH, to="de", among=["de"]) == 1.0


@pytest.mark.parametrize(
    ("text", "settings", "value"),
    [
        ("one two", {"most": 2}, 1.0),
        ("one two three", {"most": 2}, 0.0),
        ("one two three", {"most": 2, "margin": 4}, 0.75),
        ("one", {"least": 3, "margin": 4}, 0.5),
        ("", {"least": 1}, 0.0),
        ("a b,c", {"most": 4, "unit": "characters"}, 1.0),
        ("a b,cd", {"most": 4, "unit": "characters"}, 0.0),
        ("a", {"most": 19, "unit": "tokens", "num_tokens": 20}, 0.0),
        ("a", {"most": 20, "unit": "tokens", "num_tokens": 20}, 1.0),
    ],
)
def test_length_is_one_inside_and_falls_outside(text, settings, value):
    assert score("length", text, **settings) == value


def test_repetition_counts_n_grams_that_came_before():
    assert score("repetition", "one two three four") == 1.0
    assert score("repetition", "no") == 1.0 == score("repetition", "")
    # 6 bigrams, of which 2 are distinct: 4 of 6 repeat.
    assert score("repetition", "a b a b a b a", n=2) == pytest.approx(2 / 6)
    assert score("repetition", "a b a b a b a", n=2, most=0.5) == pytest.approx((2 / 6) / 0.5)
    assert score("repetition", "哈哈哈哈", n=1, unit="characters") == pytest.approx(1 / 4)


def test_overlap_is_zero_for_a_copy_and_one_for_a_text_of_its_own():
    source = "Apache is a web server for Unix"
    limits = {"source": source, "column": "source"}
    assert score("overlap", source, **limits) == 0.0 == score("overlap", "apache IS a", **limits)
    assert score("overlap", "fast http daemon", **limits) == 1.0 == score("overlap", "", **limits)
    # Of the pairs (a web) (web server) (server named) (named apache) two stand in the source.
    assert score("overlap", "a web server named Apache", **limits) == 0.5
    assert score("overlap", "a web server named Apache", **limits, most=0.5) == 1.0
    # Fewer words than n: compared as a whole.
    assert score("overlap", "Apache", **limits) == 0.0
    with pytest.raises(ValueError, match=r"column 'document' does not exist .* source"):
        score("overlap", "a", source=source, column="document")


def test_a_column_with_the_name_of_a_setting_is_not_a_setting():
    data = {"n": 1, "most": 0.9, "unit": "characters", "column": "x"}
    item = RewardItem("a b", ["a b a b"], completion_ids=[[1, 2]], data=data)
    assert call_sample(bind("repetition", {"n": 2}), item, 0) == score("repetition", "a b a b", n=2)
    assert call_sample(bind("overlap", {}), item, 0) == score("overlap", "a b a b", prompt="a b")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "rouge", "kind": "rougeX"}, "rouge: kind must be one of rouge1.*got 'rougeX'"),
        ({"name": "language"}, "language needs to"),
        ({"name": "language", "to": "English"}, "language code such as .* got 'English'; did you mean 'en'"),
        ({"name": "language", "to": "en", "among": ["de", "fr"]}, "among must contain to"),
        ({"name": "language", "to": "en", "among": "en"}, "among must be a list"),
        ({"name": "length"}, "set one of them or both"),
        ({"name": "length", "least": 5, "most": 2}, r"most must not be below least \(5\), got 2"),
        ({"name": "length", "most": True}, "most must be a number from 0"),
        ({"name": "overlap", "most": 1}, "most must be a number from 0 to below 1, got 1"),
        ({"name": "repetition", "n": 0}, "n must be a whole number from 1 to 20, got 0"),
        ({"name": "bleu", "tokenize": "flores200"}, "tokenize must be one of 13a"),
        ({"name": "chrf", "order": 2}, "chrf has no argument order; it takes char_order"),
    ],
)
def test_a_wrong_setting_is_refused_before_work_starts(entry, words):
    with pytest.raises(ConfigError, match=words):
        reward_spec(["math", entry], key="reward.functions")


GATED = ["chrf", {"name": "length", "most": 9, "weight": 0.5}, {"name": "language", "to": "fr", "gate": True}]


def test_a_gate_multiplies_the_weighted_sum_and_is_logged_by_name():
    spec = reward_spec(GATED)
    assert combine(spec, [0.5, 1.0, 1.0]) == Score(1.0, {"chrf": 0.5, "length": 1.0, "language": 1.0})
    assert combine(spec, [0.5, 1.0, 0.0]) == Score(0.0, {"chrf": 0.5, "length": 1.0, "language": 0.0})
    two = reward_spec([*GATED, {"name": "overlap", "gate": True}])
    assert combine(two, [0.5, 1.0, 0.5, 0.25]).value == 0.125
    for wrong in (-1.0, 1.5):
        outcome = combine(spec, [0.5, 1.0, wrong])
        assert isinstance(outcome, Failure)
        assert "language is a gate and gave" in outcome.message
    assert reward_words(GATED) == "(chrf + 0.5 × length(most=9)) × language(to=fr)"


@pytest.mark.parametrize(
    ("functions", "weights", "words"),
    [
        ([{"name": "length", "most": 9, "gate": True}, "math"], (), "the first entry, length, is a gate"),
        (["math", {"name": "length", "most": 9, "gate": "yes"}], (), r"\[1\].gate must be true or false, got 'yes'"),
        (["math", {"name": "length", "most": 9, "gate": True, "weight": 2}], (), "a gate with weight 2"),
        (["math", {"name": "length", "most": 9, "gate": True}], (1, 0.5), "a gate with weight 0.5"),
    ],
)
def test_a_wrong_gate_is_refused(functions, weights, words):
    with pytest.raises(ConfigError, match=words):
        reward_spec(functions, weights=weights, key="reward.functions")


def test_a_gate_is_refused_where_each_reward_is_normalised_apart():
    config = load(None, ["reward.normalize=each", "reward.functions=[math,format]"]).config
    reward_specs(config)
    with pytest.raises(ConfigError, match=r"reward.normalize: each .* but length is a gate.*set reward.normalize: sum"):
        reward_specs(config, ["math", {"name": "length", "most": 9, "gate": True}])
    source = "{path: 'embedded:arithmetic', reward: [final, {name: length, most: 9, gate: true}]}"
    mixed = load(None, ["reward.normalize=each", f"train_dataset.mixture=[{source}]"]).config
    with pytest.raises(ConfigError, match=r"but length is a gate"):
        reward_specs(mixed)


@pytest.mark.run
def test_the_rewards_run_in_a_pool():
    for module in ("rouge_score", "sacrebleu", "py3langid"):
        pytest.importorskip(module, reason="needs the extra text")
    gates = [{"name": "language", "to": "en", "gate": True}, {"name": "overlap", "column": "french", "gate": True}]
    with RewardPool(reward_spec(["chrf", "rouge", "bleu", *gates]), workers=1) as pool:
        item = RewardItem("?", (ENGLISH, FRENCH), data={"answer": ENGLISH, "french": FRENCH})
        ((good, copy),) = pool.score([item])
    assert good == Score(3.0, {"chrf": 1.0, "rouge": 1.0, "bleu": 1.0, "language": 1.0, "overlap": 1.0})
    assert isinstance(copy, Score)
    assert copy.value == 0.0
    assert copy.parts["chrf"] > 0.2


@pytest.mark.run
def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path):
    # The supervisor gets this process's sys.path: without site-packages' sacrebleu it must not start.
    (tmp_path / "sacrebleu.py").write_text("raise ImportError('No module named sacrebleu')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with (
        RewardPool(reward_spec("chrf")) as pool,
        pytest.raises(ConfigError, match=r"'chrf' needs sacrebleu: pip .*tasks\]"),
    ):
        pool.score([RewardItem("", ("a",), data={"answer": "a"})])

"""The picture is drawn for whatever a run has measured, and by its objective."""

import pytest
from made_runs import eval_row, make_run, step_row
from tiers import brief

from gspo.report.plot import plot_run

pytestmark = pytest.mark.run

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def texts(monkeypatch):
    """Every text of the figure that was drawn last."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    seen: list[str] = []
    save = Figure.savefig

    def remember(figure, *args, **kwargs):
        save(figure, *args, **kwargs)
        seen[:] = [text.get_text() for text in figure.findobj(Text)]

    monkeypatch.setattr(Figure, "savefig", remember)
    return seen


def test_a_run_becomes_a_picture_in_its_directory(tmp_path, texts):
    rows = [{"step": 0, **eval_row(0.3)}, *(step_row(s) for s in range(1, 30)), step_row(30, **eval_row(1.0))]
    run = make_run(tmp_path / "exp" / "trial", rows)
    path = plot_run(run)
    assert path == run / "training.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert {"held-out accuracy", "noise floor", "ε low", "A < 0 and s < 1 − 0.002"} <= set(texts)
    assert any(text.startswith("exp/trial") and "30.0% → 100.0%" in text for text in texts)
    assert sorted(file.name for file in run.iterdir()) == ["config.yaml", "metrics.jsonl", "training.png"]


def test_token_clip_ranges_are_not_drawn_against_sequence_ratios(tmp_path, texts):
    config = "algorithm: grpo\nactor:\n  importance_sampling_level: token\n"
    plot_run(make_run(tmp_path, [step_row(1), step_row(2)], config=config))
    assert "ε low" not in set(texts)
    assert "clip range" not in set(texts)
    assert any("with a clipped token" in text for text in texts)


def test_an_objective_that_does_not_clip_says_so(tmp_path, texts):
    bare = {"clip/eps_low": None, "clip/eps_high": None, "clip/sequences_low": 0.0, "clip/sequences_high": 0.0}
    plot_run(make_run(tmp_path, [step_row(1, **bare), step_row(2, **bare)]))
    assert any("does not clip" in text for text in texts)


@pytest.mark.parametrize("missing", brief((name for name in step_row(1) if name != "step"), "ratio/log_s_std"))
def test_a_picture_is_drawn_without_any_one_metric(missing, tmp_path):
    assert plot_run(make_run(tmp_path, [step_row(s, **{missing: None}) for s in (1, 2, 3)]))


def test_one_step_is_enough_and_none_gives_no_picture(tmp_path):
    assert plot_run(make_run(tmp_path / "one", [step_row(1)]))
    assert plot_run(make_run(tmp_path / "none", [{"step": 0, **eval_row(0.5)}])) is None


def test_names_of_runs_are_no_formulas(tmp_path, texts):
    plot_run(make_run(tmp_path / "a$x^2$" / "b_$\\frac$", [step_row(1)]))
    assert any("a\\$x^2\\$" in text for text in texts)

"""`Run`: a run directory as tables and figures, with and without pandas."""

import json
import sys

import pandas
import pytest
from made_runs import eval_row, make_run, step_row

import gspo
from gspo import Run
from gspo.errors import ConfigError


@pytest.fixture
def made(tmp_path):
    rows = [{"step": 0, **eval_row(0.3)}, step_row(1), step_row(2, **eval_row(0.9))]
    path = make_run(tmp_path / "exp" / "trial", rows, steps=(2,))
    (path / "samples").mkdir()
    samples = [{"step": 2, "sequence": i, "completion": "<b>", "reward": float(i)} for i in range(3)]
    text = "".join(json.dumps(row) + "\n" for row in samples)
    (path / "samples" / "step_000002.jsonl").write_text(text + '{"step": 2, "sequ')
    return path


def test_metrics_are_a_table_with_a_row_per_step(made):
    table = Run(made).metrics()
    assert table.index.tolist() == [0, 1, 2]
    assert table.loc[2, "eval/accuracy"] == 0.9
    assert pandas.isna(table.loc[0, "reward/mean"])
    assert list(Run(made).metrics("reward/mean", "eval/accuracy").columns) == ["reward/mean", "eval/accuracy"]


def test_without_pandas_tables_are_dicts_of_columns(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # import pandas raises ImportError
    table = Run(made).metrics("eval/accuracy")
    assert table == {"step": [0, 1, 2], "eval/accuracy": [0.3, None, 0.9]}
    assert Run(made).samples()["reward"] == [0.0, 1.0, 2.0]


def test_samples_of_a_step_leave_out_a_line_that_is_being_written(made):
    run = Run(made)
    assert run.sample_steps() == [2]
    assert run.samples(2)["sequence"].tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="no samples of step 1; available: 2"):
        run.samples(1)
    with pytest.raises(ConfigError, match="no held-out answers of any step"):
        run.samples(held_out=True)


def test_an_unknown_metric_names_the_nearest(made):
    with pytest.raises(ConfigError, match=r"'reward/meen'; did you mean reward/mean\?"):
        Run(made).metrics("reward/meen")
    with pytest.raises(ConfigError, match="no metric 'nothing like it'"):
        Run(made).plot("nothing like it")


def test_a_run_has_its_config_summary_and_checkpoints(made):
    run = Run(made)
    assert (run.steps, run.best_step, [c.step for c in run.checkpoints]) == (2, 2, [2])
    assert run.summary.score_end[0] == 0.9
    assert isinstance(run.config, dict)
    assert repr(run).endswith("2 steps)")
    assert "held-out accuracy" in run._repr_html_()


def test_a_run_follows_the_files(made):
    run = Run(made)
    with open(made / "metrics.jsonl", "a") as file:
        file.write(json.dumps(step_row(3)) + "\n")
    assert run.steps == 3


@pytest.mark.run
def test_figures_have_a_panel_per_metric_or_the_panels_of_the_run(made):
    pytest.importorskip("matplotlib")
    run = Run(made)
    chosen = run.plot("reward/mean", "policy/entropy")
    assert [axes.get_title(loc="left") for axes in chosen.axes] == ["reward/mean", "policy/entropy"]
    assert chosen._repr_png_().startswith(b"\x89PNG")  # what a notebook shows
    whole = run.plot()
    assert len(whole.axes) >= 6
    with pytest.raises(ConfigError, match="nothing to draw"):
        Run(make_run(made.parent / "new", [])).plot()


def test_the_package_exports_the_names_that_people_import():
    assert gspo.Run is Run
    with pytest.raises(AttributeError, match="has no attribute 'Runs'"):
        _ = gspo.Runs

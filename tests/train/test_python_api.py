"""The Python interface: configs as dicts, tables as data sets, the summary, the panel in a notebook."""

import json
import sys
import types

import pandas
import pytest
from training_runs import make_trainer

from gspo.config import load
from gspo.errors import ConfigError, DataError
from gspo.models import embedded
from gspo.monitor import in_notebook, make_display
from gspo.train import Trainer
from gspo.train.build.data import make_data
from gspo.train.build.learner import alphabet_warning
from gspo.train.trainer import Summary


def test_a_dict_is_a_config_with_sections_or_dotted_keys():
    settings = {"algorithm": "gspo", "gconfig": {"n_samples": 6}, "actor.path": "embedded:tiny"}
    made = load(settings, ["seed=5"])
    written = load(None, ["algorithm=gspo", "gconfig.n_samples=6", "actor.path=embedded:tiny", "seed=5"])
    assert made.config == written.config
    with pytest.raises(ConfigError, match=r"gconfig\.n_samples"):
        load({"gconfig": {"n_sample": 6}})
    for config, overrides, said in (
        (["quickstart"], (), "a config is the path of a YAML file"),
        (settings, "seed=1", "overrides must be a list of strings.* got one string"),
        (settings, {"seed": 1}, "overrides must be a list of strings.* got a dict"),
    ):
        with pytest.raises(ConfigError, match=said):
            Trainer(config, overrides=overrides)
    with pytest.raises(ConfigError, match="workflow must be a function"):
        Trainer(settings, workflow=3)
    with pytest.raises(ConfigError, match="cannot be part of a config"):
        load({"seed": object()})
    assert repr(Trainer(settings)).startswith("Trainer(gspo, embedded:tiny")


def test_a_pandas_table_is_a_data_set():
    table = pandas.DataFrame({"prompt": ["1+1=", "2+2="], "answer": ["2", "4"]})
    config = load(None, ["actor.path=embedded:tiny"]).config
    data, _ = make_data(config, table, table, embedded.embedded_tokenizer())
    assert [data.prompt(row).text for row in range(len(data))] == ["1+1=", "2+2="]


ROWS = [
    {"step": 0, "eval/accuracy": 0.25},
    {"step": 1, "reward/mean": 0.5, "time/step_s": 1.0},
    {"step": 2, "reward/mean": 0.75, "eval/accuracy": 0.5, "time/step_s": 1.0},
]


def test_a_summary_has_the_metrics_and_shows_its_curves(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    summary = Summary(tmp_path, 2, 3.0, True)
    assert summary.metrics == {"reward_start": 0.5, "reward_end": 0.75, "accuracy_start": 0.25, "accuracy_end": 0.5}
    assert "2 steps in 3 s, finished, reward 0.500 → 0.750, accuracy 0.250 → 0.500" in str(summary)
    assert summary._repr_html_().count("<svg") == 2
    assert Summary(tmp_path / "none", 0, 0.0, False).metrics == {}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1]) + "\n")
    assert str(Summary(tmp_path, 1, 3.0, True)).endswith("1 step in 3 s, finished, reward 0.500, accuracy 0.250")


def test_a_notebook_gets_a_panel_that_is_updated(monkeypatch):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data["text/html"])

    def display(data, raw, display_id):
        shown.append(data["text/html"])
        return Handle()

    module = types.ModuleType("IPython.display")
    module.display = display
    session = types.ModuleType("IPython")
    session.get_ipython = lambda: None
    monkeypatch.setitem(sys.modules, "IPython", session)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    assert not in_notebook()  # IPython was imported, but this process is not the kernel of a notebook
    session.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    panel = make_display("gspo · <run>", 2)
    for row in ROWS:
        panel.step(row, None)
    panel.close()
    assert len(shown) == 4
    assert "step 2/2" in shown[-1]
    assert "reward 0.750" in shown[-1]
    assert "&lt;run&gt;" in shown[-1]
    assert shown[-1].count("<svg") == 2


def test_an_embedded_model_warns_of_text_outside_its_alphabet():
    tiny = load(None, ["actor.path=embedded:tiny"]).config
    assert alphabet_warning(tiny, "12+34=") == []
    assert "'say '" in alphabet_warning(tiny, "say 1")[0]
    assert alphabet_warning(load(None, ["env.path=gymnasium:CartPole-v1"]).config, "CartPole") == []
    assert alphabet_warning(load(None, ["actor.path=smollm2-135m"]).config, "say 1") == []


@pytest.mark.run
def test_a_run_from_python_ends_with_the_page_the_picture_and_the_table(tmp_path, tiny, capsys):
    trainer = make_trainer(tmp_path, "total_train_steps=1", "train_dataset.batch_size=2", "evaluator.size=4")
    summary = trainer.train()
    assert "<html" in (summary.path / "report.html").read_text()
    assert (summary.path / "training.png").stat().st_size > 1000
    said = capsys.readouterr().out
    assert "Finished." in said
    assert f"gspo report {summary.path} --open" in said  # one line
    (summary.path / "report.html").unlink()
    assert trainer.train(report=False).finished
    assert not (summary.path / "report.html").exists()


def test_the_keys_of_train_dataset_hold_for_rows_of_the_caller():
    rows = [{"task": f"{a}+1=", "gold": str(a + 1), "level": a % 3} for a in range(40)] + [
        {"task": "1" * 99, "gold": "1"}
    ]
    keys = {"columns": {"prompt": "task", "answer": "gold"}, "system_prompt": "1+", "max_length": 20}
    config = load({"actor.path": "embedded:tiny", "train_dataset": {**keys, "batch_size": 4}}).config
    data, _ = make_data(config, rows, None, embedded.embedded_tokenizer())
    prompt = data.prompt(0)
    assert prompt.text.startswith("1+")
    assert prompt.text.endswith("+1=")
    assert prompt.answer == prompt.data["gold"]
    assert data.num_too_long == 1
    with pytest.raises(DataError, match=r"got the path 'r.jsonl': set train_dataset.path"):
        make_data(config, "r.jsonl", None, embedded.embedded_tokenizer())


def test_rows_of_an_environment_are_used_or_refused_and_never_ignored():
    class Game:
        def rows(self, split, size):
            return [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]

    class Bare:
        pass

    def first(environment, *words):
        config = load(None, ["algorithm=gspo", "env.path=mine:Game", "evaluator.freq_steps=0", *words]).config
        return make_data(config, None, None, embedded.embedded_tokenizer(), environment)[0].describe()

    with pytest.raises(ConfigError, match=r"train_dataset\.path is not set: set train_dataset\.path: env"):
        first(Game())
    assert "4 problems of the environment" in first(Game(), "train_dataset.path=env")
    assert "embedded:arithmetic" in first(Game(), "train_dataset.path=embedded:arithmetic")
    assert "embedded:arithmetic" in first(Bare())

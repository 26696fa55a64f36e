"""`algorithm: file.py:function`: a run with an objective of the user is a run like any other."""

import json
import shutil
from pathlib import Path

import pytest
import ranked_runs
import torch
from training_runs import RANKED, SMALL, digests, metrics, path_of, train, without_clocks

from gspo import Trainer
from gspo.cli import main as cli
from gspo.config import load
from gspo.errors import ConfigError
from gspo.objectives import mean_tokens, sum_tokens
from gspo.report import answers, read_metrics, summary_of

pytestmark = [pytest.mark.usefixtures("tiny"), pytest.mark.run]

EXAMPLE = Path(__file__).parents[2] / "examples" / "objective" / "my_loss.py"
BRIEF = ("total_train_steps=2", "evaluator.at_start=false", "evaluator.size=8")
OWN = f"algorithm={EXAMPLE}:objective"


def test_the_example_is_gspo_bit_for_bit(tmp_path):
    _, preset = train(tmp_path / "preset", *BRIEF, "total_train_steps=3", "actor.eps_clip_higher=0.0025")
    _, mine = train(tmp_path / "mine", OWN, *BRIEF, "total_train_steps=3", "actor.eps_clip_higher=0.0025")
    want, got = digests(preset), digests(mine)
    assert len(got["state"]["identity"].pop("objective")) == 64
    assert want == got
    assert any(row.get("clip/sequences_low") for row in metrics(mine))


def test_a_function_of_a_script_is_given_to_the_trainer_and_may_say_nothing_about_clipping(tmp_path):
    def reinforce(logp, advantage, layout):
        return -advantage * mean_tokens(logp, layout)

    kept = torch.get_num_threads()
    overrides = [*SMALL, f"cluster.fileroot={tmp_path}", *BRIEF, "~actor.eps_clip"]
    Trainer({}, objective=reinforce, overrides=overrides).train(report=False)
    torch.set_num_threads(kept)
    path = path_of(tmp_path)
    rows = read_metrics(path)
    assert rows[-1]["clip/sequences_low"] is None
    assert rows[-1]["grad/norm"] > 0
    assert "session:reinforce (an objective of your own), 2 updates per batch" in (path / "log.txt").read_text()
    assert "This objective does not clip the ratio." in str(answers_of(path))
    assert load(path / "config.yaml").config.algorithm == "session:reinforce"


def test_the_report_shows_the_clipping_that_a_function_returns_without_an_epsilon(tmp_path):
    file = tmp_path / "half.py"
    file.write_text(
        "from gspo.objectives import mean_tokens\n"
        "def half(logp, proximal_logp, advantage, layout):\n"
        "    moved = mean_tokens(logp - proximal_logp, layout)\n"
        "    return -advantage * moved.exp(), moved.detach() > 0\n"
    )
    _, path = train(tmp_path, f"algorithm={file}:half", "~actor.eps_clip", RANKED, *BRIEF)
    assert metrics(path)[-1]["clip/sequences_high"] > 0
    assert "with A > 0." in str(answers_of(path))


def answers_of(path):
    rows = read_metrics(path)
    return answers(summary_of(rows, True), rows, [], None)


def test_a_resume_with_a_changed_file_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    shutil.copy(EXAMPLE, file)
    how = (f"algorithm={file}:objective", *BRIEF)
    train(tmp_path, *how, "total_train_steps=1")
    recorded = json.loads((path_of(tmp_path) / "code.json").read_text())
    assert list(recorded) == [f"objective {file}:objective"]
    train(tmp_path, *how)
    assert metrics(path_of(tmp_path))[-1]["step"] == 2
    file.write_text(file.read_text().replace("-s * advantage", "-2 * s * advantage"))
    with pytest.raises(ConfigError, match=r"the file that defines the objective \(algorithm\) has changed since"):
        train(tmp_path, *how, "total_train_steps=3")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_like_this", "importing .* failed: ModuleNotFoundError"),
        ("other = 1", "has no function objective"),
        ("def objective(logp, eps_cilp):\n    return logp", "asks for eps_cilp.* did you mean eps_clip"),
        ("def objective(logp, c_clip):\n    return logp", "asks for c_clip, but actor.c_clip is null; set it"),
        ("def objective(logp):\n    return logp.sum()", r"shape \[\]; it must be \[6\]"),
        ("def objective(logp):\n    return logp * float('nan')", "its loss is nan"),
        ("def objective(logp):\n    return logp.detach()", "a loss without a gradient"),
    ],
    ids=["import", "missing", "parameter", "null", "shape", "nan", "gradient"],
)
def test_a_wrong_function_is_refused_before_a_model_is_loaded(tmp_path, code, message):
    file = tmp_path / "mine.py"
    file.write_text(code + "\n")
    with pytest.raises(ConfigError, match=rf"(?s)^algorithm: .*{message}"):
        train(tmp_path, f"algorithm={file}:objective", "actor.path=/no/such/model")


def test_other_wrong_objectives_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file none\.py"):
        train(tmp_path, "algorithm=none.py:objective")
    with pytest.raises(ConfigError, match=r"session:f was defined in a Python session .* pass it to Trainer"):
        train(tmp_path, "algorithm=session:f")
    with pytest.raises(ConfigError, match="not a config that is loaded already"):
        Trainer(load(None), objective=sum_tokens)
    with pytest.raises(ConfigError, match="objective must be a function, got 'gspo'"):
        Trainer({}, objective="gspo")
    file = tmp_path / "plain.py"
    file.write_text("def plain(logp, token_advantage):\n    return -logp * token_advantage\n")
    with pytest.raises(ConfigError, match="plain does not ask for eps_clip, which"):
        train(tmp_path, f"algorithm={file}:plain", "actor.eps_clip=auto")


def test_doctor_explains_the_function_and_calls_it(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(EXAMPLE.parent)
    cli.main(["doctor", "quickstart", "algorithm=my_loss.py:objective", "--json"])
    told = json.loads(capsys.readouterr().out)
    objective = told["objective"]
    assert objective["title"].startswith("One ratio per completion, the geometric mean of its token ratios")
    assert objective["formula"].startswith(
        "loss = (1/G) Σᵢ objective(logp, proximal_logp, advantage, layout, eps_clip,"
    )
    assert "keys that it is given: actor.eps_clip 2e-3, actor.eps_clip_higher 2.5e-3" in objective["words"]
    assert any("my_loss.py" in words for words in objective["words"])
    assert {"what": "objective", "state": "ok"}.items() <= next(
        check for check in told["machine"] if check["what"] == "objective"
    ).items()


def test_automatic_epsilon_reaches_a_function_that_asks_for_it(tmp_path):
    how = ("~actor.eps_clip", "actor.eps_clip=auto", *BRIEF, "total_train_steps=3")
    _, preset = train(tmp_path / "preset", *how)
    _, mine = train(tmp_path / "mine", OWN, *how)
    assert list(map(without_clocks, metrics(mine))) == list(map(without_clocks, metrics(preset)))


@pytest.mark.full
def test_two_ranks_with_a_function_are_two_ranks_with_the_preset_and_train_as_one(tmp_path):
    own = ranked_runs.train(tmp_path / "own", 2, OWN, *BRIEF)
    preset = ranked_runs.train(tmp_path / "preset", 2, *BRIEF)
    assert list(map(without_clocks, metrics(own))) == list(map(without_clocks, metrics(preset)))
    _, alone = train(tmp_path / "alone", OWN, *BRIEF)
    for name in ("loss/mean", "grad/norm", "clip/sequences_low", "clip/num_sequences", "reward/mean"):
        assert metrics(own)[0].get(name) == pytest.approx(metrics(alone)[0].get(name), rel=1e-3, abs=1e-6), name

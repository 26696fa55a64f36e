"""Losses of packages: ours agrees everywhere; TRL's is read from the installed files without an import of TRL."""

import json
import subprocess
import sys

import pytest

from gspo import objectives
from gspo.cli.main import main
from gspo.conformance import Package, adapted, check_all, targets
from gspo.errors import ConfigError


def test_our_objective_agrees_in_every_case_and_offers_all():
    outcomes = check_all(targets.target("gspo"))
    assert [(o.case.name, o.details) for o in outcomes if o.is_wrong or o.status == "not offered"] == []
    assert [o.case.name for o in outcomes if o.answer not in ("", o.case.answers[0].name)] == []
    # Where |log s| > 20 our bound counts as clipped, on the side without a clip and for A = 0, too.
    named = {o.case.name: o.metric for o in outcomes if o.case.objective == "gspo" and o.case.decided and o.metric}
    assert {name for name, metric in named.items() if metric != "sequences"} == {"extreme_unclipped", "extreme_zero"}


@pytest.mark.run
def test_trl_is_read_without_its_import():
    script = (
        "import sys\nfrom gspo.conformance import check_all, targets\n"
        "out = {o.case.name: o.status for o in check_all(targets.target('trl'))}\n"
        "assert not any(name.split('.')[0] in ('trl', 'transformers') for name in sys.modules)\n"
        "print(out['clean'], out['ragged'], out['split_even'], out['dapo_split'], out['packed'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["agrees", "agrees", "agrees", "agrees", "not", "offered"]


def package(folder, text, name="loss.py"):
    (folder / "pack").mkdir(exist_ok=True)
    (folder / "pack" / name).write_text(text)
    return Package("pack", folder)


def test_a_definition_is_taken_alone(tmp_path):
    pack = package(
        tmp_path,
        "import no_such_module\nLIMIT = 3\n\n@no_such_module.register\ndef loss(x: no_such_module.Tensor):\n"
        "    return helper(x) + LIMIT\n\nclass A(no_such_module.B):\n    @staticmethod\n    def twice(x):\n"
        "        return 2 * x\n",
    )
    found = pack.take("pack/loss.py", "LIMIT", "loss", "A.twice", helper=lambda x: 10 * x)
    assert found.loss(1) == 13
    assert found.twice(4) == 8


def test_a_file_or_a_name_that_is_not_there_is_named(tmp_path):
    pack = package(tmp_path, "x = 1\n")
    with pytest.raises(ConfigError, match=r"has no f: this version of pack is not known"):
        pack.take("pack/loss.py", "f")
    with pytest.raises(ConfigError, match=r"has no pack/other.py; --source takes the folder"):
        pack.take("pack/other.py", "f")
    with pytest.raises(ConfigError, match="no_such_pack is not installed; install it, or pass --source"):
        Package("no_such_pack").take("no_such_pack/a.py", "f")


def test_the_version_of_an_unpacked_wheel_is_read(tmp_path):
    (tmp_path / "pack-1.2.dist-info").mkdir()
    (tmp_path / "pack-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.4\nName: pack\nVersion: 1.2\n")
    assert package(tmp_path, "").version == "1.2"


LOSS = """\
import torch


def loss_fn(logp, old_logp, advantages, mask, eps_low, eps_high):
    s = torch.exp(((logp - old_logp) * mask).sum(-1) / mask.sum(-1).clamp(min=1))
    return -torch.min(s * advantages, s.clamp(1 - eps_low, 1 + eps_high) * advantages).mean()
"""


def test_the_command_exits_with_1_only_where_the_paper_decides(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_loss.py").write_text(LOSS)
    monkeypatch.chdir(tmp_path)
    assert main(["conformance", "my_loss.py:loss_fn", "--case", "clean", "--case", "padding_inf"]) == 0
    shown = capsys.readouterr().out
    assert "open: not finite" in shown
    assert "For a run: the loss is NaN, because 0 · (−inf − −inf) is NaN." in shown
    assert main(["conformance", "my_loss.py:loss_fn", "--json"]) == 1
    rows = {row["case"]: row for row in json.loads(capsys.readouterr().out)["cases"]}
    assert rows["extreme_zero"]["details"] == ["the loss is NaN"]
    assert [name for name, row in rows.items() if row["status"] in ("differs", "failed")] == [
        "extreme_clipped",
        "extreme_zero",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "pass a function"),
        (["a:b", "--target", "trl"], "pass a function"),
        (["--target", "trll"], "unknown target 'trll'; did you mean trl?"),
        (["--target", "slime", "--source", "nowhere"], "--source nowhere: there is no such folder"),
        (["no_such_module:loss"], "importing no_such_module failed"),
        (["math:sqrt"], "math:sqrt has the parameter 'x' without a default"),
        (["--explain", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
    ],
)
def test_bad_usage_is_named_and_exits_with_2(words, message, capsys):
    assert main(["conformance", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.run
def test_the_plug_in_runs_a_test_once_per_case(tmp_path):
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["gspo.conformance.plugin"]\n')
    (tmp_path / "my_loss.py").write_text(LOSS)
    (tmp_path / "test_loss.py").write_text(
        "from my_loss import loss_fn\n\ndef test_loss(gspo_case):\n    gspo_case(loss_fn)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-rf"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "test_loss[extreme_zero]" in done.stdout, done.stdout + done.stderr
    assert "For a run: the loss is NaN (0 · inf)" in done.stdout
    assert "2 failed" in done.stdout
    assert "22 skipped" in done.stdout, done.stdout[-500:]


def test_a_function_with_settings_of_any_name_gets_those_of_the_case():
    outcomes = check_all(adapted(objectives.loss))
    assert [(o.case.name, o.details) for o in outcomes if o.is_wrong] == []
    assert {"kl_k1", "sapo", "epsilon_asymmetric"} <= {o.case.name for o in outcomes if o.status != "not offered"}

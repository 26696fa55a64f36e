"""`gspo report` and `gspo watch` as commands: what they print, where they write, how they end."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from made_runs import HOSTILE, answer_row, make_run, sample_row, step_row, write_answers, write_samples
from processes import heavy_modules_after
from rich.console import Console

from gspo.cli import main as cli
from gspo.config import dump, load
from gspo.report.terminal import samples_view


@pytest.fixture
def run(tmp_path):
    config = dump(load(None, ["algorithm=gspo", "actor.path=embedded:tiny", "train_dataset.path=embedded:arithmetic"]))
    run = make_run(tmp_path / "exp" / "trial", [step_row(1), step_row(2)], config=config)
    write_samples(run, 1, [sample_row(1, i) for i in range(16)])
    return run


def boot_of(path):
    (text,) = re.findall(r'class="boot">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


def test_report_writes_the_page_and_says_where(run, tmp_path, capsys):
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "mine.html"), "--max-mb", "1"]) == 0
    assert (tmp_path / "mine.html").stat().st_size > 50_000


def test_samples_prints_mixed_groups_first_and_held_out_answers_on_request(run, capsys):
    rows = [sample_row(1, i, reward=0.5 if i < 4 else float(i % 2), completion=HOSTILE[i % 6]) for i in range(8)]
    write_samples(run, 1, rows)
    assert cli.main(["report", str(run), "--samples", "--num", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("1+1=\nanswer: 7\n")  # group 0 has equal rewards
    assert "1 of 2 prompts of step 1" in text
    assert "\x1b" not in text
    assert "<script>window.pwned" in text
    write_answers(run, 2, [answer_row(2, 5), answer_row(2, 6, reward=None, failure="timeout: late")])
    assert cli.main(["report", str(run), "--samples", "--held-out"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"5\+1=\nanswer: 6\n *0\.5  it is 6", text)
    assert re.search(r"failed  timeout: late", text)
    assert "2 of 2 held-out problems after step 2" in text


def test_samples_shows_graded_rewards_best_first_with_their_parts_and_distribution(run, capsys):
    rewards = [0.25, 0.75, None, 0.5]
    rows = [
        sample_row(1, i, reward=r, reward_parts=r and {"chrf": r, "language": 1.0}, completion=f"text {i}")
        for i, r in enumerate(rewards)
    ]
    write_samples(run, 1, rows)
    assert cli.main(["report", str(run), "--samples"]) == 0
    text = capsys.readouterr().out
    assert [text.index(f"text {i}") for i in (1, 3, 0, 2)] == sorted(text.index(f"text {i}") for i in range(4))
    assert re.search(r"0\.75  text 1  chrf 0\.75, language 1", text)
    assert "rewards of all 3: lowest 0.25, quartiles 0.25 0.5 0.75, highest 0.75" in text


def test_the_page_has_doctors_words_of_the_run_as_it_was_configured(run, capsys):
    cli.main(["report", str(run)])
    doctor = boot_of(run / "report.html")["overview"]["doctor"]
    assert doctor["objective"]["algorithm"] == "gspo"
    assert any("one ratio per completion" in words for words in doctor["objective"]["words"])
    # config.yaml has every key; only those that somebody set can be without effect.
    assert doctor["without_effect"] == []


def test_a_config_that_cannot_be_read_costs_its_words_alone(run, capsys):
    (run / "config.yaml").write_text("algorithm: gspo\nno_such_key: 1\n")
    assert cli.main(["report", str(run)]) == 0
    assert "no_such_key" in boot_of(run / "report.html")["overview"]["doctor"]["unreadable"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "{tmp}"], "is not a run directory"),
        (["report", "{run}", "--out", "{tmp}/no/such/dir/x.html"], "--out"),
        (["report", "{run}", "--max-mb", "0"], "--max-mb"),
        (["report", "{run}", "--samples", "--step", "7"], "no samples of step 7; available: 1"),
        (["report", "{run}", "--samples", "--held-out"], "no held-out answers of any step"),
        (["report", "{run}", "--step", "1"], "belong to --samples"),
        (["report", "{run}", "--samples", "--open"], "leave out --out, --open and --max-mb"),
        (["watch", "{tmp}/nowhere"], "does not exist"),
        (["watch", "{run}", "--port", "70000"], "--port"),
    ],
)
def test_mistakes_are_named_and_exit_2(words, said, run, tmp_path, capsys):
    assert cli.main([word.format(tmp=tmp_path, run=run) for word in words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.run
def test_watch_imports_no_torch(run):
    code = f"""
from gspo.report.page.watch import Watch
from gspo.cli.reports import words_of
watch = Watch(__import__("pathlib").Path({str(run)!r}), words_of)
watch.answer("data", {{"run": "trial"}})
watch.close()
"""
    assert heavy_modules_after(code) == []


@pytest.mark.run
def test_watch_prints_an_address_that_answers_and_ends_quietly(run):
    command = [sys.executable, "-m", "gspo", "watch", str(run.parent)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    ) as started:
        try:
            assert started.stdout is not None
            address = started.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
            with urllib.request.urlopen(address + "runs", timeout=30) as reply:
                assert [r["id"] for r in json.load(reply)["runs"]] == ["trial"]
        finally:
            started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=30)
    assert (started.returncode, said) == (0, "")


def test_samples_of_an_episode_mark_what_the_environment_wrote(capsys):
    block = {
        "step": 1, "kind": "samples", "submission": [0], "question": ["1+1="], "prompt": [0], "prompts": ["1+1="],
        "answer": ["2"], "reward": [1.0], "failure": [None], "completion": ["[1+1]2>2"], "parts": {}, "shown": [None],
        "turns": [[(False, "[1+1]"), (True, "2"), (False, ">2")]],
    }  # fmt: skip
    Console(width=80).print(samples_view(block, 1, str))
    assert "[1+1]‹2›>2" in (said := capsys.readouterr().out)
    assert "‹…› was written by the environment" in said
    Console(width=80).print(samples_view({**block, "turns": [None]}, 1, str))
    assert "‹" not in capsys.readouterr().out

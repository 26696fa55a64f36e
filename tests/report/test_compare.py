"""Runs side by side: arms by config, bands by hand-derived numbers, bad input by clear words, hostile text as text."""

import html
import io
import json
import re

import numpy as np
import pytest
from made_runs import eval_row, graded_row, make_run, step_row
from rich.console import Console

from gspo.cli.main import main
from gspo.errors import ConfigError
from gspo.report.comparison import MISSING, compare, find_runs, started
from gspo.report.comparison_page import compare_view, show_value, write_page
from gspo.system import inert

EVIL = "\x1b]0;owned\x07</script><img src=x onerror=alert(1)>[red]\u202e"


def config(seed, trial="t", algorithm="gspo", steps=4, **more):
    lines = [
        f"seed: {seed}", f"trial_name: {trial}", "experiment_name: e", f"algorithm: {algorithm}",
        f"total_train_steps: {steps}", "cluster: {fileroot: runs}", "gconfig: {n_samples: 8}",
        "train_dataset: {batch_size: 32}", "rollout: {consumer_batch_size: 16}",
    ]  # fmt: skip
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in more.items())]) + "\n"


def rows(accuracies, every=2, **changes):
    """A row per step, evaluated before the first and at every second."""
    out = [{"step": 0, **eval_row(accuracies[0])}]
    for step in range(1, every * (len(accuracies) - 1) + 1):
        seen = eval_row(accuracies[step // every]) if step % every == 0 else {}
        out.append(step_row(step, **seen, **changes))
    return out


@pytest.fixture
def runs(tmp_path):
    for algorithm, ends in (("gspo", (0.9, 0.8)), ("grpo", (0.5, 0.7))):
        for seed, end in enumerate(ends, 1):
            text = config(seed, f"{algorithm}_seed{seed}", algorithm)
            make_run(tmp_path / "e" / f"{algorithm}_seed{seed}", rows([0.2, 0.8 * end, end]), config=text)
    return tmp_path / "e"


def cells(found, what):
    return dict(found.outcome)[what]


def shown(found, width=100):
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False, emoji=False).print(compare_view(found, width, inert))
    return out.getvalue()


def test_runs_that_differ_in_seed_and_names_alone_are_one_arm(runs):
    found = compare([runs / "gspo_seed1", runs / "grpo_seed1", runs / "gspo_seed2", runs / "grpo_seed2"])
    assert [(arm.name, len(arm.runs)) for arm in found.arms] == [("gspo", 2), ("grpo", 2)]
    assert found.config == (("algorithm", ("gspo", "grpo")),)


def test_graded_runs_are_compared_by_held_out_reward(tmp_path):
    for name, end, seed in (("a", 0.5, 1), ("b", -0.25, 2)):
        made = [{"step": 0, **graded_row(-1.0, 0.1)}, step_row(1, **graded_row(end, 0.1))]
        make_run(tmp_path / name, made, config=config(seed, name, steps=1, strict="true", algorithm=name))
    found = compare([tmp_path / "a", tmp_path / "b"])
    assert cells(found, "held-out reward, end") == ("0.500 (0.400 … 0.600)", "-0.250 (-0.350 … -0.150)")
    assert cells(found, "end, against a") == ("", "-0.750")
    assert found.metrics[0] == "eval/reward"
    assert not any(name.startswith(("accuracy", "samples to")) for name, _ in found.outcome)


def test_the_runs_of_a_folder_are_in_the_order_of_their_age(tmp_path):
    for name, second in (("z", 1), ("a", 2), ("m", 3)):
        run = make_run(tmp_path / name, [step_row(1)])
        (run / "log.txt").write_text(
            f"2026-01-01 00:00:0{second} train_dataset: 3 problems\n2027-01-01 00:00:00 later\n"
        )
    (tmp_path / "m" / "log.txt").write_text("torn")  # then the time of config.yaml
    assert [run.name for run in find_runs([tmp_path])] == ["z", "a", "m"]
    assert [run.name for run in find_runs([f"{tmp_path}/*"])] == ["z", "a", "m"]
    assert [run.name for run in find_runs([tmp_path / "m", tmp_path / "z"])] == ["m", "z"]  # as they were given
    assert started(tmp_path / "z") < started(tmp_path / "a")


def test_keys_that_only_watch_do_not_part_an_arm_and_a_key_of_one_run_does(tmp_path):
    watched = {"stats_logger": "{tensorboard: true}", "saver": "{freq_steps: 3}"}
    a = make_run(tmp_path / "e/a", rows([0.1, 0.2]), config=config(1))
    b = make_run(tmp_path / "e/b", rows([0.1, 0.2]), config=config(2, **watched))
    c = make_run(tmp_path / "e/c", rows([0.1, 0.2]), config=config(3, actor="{eps_clip: 0.1}"))
    found = compare([a, b, c])
    assert [len(arm.runs) for arm in found.arms] == [2, 1]
    assert found.config == (("actor.eps_clip", (MISSING, 0.1)),)


def test_bands_are_t_intervals_over_seeds(runs):
    """Two runs 0.9 and 0.8: mean 0.85, s = 0.0707, half = 12.706 · s / √2 = 0.6353."""
    band = compare([runs]).arms[0].band("eval/accuracy")
    assert band.steps.tolist() == [0, 2, 4]
    assert band.mean[-1] == pytest.approx(0.85)
    assert (band.high - band.mean)[-1] == pytest.approx(0.6353, abs=1e-4)
    assert (band.low[0], band.high[0]) == pytest.approx((0.2, 0.2))  # all start alike


def test_one_run_has_no_band_and_its_accuracy_has_the_interval_over_problems(runs):
    found = compare([runs / "gspo_seed1", runs / "grpo_seed1"])
    band = found.arms[0].band("reward/mean")
    assert np.array_equal(band.low, band.mean)
    assert cells(found, "accuracy, end")[0] == "90.0% (87.1–92.3)"


def test_the_outcome_tells_accuracy_samples_clipping_and_time(runs):
    found = compare([runs / "gspo_seed1", runs / "gspo_seed2", runs / "grpo_seed1", runs / "grpo_seed2"])
    assert cells(found, "accuracy, start") == ("20.0% ± 0.0", "20.0% ± 0.0")
    assert cells(found, "accuracy, end") == ("85.0% ± 63.5", "60.0% ± 127.1")
    # Both gspo runs reach 80 % at step 4: 4 steps × 16 prompts × 8 samples.
    assert cells(found, "samples to 80%") == ("512 ± 0", "not reached")
    assert cells(found, "clipped low")[0] == "10.0% ± 0.0"
    assert cells(found, "s/step, median")[0] == "2.00 ± 0.00"
    # The differences are -0.4 (seed 1) and -0.1 (seed 2): s = 0.2121, half = 12.706 · 0.2121 / √2 = 1.9059
    assert cells(found, "end, against gspo") == ("", "-25.0 points ± 190.6 (paired by seed)")


def test_arms_with_other_seeds_are_compared_by_the_interval_of_welch(runs):
    make_run(runs / "grpo_seed3", rows([0.2, 0.56, 0.7]), config=config(3, "grpo_seed3", "grpo"))
    found = compare([runs / "gspo_seed1", runs / "gspo_seed2", runs / "grpo_seed1", runs / "grpo_seed3"])
    # s² / n is 0.0025 and 0.01, df 1.47 → 1, half = 12.706 · √0.0125 = 1.4206
    assert cells(found, "end, against gspo") == ("", "-25.0 points ± 142.1 (Welch)")


def test_refilled_groups_were_sampled_too(tmp_path):
    refilled = {"reward/refilled_groups": 3}
    a = make_run(tmp_path / "e/a", rows([0.1, 0.9], **refilled), config=config(1))
    b = make_run(tmp_path / "e/b", rows([0.1, 0.9], **refilled), config=config(2))
    assert cells(compare([a, b]), "samples to 80%") == ("304 ± 0",)  # (2 × 16 + 2 × 3) × 8


def test_runs_of_different_lengths_are_compared_where_both_have_been(runs, tmp_path):
    text = config(3, "gspo_seed3")
    make_run(runs / "gspo_seed3", rows([0.2, 0.3]), config=text)
    found = compare([runs / f"gspo_seed{seed}" for seed in (1, 2, 3)])
    assert "e/gspo_seed3 has 2 of 4 steps" in found.notes
    assert any("mean and band end" in note for note in found.notes)
    assert cells(found, "steps") == ("2–4",)
    assert found.arms[0].band("eval/accuracy").steps[-1] == 2
    assert cells(found, "accuracy at step 2")[0].startswith("55.3%")  # (0.72 + 0.64 + 0.3) / 3


def test_folders_and_patterns_name_runs_and_each_is_read_once(runs):
    assert len(find_runs([runs.parent])) == len(find_runs([runs])) == 4
    assert len(find_runs([f"{runs}/gspo_*", runs / "gspo_seed1", runs])) == 4
    (runs / "gspo_seed1" / "launch").mkdir()
    (runs / "gspo_seed1" / "launch" / "config.yaml").write_text("seed: 1\n")
    assert len(find_runs([runs])) == 4  # what lies in a run is no run


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["nowhere"], "does not exist"),
        (["e/none_*"], "no folder matches"),
        (["empty"], "has no config.yaml"),
        (["e/gspo_seed1"], "nothing to compare.*only"),
        (["e/gspo_seed1", "new"], "nothing to compare"),
        (["broken", "e/gspo_seed1"], "cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(given, words, runs, monkeypatch):
    monkeypatch.chdir(runs.parent)
    (runs.parent / "empty").mkdir()
    make_run(runs.parent / "new", [], config=config(9))
    make_run(runs.parent / "broken", rows([0.1, 0.2]), config="a: [")
    with pytest.raises(ConfigError, match=words):
        compare(given)


def test_a_run_without_a_row_is_left_out_and_named(runs):
    make_run(runs / "new", [], config=config(9))
    assert any("e/new is left out" in note for note in compare([runs]).notes)


def test_metrics_are_chosen_by_name_and_a_wrong_one_gets_the_nearest(runs):
    make_run(runs / "bare", [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.6}], config=config(7))
    found = compare([runs], ["grad/norm"])
    assert found.metrics == ("grad/norm",)
    assert any("grad/norm was not measured in e/bare" in note for note in found.notes)
    with pytest.raises(ConfigError, match="grad/norm"):
        compare([runs], ["grad/nrm"])


def test_values_that_are_no_numbers_are_gaps(tmp_path):
    odd = [step_row(1), step_row(2, **{"reward/mean": "NaN", "grad/norm": True}), step_row(3, **{"reward/mean": 1e400})]
    a = make_run(tmp_path / "e/a", odd, config=config(1))
    b = make_run(tmp_path / "e/b", [step_row(s) for s in (1, 2, 3)], config=config(2))
    steps, _ = compare([a, b]).arms[0].runs[0].curve("reward/mean")
    assert steps.tolist() == [1]


@pytest.mark.parametrize("width", [30, 44, 80, 200])
def test_the_text_fits_its_terminal_and_keeps_every_figure(width, runs):
    text = shown(compare([runs]), width)
    assert max(map(len, text.split("\n"))) <= width
    assert "85.0%±63.5" in "".join(text.split())


def test_more_arms_than_fit_side_by_side_take_further_tables(tmp_path):
    for i in range(8):
        actor = f"{{eps_clip: {i}}}"
        make_run(tmp_path / "e" / f"arm{i}", rows([0.1, i / 10]), config=config(1, actor=actor))
    text = shown(compare([tmp_path / "e"]), 60)
    outcome = text.partition("Keys that differ")[0]
    assert outcome.count("accuracy, end") > 1
    heads = [line.split() for line in outcome.split("\n") if line.startswith(" " * 9) and "arm" in line]
    assert [name for head in heads for name in head] == [f"arm{i}" for i in range(8)]
    assert max(map(len, text.split("\n"))) <= 60


def test_in_a_pipe_the_text_is_plain(runs, capsys):
    assert main(["compare", str(runs)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "Keys that differ" in text
    assert "eval/accuracy" in text


def test_hostile_names_and_values_are_text_on_the_terminal_and_in_the_page(tmp_path):
    evil = json.dumps(EVIL)
    a = make_run(tmp_path / "e" / "a[red]", rows([0.1, 0.2]), config=config(1, f"{evil}", actor=f"{{path: {evil}}}"))
    b = make_run(tmp_path / "e" / "b<script>alert(1)", rows([0.1, 0.2]), config=config(2))
    found = compare([a, b])
    text = shown(found, 200)
    assert "owned" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "a[red]" in text
    page = write_page(found, tmp_path / "compare.html").read_text()
    assert "<img" not in page
    assert html.escape("b<script>alert(1)") in re.search("<title>(.*?)</title>", page)[1]
    boot = json.loads(re.search(r'class="boot">(.*?)</script>', page)[1])
    assert boot["config"][0][1][0].startswith("\x1b]0;owned")  # whole, as data


def test_the_page_is_one_file_that_asks_no_network(runs, tmp_path):
    page = write_page(compare([runs]), tmp_path / "compare.html").read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    assert "default-src &#x27;none&#x27;" in policy
    assert "unsafe" not in policy
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert sorted(file.name for file in tmp_path.iterdir() if file.is_file()) == ["compare.html"]


def test_a_page_that_cannot_be_written_is_a_clear_error(runs, tmp_path, capsys):
    assert main(["compare", str(runs), "--out", str(tmp_path / "no" / "compare.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_long_runs_become_pages_of_bounded_size(tmp_path):
    for seed in (1, 2):
        lines = [{"step": step, "reward/mean": step / 9000} for step in range(1, 9001)]
        make_run(tmp_path / "e" / f"s{seed}", lines, config=config(seed))
    page = write_page(compare([tmp_path / "e"]), tmp_path / "compare.html")
    assert page.stat().st_size < 500_000


def test_config_values_are_shown_in_a_line():
    assert show_value({"a": [1, 2]}) == "{'a': [1, 2]}"
    assert show_value("two\nlines") == "two lines"

"""The page and the terminal from result files: no run is made here."""

import json
import subprocess
import sys

import pytest
from tiers import brief

from gspo.studies import page, plan, results
from lab import ROOT
from lab.studies import pages, when

STUDY = plan.find_study("clipping")


def record(arm, seed, measures, *, stage="test", digest=None, busy=False, study=STUDY):
    digest = digest or plan.config_digest(plan.configured(study, study.overrides(arm), seed))
    return {
        "arm": arm, "seed": seed, "stage": stage, "digest": digest, "measures": measures, "failed": None,
        "curves": {name: [[0, 0.3], [64, 0.9]] for name in ("accuracy", "reward", "clip_tokens")},
        "took": {"wall_s": 10.0, "cpu_s": 5.0 if busy else 9.9, "load": 1.0, "jobs": 2},
        "command": "gspo study run", "date": "2026-01-01", "commit": "abc", "machine": "m", "versions": {"torch": "2"},
        "train": plan.train_command(study, study.overrides(arm), seed), "config": {"seed": seed},
    }  # fmt: skip


def filled(ours, theirs):
    """Records of GSPO and GRPO over seeds, each a share of clipped tokens and a final accuracy."""
    return [
        record(arm, seed, {"clip_tokens": clip, "final": final, "gain": 0.6, "step_s": 1.0})
        for arm, values in (("gspo ε=2e-3", ours), ("grpo ε=0.2", theirs))
        for seed, (clip, final) in enumerate(values, 1)
    ]


def verdicts(records):
    return {d.check.says: d.verdict for d in page.decisions(STUDY, records)}


def test_a_claim_is_shown_or_not_by_its_paired_interval_alone():
    clear = filled([(0.1, 0.95), (0.12, 0.96), (0.11, 0.97)], [(0.002, 0.95), (0.003, 0.97), (0.002, 0.96)])
    said = verdicts(clear)
    assert said["GSPO (ε 2e-3) clips more than 10 × the tokens of GRPO (ε 0.2)"] == "shown"
    assert said["GSPO (ε 2e-3) clips more than 100 × the tokens of GRPO (ε 0.2)"] == "opposite"
    assert said["no worse than GRPO by more than 5 points"] == "shown"
    assert said["PPO's ε 0.2 on sequence ratios clips nothing (below 0.1 %)"] == "not run"
    noisy = filled([(0.1, 0.95), (0.1, 0.5), (0.1, 0.9)], [(0.002, 0.6), (0.002, 0.97), (0.002, 0.9)])
    assert verdicts(noisy)["no worse than GRPO by more than 5 points"] == "not shown"


def test_the_page_has_the_verdicts_the_machine_the_date_and_the_command(tmp_path):
    pytest.importorskip("matplotlib")
    results.write_records(tmp_path, STUDY, filled([(0.1, 0.9), (0.12, 0.92)], [(0.002, 0.9), (0.003, 0.9)]))
    text = pages.write_pages(tmp_path).read_text()
    assert "2026-01-01, m, one thread per run; torch 2; commit abc." in text
    assert "gspo train lab/studies/micro.yaml algorithm=gspo actor.eps_clip=0.002" in text
    assert "| gspo ε=2e-3 | 2 |" in text
    assert "Not run yet: `gspo study run efficiency`" in text
    assert (tmp_path / "img" / "studies" / "clipping.png").stat().st_size > 1000


def test_a_study_of_a_user_has_page_and_picture_beside_its_results_and_nothing_of_the_repository_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "base.yaml").write_text("algorithm: gspo\n")
    file = tmp_path / "mine.yaml"
    file.write_text("{claim: c, about: a, base: base.yaml, seeds: [1], arms: {one: {}}, measures: [final]}\n")
    study = plan.find_study(str(file))
    results.write_records(tmp_path, study, [record("one", 1, {"final": 0.5}, study=study)])
    text = page.write_page(study, tmp_path).read_text()
    assert text.startswith("## mine\n\n*c*")
    assert f"`gspo study run {file}`" in text
    assert "| one | 1 | 0.5 |" in text
    assert {path.name for path in tmp_path.rglob("*")} == {
        "base.yaml",
        *(f"mine.{x}" for x in ("yaml", "json", "md", "png")),
    }


def test_the_commands_of_old_records_name_the_files_and_functions_of_today():
    was = "gspo train src/gspo/lab/studies/micro.yaml 'reward.functions=[\"gspo.lab.studies.control:coin\"]'"
    assert plan.command_today(was) == (
        "gspo train lab/studies/micro.yaml 'reward.functions=[\"gspo.studies.control:coin\"]'"
    )


def test_results_of_another_config_are_not_used(tmp_path):
    stale = [record("gspo ε=2e-3", seed, {"gain": 0.9}, digest="0123") for seed in (1, 2)]
    results.write_records(tmp_path, STUDY, stale)
    assert results.current(STUDY, results.read_records(tmp_path, STUDY)) == []
    job = plan.jobs(STUDY, plan.Choice(only="gspo ε=2e-3"))[0]
    assert not results.done(stale, job)
    assert results.done(filled([(0.1, 0.9)], [(0.1, 0.9)]), job)


def test_seconds_of_a_busy_machine_are_neither_shown_nor_compared():
    alone = record("gspo ε=2e-3", 1, {"step_s": 0.5})
    beside = record("gspo ε=2e-3", 2, {"step_s": 5.0}, busy=True)
    assert page.cell([alone, beside], "step_s") == "0.5"
    assert page.cell([beside], "step_s") == "busy"
    assert results.by_seed([alone, beside], "gspo ε=2e-3", "step_s") == {1: 0.5}


def test_a_run_that_never_reached_80_percent_is_counted_as_such():
    reached, never = (
        record("gspo ε=2e-3", 1, {"samples_to_80": 640.0}),
        record("gspo ε=2e-3", 2, {"samples_to_80": None}),
    )
    assert page.cell([reached, never], "samples_to_80") == "640 (1 of 2)"
    assert page.cell([never], "samples_to_80") == "never"


def test_the_best_point_is_chosen_once_every_point_was_tried_equally():
    study = plan.find_study("efficiency")
    assert study.tune is not None
    points = [name for name, _ in study.tune.points()]

    def tried(arm, point, seed, area):
        overrides = {**study.overrides(arm), **dict(study.tune.points())[point]}
        digest = plan.config_digest(plan.configured(study, overrides, seed))
        return record("gspo", seed, {"area": area}, stage="tune", digest=digest, study=study) | {
            "arm": f"{arm} {point}"
        }

    whole = [tried("gspo", point, 101, i / 100) for i, point in enumerate(points)]
    assert results.chosen(study, whole)["gspo"] == dict(study.tune.points())[points[-1]]
    assert "gspo" not in results.chosen(study, whole[:-1])
    assert "grpo" not in results.chosen(study, whole)


def test_a_fresh_record_takes_the_place_of_the_old_one_and_files_are_sorted_lines(tmp_path):
    first, other = record("gspo ε=2e-3", 2, {"gain": 0.1}), record("gspo ε=2e-3", 1, {"gain": 0.2})
    merged = results.replaced([first, other], [record("gspo ε=2e-3", 2, {"gain": 0.5})])
    results.write_records(tmp_path, STUDY, merged)
    lines = results.results_file(tmp_path, STUDY).read_text().splitlines()
    written = [json.loads(line.rstrip(",")) for line in lines if line.startswith('{"arm"')]
    assert [one["measures"]["gain"] for one in written] == [0.2, 0.5]
    # What the records share stands once, and is back when they are read.
    assert sum("2026-01-01" in line for line in lines) == 1
    ours, theirs = results.read_records(tmp_path, STUDY), sorted(merged, key=lambda r: r["seed"])
    assert [{k: v for k, v in r.items() if k != "session"} for r in ours] == theirs


@pytest.mark.run
@pytest.mark.parametrize("words", brief([("list",), ("show",), ("show", "clipping"), ("page",)], ("show", "clipping")))
def test_looking_at_studies_leaves_torch_alone(tmp_path, words):
    code = (
        "import sys; from gspo.cli.main import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "study", *words, "--docs", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.full
def test_the_committed_page_is_that_of_the_committed_results(tmp_path):
    docs = ROOT / "docs"
    found = pages.found(docs)
    drawn = {
        name: docs / "img" / "studies" / f"{name}.png"
        for name in found
        if plan.find_study(name).plots and any(r["stage"] == "test" for r in found[name])  # tuning runs are not drawn
    }
    assert (docs / "baselines.md").read_text() == pages.baselines_page(found, drawn)
    assert (docs / "when_to_use.md").read_text() == when.when_page(found)


def test_every_question_of_when_to_use_gspo_is_decided_by_a_check_of_its_study():
    for question in when.QUESTIONS:
        assert question.check in {check.says for check in plan.find_study(question.study).checks}
    assert {name for *_, studies in when.SETTINGS for name in studies} <= plan.studies().keys()
    text = when.when_page({})
    assert text.count("not run yet") >= len(when.QUESTIONS)


def test_the_edge_of_an_arm_is_the_largest_value_up_to_which_no_run_of_a_seed_collapsed(tmp_path):
    study = plan.find_study("moe_edge")
    grid = list(study.tasks)

    def runs(arm, seed, collapsed):
        return [
            record(f"{arm} @ {task}", seed, {"final": 0.5, "collapsed": float(i in collapsed)}, study=study)
            for i, task in enumerate(grid)
        ]

    # The third value collapsed: the edge is the second, although the fourth survived. All collapsed: below the first.
    found = results.current(study, [*runs("gspo", 1, {2, 4}), *runs("grpo", 1, {0, 1, 2, 3, 4}), *runs("gspo", 2, {})])
    values = [float(study.tasks[task][study.edge]) for task in grid]
    edges = results.by_seed(found, "gspo", "edge")
    assert {seed: 2**edge for seed, edge in edges.items()} == pytest.approx({1: values[1], 2: values[-1]})
    assert 2 ** results.by_seed(found, "grpo", "edge")[1] == pytest.approx(values[0] ** 2 / values[1])
    # A seed with a missing run has no edge.
    assert results.by_seed(results.current(study, runs("gspo", 1, {})[:-1]), "gspo", "edge") == {}
    assert page.decisions(study, found)[0].found.mean == pytest.approx(
        edges[1] - results.by_seed(found, "grpo", "edge")[1]
    )
    # Its table has no empty columns, and collapsed runs are a share with an interval within 0 and 1.
    assert page.tables(study, found)[""][0] == ["arm", "seeds", "edge"]
    assert page.tables(study, found)[grid[2]][1] == ["gspo", "2", "0.5 ± 0", "0.5 [0.09, 0.91]"]

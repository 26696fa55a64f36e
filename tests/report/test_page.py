"""The written page: whole, quick, closed to every network, and true to what it read."""

import base64
import hashlib
import html
import json
import re
import time

import numpy as np
import pytest
from made_runs import (
    HOSTILE,
    answer_row,
    append_metrics,
    eval_row,
    graded_row,
    make_run,
    sample_row,
    step_row,
    write_answers,
    write_samples,
)

from gspo.config.loaded import Origin, read_origins
from gspo.report.answers import answers, time_parts
from gspo.report.clip import TARGET, clip_story, suggest_eps
from gspo.report.page.data import config_lines, metric_table
from gspo.report.page.page import SCRIPTS, STYLES, asset, inert_json, write_report
from gspo.report.read import read_metrics, status_of
from gspo.report.samples import choose_files, choose_steps, read_block, sample_steps
from gspo.report.summary import summary_of
from gspo.runs.lock import RunLock


@pytest.fixture
def run(tmp_path):
    rows = [{"step": 0, **eval_row(0.3)}, *(step_row(s) for s in (1, 2)), step_row(3, **eval_row(0.9))]
    run = make_run(tmp_path / "exp" / "trial", rows)
    for step in (1, 2, 3):
        write_samples(run, step, [sample_row(step, i) for i in range(16)])
    return run


def data_of(page: str, kind: str) -> list:
    found = re.findall(rf'<script type="application/json" class="{kind}">(.*?)</script>', page, re.DOTALL)
    return [json.loads(text) for text in found]


def answers_of(path) -> dict:
    return {a["question"]: a for a in data_of(path.read_text(), "boot")[0]["overview"]["answers"]}


def test_the_page_holds_the_run_and_nothing_is_left_beside_it(run):
    path = write_report(run)
    assert path == run / "report.html"
    assert sorted(file.name for file in run.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html", "samples"]
    page = path.read_text()
    (boot,) = data_of(page, "boot")
    blocks = data_of(page, "samples")
    assert [block["step"] for block in blocks] == [1, 2, 3]
    assert blocks[1]["completion"][5] == "answer 5 of step 2"
    assert [row[0] for row in boot["metrics"]["rows"]] == [0, 1, 2, 3]
    assert boot["overview"]["name"] == "exp/trial"


def test_the_page_asks_no_network_and_its_policy_names_its_own_scripts_alone(run):
    page = write_report(run).read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    policy = html.unescape(policy)
    assert policy.startswith("default-src 'none';")
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    code = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    style = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert len(code) == len(SCRIPTS)
    assert len(style) == len(STYLES)
    for text in (*code, *style):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in policy
    assert "The MIT License" in page  # of the library inside
    without_data = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert not re.findall(
        r"""(?:src|href)=["']?(?!#)[^\s>"']+""", re.sub(r"<script>.*?</script>", "", without_data, flags=re.DOTALL)
    )
    assert not [url for url in re.findall(r"https?://[^\s\"'`)]+", without_data) if "github.com/leeoniya" not in url]


def test_no_asset_parses_text_as_markup_or_code():
    for name in ("text.js", "charts.js", "samples.js", "page.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|srcdoc", asset(name)
        )


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_cannot_leave_its_element_and_comes_back_whole(text, run):
    write_samples(run, 1, [sample_row(1, 0, prompt=text, completion=text, answer=text, failure=text)])
    append_metrics(run, step_row(4, **{f"reward/part_{text}": 1.0}))
    page = write_report(run).read_text(encoding="utf-8")
    block = data_of(page, "samples")[0]
    assert (block["prompts"][0], block["completion"][0], block["answer"][0], block["failure"][0]) == (text,) * 4
    assert len(re.findall(r"<script", page)) == len(SCRIPTS) + 1 + 3  # ours, the boot data, three blocks
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", page)
    assert f"reward/part_{text}" in data_of(page, "boot")[0]["metrics"]["names"]


def test_a_run_with_a_hostile_name_has_an_inert_title(tmp_path):
    run = make_run(tmp_path / "<b>&\u202e" / "<script>x", [step_row(1)])
    page = write_report(run).read_text()
    (title,) = re.findall(r"<title>(.*?)</title>", page)
    assert title.startswith("&lt;b&gt;&amp;\\u202e/")


def test_files_that_are_no_samples_are_left_out(run):
    folder = run / "samples"
    (folder / "step_000001.jsonl").write_bytes(
        b'{"step": 1, "seq\n[1,2]\nnull\n{"prompt": 7, "reward": "x", "log_s": 1e999}\n\xff\xfe\n'
    )
    (folder / "step_000001.safetensors").write_bytes(b"\xff" * 64)
    (folder / "step_000002.jsonl").write_bytes(b"[" * 100_000)
    (folder / "step_x.jsonl").write_text("{}")
    block = read_block(run, 1)
    assert (block["prompts"], block["reward"], block["log_s"], block["tokens"]) == (["7"], [None], [None], {})
    assert read_block(run, 2)["prompt"] == []
    assert list(sample_steps(run)) == [1, 2, 3]
    assert [b["step"] for b in data_of(write_report(run).read_text(), "samples")] == [1, 2, 3]


@pytest.mark.parametrize("rows", [[], [{"step": 0, **eval_row(0.5)}], [step_row(1)]])
def test_a_run_that_has_little_has_a_page(rows, tmp_path):
    (boot,) = data_of(write_report(make_run(tmp_path / "a" / "b", rows)).read_text(), "boot")
    assert len(boot["overview"]["answers"]) == 5


@pytest.mark.parametrize("missing", [name for name in step_row(1) if name != "step"])
def test_a_page_is_written_without_any_one_metric(missing, tmp_path):
    rows = [{k: v for k, v in step_row(s).items() if k != missing} for s in (1, 2)]
    assert write_report(make_run(tmp_path, rows)).stat().st_size > 50_000


def test_per_token_values_come_with_their_texts(run):
    tokens = {
        "4/tokens": np.array([5, 6, 7]), "4/behavior_logp": np.array([-1.0, -2.0, -3.0], np.float32),
        "4/logp": np.array([-1.5, -2.0, -2.0], np.float32), "4/entropy": np.array([0.1, np.nan, 0.3], np.float32),
        "9/tokens": np.array([5]), "9/logp": np.array([[1.0]]),
    }  # fmt: skip
    rows = [sample_row(1, i, pieces=["an", "sw", "er"] if i == 4 else None) for i in range(16)]
    write_samples(run, 1, rows, tokens)
    assert read_block(run, 1)["tokens"] == {
        "4": {"id": [5, 6, 7], "text": ["an", "sw", "er"], "logp": [-1.5, -2.0, -2.0], "ratio": [-0.5, 0.0, 1.0],
              "entropy": [0.1, None, 0.3]}
    }  # fmt: skip


def test_the_clipping_story_counts_by_mini_batch_and_sign():
    rows = [sample_row(1, i) for i in range(16)]
    columns = {
        name: [row[name] for row in rows]
        for name in ("log_s", "advantage", "minibatch", "clipped", "sequence", "length")
    }
    story = clip_story({"step": 1, **columns})
    # Sequences 7 and 15 are clipped, both with A > 0, in mini-batches 2 and 4.
    assert story["minibatch"] == [[4, 0, 0], [4, 0, 1], [4, 0, 0], [4, 0, 1]]
    assert story["quantiles"][3] == pytest.approx(np.median(columns["log_s"][4:]))
    assert abs(story["farthest"]["log_s"]) == 5e-4


def test_the_suggested_eps_clips_the_target_share_of_what_was_seen():
    generator = np.random.default_rng(0)
    log_s, advantage = generator.normal(0, 1e-3, 4000), np.where(np.arange(4000) % 2, 1.0, -1.0)
    block = {
        "step": 1, "log_s": log_s.tolist(), "advantage": advantage.tolist(), "minibatch": [1] * 4000,
        "clipped": [False] * 4000, "sequence": list(range(4000)), "length": [1] * 4000,
    }  # fmt: skip
    low, high = suggest_eps([clip_story(block, 1.5)], 1e-7, 1.5) or (0.0, 0.0)
    share = np.mean(np.where(advantage > 0, log_s > high, log_s < -low))
    assert share == pytest.approx(TARGET, abs=0.01)
    assert suggest_eps([clip_story(block, 1.5)], 0.01, 1.5) == (0.01, 0.015)  # never below the noise
    assert suggest_eps([], None, 1.5) is None


def test_answers_say_what_was_measured(run):
    said = answers_of(write_report(run))
    assert said["Did it learn?"]["verdict"] == "good"
    assert "30.0\xa0% → 90.0\xa0%" in said["Did it learn?"]["text"]
    assert said["Was anything clipped, and why?"]["text"].startswith("15.0\xa0% of the sequences: 10.0\xa0% with A < 0")
    assert "step 1, sequence 10" in said["Which sequences were the worst?"]["text"]
    assert "20,000 times the error" in said["Is my ε sensible?"]["more"]
    assert said["Where did the time go?"]["text"] == "50\xa0% sampling, 25\xa0% training, 25\xa0% everything else."


def test_a_run_whose_accuracy_did_not_change_is_told_so(tmp_path):
    rows = [{"step": 0, **eval_row(0.25)}, step_row(1, **eval_row(0.25))]
    said = answers_of(write_report(make_run(tmp_path / "same", rows)))["Did it learn?"]
    assert said["verdict"] == "bad"
    assert said["text"] == "No: held-out accuracy 25.0\xa0% → 25.0\xa0% on 512 problems."
    once = answers_of(write_report(make_run(tmp_path / "once", rows[:1])))["Did it learn?"]
    assert once["more"].startswith("Only one evaluation.")


def test_a_run_that_got_worse_or_whose_eps_is_noise_is_told_so(tmp_path):
    noisy = {"noise/log_s_p95_abs": 1e-3}
    rows = [{"step": 0, **eval_row(0.9)}, step_row(1, **noisy), step_row(2, **eval_row(0.3), **noisy)]
    said = answers_of(write_report(make_run(tmp_path, rows)))
    assert said["Did it learn?"]["verdict"] == "bad"
    assert said["Is my ε sensible?"]["verdict"] == "bad"


def test_held_out_answers_are_on_the_page_grouped_by_problem(run):
    answers = [answer_row(3, row, sample=k) for row in range(2) for k in range(2)]
    write_answers(run, 3, [*answers, answer_row(3, 0, source="other")])
    blocks = data_of(write_report(run).read_text(), "samples")
    assert [(block["kind"], block["step"]) for block in blocks] == [*(("samples", s) for s in (1, 2, 3)), ("evals", 3)]
    assert blocks[-1]["submission"] == [0, 0, 1, 1, 2]
    assert blocks[-1]["question"][0] == "0+1="
    few = choose_files(run, 8_000)
    assert ("evals", 3) in few
    assert len(few) < 4


def test_the_status_of_a_run_is_that_of_its_lock_and_its_last_message(tmp_path):
    run = make_run(tmp_path, [step_row(1)])
    planned = {"total_train_steps": 9}
    assert [status_of(run, steps, planned) for steps in (1, 9)] == ["failed", "finished"]
    for message, said in (
        ("finished after step 1", "finished"),
        ("stopped after step 1; run", "stopped"),
        ("x", "failed"),
    ):
        (run / "log.txt").write_text(f"2026-01-01 00:00:00 begin\n2026-01-01 00:00:01 {message}\n")
        assert status_of(run, 1, planned) == said
    lock = RunLock(run)
    assert status_of(run, 9, planned) == "running"
    lock.close()
    assert status_of(run, 1, planned) == "failed"


def test_graded_rewards_are_told_as_reward(tmp_path):
    rows = [{"step": 0, **graded_row(-0.5, 0.1)}, step_row(1, **graded_row(0.5, 0.1))]
    page = write_report(make_run(tmp_path, rows))
    said = answers_of(page)["Did it learn?"]
    assert (said["verdict"], said["text"]) == ("good", "Held-out reward -0.500 → 0.500 on 512 problems.")


def test_an_eps_far_from_the_suggested_one_deserves_a_look():
    rows = [step_row(s) for s in range(1, 4)]
    summary = summary_of(rows, by_sequence=True)
    verdicts = [answers(summary, rows, [], (low, 1.25 * low))[3] for low in (0.002, 0.0059, 0.0061, 0.0006)]
    assert [v["verdict"] for v in verdicts] == ["good", "good", "note", "note"]
    assert "3.1 times wider" in verdicts[2]["more"]
    assert "3.3 times narrower" in verdicts[3]["more"]


def test_parts_of_a_part_are_not_counted_twice():
    steps = [{"time/step_s": 10.0, "time/rollout_s": 6.0, "time/reward_s": 2.0, "time/train_s": 3.0, "time/new_s": 0.5}]
    parts = {part["name"]: part for part in time_parts(steps)}
    assert parts["reward"]["inside"] == "rollout"
    assert parts["rest"]["seconds"] == pytest.approx(0.5)
    assert sum(p["seconds"] for p in parts.values() if p["inside"] is None) == pytest.approx(10.0)


def test_keys_that_somebody_set_are_marked(tmp_path):
    config = "# head\nalgorithm: gspo  # run.yaml:3\nseed: 1  # default\nactor:\n  eps_clip: 0.1  # algorithm gspo\n"
    config += "  optimizer:\n    lr: 1.0  # command line\nrollout:\n  queue_size: 3  # from a.b\n"
    origins = {
        "algorithm": ("file", "run.yaml:3"), "seed": ("default", ""), "actor.eps_clip": ("algorithm", "gspo"),
        "actor.optimizer.lr": ("command line", ""), "rollout.queue_size": ("derived", "from a.b"),
    }  # fmt: skip
    lines = config_lines(make_run(tmp_path, [], config=config, origins=origins))
    assert [(line["key"], line["value"], line["origin"], line["by"]) for line in lines] == [
        ("algorithm", "gspo", "run.yaml:3", "user"), ("seed", "1", "default", "default"),
        ("actor.eps_clip", "0.1", "algorithm gspo", "derived"),
        ("actor.optimizer.lr", "1.0", "command line", "user"), ("rollout.queue_size", "3", "from a.b", "derived"),
    ]  # fmt: skip


@pytest.mark.parametrize("written", [None, "", "[]", "{", '{"seed": 3}', '{"seed": {"kind": []}}'])
def test_a_run_without_origins_opens_without_them(tmp_path, written):
    run = make_run(tmp_path, [], config="seed: 1  # default\n")
    if written is not None:
        (run / "origins.json").write_text(written)
    assert [(line["value"], line["by"]) for line in config_lines(run)] == [("1", "unknown")]
    assert read_origins(run) in ({}, {"seed": Origin([])})


def test_metrics_keep_their_columns_whatever_a_row_lacks():
    assert metric_table([{"step": 1, "a": 2.0}, {"step": 2, "b": float("inf")}]) == {
        "names": ["step", "a", "b"], "rows": [[1, 2.0, None], [2, None, None]]
    }  # fmt: skip
    assert "<" not in inert_json({"<a>&": "<b>"})


def test_samples_that_do_not_fit_are_spread_over_the_run(run):
    assert choose_steps({}, 5) == []
    assert choose_steps(dict.fromkeys(range(1, 101), 10), 50) == [1, 26, 51, 75, 100]
    size = (run / "samples" / "step_000001.jsonl").stat().st_size
    (boot,) = data_of(write_report(run, budget=int(2.5 * size)).read_text(), "boot")
    assert boot["kept_steps"] == 3
    assert [b["step"] for b in data_of((run / "report.html").read_text(), "samples")] == [1, 3]


def test_five_thousand_samples_are_written_in_seconds(tmp_path):
    run = make_run(tmp_path, [step_row(s) for s in range(1, 21)])
    for step in range(1, 21):
        write_samples(run, step, [sample_row(step, i, completion="word " * 200) for i in range(250)])
    start = time.process_time()  # of this process: the machine may be busy
    page = write_report(run).read_text()
    assert time.process_time() - start < 5
    assert sum(len(block["prompt"]) for block in data_of(page, "samples")) == 5000
    assert len(read_metrics(run)) == 20

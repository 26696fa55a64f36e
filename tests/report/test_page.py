"""The written page: whole, quick, closed to every network, and true to what it read."""

import base64
import hashlib
import html
import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import (
    HOSTILE,
    answer_row,
    append_metrics,
    eval_row,
    graded_row,
    make_run,
    make_trial,
    sample_row,
    step_row,
    write_answers,
    write_samples,
)

from gspo.config import Origin, read_origins
from gspo.report.cards import ACCEPTED, ENOUGH, TARGET, clip_story, suggest_eps, time_parts
from gspo.report.page.data import config_lines, metric_table
from gspo.report.page.page import SCRIPTS, STYLES, asset, inert_json, write_report
from gspo.report.read import read_metrics, status_of
from gspo.report.samples import choose_files, choose_steps, read_block, sample_steps
from gspo.report.summary import summarise, summary_of, summary_rows
from gspo.runs import RunLock


@pytest.fixture
def run(tmp_path):
    return make_trial(tmp_path, 3, ends_at=0.9)


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
    assert len(boot["overview"]["answers"]) == 5 + bool(rows and rows[-1]["step"])  # what next, once there is a step


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


def moves(seed, number, scale):
    """A block of sequences with heavy tails, and which of them a clip range clips."""
    generator = np.random.default_rng(seed)
    log_s, advantage = scale * generator.standard_t(3, number), generator.choice([-1.0, 0.0, 1.0], number)
    block = {
        "step": 1, "log_s": log_s.tolist(), "advantage": advantage.tolist(), "minibatch": [1] * number,
        "clipped": [False] * number, "sequence": list(range(number)), "length": [1] * number,
    }  # fmt: skip

    def clipped(eps):
        s = np.exp(log_s)
        return ((advantage > 0) & (s > 1 + eps[1])) | ((advantage < 0) & (s < 1 - eps[0]))

    return block, clipped, int((advantage != 0).sum())


@given(
    seed=st.integers(0, 10**6),
    number=st.integers(0, 1500),
    scale=st.floats(1e-4, 0.3),
    low=st.floats(1e-4, 0.3),
    ratio=st.floats(0.5, 2.0),
    noise=st.none() | st.floats(1e-6, 0.1),
)
def test_a_suggested_eps_is_wider_exactly_if_too_many_sequences_were_clipped(seed, number, scale, low, ratio, noise):
    block, clipped, can_be = moves(seed, number, scale)
    eps = low, ratio * low
    share = float(clipped(eps).sum()) / max(can_be, 1)
    found = suggest_eps([clip_story(block, ratio)], eps, share, noise)
    if can_be < ENOUGH or ACCEPTED[0] <= share <= ACCEPTED[1]:
        assert found is None
    elif found is not None:
        *wanted, num, total = found
        assert (wanted[0] > eps[0], wanted[1] > eps[1]) == (share > TARGET, share > TARGET)
        before, after = int(clipped(eps).sum()), int(clipped(wanted).sum())
        assert after <= before if share > TARGET else after >= before
        assert total == can_be
        assert abs(num - after) <= 1 + 0.02 * total


def test_the_suggested_eps_clips_the_target_share_of_what_was_seen():
    block, clipped, can_be = moves(0, 4000, 1e-3)
    story, eps = clip_story(block, 1.5), (1e-4, 1.5e-4)
    low, high, num, total = suggest_eps([story], eps, 0.7, 1e-7)
    assert (total, num / total) == (can_be, pytest.approx(TARGET, abs=0.01))
    assert clipped((low, high)).sum() / can_be == pytest.approx(TARGET, abs=0.01)
    assert suggest_eps([story], eps, 0.7, 0.01)[:2] == (0.01, 0.015)  # never below the noise
    # Several steps count together: one with extreme moves has the weight of its sequences.
    few, _, _ = moves(1, 40, 1.0)
    assert suggest_eps([story, clip_story(few, 1.5)], eps, 0.7, None)[0] < 2 * low
    for stories, share in (([], 0.7), ([story], 0.03), ([story], 0.15), ([clip_story(few, 1.5)], 0.7)):
        assert suggest_eps(stories, eps, share, None) is None


def eps_answer(tmp_path, rows, number=400, scale=1e-2, config="algorithm: gspo\n"):
    """The card about ε and the page's suggestion, for a run with these rows and the samples of one step."""
    block, _, _ = moves(3, number, scale)
    run = make_run(tmp_path, rows, config=config)
    names = ("log_s", "advantage", "minibatch", "clipped")
    write_samples(run, 1, [sample_row(1, i, **{n: block[n][i] for n in names}) for i in range(number)])
    shown = data_of(write_report(run).read_text(), "boot")[0]["overview"]
    answers = {answer["question"]: answer for answer in shown["answers"]}
    return answers["Is my ε sensible?"], shown["suggested"]


def shares(low, high, number=100):
    return {"clip/sequences_low": low, "clip/sequences_high": high, "clip/num_sequences": number}


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.0, "note"), (0.02, "note"), (0.03, "good"), (0.08, "good"), (0.15, "good"), (0.2, "note")],
)
def test_an_eps_is_judged_by_the_clipped_share_of_the_whole_run(tmp_path, share, verdict):
    found, suggested = eps_answer(tmp_path, [step_row(s, **shares(share, 0.0)) for s in range(1, 5)])
    assert found["verdict"] == verdict
    assert (suggested is not None) == ("would have clipped" in found["more"]) == (share == 0.2)


def test_the_clipped_share_is_of_all_sequences_and_the_text_has_their_number(tmp_path):
    # The mean of the shares is 27 %; three quarters of step 2 are only 6 of its 8 sequences.
    rows = [step_row(1, **shares(0.07, 0.0)), step_row(2, **shares(0.75, 0.0, 8)), step_row(3, **shares(0.0, 0.0))]
    found, suggested = eps_answer(tmp_path, rows)
    assert found["text"] == "ε 0.002 / 0.0025 clipped 13 of 208 sequences (6.2\xa0%)."
    assert (found["verdict"], suggested) == ("good", None)
    assert "13 of 208 sequences" in dict(summary_rows(summarise(tmp_path)))["clipped"]
    old = [{name: value for name, value in row.items() if name != "clip/num_sequences"} for row in rows]
    assert "of sequences" in dict(summary_rows(summary_of(old, by_sequence=True)))["clipped"]


@pytest.mark.parametrize(
    ("rows", "settings", "why"),
    [
        ([shares(0.7, 0.0, 19)], {"number": 190}, "Fewer than 200 sequences"),
        ([shares(0.7, 0.0)], {"config": "algorithm: gspo\nactor:\n  eps_clip: auto\n"}, ""),
        ([shares(0.7, 0.0)], {"number": 250}, ""),  # 162 of them have A ≠ 0
        ([shares(0.7, 0.0) | {"reward/mean": 0.37}, shares(0.7, 0.0) | {"reward/mean": 0.0}], {}, "far below its best"),
    ],
)
def test_no_eps_is_suggested_where_it_could_be_wrong(tmp_path, rows, settings, why):
    steps = [step_row(s, **(rows[0] if s == 1 else rows[-1])) for s in range(1, 11)]
    found, suggested = eps_answer(tmp_path, steps, **settings)
    assert suggested is None
    assert "would have clipped" not in found["more"]
    assert why in found["more"]
    assert found["verdict"] == (None if why else "note")


def test_the_same_run_gets_a_suggestion_without_these_reasons(tmp_path):
    found, suggested = eps_answer(tmp_path, [step_row(s, **shares(0.7, 0.0)) for s in range(1, 11)])
    assert suggested[0] > 0.002
    assert "would have clipped" in found["more"]


@pytest.mark.parametrize(
    ("rows", "collapsed"),
    [
        ([step_row(s, **{"reward/mean": 0.37 if s == 1 else 0.0}) for s in range(1, 11)], True),
        ([step_row(s, **{"reward/mean": 0.4 if s % 2 else 0.3}) for s in range(1, 11)], False),
        ([step_row(1, **{"reward/mean": 0.4}), step_row(2, **{"reward/mean": 0.1})], False),  # too few to tell
        ([{"step": 0, **eval_row(0.4)}, step_row(1, **eval_row(0.0))], True),
        ([{"step": 0, **eval_row(0.4, 8)}, step_row(1, **eval_row(0.15, 8))], False),  # may be chance
        ([step_row(s, **{"reward/mean": -0.1 * s}) for s in range(1, 11)], False),
        ([], False),
    ],
)
def test_a_run_that_ended_far_below_its_best_has_collapsed(rows, collapsed):
    assert summary_of(rows, by_sequence=True).collapsed == collapsed


def test_answers_say_what_was_measured(run):
    said = answers_of(write_report(run))
    assert said["Did it learn?"]["verdict"] == "good"
    assert "30.0\xa0% → 90.0\xa0%" in said["Did it learn?"]["text"]
    assert said["Was anything clipped, and why?"]["text"].startswith(
        "15.0\xa0% of the sequences (45 of 300): 10.0\xa0% with A < 0"
    )
    assert "step 1, sequence 10" in said["Which sequences were the worst?"]["text"]
    assert "20,000 times the error" in said["Is my ε sensible?"]["more"]
    assert said["Where did the time go?"]["text"] == "50\xa0% sampling, 25\xa0% training, 25\xa0% everything else."


@pytest.mark.parametrize(("tokens", "verdict"), [(0.04, "good"), (0.6, "bad")])
def test_with_token_ratios_the_share_of_clipped_tokens_is_judged(tmp_path, tokens, verdict):
    rows = [step_row(s, **shares(0.6, 0.3), **{"clip/tokens": tokens}) for s in (1, 2)]
    run = make_run(tmp_path, rows, config="algorithm: grpo\nactor:\n  importance_sampling_level: token\n")
    said = answers_of(write_report(run))["Was anything clipped, and why?"]
    assert said["text"].startswith("90.0\xa0% of the sequences have a clipped token (180 of 200): ")
    assert said["more"].startswith("These tokens had already moved")
    assert said["verdict"] == verdict


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


@pytest.mark.parametrize("has_proc", [True, False])
def test_the_status_of_a_run_is_that_of_its_lock_and_its_last_message(tmp_path, monkeypatch, has_proc):
    if not has_proc:  # macOS
        exists, read = os.path.exists, Path.read_text
        monkeypatch.setattr(os.path, "exists", lambda path: not str(path).startswith("/proc") and exists(path))
        hidden = lambda path, **kwargs: read(Path("/none") if str(path) == "/proc/locks" else path, **kwargs)  # noqa: E731
        monkeypatch.setattr(Path, "read_text", hidden)
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
    RunLock(run).close()  # the status has left no lock


def test_graded_rewards_are_told_as_reward(tmp_path):
    rows = [{"step": 0, **graded_row(-0.5, 0.1)}, step_row(1, **graded_row(0.5, 0.1))]
    page = write_report(make_run(tmp_path, rows))
    said = answers_of(page)["Did it learn?"]
    assert (said["verdict"], said["text"]) == ("good", "Held-out reward -0.500 → 0.500 on 512 problems.")


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


def test_a_step_shows_at_most_100_parts_of_rewards(tmp_path):
    (tmp_path / "samples").mkdir()
    lines = (json.dumps({"sequence": i, "reward": 1, "reward_parts": {f"k{i}": i}}) + "\n" for i in range(200))
    (tmp_path / "samples" / "step_000001.jsonl").write_text("".join(lines))
    parts = read_block(tmp_path, 1)["parts"]
    assert (len(parts), parts["k7"][7], parts["k7"][8]) == (100, 7.0, None)

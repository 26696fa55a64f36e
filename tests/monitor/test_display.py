"""What a model wrote is inert on the terminal, in the log, and comes back whole from the run directory (test 16)."""

import io
import json
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from gspo.monitor.display import Lines, LivePanel, make_display
from gspo.runs import RunDir
from gspo.system import duration, read_jsonl

# Window title, colour, 8-bit CSI, right-to-left override, markup, an emoji code, a line separator, a lone surrogate.
HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x9b31m\u202egnp.exe[/bold][red]:bomb:\u2028x\ud800\r\n\x00end"
FORBIDDEN = set("\x1b\x07\x9b\u202e\u2028\x00\r")


def test_hostile_completions_and_messages_are_inert_on_a_live_terminal():
    panel, out = on_terminal(200, 2, legacy_windows=False)
    panel.say(HOSTILE)
    panel.step({"step": 1, "reward/mean": 0.5}, (HOSTILE, HOSTILE, True))
    panel.close()
    shown = out.getvalue()
    assert "owned" in shown  # it was shown, as text
    assert "]0;owned\x07" not in shown
    assert "\x1b]" not in shown
    # Rich's own cursor movements are escape sequences; the colour asked for by the text is not among them.
    assert "\x1b[31m" not in shown
    assert not (FORBIDDEN - {"\x1b", "\r"}) & set(shown)
    assert "[red]:bomb:" in shown  # markup and emoji codes are letters here


def test_hostile_messages_are_inert_in_a_pipe(capsys):
    Lines(2).say(HOSTILE)
    shown = capsys.readouterr().out
    assert "owned" in shown
    assert not FORBIDDEN & set(shown)


def test_hostile_text_round_trips_through_the_samples_and_is_inert_in_the_log(tmp_path):
    run = RunDir(tmp_path)
    run.samples(1, [{"step": 1, "completion": HOSTILE}], {})
    run.log(HOSTILE)
    run.close()
    raw = (tmp_path / "samples" / "step_000001.jsonl").read_bytes()
    assert raw.count(b"\n") == 1
    assert json.loads(raw)["step"] == 1
    assert read_jsonl(tmp_path / "samples" / "step_000001.jsonl")[0]["completion"].startswith("\x1b]0;owned")
    assert not FORBIDDEN & set((tmp_path / "log.txt").read_text())


def on_terminal(width=80, total=9, **how):
    """A live panel, and what it writes."""
    out = io.StringIO()
    console = Console(file=out, **{"force_terminal": True, "width": width, "color_system": None, **how})
    return LivePanel(console, "gspo", total), out


METRICS = {
    "reward/mean": 0.5, "eval/accuracy": 0.25, "clip/sequences_low": 0.1, "clip/sequences_high": 0.05,
    "length/mean": 30.0, "policy/entropy": 0.04, "time/step_s": 2.0, "throughput/rollout_tokens_s": 1e4,
    "throughput/train_tokens_s": 2e4,
}  # fmt: skip


def panel_of(width, height=30, steps=3, total=9, example=("12+34=", "46" * 200, True)):
    """The last picture of a live panel, as lines."""
    panel, out = on_terminal(width, total, height=height)
    for step in range(1, steps + 1):
        panel.step({"step": step, **METRICS, "reward/mean": step / 10}, example)
    panel.close()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue().rpartition("\x1b[2K")[2])
    return [line.strip("\r") for line in last.split("\n") if line.strip()]


@pytest.mark.parametrize("width", [12, 20, 40, 60, 80, 200])
def test_the_panel_fits_its_terminal_a_line_per_figure(width):
    lines = panel_of(width)
    assert max(map(cell_len, lines)) <= width
    assert len(lines) == 9  # title, progress, five curves, speed, one completion
    if width >= 40:
        text = "\n".join(lines)
        for figure in ("reward", "held-out", "25.0%", "clipped", "15.0%", "length", "30.0", "s/step 2.00", "3/9"):
            assert figure in text
    if width >= 60:
        assert "0.100 → 0.300" in "\n".join(lines)
        assert "12 s left" in "\n".join(lines)


def test_a_short_terminal_shows_the_first_curves_alone():
    assert len(panel_of(80, height=10)) == 6


def test_lines_and_wide_characters_of_a_completion_do_not_change_the_panels_height():
    plain = panel_of(40)
    odd = panel_of(40, example=("問題\n" * 50, "答え\n\n\tは\n" * 50, False))
    assert len(odd) == len(plain)
    assert max(map(cell_len, odd)) <= 40


def test_a_long_completion_keeps_its_end_where_the_answer_is():
    assert panel_of(60, example=("q" * 300 + "=", "thinking " * 50 + ">952", True))[-1].endswith(">952")


def test_colour_is_left_out_where_nobody_wants_it(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    panel, out = on_terminal(80, 2, color_system="auto")
    panel.step({"step": 1, **METRICS}, ("12+34=", "46", True))
    panel.close()
    codes = {code for found in re.findall(r"\x1b\[([0-9;]*)m", out.getvalue()) for code in found.split(";")}
    assert codes <= {"", "0", "1", "2"}  # bold and dim are no colours
    assert "1" in codes


@pytest.mark.parametrize(
    ("environment", "encoding", "is_live"),
    [
        ({"TERM": "xterm-256color"}, "utf-8", True),
        ({"TERM": "dumb"}, "utf-8", False),
        ({"TERM": "unknown"}, "utf-8", False),
        ({"TERM": "xterm"}, "latin-1", False),
    ],
)
def test_the_panel_is_for_terminals_that_can_show_it(environment, encoding, is_live, monkeypatch):
    class Terminal(io.TextIOWrapper):
        def isatty(self):
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", Terminal(io.BytesIO(), encoding=encoding))
    display = make_display("gspo", 2)
    display.close()
    assert isinstance(display, LivePanel if is_live else Lines)


def test_a_pipe_gets_every_figure_and_a_dumb_terminal_what_a_line_holds(capsys):
    Lines(60).step({"step": 7, **METRICS}, None)
    whole = capsys.readouterr().out
    expected = (
        "step  7/60  reward 0.500  held-out 25.0%  clipped 15.0%  length 30.0  s/step 2.00  left 1 min 46 s  "
        "entropy 0.040"
    )
    assert whole.startswith(expected)
    assert "train tok/s 20,000" in whole
    for width in (20, 40, 60):
        Lines(60, width).step({"step": 7, **METRICS}, None)
        line = capsys.readouterr().out.rstrip("\n")
        assert line.startswith("step  7/60")
        assert len(line) <= width


def test_graded_rewards_are_shown_as_held_out_reward_with_its_interval(capsys):
    graded = {"step": 7, "eval/accuracy": 0.0, "eval/reward": 0.3125, "eval/reward_ci": 0.02, "eval/graded": 0.9}
    Lines(60).step(graded, None)
    assert capsys.readouterr().out == "step  7/60  held-out reward 0.312 ± 0.020\n"
    panel, out = on_terminal(100)
    panel.step({"step": 0, "eval/accuracy": 0.0, "eval/reward": 0.0, "eval/graded": 0.0}, None)
    panel.step(graded, None)
    panel.close()
    assert "0.0% → reward 0.312 ± 0.020" in out.getvalue()


def test_the_time_left_is_reckoned_from_the_last_steps(capsys):
    lines = Lines(100)
    for step in range(1, 51):  # the first steps of a run are slow
        lines.step({"step": step, "time/step_s": 100.0 if step <= 20 else 1.0}, None)
    assert capsys.readouterr().out.rstrip().endswith("left 50 s")
    lines.step({"step": 100, "time/step_s": 1.0}, None)
    assert "left" not in capsys.readouterr().out


def test_a_resumed_run_starts_where_it_was():
    panel, out = on_terminal()
    panel.start_at(5)
    panel.close()
    assert "step 5/9" in out.getvalue()
    assert "ended" in out.getvalue()  # not done: four steps are left


def test_times_are_said_as_people_say_them():
    assert [duration(s) for s in (0, 59.4, 119)] == ["0 s", "59.4 s", "1 min 59 s"]
    assert [duration(s) for s in (3600, 90_000)] == ["1 h 0 min", "25 h 0 min"]

"""What a model wrote is inert on the terminal, in the log, and comes back whole from the run directory (test 16)."""

import io
import json

import pytest
from rich.console import Console

from gspo.train.display import Lines, LivePanel
from gspo.train.rundir import RunDir, read_jsonl

# Window title, colour, 8-bit CSI, right-to-left override, markup, an emoji code, a line separator, a lone surrogate.
HOSTILE = "\x1b]0;owned\x07\x1b[31mred\x9b31m\u202egnp.exe[/bold][red]:bomb:\u2028x\ud800\r\n\x00end"
FORBIDDEN = set("\x1b\x07\x9b\u202e\u2028\x00\r")


def test_hostile_completions_and_messages_are_inert_on_a_live_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=200, color_system=None, legacy_windows=False)
    panel = LivePanel(console, "gspo", 2)
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


@pytest.mark.parametrize("width", [20, 40, 200])
def test_the_panel_fits_narrow_terminals(width):
    out = io.StringIO()
    panel = LivePanel(Console(file=out, force_terminal=True, width=width, color_system=None), "gspo", 2)
    panel.step({"step": 1, "reward/mean": 0.5}, ("12+34=", "46" * 40, True))
    panel.close()
    lines = [line for line in out.getvalue().split("\n") if "\x1b" not in line]
    assert lines
    assert max(map(len, lines)) <= width

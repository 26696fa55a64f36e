"""Progress lines, and the command that installs an extra."""

import json

from gspo.system import imports, text


def test_without_a_terminal_the_first_line_comes_at_once_and_later_ones_say_the_time_left(capsys, monkeypatch):
    monkeypatch.setattr(text, "LINE_EVERY_S", 0.0)
    with text.progress("building it", lines=True, note=", only once") as tell:
        assert capsys.readouterr().err == "gspo: building it, only once\n"
        tell(1, 4)
        assert capsys.readouterr().err == "gspo: building it: 25 %, about 0 s left\n"
    with text.progress("quiet") as tell:
        tell(1, 2)
    assert capsys.readouterr().err == ""


class _Installed:
    def __init__(self, origin):
        self.origin = origin

    def read_text(self, name):
        return self.origin


def test_the_install_command_is_right_for_a_wheel_and_for_a_clone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    editable = json.dumps({"url": "file:///x", "dir_info": {"editable": True}})
    monkeypatch.setattr(imports.importlib.metadata, "distribution", lambda name: _Installed(None))
    assert imports.install_command("lora") == "pip install 'gspo[lora]'"
    monkeypatch.setattr(imports.importlib.metadata, "distribution", lambda name: _Installed(editable))
    assert imports.install_command("lora").startswith("pip install -e '/")

"""The record of the user's code in the run directory."""

from gspo.runs.directory import changed_code


def test_a_changed_file_is_named_once_and_new_or_removed_functions_are_not(tmp_path):
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("a = 1\n")
    two.write_text("b = 1\n")
    assert changed_code(tmp_path, {"reward one.py:f": one}) == []
    assert changed_code(tmp_path, {"reward one.py:f": one, "filter two.py:g": two}) == []
    one.write_text("a = 2\n")
    (said,) = changed_code(tmp_path, {"reward one.py:f": one, "filter two.py:g": two})
    assert said.startswith("warning: reward one.py:f has changed since this run was last started")
    assert str(one) in said
    assert changed_code(tmp_path, {"reward one.py:f": one}) == []
    one.unlink()
    assert len(changed_code(tmp_path, {"reward one.py:f": one})) == 1
    (tmp_path / "code.json").write_text("[] torn")
    assert changed_code(tmp_path, {"reward one.py:f": one}) == []

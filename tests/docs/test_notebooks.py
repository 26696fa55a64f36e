"""The notebooks run as they are, and were run before they were committed."""

from pathlib import Path

import nbformat
import pytest
from made_runs import eval_row, make_run, step_row
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def run_notebook(notebook: nbformat.NotebookNode, folder: Path) -> list[dict]:
    """The outputs of all cells, as MIME bundles; an error of a cell is raised."""
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=280, kernel_name="python3", resources=place).execute()
    return [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", ())]


def test_there_are_four_notebooks_with_small_outputs():
    assert [path.stem for path in NOTEBOOKS] == ["inside_trl", "quickstart", "reading_a_run", "your_reward_and_data"]
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), f"{path}: run it from the top"
        assert not any(output.output_type == "error" for cell in code for output in cell.outputs), path
        assert path.stat().st_size < 100_000, f"{path}: outputs are too large for a repository"
        assert "/work/" not in path.read_text(), f"{path}: it shows a path of the machine that ran it"


@pytest.mark.run
def test_a_notebook_shows_a_run_as_tables_and_a_figure(tmp_path):
    rows = [{"step": 0, **eval_row(0.3)}, step_row(1), step_row(2, **eval_row(0.9))]
    make_run(tmp_path / "run", rows)
    sources = [
        "from gspo import Run",
        "run = Run('run')",
        "run",
        "run.metrics('reward/mean')",
        "run.plot('reward/mean')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    shown = run_notebook(notebook, tmp_path)
    assert "held-out accuracy" in shown[0]["text/html"]
    assert "reward/mean" in shown[1]["text/html"]
    assert shown[2]["image/png"]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    shown = run_notebook(notebook, tmp_path)
    assert any("<progress" in data.get("text/html", "") for data in shown)  # the live panel of the run

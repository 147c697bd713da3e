"""The notebooks run from the first cell to the last, and are committed with what they show."""

import os
from pathlib import Path

import nbformat
import pytest

nb_run = pytest.importorskip("nbmake.nb_run", reason="runs notebooks")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
# The agents of the notebooks are trained for as long as takes every line once.
LONG = "BITS, UPDATES, SEEDS = 5, 400, 3"
SHORT = "BITS, UPDATES, SEEDS = 5, 80, 1"


# What runs the kernel leaves sockets and warnings of its own behind.
@pytest.mark.filterwarnings("ignore")
def test_every_cell_runs(tmp_path, monkeypatch):
    # The kernel is another process, which the package need not be installed for.
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    )
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    # One process for all of them, as it takes seconds to start; none sees the names of another.
    cells = []
    for path in NOTEBOOKS:
        text = path.read_text()
        assert LONG in text or path.stem != "mixing"
        notebook = nbformat.reads(text.replace(LONG, SHORT), 4)
        cells += [nbformat.v4.new_code_cell("%reset -f"), *notebook.cells]
    together = nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)
    nbformat.write(together, tmp_path / "all.ipynb")

    result = nb_run.NotebookRun(tmp_path / "all.ipynb", 300).execute()

    assert result.error is None, result.error.summary + result.error.trace


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_there(path):
    cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]

    assert not any(output.output_type == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert all(cell.execution_count for cell in cells)

"""The notebooks run as they stand in the repository, each in its own kernel, and their outputs are there."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.bench_command import PATIENCE_S
from tests.support.places import ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
assert len(NOTEBOOKS) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_executes_and_its_committed_outputs_are_whole(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(output.output_type in ("error", "stream") for cell in code for output in cell.outputs)
    NotebookClient(notebook, timeout=PATIENCE_S, resources={"metadata": {"path": str(FOLDER)}}).execute()
    assert not any(output.output_type in ("error", "stream") for cell in code for output in cell.outputs)

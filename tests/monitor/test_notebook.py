"""What a Jupyter kernel shows of a run: plain lines in the cell that trains, written by a thread."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

CELL = """
import sys
sys.path[:0] = {path!r}
from kit import small
import lockstep
config = small.config(run={{"steps": 30, "folder": {folder!r}}}, monitor={{"every": 10, "tensorboard": False}})
finished = lockstep.train(config)
"""


def test_a_run_in_a_notebook_prints_plain_lines_below_its_cell(tmp_path: Path) -> None:
    client = pytest.importorskip("nbclient", reason="nbclient isn't installed")
    pytest.importorskip("ipykernel", reason="ipykernel isn't installed")
    import nbformat

    cells = [
        nbformat.v4.new_code_cell(CELL.format(path=sys.path, folder=str(tmp_path / "run"))),
        nbformat.v4.new_code_cell("print(finished.summary['steps'])"),
    ]
    notebook: Any = nbformat.v4.new_notebook(cells=cells)
    client.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    first, second = ("".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells)
    lines = first.splitlines()
    assert any(line.startswith("step 1/30  loss") for line in lines)
    assert any(line.startswith("step 30/30  loss") for line in lines)
    assert "done: 30 steps, " in first
    assert "\x1b" not in first
    assert "Traceback" not in first
    assert second == "30\n"

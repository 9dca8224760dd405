"""A run in a Jupyter kernel: plain lines below the cell that trains, and ranks that get what cells define."""

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

DEFINITIONS = """
import torch
from torch import nn
class Cells(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.eye(4)[index % 4], index % 3
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.first.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen += self.training
        return self.head(torch.tanh(self.first(x)))
def trained(folder, **options):
    torch.manual_seed(0)
    net = Net()
    config = small.config(run={{"steps": 3, "folder": {folder!r} + folder}}, parallel={{"strategy": "ddp"}})
    data = {{"train_dataset": Cells(), "collate": lambda items: torch.utils.data.default_collate(items)}}
    loss = lockstep.train(config, model=net, objective=nn.CrossEntropyLoss(), **data, **options).summary["loss"]
    return loss, net
"""
IN_RANKS = """
(one, net), (two, of_ranks) = trained("1"), trained("2", ranks=2)
values = [[*module.state_dict().values()] for module in (net, of_ranks)]
print(abs(one - two) < 1e-6, all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*values)), float(of_ranks.seen))
"""


def test_a_run_in_a_notebook_prints_plain_lines_and_its_ranks_have_what_cells_define(tmp_path: Path) -> None:
    client = pytest.importorskip("nbclient", reason="nbclient isn't installed")
    pytest.importorskip("ipykernel", reason="ipykernel isn't installed")
    import nbformat

    cells = [
        nbformat.v4.new_code_cell(CELL.format(path=sys.path, folder=str(tmp_path / "run"))),
        nbformat.v4.new_code_cell("print(finished.summary['steps'])"),
        nbformat.v4.new_code_cell(DEFINITIONS.format(folder=str(tmp_path / "ranks"))),
        nbformat.v4.new_code_cell(IN_RANKS),
    ]
    notebook: Any = nbformat.v4.new_notebook(cells=cells)
    client.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    first, second, _, in_ranks = ("".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells)
    lines = first.splitlines()
    assert any(line.startswith("step 1/30  loss") for line in lines)
    assert any(line.startswith("step 30/30  loss") for line in lines)
    assert "done: 30 steps, " in first
    assert "\x1b" not in first
    assert "Traceback" not in first
    assert second == "30\n"
    assert in_ranks.endswith("True True 3.0\n"), in_ranks

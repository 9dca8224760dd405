"""How many Python functions a steady update calls: the number may only fall, and is lowered here when it has."""

from __future__ import annotations

import sys
from typing import Any

import torch
from kit.worlds import in_process, in_world
from torch.utils.data import Dataset, TensorDataset

import lockstep

MOST_FROM_TENSORS = 138
MOST_FROM_ITEMS = 192
MOST_UNDER_DDP = 190
FIRST, STEPS = 35, 62  # updates before 33, and some powers of two, do more


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((8,), index / 4096), "labels": torch.tensor(index % 3)}


class ByName(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def calls(dataset: Dataset[Any], strategy: str) -> int:
    """Return the median over updates."""
    counted = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event == "call"

    config = {
        "batch": {"global_size": 16},
        "optim": {"lr": 0.01},
        "run": {"steps": STEPS},
        "precision": {"compute": "fp32"},
        "objective": {"kind": "classification"},
        "parallel": {"strategy": strategy},
        "launch": {"device": "cpu"},
    }
    numbers: list[int] = []
    with lockstep.session(config, model=ByName(8, 3), train_dataset=dataset) as session:
        sys.setprofile(count)
        for _ in session:
            numbers.append(counted)
            counted = 0
        sys.setprofile(None)
    return sorted(numbers[FIRST:])[len(numbers[FIRST:]) // 2]


def test_an_update_from_tensors() -> None:
    tensors = TensorDataset(torch.randn(4096, 8), torch.randint(0, 3, (4096,)))
    assert in_process(calls, tensors, "single") <= MOST_FROM_TENSORS


def test_an_update_from_items() -> None:
    assert in_process(calls, Items(), "single") <= MOST_FROM_ITEMS


def test_an_update_under_ddp() -> None:
    tensors = TensorDataset(torch.randn(4096, 8), torch.randint(0, 3, (4096,)))
    assert max(in_world(2, calls, tensors, "ddp")) <= MOST_UNDER_DDP

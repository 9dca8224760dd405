"""How many Python functions a steady update calls: the number may only fall, and is lowered here when it has.

The updates with the fewest calls have no more than the limit, so one more call in each update fails. About every second
update has one more, and on a busy machine some have others; so a quarter of all may have one more than the limit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from kit.worlds import in_process, in_world
from torch.utils.data import Dataset, TensorDataset

import lockstep

MOST_FROM_TENSORS = 111
MOST_FROM_ITEMS = 157
MOST_UNDER_DDP = 163
MOST_IN_A_RUN = 118  # a user's monitor, which counts, has five of them
MOST_IN_A_RUN_UNDER_DDP = 179
MOST_WITH_ALL_GUARDS = 153  # and monitors
FIRST, STEPS = 35, 62  # updates before 33, and some powers of two, do more


class Items(Dataset[Any]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((8,), index / 4096), "labels": torch.tensor(index % 3)}


class ByName(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def calls(dataset: Dataset[Any], strategy: str) -> list[int]:
    """Return those of each update, from the fewest on."""
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
    return sorted(numbers[FIRST:])


def keeps(numbers: list[int], most: int) -> bool:
    print(numbers)
    return numbers[0] <= most and numbers[len(numbers) // 4] <= most + 1


def test_an_update_from_tensors() -> None:
    tensors = TensorDataset(torch.randn(4096, 8), torch.randint(0, 3, (4096,)))
    assert keeps(in_process(calls, tensors, "single"), MOST_FROM_TENSORS)


def test_an_update_from_items() -> None:
    assert keeps(in_process(calls, Items(), "single"), MOST_FROM_ITEMS)


def test_an_update_under_ddp() -> None:
    tensors = TensorDataset(torch.randn(4096, 8), torch.randint(0, 3, (4096,)))
    assert all(keeps(numbers, MOST_UNDER_DDP) for numbers in in_world(2, calls, tensors, "ddp"))


# --- a whole run: monitors, saves, snapshots and guards as by default, or all of them ---------------------------------


class Counting(lockstep.extend.Monitor):
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._counted = 0

    def see(self, report: Any) -> tuple[()]:
        sys.setprofile(None)
        self.numbers.append(self._counted)
        self._counted = 0
        sys.setprofile(self._count)
        return ()

    def _count(self, frame: object, event: str, argument: object) -> None:
        self._counted += event == "call"


ALL_GUARDS = {
    "recovery": {"bad_numbers": {"spike": "skip"}, "compare_every": 100},
    "data": {"bad_samples": {"policy": "skip"}},
    "monitor": {"every": 1, "meter_seconds": 0.1},
    "checkpoint": {"every": "20 steps"},
}


def calls_in_a_run(strategy: str, guards: dict[str, Any], folder: Path) -> list[int]:
    """Return what `calls` does; empty on ranks without monitors."""
    tensors, monitor = TensorDataset(torch.randn(4096, 8), torch.randint(0, 3, (4096,))), Counting()
    config = {
        "batch": {"global_size": 16},
        "optim": {"lr": 0.01},
        "run": {"steps": STEPS, "folder": str(folder)},
        "precision": {"compute": "fp32"},
        "objective": {"kind": "classification"},
        "parallel": {"strategy": strategy},
        "launch": {"device": "cpu"},
        **guards,
    }
    lockstep.train(config, model=ByName(8, 3), train_dataset=tensors, monitors=[monitor])
    sys.setprofile(None)
    return sorted(monitor.numbers[FIRST:])


def test_an_update_of_a_run(tmp_path: Path) -> None:
    default, all_on = (
        in_process(calls_in_a_run, "single", guards, tmp_path / name)
        for name, guards in {"default": {}, "all": ALL_GUARDS}.items()
    )
    assert keeps(default, MOST_IN_A_RUN)
    assert keeps(all_on, MOST_WITH_ALL_GUARDS)


def test_an_update_of_a_run_under_ddp(tmp_path: Path) -> None:
    first, other = in_world(2, calls_in_a_run, "ddp", {}, tmp_path / "run")
    assert keeps(first, MOST_IN_A_RUN_UNDER_DDP)
    assert other == []

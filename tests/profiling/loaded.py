"""Datasets whose cost is known, for the profile of the loader."""

from __future__ import annotations

import time
from typing import Any

import torch
from kit import small

from lockstep.config.loading import validate
from lockstep.profiling.loading import DataProfile, profile_data


class Slow(torch.utils.data.Dataset[Any]):
    """Takes 2 ms to read a sample, 60 ms for one of them, and 1 ms for a transform."""

    def __init__(self, samples: int = 60, milliseconds: float = 2.0, slow: int = -1, torn: int = -1) -> None:
        self._samples, self._milliseconds, self._slow, self._torn = samples, milliseconds, slow, torn
        self.transform = self._transformed

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        if index == self._torn:
            raise ValueError("torn")
        time.sleep(0.06 if index == self._slow else self._milliseconds / 1000)
        return self.transform(torch.full((4,), float(index))), index % 3

    def _transformed(self, point: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return point


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield torch.zeros(4), 0


def config(target: str = "Slow", **arguments: Any) -> dict[str, Any]:
    data = {"train": {"kind": "custom", "target": f"profiling.loaded:{target}", "arguments": arguments}}
    return small.config(data=data, batch={"global_size": 20, "micro_size": 10})


def profile(config: dict[str, Any], seconds: float = 1.5, update_seconds: float | None = None) -> DataProfile:
    return profile_data(validate(config), seconds, update_seconds, trust_remote_code=False)

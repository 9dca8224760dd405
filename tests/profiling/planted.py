"""Runs with a bottleneck each, which `lockstep profile` and `lockstep explain` must name; both read the same runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from kit import small
from torch import nn
from torch.profiler import record_function

import lockstep


class Reading(small.Net):
    """Reads numbers on the host."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            points.sum().item()
        return super().forward(points)


class SlowOnRankOne(small.Net):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(0.02)
        return super().forward(points)


class ManySmall(small.Net):
    """Has a thousand operators that do next to nothing."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        for _ in range(1000):
            points = points + 0.0
        return super().forward(points)


class Large(small.Net):
    """Is large to save."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(2_000_000))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points) + 0 * self.unused[0]


class SlowPoints(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self._points = small.points()

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return self._points[index]


DATA = {"train": {"kind": "custom", "target": "profiling.planted:SlowPoints"}}
SAVES = {"every": "1 steps", "asynchronous": False}


def train(folder: Path, model: str, steps: int = 7, **sections: Any) -> None:
    target = f"kit.small:{model}" if model == "Net" else f"profiling.planted:{model}"
    config = small.config(
        run={"steps": steps, "folder": str(folder)},
        monitor={"every": 4, "tensorboard": False, "progress": "none"},
        **{"profile": {"steps": "4..6", "ranks": "all", "memory": False}, **sections},
    )
    lockstep.train({**config, "model": {"kind": "custom", "target": target}})


def slow_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Work.wait` as on a link with a latency of 50 ms."""

    def slow(work: dist.Work, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return wait(work, *arguments, **options)

    return slow


ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("Reading", {"data": DATA}),
    "small": ("ManySmall", {}),
    "save": ("Large", {"checkpoint": SAVES}),
    "tiny": ("Net", {"batch": {"global_size": 13, "micro_size": 1}}),
}


def train_alone(folder: Path, *names: str) -> None:
    for name in names or ALONE:
        model, sections = ALONE[name]
        train(folder / name, model, **sections)


def train_on_two(folder: Path) -> None:
    with small.in_group():
        train(folder / "rank", "SlowOnRankOne", parallel={"strategy": "ddp"})
        with patch.object(dist.Work, "wait", slow_wait(dist.Work.wait)):
            train(folder / "link", "Net", parallel={"strategy": "ddp"})


class SlowBackward(torch.autograd.Function):
    """The identity, with a backward that takes 45 ms."""

    @staticmethod
    def forward(ctx: Any, points: torch.Tensor) -> torch.Tensor:
        return points.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        with record_function("mine/backward"):
            time.sleep(0.045)
        return gradient


class Annotated(small.Net):
    """Marks its forward and its backward for torch's profiler; the forward takes 30 ms."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        with record_function("mine/forward"):
            time.sleep(0.03)
            outputs: torch.Tensor = SlowBackward.apply(super().forward(points))
        return outputs


class AnnotatedPoints(SlowPoints):
    def __getitem__(self, index: int) -> Any:
        with record_function("mine/data"):
            return super().__getitem__(index)


def train_annotated(folder: Path) -> None:
    data = {"train": {"kind": "custom", "target": "profiling.planted:AnnotatedPoints"}}
    train(folder, "Annotated", steps=9, data=data, profile={"steps": "4..8", "memory": False})

"""The smallest thing that learns: points in four dims, three classes, a net of 67 parameters.

config(...) --> lockstep.session --> a millisecond an update
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.core.records import Batch


def points(samples: int = 40, seed: int = 0) -> TensorDataset:
    """Points [samples, 4] around their classes' centers."""
    draws = torch.Generator().manual_seed(seed)
    classes = torch.randint(3, (samples,), generator=draws)
    return TensorDataset(torch.eye(4)[classes] + 0.3 * torch.randn(samples, 4, generator=draws), classes)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(points)))


class Rows:
    """`points` as rows of a table have them: lists and numbers by the names of columns."""

    def __init__(self, samples: int = 40, seed: int = 0) -> None:
        self._points, self._classes = points(samples, seed).tensors

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"points": self._points[index].tolist(), "name": str(index), "label": int(self._classes[index])}


class Texts:
    """Rows of token ids and their labels."""

    def __init__(self, inputs: str = "input_ids") -> None:
        self._inputs = inputs
        self._ids = torch.randint(64, (40, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {self._inputs: self._ids[index], "labels": self._ids[index]}


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class WithSpare(Net):
    """Has a layer that its forward never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


class WithBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(points))


class WithScale(Net):
    """Has a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points * self.scale)


class WithTies(Net):
    """Two layers share a weight, a third has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.second.weight = self.first.weight

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(self.third(torch.tanh(self.second(self.first(points)))))


class CrossEntropy:
    """The least that an objective needs."""

    def count(self, batch: Batch) -> int:
        return batch.samples

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(outputs.float(), batch.targets, reduction="sum")


class Times(CrossEntropy):
    """The loss times a constant."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().loss_sum(outputs, batch) * self._factor


class NanAt(CrossEntropy):
    """Its loss is NaN at some of its calls (a call an update, without accumulation), perhaps on one rank alone."""

    def __init__(self, calls: range, here: bool = True) -> None:
        self._poisoned = calls if here else range(0)
        self._call = -1

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        self._call += 1
        loss = super().loss_sum(outputs, batch)
        return loss * float("nan") if self._call in self._poisoned else loss


class Averaged(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al. 2024, arXiv:2405.15682): trained at y, evaluated at the average x."""

    def __init__(self, groups: Any, lr: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "steps": 0, "trains": False})

    def _move(self, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "z" in self.state[parameter]:
                    parameter.data.lerp_(self.state[parameter]["z"], weight)

    def eval(self) -> None:
        if self.param_groups[0]["trains"]:
            self._move(1 - 1 / 0.9)
        for group in self.param_groups:
            group["trains"] = False

    def train(self) -> None:
        if not self.param_groups[0]["trains"]:
            self._move(1 - 0.9)
        for group in self.param_groups:
            group["trains"] = True

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            assert group["trains"], "train() comes first"
            group["steps"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                z = state.setdefault("z", parameter.detach().clone())
                parameter.lerp_(z, 1 / group["steps"])
                parameter.add_(parameter.grad, alpha=group["lr"] * (0.9 * (1 - 1 / group["steps"]) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])


def config(model: str = "Net", **sections: Any) -> dict[str, Any]:
    """40 samples in updates of 13, so that the fourth update is the epoch's smaller last one."""
    evaluation = {"kind": "custom", "target": "kit.small:points", "arguments": {"samples": 11, "seed": 1}}
    return {
        "model": {"kind": "custom", "target": f"kit.small:{model}"},
        "objective": {"kind": "classification"},
        "data": {"train": {"kind": "custom", "target": "kit.small:points"}, "evaluation": {"held-out": evaluation}},
        "batch": {"global_size": 13},
        "optim": {"name": "adamw", "lr": 0.01},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "monitor": {"every": 2, "tensorboard": False, "progress": "none"},
        "run": {"steps": 8},
        "recovery": {"restarts": 0},  # a failure is what most tests look at
        **sections,
    }


def weights(module: nn.Module) -> dict[str, np.ndarray]:
    """A copy of each parameter, which can travel between processes."""
    return {name: parameter.detach().numpy().copy() for name, parameter in module.named_parameters()}


@contextmanager
def in_group() -> Iterator[None]:
    """Several sessions in one process group, as a user's own program would have them."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def refusal(config: dict[str, Any], updates: int = 2) -> str:
    """The message with which a session on this rank refuses the config, at its start or in its first updates."""
    import lockstep

    with contextlib.ExitStack() as stack:
        if (
            int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
        ):  # or one rank refuses, and ends, while another still joins it
            stack.enter_context(in_group())
            dist.barrier()
        try:
            with lockstep.session(config) as session:
                for report in session:
                    if report.step == updates:
                        return ""
        except lockstep.ConfigError as error:
            return str(error)
        except RuntimeError as error:  # another rank's refusal, noticed by this one
            return f"RuntimeError: {error}"
    return ""


def refusals(configs: list[dict[str, Any]]) -> list[str]:
    """Of several sessions in one process group."""
    with in_group():
        return [refusal(asked) for asked in configs]


class Experts(Net):
    """Two layers, of which a point uses one, by the sign of its first dim. A batch may leave one of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(4, 4)
        self.high = nn.Linear(4, 4)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        high = points[:, 0] > 0.5
        mixed = torch.zeros_like(points)
        for chosen, layer in ((high, self.high), (~high, self.low)):
            if chosen.any():
                mixed = mixed.index_add(0, chosen.nonzero().flatten(), layer(points[chosen]))
        return super().forward(points + mixed)


class FewRows(Net):
    """Has a large parameter whose first dim is smaller than most numbers of ranks, as that of all experts is."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(2, 256, 256) / 16)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points + points @ self.experts.mean(0)[:4, :4])


class Step(nn.Module):
    """A layer and what it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return points + torch.tanh(self.inner(points))


class SkippedSteps(Net):
    """Runs each step for some of the points alone, and not at all if there are none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Step() for _ in range(4))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        found = points
        for place, step in enumerate(self.steps):
            chosen = (points[:, place % 3] > 0.6).nonzero().flatten()
            if len(chosen):
                found = found.index_copy(0, chosen, step(found[chosen]))
        return super().forward(found)


class Mixture(nn.Module):
    """Each point goes through one of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleList(Step() for _ in range(3))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        routed = self.router(points)
        which, mixed = routed[:, :3].argmax(-1), torch.zeros_like(points)
        for place, expert in enumerate(self.experts):
            chosen = (which == place).nonzero().flatten()
            if len(chosen):
                mixed = mixed.index_add(0, chosen, expert(routed[chosen]))
        return points + mixed


class Mixtures(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            points = block(points)
        return super().forward(points)


class OwnMean(Net):
    """Subtracts a running mean of its own from its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        found = super().forward(points - self.mean)
        if self.training:
            self.mean.lerp_(points.detach().mean(0), 0.3)
        return found


class WarmsUp(Net):
    """Its output grows with the number of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.forwards += self.training
        return super().forward(points) * min(1.0, self.forwards / 50)


class Draws(Net):
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(points + 0.1 * torch.randn_like(points))


class Centered(Net):
    """Ties the samples of a batch to one another without declaring it."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        found = super().forward(points)
        return found - found.mean(0)


class InBatch(CrossEntropy):
    """Distinguishes a sample from the others in its batch without declaring it."""

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        same = batch.targets[:, None] == batch.targets
        return (torch.logsumexp(outputs @ outputs.T, 1) - (outputs @ outputs.T * same).sum(1) / same.sum(1)).sum()


class ChangesCourse(Net):
    """From its third training forward on, the ranks named run its steps otherwise."""

    def __init__(self, ranks: list[int], steps: list[int]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Step() for _ in range(3))
        self._ranks, self._others, self._forwards = ranks, steps, 0

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self._forwards += self.training
        changed = self._forwards > 2 and int(os.environ["RANK"]) in self._ranks
        for place in self._others if changed else range(3):
            points = self.steps[place](points)
        return super().forward(points)


def bytes_held(tensors: list[Any]) -> int:
    """Counts the memory behind them once: the gradients of a block may share one tensor."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    return sum(storages.values())

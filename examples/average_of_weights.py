"""A model that answers in evaluations with the moving average of its weights: `python examples/average_of_weights.py`.

The average is made of buffers, which a forward may change. The forward needs whole parameters, as under single, dp and
ddp.
"""

from __future__ import annotations

import copy

import torch
from squares import Curve, SquaredError, points
from torch import Tensor, nn

import lockstep


def as_buffers(module: nn.Module) -> nn.Module:
    """Make buffers of a module's parameters, so that its forward may change them."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach().clone())
    return module


class Averaged(nn.Module):
    """A curve, and the average of its weights over about 1 / share forwards."""

    def __init__(self, share: float = 0.2) -> None:
        super().__init__()
        self.share = share
        self.trained = Curve()
        self.average = as_buffers(copy.deepcopy(self.trained))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.average(x)
        with torch.no_grad():
            for buffer, parameter in zip(self.average.buffers(), self.trained.parameters(), strict=True):
                buffer.lerp_(parameter, self.share)
        return self.trained(x)


def main() -> None:
    finished = lockstep.train(
        {"batch": {"global_size": 50}, "optim": {"lr": 0.01}, "run": {"epochs": 20}},
        model=Averaged,
        objective=SquaredError(),
        train_dataset=points(),
        eval_datasets={"sparse": points(101)},
        ranks=2,
    )
    print("the average:", finished.summary["evaluation"])


if __name__ == "__main__":
    main()

"""Models whose forwards fail on an accelerator, or can't be simulated."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class WrongShapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[:, :7])


class Fits(WrongShapes):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class OnTheHost(WrongShapes):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + torch.ones(10)


class ByValues(WrongShapes):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.second(hidden[hidden.sum(1).nonzero()[:, 0]])


def data() -> TensorDataset:
    return TensorDataset(torch.zeros(4096, 10), torch.zeros(4096, dtype=torch.long))

"""A user's file outside the package; tests copy it to another folder."""

from torch import nn, randn
from torch.utils.data import Dataset


class Points(Dataset):
    def __init__(self, samples=24):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return {"points": randn(4) * 0.01 + index % 3, "label": index % 3}


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, points):
        return self.layers(points)

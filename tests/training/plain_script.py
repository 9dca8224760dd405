"""A user's own program, which starts its ranks by a function call: python plain_script.py FOLDER WORKERS"""

import json
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def make_optimizer(groups):
    return torch.optim.RMSprop(groups)


def halves(step, steps):
    return 1.0 if step < steps // 2 else 0.5


def main(folder, workers):
    draws = torch.Generator().manual_seed(0)
    points = torch.randn(30, 4, generator=draws)
    dataset = TensorDataset(points, points[:, :3].argmax(1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    config = {
        "model": {"kind": "given"},
        "data": {"train": {"kind": "given"}, "loader": {"workers": workers}},
        "batch": {"global_size": 10},
        "optim": {"lr": 0.01},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "monitor": {"every": 1, "tensorboard": False, "progress": "none"},
        "run": {"steps": 6, "folder": folder},
    }
    finished = lockstep.train(
        config,
        model=model,
        train_dataset=dataset,
        eval_datasets={"held-out": dataset},
        objective=nn.CrossEntropyLoss(reduction="sum"),
        optimizer=make_optimizer,
        schedule=halves,
        ranks=2,
    )
    print(json.dumps({"folder": str(finished.folder), **finished.summary}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

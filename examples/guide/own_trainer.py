"""Train with a trainer class of `trainers.py`: a small classifier of handwritten digits, under any mode.

torchrun --nproc-per-node 2 own_trainer.py ddp|fsdp|deepspeed [FOLDER OF CHECKPOINTS]
"""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset
from trainers import DDPTrainer, DeepSpeedTrainer, FSDPTrainer

import lockstep

TRAINERS = {"ddp": DDPTrainer, "fsdp": FSDPTrainer, "deepspeed": DeepSpeedTrainer}
CONFIG = {
    "batch": {"global_size": 64, "micro_size": 16},
    "optim": {"name": "adamw", "lr": 3e-3, "clip_norm": 1.0},
    "schedule": {"kind": "linear", "warmup_ratio": 0.1},
    "precision": {"compute": "fp32"},
    "run": {"epochs": 3, "seed": 42},
}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def digits() -> tuple[Dataset, Dataset]:
    """Return images [64] with their digits, for training and for evaluation."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    return Subset(data, range(1500)), Subset(data, range(1500, len(data)))


def main(mode: str, folder: str | None) -> None:
    train, test = digits()
    lockstep.loops.print_once(f"{lockstep.count_parameters(make_model()):,} parameters")
    trainer = TRAINERS[mode](
        CONFIG, model=make_model, train_dataset=train, eval_dataset=test,
        objective=nn.CrossEntropyLoss(), checkpoint_dir=folder,
    )  # fmt: skip
    try:
        session, batch = trainer.session, trainer.session.batch_plan
        print(f"rank {session.rank} of {session.world_size}", flush=True)
        lockstep.loops.print_once(
            f"effective batch {trainer.effective_batch_size}"
            f" = {batch.micro_size} x {batch.accumulation} x {batch.ranks}"
        )
        trainer.train()
    finally:
        trainer.cleanup()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)

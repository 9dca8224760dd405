"""Checks every strategy against a single process on a model: `python examples/verify_own_model.py [RANKS ...]`."""

from __future__ import annotations

import sys

from squares import Curve, SquaredError, points

import lockstep


def main(ranks: list[int]) -> None:
    rows = lockstep.verify(
        {"batch": {"global_size": 50}, "optim": {"lr": 0.01}, "run": {"epochs": 5}},
        model=Curve,
        train_dataset=points(),
        objective=SquaredError(),
        strategies=["ddp", "fsdp"],
        ranks=ranks,
    )
    for row in rows:
        print(row.strategy, row.ranks, row.optimizer, row.accumulation, row.status, row.reason or "")


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1, 2])

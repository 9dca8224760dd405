"""What a forward draws from global generators is a function of its update and micro-batch, and of nothing before."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import small
from kit.worlds import in_world

import lockstep
from lockstep.distributed.rng import KeyedDraws


class Drawing(small.Net):
    """Draws from Python's, NumPy's and torch's generators."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        drawn = random.random() + np.random.rand() + float(torch.rand(()))
        return super().forward(points * drawn)


def numbers() -> tuple[float, float, float]:
    return random.random(), np.random.rand(), float(torch.rand(()))


@pytest.mark.parametrize("generator", range(3), ids=["python", "numpy", "torch"])
def test_draws_are_those_of_their_micro_batch(generator: int) -> None:
    draws = KeyedDraws(7, 0, torch.device("cpu"))
    drawn = []
    for step, micro_batch in ((3, 0), (3, 1), (4, 0), (3, 0)):
        draws._seed_with("forward", step, draws._data_rank, micro_batch)
        drawn.append(numbers()[generator])
    assert drawn[3] == drawn[0]
    assert len(set(drawn)) == 3


def losses(before: int) -> list[float]:
    """Return the losses from update 4 on, of a run that is resumed there in another session if `before` is 3."""
    model = {"kind": "custom", "target": f"{Path(__file__)}:Drawing"}
    config = {**small.config(batch={"global_size": 13, "micro_size": 5}), "model": model}
    with lockstep.session(config) as session:
        for _ in islice(session, before):
            numbers()  # a program's own draws, between two updates
        state = session.state()
    with lockstep.session(config) as session:
        if before:
            session.restore(state)
        return [report.loss for report in session][-5:]


def test_a_run_that_resumes_draws_as_one_that_was_not_interrupted() -> None:
    (resumed,), (whole,) = in_world(1, losses, 3), in_world(1, losses, 0)
    assert resumed == whole

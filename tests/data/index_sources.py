"""Sources for tests of the loader, whose samples are their own indices."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lockstep.config.data_sections import Data
from lockstep.config.schema import Loader
from lockstep.core.records import Batch, DataFacts
from lockstep.data import noise
from lockstep.data.loader import TrainingLoader
from lockstep.plan.batch import plan_batch


class IndexSource:
    draws = False
    fingerprint = "indices"

    def __init__(self, samples: int) -> None:
        self.facts = DataFacts(samples, None)

    def fetch(self, indices: np.ndarray) -> Batch:
        values = torch.from_numpy(np.array(indices))
        return Batch((values,), values + 1000, len(indices), 10 * len(indices))


class DrawingSource(IndexSource):
    """A source that draws from every generator."""

    draws = True

    def fetch(self, indices: np.ndarray) -> Batch:
        drawn = torch.tensor([random.random(), np.random.random(), float(torch.rand(()))])
        inputs = {"indices": torch.from_numpy(np.array(indices)), "drawn": drawn}
        return Batch({**inputs, "noise": torch.from_numpy(noise.uniform(indices, 2))}, None, len(indices), 0)


class BrokenSource(IndexSource):
    """A source whose sample 5 can't be read."""

    def fetch(self, indices: np.ndarray) -> Batch:
        if 5 in indices:
            raise KeyError("no such image")
        return super().fetch(indices)


def make_loader(source: Any, global_size: int = 8, **options: Any) -> TrainingLoader:
    """Return the loader of rank `rank` of `ranks`."""
    given = {"micro_size": "auto", "rank": 0, "ranks": 1, "seed": 42, "shuffle": True, "drop_last": False, "workers": 0}
    given |= {"persistent_workers": True, "fixed": False} | options
    return TrainingLoader(
        source,
        plan_batch(global_size, given["micro_size"], given["ranks"], fixed=given["fixed"]),
        given["rank"],
        given["seed"],
        Data.model_construct(
            shuffle=given["shuffle"],
            drop_last=given["drop_last"],
            loader=Loader(workers=given["workers"], persistent_workers=given["persistent_workers"]),
        ),
        torch.device("cpu"),
        lambda batch: 3 * batch.samples,
    )

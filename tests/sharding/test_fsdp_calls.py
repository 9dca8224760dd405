"""The Python calls that FSDP adds to an update, for each parameter."""

from __future__ import annotations

import cProfile
import pstats

import pytest
import torch
from kit import small
from kit.worlds import in_world
from torch import nn

import lockstep
from lockstep.loop.session import components_of

_LAYERS = 100


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _calls_of_an_update(strategy: str) -> float:
    """Return the calls of an update and its norm, of Python and of C, for each parameter."""
    with small.in_group():
        data = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.zeros(40, 4))
        config = {
            "batch": {"global_size": 2, "micro_size": 1},
            "optim": {"name": "adamw", "clip_norm": 1.0},
            "precision": {"compute": "fp32"},
            "run": {"steps": 4},
            "launch": {"device": "cpu"},
            "parallel": {"strategy": strategy},
        }
        profile = cProfile.Profile()
        with lockstep.session(config, model=Deep(), train_dataset=data, objective=small.Times(1.0)) as session:
            step = components_of(session).sharding.step
            for batch in session.batches():
                session.accumulate(batch)
                if session.progress.steps == 2:
                    profile.enable()
                step.squared_norm()
                step.update(0.1, 1.0, True)
                profile.disable()
                session.commit().result()
                if session.progress.steps == 3:
                    break
        return pstats.Stats(profile).total_calls / (2 * _LAYERS)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(("strategy", "most"), [("ddp", 4), ("fsdp", 12)])
def test_an_update_makes_few_calls_for_each_parameter(strategy: str, most: int) -> None:
    """A DTensor's operation for each parameter would be 25 calls and 10 us, three times in an update."""
    for calls in in_world(2, _calls_of_an_update, strategy):
        assert calls <= most

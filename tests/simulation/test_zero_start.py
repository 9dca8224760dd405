"""A start under ZeRO-3 never holds the whole model, neither on the accelerator nor on the host."""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from typing import Any

import pytest

from lockstep.assembly.user_objects import UserObjects
from lockstep.config.schema import Config
from lockstep.loop.components import Purpose
from lockstep.loop.session import components_of
from lockstep.simulation.memory import MemoryLedger
from lockstep.simulation.ranks import simulated_rank
from lockstep.simulation.updates import peak_of_rank
from lockstep.training.assemble import assemble

if find_spec("deepspeed") is None:  # importing it takes seconds, and its ranks have it
    pytest.skip("deepspeed is not installed", allow_module_level=True)

RANKS = 64
OFFLOADS: dict[str, dict[str, Any]] = {
    "nothing offloaded": {},
    "both offloaded": {"offload_optimizer": "cpu", "offload_param": "cpu"},
}


def decoder(options: dict[str, Any], layers: int = 3) -> Config:
    """Return a decoder whose gradients are reduced in small buckets, where DeepSpeed takes 2 GB at the start."""
    buckets = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1000}}
    return Config.model_validate(
        {
            "model": {"kind": "transformer", "vocabulary": 2048, "layers": layers, "heads": 8, "width": 1024},
            "data": {"train": {"kind": "stdlib-text", "length": 16}},
            "batch": {"global_size": RANKS},
            "precision": {"compute": "fp32"},
            "launch": {"device": "auto"},
            "run": {"steps": 2},
            "parallel": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3, "config": buckets, **options}},
        }
    )


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.RESUME])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_no_rank_holds_the_whole_model(offload: str, purpose: Purpose) -> None:
    with simulated_rank(1, RANKS) as rank:
        ledgers = {place: MemoryLedger(place) for place in ("simulated", "cpu")}
        rank.execution.watchers += [ledger.see for ledger in ledgers.values()]
        session = assemble(decoder(OFFLOADS[offload]), rank.world, UserObjects(), purpose)
        shapes = [shard.shape for shard in components_of(session).sharding.state.flat.values()]
        session.close()
    whole, largest = (4 * function(prod(shape) for shape in shapes) for function in (sum, max))
    assert whole > 4 * largest
    for place, ledger in ledgers.items():
        # of each parameter shards of values, masters, gradients and moments; and one whole parameter after the other
        assert ledger.peak().bytes < 2 * largest + 12 * whole / RANKS, place


def test_the_peak_has_shards_by_category() -> None:
    held = peak_of_rank(decoder({}, layers=1), RANKS, 1, UserObjects()).by_category
    share = 4 * (12 * 1024**2 + 2048 * 1024) / RANKS
    assert held["parameters"] == pytest.approx(share, rel=0.02)
    assert held["gradients"] == pytest.approx(share, rel=0.02)
    assert held["optimizer"] == pytest.approx(3 * share, rel=0.02)  # masters and two moments
    assert held["other"] < share / 10

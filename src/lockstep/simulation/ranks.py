"""One rank of many, on the simulated device, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
import torch.distributed as dist

from lockstep.distributed import user_collectives
from lockstep.distributed.collectives import LocalGroup, RankGroup
from lockstep.distributed.process_group import World
from lockstep.simulation import device, groups
from lockstep.simulation.execution import Execution, simulated_execution

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis

_MACHINE_RANKS = 8


@dataclass(frozen=True, slots=True)
class SimulatedRank:
    """A rank on the simulated device; `collectives` are those that it has issued, in order."""

    world: World
    execution: Execution
    collectives: list[groups.Collective]


@contextmanager
def simulated_rank(rank: int, ranks: int, *, device_type: str = device.NAME) -> Iterator[SimulatedRank]:
    """Be one rank of many within the block; the others seem to have all that this one has.

    Args:
        device_type: `cpu` simulates ranks that compute on the CPU: their tensors have no data either.
    """
    device.register()
    place = torch.device("cpu") if device_type == "cpu" else torch.device(device.NAME, 0)
    local_ranks = min(_MACHINE_RANKS, ranks)
    with groups.simulated_groups(rank, ranks, device_type) as collectives:
        axis: Axis = LocalGroup()
        if ranks > 1:
            assert dist.group.WORLD is not None, "simulated_groups made it"
            axis = RankGroup(dist.group.WORLD)
        world = World(axis, rank, ranks, rank % local_ranks, local_ranks, place, groups.BACKENDS[device_type])
        with (
            user_collectives.current_group(axis),
            patch("lockstep.engine.context_parallel._first_different", lambda *unused: None),  # these compare values
            patch("lockstep.engine.tensor_check.TensorCheck._difference", lambda *unused: None),
            patch("lockstep.sharding.collective_order.CollectiveOrder._all_differ_alike", lambda *unused: True),
            simulated_execution(device_type) as execution,
        ):
            yield SimulatedRank(world, execution, collectives)

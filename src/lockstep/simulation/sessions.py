"""A session on the simulated device, for tests of a model, an objective or a strategy without an accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Unpack

from lockstep.assembly.user_objects import Objects, user_objects
from lockstep.simulation.ranks import SimulatedRank, simulated_rank
from lockstep.training.api import resolved
from lockstep.training.assemble import assemble

if TYPE_CHECKING:
    from lockstep.loop.session import Session
    from lockstep.training.api import ConfigLike


@contextmanager
def simulated_session(
    config: ConfigLike, *, rank: int = 0, ranks: int = 1, **objects: Unpack[Objects]
) -> Iterator[tuple[Session, SimulatedRank]]:
    """Open a run as one rank of many on the simulated device; yield the session and the rank.

    Args:
        config: As of `lockstep.session`; `launch.device` must be `auto`.
        **objects: `model`, `train_dataset`, `objective`, ...: see `lockstep.Objects`.

    Raises:
        ConfigError: The config can't be run on these ranks.
    """
    given = user_objects(objects)
    with simulated_rank(rank, ranks) as simulation:
        session = assemble(resolved(config, given), simulation.world, given)
        try:
            yield session, simulation
        finally:
            session.close()

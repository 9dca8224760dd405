"""One process on one device: the reference that every other strategy must reproduce."""

from __future__ import annotations

from lockstep.strategies.record import CPU, StateSharding, Strategy, Variant, nothing_sent

STRATEGY = Strategy(
    name="single",
    build="lockstep.sharding.single:BUILDER",
    reference=True,
    one_process="one process",
    invariant=True,
    holds_everything=True,
    finds_unused=True,
    cells={"optimizer in backward": CPU},
    variants=(
        Variant(
            name="single", mesh="one process", state=StateSharding("one process holds everything"), sends=nothing_sent
        ),
    ),
)

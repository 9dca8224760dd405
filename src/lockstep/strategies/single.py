"""One process on one device: the reference that every other strategy must reproduce."""

from __future__ import annotations

from lockstep.strategies.record import (
    CPU,
    Combinations,
    Exactness,
    MemoryUse,
    StateSharding,
    Strategy,
    Variant,
)

STRATEGY = Strategy(
    name="single",
    build="lockstep.sharding.single:BUILDER",
    exactness=Exactness(reference=True, invariant=True),
    combines=Combinations(one_process="one process", finds_unused=True),
    memory=MemoryUse(holds_everything=True),
    cells={"bf16 parameters": CPU},
    variants=(Variant(name="single", mesh="one process", state=StateSharding("one process holds everything")),),
)

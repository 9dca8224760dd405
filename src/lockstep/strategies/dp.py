"""torch's DataParallel: one process spreads each batch over its GPUs."""

from __future__ import annotations

from lockstep.strategies.record import (
    Combinations,
    MemoryUse,
    StateSharding,
    Strategy,
    Variant,
    refused,
)

STRATEGY = Strategy(
    name="dp",
    build="lockstep.sharding.data_parallel:BUILDER",
    combines=Combinations(one_process="one process over all its GPUs", finds_unused=True),
    memory=MemoryUse(holds_everything=True),
    unwrapped="dp spreads a batch over the GPUs of one process; with fewer than two it runs as single",
    cells={
        "chunked loss": refused("the heads of its replicas don't receive their targets; take single, or ddp"),
        **dict.fromkeys(("nf4 base", "int8 base"), refused("its replicas lose the constants of blocks; take ddp")),
    },
    variants=(
        Variant(
            name="dp",
            mesh="one process",
            state=StateSharding(
                "one process; the first GPU holds everything, each other GPU a temporary copy of the parameters"
            ),
        ),
    ),
)

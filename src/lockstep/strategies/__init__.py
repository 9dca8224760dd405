"""The strategies: each is one record in one file, and one line in the registry."""

from lockstep.strategies.record import (
    Cell,
    Combinations,
    Exactness,
    Hooks,
    MemoryUse,
    MeshKind,
    StateSharding,
    Strategy,
    Variant,
)
from lockstep.strategies.registry import register_strategy
from lockstep.strategies.section import Section

__all__ = [
    "Cell", "Combinations", "Exactness", "Hooks", "MemoryUse", "MeshKind", "Section", "StateSharding", "Strategy",
    "Variant", "register_strategy",
]  # fmt: skip

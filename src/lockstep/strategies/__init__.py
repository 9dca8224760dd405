"""The strategies: each is one record in one file, and one line in the registry.

section     the base of every section of a config
record      what a record states: options, mesh, memory, traffic, refusals, how it is built
single, dp, ddp, fsdp, deepspeed      the records
partitions  the mesh axes along which a model or its sequences are partitioned: pipeline, context, tensor
registry    all records, registered ones included, and what combines with what
"""

from lockstep.strategies.record import (
    Cell,
    MeshKind,
    StateSharding,
    Strategy,
    Traffic,
    Update,
    Variant,
    gradients_all_reduced,
)
from lockstep.strategies.registry import register_strategy
from lockstep.strategies.section import Section

__all__ = [
    "Cell", "MeshKind", "Section", "StateSharding", "Strategy", "Traffic", "Update", "Variant", "gradients_all_reduced",
    "register_strategy",
]  # fmt: skip

"""Parameters whose rows are sharded over ranks, as FSDP shards them: what an optimizer needs that looks at a whole one.

whole [7, 4]    rank 0: rows 0-3    rank 1: rows 4-6        rows("blocks.0.weight") -> [4, 3]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.distributed.shard_boxes import mesh_intervals

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis


@dataclass(frozen=True, slots=True)
class RowShards:
    """The parameters that ranks hold shards of, along their first dim.

    Attributes:
        axis: The ranks that hold the shards of one replica.
        shapes: The shape of each parameter, whole, by name.
    """

    axis: Axis
    shapes: Mapping[str, tuple[int, ...]]

    def rows(self, name: str) -> list[int]:
        """Return the number of rows of a parameter that each rank holds, perhaps 0, in the order of their rows."""
        return [size for _, size in mesh_intervals(self.shapes[name][0], [self.axis.size], [1])]

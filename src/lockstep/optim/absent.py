"""The optimizer of a session that only evaluates: none, and no memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lockstep.core.protocols import Optimizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.distributed.shard_boxes import RowShards


class AbsentOptimizer(Optimizer):
    """An optimizer without state, which never updates."""

    @property
    def groups(self) -> list[dict[str, object]]:
        return []

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        raise AssertionError("a session that evaluates makes no update")

    def state_dict(self) -> dict[str, object]:
        return {"parameters": {}, "groups": []}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError("a session that evaluates reads no optimizer state")


class NoOptimizer:
    """Makes the optimizer of a session that only evaluates."""

    is_custom = False

    def __call__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], shards: RowShards | None = None
    ) -> AbsentOptimizer:
        return AbsentOptimizer()

    def elementwise(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Any:
        raise AssertionError("a strategy that needs an optimizer doesn't evaluate")

"""Repeats an update once whose loss or gradient isn't finite, from the same state: a flipped bit may be right then.

    forward, backward, vote: NaN --> gradients, buffers, generators as before --> the same again: finite --> kept
                                                                                                  NaN    --> discarded

The samples of the next update have been fetched already; what that drew from a user's generator is not drawn again. An
overflow of fp16 under a loss scale comes again, and is not repeated. On an accelerator the host waits at each update
until it knows whether the update is finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from lockstep.core.errors import ConfigError, Problem
from lockstep.distributed import generators
from lockstep.distributed.consensus import requests_in
from lockstep.monitor import metric_log
from lockstep.sharding.buffers import BufferSnapshot

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.records import Request
    from lockstep.distributed.consensus import VoteResult
    from lockstep.training.components import Components, FailureState


class UpdateRetry:
    """Undoes an attempt at an update, if the config asks for it.

    Raises:
        ConfigError: The model's buffers are too large to be copied in every update.
    """

    def __init__(self, components: Components, failure_state: FailureState) -> None:
        repeats = components.config.recovery.bad_numbers.nonfinite == "retry"
        self._enabled = repeats and not components.scaler.enabled
        self._components = components
        self._state = failure_state
        self._draws: dict[str, Tensor] = {}
        if not self._enabled:
            return
        self._state.buffers = BufferSnapshot(components.sharding.state.model)
        model = components.sharding.state.model
        buffers = model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if left_out := sorted(buffers - self._state.buffers.names):
            why = f"retry copies the model's buffers before each update, and {left_out[0]} is too large; write skip"
            raise ConfigError(Problem("", "recovery.bad_numbers.nonfinite", why))

    def begin(self) -> None:
        """Copy what user code's generators draw from in the update that begins."""
        if self._enabled:
            self._draws = generators.states(0)

    def helps(self, finite: bool | Tensor) -> bool:
        """Return whether the update is to be repeated."""
        return self._enabled and not bool(finite)

    @contextmanager
    def undone(self, outcome: VoteResult, rate: float) -> Iterator[frozenset[Request]]:
        """Undo the attempt, and let the block repeat it; yields the requests that its vote had, to be made again."""
        components = self._components
        components.sharding.step.update(rate, 1.0, False)
        self._state.undo_forward(components.sharding.state.model)
        after = generators.states(0)
        generators.put(self._draws, 0)
        slots = outcome.slots
        yield requests_in(cast("list[float]", slots if isinstance(slots, list) else slots.tolist()))
        generators.put(after, 0)

    def report(self, step: int, finite: bool | Tensor) -> None:
        """Record that the update was repeated, on the first rank."""
        if self._components.world.rank == 0:
            result = "and it is finite" if bool(finite) else "and it isn't again"
            text = f"update {step:,} had a loss or a gradient that isn't finite; it was repeated, {result}"
            metric_log.text("bad numbers", text)

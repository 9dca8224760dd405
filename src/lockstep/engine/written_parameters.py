"""Finds parameters that a model's own forward writes to, such as those of a teacher that follows the weights.

    between two updates    the state of this moment is saved, parameters in the background
    the next forward       may change buffers, which were copied before it; parameters stay until the optimizer's step

A parameter that a forward writes to would be saved as it was neither before nor after, and a discarded update or a rank
that is left after a failure would keep what half an update has made of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.formatting import listed
from lockstep.distributed.shard_boxes import live_part

if TYPE_CHECKING:
    from torch import Tensor, nn

_NAMED = 3
_Mark = tuple["Tensor", object, int, int]
"""A parameter, the shape, version and storage of what this rank holds of it."""


def marks(model: nn.Module) -> dict[str, _Mark]:
    """Return what shows, without a look at any value, that a parameter was written to."""
    return {name: _mark(parameter) for name, parameter in model.named_parameters() if not parameter.is_inference()}


def refuse_written(model: nn.Module, before: dict[str, _Mark]) -> None:
    """Compare with the marks from before a forward in training.

    Raises:
        ConfigError: The forward has written to parameters.
    """
    written = [name for name, mark in marks(model).items() if name in before and _is_written(before[name], mark)]
    if not written:
        return
    why = (
        f"the forward changes {listed(written, _NAMED)}: parameters change in the optimizer's step alone, since they "
        "are saved while the next forward runs, and only buffers are restored after an update that failed or is "
        "discarded. A run that resumes would be another one. Make a copy that follows the weights buffers "
        "(register_buffer); normalize or clip weights where they are used, not in place (an embedding without max_norm)"
    )
    raise ConfigError(Problem("", "model", why))


def _mark(parameter: Tensor) -> _Mark:
    held = live_part(parameter)
    return parameter, held.shape, held._version, held.untyped_storage()._cdata


def _is_written(before: _Mark, now: _Mark) -> bool:
    """Return whether it is the same parameter with another version or other memory; a strategy may have gathered it."""
    same = before[0] is now[0] and before[1] == now[1] and bool(before[0].numel())
    return same and before[2:] != now[2:]

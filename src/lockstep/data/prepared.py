"""A source whose batches are completed: what a model's forward wants beside what the data has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import Source
from lockstep.core.records import Batch
from lockstep.data.order import Indices


class PreparedSource:
    """Args:
    prepare: batch -> batch, on the CPU; it changes no samples, so that the fingerprint stays.
    """

    def __init__(self, source: Source, prepare: Callable[[Batch], Batch]) -> None:
        self._source = source
        self._prepare = prepare
        self.facts = source.facts
        self.fingerprint = source.fingerprint
        self.draws = source.draws

    def fetch(self, indices: Indices) -> Batch:
        return self._prepare(self._source.fetch(indices))


def renamed_inputs(names: Mapping[str, str | None], batch: Batch) -> Batch:
    """The batch with its inputs under the names that the model's forward has.

    Args:
        names: the data's names to the forward's; None: the input is left out.

    Raises:
        ConfigError: the data has no such input.
    """
    if isinstance(batch.inputs, tuple):
        raise ConfigError(Problem("", "model.inputs", "the data's inputs have an order and no names; leave it out"))
    lacking = ", ".join(name for name in names if name not in batch.inputs)
    if lacking:
        why = f"the data has no input {lacking}; it has {', '.join(batch.inputs)}"
        raise ConfigError(Problem("", "model.inputs", why))
    renamed = {names.get(name, name): value for name, value in batch.inputs.items()}
    return replace(batch, inputs={name: value for name, value in renamed.items() if name is not None})

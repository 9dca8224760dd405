"""The model and the data of a run in which faults are planted, for `lockstep chaos`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from lockstep.resilience.memory_faults import Trained
from lockstep.training.engines import first_module_of
from lockstep.training.session import components_of

if TYPE_CHECKING:
    from lockstep.core.records import Batch
    from lockstep.data.fetching import FetchRequest
    from lockstep.data.loader import TrainingLoader
    from lockstep.training.session import Session


def trained_in(session: Session) -> Trained:
    """Return the model of a session and its data."""
    components = components_of(session)
    loader, model = components.loader, components.sharding.state.model
    updates = -(-loader.epoch_samples // components.plan.batch.global_size)
    return Trained(
        model,
        components.sharding.step,
        (components.evaluator.micro_size, components.plan.batch.micro_size).__getitem__,
        lambda step, *place: _followed(loader, (step - 1) % updates + 1, *place),
        loader.positions_of,
        first_module_of(components.engine, model),
    )


def _followed(loader: TrainingLoader, step: int, rank: int, see: Callable[[list[Tensor]], None]) -> list[Tensor]:
    """Return the inputs of a sample; a dataset may draw others each time, which `see` is called with.

    Args:
        step: Of the first epoch: samples that the run leaves out when it goes back haven't been used before.
    """
    sample, batch = loader.sample_of(step, rank)

    def show(request: FetchRequest, batch: Batch) -> None:
        lacked = {left_out.index for left_out in batch.left_out}
        used = [index for index in request.indices.tolist() if index not in lacked]
        if sample in used:
            see([value[used.index(sample) :][:1] for value in _tensors(batch) if len(value) == len(used)])

    loader.show = show
    return [value for value in _tensors(batch) if batch.samples]


def _tensors(batch: Batch) -> list[Tensor]:
    """Return what a batch has for its samples, as the model's forward takes it."""
    values = batch.inputs.values() if isinstance(batch.inputs, Mapping) else batch.inputs
    return [value for value in values if isinstance(value, Tensor) and value.ndim > 0]

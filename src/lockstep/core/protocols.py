"""All protocols on one page: reading it is reading the architecture.

    Source ----> loader ----> Engine(model, Objective) ----> GradientStep ----> report ----> Monitor
    samples      GlobalBatch  forward and backward           reduction,         of an        observes,
                 + cursor                                    optimizer step     update       may request

A package implements protocols; `training/assemble` and `training/parallelize` alone know which implementations exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lockstep.core.records import (
    Batch,
    DataFacts,
    EvaluationReport,
    GlobalBatch,
    Inputs,
    Request,
    RestartReport,
    RunInfo,
    SaveReport,
    StepReport,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn


@runtime_checkable
class Source(Protocol):
    """A data set that can be asked for any of its samples, in any order."""

    @property
    def facts(self) -> DataFacts: ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever the samples do: a run knows its data by it."""

    @property
    def draws(self) -> bool:
        """Whether fetching draws random numbers (augmentation), which are then keyed for each micro-batch."""

    def fetch(self, indices: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Batch:
        """The samples at `indices` [samples], collated, on the CPU. `samples` and `tokens` are filled in."""


@runtime_checkable
class Objective(Protocol):
    """The loss that a model is trained for: a sum over targets, and the number of targets.

    The gradient of an update is that of `sum of loss_sum / sum of count` over all its micro-batches and ranks, so any
    split of the samples gives the same gradient.

    Three more members are optional: `decomposes` (False if the loss of a batch is not the sum of its samples' losses),
    `metric_sums` and `metrics`, as in `EvaluatedObjective`.
    """

    def count(self, batch: Batch) -> float:
        """Return the number of targets in the batch, known before the forward: what the loss is divided by."""

    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the sum, not the mean, of the targets' losses: fp32, 0-dim, whatever the precision of the outputs."""


class EvaluatedObjective(Objective, Protocol):
    """An objective with metrics, as the training step uses it; one with the optional members left out gets defaults."""

    @property
    def decomposes(self) -> bool:
        """True if the loss of a batch is the sum of its samples' losses; if not (in-batch contrast, batch norm), micro
        size and ranks change the run."""

    def metric_sums(self, outputs: Any, batch: Batch) -> Mapping[str, Tensor]:
        """Return further 0-dim sums for evaluation, such as the number of right answers."""

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the reported metrics, from sums over the whole evaluation set; `loss` is among them."""


class GradientStep(Protocol):
    """How accumulated gradients are reduced over ranks and applied to the parameters.

    Attributes:
        module: The module that a training forward calls.
    """

    module: nn.Module

    def begin_update(self, samples: int, rate: Callable[[], float]) -> None:
        """Prepare for an update of `samples` samples; called before its first forward. Does nothing by default.

        Args:
            rate: Returns the learning rate of the update.
        """
        return

    def sync_context(self, last: bool) -> AbstractContextManager[object]:
        """Return the context of a micro-batch's forward and backward; gradients are reduced in the last one's alone."""

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        """Accumulate the gradient of `seed` x `loss`, both 0-dim; inside a `sync_context`."""

    def parameters_without_gradient(self) -> list[str]:
        """Return the names of the trained parameters that no backward of the first update has reached."""

    def squared_norm(self) -> Tensor:
        """Return the squared 2-norm of the gradient summed over ranks: 0-dim, the same on every rank. All ranks
        together."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradient summed over ranks, or this rank's shard of it, of each parameter that has one, once the
        last `sync_context` is closed."""

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """Make one optimizer step with the summed gradient / `divisor` at learning rate `rate`; then clear gradients.
        With `keep` false, parameters and optimizer state stay bitwise the same."""

    def close(self) -> None:
        """Release what holds the process group, which is destroyed next. Does nothing by default."""
        return


class Engine(Protocol):
    """How a batch becomes a gradient."""

    def accumulate(
        self,
        batch: GlobalBatch,
        seed_scale: float | Tensor,
        announce: Callable[[Tensor], None],
    ) -> None:
        """Accumulate the gradient of `seed_scale` x the sum of losses.

        Args:
            batch: This rank's micro-batches; `batch.step` keys what the forward draws.
            announce: Called once, as soon as it is known, with this rank's sum of losses, unscaled, 0-dim: before
                gradients are reduced, and at the same point between collectives on every rank.
        """

    def outputs(self, inputs: Inputs) -> object:
        """Return what the model makes of the inputs of a batch, in evaluation; all ranks together, on the same inputs.
        None on a rank that holds a part of the model without its end."""

    def evaluate(self, micro_batches: Iterable[Batch]) -> Mapping[str, Tensor]:
        """Return this rank's sums over the batches: `loss_sum`, `count`, and the objective's `metric_sums`."""


class Optimizer(Protocol):
    """An optimizer whose step can be undone before it happens."""

    @property
    def groups(self) -> list[dict[str, object]]:
        """torch's parameter groups."""

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """Do what `GradientStep.update` does, on the `.grad` of the parameters that it holds."""

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: dict[str, object]) -> None: ...


class Axis(Protocol):
    """Ranks that can agree. An axis of one returns what it was given; callers never ask."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def sum(self, tensor: Tensor) -> Tensor:
        """In place, over the axis; returned for chaining."""

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """`sum`, but in the background; what is returned waits for it."""

    def exchange(self, rows: Tensor, numbers: Sequence[int]) -> Tensor:
        """[sum of numbers, width]: what each rank, in their order, has for this one.

        Args:
            rows: [ranks, number, width]: a rank's own ones, first those for the first rank; contiguous.
            numbers: of each rank.
        """

    def concatenate(self, part: Tensor, whole: Tensor) -> None:
        """Writes every rank's `part` [n] into `whole` [ranks x n], in the order of ranks."""

    def copy_first(self, tensor: Tensor) -> None:
        """In place: the first rank's, everywhere."""

    def gather(self, value: object) -> list[object]:
        """Every rank's value, in the order of ranks. Slow: for people, not for steps."""

    def broadcast(self, value: object) -> object:
        """The first rank's value."""

    def barrier(self) -> None: ...


@runtime_checkable
class Transform(Protocol):
    """A change to the module before it is sharded. Transforms are applied in the order that their rules give.

    Attributes:
        name: The config key, or any unique name, by which others refer to it.
        after: Names of the transforms that are applied before this one, where they are present. `parallel.pipeline` is
            the pipeline partition.
        before: Names of the transforms that are applied after this one, where they are present.
    """

    name: str
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        """Return why it can't be applied to this model on this device; None: it can."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Return the changed model, which may be the same object."""


@runtime_checkable
class Monitor(Protocol):
    """Sees what a run reports, on the first rank, and may answer with requests. Nothing else reaches into the loop.

    Subclass it and override what you need. A monitor that raises is dropped with a warning: it never ends a training.
    """

    def start(self, info: RunInfo) -> None:
        """The run starts or resumes. Called once per attempt, before all others."""
        return

    def restarted(self, report: RestartReport) -> None:
        """The run resumes from a checkpoint. Reports of later updates that an earlier attempt made no longer count."""
        return

    def see(self, report: StepReport) -> Iterable[Request]:
        """An update was made. Return requests, which all ranks hear with the next update."""
        return ()

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        """An evaluation set was evaluated. Return requests, as `see`."""
        return ()

    def saved(self, report: SaveReport) -> None:
        """A save has ended, successfully or not."""
        return

    def finish(self, error: BaseException | None) -> None:
        """The run ends, with `error` if it failed. Called once per attempt, after all others."""
        return


@runtime_checkable
class ObjectStore(Protocol):
    """Holds checkpoints as named objects (`step-00000480/manifest.json`): a bucket, a database, memory."""

    @property
    def place(self) -> str:
        """Address, for messages."""

    def names(self, prefix: str) -> list[str]:
        """Return the names of all objects that begin with `prefix`. Raises OSError."""

    def size(self, name: str) -> int:
        """Return the number of bytes of an object. Raises OSError, also if there is none."""

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on. Raises OSError."""

    def write(self, name: str, data: memoryview) -> None:
        """Store an object, replacing one of that name; durable when it returns. Called in any thread.

        Raises:
            OSError: the object could not be stored.
        """

    def delete(self, name: str) -> None:
        """Delete an object, if there is one. Raises OSError."""

"""All protocols between packages on one page, which is also an overview of the architecture.

    Source ----> loader ----> Engine(model, Objective) ----> GradientStep ----> report ----> Monitor
    samples      GlobalBatch  forward and backward           reduction,         of an        observes,
                 + cursor                                    optimizer step     update       may request

`training/assemble` and `assembly/parallelize` know which implementations exist.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lockstep.core.jobs import JobCommand, JobStatus, LaunchedJob, LaunchPlan
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
    from pydantic import BaseModel
    from torch import Tensor, nn


@runtime_checkable
class Source(Protocol):
    """A dataset that returns its samples in any order."""

    @property
    @abstractmethod
    def facts(self) -> DataFacts: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A text that changes whenever the samples do; a run that resumes compares it."""

    @property
    def draws(self) -> bool:
        """True if fetching draws random numbers (augmentation), which are then keyed for each micro-batch."""
        return False

    @abstractmethod
    def fetch(self, indices: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Batch:
        """Return the samples at `indices` [samples], collated, on the CPU, with `samples` and `tokens` filled in."""


@runtime_checkable
class Objective(Protocol):
    """The loss that a model is trained for: a sum over targets, and the number of targets.

    An update differentiates `sum of loss_sum / sum of count` over all its micro-batches and ranks, so any
    split of the samples gives the same gradient.

    Four more members are optional: `decomposes` (False if the loss of a batch is not the sum of its samples' losses),
    `metric_sums` and `metrics`, as in `EvaluatedObjective`, and `from_companion`, as in `UsesCompanion`; without it,
    `batch.companion` has all outputs of a companion.
    """

    @abstractmethod
    def count(self, batch: Batch) -> float:
        """Return the number of targets in the batch, known before the forward: the loss is divided by it."""

    @abstractmethod
    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the sum, not the mean, of the targets' losses: fp32, 0-dim, for outputs of any precision."""


class EvaluatedObjective(Objective, Protocol):
    """An objective with metrics, as the training step uses it; one with the optional members left out gets defaults."""

    @property
    def decomposes(self) -> bool:
        """True if the loss of a batch is the sum of its samples' losses.

        If not (in-batch contrast, batch norm), the micro-batch size and the number of ranks change the run.
        """

    def metric_sums(self, outputs: Any, batch: Batch) -> Mapping[str, Tensor]:
        """Return further 0-dim sums for evaluation, such as the number of right answers."""

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the reported metrics, from sums over the whole evaluation set; `loss` is among them."""


@runtime_checkable
class UsesCompanion(Protocol):
    """An objective that compares the model with a companion, a frozen second model (`objective.companion`)."""

    @abstractmethod
    def from_companion(self, outputs: Any, batch: Batch) -> Any:
        """Return what the loss needs of the companion's outputs for a batch: `batch.companion` of `loss_sum`.

        Whatever it returns is kept until the loss is known, so a few numbers are better than logits.
        """


@runtime_checkable
class LooksAhead(UsesCompanion, Protocol):
    """An objective with a loss that depends on sums over the whole update, known before its first backward."""

    @abstractmethod
    def ahead(self, batch: Batch) -> Batch:
        """Return what the model computes ahead, without gradients and in evaluation mode, of a micro-batch."""

    @abstractmethod
    def sums_ahead(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the sums of a micro-batch, [n], which are then added over all micro-batches and ranks."""

    @abstractmethod
    def completed(self, batch: Batch, sums: Tensor) -> Batch:
        """Return the micro-batch to train on, with what `loss_sum` needs of the sums."""


Observe = Callable[["EvaluatedObjective", object, "Batch"], None]
"""Sees the outputs for a batch in an evaluation: (objective, outputs, batch)."""


def unobserved(objective: EvaluatedObjective, outputs: object, batch: Batch) -> None:
    """See nothing."""


NO_CONTEXT: AbstractContextManager[object] = nullcontext()
"""Does nothing; entering it can be left out."""


class GradientStep(Protocol):
    """Reduces accumulated gradients over ranks, and applies them to the parameters.

    Attributes:
        module: The module that a training forward calls.
    """

    module: nn.Module

    def begin_update(self, samples: int) -> None:
        """Prepare for an update of `samples` samples; called before its first forward. Does nothing by default."""
        return

    def sync_context(self, last: bool) -> AbstractContextManager[object]:
        """Return the context of a micro-batch's forward and backward; only in the last one gradients are reduced.

        `NO_CONTEXT` by default.
        """
        return NO_CONTEXT

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        """Accumulate the gradient of `seed` x `loss`, both 0-dim; called inside a `sync_context`."""

    def parameters_without_gradient(self) -> list[str]:
        """Return the names of the trained parameters that no backward of the first update has reached.

        By default those of `module` without a gradient.
        """
        return [name for name, each in self.module.named_parameters() if each.requires_grad and each.grad is None]

    def squared_norm(self) -> Tensor:
        """Return the squared 2-norm of the gradient summed over ranks: 0-dim, identical on every rank. Collective."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradient summed over ranks, or this rank's shard of it, of each parameter that has one.

        Called after the last `sync_context` is closed.
        """

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """Make one optimizer step with the summed gradient / `divisor` at learning rate `rate`; then clear gradients.

        With `keep` false, parameters and optimizer state stay bitwise identical.
        """

    def close(self) -> None:
        """Release what uses the process group, which is destroyed next. Does nothing by default."""
        return


class Engine(Protocol):
    """Turns a batch into a gradient."""

    @property
    def losses(self) -> list[Tensor]:
        """The sums of losses of the last update's micro-batches, unscaled, 0-dim, where this rank knows them."""

    def accumulate(self, batch: GlobalBatch, seed_scale: float | Tensor, announce: Callable[[Tensor], None]) -> None:
        """Accumulate the gradient of `seed_scale` x the sum of losses.

        Args:
            batch: This rank's micro-batches; `batch.step` keys the random numbers of the forward.
            announce: Called once, as soon as it is known, with this rank's sum of losses, unscaled, 0-dim: before
                gradients are reduced, and at the same point between collectives on every rank.
        """

    def outputs(self, inputs: Inputs) -> object:
        """Return the model's outputs for the inputs of a batch, in evaluation mode.

        Collective, with the same inputs on all ranks. None on a rank that doesn't hold the end of the model.
        """

    def evaluate(self, micro_batches: Iterable[Batch], observe: Observe = unobserved) -> Mapping[str, Tensor]:
        """Return this rank's sums over the batches: `loss_sum`, `count`, and the objective's `metric_sums`.

        Args:
            observe: Called with objective, outputs and batch where this rank has the model's outputs.
        """


class Optimizer(Protocol):
    """An optimizer that can discard its step without a copy of its state."""

    @property
    def groups(self) -> list[dict[str, object]]:
        """torch's parameter groups."""

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """Do what `GradientStep.update` does, with the `.grad` of the parameters that it holds."""

    def evaluate(self) -> Callable[[], None] | None:
        """Give the parameters the values to evaluate and to export; return a function that lets training continue.

        None: they always have these values.
        """
        return None

    def state_dict(self) -> dict[str, object]: ...

    def load_state_dict(self, state: dict[str, object]) -> None: ...


class Control(Protocol):
    """The ranks along an axis of the mesh, and their exchange of objects, which are on the host.

    It never waits for an accelerator. A rank waits for the others as long as `launch.timeout` allows, and in a barrier
    without a limit. So one comes before an exchange where some ranks may have been busy for long: with a disk, a
    download, the tokens of a dataset.
    """

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def gather(self, value: object) -> list[object]:
        """Return every rank's value, in the order of ranks; tensors on the CPU. Slow: not for a training step."""

    def broadcast(self, value: object) -> object:
        """Return the first rank's value; tensors on the CPU."""

    def barrier(self) -> None:
        """Wait for all ranks of the axis, however long they take. Raises PeerFailed: one has failed."""


class Axis(Control, Protocol):
    """The ranks along an axis of the mesh, and their collectives; an axis of one rank returns its own values.

    Tensors are reduced by the accelerator's backend, on its stream. A result is where its tensor was: for one on the
    CPU, the host waits.
    """

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the axis, in place, and return it."""

    def start_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start `sum` in the background; return a function that waits for the result."""

    def start_all_to_all(self, sent: Tensor, given: Sequence[int], taken: Sequence[int]) -> Callable[[], Tensor]:
        """Start sending a part of `sent` to every rank; return a function that waits for this rank's own.

        The result is on the device of the collectives, also if `sent` is not.

        Args:
            sent: 1-dim; first the elements for the first rank.
            given: How many elements go to each rank; perhaps 0.
            taken: How many come from it.
        """

    def concatenate(self, part: Tensor, whole: Tensor) -> None:
        """Write every rank's `part` [n] into `whole` [ranks x n], in the order of ranks."""

    def copy_first(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with the first rank's."""

    def swap(self, to: int, sent: Tensor | None, source: int, received: Tensor | None) -> None:
        """Send a tensor on the CPU to a rank while filling another from a rank; None: nothing goes there, or comes."""


@runtime_checkable
class Transform(Protocol):
    """A change to the module before it is sharded. Transforms are applied in the order that their rules give.

    Attributes:
        name: The config key, or any unique name, that others refer to it by.
        after: Names of the transforms that are applied before this one, where they are present. `parallel.pipeline` is
            the pipeline partition.
        before: Names of the transforms that are applied after this one, where they are present.
    """

    name: str
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        """Return why it can't be applied to this model on this device; None if it can."""
        return None

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Return the changed model, which may be the same object."""


@runtime_checkable
class Monitor(Protocol):
    """An observer of a run's reports, on the first rank, that may answer with requests.

    Subclass it and override what you need. A monitor that raises is dropped with a warning: it never ends a training.
    """

    def start(self, info: RunInfo) -> None:
        """Receive the facts of a run that starts or resumes. Called once per attempt, before all other methods."""
        return

    def restarted(self, report: RestartReport) -> None:
        """Receive where the run resumes. An earlier attempt's reports of updates after that no longer count."""
        return

    def see(self, report: StepReport) -> Iterable[Request]:
        """Receive the report of an update. Return requests, which all ranks receive with the next update."""
        return ()

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        """Receive the report of an evaluation set. Return requests, as in `see`."""
        return ()

    def saved(self, report: SaveReport) -> None:
        """Receive the report of a save that has ended, successfully or not."""
        return

    def finish(self, error: BaseException | None) -> None:
        """Receive the end of the run, with `error` if it failed. Called once per attempt, after all other methods."""
        return


@runtime_checkable
class ObjectStore(Protocol):
    """A store of checkpoints as named objects (`step-00000480/manifest.json`): a bucket, a database, memory."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The address that messages show."""

    @abstractmethod
    def names(self, prefix: str) -> list[str]:
        """Return the names of all objects that begin with `prefix`. Raises OSError."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the number of bytes of an object. Raises OSError, also if there is none."""

    @abstractmethod
    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on. Raises OSError."""

    @abstractmethod
    def write(self, name: str, data: memoryview) -> None:
        """Store or replace an object, durably when it returns. Raises OSError. Called in any thread."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object, if there is one. Raises OSError."""


@runtime_checkable
class Launcher(Protocol):
    """A place where `lockstep launch` runs a command line of Lockstep: a Slurm cluster, hosts, a cloud.

    Attributes:
        options: A frozen pydantic model. Its fields become flags, the strings below them the flags' help.
    """

    options: type[BaseModel]

    @abstractmethod
    def plan(self, command: JobCommand, options: Any) -> LaunchPlan:
        """Return what would be written and executed, without doing it. Raises ConfigError.

        Args:
            options: An object of the class `options`.
        """

    @abstractmethod
    def submit(self, plan: LaunchPlan) -> str:
        """Do what the plan contains, and return the job's identifier. Raises RunFailed."""

    @abstractmethod
    def status(self, job: LaunchedJob) -> JobStatus:
        """Return the job's state. Raises ConfigError if there is no such job."""

    @abstractmethod
    def follow(self, job: LaunchedJob) -> int:
        """Print the job's output until it has ended, and return its exit code, as of `lockstep train`."""

    @abstractmethod
    def cancel(self, job: LaunchedJob) -> None:
        """Stop the job for good. Raises RunFailed."""

"""Every socket on one page. Reading it is reading the architecture.

    Source ----> loader ----> Engine(model, Objective) ----> Sharding ----> report ----> Monitor
    what data    GlobalBatch  how a batch becomes            where state    of an        who looks on,
    there is     + cursor     a gradient                     lives          update       and may ask

A room implements sockets; only `training/assemble`, with `shardings` and `engines`, knows which there are.
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
    RunInfo,
    SaveReport,
    StepReport,
    TrainingState,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor, nn


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


class Sharding(Protocol):
    """Where parameters, gradients and optimizer state live, and how they are updated."""

    @property
    def module(self) -> nn.Module:
        """What a training forward calls."""

    @property
    def bare(self) -> nn.Module:
        """The model itself, its parameters under their own names; what an evaluation's forward calls."""

    @property
    def averages_over(self) -> int:
        """The reduction of gradients divides by this many ranks; `Session.gradient_unit` makes up for it."""

    def window(self, last: bool) -> AbstractContextManager[object]:
        """Around forward and backward of a micro-batch; gradients are reduced only in the last one's."""

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        """The gradient of `seed` x `loss`, both 0-dim, added to what was accumulated; inside a `window`."""

    def unreached(self) -> list[str]:
        """Names of the trained parameters that no gradient has reached, in the backwards of the first update."""

    @property
    def norm_is_whole(self) -> bool:
        """Whether `squared_norm` is that of the whole gradient, the same on every rank."""

    def squared_norm(self) -> Tensor:
        """Squared 2-norm of the accumulated gradient, 0-dim; if it isn't the whole's, this rank's part: summed over all
        ranks, no element counts twice."""

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """One optimizer step on the accumulated gradient / `divisor` at learning rate `rate`; then clears it.
        With `keep` false, parameters and optimizer state stay as they were, to the bit."""

    def synchronize(self) -> None:
        """Gives all ranks the first one's buffers (running means), which their forwards may have changed apart. All
        ranks together."""

    def state(self) -> TrainingState:
        """The live state of model and optimizer."""

    def weights(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Parameters and saved buffers, whole, on the CPU, under the model's own names, tied ones once under their
        first; gathered one after the other. To be used up, by all ranks together.

        Args:
            wanted: false on a rank that only takes part in the gathering: nothing comes there.
        """

    def gradients(self, *, wanted: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The accumulated gradient, as `weights`, of the parameters that have one. It is that of the whole update once
        the last `window` is closed."""

    def close(self) -> None:
        """Lets go of what holds the process group, which is taken apart next; `bare` stays."""

    def restore(self, state: TrainingState) -> None:
        """Puts in what `state` has had: whole tensors on the CPU, or this rank's parts of sharded ones.

        Raises:
            RunFailed: it is another model's or optimizer's.
        """


class Engine(Protocol):
    """How a batch becomes a gradient."""

    def accumulate(
        self,
        batch: GlobalBatch,
        seed_scale: float | Tensor,
        announce: Callable[[Tensor], None],
    ) -> None:
        """Accumulates the gradient of `seed_scale` x the sum of losses. `batch.step` keys what the forward draws.

        Calls `announce` once, as soon as it is known, with this rank's sum of losses, unscaled, 0-dim: before gradients
        are reduced, and at the same point between collectives on every rank."""

    def outputs(self, inputs: Inputs) -> object:
        """What the model makes of the inputs of a batch, in evaluation; all ranks together, on the same inputs. None on
        a rank that has only a part of the model, and not its end."""

    def evaluate(self, micro_batches: Iterable[Batch]) -> Mapping[str, Tensor]:
        """This rank's sums over the batches: `loss_sum`, `count`, and the objective's `metric_sums`. No gradients."""


class Optimizer(Protocol):
    """An optimizer whose step can be undone before it happens."""

    @property
    def groups(self) -> list[dict[str, object]]:
        """torch's parameter groups."""

    def update(self, rate: float, divisor: float | Tensor, keep: bool | Tensor) -> None:
        """As `Sharding.update`, on the `.grad` of the parameters it holds."""

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


class Transform(Protocol):
    """Module -> module, before sharding. The list of transforms is ordered by what each says of the others."""

    @property
    def name(self) -> str: ...

    @property
    def after(self) -> tuple[str, ...]:
        """Names of transforms that must come before this one, if they are there."""

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        """Why it can't be applied here, or None."""

    def apply(self, model: nn.Module) -> nn.Module: ...


class Monitor(Protocol):
    """Looks at reports and may answer with requests. Nothing else reaches into the loop."""

    def start(self, facts: RunInfo) -> None: ...

    def see(self, report: StepReport) -> Iterable[Request]: ...

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]: ...

    def saved(self, report: SaveReport) -> None:
        """A save has ended, well or not. On the first rank alone."""

    def finish(self, error: BaseException | None) -> None:
        """Called once, also when the run fails."""

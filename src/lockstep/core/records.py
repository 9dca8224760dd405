"""The records that packages pass to each other: values, without references back to their makers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Inputs = Mapping[str, Any] | tuple[Any, ...]
"""A forward's arguments: keyword arguments, or positional ones."""


TARGETS = ("labels", "label", "targets", "target")
"""The names of targets, in items of a dataset and among the parameters of a forward."""


@dataclass(frozen=True, slots=True)
class LeftOutSample:
    """A sample that is left out of its update, and of those of all later epochs, such as one that can't be read.

    Attributes:
        index: In the dataset.
        reason: The exception and the line that raised it, or what else leaves it out.
        position: The first one, in the order of the run, over all epochs; -1: not known yet.
        until: Position from which it is used again, because the config no longer leaves it out; None: it never is.
    """

    index: int
    reason: str
    position: int = -1
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: the samples of one forward and backward.

    Attributes:
        inputs: Keyword arguments of the model's forward (a mapping) or its positional ones (a tuple); tensors are
            [samples, ...].
        targets: What the objective compares the outputs with; the model does not get it.
        samples: Number of samples. 0 marks padding samples: they are computed so that all ranks call the same
            collectives, and their loss, count and metrics have no weight.
        tokens: Number of tokens without padding; for data without tokens, of samples.
        left_out: Samples that belong to the micro-batch and are not in it.
    """

    inputs: Inputs
    targets: Any
    samples: int
    tokens: int
    left_out: tuple[LeftOutSample, ...] = ()


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """A rank's share of the samples of one update, and the cursor after them.

    Attributes:
        micro_batches: The same number on every rank.
        samples: Number of samples over all ranks, without padding samples, with those that are left out.
        count: Valid targets in this rank's share, by the objective; with class weights the sum of their weights.
        epoch: From 0.
        cursor: Samples consumed by the run after this update.
        step: Number of the update, from 0.
        digest: Identifies the samples of this rank's share (`data.order`).
        left_out: Samples of this rank's share that are left out.
    """

    micro_batches: tuple[Batch, ...]
    samples: int
    count: float
    tokens: int
    epoch: int
    cursor: int
    step: int
    digest: int = 0
    left_out: tuple[LeftOutSample, ...] = ()


@dataclass(frozen=True, slots=True)
class DataFacts:
    """Sizes of a dataset, for planning.

    Attributes:
        samples: Number of samples in one epoch.
        tokens_per_sample: None if samples differ.
        vocabulary: Number of token ids, if there are tokens.
        bytes_per_token: Mean, if the tokens stand for text whose bytes are known (1 for bytes themselves).
        padding: Token id that pads samples to a common length, if a tokenizer has one.
    """

    samples: int
    tokens_per_sample: int | None
    vocabulary: int | None = None
    classes: int | None = None
    bytes_per_token: float | None = None
    padding: int | None = None


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """The size of a parameter, without its tensor. `dtype` is torch's name of it, such as `float32`."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    trainable: bool
    dtype: str = "float32"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Everything that an update changes, under names that do not depend on the mesh.

    Attributes:
        tensors: `model.PARAMETER_OR_BUFFER`, `optimizer.ENTRY.PARAMETER`, ...: the live tensors (a DTensor where a rank
            holds a shard), or those to load into them.
        values: Everything that is not a tensor, as JSON values.
        changes_in_forward: Names of tensors that a forward may change, not only an update (running means).
    """

    tensors: Mapping[str, Any]
    values: Mapping[str, Any] = field(default_factory=dict)
    changes_in_forward: frozenset[str] = frozenset()


class Request(Enum):
    """A request to the run between two updates, with a slot in the vote: all ranks receive it at the same update."""

    STOP = 0  # a monitor ends the run, as early stopping does
    EVALUATE = 1
    SHOW_LOG = 2  # a rank's user code has logged something
    SAVE = 3
    FAIL = 4  # a rank has no data for the next update: all ranks save this one, and the run fails
    PROFILE = 5  # the first rank has announced a request for a trace
    LEFT_OUT = 6  # a rank leaves samples out: all ranks exchange which
    SNAPSHOT = 7  # it is time for a snapshot in memory
    NO_SNAPSHOT = 8  # the best state is being saved: the run goes back to it if that save is lost
    PAUSE = 9  # a signal: all ranks save, and stop


class Tally(Enum):
    """A sum in the vote, in addition to that of the losses."""

    DIGEST = 0  # identifies the samples of this update, see `data.order`; the sum is modulo 2^40
    SETTLED = 1  # saves that this rank has finished, successfully or not
    FAILED = 2  # saves among these that failed


class Verdict(Enum):
    """The outcome of an update: kept, or the reason why it was discarded."""

    KEPT = 0
    OVERFLOW = 1  # fp16 gradients overflowed the loss scale: expected occasionally; the scale is reduced
    NON_FINITE = 2  # a NaN or an infinity that no loss scale explains
    SPIKE = 3  # a loss or a gradient norm far above those before (`recovery.bad_numbers`)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one update, identical on every rank.

    Attributes:
        step: The update's number, from 1.
        samples, tokens: Consumed by the run so far.
        epoch: Epoch of the update's samples, from 0.
        loss: Mean over all valid targets of the update; NaN if it has none.
        count: Valid targets of the update, over all ranks; 0: all of its samples are left out, or have no target.
        grad_norm: Global 2-norm of the gradient of `loss`, before clipping.
        lr: Learning rate of the update, for groups whose `lr_scale` is 1.
        verdict: Whether the update was kept, and why not.
        loss_scale: 1 unless the compute precision is fp16.
        discarded: Updates discarded so far, including this one.
        seconds: Time since the run's first update began.
        update_samples, update_tokens: Consumed by this update.
        requests: Made by any rank since the previous update.
        spike: Which number makes the update a spike, and the limit; empty if none does. It may have been kept.
    """

    step: int
    samples: int
    tokens: int
    epoch: int
    loss: float
    count: float
    grad_norm: float
    lr: float
    verdict: Verdict
    loss_scale: float
    discarded: int
    seconds: float
    update_samples: int
    update_tokens: int
    requests: frozenset[Request] = frozenset()
    spike: str = ""

    @property
    def kept(self) -> bool:
        return self.verdict is Verdict.KEPT


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The result of an evaluation set, exact over all ranks.

    Attributes:
        name: Name of the evaluation set.
        step: Number of updates made before.
        metrics: Values by name, always with `loss`.
    """

    name: str
    step: int
    metrics: Mapping[str, float]
    samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NumbersReport:
    """The facts about an update whose numbers are bad, and what was done about it.

    Attributes:
        step: The update after which it is recorded.
        update: The bad one.
        what: Its loss and gradient norm, or what makes it a spike.
        action: What was done: `kept`, `discarded`, `repeated`, `left out`, `rolled back` or `stopped`.
        samples: Those that are suspected: of the whole update, of a micro-batch, or single ones that were found.
        where: The micro-batch that has them, or how they were found; empty: they are those of the whole update.
    """

    step: int
    update: int
    what: str
    action: str
    samples: tuple[int, ...] = ()
    where: str = ""


@dataclass(frozen=True, slots=True)
class RestartReport:
    """The position from which a run resumes.

    Attributes:
        attempt: Number of this attempt, from 1.
        step: Step of the checkpoint; updates after it are repeated, if an earlier attempt made them.
        samples: Samples consumed by the run up to this step.
    """

    attempt: int
    step: int
    samples: int


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of one save.

    Attributes:
        step: Number of the update after which it was made.
        size: Bytes of all ranks' files.
        seconds: Time from its start until it was published.
        lost: Seconds that training on the first rank waited for it.
        failure: Why the checkpoint does not exist; None if it does.
        made_room: Whether an older checkpoint was deleted because the disk was full: another attempt may succeed.
        newest: Step of the newest checkpoint, if this one does not exist; None if there is none, or if it is unknown.
    """

    step: int
    size: int
    seconds: float
    lost: float
    failure: str | None = None
    made_room: bool = False
    newest: int | None = None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts of a run that its start prints and its folder records: the config's choices as resolved.

    Attributes:
        recipe: Name of the run.
        steps: None if it is unknown in advance (a budget of tokens over data of varying length).
        global_size: Samples of an update: micro_size x accumulation x shares where that divides.
        parameters, trainable: Numbers of elements.
        peak_flops: Peak FLOP/s of one rank's device in the precision of matrix products; None if unknown.
        flops_per_token: FLOPs of forward and backward; None if unknown.
        resumed_from: Step of the checkpoint that this attempt resumed from; None if it started from the beginning.
        shares: Number of ranks that get different samples; None for all.
        notes: Further facts for the user, one sentence each.
        again: Whether the launcher has started the ranks again.
    """

    recipe: str
    folder: str
    strategy: str
    backend: str
    precision: str
    device: str
    ranks: int
    steps: int | None
    global_size: int
    micro_size: int
    accumulation: int
    parameters: int
    trainable: int
    epoch_samples: int
    peak_flops: float | None = None
    flops_per_token: float | None = None
    resumed_from: int | None = None
    shares: int | None = None
    notes: tuple[str, ...] = ()
    again: bool = False

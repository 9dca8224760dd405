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
IGNORED = -100
"""The target of positions that aren't trained, such as padding or a prompt."""
LANGUAGE_MODEL = "language-model"
"""The task of Lockstep's language models, beside those of transformers models."""


@dataclass(frozen=True, slots=True)
class LeftOutSample:
    """A sample that is left out of its step, and of all later epochs, such as one that can't be read.

    Attributes:
        index: In the dataset.
        reason: The exception and the line that raised it, or what else leaves it out.
        position: The first one, in the order of the run, over all epochs; -1: not known yet.
        until: Position where it is used again, because the config no longer leaves it out.
    """

    index: int
    reason: str
    position: int = -1
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: the samples of one forward and backward.

    Attributes:
        inputs: Arguments of the model's forward; tensors are [samples, ...].
        targets: For the objective to compare the outputs with; the model does not get them.
        samples: 0 marks padding, which is computed so that all ranks call the same collectives, and has no weight.
        tokens: Without padding; for data without tokens, samples.
        left_out: Samples that belong to the micro-batch and are not in it.
        companion: What the objective keeps of the companion's outputs; None: there is no companion.
    """

    inputs: Inputs
    targets: Any
    samples: int
    tokens: int
    left_out: tuple[LeftOutSample, ...] = ()
    companion: Any = None


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """A rank's share of the samples of one step, and the cursor after them.

    Attributes:
        micro_batches: The same number on every rank.
        samples: Over all ranks, without padding, with those that are left out.
        count: Valid targets in this rank's share, by the objective; with class weights the sum of their weights.
        epoch, step: From 0.
        cursor: Samples consumed by the run after this step.
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
        samples: In one epoch.
        tokens_per_sample: None if samples differ.
        tokens: Of an epoch, without padding, if samples differ and their lengths are known.
        vocabulary: Number of token ids, if there are tokens.
        bytes_per_token: Mean, if tokens stand for text.
        padding: Token id of padding, if a tokenizer has one.
        pairs: Whether a sample is two rows of a batch: a chosen and a rejected answer.
        class_names: By number; empty: classes have none.
        numbers: Whether the target of a sample is a number, for regression.
    """

    samples: int
    tokens_per_sample: int | None
    vocabulary: int | None = None
    classes: int | None = None
    bytes_per_token: float | None = None
    padding: int | None = None
    pairs: bool = False
    tokens: int | None = None
    class_names: tuple[str, ...] = ()
    numbers: bool = False

    @property
    def mean_tokens(self) -> float | None:
        """Mean tokens of a sample; None if they aren't known."""
        return self.tokens_per_sample if self.tokens is None else self.tokens / self.samples


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """Size and dtype (torch's name) of a parameter, without its tensor."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    trainable: bool
    dtype: str = "float32"
    quantized: float = 0.0  # bytes of an element once training starts

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * (self.quantized or self.element_bytes))


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Everything that a step changes, under names that do not depend on the mesh.

    Attributes:
        tensors: `model.NAME`, `optimizer.ENTRY.PARAMETER`, ...: live tensors (DTensors if sharded), or those to load.
        values: The rest, as JSON values.
        changes_in_forward: Names of tensors that a forward may change (running means).
    """

    tensors: Mapping[str, Any]
    values: Mapping[str, Any] = field(default_factory=dict)
    changes_in_forward: frozenset[str] = frozenset()


class Request(Enum):
    """A request to the run between two steps, with a slot in the vote: all ranks receive it at the same step."""

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

    __hash__ = object.__hash__  # sets of them are asked in each update, and Enum's own is Python code


class Tally(Enum):
    """A sum in the vote, in addition to the losses'."""

    DIGEST = 0  # identifies the samples of this update, see `data.order`; the sum is modulo 2^40
    SETTLED = 1  # saves that this rank has finished, successfully or not
    FAILED = 2  # saves among these that failed


class Verdict(Enum):
    """The outcome of a step: kept, or the reason why it was discarded."""

    KEPT = 0
    OVERFLOW = 1  # fp16 gradients overflowed the loss scale: expected occasionally; the scale is reduced
    NON_FINITE = 2  # a NaN or an infinity that no loss scale explains
    SPIKE = 3  # a loss or a gradient norm far above those before (`recovery.bad_numbers`)


@dataclass(slots=True)
class StepReport:
    """The result of one step, identical on every rank. Don't change it: every monitor gets the same one.

    Attributes:
        step: From 1.
        samples, tokens: Consumed by the run so far.
        epoch: Epoch of the step's samples, from 0.
        loss: Mean over all valid targets; NaN if there are none.
        count: Valid targets over all ranks.
        grad_norm: Global 2-norm of the gradient of `loss`, before clipping.
        lr: Learning rate of groups with `lr_scale` 1.
        loss_scale: 1 unless the compute precision is fp16.
        discarded: Steps discarded so far, including this one.
        seconds: Since the run's first step began.
        update_samples, update_tokens: Consumed by this step.
        requests: Made by any rank since the previous step.
        spike: Which number is a spike, and the limit; empty if none is. The step may have been kept.
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
        name: Of the evaluation set.
        step: Steps made before.
        metrics: By name, always with `loss`.
    """

    name: str
    step: int
    metrics: Mapping[str, float]
    samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NumbersReport:
    """A step with bad numbers, and the action taken.

    Attributes:
        step: It is recorded after this step.
        update: The bad one.
        what: Its loss and gradient norm, or what makes it a spike.
        action: `kept`, `discarded`, `repeated`, `left out`, `rolled back` or `stopped`.
        samples: The suspects: of the whole step, of a micro-batch, or single ones.
        where: The micro-batch that has them, or how they were found; empty: the whole step.
    """

    step: int
    update: int
    what: str
    action: str
    samples: tuple[int, ...] = ()
    where: str = ""


@dataclass(frozen=True, slots=True)
class RestartReport:
    """The position where a run resumes.

    Attributes:
        attempt: From 1.
        step: Step of the checkpoint.
        samples: Consumed by the run up to this step.
    """

    attempt: int
    step: int
    samples: int


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of one save.

    Attributes:
        step: It was made after this step.
        size: Bytes of all ranks' files.
        seconds: From its start until it was published.
        lost: Seconds that training on rank 0 waited for it.
        failure: Why the checkpoint does not exist; None if it does.
        made_room: An older checkpoint was deleted because the disk was full: another attempt may succeed.
        newest: Step of the newest checkpoint, if this one does not exist.
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
    """Facts of a run that its start prints and its folder records.

    Attributes:
        recipe: Name of the run.
        steps: None if unknown in advance (a budget of tokens over data of varying length).
        global_size: Samples of a step.
        parameters, trainable: Numbers of elements.
        peak_flops: FLOP/s of one rank's device in the precision of matrix products; None if unknown.
        flops_per_token: Of forward and backward; None if unknown.
        resumed_from: Step of the checkpoint that this attempt resumed from, if any.
        shares: Ranks that get different samples; None for all.
        notes: For the user, one sentence each.
        again: The launcher has restarted the ranks.
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

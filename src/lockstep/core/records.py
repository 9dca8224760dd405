"""The records that travel between packages. They are values: nobody holds a pointer back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Inputs = Mapping[str, Any] | tuple[Any, ...]
"""A forward's arguments: keyword arguments, or positional ones."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: the samples of one forward and backward.

    Attributes:
        inputs: keyword arguments of the model's forward (a mapping) or its positional ones (a tuple); tensors are
            [samples, ...].
        targets: what the objective compares the outputs with; the model does not get it.
        samples: how many samples it holds. 0 marks filler: it is computed so that no rank waits for a missing
            collective, and its loss, count and metrics have no weight.
        tokens: how many tokens it holds, padding not counted; for data without tokens, the samples.
    """

    inputs: Inputs
    targets: Any
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """This rank's share of the samples of one update, and the cursor after them.

    Attributes:
        micro_batches: the same number on every rank.
        samples: over all ranks, filler not counted.
        count: valid targets in this rank's share, by the objective; with class weights the sum of their weights.
        tokens: in this rank's share.
        epoch: of its samples, from 0.
        cursor: samples consumed by the run once this update is done.
        step: the update it belongs to, from 0.
            digest: of which samples this rank's share has (`data.order`).
    """

    micro_batches: tuple[Batch, ...]
    samples: int
    count: float
    tokens: int
    epoch: int
    cursor: int
    step: int
    digest: int = 0


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What planning needs to know about a data set.

    Attributes:
        samples: in one epoch.
        tokens_per_sample: if all samples have the same number; None if they differ.
        vocabulary: number of token ids, if there are tokens.
        classes: number of classes, if there are any.
        bytes_per_token: mean, if the tokens stand for text whose bytes are known (1 for bytes themselves).
        padding: token id that fills samples up to a common length, if a tokenizer has one.
    """

    samples: int
    tokens_per_sample: int | None
    vocabulary: int | None = None
    classes: int | None = None
    bytes_per_token: float | None = None
    padding: int | None = None


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """One parameter, without torch: shape, bytes per element, whether it is trained."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    trainable: bool

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Everything that an update changes, under names that do not depend on the mesh.

    Attributes:
        tensors: `model.PARAMETER_OR_BUFFER`, `optimizer.ENTRY.PARAMETER`, ...: the live ones (a DTensor where a rank
            holds a part), or what is to be put into them.
        values: what is not a tensor, as plain JSON.
        changes_in_forward: names of tensors that a forward may change, not only an update (running means).
    """

    tensors: Mapping[str, Any]
    values: Mapping[str, Any] = field(default_factory=dict)
    changes_in_forward: frozenset[str] = frozenset()


class Request(Enum):
    """A request to the run between two updates.

    Each has a slot in the vote, so that all ranks receive one rank's request at the same update.
    """

    STOP = 0
    EVALUATE = 1
    SHOW_LOG = 2  # a rank's user code has logged something
    SAVE = 3
    SAVE_MEMORY = 4  # a rank is short of memory: recompute activations from here on
    FAIL = 5  # a rank has no data for the next update: all save this one, and the run fails


class Tally(Enum):
    """A sum in the vote, besides that of the losses."""

    DIGEST = 0  # of the samples of this update, see `data.order`; a sum is known modulo 2^40
    SETTLED = 1  # saves that this rank has written, or failed to
    FAILED = 2  # of these


class Verdict(Enum):
    """Whether an update was kept, or why it was discarded, by severity."""

    KEPT = 0
    OVERFLOW = 1  # fp16 gradients overflowed the loss scale: expected occasionally; the scale is reduced
    NON_FINITE = 2  # a NaN or an infinity that no loss scale explains


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one update, identical on every rank.

    Attributes:
        step: the update's number, from 1.
        samples: consumed by the run so far.
        tokens: consumed by the run so far.
        epoch: of the update's samples, from 0.
        loss: sum of losses over all valid targets of the update, divided by their number (the mean over targets).
        count: valid targets of the update, over all ranks.
        grad_norm: global 2-norm of the gradient of `loss`, before clipping.
        lr: learning rate of the update (of groups whose `lr_scale` is 1).
        verdict: whether the update was kept, and why not.
        loss_scale: of fp16, otherwise 1.
        discarded: updates discarded so far, this one included.
        seconds: since the run's first update began.
        update_samples: of this update alone.
        update_tokens: of this update alone.
        requests: made by any rank since the update before.
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

    @property
    def kept(self) -> bool:
        return self.verdict is Verdict.KEPT


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """The result of evaluating on one set, exact over all ranks.

    Attributes:
        name: of the evaluation set.
        step: updates done when it was made.
        metrics: by name, `loss` always among them.
        samples: number of samples evaluated.
        seconds: duration.
    """

    name: str
    step: int
    metrics: Mapping[str, float]
    samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RestartReport:
    """From where a run resumes.

    Attributes:
        attempt: number of this attempt, from 1.
        step: of the checkpoint; updates after it are repeated, if an earlier attempt made them.
        samples: consumed by the run up to there.
    """

    attempt: int
    step: int
    samples: int


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The result of one save.

    Attributes:
        step: update after which it was made.
        size: bytes, of all ranks' files.
        seconds: from its start until it was published.
        lost: seconds that training on the first rank waited for it.
        failure: why the checkpoint does not exist; None if it does.
        made_room: an older checkpoint was deleted because the disk was full: another attempt may succeed.
        newest: step of the newest checkpoint that exists, if this one does not; None: there is none, or it is unknown.
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
    """What the start of a run prints and its folder records: the config's choices as resolved.

    Attributes:
        recipe: what the run is called.
        folder: of the run.
        strategy, backend, precision, device: as resolved.
        ranks, steps, global_size, micro_size, accumulation: global_size = micro_size x accumulation x shares where
            it divides. `steps` is None if it is unknown in advance (a budget of tokens
            over data of varying length).
        shares: ranks that have samples of their own; None: all.
        parameters, trainable: numbers of elements.
        peak_flops: of one rank's device in the compute precision, per second; None if unknown.
        flops_per_token: of forward and backward; None if unknown.
        resumed_from: step of the checkpoint that this attempt resumed from; None: it started from the beginning.
        notes: further facts for the user, one sentence each.
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
    notes: tuple[str, ...] = field(default=())

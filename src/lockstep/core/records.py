"""The records that travel between the rooms. Values only: nobody holds a pointer back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Inputs = Mapping[str, Any] | tuple[Any, ...]
"""Of a model's forward: keyword arguments, or positional ones."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: what one forward and backward see.

    Attributes:
        inputs: keyword arguments of the model's forward (a mapping) or its positional ones (a tuple); tensors are
            [samples, ...].
        targets: what the objective compares the outputs with; the model never sees it.
        samples: how many samples it holds. 0 marks filler: it is computed so that no rank waits for a missing
            collective, and its loss, count and metrics get no weight.
        tokens: how many tokens it holds, padding not counted; for data without tokens, the samples.
    """

    inputs: Inputs
    targets: Any
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """This rank's share of the samples of one update, and the cursor behind them.

    Attributes:
        micro_batches: as many on every rank.
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
    """What planning needs to know of a data set.

    Attributes:
        samples: in one epoch.
        tokens_per_sample: if every sample has as many; None if they differ.
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
    """All that an update changes, under names that depend on no mesh.

    Attributes:
        tensors: `model.PARAMETER_OR_BUFFER`, `optimizer.ENTRY.PARAMETER`, ...: the live ones (a DTensor where a rank
            holds a part), or what is to be put into them.
        values: plain JSON: what isn't a tensor.
        changes_in_forward: names of tensors that a forward may change, not only an update (running means).
    """

    tensors: Mapping[str, Any]
    values: Mapping[str, Any] = field(default_factory=dict)
    changes_in_forward: frozenset[str] = frozenset()


class Request(Enum):
    """What anybody may ask of the run between updates. A set: asking twice is asking once.

    Each has a slot in the vote, so that one rank's request is heard by all at the same update.
    """

    STOP = 0
    EVALUATE = 1
    SHOW_LOG = 2  # a rank's user code has logged something
    SAVE = 3
    SAVE_MEMORY = 4  # a rank has little left: compute activations again from here on
    FAIL = 5  # a rank has no data for the next update: all save this one, and the run fails


class Tally(Enum):
    """What each rank adds up in the vote besides its losses."""

    DIGEST = 0  # of the samples of this update, see `data.order`; a sum is known modulo 2^40
    SETTLED = 1  # saves that this rank has written, or failed to
    FAILED = 2  # of these


class Verdict(Enum):
    """What became of an update, by severity."""

    KEPT = 0
    OVERFLOW = 1  # fp16 gradients overflowed the loss scale: expected now and then, and undone by a smaller scale
    NON_FINITE = 2  # a NaN or an infinity that no loss scale explains


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one update did, identical on every rank. On a GPU it is read one update late.

    Attributes:
        step: the update's number, from 1.
        samples, tokens: consumed by the run so far.
        epoch: of the update's samples, from 0.
        loss: sum of losses over all valid targets of the update, divided by their number (the mean over targets).
        count: valid targets of the update, over all ranks.
        grad_norm: global 2-norm of the gradient of `loss`, before clipping.
        lr: learning rate of the update (of groups whose `lr_scale` is 1).
        verdict: kept or not, and why.
        loss_scale: of fp16, otherwise 1.
        discarded: updates discarded so far, this one included.
        seconds: since the run's first update began.
        update_samples, update_tokens: of this update alone.
        requests: what any rank asked for since the update before.
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
    """What one evaluation of one named set found, exact over all ranks.

    Attributes:
        name: of the evaluation set.
        step: updates done when it was made.
        metrics: by name, `loss` always among them.
        samples, seconds: how many, how long.
    """

    name: str
    step: int
    metrics: Mapping[str, float]
    samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What became of one save.

    Attributes:
        step: that it was made after.
        size: bytes, of all ranks' files.
        seconds: from its start until it was published.
        lost: seconds that the first rank's training waited for it.
        failure: why it doesn't exist; None if it does.
        made_room: an older checkpoint was deleted, since the disk was full: another attempt may succeed.
        newest: step of the newest checkpoint that is there, if this one isn't; None: there is none, or nobody knows.
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
    """What the start of a run prints and its folder keeps: the answers, not the questions.

    Attributes:
        recipe: what the run is called.
        folder: where it lies.
        strategy, backend, precision, device: as resolved.
        ranks, steps, global_size, micro_size, accumulation: global_size = micro_size x accumulation x shares where
            it divides. `steps` is None if only running will tell (a budget of tokens over ragged data).
        shares: ranks that have samples of their own; None: all.
        parameters, trainable: numbers of elements.
        peak_flops: of one rank's device in the compute precision, per second; None if unknown.
        flops_per_token: of forward and backward; None if unknown.
        resumed_from: step of the checkpoint that this attempt went on from; None: it began anew.
        notes: what a user should know, one sentence each.
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

"""What Python hands to a run in an unusual form: each row is trained to a loss, or refused with a kind and a key.

Rows are the same under every strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.worlds import in_world
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.records import Batch
from lockstep.launch.outcome import LaunchResult
from lockstep.loop.session import components_of

POINTS, CLASSES = small.points(16).tensors


@dataclass(frozen=True)
class Row:
    """A run's objects. `refusal`: the kind of the error, and the key of a ConfigError; None: it trains.

    Attributes:
        like: The row whose losses it has; None: only finite ones.
    """

    refusal: tuple[type[Exception], str] | None = None
    like: str | None = "plain"
    model: Callable[[], nn.Module] = small.Net
    data: Any = field(default_factory=lambda: TensorDataset(POINTS, CLASSES))
    objective: Any = field(default_factory=nn.CrossEntropyLoss)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] | None = None


OBJECTIVE = (lockstep.ConfigError, "objective")
MODEL = (lockstep.ConfigError, "model")
FAILED = (lockstep.RunFailed, "")
DATA = (lockstep.ConfigError, "")
CLASSIFIES: dict[str, Any] = {"objective": None, "config": {"objective": {"kind": "classification"}}}


def _sum(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch.targets, reduction="sum")


class Sums(small.CrossEntropy):
    """An objective whose metrics are those of a function."""

    def __init__(self, sums: Callable[[Tensor], Any]) -> None:
        self._sums = sums

    def metric_sums(self, outputs: Tensor, batch: Batch) -> Any:
        return self._sums(torch.full((batch.samples,), 0.5))


class Buffered(small.Net):
    def __init__(self, buffer: Tensor, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("odd", buffer, persistent=persistent)


class Returns(small.Net):
    """Its outputs in another form."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._form = form

    def forward(self, points: Tensor) -> Any:
        return self._form(super().forward(points))


class Single(small.Net):
    def forward(self, points: Tensor) -> Tensor:
        return super().forward(points)[:, 0]


class OwnStep(small.Net):
    """As a LightningModule has it."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class Spares(small.Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)


class Speaker(nn.Module):
    """A language model as in nanoGPT: without targets, it has logits of the last position only."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden = self.embedding(idx)
        if targets is None:
            return self.head(hidden[:, [-1]]), None
        logits = self.head(hidden)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Logits(Speaker):
    """The same model, whose objective is Lockstep's."""

    def forward(self, idx: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.embedding(idx))


def _texts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(10, (16, 9), generator=torch.Generator().manual_seed(2))
    return ids[:, :-1], ids[:, 1:].contiguous()


def _ragged(ignored: int) -> TensorDataset:
    """Texts of unequal lengths, so that a mean of means would be another loss."""
    inputs, targets = _texts()
    return TensorDataset(inputs, targets.masked_fill(torch.arange(8) >= torch.arange(1, 17)[:, None] % 7 + 1, ignored))


def _labels(dtype: torch.dtype) -> TensorDataset:
    return TensorDataset(POINTS, CLASSES.to(dtype))


TWO = CLASSES.clamp(max=1)
ROWS: dict[str, Row] = {
    "plain": Row(),
    # labels
    **{f"labels {kind}": Row(data=_labels(kind)) for kind in (torch.int32, torch.uint8, torch.int8, torch.int16)},
    **{
        f"classification {kind}": Row(data=_labels(kind), **CLASSIFIES)
        for kind in (torch.int32, torch.uint8, torch.int8, torch.int16)
    },
    "labels of two": Row(like=None, data=TensorDataset(POINTS, TWO)),
    "labels bool": Row(like="labels of two", data=TensorDataset(POINTS, TWO.bool())),
    "binary": Row(None, None, Single, TensorDataset(POINTS, TWO.float()), nn.BCEWithLogitsLoss()),
    **{
        f"binary {kind}": Row(None, "binary", Single, TensorDataset(POINTS, TWO.to(kind)), nn.BCEWithLogitsLoss())
        for kind in (torch.int64, torch.int32, torch.bool, torch.float64)
    },
    "labels float": Row(FAILED, data=_labels(torch.float32)),
    "labels float, classification": Row(FAILED, data=_labels(torch.float32), **CLASSIFIES),
    "labels [samples, 1]": Row(OBJECTIVE, data=TensorDataset(POINTS, CLASSES[:, None])),
    "labels too large": Row(FAILED, data=TensorDataset(POINTS, CLASSES + 5)),
    "labels negative": Row(FAILED, data=TensorDataset(POINTS, CLASSES - 3)),
    "labels too large, classification": Row(FAILED, data=TensorDataset(POINTS, CLASSES + 5), **CLASSIFIES),
    "texts as labels": Row(FAILED, data=[(point, "abc"[label]) for point, label in zip(POINTS, CLASSES, strict=True)]),
    "texts as labels, classification": Row(
        FAILED, data=[(point, "abc"[label]) for point, label in zip(POINTS, CLASSES, strict=True)], **CLASSIFIES
    ),
    # losses
    "loss": Row(objective=_sum),
    "loss float64": Row(objective=lambda outputs, batch: _sum(outputs, batch).double()),
    "loss a mean": Row(OBJECTIVE, objective=lambda outputs, batch: F.cross_entropy(outputs, batch.targets)),
    "loss constant": Row(OBJECTIVE, objective=lambda outputs, batch: torch.tensor(1.0)),
    "loss a parameterless leaf": Row(
        OBJECTIVE, objective=lambda outputs, batch: torch.tensor(1.0, requires_grad=True)
    ),
    "loss detached": Row(OBJECTIVE, objective=lambda outputs, batch: _sum(outputs, batch).detach()),
    "loss of argmax": Row(OBJECTIVE, objective=lambda outputs, batch: (outputs.argmax(-1) != batch.targets).sum()),
    "loss [1]": Row(OBJECTIVE, objective=lambda outputs, batch: _sum(outputs, batch)[None]),
    "loss of each": Row(
        OBJECTIVE, objective=lambda outputs, batch: F.cross_entropy(outputs, batch.targets, reduction="none")
    ),
    "loss complex": Row(OBJECTIVE, objective=lambda outputs, batch: _sum(outputs, batch) * 1j),
    "loss a number": Row(OBJECTIVE, objective=lambda outputs, batch: _sum(outputs, batch).item()),
    "loss None": Row(OBJECTIVE, objective=lambda outputs, batch: None),
    "loss in a dict": Row(OBJECTIVE, objective=lambda outputs, batch: {"loss": _sum(outputs, batch)}),
    "loss of the forward": Row(
        OBJECTIVE, model=lambda: Returns(lambda logits: logits.square().sum()), objective=lambda outputs, batch: outputs
    ),
    "a function of targets": Row(DATA, objective=lambda outputs, targets: F.cross_entropy(outputs, targets)),
    # metrics
    "metric a tensor": Row(objective=Sums(lambda halves: {"half": halves.sum()}), metrics={"half": 0.5}),
    "metric a number": Row(objective=Sums(lambda halves: {"half": float(halves.sum())}), metrics={"half": 0.5}),
    "metric of numpy": Row(objective=Sums(lambda halves: {"half": halves.numpy().sum()}), metrics={"half": 0.5}),
    "metric [1]": Row(objective=Sums(lambda halves: {"half": halves.sum()[None]}), metrics={"half": 0.5}),
    "metric a vector": Row(OBJECTIVE, objective=Sums(lambda halves: {"half": halves})),
    "metric a complex number": Row(OBJECTIVE, objective=Sums(lambda halves: {"half": halves.sum() * 1j})),
    "metric a text": Row(OBJECTIVE, objective=Sums(lambda halves: {"half": "x"})),
    "metric None": Row(OBJECTIVE, objective=Sums(lambda halves: {"half": None})),
    "metric with the loss's name": Row(OBJECTIVE, objective=Sums(lambda halves: {"loss_sum": halves.sum()})),
    "metric without a name": Row(OBJECTIVE, objective=Sums(lambda halves: {1: halves.sum()})),
    "metrics None": Row(OBJECTIVE, objective=Sums(lambda halves: None)),
    # modules of other tools
    "training_step": Row(OBJECTIVE, model=OwnStep, objective=None),
    "training_step and a loss": Row(model=OwnStep),
    # outputs
    "outputs with None": Row(model=lambda: Returns(lambda logits: (logits, None))),
    "outputs in a list": Row(model=lambda: Returns(lambda logits: [logits]), **CLASSIFIES),
    "outputs by name": Row(model=lambda: Returns(lambda logits: {"logits": logits})),
    "outputs with a loss that is left out": Row(FAILED, model=lambda: Returns(lambda logits: (logits, logits.sum()))),
    "outputs of two heads": Row(FAILED, model=lambda: Returns(lambda logits: (logits, logits))),
    "outputs None": Row(FAILED, model=lambda: Returns(lambda logits: None)),
    "outputs detached": Row(OBJECTIVE, model=lambda: Returns(lambda logits: logits.detach())),
    # models that take targets
    "own loss": Row(None, None, Logits, _ragged(-100), None, {"objective": {"kind": "next-token"}}),
    "nanoGPT": Row(None, "own loss", Speaker, _ragged(-1), None),
    "nanoGPT, items by name": Row(
        None, "own loss", Speaker,
        [{"idx": ids, "targets": targets} for ids, targets in zip(*_ragged(-1).tensors, strict=True)], None,
    ),
    # buffers
    **{
        f"buffer {buffer.dtype}": Row(model=lambda buffer=buffer: Buffered(buffer))
        for buffer in (torch.ones(3, dtype=torch.bool), torch.zeros((), dtype=torch.int64), torch.zeros(0).double())
    },
    **{
        f"buffer {buffer.dtype}": Row(MODEL, model=lambda buffer=buffer: Buffered(buffer))
        for buffer in (torch.zeros(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.uint16))
    },
    "buffer sparse": Row(MODEL, model=lambda: Buffered(torch.eye(3).to_sparse())),
    "buffer complex, not saved": Row(model=lambda: Buffered(torch.zeros(3, dtype=torch.complex64), persistent=False)),
    # data
    "arrays": Row(data=(POINTS, CLASSES)),
    "arrays of numpy": Row(data=(POINTS.numpy(), CLASSES.numpy())),
    "columns": Row(data={"points": POINTS, "label": CLASSES}),
    "arrays of unequal lengths": Row(DATA, data=(POINTS, CLASSES[:5])),
    "a list of two arrays": Row(FAILED, data=[POINTS, CLASSES]),
    "columns of lists": Row(DATA, data={"points": POINTS.tolist(), "label": CLASSES.tolist()}),
    "items of numpy": Row(data=[(point.numpy(), int(label)) for point, label in zip(POINTS, CLASSES, strict=True)]),
    "items that require gradients": Row(
        FAILED, data=[(point.clone().requires_grad_(), label) for point, label in zip(POINTS, CLASSES, strict=True)]
    ),
    "items of objects": Row(FAILED, data=[(np.array([1, None], dtype=object), 1)] * 16),
    "a generator": Row(DATA, data=(item for item in ())),
    # dtypes
    "points float64": Row(MODEL, data=TensorDataset(POINTS.double(), CLASSES)),
    "points of whole numbers": Row(MODEL, data=TensorDataset(POINTS.long(), CLASSES)),
    # parameters
    "spare layers": Row(MODEL, model=Spares),
    "batch norm with one sample": Row(
        (lockstep.ConfigError, "batch"), model=small.WithBatchNorm,
        config={"batch": {"global_size": 2, "micro_size": 1}},
    ),
}  # fmt: skip
STRATEGIES = {"ddp": 2, "fsdp": 2}


def result(name: str, strategy: str = "single") -> tuple[str, str, list[float]]:
    """Return the kind of the error, its key, and the losses; with metrics, those follow."""
    row = ROWS[name]
    config = {
        "batch": {"global_size": 8, "micro_size": 4 if strategy == "single" else 2},
        "optim": {"name": "sgd", "lr": 0.5},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "run": {"steps": 2},
        "parallel": {"strategy": strategy},
        **row.config,
    }
    objects = {"model": row.model, "train_dataset": row.data, "objective": row.objective}
    measures = isinstance(row.objective, Sums)
    try:
        with lockstep.session(config, **objects, eval_datasets={"all": row.data} if measures else {}) as session:
            losses = [report.loss for report in session]
            if measures:
                losses += [session.evaluate()[0].metrics[metric] for metric in row.metrics or {"half": 0}]
            return "", "", losses
    except lockstep.Failure as error:
        key = error.problems[0].key if isinstance(error, lockstep.ConfigError) else ""
        kind = "RunFailed" if isinstance(error, lockstep.RunFailed) else type(error).__name__
        return kind, key, []


def expected(name: str) -> tuple[str, str, Any]:
    row = ROWS[name]
    if row.refusal is not None:
        return row.refusal[0].__name__, row.refusal[1], []
    if row.like is None or name == row.like:
        return "", "", None
    return "", "", pytest.approx([*result(row.like)[2], *(row.metrics or {}).values()], rel=1e-5)


def _meets(name: str, found: tuple[str, str, list[float]]) -> bool:
    kind, key, losses = expected(name)
    fits = all(map(math.isfinite, found[2])) and bool(found[2]) if losses is None else found[2] == losses
    return (kind, key) == found[:2] and fits


@pytest.mark.parametrize("name", ROWS)
def test_it_trains_or_is_refused(name: str) -> None:
    found = result(name)
    assert _meets(name, found), found


def every_row(strategy: str) -> dict[str, tuple[str, str, list[float]]]:
    with small.in_group():
        return {name: result(name, strategy) for name in ROWS}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_answer_as_one_process(strategy: str) -> None:
    for found in in_world(STRATEGIES[strategy], every_row, strategy, patience=240):
        assert {name: row for name, row in found.items() if not _meets(name, row)} == {}


def test_a_cause_is_in_the_failure_of_a_launch() -> None:
    frames = 'Traceback (most recent call last):\n  File "x.py", line 1\n    f()'
    text = f"rank 1 failed:\n{frames}\nValueError: 3 is odd\nin update 1"
    assert "ValueError: 3 is odd" in str(LaunchResult(FailureKind.EXCEPTION, text, is_traceback=True).failure())


def test_all_spare_parameters_are_in_the_hint() -> None:
    row = ROWS["spare layers"]
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    config = {"batch": {"global_size": 8}, "run": {"steps": 1}, "launch": {"device": "cpu"}}
    objects = {"train_dataset": row.data, "objective": row.objective}
    with pytest.raises(lockstep.ConfigError) as refused, lockstep.session(config, model=Spares, **objects) as session:
        next(iter(session))
    assert all(f'"{name}"' in str(refused.value) for name in names)
    with lockstep.session({**config, "model": {"freeze": names}}, model=Spares, **objects) as session:
        assert next(iter(session)).kept


def test_batch_norm_of_a_last_sample_is_named_at_the_start() -> None:
    data = TensorDataset(POINTS[:9], CLASSES[:9])
    config = {"batch": {"global_size": 8}, "run": {"epochs": 1}, "launch": {"device": "cpu"}}
    objects = {"model": small.WithBatchNorm, "train_dataset": data, "objective": nn.CrossEntropyLoss()}
    with lockstep.session(config, **objects) as session:
        assert "data.drop_last" in " ".join(components_of(session).plan.warnings)
        with pytest.raises(lockstep.ConfigError, match="drop_last"):
            list(session)
    with lockstep.session({**config, "data": {"drop_last": True}}, **objects) as session:
        assert not any("drop_last" in warning for warning in components_of(session).plan.warnings)
        assert len(list(session)) == 1

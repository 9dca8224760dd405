"""The gradient of an update: seeds, padding samples, and the order of announcing and reducing."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from kit.failures import fails, gives
from torch import Tensor, nn

from lockstep.core.errors import ConfigError
from lockstep.core.records import Batch, GlobalBatch
from lockstep.engine.eager import EagerEngine


class Recorder:
    """A gradient step that records what happens, in order."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.events: list[Any] = []

    @contextmanager
    def sync_context(self, last: bool) -> Any:
        self.events.append("last" if last else "not last")
        yield
        self.events.append("reduced" if last else "kept")

    def backward(self, loss: Tensor, seed: Tensor) -> None:
        self.events.append(("backward", float(loss), float(seed)))


class SumOfPoints(nn.Module):
    def forward(self, points: Tensor) -> Tensor:
        return points.sum()


class Objective:
    def loss_sum(self, outputs: Any, batch: Batch) -> Any:
        return outputs

    def count(self, batch: Batch) -> int:
        return batch.samples

    def metric_sums(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"half": outputs / 2}


def batch(*points: float, samples: int | None = None) -> Batch:
    number = len(points) if samples is None else samples
    return Batch(inputs=(torch.tensor(points),), targets=torch.zeros(len(points)), samples=number, tokens=number)


PADDING = batch(100.0, samples=0)


@contextmanager
def muted(events: list[Any]) -> Any:
    events.append("muted")
    yield


def engine(step: Recorder, draws: list[Any], **options: Any) -> EagerEngine:
    return EagerEngine(
        step,  # type: ignore[arg-type]
        step.module,
        Objective(),  # type: ignore[arg-type]
        nullcontext,
        lambda update, index, stage: draws.append((update.step, index, stage)),
        lambda: muted(step.events),
        **options,
    )


def global_batch(*micro_batches: Batch) -> GlobalBatch:
    total = sum(item.samples for item in micro_batches)
    return GlobalBatch(micro_batches, total, float(total), total, epoch=0, cursor=total, step=7)


def test_micro_batches_are_seeded_alike_and_padding_samples_weigh_nothing() -> None:
    step, draws, announced = Recorder(SumOfPoints()), [], []
    engine(step, draws).accumulate(global_batch(batch(1.0, 2.0), batch(4.0), PADDING), 0.25, announced.append)
    assert [event[1:] for event in step.events if isinstance(event, tuple)] == [(3.0, 0.25), (4.0, 0.25), (100.0, 0.0)]
    assert draws == [(7, 0, 0), (7, 1, 0), (7, 2, 0)]
    assert [float(total) for total in announced] == [7.0], "the losses of samples alone, once"


def test_losses_are_announced_before_the_last_backward_reduces() -> None:
    step = Recorder(SumOfPoints())
    engine(step, []).accumulate(global_batch(batch(1.0), PADDING), 1.0, lambda total: step.events.append(float(total)))
    assert step.events == [
        "not last",
        ("backward", 1.0, 1.0),
        "kept",
        "last",
        "muted",
        1.0,
        ("backward", 100.0, 0.0),
        "reduced",
    ]


def test_a_seed_on_the_device_is_weighted_there() -> None:
    step = Recorder(SumOfPoints())
    scale = torch.tensor(8.0, dtype=torch.float64)
    engine(step, []).accumulate(global_batch(batch(1.0), PADDING), scale, lambda total: None)
    assert [event[2] for event in step.events if isinstance(event, tuple)] == [8.0, 0.0]


def test_an_evaluation_adds_in_fp64_and_padding_samples_add_nothing() -> None:
    model = SumOfPoints().train()
    evaluated = engine(Recorder(model), []).evaluate([batch(1.0, 2.0), PADDING, batch(4.0)])
    assert {name: value.item() for name, value in evaluated.items()} == {"loss_sum": 7.0, "count": 3.0, "half": 3.5}
    assert {value.dtype for value in evaluated.values()} == {torch.float64}
    assert model.training
    sums = engine(Recorder(model), []).evaluate([batch(2.0**24), batch(1.0), batch(1.0)])
    assert sums["loss_sum"].item() == 2.0**24 + 2, "not in fp32"


def test_micro_batches_are_prepared_for_training_and_evaluation() -> None:
    def prepare(given: Batch) -> Batch:
        return batch(*(2 * point for point in given.inputs[0].tolist()))

    step = Recorder(SumOfPoints())
    prepared = engine(step, [], prepare=prepare)
    prepared.accumulate(global_batch(batch(1.0)), 1.0, lambda total: None)
    assert ("backward", 2.0, 1.0) in step.events
    assert float(prepared.evaluate([batch(1.0)])["loss_sum"]) == 2.0


def accumulate(model: nn.Module, inputs: Any) -> None:
    only = Batch(inputs=inputs, targets=torch.zeros(1), samples=1, tokens=1)
    engine(Recorder(model), []).accumulate(global_batch(only), 1.0, lambda total: None)


def test_a_batch_norm_of_one_sample_is_explained() -> None:
    with fails(ConfigError, "batch norm", "1 sample"):
        accumulate(nn.BatchNorm1d(1), (torch.ones(1, 1),))


def test_inputs_that_the_forward_does_not_take_are_explained() -> None:
    with fails(ConfigError, "SumOfPoints", "forward(points)", "x", "model.inputs"):
        accumulate(SumOfPoints(), {"x": torch.ones(1)})


def test_an_objective_without_one_loss_is_refused() -> None:
    class Two(nn.Module):
        def forward(self, points: Tensor) -> list[Tensor]:
            return [points, points]

    with fails(ConfigError, "loss_sum", "list"):
        accumulate(Two(), (torch.ones(1),))


def test_an_error_names_the_micro_batch_and_the_update() -> None:
    class Failing(nn.Module):
        def forward(self, points: Tensor) -> Tensor:
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError) as failed:
        accumulate(Failing(), (torch.ones(1),))
    assert gives(str(failed.value.__notes__), "forward", "micro-batch 1 of 1", "update 8")

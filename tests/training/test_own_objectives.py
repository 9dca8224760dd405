"""Custom objectives and optimizers work as declared, or are refused."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import fails
from kit.worlds import in_world
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.core.records import Batch


def losses(steps: int = 4, config: dict[str, Any] | None = None, **given: Any) -> list[float]:
    asked = small.config(run={"steps": steps}, **(config or {}))
    if "model" in given:
        del asked["model"]
    if "objective" in given:
        del asked["objective"]
    with lockstep.session(asked, **given) as session:
        return [report.loss for report in session]


# --- means ------------------------------------------------------------------------------------------------------------


def mean_of(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(outputs, batch.targets)


def sum_of(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(outputs, batch.targets, reduction="sum")


class CountsAndMeans(small.CrossEntropy):
    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().loss_sum(outputs, batch) / batch.samples


class MeanModule(nn.Module):
    def forward(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return mean_of(outputs, batch)


@pytest.mark.parametrize("objective", [mean_of, CountsAndMeans(), MeanModule()])
def test_a_mean_is_refused(objective: Any) -> None:
    with fails(lockstep.ConfigError, "a sum", "13 samples", key="objective"):
        losses(objective=objective)


def mean_on_ranks() -> str:
    with small.in_group():
        try:
            losses(objective=mean_of)
        except lockstep.ConfigError as error:
            return str(error)
    return ""


def test_every_rank_refuses_it() -> None:
    assert ["perhaps a mean" in said for said in in_world(2, mean_on_ranks)] == [True, True]


def test_a_function_of_torch_is_its_loss_module() -> None:
    assert losses(objective=F.cross_entropy) == pytest.approx(losses(), rel=1e-6)


def test_a_sum_is_taken_and_looked_at_once() -> None:
    calls = []

    def counted(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        calls.append(batch.samples)
        return sum_of(outputs, batch)

    assert losses(objective=counted) == losses()
    assert calls == [13, 6, 7, 13, 13, 1]


class Drawing(small.CrossEntropy):
    """Draws, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        self.calls += 1
        noise = 1e-3 * torch.rand(batch.samples, device=outputs.device)
        return (F.cross_entropy(outputs, batch.targets, reduction="none") + noise).sum()


def test_looking_changes_nothing() -> None:
    objective = Drawing()
    first = losses(objective=objective)
    assert objective.calls == 4
    undeclared = Drawing()
    undeclared.decomposes = False  # so that nothing is compared
    assert losses(objective=undeclared) == first


def test_samples_that_look_at_each_other_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def contrast(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="sum")

    with caplog.at_level(logging.WARNING, "lockstep"):
        losses(objective=contrast)
    [record] = caplog.records
    assert "decomposes = False" in record.getMessage()
    assert "decomposes = False" in record.getMessage()


class Penalized(nn.Linear):
    """Returns a term of the loss beside the logits, a number for the whole batch."""

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = super().forward(inputs)
        return outputs, 0.1 * outputs.square().sum()


def test_a_term_of_the_whole_batch_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class WithTerm(small.CrossEntropy):
        def loss_sum(self, outputs: tuple[torch.Tensor, torch.Tensor], batch: Batch) -> torch.Tensor:
            return super().loss_sum(outputs[0], batch) + outputs[1]

    with caplog.at_level(logging.WARNING, "lockstep"):
        losses(model=Penalized(4, 3), objective=WithTerm())
    assert caplog.records == []


# --- parameters -------------------------------------------------------------------------------------------------------


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return sum_of(outputs * self.scale, batch)


class HoldsTemperature(small.CrossEntropy):
    decomposes = False

    def __init__(self) -> None:
        self.inner = Temperature()

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.inner(outputs, batch)


def closed_over() -> Any:
    scale = nn.Parameter(torch.ones(1))
    return lambda outputs, batch: sum_of(outputs * scale, batch)


@pytest.mark.parametrize(
    ("objective", "name"), [(Temperature(), "scale"), (HoldsTemperature(), "inner.scale"), (closed_over(), "scale")]
)
def test_parameters_of_an_objective_are_refused(objective: Any, name: str) -> None:
    with fails(lockstep.ConfigError, f"{name} [1]", "optimizer", key="objective"):
        losses(objective=objective)


def test_frozen_parameters_and_those_of_the_model_are_taken() -> None:
    model = small.Net()
    penalty = lambda outputs, batch: sum_of(outputs, batch) + 0.1 * batch.samples * model.head.weight.square().sum()  # noqa: E731
    assert len(losses(objective=penalty, model=model)) == 4
    assert losses(objective=Temperature().requires_grad_(False)) == losses()


class OfWholeBatch(small.CrossEntropy):
    decomposes = False


def test_what_fsdp_gathers_for_the_outputs_is_no_parameter_of_an_objective() -> None:
    asked = small.config(parallel={"strategy": "fsdp"})
    asked["model"]["target"] = "kit.chains:Chain"
    asked["objective"] = {"kind": "custom", "target": "training.test_own_objectives:OfWholeBatch"}
    assert in_world(2, small.refusal, asked) == ["", ""]


# --- an objective's own state -----------------------------------------------------------------------------------------


class Centered(nn.Module):
    """Subtracts a running mean of the outputs."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.center = nn.Buffer(torch.zeros(3))
        self._in_place = in_place

    def forward(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        mean = outputs.detach().mean(0)
        if self._in_place:
            self.center.lerp_(mean, 0.1)
        else:
            self.center = torch.lerp(self.center, mean, 0.1)
        return sum_of(outputs - self.center, batch)


class HoldsCentered(small.CrossEntropy):
    decomposes = False

    def __init__(self) -> None:
        self.inner = Centered(in_place=True)

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self.inner(outputs, batch)


class Caches(nn.Module):
    """Has weights that it moves to another dtype, and a table that no state has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = nn.Buffer(torch.ones(3, dtype=torch.float64))
        self.table = nn.Buffer(torch.zeros(0), persistent=False)
        self.model = model

    def forward(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        self.weights = self.weights.to(outputs)
        self.table = torch.ones(3)
        self.model.seen += 1
        return sum_of(outputs * self.weights * self.table, batch)


class Normalized(nn.Module):
    """Computes with statistics that a kernel changes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance = nn.Buffer(torch.zeros(3)), nn.Buffer(torch.ones(3))

    def forward(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return sum_of(F.batch_norm(outputs, self.mean, self.variance, training=True), batch)


def taught(teacher: nn.Module) -> Any:
    """Return an objective whose function encloses another model."""
    return lambda outputs, batch: sum_of(outputs, batch) + 0 * teacher(outputs.detach()).sum()


def of_inference() -> Any:
    with torch.inference_mode():
        teacher = nn.Linear(3, 3).requires_grad_(False)

    def loss_sum(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        with torch.inference_mode():
            teacher(outputs)
        return sum_of(outputs, batch)

    return loss_sum


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        (Centered(in_place=True), "center"),
        (Centered(in_place=False), "center"),
        (HoldsCentered(), "inner.center"),
        (Normalized(), "mean, variance"),
        (taught(nn.BatchNorm1d(3)), "teacher.running_mean, teacher.running_var, teacher.num_batches_tracked"),
        (partial(lambda loss, outputs, batch: loss(outputs, batch), Centered(in_place=True)), "argument 1.center"),
    ],
    ids=["in place", "replaced", "held", "kernel", "enclosed", "partial"],
)
def test_state_of_an_objective_is_refused(objective: Any, name: str) -> None:
    with fails(lockstep.ConfigError, "loss_sum", name, "checkpoint", key="objective"):
        losses(objective=objective)


def test_constants_caches_and_state_of_the_model_are_taken() -> None:
    assert (
        losses(objective=taught(nn.BatchNorm1d(3).eval().requires_grad_(False)))
        == losses(objective=of_inference())
        == losses()
    )
    plain = small.Net()
    model = copy.deepcopy(plain)
    model.seen = nn.Buffer(torch.zeros(()))
    assert losses(objective=Caches(model), model=model) == losses(model=plain)


# --- an optimizer's own numbers ---------------------------------------------------------------------------------------


def rates(optimizer: Any, **optim: Any) -> list[float]:
    asked = small.config(run={"steps": 2}, optim=optim, schedule={"kind": "constant"})
    with lockstep.session(asked, optimizer=optimizer) as session:
        return [report.lr for report in session]


def test_an_optimizers_own_rate_is_the_peak() -> None:
    assert rates(lambda groups: torch.optim.SGD(groups, lr=0.3)) == [0.3, 0.3]
    assert rates(torch.optim.Adagrad) == [0.01, 0.01]
    assert rates(torch.optim.Adagrad, lr=0.5) == [0.5, 0.5]
    assert rates(lambda groups: torch.optim.SGD(groups, lr=0.3), lr=0.3) == [0.3, 0.3]


def test_two_rates_contradict_each_other() -> None:
    with fails(lockstep.ConfigError, 0.1, 0.3, key="optim.lr"):
        rates(lambda groups: torch.optim.SGD(groups, lr=0.3), lr=0.1)
    with pytest.raises(lockstep.ConfigError, match=r"optim\.weight_decay: 0\.1 .* weight_decay 0\.3"):
        rates(lambda groups: torch.optim.SGD(groups, weight_decay=0.3), weight_decay=0.1)


def test_groups_keep_their_own_numbers() -> None:
    made: list[torch.optim.Optimizer] = []

    def optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        matrices, others = groups
        made.append(torch.optim.SGD([{**matrices, "lr": 0.6}, others], lr=0.3, weight_decay=0.05))
        return made[0]

    assert rates(optimizer) == [0.3, 0.3]
    assert [group["lr"] for group in made[0].param_groups] == [0.6, 0.3]
    assert [group["weight_decay"] for group in made[0].param_groups] == [0.05, 0.0]


# --- losses of torch --------------------------------------------------------------------------------------------------

CLASS_WEIGHTS = [0.02, 0.3, 0.1]  # whose sum over an update is less than 1
TORCH_LOSSES: dict[str, tuple[Any, str]] = {
    "mean": (nn.CrossEntropyLoss(), "points"),
    "class weights": (nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHTS), label_smoothing=0.1, ignore_index=2), "points"),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), "vectors"),
    "positions": (nn.CrossEntropyLoss(), "positions"),
}
OF_CONFIG = {"weight": CLASS_WEIGHTS, "label_smoothing": 0.1, "ignore_index": 2}


def dataset_of(kind: str) -> Any:
    inputs, classes = small.points(11).tensors
    targets = {
        "points": classes,
        "vectors": torch.eye(3)[classes],
        "positions": torch.stack([classes, (classes + 1) % 3, classes], 1),
    }
    return torch.utils.data.TensorDataset(inputs, targets[kind].contiguous())


class Positions(small.Net):
    """As many positions as classes: [samples, 3, 3], classes in the second dim."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        logits = super().forward(points)
        return torch.stack([logits, 2 * logits, logits.roll(1, 1)], 2)


def net_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return Positions() if kind == "positions" else small.Net()


def trained_by_torch(loss: nn.Module, kind: str) -> list[float]:
    inputs, targets = dataset_of(kind).tensors
    model = net_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    values = []
    for _ in range(4):
        value = loss(model(inputs), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


def trained_here(loss: Any, kind: str, objective: dict[str, Any] | None = None) -> list[float]:
    """Whole batches of 11 samples in micro-batches of 2."""
    optim = {"name": "sgd", "lr": 0.5, "momentum": 0, "weight_decay": 0, "clip_norm": None}
    batch, schedule = {"global_size": 11, "micro_size": 2}, {"kind": "constant"}
    asked = small.config(batch=batch, optim=optim, schedule=schedule, run={"steps": 4})
    asked |= {"objective": objective} if objective is not None else {}
    if objective is None:
        del asked["objective"]
    del asked["model"]
    with lockstep.session(asked, model=net_of(kind), train_dataset=dataset_of(kind), objective=loss) as session:
        return [report.loss for report in session]


@pytest.mark.parametrize("case", TORCH_LOSSES)
def test_a_loss_of_torch_trains_as_in_torch_on_one_process_and_on_two_ranks(case: str) -> None:
    loss, kind = TORCH_LOSSES[case]
    expected = pytest.approx(trained_by_torch(loss, kind), rel=1e-5)
    assert trained_here(loss, kind) == expected
    assert in_world(2, trained_here, loss, kind) == [expected] * 2


def test_a_config_names_a_loss_of_torch() -> None:
    loss, kind = TORCH_LOSSES["class weights"]
    named = {"kind": "custom", "target": "CrossEntropyLoss", "arguments": OF_CONFIG}
    assert trained_here(None, kind, named) == trained_here(loss, kind)

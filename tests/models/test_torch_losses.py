"""A loss of torch as a sum and a count has torch's value and gradient for any split of the samples."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from kit.failures import fails
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.records import Batch
from lockstep.models.building_objectives import adapt_objective
from lockstep.models.torch_losses import LOSSES, construct_objective

B, C, N = 7, 4, 4  # as many positions as classes: only the order of dims distinguishes them
WEIGHTS = torch.tensor([0.05, 0.2, 1.5, 3.0])


def _draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def classes(*shape: int, ignored: int | None = -100) -> Tensor:
    drawn = torch.randint(C, shape, generator=_draw())
    return drawn if ignored is None else drawn.masked_fill(torch.rand(shape, generator=_draw(1)) < 0.3, ignored)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_draw(2))


def shares(*shape: int) -> Tensor:
    return numbers(*shape).softmax(1)


def bits(*shape: int) -> Tensor:
    return (numbers(*shape) > 0).float()


def signs(*shape: int) -> Tensor:
    return numbers(*shape).sign()


LOGITS, SEQUENCES = numbers(B, C), numbers(B, C, N)
CASES: dict[str, tuple[Any, Tensor, Tensor]] = {
    "cross entropy": (nn.CrossEntropyLoss(), LOGITS, classes(B)),
    "of positions, as many as classes": (nn.CrossEntropyLoss(), SEQUENCES, classes(B, N)),
    "ignore_index": (nn.CrossEntropyLoss(ignore_index=2), LOGITS, classes(B, ignored=2)),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), SEQUENCES, classes(B, N)),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), SEQUENCES, classes(B, N)),
    "small class weights": (nn.CrossEntropyLoss(weight=WEIGHTS / 100), LOGITS, classes(B)),
    "all of them": (
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=1, label_smoothing=0.2), SEQUENCES, classes(B, N, ignored=1)
    ),
    "class probabilities": (nn.CrossEntropyLoss(weight=WEIGHTS), SEQUENCES, shares(B, C, N)),
    "smoothed probabilities": (nn.CrossEntropyLoss(label_smoothing=0.1), LOGITS, shares(B, C)),
    "nll": (nn.NLLLoss(), LOGITS.log_softmax(1), classes(B)),
    "weighted nll": (nn.NLLLoss(weight=WEIGHTS), SEQUENCES.log_softmax(1), classes(B, N)),
    "squares": (nn.MSELoss(), LOGITS, numbers(B, C)),
    "squares of fp64 targets": (nn.MSELoss(), LOGITS, numbers(B, C).double()),
    "absolute": (nn.L1Loss(), LOGITS, numbers(B, C)),
    "smooth": (nn.SmoothL1Loss(beta=0.5), LOGITS, numbers(B, C)),
    "huber": (nn.HuberLoss(delta=0.7), SEQUENCES, numbers(B, C, N)),
    "bce": (nn.BCELoss(), LOGITS.sigmoid(), bits(B, C)),
    "weighted bce": (nn.BCELoss(weight=WEIGHTS), LOGITS.sigmoid(), bits(B, C)),
    "bce of logits": (nn.BCEWithLogitsLoss(), LOGITS, bits(B, C)),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS, weight=WEIGHTS / 2), LOGITS, bits(B, C)),
    "soft margin": (nn.SoftMarginLoss(), LOGITS, signs(B, C)),
    "poisson": (nn.PoissonNLLLoss(full=True), LOGITS, bits(B, C)),
    "hinge": (nn.HingeEmbeddingLoss(), LOGITS, signs(B, C)),
    "kl batchmean": (nn.KLDivLoss(reduction="batchmean"), SEQUENCES.log_softmax(1), shares(B, C, N)),
    "kl mean": (nn.KLDivLoss(log_target=True), LOGITS.log_softmax(1), shares(B, C).log()),
    "multi margin": (nn.MultiMarginLoss(weight=WEIGHTS), LOGITS, classes(B, ignored=None)),
    "multi-label margin": (nn.MultiLabelMarginLoss(), LOGITS, torch.tensor([[2, 0, -1, -1]]).repeat(B, 1)),
    "multi-label soft margin": (nn.MultiLabelSoftMarginLoss(weight=WEIGHTS), LOGITS, bits(B, C)),
    "a function of torch": (F.cross_entropy, SEQUENCES, classes(B, N)),
    "a function with options": (partial(F.cross_entropy, weight=WEIGHTS), LOGITS, classes(B)),
}  # fmt: skip


@pytest.mark.parametrize("split", [(7,), (3, 4), (1, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:reduction:UserWarning")  # about kl_div's mean, which is the expected value
def test_value_and_gradient_are_those_of_the_whole_batch(case: str, split: tuple[int, ...]) -> None:
    loss, outputs, targets = CASES[case]
    objective = adapt_objective(loss)
    whole = outputs.clone().requires_grad_()
    expected = loss(whole, targets.to(whole.dtype) if targets.is_floating_point() else targets)
    expected.backward()
    made = outputs.clone().requires_grad_()
    batches = [Batch({}, part, len(part), 1) for part in targets.split(split)]
    count = sum(objective.count(batch) for batch in batches)
    sums = [objective.loss_sum(part, batch) for part, batch in zip(made.split(split), batches, strict=True)]
    torch.stack(sums).sum().div(count).backward()
    total = sum(part.item() for part in sums)
    assert total / count == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(made.grad, whole.grad, rtol=1e-5, atol=1e-7)
    assert objective.metrics(total, count, {}) == {"loss": total / count}
    assert objective.decomposes


def test_every_supported_loss_is_compared() -> None:
    assert {type(loss).__name__ for loss, _, _ in CASES.values()} >= set(LOSSES)


def test_a_sum_is_divided_by_targets_or_samples() -> None:
    targets = classes(B, N)
    batch = Batch({}, targets, B, 1)
    assert adapt_objective(nn.CrossEntropyLoss(reduction="sum")).count(batch) == int((targets != -100).sum())
    assert adapt_objective(nn.MSELoss(reduction="sum")).count(Batch({}, numbers(B, C), B, 1)) == B


def test_the_users_loss_is_not_changed() -> None:
    loss = nn.CrossEntropyLoss(weight=WEIGHTS)
    objective = adapt_objective(loss)
    objective.loss_sum(LOGITS, Batch({}, classes(B), B, 1))
    assert loss.reduction == "mean"
    assert loss.weight is WEIGHTS


def test_a_batch_without_valid_targets_has_count_zero() -> None:
    batch = Batch({}, torch.full((B,), -100), B, 1)
    objective = adapt_objective(nn.CrossEntropyLoss(weight=WEIGHTS))
    assert objective.count(batch) == 0
    assert float(objective.loss_sum(LOGITS, batch)) == 0
    assert math.isnan(objective.metrics(0.0, 0.0, {})["loss"])


class Focal(nn.CrossEntropyLoss):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return super().forward(2 * logits, target)


class Renamed(nn.CrossEntropyLoss):
    """A subclass that only calls torch's forward."""


class OfTargets(nn.Module):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()


def of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


REFUSED = {
    "no reduction": (nn.MSELoss(reduction="none"), "reduction='none', a loss for each target; set reduction='mean'"),
    "three inputs": (nn.TripletMarginLoss(), r"takes \(anchor, positive, negative\), more than outputs and targets"),
    "lengths": (nn.CTCLoss(), r"CTCLoss takes \(.*\), more than .*; write a class with count\(batch\)"),
    "a function of three inputs": (F.cosine_embedding_loss, "takes more than outputs and targets; write a class"),
    "an unknown option": (partial(F.mse_loss, delta=1), "MSELoss, the loss module of mse_loss: .*delta"),
    "a mean of an unknown forward": (Focal(), r"Focal has reduction='mean'.* use Focal\(reduction=\"sum\"\)"),
    "a module of targets": (OfTargets(), r"OfTargets takes \(outputs, targets\), and the count .* is unknown"),
    "a function of targets": (of_labels, r"of_labels takes \(logits, labels\).*loss_sum\(outputs, batch\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_losses_are_refused_with_the_remedy(case: str) -> None:
    loss, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        adapt_objective(loss)


def test_a_subclass_of_a_loss_is_supported_if_its_forward_is() -> None:
    batch = Batch({}, classes(B), B, 1)
    assert adapt_objective(Renamed()).loss_sum(LOGITS, batch) == F.cross_entropy(LOGITS, classes(B), reduction="sum")
    focal = adapt_objective(Focal(reduction="sum"))
    assert focal.loss_sum(LOGITS, batch) == F.cross_entropy(2 * LOGITS, classes(B), reduction="sum")
    assert focal.count(batch) == int((classes(B) != -100).sum())


@pytest.mark.parametrize("name", ["CrossEntropyLoss", "torch.nn:CrossEntropyLoss"])
def test_a_config_names_a_loss_with_its_class_weights(name: str) -> None:
    loss = construct_objective(name, {"weight": WEIGHTS.tolist(), "label_smoothing": 0.1})
    expected = F.cross_entropy(LOGITS, classes(B), weight=WEIGHTS, label_smoothing=0.1)
    objective, batch = adapt_objective(loss), Batch({}, classes(B), B, 1)
    assert float(objective.loss_sum(LOGITS, batch) / objective.count(batch)) == pytest.approx(expected.item())


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with fails(ConfigError, "'CrossEntropy'", "CrossEntropyLoss?"):
        construct_objective("CrossEntropy", {})


def test_a_target_beyond_the_class_weights_is_named() -> None:
    with fails(RunFailed, "up to 4", "4 class weights"):
        adapt_objective(nn.CrossEntropyLoss(weight=WEIGHTS)).count(Batch({}, torch.tensor([0, 4]), 2, 1))

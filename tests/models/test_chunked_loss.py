"""The chunked loss, its gradients and its metrics are the same as those of all logits at once."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from kit.failures import fails
from kit.families import family
from kit.peak import peak_of
from kit.runs import differences, recorded_all
from torch import Tensor, nn
from torch.nn import functional as F
from training.test_same_run import config

import lockstep
from lockstep.config.loading import validate
from lockstep.config.schema import TransformerModel
from lockstep.core.records import Batch, DataFacts
from lockstep.models.build import build_model
from lockstep.models.building_objectives import FunctionObjective
from lockstep.models.chunked_loss import ChunkedHeadLoss, chunk_head_loss, chunked_cross_entropy
from lockstep.models.objectives import TargetLoss, cross_entropy_sum

CPU = torch.device("cpu")
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("chunk", [1, 10, 100])
def test_it_is_the_cross_entropy_of_all_logits(smoothing: float, biased: bool, chunk: int) -> None:
    draws = torch.Generator().manual_seed(4)
    inputs = [torch.randn(shape, generator=draws, requires_grad=True) for shape in ((37, 16), (50, 16), (50,))]
    hidden, weight, bias = inputs[0], inputs[1], inputs[2] if biased else None
    targets = torch.randint(0, 50, (37,), generator=draws).index_fill_(0, torch.tensor([0, 9, 36]), -100)
    logits = F.linear(hidden, weight, bias)
    expected = cross_entropy_sum(logits, targets, smoothing)
    sums = chunked_cross_entropy(hidden, weight, bias, targets, chunk, smoothing)
    assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert sums.plain.item() == pytest.approx(cross_entropy_sum(logits, targets).item(), rel=1e-6)
    assert sums.right.item() == (logits.argmax(-1) == targets).sum().item()
    trained = inputs[: 3 if biased else 2]
    for gradient, other in zip(
        torch.autograd.grad(0.3 * sums.loss, trained), torch.autograd.grad(0.3 * expected, trained), strict=True
    ):
        assert (gradient - other).norm() <= 1e-6 * other.norm()


def test_a_frozen_head_without_valid_targets() -> None:
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4)
    sums = chunked_cross_entropy(hidden, weight, None, torch.full((6,), -100), 4, 0.0)
    sums.loss.backward()
    assert sums.loss.item() == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def model_of(vocabulary: int) -> nn.Module:
    section = TransformerModel(kind="transformer", layers=1, width=16, heads=2, tie_embeddings=False)
    return build_model(section, DataFacts(10, 128, vocabulary=vocabulary), 1)


def step(model: nn.Module, objective: Any, batch: Batch) -> None:
    objective.loss_sum(model(**batch.inputs), batch).backward()


def test_all_logits_are_never_in_memory() -> None:
    """Check that the peak grows with the vocabulary by a chunk's logits and the head's gradient, not by all logits."""
    tokens = torch.randint(0, 100, (8, 128))
    batch = Batch({"tokens": tokens}, tokens, 8, 1024)
    peaks: dict[str, list[int]] = {"whole": [], "chunked": []}
    for vocabulary in (500, 4500):
        for name in peaks:
            model = model_of(vocabulary)
            objective: Any = TargetLoss(language=True)
            if name == "chunked":
                objective = chunk_head_loss(objective, model, 64)
                objective.show(batch)
            peaks[name].append(peak_of(partial(step, model, objective, batch), CPU))
    all_logits, head = 1024 * 4000 * 4, 4000 * 16 * 4
    assert peaks["whole"][1] - peaks["whole"][0] > 2 * all_logits
    assert peaks["chunked"][1] - peaks["chunked"][0] < 6 * (all_logits / 16 + head)


# --- in a run -------------------------------------------------------------------------------------------------------


def test_language_models_of_the_transformers_library() -> None:
    """Compare aligned targets, tied and untied heads, under fsdp with recomputed blocks, metrics included."""
    sections = [{**family(name), "optim": SGD, "objective": {"label_smoothing": 0.1}} for name in ("llama", "qwen")]
    memory = {"loss_chunk": 7, "activation_checkpointing": {"mode": "full"}}
    oracles = recorded_all([config(9, **section) for section in sections], updates=2)
    chunked = [config(9, **section, parallel={"strategy": "fsdp"}, memory=memory) for section in sections]
    for run, oracle in zip(recorded_all(chunked, ranks=2, updates=2), oracles, strict=True):
        assert differences(run, oracle) == []


# --- refusals -------------------------------------------------------------------------------------------------------


class Scaling(nn.Module):
    """A transformer that changes its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.cap(self.head(self.inner(tokens)))

    def cap(self, logits: Tensor) -> Tensor:
        return logits * 0.5


class InPlace(Scaling):
    def cap(self, logits: Tensor) -> Tensor:
        return logits.mul_(0.5)


class Twice(Scaling):
    def cap(self, logits: Tensor) -> Tensor:
        return self.head(torch.ones(2, 4))


@pytest.mark.parametrize("make", [Scaling, InPlace, Twice])
def test_a_model_that_changes_its_logits_is_refused(make: type[Scaling]) -> None:
    model, tokens = make(), torch.randint(0, 9, (2, 3))
    batch = Batch({"tokens": tokens}, tokens, 2, 6)
    objective = chunk_head_loss(TargetLoss(language=True), model, 4)
    objective.show(batch)
    with fails(lockstep.RunFailed, "memory.loss_chunk", "logits"):
        objective.loss_sum(model(tokens), batch)


def test_logits_without_a_loss_are_logits() -> None:
    model, tokens = model_of(50), torch.randint(0, 50, (2, 3))
    expected = copy.deepcopy(model)(tokens)
    assert isinstance(chunk_head_loss(TargetLoss(language=True), model, 4), ChunkedHeadLoss)
    assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize(
    ("objective", "model", "message"),
    [
        (TargetLoss(language=False), model_of(9), "and no other objective"),
        (
            FunctionObjective(lambda batch: 1, lambda outputs, batch: outputs),
            model_of(9),
            "and no other objective",
        ),
        (
            TargetLoss(language=True),
            nn.Linear(2, 2),
            "the linear layer that computes the logits of a Linear is unknown",
        ),
    ],
)
def test_other_objectives_and_models_are_refused(objective: Any, model: nn.Module, message: str) -> None:
    with pytest.raises(lockstep.ConfigError) as refusal:
        chunk_head_loss(objective, model, 4)
    assert str(refusal.value).startswith("memory.loss_chunk: ")
    assert message in str(refusal.value)


def test_compiled_models_are_refused() -> None:
    section = config(8, memory={"loss_chunk": 4})
    section["model"] = {**section["model"], "compile": True}
    with fails(lockstep.ConfigError, "memory.loss_chunk", "model.compile"):
        validate(section)
    del section["model"]["compile"]
    section["memory"] = {"activation_checkpointing": {"mode": "budget"}}
    with fails(lockstep.ConfigError, "budget", "model.compile: true"):
        validate(section)

"""Objectives are sums over valid targets: values and gradients of any split add up."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.failures import fails
from torch import nn

from lockstep.config import schema
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.records import Batch, DataFacts
from lockstep.models.building_objectives import FunctionObjective, adapt_objective, build_objective, coupling
from lockstep.models.objectives import TargetLoss, count_targets, cross_entropy_sum

V, T = 7, 5


def _batch(logits, targets, chosen=slice(None)):
    return logits[chosen], Batch({}, targets[chosen], len(targets[chosen]), targets[chosen].numel())


def _random(samples, seed, classes_only):
    generator = torch.Generator().manual_seed(seed)
    shape = (samples,) if classes_only else (samples, T)
    targets = torch.randint(0, V, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.4] = -100
    return torch.randn(*shape, V, generator=generator, dtype=torch.float32), targets


OBJECTIVES = [
    pytest.param(TargetLoss(language=True), id="next-token"),
    pytest.param(TargetLoss(language=True, shift=True), id="next-token-shifted"),
    pytest.param(TargetLoss(language=True, label_smoothing=0.1), id="smoothed"),
    pytest.param(TargetLoss(language=True), id="masked-lm"),
    pytest.param(TargetLoss(language=True, label_smoothing=0.2), id="seq2seq"),
    pytest.param(TargetLoss(language=False), id="classification"),
    pytest.param(TargetLoss(language=False, label_smoothing=0.1), id="classification-smoothed"),
]


def _one_a_sample(objective) -> bool:
    return isinstance(objective, TargetLoss) and not objective.language


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=25, deadline=None)
@given(samples=st.integers(1, 9), seed=st.integers(0, 1000), data=st.data())
def test_any_split_adds_up(objective, samples, seed, data):
    logits, targets = _random(samples, seed, _one_a_sample(objective))
    logits.requires_grad_()
    cuts = sorted(data.draw(st.sets(st.integers(0, samples))) | {0, samples})
    parts = [_batch(logits, targets, slice(start, stop)) for start, stop in pairwise(cuts)]
    whole = _batch(logits, targets)
    total = objective.loss_sum(*whole)
    assert sum(objective.count(batch) for _, batch in parts) == objective.count(whole[1])
    torch.testing.assert_close(sum(objective.loss_sum(*part) for part in parts), total, rtol=1e-5, atol=1e-5)
    (expected,) = torch.autograd.grad(total, logits)
    (gradient,) = torch.autograd.grad(sum(objective.loss_sum(*part) for part in parts), logits)
    assert (gradient - expected).norm() <= 1e-6 * expected.norm() + 1e-12
    for name, value in objective.metric_sums(*whole).items():
        torch.testing.assert_close(
            sum(objective.metric_sums(*part)[name] for part in parts), value, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_sum_over_count_is_torchs_mean(objective):
    logits, targets = _random(6, 1, _one_a_sample(objective))
    smoothing = objective.label_smoothing
    mean = objective.loss_sum(*_batch(logits, targets)) / objective.count(_batch(logits, targets)[1])
    if getattr(objective, "_shift", False):
        logits, targets = logits[:, :-1], targets[:, 1:]
    expected = nn.functional.cross_entropy(logits.reshape(-1, V), targets.flatten(), label_smoothing=smoothing)
    torch.testing.assert_close(mean, expected)


def test_ignored_positions_have_no_count_and_no_gradient():
    logits = torch.randn(2, T, V, requires_grad=True)
    targets = torch.full((2, T), -100)
    targets[0, 3] = 2
    batch = Batch({}, targets, 2, 10)
    assert TargetLoss(language=True).count(batch) == 1
    (gradient,) = torch.autograd.grad(TargetLoss(language=True).loss_sum(logits, batch), logits)
    assert gradient.abs().sum(-1).count_nonzero() == 1
    nothing = Batch({}, torch.full((2, T), -100), 2, 10)
    assert TargetLoss(language=True).count(nothing) == 0
    assert TargetLoss(language=True).loss_sum(logits, nothing) == 0


def test_the_loss_is_fp32_for_outputs_of_any_precision():
    logits, targets = _random(4, 1, False)
    rough = logits.bfloat16()
    loss = TargetLoss(language=True).loss_sum(rough, _batch(logits, targets)[1])
    assert loss.dtype is torch.float32
    torch.testing.assert_close(
        loss, TargetLoss(language=True).loss_sum(rough.float(), _batch(logits, targets)[1]), rtol=0, atol=0
    )


def test_outputs_may_be_a_mapping_with_logits():
    logits, targets = _random(4, 1, True)
    batch = _batch(logits, targets)[1]
    assert TargetLoss(language=False).loss_sum({"logits": logits}, batch) == TargetLoss(language=False).loss_sum(
        logits, batch
    )
    with fails(RunFailed, "['hidden']", "logits"):
        TargetLoss(language=False).loss_sum({"hidden": logits}, batch)
    with pytest.raises(RunFailed, match="a tuple"):
        TargetLoss(language=False).loss_sum((logits, logits.sum()), batch)


def test_metrics_of_known_values():
    targets = torch.tensor([[0, 1, -100]])
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 0] = 1.0
    objective = TargetLoss(language=True, bytes_per_token=2.0)
    batch = Batch({}, targets, 1, 3)
    sums = {name: float(value) for name, value in objective.metric_sums(logits, batch).items()}
    metrics = objective.metrics(float(objective.loss_sum(logits, batch)), 2, sums)
    nats = (math.log(math.e + 3) - 1 + math.log(4)) / 2
    assert metrics == pytest.approx(
        {"loss": nats, "perplexity": math.exp(nats), "accuracy": 0.5, "bits_per_byte": nats / math.log(2) / 2}
    )


def test_perplexity_ignores_label_smoothing():
    logits, targets = _random(4, 1, False)
    batch = _batch(logits, targets)[1]
    metrics = []
    for objective in (TargetLoss(language=True), TargetLoss(language=True, label_smoothing=0.3)):
        sums = {name: float(value) for name, value in objective.metric_sums(logits, batch).items()}
        metrics.append(objective.metrics(float(objective.loss_sum(logits, batch)), objective.count(batch), sums))
    assert metrics[0]["perplexity"] == pytest.approx(metrics[1]["perplexity"])
    assert metrics[0]["loss"] != pytest.approx(metrics[1]["loss"])


def test_an_empty_evaluation_is_nan_and_a_huge_loss_has_infinite_perplexity():
    assert math.isnan(TargetLoss(language=False).metrics(0.0, 0.0, {"right": 0.0})["loss"])
    assert TargetLoss(language=True).metrics(1e6, 1.0, {"right": 0.0})["perplexity"] == math.inf


def test_mismatched_and_missing_targets_are_refused():
    batch = Batch({}, torch.tensor([0, 7]), 2, 2)
    with fails(RunFailed, "0 to 7", "3 outputs", "0 to 2"):
        TargetLoss(language=False).loss_sum(torch.zeros(2, 3), batch)
    with fails(RunFailed, "[2, 5, 3]", "[2]"):
        TargetLoss(language=False).loss_sum(torch.zeros(2, 5, 3), batch)
    for objective in (TargetLoss(language=True, shift=True), TargetLoss(language=True), TargetLoss(language=True)):
        with fails(RunFailed, "targets", "`labels`"):
            objective.count(Batch({}, None, 2, 2))


def test_soft_targets_are_refused():
    with pytest.raises(RunFailed, match="float32"):
        count_targets(torch.rand(3, 4))


# --- objectives of models and configs -------------------------------------------------------------------------------

TRANSFORMER = schema.TransformerModel(kind="transformer")
CUSTOM = schema.CustomModel(kind="custom", target="torch.nn:Linear")


def _huggingface(task, **architecture):
    return schema.HuggingFaceModel(kind="huggingface", task=task, architecture={"model_type": "bert", **architecture})


@pytest.mark.parametrize(
    ("model", "facts", "expected"),
    [
        (TRANSFORMER, DataFacts(1, 1, vocabulary=2), (TargetLoss, True)),
        (schema.TextClassifierModel(kind="text-classifier"), DataFacts(1, 1), (TargetLoss, False)),
        (schema.ImageClassifierModel(kind="image-classifier"), DataFacts(1, 1), (TargetLoss, False)),
        (_huggingface("causal-lm"), DataFacts(1, 1), (TargetLoss, True)),
        (_huggingface("masked-lm"), DataFacts(1, 1), (TargetLoss, True)),
        (_huggingface("seq2seq"), DataFacts(1, 1), (TargetLoss, True)),
        (_huggingface("sequence-classification"), DataFacts(1, 1), (TargetLoss, False)),
        (CUSTOM, DataFacts(1, 1, vocabulary=9, classes=3), (TargetLoss, False)),
        (CUSTOM, DataFacts(1, 1, vocabulary=9), (TargetLoss, True)),
    ],
)
def test_auto_is_the_objective_that_the_model_is_made_for(model, facts, expected):
    kind, of_a_language = expected
    objective = build_objective(schema.ObjectiveConfig(), model, facts)
    assert type(objective) is kind
    assert ("perplexity" in objective.metrics(1.0, 1.0, {"right": 1.0})) == of_a_language


def test_aligned_labels_are_shifted():
    batch = Batch({}, torch.zeros(2, 5, dtype=torch.long), 2, 10)
    facts = DataFacts(1, 5, vocabulary=9)
    assert build_objective(schema.ObjectiveConfig(), TRANSFORMER, facts).count(batch) == 10
    assert build_objective(schema.ObjectiveConfig(), TRANSFORMER, facts, aligned=True).count(batch) == 8


@pytest.mark.parametrize(
    ("objective", "model", "message"),
    [
        (
            {"kind": "classification"},
            TRANSFORMER,
            "does not fit a model of kind 'transformer', .*made for 'next-token'",
        ),
        (
            {"arguments": {"x": 1}},
            TRANSFORMER,
            "objective.arguments: only `kind: custom` takes arguments, not next-token",
        ),
        ({}, CUSTOM, "neither the custom model nor the data .* determines the objective; set next-token"),
        ({"kind": "given"}, TRANSFORMER, "objective.kind: `given` needs an objective from the Python API"),
        ({"kind": "custom", "target": "math:pi"}, CUSTOM, "math:pi is a float"),
        ({"kind": "custom", "target": "collections:Counter"}, CUSTOM, "an objective is .*; this is a Counter"),
        (
            {"kind": "custom", "target": "torch.nn:MSELoss", "arguments": {"reduction": "none"}},
            CUSTOM,
            "reduction='none'.*set reduction='mean' or 'sum'",
        ),
    ],
)
def test_objectives_that_do_not_fit_are_refused(objective, model, message):
    with pytest.raises(ConfigError, match=message):
        build_objective(schema.ObjectiveConfig(**objective), model, DataFacts(1, 1))


class Contrast:
    decomposes = False

    def count(self, batch):
        return 2 * batch.samples

    def loss_sum(self, outputs, batch):
        return outputs.sum()


def test_objects_modules_and_functions_are_adapted():
    batch = Batch({}, torch.tensor([[1.0], [3.0]]), 2, 2)
    outputs = torch.tensor([[2.0], [5.0]])
    adapted = adapt_objective(Contrast())
    assert (adapted.count(batch), float(adapted.loss_sum(outputs, batch)), adapted.decomposes) == (4, 7.0, False)
    assert adapted.metrics(7.0, 4, {}) == {"loss": 1.75}
    squares = adapt_objective(nn.MSELoss(reduction="sum"))
    assert (squares.count(batch), float(squares.loss_sum(outputs, batch))) == (2, 5.0)
    function = adapt_objective(lambda outputs, batch: (outputs - batch.targets).abs().sum())
    assert (function.count(batch), float(function.loss_sum(outputs, batch))) == (2, 3.0)
    assert function.metric_sums(outputs, batch) == {}
    own = FunctionObjective(count=lambda batch: 1, loss_sum=cross_entropy_sum)
    assert adapt_objective(own) is own


MISSHAPEN = {
    "classes last": (
        nn.CrossEntropyLoss(reduction="sum"), (2, T, V), torch.zeros(2, T, dtype=torch.int64),
        "objective: CrossEntropyLoss: outputs are [2, 5, 7] and targets [2, 5]; torch takes classes in the second dim, "
        "but they are in the last. Instead of the loss write objective: {kind: next-token} in the config, or "
        "masked-lm for labels at their own positions; or have the forward return outputs.movedim(-1, 1), [2, 7, 5]",
    ),
    "one dim too many": (
        nn.NLLLoss(reduction="sum"), (4, V), torch.zeros(4, 1, dtype=torch.int64),
        "objective: NLLLoss: outputs are [4, 7] and targets [4, 1]; torch takes classes in the second dim and one "
        "target for each of the others: give targets of [4]",
    ),
    "pairs of all with all": (
        nn.MSELoss(reduction="sum"), (4, 1), torch.zeros(4),
        "objective: MSELoss: outputs are [4, 1] and targets [4]; give targets of [4, 1], or return outputs of "
        "[4]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSHAPEN)
def test_shapes_that_a_loss_of_torch_does_not_take_are_refused(case):
    """Torch would broadcast some: the squared error of [4, 1] and [4] is that of sixteen pairs."""
    loss, shape, targets, message = MISSHAPEN[case]
    with pytest.raises(ConfigError) as refused:
        adapt_objective(loss).loss_sum(torch.zeros(shape), Batch({}, targets, len(targets), 1))
    assert str(refused.value) == message


@pytest.mark.parametrize("shape", [(4, V), (4, V, T), (4, V, T, 2)])
def test_shapes_that_torch_takes_are_accepted(shape):
    targets = torch.zeros(shape[0], *shape[2:], dtype=torch.int64)
    loss = adapt_objective(nn.CrossEntropyLoss(reduction="sum")).loss_sum(
        torch.zeros(shape), Batch({}, targets, len(targets), 1)
    )
    assert loss.item() == pytest.approx(targets.numel() * math.log(V))


def test_torchs_cross_entropy_counts_valid_targets():
    batch = Batch({}, torch.tensor([1, 0, -1]), 3, 3)
    objective = adapt_objective(nn.CrossEntropyLoss(reduction="sum", ignore_index=-1))
    assert objective.count(batch) == 2


@pytest.mark.parametrize("other", [Contrast, 3, "loss"])
def test_other_objects_are_refused(other):
    with fails(ConfigError, "count", "loss_sum"):
        adapt_objective(other)


def test_a_module_with_batch_norm_does_not_decompose():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2)))
    assert coupling(module) == "batch norm (1, 2.0)"
    module[1].eval()
    assert coupling(module) == "batch norm (2.0)", "a frozen one reads its running statistics"
    assert coupling(module.eval()) == "batch norm (1, 2.0)", "the whole model is set to training"
    module.train()
    assert coupling(nn.Sequential(nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.InstanceNorm1d(2))) is None

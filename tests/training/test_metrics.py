"""Metrics of torchmetrics have the values that it computes on one process on the whole set, whatever the strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import small
from kit.failures import fails, gives
from kit.worlds import in_world
from torch.utils.data import Dataset
from torchmetrics import classification, regression

import lockstep
from lockstep.config.loading import validate
from lockstep.core.directions import known_direction
from lockstep.core.errors import ConfigError
from lockstep.core.metric_names import metric_classes
from lockstep.data.loader import first_batch
from lockstep.loop.session import components_of
from lockstep.models import metrics

SAMPLES, WIDTH, LABELS = 13, 6, 4
BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "vocab_size": 32, "num_labels": LABELS,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2,
    "intermediate_size": 32, "vocab_size": 32, "tie_word_embeddings": False,
}  # fmt: skip


class Rows(Dataset[Any]):
    """Rows of token ids, with the labels of a task."""

    def __init__(self, task: str) -> None:
        draws = torch.Generator().manual_seed(3)
        self.ids = torch.randint(32, (SAMPLES, WIDTH), generator=draws)
        classes = torch.arange(SAMPLES * WIDTH).reshape(SAMPLES, WIDTH) % LABELS
        self.labels = {
            "classes": classes[:, 0],
            "binary": classes[:, 0] % 2,
            "tokens": torch.where(self.ids < 8, -100, classes),
            "several": (torch.rand(SAMPLES, LABELS, generator=draws) > 0.5).float(),
            "numbers": torch.randn(SAMPLES, generator=draws),
            "text": self.ids,
        }[task]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


TASKS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "classes": (
        {"task": "sequence-classification", "architecture": BERT},
        ["f1", {"kind": "f1", "name": "macro", "arguments": {"average": "macro"}}, "auroc",
         {"kind": "recall", "arguments": {"average": "none"}}],
    ),
    "binary": ({"task": "sequence-classification", "architecture": {**BERT, "num_labels": 2}}, ["f1", "auroc", "mcc"]),
    "tokens": (
        {"task": "token-classification", "architecture": BERT},
        [{"kind": "f1", "arguments": {"average": "macro"}}, "MulticlassPrecision", "average_precision"],
    ),
    "several": (
        {"task": "sequence-classification", "architecture": {**BERT, "problem_type": "multi_label_classification"}},
        ["f1", "auroc"],
    ),
    "numbers": (
        {"task": "sequence-classification", "architecture": {**BERT, "num_labels": 1, "problem_type": "regression"}},
        ["mse", "pearson", "spearman", "r2"],
    ),
    "text": ({"task": "causal-lm", "architecture": LLAMA}, [{"kind": "accuracy", "arguments": {"top_k": 5}}]),
}  # fmt: skip


def config(task: str, micro_size: int | str = 2, **parallel: Any) -> dict[str, Any]:
    model, metrics = TASKS[task]
    data = {"kind": "custom", "target": "training.test_metrics:Rows", "arguments": {"task": task}}
    return {
        "model": {"kind": "huggingface", **model},
        "data": {"train": data, "evaluation": {"held-out": data, "again": data}},
        "batch": {"global_size": 12},
        "precision": {"compute": "fp32"},
        "parallel": parallel,
        "evaluation": {"metrics": metrics, "micro_size": micro_size},
        "run": {"steps": 1},
    }


def whole(task: str, outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """What torchmetrics computes of all outputs at once."""
    if task == "text":
        outputs, labels = outputs[:, :-1], labels[:, 1:]
    outputs = outputs.flatten(0, -2)
    if task in ("classes", "tokens", "text", "binary"):
        labels = labels.flatten()
        outputs, labels = outputs.softmax(-1)[labels != -100], labels[labels != -100]
    if task == "binary":
        outputs = outputs[:, 1]
    if task == "several":
        outputs, labels = outputs.sigmoid(), labels.long()
    if task == "numbers":
        outputs = outputs.flatten()
    many: dict[str, Any] = {"num_classes": 32 if task == "text" else LABELS}
    made: dict[str, Any] = {
        "classes": lambda: {
            "f1": classification.MulticlassF1Score(average="micro", **many),
            "macro": classification.MulticlassF1Score(**many),
            "auroc": classification.MulticlassAUROC(**many),
            "recall": classification.MulticlassRecall(average="none", **many),
        },
        "binary": lambda: {
            "f1": classification.BinaryF1Score(),
            "auroc": classification.BinaryAUROC(),
            "mcc": classification.BinaryMatthewsCorrCoef(),
        },
        "tokens": lambda: {
            "f1": classification.MulticlassF1Score(**many),
            "MulticlassPrecision": classification.MulticlassPrecision(**many),
            "average_precision": classification.MulticlassAveragePrecision(**many),
        },
        "several": lambda: {
            "f1": classification.MultilabelF1Score(num_labels=LABELS, average="micro"),
            "auroc": classification.MultilabelAUROC(num_labels=LABELS),
        },
        "numbers": lambda: {
            "mse": regression.MeanSquaredError(),
            "pearson": regression.PearsonCorrCoef(),
            "spearman": regression.SpearmanCorrCoef(),
            "r2": regression.R2Score(),
        },
        "text": lambda: {"accuracy": classification.MulticlassAccuracy(top_k=5, average="micro", **many)},
    }[task]()
    values: dict[str, float] = {}
    for name, metric in made.items():
        metric.update(outputs, labels)
        value = metric.compute()
        values |= {name: float(value)} if value.dim() == 0 else {f"{name}_{n}": float(v) for n, v in enumerate(value)}
    return values


def _evaluated(configs: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    found = []
    for each in configs:
        with lockstep.session(each) as session:
            found.append([dict(report.metrics) for report in [*session.evaluate(), *session.evaluate()]])
    return found


def _oracles(tasks: list[str]) -> dict[str, dict[str, float]]:
    values = {}
    for task in tasks:
        with lockstep.session(config(task, strategy="single")) as session:
            components = components_of(session)
            batch = first_batch(components.source, SAMPLES)
            components.sharding.state.model.eval()
            with torch.no_grad():
                outputs: Any = components.engine.outputs(batch.inputs)
            labels = batch.targets
            values[task] = whole(task, outputs["logits"], labels)
    return values


@pytest.fixture(scope="module")
def oracles() -> dict[str, dict[str, float]]:
    return in_world(1, _oracles, list(TASKS))[0]  # type: ignore[no-any-return]


WAYS: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "single": (1, {"strategy": "single"}, list(TASKS)),
    "ddp": (3, {"strategy": "ddp"}, list(TASKS)),
    "fsdp": (2, {"strategy": "fsdp"}, ["classes", "tokens", "numbers"]),
    "zero3": (2, {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3}}, ["classes", "numbers"]),
    "pipeline": (2, {"strategy": "ddp", "pipeline": 2}, ["tokens", "text"]),
    "zbv": (2, {"strategy": "ddp", "pipeline": 2, "pipeline_parallel": {"schedule": "zbv"}}, ["text"]),
    "tensor": (2, {"strategy": "ddp", "tensor": 2, "tensor_parallel": {"loss_parallel": True}}, ["text"]),
    "context": (2, {"strategy": "ddp", "context": 2}, ["text"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_values_are_those_of_one_process_on_the_whole_set(way: str, oracles: dict[str, dict[str, float]]) -> None:
    ranks, parallel, tasks = WAYS[way]
    sizes: tuple[Any, ...] = (1, 4) if way in ("single", "ddp") else (4,)  # a rank of three has no sample in some
    configs = [config(task, size, **parallel) for task in tasks for size in sizes]
    for of_rank in in_world(ranks, _evaluated, configs):
        for (task, _), reports in zip([(t, s) for t in tasks for s in sizes], of_rank, strict=True):
            assert reports[0] == reports[1] == reports[2] == reports[3]
            found = {name: reports[0][name] for name in oracles[task]}
            assert found == pytest.approx(oracles[task], rel=2e-5, abs=1e-6), task


class _Held:
    """What each rank has of a metric whose states are lists, or joined by the class itself."""

    def __init__(self, name: str, rank: int, ranks: int) -> None:
        draws = torch.Generator().manual_seed(0)
        outputs, targets = torch.randn(9, generator=draws), torch.randn(9, generator=draws)
        self.metric = getattr(regression, name)(sync_on_compute=False)
        self.whole = getattr(regression, name)(sync_on_compute=False)
        self.whole.update(outputs, targets)
        if rank < ranks - 1:  # the last one has nothing, and the others unequal numbers
            part = slice(0, 2) if rank == 0 else slice(2, 9)
            for index in range(*part.indices(9)):
                if name != "PearsonCorrCoef" or index % 2:
                    first = index - (name == "PearsonCorrCoef")
                    self.metric.update(outputs[first : index + 1], targets[first : index + 1])
            if name == "PearsonCorrCoef" and rank == 1:
                self.metric.update(outputs[8:], targets[8:])


def _reduced(names: list[str]) -> list[tuple[float, float]]:
    with lockstep.session(small.config(parallel={"strategy": "ddp"})) as session:
        axis = components_of(session).world.axis
        held = [_Held(name, axis.rank, axis.size) for name in names]
        metrics.reduce_states([each.metric for each in held], axis, counts=True)
        return [(float(each.metric.compute()), float(each.whole.compute())) for each in held]


def test_ranks_with_unequal_numbers_and_with_none() -> None:
    names = ["SpearmanCorrCoef", "PearsonCorrCoef", "MeanSquaredError", "KendallRankCorrCoef", "ExplainedVariance"]
    for of_rank in in_world(3, _reduced, names):
        for name, (value, expected) in zip(names, of_rank, strict=True):
            assert value == pytest.approx(expected, rel=1e-5), name


@pytest.mark.parametrize(
    ("metrics", "values"),
    [
        (["aurok"], ["aurok", "AUROC"]),
        ([{"kind": "F1Scor"}], ["F1Scor", "F1Score"]),
        (["f1", {"kind": "auroc", "name": "f1"}], ["f1", "name"]),
        ([{"kind": "f1", "argument": {}}], ["evaluation.metrics.0.argument", "arguments?"]),
    ],
)
def test_a_wrong_metric_is_refused_when_the_config_is_read(metrics: list[Any], values: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        validate({**config("classes"), "evaluation": {"metrics": metrics}})
    assert gives(str(refused.value), *values)


@pytest.mark.parametrize(
    ("task", "metrics", "values"),
    [
        ("classes", [{"kind": "f1", "arguments": {"avarage": "macro"}}], ["f1", "avarage"]),
        ("classes", ["mse"], ["mse", "regression", "classes"]),
        ("numbers", ["f1"], ["f1", "classification", "numbers"]),
        ("classes", ["roc"], ["roc", "curve"]),
    ],
)
def test_a_metric_that_does_not_fit_is_refused_before_training(
    task: str, metrics: list[Any], values: list[str]
) -> None:
    with (
        fails(ConfigError, "evaluation.metrics", *values),
        lockstep.session({**config(task, strategy="single"), "evaluation": {"metrics": metrics}}),
    ):
        pass


def test_the_direction_of_the_best_checkpoint_is_that_of_torchmetrics() -> None:
    settings = config("classes", strategy="single")
    best = {"best": "held-out.macro", "best_is": "highest"}
    assert validate({**settings, "checkpoint": best}).config.checkpoint.best == "held-out.macro"
    with fails(ConfigError, "checkpoint.best", "makro", "macro"):
        validate({**settings, "checkpoint": {"best": "held-out.makro"}})


def test_names_show_the_direction_that_torchmetrics_has() -> None:
    wrong = {}
    for name, part in metric_classes().items():
        kind = getattr(__import__(f"torchmetrics.{part}", fromlist=[name]), name)
        better = kind.higher_is_better
        shown = known_direction(f"test.{name}")
        if isinstance(better, bool) and shown not in (None, "highest" if better else "lowest"):
            wrong[name] = shown
    assert not wrong


def test_an_objective_of_the_user_passes_its_outputs_and_targets() -> None:
    arguments = {"task": "multiclass", "num_classes": 3}
    chosen = [{"kind": "accuracy", "arguments": arguments}, {"kind": "auroc", "arguments": arguments}]
    data = {"kind": "custom", "target": "kit.small:points", "arguments": {"samples": 11, "seed": 1}}
    settings = small.config(evaluation={"metrics": chosen})
    settings["data"]["evaluation"] = {"held-out": data}
    with lockstep.session(settings) as session:
        for report in session:
            if report.step == 3:
                break
        [report] = session.evaluate()
        points, classes = small.points(11, 1).tensors
        with torch.no_grad():
            logits = components_of(session).sharding.state.model(points)
    expected = classification.MulticlassAUROC(3)(logits.softmax(1), classes)
    assert report.metrics["auroc"] == pytest.approx(float(expected), rel=1e-6)
    assert report.metrics["accuracy"] == pytest.approx((logits.argmax(1) == classes).float().mean().item())

"""A first loss is what the transformers library's own forward makes of the same batch, however model and data came."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from kit.heads import HEADS, SAMPLES, Samples, made, section
from kit.worlds import in_world
from torch import nn
from torch.utils.data import default_collate

import lockstep
from lockstep.loop.session import components_of

NAMES = tuple(HEADS)
FEW = ("llama causal", "bart causal", "bart seq2seq", "bert several", "bert answers", "vit classes", "wav2vec2 text")
"""In `make test`; the others are drilled."""
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"strategy": "single"}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "pipeline": (2, {"strategy": "ddp", "pipeline": 2}),
}


def config(name: str, strategy: str = "single", micro_size: int = SAMPLES) -> dict[str, Any]:
    _, parallel = STRATEGIES[strategy]
    unused = HEADS[name].unused and strategy != "pipeline"
    data = {"kind": "custom", "target": "kit.heads:Samples", "arguments": {"kind": HEADS[name].samples}}
    return {
        "model": section(HEADS[name]),
        "data": {"train": data, "evaluation": {"same": data}, "shuffle": False},
        "batch": {"global_size": SAMPLES, "micro_size": micro_size},
        "optim": {"lr": 1e-3},
        "precision": {"compute": "fp32"},
        "parallel": {**parallel, "ddp": {"find_unused_parameters": unused}},
        "run": {"steps": 1},
    }


def reference(name: str, model: nn.Module) -> float:
    """`model(**batch).loss`; of a sum over samples, their mean."""
    with torch.no_grad():
        loss = copy.deepcopy(model)(**default_collate(list(Samples(HEADS[name].samples)))).loss.item()
    return loss / SAMPLES if name.endswith(", sum") else loss


def first_losses(names: list[str], strategy: str, micro_size: int, how: str) -> list[tuple[float, float]]:
    """Of an update, and of an evaluation before it; on one rank."""
    import torch.distributed as dist

    found = []
    dist.init_process_group("gloo")
    try:
        for name in names:
            with lockstep.session(config(name, strategy, micro_size), **handed_over(name, how)) as session:
                [evaluation] = session.evaluate()
                [update] = list(session)
                found.append((update.loss, evaluation.metrics["loss"]))
    finally:
        dist.destroy_process_group()
    return found


def handed_over(name: str, how: str) -> dict[str, Any]:
    data = Samples(HEADS[name].samples)
    return {"model": made(name), "train_dataset": data, "eval_datasets": {"same": data}} if how == "object" else {}


def references(names: list[str], how: str) -> list[float]:
    """Of the models that the configs describe, or of the objects, before any update."""
    if how == "object":
        return [reference(name, made(name)) for name in names]
    found = []
    for name in names:
        with lockstep.session(config(name)) as session:
            found.append(reference(name, components_of(session).sharding.state.model))
    return found


def off(
    names: list[str], strategy: str, micro_size: int = SAMPLES, how: str = "config"
) -> dict[str, tuple[float, float, float]]:
    """Losses of updates and evaluations that aren't the library's, beside it."""
    ranks, _ = STRATEGIES[strategy]
    [expected] = in_world(1, references, names, how)
    found = in_world(ranks, first_losses, names, strategy, micro_size, how)[0]
    rows = zip(names, found, expected, strict=True)
    return {name: (*two, one) for name, two, one in rows if not all(math.isclose(one, x, rel_tol=2e-6) for x in two)}


def suited(strategy: str, names: tuple[str, ...]) -> list[str]:
    rows = [name for name in names if strategy != "pipeline" or HEADS[name].pipeline]
    return [name for name in rows if strategy == "single" or not HEADS[name].coupled]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_some_heads_of_configs(strategy: str) -> None:
    assert off(suited(strategy, FEW), strategy) == {}


def test_some_heads_of_objects() -> None:
    assert off(suited("ddp", FEW), "ddp", how="object") == {}


@pytest.mark.drill
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_head_of_an_object(strategy: str) -> None:
    assert off(suited(strategy, NAMES), strategy, how="object") == {}


@pytest.mark.drill
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_head_of_a_config(strategy: str) -> None:
    assert off(suited(strategy, NAMES), strategy) == {}


@pytest.mark.drill
def test_every_head_in_micro_batches_of_unequal_counts() -> None:
    """A mean of means would be another loss."""
    names = [name for name in NAMES if not HEADS[name].coupled]
    assert off(names, "single", micro_size=2) == {}
    assert off(names, "ddp", micro_size=1) == {}

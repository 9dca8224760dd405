"""Transforms are applied in the order that their rules give, around the pipeline partition."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import pytest
import torch
from torch import nn

from lockstep.core.errors import ConfigError
from lockstep.core.protocols import Transform
from lockstep.distributed.forward_mode import ForwardMode
from lockstep.transforms.context_parallel import ContextParallel
from lockstep.transforms.order import apply_transforms, split_at

PIPELINE = "parallel.pipeline"


@dataclass(frozen=True)
class Named(Transform):
    name: str
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        return "no such device" if device.type == "meta" else None

    def apply(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(model)


def order(*transforms: Transform) -> tuple[list[str], list[str]]:
    before, after = split_at(PIPELINE, transforms)
    return [step.name for step in before], [step.name for step in after]


TENSOR = Named("parallel.tensor", after=(PIPELINE,))
COMPILE = Named("model.compile", after=("float8",))
FLOAT8 = Named("float8", before=("parallel.tensor",))
LAST = Named("last", after=("parallel.tensor", "absent"))


def test_rules_hold_whatever_the_order_in_which_transforms_are_given() -> None:
    for given in permutations((TENSOR, COMPILE, FLOAT8, LAST)):
        assert order(*given) == (["float8", "model.compile"], ["parallel.tensor", "last"])


def test_without_rules_transforms_come_before_the_partition_as_given() -> None:
    assert order(Named("b"), Named("a")) == (["b", "a"], [])
    assert order(Named("a", before=("b",)), Named("b", after=(PIPELINE,))) == (["a"], ["b"])


def test_tensor_and_context_parallelism_can_be_named() -> None:
    context = ContextParallel(2, ForwardMode(), allow_untested=False)
    adapter = Named("adapter", after=("parallel.context",))
    assert order(adapter, context) == ([], ["parallel.context", "adapter"])


def test_contradictions_and_doubles_are_refused() -> None:
    with pytest.raises(ConfigError, match="their rules contradict each other"):
        order(Named("a", after=("b",)), Named("b", after=("a",)))
    with pytest.raises(ConfigError, match="two have the name a"):
        order(Named("a"), Named("a"))


def test_a_transform_that_refuses_is_named() -> None:
    assert isinstance(apply_transforms(nn.ReLU(), [TENSOR], torch.device("cpu")), nn.Sequential)
    with pytest.raises(ConfigError, match=r"parallel\.tensor: no such device"):
        apply_transforms(nn.ReLU(), [TENSOR], torch.device("meta"))

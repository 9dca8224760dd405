"""What planning needs to know of a model: shapes, without values and without torch."""

from __future__ import annotations

from torch import nn

from lockstep.config.schema import Model
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.models.build import sketch_model


def parameter_facts(module: nn.Module) -> list[ParameterFacts]:
    """Every parameter once; a tied one under its first name."""
    return [
        ParameterFacts(name, tuple(parameter.shape), parameter.element_size(), parameter.requires_grad)
        for name, parameter in module.named_parameters()
    ]


def count_parameters(module: nn.Module, *, trainable: bool = False) -> int:
    """Elements of all parameters, tied ones once; with `trainable`, of those that are trained."""
    return sum(facts.elements for facts in parameter_facts(module) if facts.trainable or not trainable)


def describe_model(section: Model, facts: DataFacts, *, trust_remote_code: bool = False) -> list[ParameterFacts]:
    """The parameters that `build_model` would make, without making them.

    Raises:
        ConfigError: as `build_model`.
    """
    return parameter_facts(sketch_model(section, facts, trust_remote_code=trust_remote_code))

"""Parameters in torch's groups, by the rules of the config.

name, parameter  -->  plan.grouping (by name and shape)  -->  [{"params", "names", "lr", "lr_scale",
                                                                "weight_decay"}, ...]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lockstep.core.records import ParameterFacts
from lockstep.plan.grouping import group_parameters

if TYPE_CHECKING:
    from torch import nn

    from lockstep.config.schema import Optim


def parameter_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], optim: Optim) -> list[dict[str, Any]]:
    """The trainable parameters in groups that any torch optimizer takes.

    Each group has `names`, in the order of its `params`, and `lr_scale`, which the run's learning rate is multiplied
    by; `lr` is the peak.

    Raises:
        ConfigError: no parameter is trainable, or a rule matches none.
    """
    named = dict(named_parameters)
    facts = [facts_of(name, parameter) for name, parameter in named.items()]
    return [
        {
            "params": [named[name] for name in group.names],
            "names": list(group.names),
            "lr": optim.lr * group.lr_scale,
            "lr_scale": group.lr_scale,
            "weight_decay": group.weight_decay,
        }
        for group in group_parameters(facts, optim)
    ]


def facts_of(name: str, parameter: nn.Parameter) -> ParameterFacts:
    """What planning knows of a parameter."""
    return ParameterFacts(name, tuple(parameter.shape), parameter.element_size(), parameter.requires_grad)

"""Parameters in torch's groups, by the rules of the config.

name, parameter  -->  plan.grouping (by name and shape)  -->  [{"params", "names", "lr", "lr_scale",
                                                                "weight_decay"}, ...]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.core.records import ParameterFacts
from lockstep.plan.grouping import group_parameters

if TYPE_CHECKING:
    from torch import nn

    from lockstep.config.schema import Optim
    from lockstep.plan.grouping import Grouping


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], optim: Optim, planned: Sequence[Grouping] | None = None
) -> list[dict[str, Any]]:
    """The trainable parameters in groups that any torch optimizer takes.

    Each group has `names`, in the order of its `params`, and `lr_scale`, which the run's learning rate is multiplied
    by; `lr` is the peak.

    Args:
        planned: of the whole model, if these are some of its parameters. A group is there, too, if none of its
            parameters are: all ranks have the same groups.

    Raises:
        ConfigError: no parameter is trainable, or a rule matches none.
    """
    named = dict(named_parameters)
    groups = planned or group_parameters([facts_of(name, one) for name, one in named.items()], optim)
    return [
        {
            "params": [named[name] for name in group.names if name in named],
            "names": [name for name in group.names if name in named],
            "lr": optim.lr * group.lr_scale,
            "lr_scale": group.lr_scale,
            "weight_decay": group.weight_decay,
        }
        for group in groups
    ]


def facts_of(name: str, parameter: nn.Parameter) -> ParameterFacts:
    """What planning knows of a parameter."""
    return ParameterFacts(name, tuple(parameter.shape), parameter.element_size(), parameter.requires_grad)

"""The optimizer of a run, for the parameters that a strategy gives it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.core.errors import ConfigError, Problem
from lockstep.optim.groups import parameter_groups, user_groups
from lockstep.optim.optimizers import Elementwise, adapt_optimizer, build_elementwise, build_optimizer, custom_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep.config.schema import Optim
    from lockstep.core.protocols import Optimizer
    from lockstep.plan.grouping import Grouping

_NO_GROUPS = "doesn't support per-parameter options"
"""The message by which torch's LBFGS refuses groups."""


class ConfiguredOptimizer:
    """Makes the optimizer of the config, or a user's.

    Args:
        groups: Groups of the whole model's parameters, by settings.
        make: A user's function, from parameter groups; None: the config's optimizer, which may be a user's, too.

    Attributes:
        is_custom: Whether it is a user's, of which nothing is known.
        used: The settings that hold, some of which a user's optimizer may state; known once it is made.
    """

    def __init__(
        self,
        optim: Optim,
        groups: Sequence[Grouping],
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None,
    ) -> None:
        self._optim = optim
        self._groups = groups
        self._make = make or custom_optimizer(optim)
        self.is_custom = self._make is not None
        self.used = optim

    def __call__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Return the optimizer of these parameters."""
        groups = parameter_groups(parameters, self._optim, self._groups)
        if self._make is None:
            return build_optimizer(self._optim, groups)
        try:
            made = self._make(user_groups(groups, self._optim))
        except ValueError as error:
            if _NO_GROUPS not in str(error):
                raise
            why = (
                f"{error}, and a run sets the learning rate and weight decay of each group; take an optimizer that "
                "takes groups and whose step() needs no closure, such as torch.optim.AdamW"
            )
            raise ConfigError(Problem("", "optimizer", why)) from error
        optimizer, self.used = adapt_optimizer(made, self._optim)
        return optimizer

    def elementwise(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Elementwise:
        """Return an optimizer that may see the parameters flattened."""
        if self.is_custom:
            raise ConfigError(
                "an optimizer that was handed over may look at a parameter's shape, and DeepSpeed gives it flat parts; "
                "name one in optim.name, or take parallel.strategy: fsdp, or ddp"
            )
        return build_elementwise(self._optim, parameter_groups(parameters, self._optim, self._groups))

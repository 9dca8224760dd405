"""A module of the user's own, by import path. Its constructor's values are kept, drawn under a keyed generator."""

from __future__ import annotations

from torch import nn

from lockstep.config.schema import CustomModel
from lockstep.core.errors import ConfigError
from lockstep.core.extensions import construct
from lockstep.models.initialization import shapes_alone


def construct_custom(section: CustomModel) -> nn.Module:
    """Raises:
    ConfigError: it can't be imported or called, or it is no module.
    """
    module = construct("models", section.target, section.arguments)
    if isinstance(module, nn.Module):
        return module
    raise ConfigError(f"model.target {section.target} gave a {type(module).__name__}, not a torch.nn.Module")


def sketch_custom(section: CustomModel) -> nn.Module:
    """The same on the meta device, or on the CPU if its constructor looks at values.

    Raises:
        ConfigError: as `construct_custom`.
    """
    try:
        with shapes_alone():
            return construct_custom(section)
    except ConfigError:
        return construct_custom(section)

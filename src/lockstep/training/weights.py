"""The weights that a run leaves: RUN/model/model.safetensors, under the model's own parameter names.

Nothing in the file depends on how many ranks there were, and loading it executes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, GiveUp

if TYPE_CHECKING:
    from torch import nn

_PLACE = Path("model", "model.safetensors")


def save_weights(model: nn.Module, folder: Path) -> Path:
    """Writes the weights, tied ones once; they appear whole or not at all.

    Raises:
        GiveUp: the disk is full, or not ours to write on.
    """
    from safetensors.torch import save_model

    target = folder / _PLACE
    partial = target.with_suffix(".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        save_model(model, str(partial))
        partial.replace(target)
    except Exception as error:  # safetensors has an exception of its own for a full disk
        raise GiveUp(f"{target}: the trained weights could not be written: {error}") from error
    return target


def load_weights(model: nn.Module, folder: Path) -> None:
    """Puts a run's weights into its model, which must have just these parameters.

    Raises:
        ConfigError: the run left none.
        GiveUp: the file is damaged, or of another model.
    """
    from safetensors.torch import load_model

    place = folder / _PLACE
    if not place.exists():
        raise ConfigError(f"{folder}: this run left no weights ({_PLACE}); only a finished run does")
    try:
        load_model(model, str(place), strict=True)
    except Exception as error:
        raise GiveUp(f"{place}: these are not the weights of the run's model: {error}") from error

"""Weights of other programs, made into a file for `model.init_from`. What would have to be unpickled is refused.

model.pt | trainer.ckpt | folder of pytorch_model-*.bin  -->  FOLDER/model.safetensors; optimizer states and the like
                                                              are skipped, and named
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import ConfigError, GiveUp
from lockstep.models.weight_files import read_weights, readable
from lockstep.training.weights import FILE, save_tensors

_RESERVED = "__metadata__"
"""safetensors' own key beside the tensors."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Attributes:
    file: for `model.init_from`.
    tensors: how many.
    skipped: what else the source holds, by key.
    """

    file: Path
    tensors: int
    skipped: tuple[str, ...]

    def __str__(self) -> str:
        left = f"; skipped: {', '.join(self.skipped)}" if self.skipped else ""
        return f"{self.file}: {self.tensors:,} tensors{left}"


def import_weights(source: Path, folder: Path, force: bool = False) -> Imported:
    """Writes whole or not at all; replaces what is there only with `force`.

    Args:
        source: a file of torch's, also a Lightning .ckpt; a folder of transformers'; or safetensors.

    Raises:
        ConfigError: it isn't there, holds no tensors by name or more than tensors; or the target exists.
        GiveUp: the target can't be written.
    """
    target = folder / FILE
    if target.exists() and not force:
        raise ConfigError(f"{target} exists; --force replaces it")
    found = read_weights(source)
    for name in found.tensors:
        if name != readable(name) or name == _RESERVED:
            raise ConfigError(f"{found.place}: {readable(name)} is no name for a tensor")
    try:
        save_tensors(found.tensors, target)
    except Exception as error:  # safetensors has an exception of its own for a full disk
        raise GiveUp(f"{target} could not be written: {error}") from error
    return Imported(target, len(found.tensors), found.skipped)

"""Weights of other programs, made into a file for `model.init_from`. What would have to be unpickled is refused.

model.pt | trainer.ckpt | folder of pytorch_model-*.bin  -->  FOLDER/model.safetensors; optimizer states and the like
                                                              are skipped, and named
FOLDER that DeepSpeed saved to (ZeRO 0, 1, 2, 3)          -->  the same, of the fp32 values of all ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.interop.zero_files import is_zero, read_zero
from lockstep.models.weight_files import Weights, read_weights, readable
from lockstep.training.weights import FILE, save_tensors

_RESERVED = "__metadata__"
"""safetensors' own key beside the tensors."""


@dataclass(frozen=True, slots=True)
class Imported:
    """Attributes:
    file: for `model.init_from`.
    tensors: how many.
    skipped: what else the source holds, by key.
    of: what was read, where that isn't plain from its name.
    """

    file: Path
    tensors: int
    skipped: tuple[str, ...]
    of: str = ""

    def __str__(self) -> str:
        left = f"; skipped: {', '.join(self.skipped)}" if self.skipped else ""
        of = f" of {self.of}" if self.of else ""
        return f"{self.file}: {self.tensors:,} tensors{of}{left}"


def import_weights(source: Path, folder: Path, force: bool = False) -> Imported:
    """Writes whole or not at all; replaces what is there only with `force`.

    Args:
        source: a file of torch's, also a Lightning .ckpt; a folder of transformers'; safetensors; or what DeepSpeed's
            `save_checkpoint` has written.

    Raises:
        ConfigError: it isn't there, holds no tensors by name or more than tensors; or the target exists.
        RunFailed: the target can't be written.
    """
    target = folder / FILE
    if target.exists() and not force:
        raise ConfigError(f"{target} exists; --force replaces it")
    found, of = _read(source)
    for name in found.tensors:
        if name != readable(name) or name == _RESERVED:
            raise ConfigError(f"{found.place}: {readable(name)} is no name for a tensor")
    try:
        save_tensors(found.tensors, target)
    except Exception as error:  # safetensors has an exception of its own for a full disk
        raise RunFailed(f"{target} could not be written: {error}") from error
    return Imported(target, len(found.tensors), found.skipped, of)


def _read(source: Path) -> tuple[Weights, str]:
    """And what kind of thing it was, if that needs words."""
    if not is_zero(source.expanduser()):
        return read_weights(source), ""
    zero = read_zero(source.expanduser())
    ranks = f"{zero.ranks} rank{'' if zero.ranks == 1 else 's'}"
    of = f"{zero.place}: DeepSpeed ZeRO stage {zero.stage} on {ranks}" if zero.stage else f"{zero.place}: DeepSpeed"
    return Weights(zero.place, zero.tensors, zero.skipped), of

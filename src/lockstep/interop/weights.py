"""Convert weights of other programs to a file for `model.init_from`. What would have to be unpickled is refused.

model.pt | trainer.ckpt | folder of pytorch_model-*.bin  -->  FOLDER/model.safetensors; optimizer state and other data
                                                              are skipped, and listed
FOLDER that DeepSpeed saved to (ZeRO 0, 1, 2, 3)          -->  the same, with the fp32 values of all ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.interop.zero_checkpoint import read_zero
from lockstep.interop.zero_files import is_zero_checkpoint
from lockstep.models.weight_files import Weights, read_weights, readable
from lockstep.training.weights import FILE, save_tensors

_RESERVED = "__metadata__"  # safetensors' key beside the tensors


@dataclass(frozen=True, slots=True)
class ImportedWeights:
    """The result of an import.

    Attributes:
        file: For `model.init_from`.
        tensors: Number of tensors.
        skipped: Other contents of the source, by key.
        source: What was read, if that isn't plain from its name.
    """

    file: Path
    tensors: int
    skipped: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        skipped = f"; skipped: {', '.join(self.skipped)}" if self.skipped else ""
        source = f" of {self.source}" if self.source else ""
        return f"{self.file}: {self.tensors:,} tensors{source}{skipped}"


def import_weights(source: Path, folder: Path, force: bool = False) -> ImportedWeights:
    """Write the weights as one file, whole or not at all; replace an existing file only with `force`.

    Args:
        source: A file of torch, also a Lightning .ckpt; a folder of transformers; safetensors; or what DeepSpeed's
            `save_checkpoint` wrote.

    Raises:
        ConfigError: The source doesn't exist, has no named tensors or needs unpickling; or the target exists.
        RunFailed: The target can't be written.
    """
    target = folder / FILE
    if target.exists() and not force:
        raise ConfigError(f"{target} exists; --force replaces it")
    description = ""
    if is_zero_checkpoint(source.expanduser()):
        zero = read_zero(source.expanduser())
        ranks = f" ZeRO stage {zero.stage} on {zero.ranks} rank{'s' * (zero.ranks != 1)}" if zero.stage else ""
        weights, description = Weights(zero.place, zero.tensors, zero.skipped), f"{zero.place}: DeepSpeed{ranks}"
    else:
        weights = read_weights(source)
    for name in weights.tensors:
        if name != readable(name) or name == _RESERVED:
            raise ConfigError(f"{weights.place}: {readable(name)} can't be the name of a tensor")
    try:
        save_tensors(weights.tensors, target)
    except Exception as error:  # safetensors has its own exception for a full disk
        raise RunFailed(f"{target} could not be written: {error}") from error
    return ImportedWeights(target, len(weights.tensors), weights.skipped, description)

"""Convert weights of other programs to a file for `model.init_from`. What would have to be unpickled is refused.

model.pt | trainer.ckpt | folder of pytorch_model-*.bin  -->  FOLDER/model.safetensors; optimizer state and other data
                                                              are skipped, and listed
FOLDER of DeepSpeed (ZeRO 0, 1, 2, 3) or DCP              -->  the same, with the parts of all ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import ConfigError, RunFailed
from lockstep.interop.peers import read_peer
from lockstep.models.weight_files import readable
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


def import_weights(
    source: Path, folder: Path, force: bool = False, key: str | None = None, prefix: str = ""
) -> ImportedWeights:
    """Write the weights as one file, whole or not at all; replace an existing file only with `force`.

    Args:
        source: Anything that `read_peer` reads.
        key, prefix: As there.

    Raises:
        ConfigError: The source doesn't exist, has no named tensors or needs unpickling; or the target exists.
        RunFailed: The target can't be written.
    """
    target = folder / FILE
    if target.exists() and not force:
        raise ConfigError(f"{target} exists; --force replaces it")
    peer = read_peer(source, key, prefix)
    weights = peer.weights
    for name in weights.tensors:
        if name != readable(name) or name == _RESERVED:
            raise ConfigError(f"{weights.place}: {readable(name)} can't be the name of a tensor")
    try:
        save_tensors(weights.tensors, target)
    except Exception as error:  # safetensors has its own exception for a full disk
        raise RunFailed(f"{target} could not be written: {error}") from error
    return ImportedWeights(target, len(weights.tensors), weights.skipped, peer.description)

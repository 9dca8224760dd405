"""Read a checkpoint of another program: weights, optimizer state, and how far it was. Nothing is executed.

FILE.pt .ckpt                 {"model_state_dict", "optimizer_state_dict", "epoch"}, Lightning's, any other names
FOLDER/.metadata              torch.distributed.checkpoint: torchtitan, Lightning (with meta.pt)
FOLDER/pytorch_model_fsdp_0/  Accelerate and Trainer under FSDP, with optimizer_0/
FOLDER/model.safetensors      Trainer and Accelerate, with optimizer.pt or .bin, trainer_state.json
FOLDER/latest, TAG/           DeepSpeed
    -->  PeerCheckpoint
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.assembly.weights import FILE, save_tensors
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.near_runs import BESIDE
from lockstep.interop.dcp import is_dcp, read_dcp
from lockstep.interop.peer_optimizer import PeerCheckpoint, PeerOptimizer, is_optimizer, peer_optimizer
from lockstep.interop.zero_checkpoint import is_zero_checkpoint, read_zero
from lockstep.models.weight_files import (
    TORCH_SUFFIXES,
    Weights,
    model_in,
    read_torch,
    read_weights,
    readable,
    refuse_part,
    unwrapped,
)

_TRAINER_STATE = "trainer_state.json"
_PARTS = ("", "pytorch_model_fsdp_0", "optimizer_0")
"""Folders of torch.distributed.checkpoint that form a checkpoint."""
_FILES = ("meta.pt", "pytorch_model_fsdp.bin", *BESIDE)
"""Files beside a folder's weights. A folder may have any of them."""
_STEPS = ("global_step", "global_steps", "step", "steps", "iteration", "iter", "iter_num")
_RESERVED = "__metadata__"  # safetensors' key beside the tensors
_SAMPLES, _NESTED = ("global_samples", "samples"), "train_state"


def read_peer(source: Path, key: str | None = None, prefix: str = "", *, optimizer: bool = False) -> PeerCheckpoint:
    """Read a checkpoint. Raises ConfigError.

    Args:
        key: Where in a file of torch the model is, such as `net` or `states.net`; None: under one of the usual keys.
        prefix: Take only tensors with this prefix, and remove it.
        optimizer: Read the optimizer's state, too, unless there is a prefix.
    """
    place, optimizer = source.expanduser(), optimizer and not prefix
    peer = read_zero(place, moments=optimizer) if is_zero_checkpoint(place) else _of_torch(place, key, optimizer)
    if not prefix:
        return peer
    weights, length = peer.weights, len(prefix)
    tensors = {name[length:]: tensor for name, tensor in weights.tensors.items() if name.startswith(prefix)}
    if not tensors:
        names = ", ".join(map(readable, list(weights.tensors)[:4]))
        raise ConfigError(f"{weights.place} has no tensor with the prefix {prefix}; it has {names}")
    others = tuple(name for name in weights.tensors if not name.startswith(prefix))
    return replace(peer, weights=Weights(weights.place, tensors, (*weights.skipped, *others)))


def _of_torch(place: Path, key: str | None, optimizer: bool) -> PeerCheckpoint:
    is_model_file, description = place.is_file() and place.suffix in TORCH_SUFFIXES, ""
    content: Any = {}
    refuse_part(place)
    if place.is_dir():
        content, description = _in_folder(place, optimizer)
    elif is_model_file:
        content = read_torch(place)
    records: Mapping[Any, Any] = content if isinstance(content, Mapping) else {}
    saved, taken = _only_optimizer(place, records) if optimizer else (None, None)
    others = {name: value for name, value in records.items() if name != taken}
    if is_model_file or description or "model" in records:
        tensors, skipped = model_in(place, others if records else content, key)
        weights = Weights(place, unwrapped(tensors), skipped)
    else:
        weights = read_weights(place)
        names = tuple(readable(str(name)) for name in others)
        weights = Weights(weights.place, weights.tensors, (*weights.skipped, *names))
    return PeerCheckpoint(
        weights,
        description,
        saved,
        in_order=is_model_file,
        of_trainer="trainer_state" in records,
        step=_number(records, _STEPS),
        samples=_number(records, _SAMPLES),
    )


def _in_folder(folder: Path, optimizer: bool) -> tuple[dict[Any, Any], str]:
    content: dict[Any, Any] = {}
    parts = [folder / part for part in _PARTS if is_dcp(folder / part)]
    for part in parts:
        if optimizer or part.name != _PARTS[-1]:
            content |= read_dcp(part)
    for name in _FILES:
        file = folder / name
        if not file.is_file():
            continue
        if name == _TRAINER_STATE:
            content["trainer_state"] = _json(file)
        elif name == "meta.pt":
            content |= _mapping(file, read_torch(file))
        elif name.endswith("fsdp.bin"):
            content["model"] = read_torch(file)
        else:
            content[file.stem] = read_torch(file) if optimizer or not name.startswith("optimizer") else None
    return content, f"{folder}: torch.distributed.checkpoint" if parts else ""


def _json(file: Path) -> Mapping[Any, Any]:
    try:
        return _mapping(file, json.loads(file.read_bytes()))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} isn't JSON: {error}") from error


def _mapping(file: Path, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{file} holds a {type(value).__name__}, not values by name")
    return value


def _only_optimizer(place: Path, content: Mapping[Any, Any]) -> tuple[PeerOptimizer | None, object]:
    several = ((key, value if isinstance(value, list) else [value]) for key, value in content.items())
    saved = [(key, value) for key, values in several for value in values if is_optimizer(value)]
    if len(saved) > 1:
        keys = ", ".join(readable(str(key)) for key, _ in saved)
        raise ConfigError(f"{place} has several optimizers ({keys}); leave out --config to import weights only")
    return (peer_optimizer(place, saved[0][1]), saved[0][0]) if saved else (None, None)


def _number(content: Mapping[Any, Any], names: tuple[str, ...]) -> int | None:
    for at in (content, content.get("trainer_state"), content.get(_NESTED)):
        values: Mapping[Any, Any] = at if isinstance(at, Mapping) else {}
        for name in names:
            value = values.get(name)
            value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**48:
                return int(value)
    return None


@dataclass(frozen=True, slots=True)
class ImportedWeights:
    """The file for `model.init_from`, its number of tensors, the source's other contents, and what was read."""

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
    """Write the weights that `read_peer` reads as one file, whole or not at all.

    Raises:
        ConfigError: The source can't be read, or the target exists, without `force`.
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

"""A checkpoint, brought back: all ranks read the same one, each what it needs, and nothing is applied before all agree.

newest --> manifest, from the first rank to all --> each rank reads and verifies --> all whole? --> restored
   ^                                                                                    no
   '------- the one before it <------------------------------------------------------'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.ownership import Foreign
from lockstep.checkpoint.reading import Reader, ReadItem, checked_manifest, manifest_bytes, read_manifest
from lockstep.checkpoint.storage import names_by_step
from lockstep.core.errors import RunFailed
from lockstep.core.records import TrainingState
from lockstep.distributed.shard_boxes import TensorInfo, box_view, dtype_name, local_shards, local_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.storage import Storage
    from lockstep.core.protocols import Axis


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint in memory, verified on all ranks.

    Attributes:
        state: tensors are this rank's parts, on the CPU, under the names of the live ones.
        broken: newer ones that could not be used, and why: `step-00000480` -> reason.
    """

    manifest: Manifest
    state: TrainingState
    broken: Mapping[str, str]


def load_newest(
    storage: Storage,
    axis: Axis,
    live: TrainingState,
    step: int | None = None,
    check: Callable[[Manifest], None] = lambda manifest: None,
) -> LoadedCheckpoint | None:
    """The newest checkpoint that verifies, or that of `step`; None if there is none. All ranks together.

    Args:
        check: called with a manifest before its tensors are read; raises, alike on all ranks, if it is not wanted, and
            CorruptCheckpoint if its state makes no sense.

    Raises:
        RunFailed: there are checkpoints, and none can be read; or that of `step` can't; or it is of another model.
    """
    broken: dict[str, str] = {}
    names = cast("list[str] | str", axis.broadcast(_candidates(storage, step) if axis.rank == 0 else None))
    if isinstance(names, str):
        raise RunFailed(names)
    for name in names:
        with storage.read_lock(name):
            found = _load(storage, axis, live, name, check)
        if isinstance(found, LoadedCheckpoint):
            return LoadedCheckpoint(found.manifest, found.state, broken)
        broken[name] = found
    if not broken:
        return None
    shown = "".join(f"\n  {name}: {why}" for name, why in broken.items())
    raise RunFailed(f"{storage.place} has no checkpoint that can be used:{shown}")


def move_newer_aside(storage: Storage, step: int, broken: Mapping[str, str]) -> list[str]:
    """Puts aside all that lies beyond `step`, from which the run goes on; by the first rank. Returns where they are."""
    aside = []
    for later, name in names_by_step(storage.names()).items():
        if later > step:
            why = "foreign" if is_foreign(storage, name) else "broken" if name in broken else "superseded"
            aside.append(storage.move_aside(name, why))
    return aside


def is_foreign(storage: Storage, name: str) -> bool:
    """Whether it is whole as far as its manifest says, and of another run."""
    try:
        read_manifest(storage, name)
    except CorruptCheckpoint as fault:
        return isinstance(fault, Foreign)
    return False


def _candidates(storage: Storage, step: int | None) -> list[str] | str:
    """Newest first. Or why there are none."""
    try:
        steps = names_by_step(storage.names())
    except OSError as error:
        return f"can't look into {storage.place}: {error.strerror or error}"
    if step is None:
        return [steps[known] for known in sorted(steps, reverse=True)]
    if step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        return f"{storage.place} has no checkpoint of step {step}; it has those of {there}"
    return [steps[step]]


def _load(
    storage: Storage, axis: Axis, live: TrainingState, name: str, check: Callable[[Manifest], None]
) -> LoadedCheckpoint | str:
    """Or what is wrong with it, the same on all ranks."""
    data = cast("bytes | str", axis.broadcast(_manifest_or_fault(storage, name) if axis.rank == 0 else None))
    if isinstance(data, str):
        return data
    manifest = manifests.from_bytes(data)
    try:
        check(manifest)
    except CorruptCheckpoint as fault:
        return str(fault)
    mismatch = _mismatch(manifest, live)
    mine = _read(storage, name, manifest, live) if mismatch is None else None
    faults = [fault for fault in axis.gather(mine if isinstance(mine, str) else None) if fault is not None]
    if mismatch is not None:  # another model's: not broken, so it stays where it is
        raise RunFailed(f"{storage.place}/{name} doesn't fit this run: {mismatch}")
    if faults:
        return str(faults[0])
    return LoadedCheckpoint(manifest, cast("TrainingState", mine), {})


def _manifest_or_fault(storage: Storage, name: str) -> bytes | str:
    try:
        data = manifest_bytes(storage, name)
        checked_manifest(storage, name, data)
    except CorruptCheckpoint as fault:
        return str(fault)
    return data


def _read(storage: Storage, name: str, manifest: Manifest, live: TrainingState) -> TrainingState | str:
    tensors: dict[str, Tensor] = {}
    wanted: list[ReadItem] = []
    for key, entry in manifest.tensors.items():
        like = live.tensors.get(key)
        boxes = (entry.info.whole,) if like is None else local_shards(like).boxes
        try:
            memory = torch.empty(
                entry.shape if like is None else local_tensor(like).shape, dtype=getattr(torch, entry.dtype)
            )
        except RuntimeError:
            return f"{key} is said to be {entry.info}, for which there is no memory here ({entry.size:,} bytes)"
        tensors[key] = memory
        wanted += [ReadItem(key, box, box_view(memory, boxes, box)) for box in boxes]
    try:
        with Reader(storage, name, manifest) as reader:
            reader.read(wanted)
    except CorruptCheckpoint as fault:
        return str(fault)
    return TrainingState(tensors, manifest.state)


def _mismatch(manifest: Manifest, live: TrainingState) -> str | None:
    """Of names and shapes; optimizer state that an optimizer makes later may be missing on either side."""
    saved, here = manifest.tensors, live.tensors
    lacking = [name for name in here if name not in saved and name.startswith("model.")]
    if lacking:
        return f"it has no {_some(lacking)}"
    left = [name for name in saved if name not in here and name.startswith("model.")]
    if left:
        return f"it also has {_some(left)}, which the model lacks"
    for name, tensor in here.items():
        if name in saved and not _fits(saved[name].info, tensor):
            here_is = TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape))
            return f"{name} is {saved[name].info} there, and {here_is} here"
    return None


def _fits(saved: TensorInfo, tensor: Tensor) -> bool:
    """A number is a number, in whatever precision."""
    dtype: torch.dtype = getattr(torch, saved.dtype)
    return saved.shape == tuple(tensor.shape) and dtype.is_floating_point == tensor.dtype.is_floating_point


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name.removeprefix("model.") for name in names[:3]) + more

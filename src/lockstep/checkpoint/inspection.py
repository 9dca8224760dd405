"""Lists, verifies and prunes checkpoints, for the command line and scripts. No torch is needed."""

from __future__ import annotations

import calendar
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.reading import VerificationResult, read_manifest, verify
from lockstep.checkpoint.retention import RetentionEntry, best_step, steps_to_delete
from lockstep.checkpoint.storage import MANIFEST, Storage, names_by_step
from lockstep.config.schema import Checkpoint
from lockstep.core import checksums
from lockstep.core.errors import ConfigError, RunFailed, VerificationError


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint with its manifest, or with why it has none."""

    name: str
    step: int
    manifest: Manifest | None
    damage: str | None


@dataclass(frozen=True, slots=True)
class PruneResult:
    """The checkpoints that were deleted, or would be, with their bytes; the others; the newest that was verified."""

    deleted: Mapping[str, int]
    stay: tuple[str, ...]
    trusted: str | None


@contextmanager
def as_verification_error(storage: Storage, name: str) -> Iterator[None]:
    """Turn CorruptCheckpoint into a VerificationError with the checkpoint's name."""
    try:
        yield
    except CorruptCheckpoint as fault:
        raise VerificationError(f"{storage.place}/{name} is damaged: {fault}") from None


def list_checkpoints(storage: Storage) -> list[ListedCheckpoint]:
    """Return all checkpoints, damaged ones included, the oldest first."""
    checkpoints = []
    for step, name in names_by_step(storage.names()).items():
        try:
            checkpoints.append(ListedCheckpoint(name, step, read_manifest(storage, name), None))
        except CorruptCheckpoint as fault:
            if name in storage.names():  # a run in progress has not deleted it since it was listed
                checkpoints.append(ListedCheckpoint(name, step, None, str(fault)))
    return checkpoints


def is_checkpoint(path: Path) -> bool:
    """Return whether the path is a checkpoint: intact or damaged, in use or moved aside."""
    return path.is_dir() and ((path / MANIFEST).is_file() or bool(names_by_step([path.name])))


def age(manifest: Manifest, now: float) -> float | None:
    """Return the seconds since it was written; None if its time can't be parsed."""
    try:
        return max(0.0, now - calendar.timegm(time.strptime(manifest.written, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return None


def recorded_section(checkpoints: Sequence[ListedCheckpoint]) -> Checkpoint:
    """Return the section `checkpoint` of the config that the newest manifest records. Raises ConfigError."""
    newest = next((entry for entry in reversed(checkpoints) if entry.manifest is not None), None)
    if newest is None or newest.manifest is None:
        return Checkpoint()
    try:
        return Checkpoint.model_validate(newest.manifest.config.get("checkpoint", {}))
    except ValidationError as error:
        raise ConfigError(f"the section `checkpoint` in {newest.name} can't be read: {error}") from None


def keep_reasons(checkpoints: Sequence[ListedCheckpoint], section: Checkpoint) -> dict[int, tuple[str, ...]]:
    """Return why each step is kept: `newest`, `best`, `kept for good`, `damaged`; nothing if it need not be.

    Raises ConfigError if `keep_every` is in epochs, and no manifest records the length of an epoch.
    """
    entries = _entries(checkpoints, section)
    without_every = section.model_copy(update={"keep_every": None})
    steps: dict[str, Collection[int | None]] = {
        "damaged": {entry.step for entry in checkpoints if entry.manifest is None},
        "newest": {*sorted(entries)[-section.keep_last :]},
        "best": {best_step(entries, section)},
        "kept for good": {*steps_to_delete(entries, without_every, 1)} - {*_deletable(checkpoints, section)},
    }
    return {entry.step: tuple(reason for reason, kept in steps.items() if entry.step in kept) for entry in checkpoints}


def _deletable(checkpoints: Sequence[ListedCheckpoint], section: Checkpoint) -> list[int]:
    entries, epoch = _entries(checkpoints, section), _epoch_samples(checkpoints)
    if epoch is None and entries and section.keep_every is not None and section.keep_every.unit == "epochs":
        raise ConfigError(f"keep_every is {section.keep_every}, and no checkpoint here records the length of an epoch")
    return steps_to_delete(entries, section, epoch or 1)


def _entries(checkpoints: Sequence[ListedCheckpoint], section: Checkpoint) -> dict[int, RetentionEntry]:
    return {
        entry.step: RetentionEntry.of(entry.manifest, section) for entry in checkpoints if entry.manifest is not None
    }


def _epoch_samples(checkpoints: Sequence[ListedCheckpoint]) -> int | None:
    newest: Any = [entry.manifest.state for entry in checkpoints if entry.manifest is not None][-1:]
    try:
        samples = newest[0]["ledger"][-1]["order"]["epoch_samples"]
    except (LookupError, TypeError):
        return None
    return samples if isinstance(samples, int) and samples > 0 else None


def verify_weights(folder: Path) -> Iterator[VerificationResult]:
    """Verify the exported files of weights in a folder that its list of hashes names."""
    for file in checksums.listed(folder):
        began, size = time.perf_counter(), file.stat().st_size if file.exists() else 0
        fault = checksums.fault(file)
        yield VerificationResult(f"{folder.name}/{file.name}", size, time.perf_counter() - began, fault)


def verify_all(storage: Storage) -> Iterator[VerificationResult]:
    """Verify all checkpoints, the oldest first."""
    for name in names_by_step(storage.names()).values():
        result = verify(storage, name)
        if result.fault is None or name in storage.names():
            yield result


def prune(storage: Storage, section: Checkpoint, *, dry: bool) -> PruneResult:
    """Delete what need not be kept, the oldest first; `dry` only reports it. Damaged checkpoints stay.

    Raises:
        VerificationError: No checkpoint verifies, so none is deleted.
        RunFailed: A run is saving there, or a checkpoint can't be deleted.
    """
    checkpoints = list_checkpoints(storage)
    names = {entry.step: entry.name for entry in checkpoints}
    deletable = [names[step] for step in _deletable(checkpoints, section)]
    all_damaged = bool(checkpoints) and all(entry.manifest is None for entry in checkpoints)
    trusted = _newest_that_verifies(storage, checkpoints) if deletable or all_damaged else None
    deletable = [name for name in deletable if name != trusted]  # a newer one's manifest may be intact, its tensors not
    if not dry:
        _delete(storage, deletable)
    sizes = {entry.name: entry.manifest.size for entry in checkpoints if entry.manifest is not None}
    return PruneResult(
        deleted={name: sizes[name] for name in deletable},
        stay=tuple(name for name in names.values() if name not in deletable),
        trusted=trusted,
    )


def prune_moved_aside(storage: Storage, *, dry: bool) -> dict[str, int]:
    """Delete the checkpoints that were moved aside; return names and bytes. Raises RunFailed, as `prune`."""
    sizes = dict(storage.moved_aside())
    if not dry:
        _delete(storage, list(sizes))
    return sizes


def _newest_that_verifies(storage: Storage, checkpoints: Sequence[ListedCheckpoint]) -> str:
    faults = []
    for entry in reversed(checkpoints):
        if (fault := verify(storage, entry.name).fault) is None:
            return entry.name
        faults.append(f"\n  {entry.name}: {fault}")
    raise VerificationError(f"no checkpoint in {storage.place} is whole, so none was deleted:{''.join(faults)}")


def _delete(storage: Storage, names: Sequence[str]) -> None:
    try:
        if names and not storage.claim():
            raise RunFailed(f"a run is saving to {storage.place} and prunes by itself; use --dry-run to list only")
        for name in names:
            storage.delete(name)
    except OSError as error:
        raise RunFailed(f"can't delete from {storage.place}: {error.strerror or error}") from error
    finally:
        storage.release()

"""What there is to tell of checkpoints, to people and scripts, as values. No torch is needed.

folder --> found, set aside    manifests alone
       --> verified            every byte of one; of the weights that a run has left
       --> pruned              what needn't stay is deleted, once one that stays has been verified
"""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.reading import Reader, read_manifest
from lockstep.checkpoint.retention import Entry, best_of, superfluous
from lockstep.checkpoint.storage import MANIFEST, names_by_step
from lockstep.config.schema import Checkpoint
from lockstep.core import checksums
from lockstep.core.errors import ConfigError, RunFailed, VerificationError
from lockstep.core.progress import Progress

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint, as its manifest has it.

    Attributes:
        damage: why there is no manifest; None if there is one.
    """

    name: str
    step: int
    manifest: Manifest | None
    damage: str | None


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """What reading every byte has shown.

    Attributes:
        size: bytes, of a checkpoint as far as the manifest says.
        fault: file, place in it, and what is wrong; None if all is what was written.
    """

    name: str
    size: int
    seconds: float
    fault: str | None


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What was deleted, or would be.

    Attributes:
        deleted: and how many bytes each had.
        read: needn't stay, but somebody reads them.
        stay: all others.
        trusted: the newest that was verified, byte by byte; None if there was nothing to delete.
    """

    deleted: Mapping[str, int]
    read: tuple[str, ...]
    stay: tuple[str, ...]
    trusted: str | None


# --- manifests alone ----------------------------------------------------------------------------------------------


@contextmanager
def as_verification_error(storage: Storage, name: str) -> Iterator[None]:
    """Raises VerificationError, which says where, for a checkpoint that is CorruptCheckpoint."""
    try:
        yield
    except CorruptCheckpoint as fault:
        raise VerificationError(f"{storage.place}/{name} is damaged: {fault}") from None


def list_checkpoints(storage: Storage) -> list[ListedCheckpoint]:
    """All that a run could go on from, or could have, the oldest first."""
    found = [_found(storage, name, step) for step, name in names_by_step(storage.names()).items()]
    return [one for one in found if one.damage is None or _is_there(storage, one.name)]


def _found(storage: Storage, name: str, step: int) -> ListedCheckpoint:
    try:
        return ListedCheckpoint(name, step, read_manifest(storage, name), None)
    except CorruptCheckpoint as fault:
        return ListedCheckpoint(name, step, None, str(fault))


def _is_there(storage: Storage, name: str) -> bool:
    """Or a run that is under way has deleted it since it was listed."""
    return name in storage.names()


def is_checkpoint(path: Path) -> bool:
    """Whole or damaged, in use or put aside."""
    return path.is_dir() and ((path / MANIFEST).is_file() or bool(names_by_step([path.name])))


def age(manifest: Manifest, now: float) -> float | None:
    """Seconds since it was written; None if it doesn't say."""
    try:
        return max(0.0, now - calendar.timegm(time.strptime(manifest.written, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return None


# --- which stay, and why ------------------------------------------------------------------------------------------


def recorded_section(found: Sequence[ListedCheckpoint]) -> Checkpoint:
    """What the run that has written them keeps, as its newest manifest has it.

    Raises:
        ConfigError: this Lockstep doesn't understand it.
    """
    known = [(one.name, one.manifest) for one in found if one.manifest is not None]
    if not known:
        return Checkpoint()
    name, manifest = known[-1]
    try:
        return Checkpoint.model_validate(manifest.config.get("checkpoint", {}))
    except ValidationError as error:
        raise ConfigError(f"the section `checkpoint` in {name} can't be read: {error}") from None


def keep_reasons(found: Sequence[ListedCheckpoint], section: Checkpoint) -> dict[int, tuple[str, ...]]:
    """By step, why a checkpoint stays: `newest`, `best`, `kept for good`, `damaged`; nothing if it needn't.

    Raises:
        ConfigError: what stays is counted in epochs, and nothing says how long one is.
    """
    entries = _entries(found, section)
    newest = sorted(entries)[-section.keep_last :]
    for_now = section.model_copy(update={"keep_every": None})
    for_good = {*superfluous(entries, for_now, 1)} - {*_superfluous(entries, section, found)}
    best = best_of(entries, section)
    return {
        one.step: tuple(
            reason
            for reason, holds in (
                ("damaged", one.manifest is None),
                ("newest", one.step in newest),
                ("best", one.step == best),
                ("kept for good", one.step in for_good),
            )
            if holds
        )
        for one in found
    }


def _superfluous(entries: Mapping[int, Entry], section: Checkpoint, found: Sequence[ListedCheckpoint]) -> list[int]:
    """The steps that needn't stay. Raises ConfigError."""
    epoch = _epoch_samples(found)
    if epoch is None and entries and section.keep_every is not None and section.keep_every.unit == "epochs":
        raise ConfigError(f"keep_every is {section.keep_every}, and no checkpoint here says how long an epoch is")
    return superfluous(entries, section, epoch or 1)


def _entries(found: Iterable[ListedCheckpoint], section: Checkpoint) -> dict[int, Entry]:
    return {
        one.step: Entry(
            Progress(one.step, one.manifest.samples, one.manifest.tokens),
            one.manifest.metrics.get(section.best) if section.best else None,
        )
        for one in found
        if one.manifest is not None
    }


def _epoch_samples(found: Sequence[ListedCheckpoint]) -> int | None:
    """Of the last attempt, as its ledger has it."""
    states: list[Mapping[str, Any]] = [one.manifest.state for one in found if one.manifest is not None]
    try:
        found = states[-1]["ledger"][-1]["order"]["epoch_samples"]
    except (LookupError, TypeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


# --- every byte ---------------------------------------------------------------------------------------------------


def verify(storage: Storage, name: str) -> VerificationResult:
    """Reads and hashes all of it, up to the first fault; nobody deletes it meanwhile."""
    began, size = time.perf_counter(), 0
    fault: str | None = None
    try:
        with storage.read_lock(name):
            manifest = read_manifest(storage, name)
            size = manifest.size
            with Reader(storage, name, manifest) as reader:
                reader.verify()
    except CorruptCheckpoint as found:
        fault = str(found)
    return VerificationResult(name, size, time.perf_counter() - began, fault)


def verify_weights(folder: Path) -> Iterator[VerificationResult]:
    """The files of weights in it that the list of hashes beside them names."""
    for file in checksums.listed(folder):
        began, size = time.perf_counter(), file.stat().st_size if file.exists() else 0
        fault = checksums.fault(file)
        yield VerificationResult(f"{folder.name}/{file.name}", size, time.perf_counter() - began, fault)


def verify_all(storage: Storage) -> Iterator[VerificationResult]:
    """The oldest first."""
    for name in names_by_step(storage.names()).values():
        one = verify(storage, name)
        if one.fault is None or _is_there(storage, name):
            yield one


def prune(storage: Storage, section: Checkpoint, *, dry: bool) -> PruneResult:
    """Deletes what needn't stay, the oldest first; what is damaged stays.

    Args:
        dry: only tells what would be deleted; what somebody reads is among it.

    Raises:
        VerificationError: none of them verifies: then none is deleted.
        RunFailed: somebody is saving there, or it can't be deleted.
    """
    found = list_checkpoints(storage)
    names = {one.step: one.name for one in found}
    doomed = [names[step] for step in _superfluous(_entries(found, section), section, found)]
    hopeless = bool(found) and all(one.manifest is None for one in found)
    trusted = _newest_that_verifies(storage, found) if doomed or hopeless else None
    doomed = [name for name in doomed if name != trusted]
    gone = doomed if dry else _delete(storage, doomed)
    sizes = {one.name: one.manifest.size for one in found if one.manifest is not None}
    return PruneResult(
        deleted={name: sizes[name] for name in gone},
        read=tuple(name for name in doomed if name not in gone),
        stay=tuple(name for name in names.values() if name not in doomed),
        trusted=trusted,
    )


def prune_moved_aside(storage: Storage, *, dry: bool) -> dict[str, int]:
    """Deletes what was put aside; returns names and bytes. Raises RunFailed, as `prune`."""
    sizes = {one.name: one.size for one in storage.moved_aside()}
    gone = list(sizes) if dry else _delete(storage, list(sizes))
    return {name: sizes[name] for name in gone}


def _newest_that_verifies(storage: Storage, found: Sequence[ListedCheckpoint]) -> str:
    """A manifest may be whole and a tensor not: then the run's only hope may be one that needn't stay."""
    faults = []
    for one in reversed(found):
        verified = verify(storage, one.name)
        if verified.fault is None:
            return one.name
        faults.append(f"\n  {one.name}: {verified.fault}")
    raise VerificationError(
        f"none of the checkpoints in {storage.place} is whole, so none was deleted:{''.join(faults)}"
    )


def _delete(storage: Storage, names: Sequence[str]) -> list[str]:
    try:
        if names and not storage.claim():
            raise RunFailed(f"a run is saving to {storage.place}, and prunes by itself; --dry-run tells what would go")
        return [name for name in names if storage.delete(name)]
    except OSError as error:
        raise RunFailed(f"can't delete from {storage.place}: {error.strerror or error}") from error

"""Which checkpoints stay.

    the newest `keep_last`  +  the first of each `keep_every`  +  the best one        the others go, oldest first

A checkpoint that somebody reads stays until the next save. The newest is always among those that stay.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.reading import Reader, read_manifest
from lockstep.checkpoint.storage import names_by_step
from lockstep.core.progress import Progress
from lockstep.plan.schedule import is_due

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.config.every import Every
    from lockstep.config.schema import Checkpoint

_log = logging.getLogger("lockstep.checkpoint")


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint, as far as it matters here.

    Attributes:
        metric: what `best` names, at its step; None if it wasn't evaluated there.
    """

    progress: Progress
    metric: float | None


class Retention:
    """Keeps one run's storage as `checkpoint` in its config says.

    Args:
        epoch_samples: what an epoch is, for `keep_every`.
    """

    def __init__(self, storage: Storage, section: Checkpoint, epoch_samples: int) -> None:
        self._storage = storage
        self._section = section
        self._epoch_samples = epoch_samples
        self._entries: dict[int, Entry] | None = None

    def on_published(self, manifest: Manifest) -> None:
        """Deletes what the new one makes superfluous. Never raises: a checkpoint too many is no reason to stop."""
        try:
            self._known()[manifest.step] = self._entry(manifest)
            self.prune()
        except OSError as error:
            _log.warning("old checkpoints in %s could not be deleted: %s", self._storage.place, error)

    def invalidate(self) -> None:
        """Somebody else may have deleted checkpoints: those that are there are looked at again."""
        self._entries = None

    def make_room(self) -> bool:
        """Deletes the oldest checkpoint that `keep_last` alone keeps, once a newer one has been verified byte by byte;
        whether it did. Never raises: the save that found no room has failed already."""
        try:
            return self._give_way()
        except OSError as error:
            _log.warning("old checkpoints in %s could not be deleted: %s", self._storage.place, error)
            return False

    def _give_way(self) -> bool:
        entries, names = self._known(), names_by_step(self._storage.names())
        for_one = self._section.model_copy(update={"keep_last": 1})
        for step in superfluous(entries, for_one, self._epoch_samples):
            if step not in names or not self._is_whole_after(step, names):
                continue
            if self._storage.delete(names[step]):
                del entries[step]
                _log.warning("the disk is full: %s was deleted to make room for a newer one", names[step])
                return True
        return False

    def _is_whole_after(self, step: int, names: Mapping[int, str]) -> bool:
        """Whether a checkpoint newer than that of `step` verifies."""
        return any(self._verifies(names[later]) for later in sorted(names, reverse=True) if later > step)

    def _verifies(self, name: str) -> bool:
        try:
            with Reader(self._storage, name, read_manifest(self._storage, name)) as reader:
                reader.verify()
        except CorruptCheckpoint:
            return False
        return True

    def prune(self) -> list[int]:
        """Deletes what needn't stay; returns the steps. Raises OSError."""
        entries, names = self._known(), names_by_step(self._storage.names())
        gone = []
        for step in superfluous(entries, self._section, self._epoch_samples):
            if step in names and self._storage.delete(names[step]):
                del entries[step]
                gone.append(step)
        return gone

    @property
    def best(self) -> int | None:
        """The step whose metric is the best so far."""
        return best_of(self._known(), self._section)

    def _known(self) -> dict[int, Entry]:
        """Those that can't be read are nobody's to judge: they stay."""
        if self._entries is None:
            self._entries = {}
            for step, name in names_by_step(self._storage.names()).items():
                try:
                    self._entries[step] = self._entry(read_manifest(self._storage, name))
                except CorruptCheckpoint as fault:
                    _log.warning("%s in %s is damaged: %s", name, self._storage.place, fault)
        return self._entries

    def _entry(self, manifest: Manifest) -> Entry:
        metric = manifest.metrics.get(self._section.best) if self._section.best else None
        return Entry(Progress(manifest.step, manifest.samples, manifest.tokens), metric)


def superfluous(entries: Mapping[int, Entry], section: Checkpoint, epoch_samples: int) -> list[int]:
    """The steps that needn't stay."""
    steps = sorted(entries)
    kept = {*steps[-section.keep_last :], best_of(entries, section)}
    if section.keep_every is not None:
        kept.update(_first_of_each(entries, steps, section.keep_every, epoch_samples))
    return [step for step in steps if step not in kept]


def _first_of_each(entries: Mapping[int, Entry], steps: Sequence[int], every: Every, epoch_samples: int) -> list[int]:
    before, found = Progress(), []
    for step in steps:
        progress = entries[step].progress
        if is_due(every, before, progress, epoch_samples):
            found.append(step)
        before = progress
    return found


def best_of(entries: Mapping[int, Entry], section: Checkpoint) -> int | None:
    """The step with the best metric, the earliest of equals; None if there is none."""
    if section.best is None:
        return None
    better = is_better(section.best, section.best_is)
    best: int | None = None
    for step in sorted(entries):
        metric = entries[step].metric
        if metric is None or not math.isfinite(metric):
            continue
        champion = entries[best].metric if best is not None else None
        if champion is None or better(metric, champion):
            best = step
    return best


def is_better(name: str, best_is: Literal["auto", "lowest", "highest"]) -> Callable[[float, float], bool]:
    """Whether a first value of the metric is better than a second."""
    highest = best_is == "highest" or (best_is == "auto" and name.rpartition(".")[2].startswith("accuracy"))
    return (lambda one, other: one > other) if highest else (lambda one, other: one < other)

"""The rules for keeping and deleting checkpoints.

the newest `keep_last`  +  the first of each `keep_every`  +  the best one      the others are deleted, oldest first
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.reading import read_manifest, verify
from lockstep.checkpoint.storage import Storage, names_by_step
from lockstep.config.schema import Checkpoint
from lockstep.core.directions import best_of, is_better
from lockstep.core.progress import Progress
from lockstep.plan.schedule import is_due

_log = logging.getLogger("lockstep.checkpoint")


@dataclass(frozen=True, slots=True)
class RetentionEntry:
    """A checkpoint's progress, and the metric `best` there if it was evaluated: they decide whether it is kept."""

    progress: Progress
    metric: float | None

    @classmethod
    def of(cls, manifest: Manifest, section: Checkpoint) -> RetentionEntry:
        metric = manifest.metrics.get(section.best) if section.best else None
        return cls(Progress(manifest.step, manifest.samples, manifest.tokens), metric)


class Retention:
    """Deletes the checkpoints of one run that its config doesn't keep."""

    def __init__(self, storage: Storage, section: Checkpoint, epoch_samples: int) -> None:
        self._storage = storage
        self._section = section
        self._epoch_samples = epoch_samples
        self._entries: dict[int, RetentionEntry] | None = None

    def on_published(self, manifest: Manifest) -> None:
        """Delete what need not be kept beside a new checkpoint. Never raises: one too many is no reason to stop."""
        try:
            entries, names = self._known(), names_by_step(self._storage.names())
            entries[manifest.step] = RetentionEntry.of(manifest, self._section)
            for step in steps_to_delete(entries, self._section, self._epoch_samples):
                if step in names:
                    self._storage.delete(names[step])
                    del entries[step]
        except OSError as error:
            _log.warning("old checkpoints in %s could not be deleted: %s", self._storage.place, error)

    def invalidate(self) -> None:
        """Read the manifests again: another process may have deleted checkpoints."""
        self._entries = None

    def make_room(self) -> bool:
        """Delete the oldest checkpoint that only `keep_last` keeps, if a newer one verifies; return whether it did.

        Never raises: the save that found the disk full has failed already.
        """
        try:
            entries, names = self._known(), names_by_step(self._storage.names())
            keep_one = self._section.model_copy(update={"keep_last": 1})
            for step in steps_to_delete(entries, keep_one, self._epoch_samples):
                newer = [later for later in sorted(names, reverse=True) if later > step]
                if step not in names or all(verify(self._storage, names[later]).fault for later in newer):
                    continue
                self._storage.delete(names[step])
                del entries[step]
                _log.warning("the disk is full: %s was deleted so that a newer one can be saved", names[step])
                return True
        except OSError as error:
            _log.warning("old checkpoints in %s could not be deleted: %s", self._storage.place, error)
        return False

    @property
    def best(self) -> int | None:
        """The step with the best metric so far."""
        return best_step(self._known(), self._section)

    def _known(self) -> dict[int, RetentionEntry]:
        if self._entries is None:
            self._entries = {}
            for step, name in names_by_step(self._storage.names()).items():
                try:
                    self._entries[step] = RetentionEntry.of(read_manifest(self._storage, name), self._section)
                except CorruptCheckpoint as fault:
                    _log.warning("%s in %s is damaged: %s", name, self._storage.place, fault)
        return self._entries


def steps_to_delete(entries: Mapping[int, RetentionEntry], section: Checkpoint, epoch_samples: int) -> list[int]:
    """Return the steps that need not be kept."""
    steps = sorted(entries)
    kept = {*steps[-section.keep_last :], best_step(entries, section)}
    if section.keep_every is not None:
        before = Progress()
        for step in steps:
            progress = entries[step].progress
            if is_due(section.keep_every, before, progress, epoch_samples):
                kept.add(step)
            before = progress
    return [step for step in steps if step not in kept]


def best_step(entries: Mapping[int, RetentionEntry], section: Checkpoint) -> int | None:
    """Return the step with the best metric, the earliest of equals; None if there is none."""
    if section.best is None:
        return None
    best: tuple[int, float] | None = None
    direction = best_of(section.best, section.best_is)
    for step in sorted(entries):
        metric = entries[step].metric
        if metric is not None and math.isfinite(metric) and (best is None or is_better(metric, best[1], direction)):
            best = step, metric
    return best[0] if best is not None else None

"""Snapshots of a run in its launcher's memory: when one is taken, and what happens to the newest one at the end.

each update    scheduled? requested by the clock of rank 0? --> copied beside the next update --> /dev/shm
a rank dies    the next round resumes from the newest of memory and storage
the run ends   a snapshot that is newer than every checkpoint is saved in the storage, by the launcher
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.checkpoint.inspection import verify
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import CorruptCheckpoint
from lockstep.checkpoint.memory_saving import KEPT, MemorySaver
from lockstep.checkpoint.reading import manifest_bytes, read_manifest
from lockstep.checkpoint.storage import names_by_step
from lockstep.checkpoint.with_memory import WithMemory, drop
from lockstep.core.control_groups import tightest_limit
from lockstep.core.errors import Failure
from lockstep.core.formatting import size as shown_size
from lockstep.core.out_of_memory import note_location
from lockstep.core.phase_clock import Phase
from lockstep.core.records import Request
from lockstep.monitor import report_buffer
from lockstep.training.locations import storage_of
from lockstep.training.session import Session, components_of

if TYPE_CHECKING:
    from lockstep.checkpoint.saving import RunMetadata, StepMetadata
    from lockstep.checkpoint.storage import Storage
    from lockstep.core.records import TrainingState
    from lockstep.launch.memory_folder import MemoryFolder
    from lockstep.launch.outcome import LaunchResult
    from lockstep.training.job import Job

_SHARE = 0.01  # of the time that automatic snapshots may cost
_SHORTEST_S = 0.2  # between automatic snapshots
_LARGEST_SHARE = 0.5  # of the free memory
_log = logging.getLogger("lockstep")


def snapshots_in(memory: Path, run: str | None) -> LocalStorage:
    """Return the storage of snapshots in a launcher's folder."""
    return LocalStorage(memory / "checkpoints", run)


class MemorySnapshots:
    """The snapshots of one run, on one rank; all ranks call the same methods at the same updates.

    Args:
        memory: The launcher's folder; None: there is none.
    """

    def __init__(self, session: Session, memory: Path | None) -> None:
        components = components_of(session)
        world = components.world
        self._session = session
        self._world = world
        self._every = components.config.recovery.snapshot_every
        if world.machine_ranks != world.size:  # the ranks of several hosts see no memory in common
            memory = None
        self._memory = memory
        self._saver: MemorySaver | None = None
        self._describe: Callable[[TrainingState], StepMetadata] | None = None
        self._wait_for_copies: Callable[[], None] | None = None
        self._has_space: bool | None = None
        self._has_warned = False
        self._began = time.perf_counter()

    def resumable(self, storage: Storage) -> Storage | WithMemory:
        """Return the checkpoints from which the run may resume; rank 0 has emptied memory that is another run's."""
        run = storage.run
        if self._memory is None or run is None:
            return storage
        return WithMemory(storage, snapshots_in(self._memory, run))

    def has(self, step: int) -> bool:
        """Return whether a snapshot of the step is in memory."""
        return self._memory is not None and step in names_by_step(snapshots_in(self._memory, None).names())

    def begin(self, run: RunMetadata, step: int, describe: Callable[[TrainingState], StepMetadata]) -> None:
        """Take snapshots from now on; those after `step`, at which the run begins, are deleted.

        Args:
            describe: Describes a state, for its manifest.
        """
        if self._memory is None:
            return
        storage = snapshots_in(self._memory, run.run)
        if self._world.rank == 0:
            drop(storage, lambda later, name: later > step or not _is_intact(storage, name))
            storage.remove_stale_drafts()
        self._world.axis.barrier()
        if self._every is not None:
            self._describe = describe
            self._saver = MemorySaver(storage, self._world.axis, self._world.device, run)

    def requests(self) -> tuple[Request, ...]:
        """Return this rank's request for the next vote: on rank 0, once a snapshot costs no more than its share."""
        saver = self._saver
        if saver is None or self._every != "auto" or self._world.rank != 0 or saver.is_writing:
            return ()
        pause = max(_SHORTEST_S, saver.seconds / _SHARE)
        return (Request.SNAPSHOT,) if time.perf_counter() - self._began >= pause else ()

    def is_due(self, requests: Collection[Request] = ()) -> bool:
        """Return whether a snapshot follows the last update, the same on all ranks."""
        if self._saver is None:
            return False
        if isinstance(self._every, int):
            return self._session.progress.steps % self._every == 0
        return Request.SNAPSHOT in requests

    def take(self) -> None:
        """Start a snapshot of the session as it is; all ranks together."""
        saver, describe = self._saver, self._describe
        assert saver is not None, "begin() comes first"
        assert describe is not None, "and states how"
        self._began = began = time.perf_counter()
        with self._world.clock.phase(Phase.SAVE):
            try:
                state = self._session.state()
                if self._has_space is None and not self._check_space(saver.size(state)):
                    self._saver = None
                    return
                self._warn_of_failure(saver)
                self._wait_for_copies = saver.start(state, describe(state), began)
            except Exception as error:
                note_location(error, "checkpoint", f"in the snapshot after update {self._session.progress.steps}")
                raise

    def before_update(self) -> None:
        if self._wait_for_copies is not None:
            self._wait_for_copies()
            self._wait_for_copies = None

    def finish(self) -> None:
        """Wait until this rank has written its part of the last snapshot."""
        if self._saver is not None:
            self._saver.finish()

    def _check_space(self, size: int) -> bool:
        """Return whether memory has space for snapshots; rank 0 decides, and prints why not."""
        sizes = cast("list[int]", self._world.axis.gather(size))
        needed = (KEPT + 2) * sum(sizes)  # one more is being written, and each rank has a copy
        has_space = True
        if self._world.rank == 0:
            assert self._memory is not None, "there are no snapshots without it"
            disk = os.statvfs(self._memory)
            free = int(_LARGEST_SHARE * min(disk.f_bavail * disk.f_frsize, tightest_limit().free))
            has_space = needed <= free
            if not has_space:
                _log.warning(
                    "no snapshots in memory: they need %s, and may take %s, half of what is free there; after a "
                    "failure the run resumes from the newest checkpoint (recovery.snapshot_every)",
                    shown_size(needed),
                    shown_size(free),
                )
        self._has_space = cast("bool", self._world.axis.broadcast(has_space))
        return self._has_space

    def _warn_of_failure(self, saver: MemorySaver) -> None:
        saver.finish()
        if saver.failure is not None and not self._has_warned:
            self._has_warned = True
            _log.warning("a snapshot could not be written to memory: %s; the run continues", saver.failure)


# --- at the launcher's end ------------------------------------------------------------------------------------------


def after_last_round(job: Job, folder: Path, memory: MemoryFolder, result: LaunchResult) -> LaunchResult:
    """Save what memory has and the storage doesn't, if the run has failed or stopped; return the result that states it.

    If the storage can't take it, memory keeps it for the next start of the run.
    """
    if result.code == 0:
        return result
    try:
        storage = storage_of(job.config.checkpoint, folder, job.given.storage)
        saved = save_newest(memory.path, storage)
    except Failure as failure:  # the ranks have failed for the same reason
        _log.debug("no storage for a snapshot: %s", failure)
        return result
    if saved is None:
        return result
    step, fault = saved
    if fault is None:
        report_buffer.mend(folder, memory.path, step, job.config.monitor.every)
        text = f"the state after step {step:,} was in memory, and is saved in {storage.place}; start it again to resume"
    else:
        memory.leave()
        text = (
            f"the state after step {step:,} could not be saved: {fault}; it is in this host's memory, in "
            f"{memory.path}, from which the same command resumes"
        )
    return replace(result, text=f"{result.text}\n{text}" if result.text else text)


def save_newest(memory: Path, storage: Storage) -> tuple[int, str | None] | None:
    """Save the newest intact snapshot in the storage, if it is newer than all checkpoints there.

    Returns:
        Its step, and why it could not be saved; None: there is none.
    """
    snapshots = snapshots_in(memory, storage.run)
    if storage.run is None:
        return None
    try:
        newest = max(names_by_step(storage.names()), default=-1)
    except OSError:
        newest = -1
    for step, name in sorted(names_by_step(snapshots.names()).items(), reverse=True):
        if step <= newest:
            return None
        if verify(snapshots, name).fault is not None:
            continue
        try:
            _copy(snapshots, name, storage)
        except OSError as error:
            return step, error.strerror or str(error)
        return step, None
    return None


def _copy(snapshots: LocalStorage, name: str, storage: Storage) -> None:
    manifest = read_manifest(snapshots, name)
    draft = storage.with_separate_drafts().begin(name)
    try:
        for file in manifest.files:
            path = Path(snapshots.place) / name / file
            with path.open("rb") as handle, _mapped(handle.fileno()) as whole:
                draft.write(file, whole)
        draft.publish(manifest_bytes(snapshots, name))
    except BaseException:
        draft.discard()
        raise


@contextmanager
def _mapped(handle: int) -> Iterator[memoryview]:
    """Yield the bytes of a file without reading them into memory once more."""
    with mmap.mmap(handle, 0, prot=mmap.PROT_READ) as data, memoryview(data) as whole:
        yield whole


def _is_intact(snapshots: LocalStorage, name: str) -> bool:
    try:
        read_manifest(snapshots, name)
    except CorruptCheckpoint:
        return False
    return True

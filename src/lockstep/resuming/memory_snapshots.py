"""Snapshots of a run in its launcher's memory: when one is taken, and which the ranks resume from.

each update    scheduled? requested by the clock of rank 0? --> copied beside the next update --> /dev/shm
a rank dies    the next round resumes from the newest of memory and storage
the run ends   a snapshot that is newer than every checkpoint is saved in the storage, by `after_last_round`

On several hosts each has the part of its own ranks (`HostPart`). A lost host takes its part along, and the run resumes
from the newest checkpoint.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import CorruptCheckpoint, with_files
from lockstep.checkpoint.memory_saving import HostPart, MemorySaver, WithMemory, drop, files_of_whole, parts_in
from lockstep.checkpoint.reading import manifest_bytes, read_manifest, verify
from lockstep.checkpoint.storage import checkpoint_name, names_by_step, newest_step
from lockstep.config.writing import plain_yaml, to_public
from lockstep.core.control_groups import tightest_limit
from lockstep.core.errors import Failure
from lockstep.core.formatting import size as shown_size
from lockstep.core.out_of_memory import note_location
from lockstep.core.phase_clock import Phase
from lockstep.core.ranks import NODES
from lockstep.core.records import Request
from lockstep.loop.evaluations import OpenRequest
from lockstep.loop.session import Session, components_of
from lockstep.monitor.attempts import last_steps, read_attempts
from lockstep.monitor.folder import CONFIG, RunFolder, is_run
from lockstep.resuming.locations import readable_manifest, storage_of

if TYPE_CHECKING:
    from lockstep.checkpoint.saving import RunMetadata, StepMetadata
    from lockstep.checkpoint.storage import Storage
    from lockstep.config.schema import Config
    from lockstep.core.protocols import ObjectStore
    from lockstep.core.records import TrainingState
    from lockstep.launch.memory_folder import MemoryFolder
    from lockstep.launch.outcome import LaunchResult

_SHARE = 0.005  # of the time that automatic snapshots may cost
_SHORTEST_S = 0.2  # between automatic snapshots
_LARGEST_SHARE = 0.5  # of the free memory
_VOTE_COMES = 4  # updates until a vote against snapshots has come, also on an accelerator
_log = logging.getLogger("lockstep")


def snapshots_in(memory: Path, run: str | None) -> LocalStorage:
    """Return the storage of snapshots in a launcher's folder."""
    return LocalStorage(memory / "checkpoints", run)


class MemorySnapshots:
    """The snapshots of one run, on one rank; all ranks call the same methods at the same updates.

    Args:
        describe: Describes a state, for its manifest.
        memory: The launcher's folder; None: there is none.
        run: The run's folder; None: a session without one.
    """

    def __init__(
        self,
        session: Session,
        describe: Callable[[TrainingState], StepMetadata],
        memory: Path | None,
        run: Path | None = None,
    ) -> None:
        components = components_of(session)
        self._session, self._world, self._describe, self._run = session, components.world, describe, run
        self.every = components.config.recovery.snapshot_every
        self._on_hosts = NODES in os.environ
        if not self._on_hosts and self._world.machine_ranks != self._world.size:  # another launcher keeps no memory
            memory = None
        self._memory = memory
        self._saver: MemorySaver | None = None
        self._whole: Collection[int] = ()
        self._has_space = self._has_warned = False
        self._began = time.perf_counter()
        self._open = OpenRequest()
        self._held_at: int | None = None
        self.folder: Path | None = None  # where one rank can save the whole state

    def resumable(self, storage: Storage) -> Storage | WithMemory:
        """Return the checkpoints and snapshots that the run may resume from."""
        if self._on_hosts and self._run is not None:
            self._join_parts(storage, self._run)
        if self._memory is None:
            return storage
        return WithMemory(storage, snapshots_in(self._memory, storage.run), is_shared=not self._on_hosts)

    def _join_parts(self, storage: Storage, run: Path) -> None:
        """Drop snapshots that lack a host's part; complete the manifests of the others, on rank 0."""
        world, memory = self._world, None if self._memory is None else snapshots_in(self._memory, storage.run)
        is_first = world.local_rank == 0
        own = parts_in(memory, self._ranks_here) if is_first and memory is not None else []
        hosts = [parts for first, parts in cast("Any", world.axis.gather((is_first, own))) if first]
        whole = _completed(memory, hosts, storage, run) if world.rank == 0 and memory is not None else []
        self._whole = cast("list[int]", world.axis.broadcast(whole))
        if memory is not None and is_first:
            drop(memory, lambda step, name: step not in self._whole)
        world.axis.barrier()

    @property
    def _ranks_here(self) -> range:
        first = self._world.rank - self._world.local_rank
        return range(first, first + self._world.machine_ranks)

    def has(self, step: int) -> bool:
        """Return whether the run may resume from a snapshot of the step in memory."""
        if self._on_hosts:
            return step in self._whole
        return self._memory is not None and step in names_by_step(snapshots_in(self._memory, None).names())

    def begin(self, run: RunMetadata, step: int) -> None:
        """Take snapshots from now on; delete those after `step`, where the run begins."""
        if self._memory is None and not self._on_hosts:
            return
        world, on_hosts = self._world, self._on_hosts
        storage = snapshots_in(self._memory or Path(os.devnull), run.run)  # `_check_space` refuses that
        if self._memory is not None and world.local_rank == 0:
            drop(
                storage,
                lambda at, name: at > step or (at < step and not on_hosts and readable_manifest(storage, name) is None),
            )
            storage.remove_stale_drafts()
        world.axis.barrier()
        self.folder = None if on_hosts else self._memory
        if self.every is not None:
            self._saver = MemorySaver(storage, world.axis, world.device, run, self._ranks_here if on_hosts else None)

    def begin_attempt(self, attempt: str | None) -> None:
        """Note the id of this attempt, which the first rank knows; all ranks together."""
        if self._on_hosts:
            attempt = cast("str", self._world.axis.broadcast(attempt))
            if self._saver is not None:
                self._saver.attempt = attempt

    def requests(self) -> tuple[Request, ...]:
        """Return rank 0's request for a snapshot, once that costs no more than its share of the time."""
        saver = self._saver
        if saver is None or self._world.rank != 0 or saver.is_writing or isinstance(self.every, int):
            return ()
        is_due = time.perf_counter() - self._began >= max(_SHORTEST_S, saver.seconds / _SHARE)
        return (Request.SNAPSHOT,) if self._open.is_made(due=is_due) else ()

    def is_due(self, requests: Collection[Request] = ()) -> bool:
        """Return whether a snapshot follows the last update, the same on all ranks."""
        if self._saver is None:
            return False
        if Request.NO_SNAPSHOT in requests:
            self._open.close()
            return False
        steps, every = self._session.progress.steps, self.every
        if self._held_at is not None and steps - self._held_at <= _VOTE_COMES:
            return steps == self._held_at
        return steps % every == 0 if isinstance(every, int) else Request.SNAPSHOT in requests

    def hold(self) -> None:
        """Take a snapshot after this update, and none after the next ones, until all ranks have the first one's vote.

        The state after this update is the best, and is being saved: a later one has to wait until that is done.
        """
        self._held_at = self._session.progress.steps

    def take(self) -> None:
        """Start a snapshot of the session as it is; all ranks together."""
        saver = self._saver
        assert saver is not None, "begin() comes first"
        self._began = began = time.perf_counter()
        self._open.close()
        with self._world.clock.phase(Phase.SAVE):
            try:
                state = self._session.state()
                if not self._has_space and not self._check_space(saver.size(state), saver.kept):
                    self._saver = None
                    return
                self._warn_of_failure(saver)
                self._session.copies.append(saver.start(state, self._describe(state), began))
            except Exception as error:
                note_location(error, "checkpoint", f"in the snapshot after update {self._session.progress.steps}")
                raise

    def keep(self) -> bool:
        """Take a last snapshot, since no other place takes the state; return whether memory has it, on all ranks."""
        if self.has(self._session.progress.steps):
            return True
        if self._saver is not None:
            self.take()
            self.finish()
        return all(self._world.axis.gather(self._saver is not None and self._saver.failure is None))

    def finish(self) -> None:
        """Wait until this rank has written its part of the last snapshot."""
        if self._saver is not None:
            self._saver.finish()

    def _check_space(self, size: int, kept: int) -> bool:
        """Return whether each host has space for its ranks' snapshots; rank 0 prints why not."""
        free = 0
        if self._memory is not None:
            disk = os.statvfs(self._memory)
            free = int(_LARGEST_SHARE * min(disk.f_bavail * disk.f_frsize, tightest_limit().free))
        rows = cast("list[tuple[int, int, int]]", self._world.axis.gather((self._ranks_here.start, size, free)))
        for host in dict.fromkeys(first for first, _, _ in rows):
            here = [(size, free) for first, size, free in rows if first == host]
            needed = (kept + 2) * sum(size for size, _ in here)  # one is being written, and each rank has a copy
            available = min(free for _, free in here)
            if needed > available:
                if self._world.rank == 0:
                    _log.warning(
                        "no snapshots in memory: the host of rank %d needs %s for them, and half of its free memory is "
                        "%s; after a failure the run resumes from the newest checkpoint (recovery.snapshot_every)",
                        host,
                        shown_size(needed),
                        shown_size(available),
                    )
                return False
        self._has_space = True
        return True

    def _warn_of_failure(self, saver: MemorySaver) -> None:
        saver.finish()
        if saver.failure is not None and not self._has_warned:
            self._has_warned = True
            _log.warning("a snapshot could not be written to memory: %s; the run continues", saver.failure)


def _completed(memory: LocalStorage, hosts: list[list[HostPart]], storage: Storage, run: Path) -> list[int]:
    """Return the steps of the snapshots that the hosts have together; complete their manifests.

    Snapshots of an attempt after the step that a later one resumed from are no part of the run's course.
    """
    if storage.run is None:
        return []
    last = last_steps(read_attempts(run))
    whole = files_of_whole(hosts, storage.run, lambda attempt, step: step <= last.get(attempt, -1))
    durable, steps = set(storage.names()), []
    for step in whole:
        name = checkpoint_name(step)
        with suppress(OSError, CorruptCheckpoint):
            if name not in durable:
                memory.replace_manifest(name, with_files(manifest_bytes(memory, name), whole[step]))
                steps.append(step)
    return steps


def after_last_round(
    config: Config,
    given: ObjectStore | None,
    folder: Path,
    memory: MemoryFolder,
    result: LaunchResult,
    *,
    on_hosts: bool,
) -> LaunchResult:
    """Save what memory has and the storage doesn't, if the run has failed or stopped; return the result that says it.

    If the storage can't take it, or several hosts have a part each, memory keeps it for the next start of the run.

    Args:
        given: The object store that was passed in Python, if any.
    """
    if result.code == 0:
        return result
    try:
        storage = storage_of(config.checkpoint, folder, given)
    except Failure:  # the ranks have failed for the same reason
        return result
    text = left_on_host(storage, memory) if on_hosts else _save_newest(config, storage, folder, memory)
    if not text and result.cut_off and (newest := newest_step(storage)) is not None:
        text = f"the state after step {newest:,} is saved in {storage.place}; start it again to resume"
    return replace(result, text="\n".join(filter(None, (result.text, text))))


def left_on_host(storage: Storage, memory: MemoryFolder) -> str:
    """Leave the memory of one of several hosts to the next start of the run, and return what to report.

    Nothing happens, and the text is empty, if the storage has a checkpoint that is as new.
    """
    step, saved = newest_step(snapshots_in(memory.path, None)), newest_step(storage)
    if step is None or (saved is not None and step <= saved):
        return ""
    memory.leave()
    return (
        f"the state after step {step:,} is in the memory of the hosts, this one's part in {memory.path}; the same "
        "command on all of them resumes from it within an hour"
    )


def _save_newest(config: Config, storage: Storage, folder: Path, memory: MemoryFolder) -> str:
    """Save the newest intact snapshot, if it is newer than all checkpoints; return what to report, empty if nothing."""
    newest, snapshots = newest_step(storage), snapshots_in(memory.path, storage.run)
    for step, name in sorted(names_by_step(snapshots.names()).items(), reverse=True):
        if newest is not None and step <= newest:
            break
        if verify(snapshots, name).fault is not None:
            continue
        try:
            _copy(snapshots, name, storage)
        except OSError as error:
            memory.leave()
            return (
                f"the state after step {step:,} could not be saved: {error.strerror or error}; it is in this host's "
                f"memory, in {memory.path}; the same command resumes from it"
            )
        if not is_run(folder):  # it was deleted or moved: with the config, the same command resumes
            RunFolder(folder).write(CONFIG, plain_yaml(to_public(config)))
        return f"the state after step {step:,} was in memory, and is saved in {storage.place}; start it again to resume"
    return ""


def _copy(snapshots: LocalStorage, name: str, storage: Storage) -> None:
    manifest = read_manifest(snapshots, name)
    draft = storage.with_separate_drafts().begin(name)
    try:
        for file in manifest.files:
            with (
                (Path(snapshots.place) / name / file).open("rb") as handle,
                mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as data,  # needs no more memory
                memoryview(data) as whole,
            ):
                draft.write(file, whole)
        draft.publish(manifest_bytes(snapshots, name))
    except BaseException:
        draft.discard()
        raise

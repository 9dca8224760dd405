"""Snapshots of a run in its launcher's memory: when one is taken, and which the ranks resume from.

each update    scheduled? requested by the clock of rank 0? --> copied beside the next update --> /dev/shm
a rank dies    the next round resumes from the newest of memory and storage
the run ends   a snapshot that is newer than every checkpoint is saved in the storage, by the launcher (`last_snapshot`)

On several hosts each has a part in its memory, and a copy of another host's (`host_memories`). The next snapshot waits
until the last one is copied: a vote against it (`NO_SNAPSHOT`) costs nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.checkpoint.host_parts import JointSnapshot, remove_parts
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import CorruptCheckpoint
from lockstep.checkpoint.memory_saving import KEPT, MemorySaver
from lockstep.checkpoint.reading import read_manifest
from lockstep.checkpoint.storage import checkpoint_name, names_by_step
from lockstep.checkpoint.with_memory import WithMemory, drop
from lockstep.core import heartbeat
from lockstep.core.control_groups import tightest_limit
from lockstep.core.formatting import size as shown_size
from lockstep.core.out_of_memory import note_location
from lockstep.core.phase_clock import Phase
from lockstep.core.records import Request
from lockstep.launch.memory_copying import is_copied, is_copying
from lockstep.training.host_memories import HostMemories, HostsStorage
from lockstep.training.requests import OpenRequest
from lockstep.training.session import Session, components_of

if TYPE_CHECKING:
    from lockstep.checkpoint.saving import RunMetadata, StepMetadata
    from lockstep.checkpoint.storage import Storage
    from lockstep.core.records import TrainingState

_SHARE = 0.005  # of the time that automatic snapshots may cost
_SHORTEST_S = 0.2  # between automatic snapshots
_LARGEST_SHARE = 0.5  # of the free memory
_VOTE_COMES = 4  # updates until a vote against snapshots has come, also on an accelerator
_COPY_BEGINS_S = 5.0  # by which a copy of the other host's part has begun
_log = logging.getLogger("lockstep")


def snapshots_in(memory: Path, run: str | None) -> LocalStorage:
    """Return the storage of snapshots in a launcher's folder."""
    return LocalStorage(memory / "checkpoints", run)


class MemorySnapshots:
    """The snapshots of one run, on one rank; all ranks call the same methods at the same updates.

    Args:
        memory: The launcher's folder; None: there is none.
        run: The run's folder; None: a session without one.
    """

    def __init__(self, session: Session, memory: Path | None, run: Path | None = None) -> None:
        components = components_of(session)
        world = components.world
        self._session = session
        self._folder = run
        self._world = world
        self._every = components.config.recovery.snapshot_every
        self._hosts = HostMemories.of_ranks(os.environ, memory, components.config.launch.job_id)
        if self._hosts is None and world.machine_ranks != world.size:  # another launcher's, which keeps no memory
            memory = None
        self._memory = memory
        self._found: dict[int, JointSnapshot] = {}
        self._taken = session.progress.steps
        self._is_copied = True
        self.folder: Path | None = None  # if one rank's snapshot may be there
        self._saver: MemorySaver | None = None
        self._describe: Callable[[TrainingState], StepMetadata] | None = None
        self._wait_for_copies: Callable[[], None] | None = None
        self._has_space: bool | None = None
        self._has_warned = False
        self._began = time.perf_counter()
        self._open = OpenRequest()
        self._held_at: int | None = None

    def resumable(self, storage: Storage) -> Storage | WithMemory:
        """Return the checkpoints from which the run may resume; rank 0 has emptied memory that is another run's."""
        if self._hosts is not None:
            return self._resumable_on_hosts(storage, self._hosts)
        if self._memory is None:
            return storage
        return WithMemory(storage, snapshots_in(self._memory, storage.run))

    def _resumable_on_hosts(self, storage: Storage, hosts: HostMemories) -> Storage | WithMemory:
        is_first = self._world.rank == 0 and storage.run is not None
        usable = _usable(hosts, storage, self._folder) if is_first else None
        usable = cast("tuple[list[JointSnapshot], str] | None", self._world.axis.broadcast(usable))
        if usable is None:
            return storage
        snapshots, run = usable
        self._found = {snapshot.step: snapshot for snapshot in snapshots}
        return WithMemory(storage, HostsStorage(hosts, snapshots, run))

    def has(self, step: int) -> bool:
        """Return whether a snapshot of the step is in memory."""
        if self._hosts is not None:
            return step in self._found
        return self._memory is not None and step in names_by_step(snapshots_in(self._memory, None).names())

    def begin(self, run: RunMetadata, step: int, describe: Callable[[TrainingState], StepMetadata]) -> None:
        """Take snapshots from now on; those after `step`, at which the run begins, are deleted.

        Args:
            describe: Describes a state, for its manifest.
        """
        self._taken = step
        if self._hosts is not None:
            self._begin_on_hosts(self._hosts, run, step, describe)
            return
        if self._memory is None:
            return
        storage = snapshots_in(self._memory, run.run)
        if self._world.rank == 0:
            drop(storage, lambda other, name: other > step or (other < step and not _is_intact(storage, name)))
            storage.remove_stale_drafts()
        self._world.axis.barrier()
        if self._every is not None:
            self._describe, self.folder = describe, self._memory
            self._saver = MemorySaver(storage, self._world.axis, self._world.device, run)

    def _begin_on_hosts(
        self, hosts: HostMemories, run: RunMetadata, step: int, describe: Callable[[TrainingState], StepMetadata]
    ) -> None:
        world, memory = self._world, self._memory
        if world.rank == 0 and step in self._found:
            hosts.fetch_reports(self._found[step])
        world.axis.barrier()  # all have read what they need
        if memory is not None and world.local_rank == 0:
            remove_parts(memory, lambda part: part.step > step or part.run != run.run)
            snapshots_in(memory, run.run).remove_stale_drafts()
        self._describe = describe
        if self._every is not None:
            folder = memory if memory is not None else Path(os.devnull)  # `_check_space` refuses that
            ranks = range(world.rank - world.local_rank, world.rank - world.local_rank + world.machine_ranks)
            self._saver = MemorySaver(snapshots_in(folder, run.run), world.axis, world.device, run, ranks)

    def begin_attempt(self, attempt: str | None) -> None:
        """Note what identifies this attempt, as the first rank knows it; all ranks together."""
        if self._hosts is not None:
            attempt = cast("str", self._world.axis.broadcast(attempt))
            if self._saver is not None:
                self._saver.attempt = attempt
            self._world.axis.barrier()

    def requests(self) -> tuple[Request, ...]:
        """Return this rank's request for the next vote.

        On rank 0, one for a snapshot once that costs no more than its share; on several hosts, one against it while the
        last one isn't copied.
        """
        saver = self._saver
        if saver is not None and self._hosts is not None and not self._is_settled(saver, self._hosts):
            return (Request.NO_SNAPSHOT,)
        if saver is None or self._world.rank != 0 or saver.is_writing:
            return ()
        if isinstance(self._every, int):
            next_step = self._session.progress.steps + 1
            is_due = self._hosts is not None and next_step // self._every > self._taken // self._every
        else:
            is_due = time.perf_counter() - self._began >= max(_SHORTEST_S, saver.seconds / _SHARE)
        return (Request.SNAPSHOT,) if self._open.is_made(due=is_due) else ()

    def _is_settled(self, saver: MemorySaver, hosts: HostMemories) -> bool:
        """Return whether this rank has written the last snapshot, and its host has a copy of the other host's part.

        A part that doesn't come within some seconds, because it could not be written or the other host's launcher can't
        be reached, isn't waited for.
        """
        if saver.is_writing:
            return False
        if self._is_copied or self._world.local_rank != 0 or len(hosts.addresses) == 1 or self._memory is None:
            return True
        waited = time.perf_counter() - self._began
        self._is_copied = is_copied(self._memory, checkpoint_name(self._taken)) or (
            waited > _COPY_BEGINS_S and not is_copying(self._memory)
        )
        return self._is_copied

    def is_due(self, requests: Collection[Request] = ()) -> bool:
        """Return whether a snapshot follows the last update, the same on all ranks."""
        if self._saver is None or Request.NO_SNAPSHOT in requests:
            self._open.close()
            return False
        steps = self._session.progress.steps
        if self._held_at is not None and steps - self._held_at <= _VOTE_COMES:
            return steps == self._held_at and self._hosts is None
        if isinstance(self._every, int) and self._hosts is None:
            return steps % self._every == 0
        return Request.SNAPSHOT in requests

    def hold(self) -> None:
        """Take a snapshot after this update, and none after the next ones, until all ranks have the first one's vote.

        The state after this update is the best, and is being saved: a later one has to wait until that is done.
        """
        self._held_at = self._session.progress.steps

    def take(self) -> None:
        """Start a snapshot of the session as it is; all ranks together."""
        saver, describe = self._saver, self._describe
        assert saver is not None, "begin() comes first"
        assert describe is not None, "and states how"
        self._began = began = time.perf_counter()
        self._taken, self._is_copied = self._session.progress.steps, False
        self._open.close()
        with self._world.clock.phase(Phase.SAVE), heartbeat.snapshot_stage(first=self._has_space is None):
            try:
                state = self._session.state()
                if self._has_space is None and not self._check_space(saver.size(state)):
                    self._saver = self.folder = None
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
        if self._hosts is not None:
            self._has_space = self._check_space_of_hosts(size, self._hosts)
            return self._has_space
        sizes = cast("list[int]", self._world.axis.gather(size))
        needed = (KEPT + 2) * sum(sizes)  # one more is being written, and each rank has a copy
        has_space = True
        if self._world.rank == 0:
            assert self._memory is not None, "there are no snapshots without it"
            free = _free_in(self._memory)
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

    def _check_space_of_hosts(self, size: int, hosts: HostMemories) -> bool:
        """Return whether each host has space for its ranks' parts, and for copies of those of the host before."""
        free = _free_in(self._memory) if self._memory is not None else 0
        rows = cast("list[tuple[int, int, int]]", self._world.axis.gather((hosts.node, size, free)))
        number = len(hosts.addresses)
        sizes = [sum(size for node, size, _ in rows if node == host) for host in range(number)]
        has_space = True
        for host in range(number):
            needed = (KEPT + 2) * sizes[host] + (KEPT * sizes[host - 1] if number > 1 else 0)
            available = min(free for node, _, free in rows if node == host)
            if needed > available and has_space and self._world.rank == 0:
                _log.warning(
                    "no snapshots in memory: they need %s on host %d, and may take %s, half of what is free there; "
                    "after a failure the run resumes from the newest checkpoint (recovery.snapshot_every)",
                    shown_size(needed),
                    host,
                    shown_size(available),
                )
            has_space &= needed <= available
        return has_space

    def _warn_of_failure(self, saver: MemorySaver) -> None:
        saver.finish()
        if saver.failure is not None and not self._has_warned:
            self._has_warned = True
            _log.warning("a snapshot could not be written to memory: %s; the run continues", saver.failure)


def _free_in(memory: Path) -> int:
    """Return how many bytes snapshots may take."""
    disk = os.statvfs(memory)
    return int(_LARGEST_SHARE * min(disk.f_bavail * disk.f_frsize, tightest_limit().free))


def _usable(hosts: HostMemories, storage: Storage, run: Path | None) -> tuple[list[JointSnapshot], str] | None:
    """Return the hosts' snapshots that the storage lacks, and the run's id; None: there are none."""
    if run is None or storage.run is None:
        return None
    snapshots = hosts.whole_snapshots(run, storage.run)
    try:
        durable = storage.names()
    except OSError:
        durable = []
    return [snapshot for snapshot in snapshots if snapshot.name not in durable], storage.run


def _is_intact(snapshots: LocalStorage, name: str) -> bool:
    try:
        read_manifest(snapshots, name)
    except CorruptCheckpoint:
        return False
    return True

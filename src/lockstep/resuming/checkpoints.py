"""The saves of a run.

begin           the storage is checked, and the run resumes from the newest checkpoint, if there is one
each update     scheduled? requested? --> saved, in the background
finish          the last save exists, or the run reports why it doesn't
an exception    the state after the last finished update is saved; then the run ends as it would without this
"""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.checkpoint.loading import load_newest
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.memory_saving import MemorySaver
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.saving import RunMetadata, Saver, StepMetadata, failure_reason
from lockstep.checkpoint.storage import Owner, checkpoint_name, names_by_step
from lockstep.config.writing import to_public
from lockstep.core.deferred_signals import DEFERRAL
from lockstep.core.errors import Rescued, RunFailed, Stopped, blames_a_peer
from lockstep.core.out_of_memory import note_location
from lockstep.core.phase_clock import Phase
from lockstep.core.process_settings import paused_collection
from lockstep.core.ranks import started_by_lockstep
from lockstep.core.records import Request, SaveReport, TrainingState
from lockstep.core.terminal import echo
from lockstep.distributed import generators
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.rounds import poll
from lockstep.distributed.user_collectives import print_once
from lockstep.loop.components import Saves
from lockstep.loop.evaluations import Evaluations, Trigger
from lockstep.loop.replicas import refuse_not_finite
from lockstep.loop.session import Session, components_of
from lockstep.monitor.history import HistoryFiles
from lockstep.monitor.jsonl import finite
from lockstep.resuming.locations import storage_at
from lockstep.resuming.memory_snapshots import MemorySnapshots, snapshots_in
from lockstep.resuming.ownership import refuse_other_run
from lockstep.resuming.resuming import Resume, check_state, lock_storage, refuse_local_storage, restore, set_back
from lockstep.strategies.registry import find_strategy

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.core.protocols import ObjectStore

_log = logging.getLogger("lockstep")
TRANSFORMS = "transforms"
"""The key in a manifest's environment of the names of the model's transforms."""
_OTHER_WRITES_S = 30.0  # for another rank to write the state that all have


class Checkpoints(Saves):
    """The checkpoints of one run, on one rank; all ranks call the same methods at the same updates.

    Args:
        home: the run's folder; None: a session without one.
        recipe: what the run is called.
        memory: the launcher's folder for snapshots; None: there is none.

    Attributes:
        environment: of this attempt, on the first rank.
        run: id of the run, from `begin` on.
        trigger: requests a save by the clock, and knows which updates one follows.
        history: of the run, on the first rank; flushed before a checkpoint that refers to it exists.
    """

    def __init__(
        self,
        session: Session,
        storage: Storage,
        environment: Mapping[str, Any],
        home: Path | None = None,
        recipe: str = "session",
        memory: Path | None = None,
    ) -> None:
        components = components_of(session)
        section, epoch_samples = components.config.checkpoint, components.plan.epoch_samples
        self._session = session
        self._data: Mapping[str, Any] = {
            "fingerprint": components.source.fingerprint,
            "samples": components.source.facts.samples,
            "epoch_samples": epoch_samples,
            **({} if components.companion is None else {"companion": components.companion}),
        }
        if (adapter := components.tensors.adapter) is not None:
            parts = {"config": dict(adapter.config), "files": dict(adapter.files)}
            self._data = {**self._data, "base": components.base, "adapter": parts}
        self.storage = storage
        self._axis = components.world.axis
        self._section = section
        self.home, self._recipe = home, recipe
        self._retention = Retention(storage, section, epoch_samples)
        self.trigger = Trigger(section.every, Request.SAVE, epoch_samples, self._axis.rank)
        self._saver: Saver  # from `begin` on, after which the session knows of it
        self._saved_at: int | None = None
        self._newest: int | None = None
        self._failed_at: int | None = None  # the step of a save that all ranks know to have failed
        self.evaluations = Evaluations(session)
        self._saved_evaluation = self._evaluation()
        self._began_at = 0
        self._saves_again = False
        self._failure_state = session.failure_state
        self.environment = environment
        self.snapshots = MemorySnapshots(session, self._metadata, memory, home)
        self.history = HistoryFiles()
        self.run = ""

    @property
    def place(self) -> str:
        """Path or address of the checkpoints."""
        return self.storage.place

    # --- at the start ---------------------------------------------------------------------------------------------

    def begin(self, resume: Resume) -> list[str]:
        """Resume from a checkpoint, if there is one; return notes for the user.

        Raises:
            ConfigError: it is another run's, or not all ranks see the same folder.
            RunFailed: none can be read, the requested one doesn't exist, or the storage can't be written.
        """
        try:
            return self._begin(resume)
        except OSError as error:
            where = error.filename or self.place
            raise RunFailed(f"checkpoints can't be written to {where}: {error.strerror or error}") from error
        finally:
            if self._session.saves is not self:  # else the session's end does it
                self.storage.release()

    def _begin(self, resume: Resume) -> list[str]:
        components = components_of(self._session)
        self.evaluations.refuse_unknown_metrics()
        refuse_local_storage(self.storage, self._axis, components.config.launch.timeout)
        lock_storage(self.storage, self._axis)
        refuse_other_run(self._session, self.storage, self.home, resume)
        notes: list[str] = []
        starts_over = resume.fresh or resume.origin is not None
        run = (None if starts_over else self.storage.run) or uuid.uuid4().hex
        aside: tuple[int, Mapping[str, str]] | None = (-1, {}) if starts_over or resume.until is not None else None
        if not resume.fresh:
            storage = self.storage if resume.step is not None else self.snapshots.resumable(self.storage)
            origin = resume.origin or storage
            restored = restore(self._session, origin, resume, self._data)
            if restored is not None:
                loaded, notes = restored
                manifest = loaded.manifest
                self.resumed_from = manifest.step
                if resume.origin is None:  # a fork begins with its own checkpoint and its own best metric
                    run = manifest.run
                    notes += self.evaluations.restore(manifest)
                    self._saved_evaluation = self._evaluation()
                    if self.snapshots.has(manifest.step):
                        notes[0] += ", which was in memory"
                    else:
                        self._saved_at = self._newest = manifest.step
                    aside = manifest.step, loaded.broken
            elif resume.until is None and (resume.step is not None or resume.origin is not None):
                raise RunFailed(f"there is no checkpoint in {origin.place}")
        if aside is not None:
            notes += set_back(self.storage, self._axis, *aside)
        self.run = cast("str", self._axis.broadcast(run))
        self._write_owner()
        metadata = RunMetadata(self.run, finite(to_public(components.config)), self.environment)
        self._saver = Saver(
            self.storage,
            self._axis,
            components.world.device,
            metadata,
            self._published,
            self._retention.make_room,
            lambda: self.history.flush(),
        )
        self._began_at = self._session.progress.steps
        self.snapshots.begin(metadata, self._began_at)
        self._session.saves = self
        return notes

    def _write_owner(self) -> None:
        if self._axis.rank != 0:
            return
        owner = self.storage.owner()
        if self.home is None and owner is not None and owner.run == self.run:
            return
        self.storage.set_owner(Owner(self.run, str(self.home) if self.home is not None else None, self._recipe))

    # --- in each vote ---------------------------------------------------------------------------------------------

    def _published(self, manifest: Manifest) -> None:
        self._newest = manifest.step
        self._retention.on_published(manifest)

    def status(self) -> tuple[int, int]:
        return self._saver.settled, self._saver.failures

    def receive(self, settled: float, failed: float) -> None:
        self._saver.on_vote(settled, failed)

    # --- during the run -------------------------------------------------------------------------------------------

    def requests(self) -> tuple[Request, ...]:
        """Return this rank's requests for the next vote: a save by the clock, or again after the disk was full."""
        requests = (*self.trigger.requests(), *self.snapshots.requests())
        if self._axis.rank == 0 and self.evaluations.best_at is not None and self._unpublished_best() is not None:
            requests = (*requests, Request.NO_SNAPSHOT)  # the run goes back to the best state if its save is lost
        saves_again, self._saves_again = self._saves_again, False
        return (*requests, Request.SAVE) if saves_again else requests

    def outcomes(self) -> list[SaveReport]:
        """Return the saves that have ended since the last call, on the first rank."""
        if self._saver.reports.empty():
            return []
        ended = self._saver.outcomes()
        self._saves_again |= any(report.made_room for report in ended)
        return ended

    def save_evaluated(self, report_saves: Callable[[list[SaveReport]], None]) -> None:
        """Add the evaluation of the state that the run resumed from to its checkpoint; save a best one."""
        if self.evaluations.is_best or self._saved_at == self._session.progress.steps:
            self.save(report_saves)

    @DEFERRAL.held()
    def save(self, report_saves: Callable[[list[SaveReport]], None] | None = None) -> None:
        """Start a save of the session as it is; if it was saved at this step, only add an evaluation since then.

        Args:
            report_saves: called with the saves that have ended, before this one can exist.
        """
        self._failure_state.refuse_half_update(self)
        step = self._session.progress.steps
        if self._saved_at == step != self._failed_at:
            self._add_evaluation()
            return
        with components_of(self._session).world.clock.phase(Phase.SAVE):
            try:
                with paused_collection():
                    state = self._session.state()
                self._saves_again = False
                metadata = self._metadata(state)
                finished = (lambda: report_saves(self.outcomes())) if report_saves is not None else lambda: None
                self._session.copies.append(self._saver.start(state, metadata, finished))
            except Exception as error:
                note_location(error, "checkpoint", f"in the save after update {step}")
                raise
            self._saved_at, self._failed_at, self._saved_evaluation = step, None, self._evaluation()
            self.trigger.restart()
            if not self._section.asynchronous:
                self._saver.finish()
            elif self.evaluations.is_best:
                self.snapshots.hold()

    def _add_evaluation(self) -> None:
        state, metrics = evaluation = self._evaluation()
        if evaluation == self._saved_evaluation:
            return
        added = {**state, "seconds": self._session.seconds}
        step = self._session.progress.steps
        failure = self._saver.amend(StepMetadata(step, 0, 0, added, metrics))
        if failure is None:
            self._saved_evaluation = evaluation
        elif self._axis.rank == 0:
            _log.warning("the checkpoint of step %d lacks the metrics of its evaluation: %s", step, failure)

    def _unpublished_best(self) -> int | None:
        """Return the step of the best state if its save is in progress. Only the first rank knows when it has ended."""
        best, save = self.evaluations.best_at, self._saver.in_progress
        if best is None or self._newest == best:
            return None
        return best if save is not None and save[0] == best else None

    def _evaluation(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a checkpoint's data about evaluations: in its state, and as metrics."""
        return self.evaluations.state(), self.evaluations.metrics()

    def _metadata(self, state: TrainingState) -> StepMetadata:
        progress, held = self._session.progress, components_of(self._session).sharding.state
        refuse_not_finite(held.not_finite(state), f"after update {progress.steps:,}")
        of_evaluations, metrics = self._evaluation()
        values = {**state.values, "data": self._data, **of_evaluations}
        return StepMetadata(progress.steps, progress.samples, progress.tokens, values, metrics)

    def finish(self) -> list[SaveReport]:
        """Wait for the current save; return the saves that have ended since `outcomes`, on all ranks."""
        self._saver.finish()
        ended = cast("list[SaveReport]", self._axis.broadcast(self._saver.outcomes()))
        if ended:
            self._failed_at = ended[-1].step if ended[-1].failure is not None else None
        return ended

    # --- instead of a save that failed or was lost ----------------------------------------------------------------

    def rescue(self, error: BaseException) -> str | None:
        """Save what a run that `error` ends has learned since its last save; return what to report."""
        if self._session.progress.steps == self._began_at:
            return None
        best, memory = self._unpublished_best(), self.snapshots.folder
        return Rescue(self._session, self.storage, self._saver, self._metadata, best, memory).save(error)

    def close(self) -> None:
        self._saver.join()
        self.storage.release()

    def resumes_from(self) -> int | None:
        return self._saver.resumes_from()

    def save_again(self) -> None:
        """Start the last save once more: the disk was full and has space now."""
        self._saved_at = None
        self.save()

    def load_best(self) -> None:
        """Restore the session from the best intact checkpoint, if any; move damaged ones aside. All ranks together."""
        is_first, session = self._axis.rank == 0, self._session
        while True:
            if is_first:
                self._retention.invalidate()  # a checkpoint may have been deleted
            step = cast("int | None", self._axis.broadcast(self._retention.best if is_first else None))
            if step is None or step == session.progress.steps:
                return
            try:
                loaded = load_newest(self.storage, self._axis, session.state(), step, check_state)
            except RunFailed as failure:  # on all ranks alike
                if is_first:
                    _log.warning("the best checkpoint can't be used, and is renamed: %s", failure)
                    try:
                        self.storage.move_aside(checkpoint_name(step), "broken")
                    except OSError:
                        raise failure from None
                self._axis.barrier()
                continue
            assert loaded is not None, "a checkpoint of a given step exists, or RunFailed is raised"
            session.restore(loaded.state)
            return


def checkpoints_in(
    session: Session, place: str | os.PathLike[str] | ObjectStore, *, fresh: bool = False, accept_changes: bool = False
) -> Checkpoints:
    """Return the checkpoints of a session under a custom loop; see `Session.checkpoints`."""
    checkpoints = Checkpoints(session, storage_at(place, components_of(session).config.checkpoint.retry_seconds), {})
    for note in checkpoints.begin(Resume(fresh=fresh, accept_changes=accept_changes)):
        print_once(f"lockstep: {note}")
    return checkpoints


@contextmanager
def rescuing(session: Session, *excluded: type[Exception]) -> Iterator[None]:
    """Save the session's state when an exception leaves the block, except after `excluded`; a note on it says where."""
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        outcome = None if isinstance(error, (Stopped, *excluded)) else session.saves.rescue(error)
        if outcome is not None:
            error.add_note(Rescued(outcome))
            if isinstance(error, SystemExit) and not started_by_lockstep(os.environ):  # nothing else prints it
                echo(f"lockstep: {outcome}", file=sys.stderr, flush=True)
        raise


@dataclass(frozen=True, slots=True)
class Rescue:
    """Saves the progress of a failing run since its last save. No older checkpoint is deleted for it.

    Attributes:
        metadata: Describes a state, for its manifest.
        best: step of the best state if its save is in progress, which a later state must not overtake.
        memory: the launcher's folder for snapshots; None: there is none.
    """

    session: Session
    storage: Storage
    saver: Saver
    metadata: Callable[[TrainingState], StepMetadata]
    best: int | None
    memory: Path | None

    def save(self, error: BaseException) -> str:
        """Save the state, and return what to report.

        Where all ranks know of the failure, they save together. Otherwise a rank that holds the whole state saves it
        by itself; where ranks hold parts, nothing is saved. A rank that lost a peer saves in its launcher's memory, and
        the next round resumes from there: that is faster than the storage.
        """
        step, place = self.session.progress.steps, self.storage.place
        try:
            if blames_a_peer(error) and self._save_in_memory():
                return f"the state after step {step:,} is in the launcher's memory"
            with components_of(self.session).world.clock.phase(Phase.SAVE):  # the watch gives a save more time
                failure = self._save()
        except Exception as another:
            failure = failure_reason(another)
        if failure is None:
            return f"the state after step {step:,} is saved in {place}; start it again to continue"
        return f"the state after step {step:,} could not be saved: {failure}"

    def _save(self) -> str | None:
        """Return why nothing could be saved; None if the checkpoint exists."""
        together = self.session.failure_state.fails_together
        inconsistency = self._inconsistency()
        if not together and not self._has_whole_state():
            return "it is sharded over ranks, and not all of them have failed"
        if together:
            self.saver.finish()
        else:
            self.saver.abandon()
        if self.session.progress.steps in self._saved_steps():
            return None
        if (missing := self._missing_best()) is not None:
            return missing
        if inconsistency is not None:
            return inconsistency
        return self._save_together() if together else self._save_alone()

    def _save_in_memory(self) -> bool:
        """Return whether this rank has the whole state, and it is in memory now. Of several such ranks, one writes."""
        if (
            self.session.failure_state.fails_together
            or not self._has_whole_state()
            or self._inconsistency() is not None
            or self.memory is None
            or self.session.progress.steps in self._saved_steps()
            or self._missing_best() is not None
        ):
            return False
        state, device = self.session.state(synchronized=False), components_of(self.session).world.device
        metadata, run = self.metadata(state), self.saver.run_metadata
        storage, name = snapshots_in(self.memory, run.run), checkpoint_name(metadata.step)
        try:
            Path(storage.place).mkdir(exist_ok=True)  # this may be the first snapshot
            with storage.try_lock(f"whole-{name}") as is_first:
                if is_first and name not in storage.names():
                    saver = MemorySaver(storage.with_separate_drafts(), LocalGroup(), device, run)
                    saver.start(state, metadata, time.perf_counter())
                    saver.finish()
                seconds = 0.0 if is_first else _OTHER_WRITES_S
                return poll(lambda: name in storage.names(), time.monotonic() + seconds)
        except OSError:  # memory is full
            return False

    def _inconsistency(self) -> str | None:
        return self.session.failure_state.inconsistency(components_of(self.session).sharding.state.model)

    def _has_whole_state(self) -> bool:
        """Return whether this rank has the whole state, and no part of it differs between ranks."""
        components = components_of(self.session)
        plan = components.plan
        if not find_strategy(plan.strategy).memory.holds_everything or plan.mesh.ranks != plan.mesh.data:
            return False
        own = generators.states(components.world.rank)
        return not own and not components.sharding.state.live_state().changes_in_forward

    def _saved_steps(self) -> Collection[int]:
        return names_by_step(self.storage.names()).keys()

    def _missing_best(self) -> str | None:
        """Return why the state can't be saved if the save of an earlier state, which is the best, has not ended."""
        if self.best in (None, self.session.progress.steps) or self.best in self._saved_steps():
            return None
        return f"the best state, of step {self.best:,}, was still being saved, and has to be saved first"

    def _save_together(self) -> str | None:
        self.saver.disable_deletion()
        step, state = self.session.progress.steps, self.session.state()
        self.saver.start(state, self.metadata(state))
        self.saver.finish()
        reports = components_of(self.session).world.axis.broadcast(self.saver.outcomes())
        return next((report.failure for report in cast("list[SaveReport]", reports) if report.step == step), None)

    def _save_alone(self) -> str | None:
        """Save by this rank, without a collective; or wait for the rank that does, because this one's end ends it."""
        components, name = components_of(self.session), checkpoint_name(self.session.progress.steps)
        state = self.session.state(synchronized=False)
        with self.storage.try_lock(name) as first:
            if first:
                storage, device = self.storage.with_separate_drafts(), components.world.device
                saver = Saver(storage, LocalGroup(), device, self.saver.run_metadata)
                saver.start(state, self.metadata(state))
                saver.finish()
                return next((report.failure for report in saver.outcomes()), None)
        poll(lambda: not self.storage.has_marker(name), time.monotonic() + components.config.launch.timeout)
        return None if name in self.storage.names() else "another rank could not save it"

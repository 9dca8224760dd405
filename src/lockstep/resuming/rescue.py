"""The save after an exception: the state after the last finished update is saved before the run ends.

An exception in user code, sys.exit() and Ctrl-C end the run as they would without it, once the state is saved.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.checkpoint.memory_saving import MemorySaver
from lockstep.checkpoint.saving import Saver, StepMetadata, failure_reason
from lockstep.checkpoint.storage import checkpoint_name, names_by_step
from lockstep.core.errors import Rescued, Stopped, blames_a_peer
from lockstep.core.phase_clock import Phase
from lockstep.core.ranks import started_by_lockstep
from lockstep.core.terminal import echo
from lockstep.distributed import generators
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.rounds import poll
from lockstep.loop.session import components_of
from lockstep.resuming.memory_snapshots import snapshots_in
from lockstep.strategies.registry import find_strategy

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.core.records import SaveReport, TrainingState
    from lockstep.loop.session import Session


_OTHER_WRITES_S = 30.0  # for another rank to write the state that all have


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

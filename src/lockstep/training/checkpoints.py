"""The saves of a run, and how it goes on from one.

resume    is there a checkpoint that verifies? --> the same run? --> state back --> what lies beyond it put aside
see       after each update: due? asked for? --> save, in the background
finish    the last save exists, or the run says that it doesn't
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.checkpoint.loading import LoadedCheckpoint, load_newest, move_newer_aside
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import CorruptCheckpoint
from lockstep.checkpoint.objects import ObjectStorage
from lockstep.checkpoint.ownership import Owner
from lockstep.checkpoint.retention import Retention, is_better
from lockstep.checkpoint.saving import RunMetadata, Saver, StepMetadata
from lockstep.checkpoint.storage import MANIFEST, checkpoint_name
from lockstep.config.writing import to_public
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.local_paths import local_path
from lockstep.core.out_of_memory import mark
from lockstep.core.records import EvaluationReport, Request, SaveReport, StepReport, TrainingState
from lockstep.distributed.user_collectives import print_once
from lockstep.monitor.folder import RunFolderTaken
from lockstep.monitor.jsonl import finite
from lockstep.training.rescue import Rescue
from lockstep.training.saved_state import changes, check_state, data_identity
from lockstep.training.session import FailureState, Session, components_of
from lockstep.training.triggers import Trigger

if TYPE_CHECKING:
    from lockstep.checkpoint.manifest import Manifest
    from lockstep.checkpoint.storage import Storage
    from lockstep.core.progress import Progress
    from lockstep.core.protocols import ObjectStore
    from lockstep.monitor.history import HistoryFiles

_log = logging.getLogger("lockstep.checkpoint")

HISTORY = "history"  # in a manifest's environment: how far the run's files had been written


@dataclass(frozen=True, slots=True)
class Resume:
    """How a run begins.

    Attributes:
        fresh: anew, whatever was saved before.
        step: from this checkpoint; None: from the newest.
        origin: from a checkpoint in this storage, another run's; None: from its own.
        accept_changes: although data, model or seed are others than before.
    """

    fresh: bool = False
    step: int | None = None
    origin: Storage | None = None
    accept_changes: bool = False


def checkpoints_in(
    session: Session,
    place: str | os.PathLike[str] | ObjectStore,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
) -> Checkpoints:
    """Return the checkpoints of a session under a custom loop; see `Session.checkpoints`."""
    storage: Storage
    if isinstance(place, str | os.PathLike):
        storage = LocalStorage(local_path(place).absolute())
    else:
        storage = ObjectStorage(place)
    checkpoints = Checkpoints(session, storage, {})
    for note in checkpoints.begin(Resume(fresh=fresh, accept_changes=accept_changes)):
        print_once(f"lockstep: {note}")
    return checkpoints


class Checkpoints:
    """Of one run, on one rank; all ranks call the same methods at the same updates.

    Args:
        home: the run's folder; None: a session without one.
        recipe: what the run is called.

    Attributes:
        run: id of the run, from `begin` on.
        look: on the first rank, makes the run's folder again if somebody has deleted it.
        history: of the run, on the first rank; what a checkpoint counts on is flushed before it exists.
        written: how far the history had been written when the checkpoint was saved that this attempt resumed from.
        resumed_from: the step that this attempt went on from; None: it began anew.
    """

    def __init__(
        self,
        session: Session,
        storage: Storage,
        environment: Mapping[str, Any],
        home: Path | None = None,
        recipe: str = "session",
    ) -> None:
        components = components_of(session)
        section, epoch_samples = components.config.checkpoint, components.plan.epoch_samples
        self._session = session
        self._data = data_identity(components.source, epoch_samples)
        self._storage = storage
        self._axis = components.world.axis
        self._section = section
        self._environment = environment
        self._home = home
        self._recipe = recipe
        self._retention = Retention(storage, section, epoch_samples)
        self._due = Trigger(section.every, Request.SAVE, epoch_samples)
        self._saver: Saver | None = None
        self._saved_at: int | None = None
        self._best: float | None = None
        self._began_at = 0
        self._saves_again = False
        self._owner: Owner | None = None
        self._newest: int | None = None
        self._release: Callable[[], None] | None = None
        self._failure_state = FailureState(fails_together=True)
        self.look: Callable[[], None] = lambda: None
        self.history: HistoryFiles | None = None
        self.written: object = None
        self.resumed_from: int | None = None
        self.run = ""

    # --- at the start ---------------------------------------------------------------------------------------------

    def begin(self, resume: Resume) -> list[str]:
        """Goes on from a checkpoint, if there is one; returns what a person should know of it.

        Raises:
            ConfigError: it is another run's, or not all ranks see the same folder.
            RunFailed: none can be read, or the one that was asked for isn't there; or nothing can be written there.
        """
        try:
            return self._begin(resume)
        except OSError as error:
            where = error.filename or self._storage.place
            raise RunFailed(f"checkpoints can't be kept in {where}: {error.strerror or error}") from error

    def _begin(self, resume: Resume) -> list[str]:
        self._refuse_unknown_best()
        self._all_see_it()
        self._claim()
        notes: list[str] = []
        begins_anew = resume.fresh or resume.origin is not None
        identity = (None if begins_anew else self._storage.run) or uuid.uuid4().hex
        if resume.fresh:
            self._put_aside(-1, {}, notes)
        else:
            origin = resume.origin or self._storage
            found = self._restore(origin, resume)
            if found is not None:
                self._go_on(found, resume, notes)
                identity = found.manifest.run if resume.origin is None else identity
            elif resume.step is not None or resume.origin is not None:
                raise RunFailed(f"there is no checkpoint in {origin.place}")
        run = self.run = cast("str", self._axis.broadcast(identity))
        self._own(run)
        written = finite(to_public(components_of(self._session).config))
        self._saver = Saver(
            self._storage,
            self._axis,
            components_of(self._session).world.device,
            RunMetadata(run, written, self._environment),
            self._was_published,
            self._retention.make_room,
            lambda: self.history.flush() if self.history is not None else None,
        )
        self._began_at = self._session.progress.steps
        self._failure_state = self._session.attach(self)
        return notes

    def _own(self, run: str) -> None:
        """From now on the folder says whose it is; a session without a folder leaves what a run has written there."""
        if self._axis.rank != 0:
            return
        owner = self._storage.owner()
        if self._home is None and owner is not None and owner.run == run:
            return
        self._owner = Owner(run, str(self._home) if self._home is not None else None, self._recipe)
        self._storage.set_owner(self._owner)

    def _was_published(self, manifest: Manifest) -> None:
        self._newest = manifest.step
        self._retention.on_published(manifest)

    def _restore(self, origin: Storage, resume: Resume) -> LoadedCheckpoint | None:
        """The newest checkpoint that the session takes; None: there is none. A manifest may have the right hash and
        values that no run has written: the checkpoint before it is taken then."""
        unusable: dict[int, str] = {}
        while True:
            found = self._load(origin, resume, partial(self._refuse_changes, resume, unusable))
            if found is None:
                return None
            try:
                self._session.restore(found.state)
            except (AttributeError, TypeError, LookupError, ValueError) as error:
                unusable[found.manifest.step] = f"its state makes no sense: {type(error).__name__}: {error}"
                continue
            return found

    def _load(self, origin: Storage, resume: Resume, check: Callable[[Manifest], None]) -> LoadedCheckpoint | None:
        try:
            return load_newest(origin, self._axis, self._session.state(), resume.step, check)
        except RunFailed as error:
            if resume.origin is not None:
                raise
            raise RunFailed(f"{error}\n--fresh begins anew (in Python: fresh=True)") from error

    def _refuse_changes(self, resume: Resume, unusable: Mapping[int, str], manifest: Manifest) -> None:
        check_state(manifest)
        if manifest.step in unusable:
            raise CorruptCheckpoint(MANIFEST, unusable[manifest.step])
        differences = self._changes(manifest)
        if differences and not resume.accept_changes:
            shown = "".join(f"\n  {one}" for one in differences)
            raise ConfigError(
                f"the checkpoint of step {manifest.step} is of a run with other data, model or seed:{shown}\n"
                f"--accept-changes goes on from it all the same, --fresh begins anew (in Python: accept_changes=True, "
                f"fresh=True)"
            )

    def _changes(self, manifest: Manifest) -> list[str]:
        return changes(manifest, components_of(self._session).config, self._data)

    def _go_on(self, found: LoadedCheckpoint, resume: Resume, notes: list[str]) -> None:
        self._best = found.manifest.state.get("best")
        self.written = found.manifest.environment.get(HISTORY)
        self.resumed_from = self._saved_at = found.manifest.step
        notes += [f"resumes from step {found.manifest.step:,} ({found.manifest.samples:,} samples)"]
        notes += [f"{name} could not be used: {why}" for name, why in found.broken.items()]
        changed = self._changes(found.manifest)
        notes += [f"goes on although this changed: {one}" for one in changed]
        if resume.origin is None:
            self._put_aside(found.manifest.step, found.broken, notes)
            self._newest = found.manifest.step
        else:
            self._saved_at = None  # a fork begins with a checkpoint of its own
            self._best = None  # and keeps none of its origin's

    def _put_aside(self, step: int, broken: Mapping[str, str], notes: list[str]) -> None:
        if self._axis.rank == 0:
            for path in move_newer_aside(self._storage, step, broken):
                notes.append(f"put aside: {path}")

    def _refuse_unknown_best(self) -> None:
        """A name that no evaluation will ever have would leave `best` without a meaning, and nobody would notice."""
        best, components = self._section.best, components_of(self._session)
        if best is None:
            return
        try:
            metrics = list(components.objective.metrics(1.0, 1.0, defaultdict(lambda: 1.0)))
        except Exception:  # a user's may want more than it can be given here
            metrics = [best.rpartition(".")[2]]
        known = [f"{name}.{metric}" for name in components.evaluator.sources for metric in metrics]
        if best not in known:
            near = difflib.get_close_matches(best, known, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'no evaluation sets'}"
            raise ConfigError(Problem("", "checkpoint.best", f"no evaluation will have {best}; {meant}"))

    def _claim(self) -> None:
        """Two runs that save to one place would take each other's drafts for leftovers."""
        free = self._storage.claim() if self._axis.rank == 0 else None
        if not self._axis.broadcast(free):
            raise RunFailed(
                f"another run saves to {self._storage.place}; give checkpoint.folder another one, or end it"
            )
        if self._axis.rank == 0:
            self._storage.remove_stale_drafts()
        self._axis.barrier()

    def _all_see_it(self) -> None:
        """A folder on each host's own disk would hold a part of each checkpoint."""
        token = cast("str", self._axis.broadcast(uuid.uuid4().hex))
        if self._axis.rank == 0:
            with self._storage.leave_marker(token):
                self._axis.barrier()
                seen = self._axis.gather(True)
        else:
            self._axis.barrier()
            seen = self._axis.gather(self._storage.has_marker(token))
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        if blind:
            ranks = ", ".join(map(str, blind[:8])) + (", ..." if len(blind) > 8 else "")
            raise ConfigError(
                f"ranks {ranks} don't see what rank 0 has written to {self._storage.place}; "
                f"give checkpoint.folder one that all hosts share"
            )

    # --- in each vote -----------------------------------------------------------------------------------------------

    def status(self) -> tuple[int, int]:
        return self._saver.status if self._saver is not None else (0, 0)

    def hear(self, settled: float, failed: float) -> None:
        if self._saver is not None:
            self._saver.on_vote(settled, failed)

    def before_update(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None

    # --- while it runs --------------------------------------------------------------------------------------------

    def requests(self) -> tuple[Request, ...]:
        """What this rank asks for in the next vote: also a save in place of one that has found no room, and now has, or
        that somebody has deleted."""
        if not self._saves_again:
            return self._due.requests()
        self._saves_again = False
        return (*self._due.requests(), Request.SAVE)

    def outcomes(self) -> list[SaveReport]:
        """Saves that have ended since the last call, on the first rank."""
        assert self._saver is not None, "begin() comes first"
        ended = self._saver.outcomes()
        self._saves_again |= any(report.made_room for report in ended)
        return ended

    def is_due(self, before: Progress, report: StepReport) -> bool:
        """Whether a save follows the update between `before` and the session's progress."""
        return self._due.after(before, self._session.progress, report)

    def is_best(self, evaluations: Iterable[EvaluationReport]) -> bool:
        """Whether the metric of `checkpoint.best` has never been better."""
        name = self._section.best
        metric = flat(evaluations).get(name) if name else None
        if name is None or metric is None or not math.isfinite(metric):
            return False
        if self._best is not None and not is_better(metric, self._best, name, self._section.best_is):
            return False
        self._best = metric
        return True

    def save(self, evaluations: Iterable[EvaluationReport] = ()) -> None:
        """Begins a save of the session as it is, unless it was saved at this very step."""
        session, saver = self._session, self._saver
        assert saver is not None, "begin() comes first"
        progress = session.progress
        if self._saved_at == progress.steps:
            return
        try:
            self._begin_save(evaluations)
        except Exception as error:
            mark(error, "checkpoint", f"in the save after update {progress.steps}")
            raise
        if not self._section.asynchronous:
            saver.finish()

    def _begin_save(self, evaluations: Iterable[EvaluationReport]) -> None:
        session, saver = self._session, self._saver
        assert saver is not None, "begin() comes first"
        state = session.state()
        self._saves_again = False
        self._release = saver.start(state, self._moment(state, evaluations))
        self._saved_at = session.progress.steps
        self._due.restart()

    def _moment(self, state: TrainingState, evaluations: Iterable[EvaluationReport] = ()) -> StepMetadata:
        progress = self._session.progress
        values = {**state.values, "data": self._data, "best": self._best}
        known = {} if self.history is None else {HISTORY: self.history.marks()}
        return StepMetadata(progress.steps, progress.samples, progress.tokens, values, finite(flat(evaluations)), known)

    def rescue(self, error: BaseException) -> str | None:
        """Save what a run that `error` ends has learned since its last save; return what to report."""
        if self._saver is None or self._session.progress.steps == self._began_at:
            return None
        rescue = Rescue(self._session, self._storage, self._saver, self._failure_state, self._moment)
        return rescue.save(error)

    def finish(self) -> list[SaveReport]:
        """Waits for the save under way; returns those that have ended since `outcomes`, on all ranks."""
        assert self._saver is not None, "begin() comes first"
        self._saver.finish()
        return cast("list[SaveReport]", self._axis.broadcast(self._saver.outcomes()))

    @property
    def environment(self) -> Mapping[str, Any]:
        """Of this attempt, on the first rank."""
        return self._environment

    def save_in(self, storage: Storage) -> str | None:
        """Saves the session as it is in another place, all ranks together; returns why it could not be saved."""
        saver = self._saver
        assert saver is not None, "begin() comes first"
        saver.abandon()
        other = Saver(storage, self._axis, components_of(self._session).world.device, saver.run_metadata)
        state = self._session.state()
        other.start(state, self._moment(state))
        other.finish()
        ended = other.outcomes()
        return cast("str | None", self._axis.broadcast(ended[-1].failure if ended else None))

    # --- what somebody has deleted ----------------------------------------------------------------------------------

    @property
    def place(self) -> str:
        """Where they are kept."""
        return self._storage.place

    def are_there(self) -> bool:
        """Whether the newest one, and what marks the folder as this run's, are still there. On the first rank, in
        whatever thread. True as well where the disk doesn't say."""
        newest = self._newest
        try:
            return self._storage.is_held() and (newest is None or checkpoint_name(newest) in self._storage.names())
        except OSError:
            return True

    def make_again(self) -> None:
        """Marks the folder as this run's again, and asks for a save. On the first rank, in whatever thread.

        Raises:
            OSError: it can't be written.
            RunFolderTaken: another run saves there now.
        """
        owner = self._storage.owner()
        if owner is not None and owner.run != self.run:
            raise RunFolderTaken(f"{self.place} holds the checkpoints of another run now: {owner}")
        if not self._storage.is_held():
            if not self._storage.claim():
                raise RunFolderTaken(f"another run saves to {self.place} now")
            if self._owner is not None:
                self._storage.set_owner(self._owner)
        self._newest = None
        self._retention.invalidate()
        self._saves_again = True

    def restore_last(self) -> list[SaveReport]:
        """Saves the last one again if somebody has deleted it, and waits for it; all ranks together."""
        gone = False
        if self._axis.rank == 0 and self._saved_at is not None:
            self.look()
            gone = self._saves_again and checkpoint_name(self._saved_at) not in self._storage.names()
        if not self._axis.broadcast(gone):
            return []
        self.save_again()
        return self.finish()

    def save_again(self) -> None:
        """Begins the last save once more: it found no room on the disk and some has been made, or it was deleted."""
        self._saved_at = None
        self.save()

    def load_best(self) -> None:
        """Puts the model of the checkpoint with the best metric into the session's; all ranks together."""
        step = cast("int | None", self._axis.broadcast(self._retention.best if self._axis.rank == 0 else None))
        if step is None or step == self._session.progress.steps:
            return
        found = load_newest(self._storage, self._axis, self._session.state(), step, check_state)
        assert found is not None, "a checkpoint of a given step is there, or RunFailed is raised"
        self._session.restore(found.state)


def flat(evaluations: Iterable[EvaluationReport]) -> dict[str, float]:
    """`set.metric` -> value."""
    return {f"{report.name}.{name}": value for report in evaluations for name, value in report.metrics.items()}

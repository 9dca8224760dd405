"""The end of a run with the weights of its best checkpoint, `run.end_with: best`.

step 51, the best --> damaged? --> broken-step-00000051 --> step 42, the best of the others --> restored
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from lockstep.checkpoint.loading import load_newest
from lockstep.checkpoint.storage import checkpoint_name
from lockstep.core.errors import RunFailed
from lockstep.training.saved_state import check_state
from lockstep.training.session import components_of

if TYPE_CHECKING:
    from lockstep.checkpoint.retention import Retention
    from lockstep.checkpoint.storage import Storage
    from lockstep.training.session import Session

_log = logging.getLogger("lockstep")


def restore_best(session: Session, storage: Storage, retention: Retention) -> None:
    """Restore the session from the best checkpoint that is intact; all ranks together. Damaged ones are moved aside.

    Nothing happens if that is the state that the session has, or if there is none.
    """
    axis = components_of(session).world.axis
    if axis.rank == 0:
        retention.invalidate()  # a checkpoint may have been deleted
    while True:
        step = cast("int | None", axis.broadcast(retention.best if axis.rank == 0 else None))
        if step is None or step == session.progress.steps:
            return
        try:
            loaded = load_newest(storage, axis, session.state(), step, check_state)
        except RunFailed as failure:  # on all ranks alike
            if axis.rank == 0:
                _move_aside(storage, step, failure)
                retention.invalidate()
            axis.barrier()
            continue
        assert loaded is not None, "a checkpoint of a given step exists, or RunFailed is raised"
        session.restore(loaded.state)
        return


def _move_aside(storage: Storage, step: int, failure: RunFailed) -> None:
    try:
        place = storage.move_aside(checkpoint_name(step), "broken")
    except OSError:
        raise failure from None
    why = str(failure).rpartition("\n")[2].strip()
    _log.warning(
        "the best checkpoint can't be used: %s; it is renamed to %s, and the next best one is used", why, place
    )

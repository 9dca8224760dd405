"""A run that an exception ends keeps what it has learned: its state after the last finished update is saved.

exception in a data set, an objective, a monitor, a loop of one's own --> saved, if the state is sound --> the exception
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.core.errors import Rescued, Stopped

if TYPE_CHECKING:
    from lockstep.training.session import Session


@contextmanager
def rescuing(session: Session, *hopeless: type[Exception]) -> Iterator[None]:
    """Saves the session's state when an exception leaves the block, which then states where.

    Args:
        hopeless: exceptions after which there is nothing to save.
    """
    try:
        yield
    except Exception as error:
        outcome = None if isinstance(error, (Stopped, *hopeless)) else session.rescue()
        if outcome is not None:
            error.add_note(Rescued(outcome))
        raise

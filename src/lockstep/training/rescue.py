"""A run that an exception ends keeps what it has learned: its state after the last finished update is saved.

exception in a data set, an objective, a custom loop --> saved, if the state is sound --> the exception
sys.exit(), Ctrl-C                                   --> saved, if the state is sound --> the same exit code
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.core.errors import Rescued, Stopped
from lockstep.core.ranks import started_by_lockstep
from lockstep.core.terminal import echo
from lockstep.training.session import components_of

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
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        outcome = None if isinstance(error, (Stopped, *hopeless)) else session.rescue(error)
        if outcome is not None:
            error.add_note(Rescued(outcome))
            if isinstance(error, SystemExit) and not started_by_lockstep(os.environ):  # nobody shows anything of it
                echo(f"lockstep: {outcome}", file=sys.stderr, flush=True)
        raise
    finally:
        exchange = components_of(session).world.exchange
        if exchange is not None:
            exchange.leave()

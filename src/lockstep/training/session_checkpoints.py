"""The checkpoints of a session under a custom loop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.objects import ObjectStorage
from lockstep.distributed.user_collectives import print_once
from lockstep.stores.addresses import is_address
from lockstep.stores.blobs import UserStore
from lockstep.stores.buckets import open_store
from lockstep.training.checkpoints import Checkpoints
from lockstep.training.resuming import Resume
from lockstep.training.session import components_of

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import Storage
    from lockstep.core.protocols import ObjectStore
    from lockstep.training.session import Session


def checkpoints_in(
    session: Session,
    place: str | os.PathLike[str] | ObjectStore,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
) -> Checkpoints:
    """Return the checkpoints of a session under a custom loop; see `Session.checkpoints`."""
    section = components_of(session).config.checkpoint
    storage: Storage
    if not isinstance(place, str | os.PathLike):
        storage = ObjectStorage(UserStore(place))
    elif is_address(os.fspath(place)):
        storage = ObjectStorage(open_store(os.fspath(place), section.retry_seconds))
    else:
        storage = LocalStorage(Path(place).absolute(), retry_seconds=section.retry_seconds)
    checkpoints = Checkpoints(session, storage, {})
    for note in checkpoints.begin(Resume(fresh=fresh, accept_changes=accept_changes)):
        print_once(f"lockstep: {note}")
    return checkpoints

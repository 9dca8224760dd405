"""The run that a folder of checkpoints belongs to: `owner.json` beside them, and the run id in each manifest.

checkpoints/owner.json                    {"run": "5f0c...", "folder": "/data/runs/digits", "recipe": "digits", a hash}
checkpoints/step-00000480/manifest.json   {"run": "5f0c...", ...}    another id: a copy of another run's checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lockstep.checkpoint.hashing import hash_bytes
from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.storage import MANIFEST, StoredFile, read_small

OWNER = "owner.json"
_MAX_BYTES = 65_536
_SHORT_ID = 8  # characters of a run id that messages show


@dataclass(frozen=True, slots=True)
class Owner:
    """The run that saves to a folder.

    Attributes:
        run: Its id, made when it first started.
        folder: Its folder when it last started, absolute; None: a session without one.
        recipe: Its name.
    """

    run: str
    folder: str | None
    recipe: str

    def __str__(self) -> str:
        return f"{self.recipe} in {self.folder}" if self.folder else f"{self.recipe} (run id {self.run[:_SHORT_ID]})"


def to_bytes(owner: Owner) -> bytes:
    content = asdict(owner)
    return (json.dumps({**content, "xxh3_128": hash_bytes(json.dumps(content).encode())}, indent=2) + "\n").encode()


def read_owner(open_file: Callable[[], StoredFile]) -> Owner | None:
    """Return the owner that a file records; None if it can't be read, or a byte isn't what was written."""
    try:
        data = read_small(open_file(), _MAX_BYTES)
        content = json.loads(data)
        owner = Owner(str(content["run"]), content["folder"], str(content["recipe"]))
        return owner if to_bytes(owner) == data and isinstance(owner.folder, str | None) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def refuse_foreign(manifest: Manifest, run: str | None) -> None:
    """Raise CorruptCheckpoint unless the checkpoint belongs to `run`; None accepts any run's."""
    if run is not None and manifest.run != run:
        own, other = run[:_SHORT_ID], manifest.run[:_SHORT_ID]
        raise CorruptCheckpoint(MANIFEST, f"belongs to another run (id {other}); the checkpoints here are of run {own}")

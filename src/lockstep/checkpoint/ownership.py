"""The run that a folder of checkpoints belongs to: `owner.json` beside them, and the run id in each manifest.

checkpoints/owner.json                      {"run": "5f0c...", "folder": "/data/runs/digits", "recipe": "digits"}
checkpoints/step-00000480/manifest.json   {"run": "5f0c...", ...}    another id: a copy of another run's checkpoint
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.storage import MANIFEST

OWNER = "owner.json"
MAX_BYTES = 65_536
_SHORT_ID = 8  # characters of a run id that messages show


@dataclass(frozen=True, slots=True)
class Owner:
    """The run that saves to a folder.

    Attributes:
        run: Id of the run, made when it first started.
        folder: The run's folder when it last started, absolute; None: a session without one.
        recipe: Name of the run.
    """

    run: str
    folder: str | None
    recipe: str

    def __str__(self) -> str:
        return f"{self.recipe} in {self.folder}" if self.folder else f"{self.recipe} (run id {self.run[:_SHORT_ID]})"


def to_bytes(owner: Owner) -> bytes:
    return (json.dumps(asdict(owner), indent=2) + "\n").encode()


def from_bytes(data: bytes) -> Owner | None:
    """Return the owner that a file records, or None if it records none."""
    try:
        content = json.loads(data)
        run, folder, recipe = content["run"], content["folder"], content["recipe"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(run, str) or not run or not isinstance(folder, str | None) or not isinstance(recipe, str):
        return None
    return Owner(run, folder, recipe)


class ForeignCheckpoint(CorruptCheckpoint):
    """A checkpoint of another run."""


def refuse_foreign(manifest: Manifest, run: str | None) -> None:
    """Raise ForeignCheckpoint unless the checkpoint belongs to `run`; None accepts any run's."""
    if run is not None and manifest.run != run:
        own, other = run[:_SHORT_ID], manifest.run[:_SHORT_ID]
        raise ForeignCheckpoint(MANIFEST, f"belongs to another run (id {other}); the checkpoints here are of run {own}")

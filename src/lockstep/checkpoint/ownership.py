"""Which run a folder of checkpoints belongs to: `owner.json` beside the checkpoints, and the run id in each manifest.

checkpoints/owner.json                      {"run": "5f0c...", "folder": "/data/runs/digits", "recipe": "digits"}
checkpoints/step-00000480/manifest.json   {"run": "5f0c...", ...}    another id: a copy of another run's checkpoint
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.storage import MANIFEST

OWNER = "owner.json"
MOST_BYTES = 65_536
_SHOWN = 8  # characters of a run id


@dataclass(frozen=True, slots=True)
class Owner:
    """The run that saves to a folder.

    Attributes:
        run: its id, made when the run first began.
        folder: the run's folder when it last started, absolute; None: a session without one.
        recipe: what the run is called.
    """

    run: str
    folder: str | None
    recipe: str

    def __str__(self) -> str:
        return f"{self.recipe} in {self.folder}" if self.folder else f"{self.recipe} (run id {short_id(self.run)})"


def to_bytes(owner: Owner) -> bytes:
    return (json.dumps(asdict(owner), indent=2) + "\n").encode()


def from_bytes(data: bytes) -> Owner | None:
    """Return the owner, or None if these bytes name none."""
    try:
        found = json.loads(data)
        run, folder, recipe = found["run"], found["folder"], found["recipe"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(run, str) or not run or not isinstance(folder, str | None) or not isinstance(recipe, str):
        return None
    return Owner(run, folder, recipe)


def refuse_foreign(manifest: Manifest, run: str | None) -> None:
    """Raises CorruptCheckpoint if the checkpoint is not one of `run` (None: any run's will do)."""
    if run is not None and manifest.run != run:
        raise Foreign(
            MANIFEST,
            f"belongs to another run (id {short_id(manifest.run)}); the checkpoints here are of run {short_id(run)}",
        )


class Foreign(CorruptCheckpoint):
    """A checkpoint of another run."""


def short_id(run: str) -> str:
    """Return the beginning of a run id, which tells it apart well enough for a person."""
    return run[:_SHOWN]

"""What the state in a checkpoint must be, before a run goes on from it.

manifest.state --> every field there, of the right kind? --> the same progress as the manifest's? --> believed

A manifest whose hash is right says what somebody wrote; whether that makes sense is another question.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ValidationError

from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.storage import MANIFEST
from lockstep.core.progress import Progress
from lockstep.training.ledger import Segment, segments_in


class _Patience(BaseModel):
    discarded: int
    in_a_row: int


class _Sharding(BaseModel):
    optimizer: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]


class _Data(BaseModel):
    fingerprint: str
    samples: int


class _State(BaseModel):
    """What `Session.state` and `Checkpoints.save` write, as far as a run would stumble over it."""

    progress: Progress
    loss_scale: dict[str, float]
    patience: _Patience
    seconds: float
    ledger: list[Segment]
    sharding: _Sharding
    data: _Data
    best: float | None = None


def check_state(manifest: Manifest) -> None:
    """Raises CorruptCheckpoint unless a run can go on from what the manifest says, tensors aside."""
    try:
        _State.model_validate_json(json.dumps(manifest.state), strict=True)
        progress = Progress(**manifest.state["progress"])
        segments_in(manifest.state["ledger"])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:200]
        raise CorruptCheckpoint(MANIFEST, f"its state makes no sense: {place}: {first['msg'][:200]}") from None
    except TypeError as error:  # a field too many
        raise CorruptCheckpoint(MANIFEST, f"its state makes no sense: {error}") from None
    said = Progress(manifest.step, manifest.samples, manifest.tokens)
    if progress != said:
        raise CorruptCheckpoint(MANIFEST, f"its state contradicts it: {progress} there, {said} here")


def epoch_samples_in(manifest: Manifest) -> int:
    """Return how many samples an epoch of the run has; 1 where the manifest doesn't say."""
    data = manifest.state.get("data")
    found = data.get("epoch_samples") if isinstance(data, dict) else None
    return found if isinstance(found, int) and found > 0 else 1

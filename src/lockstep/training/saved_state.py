"""What the state in a checkpoint must be, before a run goes on from it.

manifest.state --> every field there, of the right kind? --> the same progress as the manifest's? --> believed

A manifest whose hash is right says what somebody wrote; whether that makes sense is another question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.storage import MANIFEST
from lockstep.config.writing import to_public
from lockstep.core.progress import Progress
from lockstep.monitor.jsonl import finite
from lockstep.training.ledger import Segment, segments_in

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.core.protocols import Source


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


def data_identity(source: Source, epoch_samples: int) -> dict[str, Any]:
    """Return what identifies the data of a run, as each of its checkpoints records it."""
    return {"fingerprint": source.fingerprint, "samples": source.facts.samples, "epoch_samples": epoch_samples}


_DATA = {
    "fingerprint": "the fingerprint of data.train",
    "samples": "the samples of data.train",
    "epoch_samples": "the samples of an epoch (those that fill batch.global_size, with data.drop_last)",
}
_THE_RUN = (
    "model",
    "objective",
    "data.train",
    "data.shuffle",
    "data.drop_last",
    "run.seed",
    "optim.name",
    "transforms",
)


def changes(manifest: Manifest, config: Config, data: Mapping[str, Any]) -> list[str]:
    """Return how this run differs from the one that was saved, one line each.

    Args:
        config: of this run.
        data: of this run, as `data_identity` has it.
    """
    here = finite(to_public(config))
    lines = []
    for key in _THE_RUN:
        then, now = _at(manifest.config, key), _at(here, key)
        if then is None and now == []:  # a key that earlier versions did not have
            continue
        if then != now and not (key == "optim.name" and now == "given"):  # earlier versions recorded another name
            lines += _differences(key, then, now)
    then, now = _at(manifest.config, "schedule.kind"), _at(here, "schedule.kind")
    if then == "given" != now:  # a schedule of the config may be changed; one that was passed was only forgotten
        lines += _differences("schedule.kind", then, now)
    saved = manifest.state.get("data", {})
    if not any(line.startswith("data.") for line in lines):
        lines += [
            f"{_DATA[fact]}: {saved.get(fact)} then, {now} now" for fact, now in data.items() if saved.get(fact) != now
        ]
    return lines


def _at(config: Mapping[str, Any], place: str) -> Any:
    value: Any = config
    for key in place.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _differences(place: str, then: Any, now: Any) -> list[str]:
    """Return the values that differ. A key that is missing then came with a newer version, as its default."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        return [
            line
            for key in then
            if then[key] != now.get(key)
            for line in _differences(f"{place}.{key}", then[key], now.get(key))
        ]
    return [f"{place}: {json.dumps(then)} then, {json.dumps(now)} now"]

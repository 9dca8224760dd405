"""The check of a checkpoint's state before a run resumes from it, and of how the run's settings differ from it.

manifest.state --> every field there, of the right type? --> the same progress as the manifest's? --> accepted

A manifest whose hash is right contains what was written; that may still be no valid state.
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
from lockstep.core.records import LeftOutSample
from lockstep.monitor.jsonl import finite
from lockstep.training.data_identity import continued
from lockstep.training.ledger import Segment, segments_in

if TYPE_CHECKING:
    from lockstep.config.schema import Config


class _Discards(BaseModel):
    discarded: int
    in_a_row: int
    idle: int
    recent: list[tuple[int, float, float]] = []


class _Sharding(BaseModel):
    optimizer: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    own: dict[str, dict[str, Any]] = {}
    recast: list[str] = []


class _Data(BaseModel):
    fingerprint: str
    samples: int
    parts: list[str | None] = []


class EarlyStoppingState(BaseModel):
    """The state of `monitor.early_stopping`.

    Attributes:
        best: The best value so far; None: there was no finite one.
        step: The number of updates before its evaluation.
        waited: Evaluations since then.
    """

    metric: str
    best: float | None = None
    step: int = 0
    waited: int = 0


class _State(BaseModel):
    """The state that `Session.state` and `Checkpoints.save` write, as far as a resuming run needs it."""

    progress: Progress
    loss_scale: dict[str, float]
    patience: _Discards
    seconds: float
    ledger: list[Segment]
    sharding: _Sharding
    data: _Data
    best: float | None = None
    early_stopping: EarlyStoppingState | None = None
    evaluation_due: bool = False
    left_out: list[LeftOutSample] = []


def check_state(manifest: Manifest) -> list[str]:
    """Return the tensors to which forwards have given another dtype.

    Raises:
        CorruptCheckpoint: No run can resume from the manifest's state, tensors aside.
    """
    try:
        state = _State.model_validate_json(json.dumps(manifest.state), strict=True)
        progress = Progress(**manifest.state["progress"])
        segments_in(manifest.state["ledger"])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))[:200]
        raise CorruptCheckpoint(MANIFEST, f"its state is invalid: {key}: {first['msg'][:200]}") from None
    except TypeError as error:  # an unknown field
        raise CorruptCheckpoint(MANIFEST, f"its state is invalid: {error}") from None
    expected = Progress(manifest.step, manifest.samples, manifest.tokens)
    if progress != expected:
        raise CorruptCheckpoint(MANIFEST, f"its state contradicts it: {progress} there, {expected} here")
    return [f"model.{name}" for name in state.sharding.recast]


def epoch_samples_in(manifest: Manifest) -> int:
    """Return how many samples an epoch of the run has; 1 if the manifest has no record of it."""
    data = manifest.state.get("data")
    samples = data.get("epoch_samples") if isinstance(data, dict) else None
    return samples if isinstance(samples, int) and samples > 0 else 1


_DATA = {
    "fingerprint": "the fingerprint of data.train",
    "samples": "the samples of data.train",
    "epoch_samples": "the samples of an epoch (those that fill batch.global_size, with data.drop_last)",
}
_RUN_KEYS = (
    "model", "objective", "data.train", "data.shuffle", "data.drop_last", "run.seed", "optim.name", "transforms",
)  # fmt: skip


def changes(manifest: Manifest, config: Config, data: Mapping[str, Any]) -> list[str]:
    """Return how this run's data, model and seed differ from those of the saved run, one line each.

    Args:
        data: of this run, as `identity_of` returns it.
    """
    current = finite(to_public(config))
    lines = []
    for key in _RUN_KEYS:
        then, now = _value(manifest.config, key), _value(current, key)
        if then != now:
            lines += _differences(key, then, now)
    then, now = _value(manifest.config, "schedule.kind"), _value(current, "schedule.kind")
    if then == "given" != now:  # a schedule of the config may be changed; one that was passed was only forgotten
        lines += _differences("schedule.kind", then, now)
    saved = manifest.state.get("data", {})
    if not any(line.startswith("data.") for line in lines):
        identity = continued(saved, data)
        lines += [
            f"{name}: {saved.get(fact)} then, {identity[fact]} now"
            for fact, name in _DATA.items()
            if saved.get(fact) != identity[fact]
        ]
    return lines


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _differences(key: str, then: Any, now: Any) -> list[str]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
        return [line for name in names for line in _differences(f"{key}.{name}", then.get(name), now.get(name))]
    return [f"{key}: {json.dumps(then)} then, {json.dumps(now)} now"]

"""How a run begins: its storage is checked and locked, and the newest usable checkpoint is restored.

shared by all ranks? --> no other run saves there? --> newest checkpoint that verifies --> same run? --> restored
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, ValidationError

from lockstep.checkpoint.loading import LoadedCheckpoint, load_newest, move_newer_aside
from lockstep.checkpoint.manifest import CorruptCheckpoint, Manifest
from lockstep.checkpoint.storage import MANIFEST, names_by_step
from lockstep.config.schema import Run
from lockstep.config.writing import to_public
from lockstep.core.errors import ConfigError, Failure, RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.formatting import differing, listed
from lockstep.core.progress import Progress
from lockstep.core.records import LeftOutSample
from lockstep.distributed.rounds import poll
from lockstep.loop.evaluations import EarlyStoppingState
from lockstep.loop.ledger import Segment, segments_in
from lockstep.loop.plateau import PlateauState
from lockstep.loop.session import components_of
from lockstep.monitor.jsonl import finite
from lockstep.plan.schedule import LENGTHS, fraction_done, horizon

if TYPE_CHECKING:
    from lockstep.checkpoint.storage import ReadableStorage, Storage
    from lockstep.config.schema import Config
    from lockstep.core.protocols import Axis
    from lockstep.distributed.process_group import World
    from lockstep.loop.session import Session

_DATA = {
    "fingerprint": "the fingerprint of data.train",
    "samples": "the samples of data.train",
    "base": "the frozen base of model.adapter",
    "companion": "the weights of objective.companion",
    "epoch_samples": "the samples of an epoch (those that fill batch.global_size, with data.drop_last)",
}
_RUN_KEYS = (
    "model", "objective", "data.train", "data.shuffle", "data.drop_last", "run.seed", "optim.name", "transforms",
)  # fmt: skip
_CACHED = 60.0  # seconds; a client of a network file system may remember for so long that a name doesn't exist


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


class _State(BaseModel):
    """The state in a manifest: what `Session.state` and `Checkpoints.save` write."""

    progress: Progress
    loss_scale: dict[str, float]
    patience: _Discards
    seconds: float
    ledger: list[Segment]
    sharding: _Sharding
    data: dict[str, Any]
    best: float | None = None
    early_stopping: EarlyStoppingState | None = None
    plateau: PlateauState | None = None
    evaluation_due: bool = False
    left_out: list[LeftOutSample] = []


def check_state(manifest: Manifest) -> list[str]:
    """Return the tensors that forwards have given another dtype. Raises CorruptCheckpoint for an invalid state."""
    try:
        state = _State.model_validate_json(json.dumps(manifest.state), strict=True)
        progress = Progress(**manifest.state["progress"])
        segments_in(manifest.state["ledger"])
        recast = [f"model.{name}" for name in state.sharding.recast]
    except (ValidationError, TypeError) as error:  # TypeError: an unknown field
        raise _invalid(error) from None
    expected = Progress(manifest.step, manifest.samples, manifest.tokens)
    if progress != expected:
        raise CorruptCheckpoint(MANIFEST, f"its state contradicts it: {progress} there, {expected} here")
    return recast


def _invalid(error: Exception) -> CorruptCheckpoint:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))[:200]}: {first['msg'][:200]}"
    else:
        why = f"{type(error).__name__}: {error}"
    return CorruptCheckpoint(MANIFEST, f"its state is invalid: {why}")


def epoch_samples_in(manifest: Manifest) -> int:
    """Return how many samples an epoch of the run has; 1 if the manifest doesn't say."""
    data = manifest.state.get("data")
    samples = data.get("epoch_samples") if isinstance(data, dict) else None
    return samples if isinstance(samples, int) and samples > 0 else 1


def changes(manifest: Manifest, config: Config, data: Mapping[str, Any]) -> list[str]:
    """Return how this run's data, model and seed differ from the saved run's, one line each.

    Args:
        data: identifies this run's data.
    """
    current = finite(to_public(config))
    keys = [*_RUN_KEYS]
    if _value(manifest.config, "schedule.kind") == "given":  # one that was passed in Python was perhaps forgotten
        keys.append("schedule.kind")
    then, now = ({key: _value(config, key) for key in keys} for config in (manifest.config, current))
    pairs = differing(then, now).items()
    lines = [f"{key}: {json.dumps(before)} then, {json.dumps(after)} now" for key, (before, after) in pairs]
    saved = manifest.state.get("data", {})
    if not any(line.startswith("data.") for line in lines):
        lines += [
            f"{name}: {saved.get(fact)} then, {data.get(fact)} now"
            for fact, name in _DATA.items()
            if saved.get(fact) != data.get(fact)
        ]
    return lines


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True, slots=True)
class Resume:
    """The start of a run: from scratch, or from a checkpoint.

    Attributes:
        fresh: start over, whatever was saved before.
        step: of the checkpoint to resume from; None: the newest.
        origin: storage of another run that this one forks from; None: its own.
        accept_changes: resume although data, model or seed differ.
        until: the latest step to resume from; None: any.
    """

    fresh: bool = False
    step: int | None = None
    origin: Storage | None = None
    accept_changes: bool = False
    until: int | None = None


def a_checkpoint_follows(storage: Callable[[], Storage], memory: Storage | None, world: World) -> bool:
    """Return whether there are checkpoints, or snapshots in memory. Rank 0 looks, since a host may see no files."""
    is_there = False
    if world.rank == 0:
        with suppress(OSError, Failure):
            is_there = bool(names_by_step([*storage().names(), *(memory.names() if memory is not None else [])]))
    return cast("bool", world.axis.broadcast(is_there))


def refuse_local_storage(storage: Storage, axis: Axis, timeout: float) -> None:
    """Raise ConfigError if some ranks don't see, within a minute, what rank 0 writes: each host would keep a part.

    Args:
        timeout: Seconds that ranks wait for each other.
    """
    token = cast("str", axis.broadcast(uuid.uuid4().hex))
    if axis.rank == 0:
        with storage.try_lock(token):
            axis.barrier()
            seen = axis.gather(True)
    else:
        axis.barrier()
        seen = axis.gather(poll(lambda: storage.has_marker(token), time.monotonic() + min(_CACHED, timeout / 2)))
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise ConfigError(
            f"ranks {listed([str(rank) for rank in blind], 8)} don't see what rank 0 has written to {storage.place}; "
            f"give checkpoint.folder one that all hosts share"
        )


def lock_storage(storage: Storage, axis: Axis) -> None:
    """Lock the storage, and delete unfinished saves. Raises RunFailed if another run saves there."""
    is_locked = storage.claim() if axis.rank == 0 else None
    if not axis.broadcast(is_locked):
        raise RunFailed(f"another run saves to {storage.place}; give checkpoint.folder another one, or end it")
    if axis.rank == 0:
        storage.remove_stale_drafts()
    axis.barrier()


def set_back(storage: Storage, axis: Axis, step: int, broken: Mapping[str, str]) -> list[str]:
    """Rename what is newer than a step, or broken; all ranks together. Return notes for the user, on the first rank."""
    paths = move_newer_aside(storage, step, broken) if axis.rank == 0 else []
    axis.barrier()  # an object store copies them
    return [f"renamed to {path}" for path in paths]


def _other_rate(session: Session, manifest: Manifest) -> list[str]:
    """Return a note if the learning rate changes because the run is longer or shorter than it was to be."""
    components, progress = components_of(session), session.progress
    config, facts = components.config, components.source.facts
    now = config.run.model_dump(mode="json")
    then = {**now, **{length: manifest.config.get("run", {}).get(length) for length in LENGTHS}}
    if then == now:
        return []

    def rate(run: Run) -> float:
        steps = horizon(run, config.batch.global_size, facts, config.data.drop_last)
        done = fraction_done(run, progress, components.plan.epoch_samples)
        return components.update.rate(done, progress.steps, steps)

    before, after = rate(type(config.run).model_validate(then)), rate(config.run)
    if math.isclose(before, after, rel_tol=1e-3):
        return []
    lengths = [f"run.{key}: {run[key]}" for run in (then, now) for key in LENGTHS if run[key] is not None]
    return [
        f"the learning rate changes from {before:.4g} to {after:.4g}: its schedule was for {lengths[0]}, and is now "
        f"for {lengths[1]}; to stay at {before:.4g}: schedule.kind: constant, optim.lr: {before:.4g}"
    ]


def restore(
    session: Session, origin: ReadableStorage, resume: Resume, data: Mapping[str, Any]
) -> tuple[LoadedCheckpoint, list[str]] | None:
    """Restore the session from the newest usable checkpoint, or the one of `resume.step`; None: there is none.

    A manifest with the right hash may hold an invalid state: then the checkpoint before it is used.

    Args:
        data: identifies this run's data.

    Returns:
        The checkpoint, and notes for the user.

    Raises:
        ConfigError: the checkpoint is of a run with other data, model or seed.
        RunFailed: no checkpoint can be read.
    """
    config = components_of(session).config
    invalid: dict[int, CorruptCheckpoint] = {}
    differences: list[str] = []

    def check(manifest: Manifest) -> Collection[str]:
        recast = check_state(manifest)
        if manifest.step in invalid:
            raise invalid[manifest.step]
        differences[:] = changes(manifest, config, data)
        if differences and not resume.accept_changes:
            listed = "".join(f"\n  {line}" for line in differences)
            raise ConfigError(
                f"the checkpoint of step {manifest.step} is of a run with other data, model or seed:{listed}\n"
                f"--accept-changes resumes from it anyway, --fresh starts over (in Python: accept_changes=True, "
                f"fresh=True)",
                FailureKind.OTHER_DATA,
            )
        return recast

    axis = components_of(session).world.axis
    while (loaded := load_newest(origin, axis, session.state(), resume.step, check, resume.until)) is not None:
        step = loaded.manifest.step
        try:
            session.restore(loaded.state)
        except (AttributeError, TypeError, LookupError, ValueError) as error:
            invalid[step] = _invalid(error)
            continue
        notes = [
            f"resumes from step {step:,} ({loaded.manifest.samples:,} samples)",
            *(f"{name} could not be used: {why}" for name, why in loaded.broken.items()),
            *(f"resumes although this changed: {line}" for line in differences),
            *_other_rate(session, loaded.manifest),
        ]
        return loaded, notes
    return None

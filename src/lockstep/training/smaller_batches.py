"""Makes the micro-batches of a run smaller when memory runs out, and keeps their sizes for its next start.

    round 1   batch.micro_size 8, accumulation 2    out of memory in update 13
    round 2   batch.micro_size 4, accumulation 4    update 13 again: the same samples, in the same order
    round 3   batch.micro_size 8, accumulation 2    after recovery.grow_after updates; if memory runs out again, later

RUN/logs/out_of_memory.json lists the sizes with which memory has run out. They count as long as nothing changes that
determines how much memory a rank needs: model, strategy, number of ranks, ways to save memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.config.writing import to_plain
from lockstep.core.errors import ConfigError
from lockstep.core.files import MAX_JSON_BYTES, read_bounded, write_atomically
from lockstep.core.ranks import started_by_lockstep
from lockstep.data.bad_samples import NONE_DEADLY, Deadly
from lockstep.launch.deadly_samples import FILE, DeadlySamples
from lockstep.launch.failure_kinds import was_killed
from lockstep.monitor.attempts import read_attempts
from lockstep.monitor.folder import LOGS
from lockstep.plan.plan import check_on_ranks
from lockstep.training.launch_folder import begun_folder
from lockstep.training.out_of_memory import sizes_too_large

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.distributed.process_group import World
    from lockstep.launch.ends import End
    from lockstep.training.job import Job
    from lockstep.training.out_of_memory import MemoryFactors

_FILE = "out_of_memory.json"
_MICRO_SIZE = "batch.micro_size"
_KEYS = (_MICRO_SIZE, "evaluation.micro_size")
_SETTINGS = ("model", "objective", "parallel", "memory", "precision", "transforms")
"""Sections of the config that determine how much memory a rank needs."""


def half(size: int) -> int:
    """Return the size of micro-batches of which there are twice as many."""
    return -(-size // 2)


@dataclass
class SmallerBatches:
    """The sizes of a launch's micro-batches, round after round.

    Attributes:
        job: The next round's.
        folder: Of the run.
        ranks: On all hosts.
        halvings: How many times a size was halved in this launch.
        growths: How many times since then it was doubled again.
    """

    job: Job
    folder: Path
    ranks: int
    halvings: int = field(default=0, init=False)
    growths: int = field(default=0, init=False)
    _attempts: int = field(init=False)
    _too_large: dict[str, int] = field(init=False)
    _config: Config = field(init=False)
    _pause: int | None = field(init=False)

    def __post_init__(self) -> None:
        """Use what an earlier launch has learned, unless the run starts over."""
        if self.job.resume.fresh:
            (self.folder / LOGS / _FILE).unlink(missing_ok=True)
        self._attempts = len(read_attempts(self.folder))
        self._config = self.job.config
        self._pause = self._config.recovery.grow_after
        self._use(too_large(self.folder, self._config, self.ranks))

    def after(self, end: End) -> str:
        """Make the next round's micro-batches smaller after this end; return what changes, empty if nothing can."""
        sizes = {key: size for key, size in (end.too_large or self._size_of_killed(end)).items() if size > 1}
        smaller = with_smaller(self.job.config, sizes)
        if not sizes or not _is_possible(smaller, self.ranks):
            return ""
        if self.growths and self._pause is not None:
            self._pause *= 2
        self.halvings, self.growths = self.halvings + 1, 0
        self._use({**self._too_large, **sizes})
        _record(self.folder, self._too_large, self.job.config, self.ranks)
        return changes(sizes)

    def grow(self) -> str:
        """Make the next round's micro-batches twice as large; return what changes."""
        before = {key: half(size) for key, size in self._too_large.items()}
        self.growths += 1
        self._use({key: 2 * size for key, size in self._too_large.items() if size < self._largest(key)})
        _record(self.folder, self._too_large, self.job.config, self.ranks)
        listed = " and ".join(f"{key} grows from {size} to {2 * size} at most" for key, size in before.items())
        return f"{listed} (recovery.grow_after)"

    def _use(self, sizes: dict[str, int]) -> None:
        """Let the next round's micro-batches be smaller than these, and grow later if the config asks for it."""
        self._too_large = sizes
        config = with_smaller(self._config, sizes)
        self.job = replace(self.job, config=config, grow_after=self._pause if config != self._config else None)

    def _largest(self, key: str) -> int:
        """Return the size that the config asks for."""
        name, _, option = key.partition(".")
        size = getattr(getattr(self._config, name), option)
        return -(-self._config.batch.global_size // self.ranks) if size == "auto" else int(size)

    def _size_of_killed(self, end: End) -> Mapping[str, int]:
        """Return the size of the micro-batches of ranks that the kernel has killed; empty if none had begun."""
        attempts = read_attempts(self.folder)
        if not was_killed(end) or len(attempts) <= self._attempts:
            return {}
        size = attempts[-1].number("micro_size")
        return {_MICRO_SIZE: int(size)} if size is not None else {}


def _is_possible(config: Config, ranks: int) -> bool:
    """Return whether the run works with these sizes; some settings need a whole update in one micro-batch."""
    try:
        check_on_ranks(config, ranks)
    except ConfigError:
        return False
    return True


def changes(sizes: Mapping[str, int]) -> str:
    """Return what changes after memory has run out with these sizes, as a sentence without its point."""
    listed = " and ".join(f"{key} is {half(size)} instead of {size}" for key, size in sizes.items())
    kept = ", and the global batch stays as it is" if _MICRO_SIZE in sizes else ""
    return f"{listed} from here on{kept}"


def with_smaller(config: Config, sizes: Mapping[str, int]) -> Config:
    """Return the config with smaller micro-batches where they are as large as these, or larger."""
    for key, size in sizes.items():
        name, _, option = key.partition(".")
        section = getattr(config, name)
        current = getattr(section, option)
        if current == "auto" or current >= size:
            config = config.model_copy(update={name: section.model_copy(update={option: half(size)})})
    return config


def too_large(run: Path, config: Config, ranks: int) -> dict[str, int]:
    """Return the sizes, by their keys, with which the run in a folder has run out of memory, under such settings."""
    sizes, settings = _recorded(run)
    return sizes if settings == _digest(config, ranks) else {}


def _recorded(run: Path) -> tuple[dict[str, int], object]:
    """Return the sizes that a run's folder lists, and the digest of the settings under which they didn't fit."""
    try:
        record = json.loads(read_bounded(run / LOGS / _FILE, MAX_JSON_BYTES))
        sizes = {key: size for key in _KEYS if (size := record["too_large"].get(key)) is not None}
        settings = record["settings"]
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return {}, None
    return (sizes, settings) if all(type(size) is int and size > 1 for size in sizes.values()) else ({}, None)


def _record(run: Path, sizes: Mapping[str, int], config: Config, ranks: int) -> None:
    if not sizes:
        (run / LOGS / _FILE).unlink(missing_ok=True)
        return
    text = json.dumps({"too_large": sizes, "settings": _digest(config, ranks)}) + "\n"
    with suppress(OSError):  # the next start of the run learns it again
        write_atomically(run / LOGS / _FILE, text, durable=False)


# --- ranks that another launcher has started, or none ---------------------------------------------------------------


def remember(error: BaseException, factors: MemoryFactors, config: Config, ranks: int, run: Path) -> None:
    """Record the sizes with which this rank has run out of memory, for the next start of its run."""
    if sizes := sizes_too_large(error, factors):
        _record(run, {**too_large(run, config, ranks), **sizes}, config, ranks)


def with_known(config: Config, job: Job, world: World) -> Config:
    """Return the config with sizes that fit, as far as earlier starts of the run know; the same on all ranks."""
    if started_by_lockstep(os.environ):  # the launcher has done so
        return config
    sizes: object = None
    if world.rank == 0 and not job.resume.fresh:
        folder = begun_folder(config, job, world)
        sizes = too_large(folder, config, world.size) if folder is not None else None
    return with_smaller(config, cast("dict[str, int] | None", world.axis.broadcast(sizes)) or {})


def known_deadly(config: Config, job: Job | None, world: World) -> Deadly:
    """Return the samples whose reading has ended a process of the run, if it leaves bad ones out; on all ranks."""
    if job is None or not config.data.bad_samples.skips:
        return NONE_DEADLY
    folder = begun_folder(config, job, world) if world.rank == 0 else None
    known = NONE_DEADLY if folder is None else DeadlySamples.of(config, folder / LOGS).known()
    return cast("Deadly", world.axis.broadcast(known))


# --- what is shown --------------------------------------------------------------------------------------------------


def sentences_on_sizes(run: Path) -> list[str]:
    """Return a sentence for each size with which the run in a folder has run out of memory."""
    return [f"Memory ran out with {key} {size}, so that it is {half(size)}." for key, size in _recorded(run)[0].items()]


def recovery_notes(run: Path, config: Config, ranks: int) -> list[str]:
    """Return notes on how the run recovers: what has failed before, keys without effect."""
    notes = _notes_on_sizes(run, config, ranks)
    if config.data.bad_samples.skips:
        deadly = DeadlySamples.of(config, run / LOGS).known().reasons
        again = f"delete {LOGS}/{FILE} in the run's folder to read it again"
        notes += [f"sample {index} of data.train is left out: {reason} ({again})" for index, reason in deadly.items()]
    if config.recovery.model_fields_set and config.recovery.ever and not started_by_lockstep(os.environ):
        why = "it is lockstep's launcher that starts ranks again, not another one"
        notes.append(f"recovery.restarts has no effect here: {why}")
    return notes


def _notes_on_sizes(run: Path, config: Config, ranks: int) -> list[str]:
    notes = []
    for key, size in too_large(run, config, ranks).items():
        name, _, option = key.partition(".")
        if (current := getattr(getattr(config, name), option)) == half(size):
            file = f"{LOGS}/{_FILE}"
            notes.append(
                f"{key} is {current}: memory ran out with {size} (delete {file} in the run's folder to try again)"
            )
    return notes


def _digest(config: Config, ranks: int) -> str:
    plain = to_plain(config)
    settings = [plain[name] for name in _SETTINGS]
    further = (
        plain["optim"]["name"],
        plain["optim"]["in_backward"],
        plain["batch"]["global_size"],
        plain["launch"]["device"],
    )
    text = json.dumps([settings, further, ranks], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

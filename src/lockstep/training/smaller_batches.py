"""Makes the micro-batches of a run smaller when memory runs out, and keeps their sizes for its next start.

    round 1   batch.micro_size 8, accumulation 2    out of memory in update 13
    round 2   batch.micro_size 4, accumulation 4    update 13 again: the same samples, in the same order
    round 3   batch.micro_size 8, accumulation 2    after recovery.grow_after updates; if memory runs out again, later

Under activation checkpointing in mode adaptive, activations are computed again first, which changes no bit of the run.

RUN/logs/out_of_memory.json lists the sizes with which memory has run out, and after how many updates they grow. They
count as long as nothing changes that determines how much memory a rank needs: model, strategy, number of ranks, ways to
save memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.config.writing import to_plain
from lockstep.core.errors import ConfigError
from lockstep.core.files import MAX_JSON_BYTES, forget, read_bounded, write_atomically
from lockstep.core.ranks import started_by_lockstep
from lockstep.launch.failure_kinds import was_killed
from lockstep.monitor.attempts import read_attempts
from lockstep.monitor.folder import LOGS
from lockstep.plan.batch import half
from lockstep.plan.plan import check_on_ranks
from lockstep.training.deadly_samples import notes_on_deadly
from lockstep.training.launch_folder import begun_folder, resumed, starts_over
from lockstep.training.out_of_memory import sizes_too_large

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.distributed.process_group import World
    from lockstep.launch.ends import End
    from lockstep.training.job import Job
    from lockstep.training.out_of_memory import MemoryFactors
    from lockstep.training.resuming import Resume

_FILE = "out_of_memory.json"
_MICRO_SIZE, _EVALUATION_SIZE = "batch.micro_size", "evaluation.micro_size"
_KEYS = (_MICRO_SIZE, _EVALUATION_SIZE)
_ADAPTIVE = "memory.activation_checkpointing.mode adaptive"
_SETTINGS = ("model", "objective", "parallel", "memory", "precision", "transforms")
"""Sections of the config that determine how much memory a rank needs."""


@dataclass(frozen=True, slots=True)
class Learned:
    """The lessons of a run that has run out of memory.

    Attributes:
        too_large: Sizes of micro-batches, by their keys, with which it ran out and smaller ones may do.
        recomputes: Whether it ran out while activation checkpointing, in mode adaptive, was off.
        pause: Updates with smaller micro-batches until they grow, if it isn't `recovery.grow_after`.
        grown: Whether micro-batches have grown since memory ran out for the last time.
    """

    too_large: Mapping[str, int] = field(default_factory=dict)
    recomputes: bool = False
    pause: int | None = None
    grown: bool = False

    def applied(self, config: Config) -> Config:
        """Return the config with smaller micro-batches where they are as large as these, or larger."""
        if self.recomputes:
            config = _recomputing(config)
        for key, size in self.too_large.items():
            name, _, option = key.partition(".")
            section = getattr(config, name)
            current = getattr(section, option)
            if current == "auto" or current >= size:
                config = config.model_copy(update={name: section.model_copy(update={option: half(size)})})
        return config

    def after(self, sizes: Mapping[str, int], config: Config) -> Learned:
        """Return what is known after a round with a config ran out of memory with these sizes."""
        if _MICRO_SIZE in sizes and _recomputing(config) is not config:
            return replace(self, recomputes=True)
        pause, grow_after = self.pause, config.recovery.grow_after
        if self.grown and grow_after is not None:
            pause = 2 * (pause or grow_after)
        too_large = {**self.too_large, **{key: size for key, size in sizes.items() if size > 1}}
        return replace(self, too_large=too_large, pause=pause, grown=False)


_NOTHING = Learned()


def _recomputing(config: Config) -> Config:
    """Return the config with activations computed again from the start, if mode adaptive asks for it when needed."""
    options = config.memory.activation_checkpointing
    if options.mode != "adaptive":
        return config
    options = type(options)(mode="full", every=options.every, modules=options.modules)
    memory = config.memory.model_copy(update={"activation_checkpointing": options})
    return config.model_copy(update={"memory": memory})


@dataclass
class SmallerBatches:
    """The sizes of a launch's micro-batches, round after round.

    Attributes:
        job: The next round's.
        folder: Of the run.
        ranks: On all hosts.
        halvings: How many times a size was halved in this launch.
    """

    job: Job
    folder: Path
    ranks: int
    halvings: int = field(default=0, init=False)
    _attempts: int = field(init=False)
    _learned: Learned = field(init=False)
    _config: Config = field(init=False)

    def __post_init__(self) -> None:
        """Use what an earlier launch has learned, unless the run starts over."""
        fresh = self.job.resume.fresh
        if fresh:
            forget(self.folder / LOGS / _FILE)
        self._attempts = len(read_attempts(self.folder))
        self._config = self.job.config
        self._use(_NOTHING if fresh else learned(self.folder, self._config, self.ranks))

    def after(self, end: End) -> str:
        """Let the next round need less memory after this end; return what changes, empty if nothing can."""
        known, now = self._learned, self._learned_from(end)
        if now is None:
            return ""
        self.halvings += 1
        self._use(now)
        _record(self.folder, now, self._config, self.ranks)
        return changes(known, now)

    def may_follow(self, end: End) -> bool:
        """Return whether the next round could need less memory after this end; change nothing."""
        return self._learned_from(end) is not None

    def _learned_from(self, end: End) -> Learned | None:
        """Return what is known after this end; None: no size can be smaller."""
        config = self.job.config
        now = self._learned.after(end.too_large or self._size_of_killed(end), config)
        changed = now.applied(config)
        return None if changed == config or not self._is_possible(changed) else now

    def grow(self) -> str:
        """Make the next round's micro-batches twice as large; return what changes."""
        sizes = self._learned.too_large
        larger = {key: 2 * size for key, size in sizes.items() if size < self._largest(key)}
        self._use(replace(self._learned, too_large=larger, grown=True))
        _record(self.folder, self._learned, self._config, self.ranks)
        before = {key: half(size) for key, size in sizes.items()}
        listed = " and ".join(f"{key} grows from {size} to {2 * size} at most" for key, size in before.items())
        return f"{listed} (recovery.grow_after)"

    def _use(self, known: Learned) -> None:
        """Let the next round need less memory, and its micro-batches grow later if the config asks for it."""
        self._learned = known
        config = known.applied(self._config)
        grows = config.batch != self._config.batch or config.evaluation != self._config.evaluation
        pause = self._config.recovery.grow_after and (known.pause or self._config.recovery.grow_after)
        self.job = replace(self.job, config=config, grow_after=pause if grows else None)

    def _largest(self, key: str) -> int:
        """Return the size that the config asks for."""
        name, _, option = key.partition(".")
        size = getattr(getattr(self._config, name), option)
        return -(-self._config.batch.global_size // self.ranks) if size == "auto" else int(size)

    def _is_possible(self, changed: Config) -> bool:
        """Return whether the run works with these sizes.

        Some settings need a whole update in one micro-batch, and batch norm more than one sample in each.
        """
        size, before = changed.batch.micro_size, self.job.config.batch.micro_size
        if size != "auto" and size != before and size < (self._of_last_attempt("least_micro_size") or 1):
            return False
        try:
            check_on_ranks(changed, self.ranks)
        except ConfigError:
            return False
        return True

    def _of_last_attempt(self, fact: str) -> int | None:
        """Return a fact of the newest attempt of this launch; None if none had begun."""
        attempts = read_attempts(self.folder)
        number = attempts[-1].number(fact) if len(attempts) > self._attempts else None
        return None if number is None else int(number)

    def _size_of_killed(self, end: End) -> Mapping[str, int]:
        """Return the size of the micro-batches of ranks that the kernel has killed; empty if none had begun."""
        if not was_killed(end):
            return {}
        is_evaluated = end.evaluates or end.evaluation_set is not None
        key, fact = (_EVALUATION_SIZE, "evaluation_size") if is_evaluated else (_MICRO_SIZE, "micro_size")
        size = self._of_last_attempt(fact)
        return {} if size is None else {key: size}


def changes(before: Learned, now: Learned) -> str:
    """Return what changes after memory has run out, as a sentence without its point."""
    if now.recomputes and not before.recomputes:
        return f"activations are computed again from here on ({_ADAPTIVE})"
    sizes = {key: size for key, size in now.too_large.items() if before.too_large.get(key) != size}
    listed = " and ".join(f"{key} is {half(size)} instead of {size}" for key, size in sizes.items())
    kept = ", and the global batch stays as it is" if _MICRO_SIZE in sizes else ""
    return f"{listed} from here on{kept}"


def learned(run: Path, config: Config, ranks: int) -> Learned:
    """Return what the run in a folder has learned from running out of memory, under such settings."""
    known, settings = _recorded(run)
    return known if settings == _digest(config, ranks) else _NOTHING


def _recorded(run: Path) -> tuple[Learned, object]:
    """Return what a run's folder lists, and the digest of the settings under which memory ran out."""
    try:
        record = json.loads(read_bounded(run / LOGS / _FILE, MAX_JSON_BYTES))
        sizes = {key: size for key in _KEYS if (size := record["too_large"].get(key)) is not None}
        known = Learned(sizes, record.get("recomputes") is True, record.get("pause"), record.get("grown") is True)
        settings = record["settings"]
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return _NOTHING, None
    valid = all(type(size) is int and size > 1 for size in sizes.values())
    valid &= known.pause is None or (type(known.pause) is int and known.pause > 0)
    return (known, settings) if valid else (_NOTHING, None)


def _record(run: Path, known: Learned, config: Config, ranks: int) -> None:
    if known == _NOTHING:
        forget(run / LOGS / _FILE)
        return
    content = {**asdict(known), "settings": _digest(config, ranks)}
    text = json.dumps(content) + "\n"
    with suppress(OSError):  # the next start of the run learns it again
        write_atomically(run / LOGS / _FILE, text, durable=False)


# --- ranks that another launcher has started, or none ---------------------------------------------------------------


def remember(error: BaseException, factors: MemoryFactors, config: Config, ranks: int, run: Path) -> None:
    """Record the sizes with which this rank has run out of memory, for the next start of its run."""
    if sizes := sizes_too_large(error, factors):
        _record(run, learned(run, config, ranks).after(sizes, config), config, ranks)


def with_known(config: Config, job: Job, world: World) -> Config:
    """Return the config with sizes that fit, as far as earlier starts of the run know; the same on all ranks.

    Where the run starts over, ranks know only what others of the same launch have learned before them.
    """
    if started_by_lockstep(os.environ):  # the launcher has done so
        return config
    known, folder = _NOTHING, begun_folder(config, job, world)
    if not starts_over(resumed(job.resume, world, folder)) and world.rank == 0 and folder is not None:
        known = learned(folder, config, world.size)
    return cast("Learned", world.axis.broadcast(known)).applied(config)


def forget_sizes(resume: Resume, run: Path) -> None:
    """Forget the sizes of an earlier run in the folder, if this one starts over there."""
    if starts_over(resume):
        forget(run / LOGS / _FILE)


# --- what is shown --------------------------------------------------------------------------------------------------


def sentences_on_sizes(run: Path) -> list[str]:
    """Return a sentence for each size with which the run in a folder has run out of memory."""
    known, _ = _recorded(run)
    again = [f"Memory ran out, so that activations are computed again ({_ADAPTIVE})."] if known.recomputes else []
    sizes = known.too_large.items()
    return again + [f"Memory ran out with {key} {size}, so that it is {half(size)}." for key, size in sizes]


def allows_larger(run: Path) -> bool:
    """Return whether larger micro-batches may fit: the run in a folder has not run out of memory with such."""
    known, _ = _recorded(run)
    return _MICRO_SIZE not in known.too_large


def recovery_notes(run: Path, config: Config, ranks: int) -> list[str]:
    """Return notes on how the run recovers: what has failed before, keys without effect."""
    notes = [*_notes_on_sizes(run, config, ranks), *notes_on_deadly(run, config)]
    if config.recovery.model_fields_set and config.recovery.ever and not started_by_lockstep(os.environ):
        why = "it is lockstep's launcher that starts ranks again, not another one"
        notes.append(f"recovery.restarts has no effect here: {why}")
    return notes


def _notes_on_sizes(run: Path, config: Config, ranks: int) -> list[str]:
    known, file = learned(run, config, ranks), f"{LOGS}/{_FILE}"
    notes = []
    if known.recomputes and config.memory.activation_checkpointing.mode == "full":
        notes.append(
            f"activations are computed again: memory ran out without ({_ADAPTIVE}; "
            f"delete {file} in the run's folder to try again)"
        )
    for key, size in known.too_large.items():
        name, _, option = key.partition(".")
        if (current := getattr(getattr(config, name), option)) == half(size):
            notes.append(
                f"{key} is {current}: memory ran out with {size} (delete {file} in the run's folder to try again)"
            )
    return notes


def _digest(config: Config, ranks: int) -> str:
    plain = to_plain(_recomputing(config))
    settings = [plain[name] for name in _SETTINGS]
    further = (
        plain["optim"]["name"],
        plain["optim"]["in_backward"],
        plain["batch"]["global_size"],
        plain["launch"]["device"],
    )
    text = json.dumps([settings, further, ranks], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

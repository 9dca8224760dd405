"""Snapshots of which each host has a part: the files of its own ranks, and copies of those of the host before it.

    host a   checkpoints/step-00000470/ part.json, manifest.json, rank-00000.safetensors    copies/step-00000470/  of c
    host b   checkpoints/step-00000470/ part.json, manifest.json, rank-00001.safetensors    copies/step-00000470/  of a
    host c   checkpoints/step-00000470/ part.json, manifest.json, rank-00002.safetensors    copies/step-00000470/  of b

A snapshot exists as long as the hosts that are left have a part of each rank. Parts belong together if the same attempt
of the run has written them. Each manifest lists the files of its host's ranks (`manifest.joined`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.storage import checkpoint_name, names_by_step
from lockstep.core.files import read_bounded

OWN, COPIES = "checkpoints", "copies"
PART = "part.json"
_MOST_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class HostPart:
    """A host's part of a snapshot.

    Attributes:
        run: Id of the run.
        attempt: Identifies the attempt that has written it.
        world: Number of ranks on all hosts.
        ranks: Those whose files it has.
        place: `OWN` or `COPIES`.
    """

    run: str
    attempt: str
    step: int
    world: int
    ranks: tuple[int, ...]
    place: str = OWN

    @property
    def name(self) -> str:
        return checkpoint_name(self.step)

    @property
    def order(self) -> tuple[int, int]:
        """The number of its attempt, and its step: higher for what a run has written later."""
        number = self.attempt.partition("-")[0]
        return int(number) if number.isdecimal() else 0, self.step

    def encoded(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> HostPart:
        """Return the part with these fields. Raises ValueError, TypeError or KeyError."""
        return cls(
            str(fields["run"]),
            str(fields["attempt"]),
            int(fields["step"]),
            int(fields["world"]),
            tuple(int(rank) for rank in fields["ranks"]),
            str(fields["place"]),
        )

    def is_same(self, other: HostPart) -> bool:
        """Return whether the other one is this part, or a copy of it."""
        return (self.run, self.attempt, self.step, self.ranks) == (other.run, other.attempt, other.step, other.ranks)


def parts_in(folder: Path) -> list[HostPart]:
    """Return the parts in a host's memory, those of its own ranks first, by step."""
    parts = []
    for place in (OWN, COPIES):
        with suppress(OSError):
            for name in names_by_step(entry.name for entry in (folder / place).iterdir()).values():
                with suppress(OSError, ValueError, TypeError, KeyError):  # it is being deleted, or another kind's
                    fields = json.loads(read_bounded(folder / place / name / PART, _MOST_BYTES))
                    parts.append(HostPart.of({**fields, "place": place}))
    return parts


@dataclass(frozen=True, slots=True)
class JointSnapshot:
    """A snapshot that the hosts have together.

    Attributes:
        holders: For each rank, the hosts that have its file, by number, and where in their memory.
    """

    step: int
    holders: tuple[tuple[tuple[int, str], ...], ...]

    @property
    def name(self) -> str:
        return checkpoint_name(self.step)


def whole_snapshots(
    hosts: Sequence[Iterable[HostPart]], run: str, is_valid: Callable[[HostPart], bool]
) -> list[JointSnapshot]:
    """Return the snapshots that some hosts have together, one for each step, the newest first.

    Args:
        hosts: The parts that each has.
        is_valid: Whether the run may resume from what a part belongs to.
    """
    groups: dict[tuple[int, str, int], dict[int, list[tuple[int, str]]]] = {}
    for host, parts in enumerate(hosts):
        for part in parts:
            if part.run == run and is_valid(part):
                holders = groups.setdefault((part.step, part.attempt, part.world), {})
                for rank in part.ranks:
                    holders.setdefault(rank, []).append((host, part.place))
    snapshots: dict[int, JointSnapshot] = {}
    for (step, _, world), holders in sorted(groups.items(), reverse=True):
        if step not in snapshots and all(rank in holders for rank in range(world)):
            snapshots[step] = JointSnapshot(step, tuple(tuple(holders[rank]) for rank in range(world)))
    return [*snapshots.values()]


def remove_parts(folder: Path, is_removed: Callable[[HostPart], bool]) -> None:
    """Remove the parts in a host's memory that `is_removed` accepts."""
    import shutil

    for part in parts_in(folder):
        if is_removed(part):
            shutil.rmtree(folder / part.place / part.name, ignore_errors=True)

"""Reads snapshots of a GPU's memory, as torch.cuda.memory makes them: what lived at the peak, what was reserved.

    rank0.10.memory.pickle   segments (what is reserved) of blocks (what is allocated now), and the history of both
    the history, backward    from what lives at the end to what lived at the peak
    owners                   addresses of parameters, buffers and gradients, which the run's rank has added

The file is a pickle of plain values: anything else in it is refused.
"""

from __future__ import annotations

import io
import json
import pickle
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lockstep.config.trust import ENVIRONMENT
from lockstep.core.errors import RunFailed
from lockstep.monitor.profile_spans import PROFILE
from lockstep.simulation.memory import CATEGORIES, Category, Peak, module_of

SUFFIX = ".memory.pickle"
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "foreach_all_gather", "foreach_reduce")
_FREED, _MADE = "free_completed", "alloc"


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The memory of a rank's GPU over some updates.

    Attributes:
        facts: Rank, updates and device, as of a trace.
        peak: Bytes of blocks at their peak, by category and by module, or by the line of code where that isn't known.
        reserved: Bytes that the allocator has from the driver, at the end.
        allocated: Bytes of blocks, at the end.
        rounding: Bytes of these that no tensor has asked for.
        largest_gap: Bytes of the largest reserved piece that is free.
    """

    path: Path
    facts: Mapping[str, Any]
    peak: Peak
    reserved: int
    allocated: int
    rounding: int
    largest_gap: int

    @property
    def rank(self) -> int:
        return int(self.facts["rank"])

    @property
    def unused(self) -> int:
        """Bytes that are reserved and hold nothing, at the end."""
        return self.reserved - self.allocated


def on_gpus(run: Path) -> bool:
    """Return whether a run computes on GPUs, as its environment.json has it."""
    try:
        environment = json.loads((run / ENVIRONMENT).read_text(encoding="utf-8"))
        return bool(environment.get("gpus"))
    except (OSError, ValueError, AttributeError):
        return False


def snapshot_files(run: Path) -> list[Path]:
    """Return the snapshots of a run, the newest of each rank."""

    def key(path: Path) -> tuple[int, int]:
        rank, first = path.name.removesuffix(SUFFIX).removeprefix("rank").split(".")
        return int(rank), int(first)

    newest = {key(path)[0]: path for path in sorted((run / PROFILE).glob(f"rank*.*{SUFFIX}"), key=key)}
    return list(newest.values())


def read_snapshot(path: Path) -> MemorySnapshot:
    """Read a snapshot. Raises RunFailed if the file is none of Lockstep's, or is damaged."""
    try:
        content = _PlainValues(io.BytesIO(path.read_bytes())).load()
        return _snapshot(path, content)
    except (OSError, EOFError, pickle.UnpicklingError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFailed(f"{path} is no snapshot that Lockstep has written: {error!r}; record it again") from error


class _PlainValues(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a snapshot has only plain values")


@dataclass(frozen=True, slots=True)
class _Allocation:
    """A block that lived at some time.

    Attributes:
        made: Place of its allocation in the history; -1: before.
        at_end: Whether it lives at the end.
    """

    address: int
    size: int
    made: int
    at_end: bool
    frames: Sequence[Mapping[str, Any]]


def _snapshot(path: Path, content: Mapping[str, Any]) -> MemorySnapshot:
    own = content["lockstep"]
    device = int(own.get("index", 0))
    segments = [each for each in content["segments"] if each.get("device", device) == device]
    blocks = [(address, block) for segment in segments for address, block in _addressed(segment)]
    live = {address: block for address, block in blocks if block["state"].startswith("active")}
    free = [block["size"] for _, block in blocks if not block["state"].startswith("active")]
    traces = content["device_traces"]
    history = [entry for entry in traces[device] if entry["action"] in (_MADE, _FREED)] if device < len(traces) else []
    allocations, peak = _at_peak(live, history)
    owners = sorted((int(address), str(category), str(name)) for address, category, name in own["owners"])
    allocated = sum(block["size"] for block in live.values())
    rounding = sum(block["size"] - block.get("requested_size", block["size"]) for block in live.values())
    return MemorySnapshot(
        path,
        own["facts"],
        _peak(peak, allocations, owners),
        sum(segment["total_size"] for segment in segments),
        allocated,
        rounding,
        max(free, default=0),
    )


def _addressed(segment: Mapping[str, Any]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    address = segment["address"]
    for block in segment["blocks"]:
        yield block.get("address", address), block
        address += block["size"]


def _at_peak(
    live: Mapping[int, Mapping[str, Any]], history: Sequence[Mapping[str, Any]]
) -> tuple[list[_Allocation], int]:
    """Return what lived when most bytes did, and these bytes."""
    made: dict[int, int] = {}
    lives: list[tuple[_Allocation, int]] = []  # with the place of its end in the history
    for place, entry in enumerate(history):
        address = entry["addr"]
        if entry["action"] == _MADE:
            made[address] = place
            continue
        start = made.pop(address, -1)
        frames = history[start]["frames"] if start >= 0 else []
        lives.append((_Allocation(address, entry["size"], start, False, frames), place))
    for address, block in live.items():
        start = made.get(address, -1)
        frames = history[start]["frames"] if start >= 0 else []
        lives.append((_Allocation(address, block["size"], start, True, frames), len(history)))
    changes = Counter[int]()
    for allocation, end in lives:
        changes[allocation.made] += allocation.size
        changes[end] -= allocation.size
    total = highest = 0
    at = -1
    for place in sorted(changes):
        total += changes[place]
        if total > highest:
            highest, at = total, place
    return [allocation for allocation, end in lives if allocation.made <= at < end], highest


def _peak(size: int, allocations: Iterable[_Allocation], owners: Sequence[tuple[int, str, str]]) -> Peak:
    by_category: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    by_module: dict[str, Counter[Category]] = {}
    for allocation in allocations:
        category, module = _owner(allocation, owners) or _by_frames(allocation)
        by_category[category] += allocation.size
        by_module.setdefault(module, Counter())[category] += allocation.size
    return Peak(size, by_category, {module: dict(sizes) for module, sizes in by_module.items()})


def _owner(allocation: _Allocation, owners: Sequence[tuple[int, str, str]]) -> tuple[Category, str] | None:
    """Return what a block that lives at the end holds: the addresses were taken then."""
    if not allocation.at_end:
        return None
    first = bisect_right(owners, (allocation.address,))
    inside = []
    for address, category, name in owners[first:]:
        if address >= allocation.address + allocation.size:
            break
        inside.append((category, module_of(name)))
    if not inside:
        return None
    category, module = inside[0]
    known: Category = next(each for each in CATEGORIES if each == category)
    return known, module if all(each == (category, module) for each in inside) else "(several modules)"


def _by_frames(allocation: _Allocation) -> tuple[Category, str]:
    """Return what a block holds by the Python code that made it; a backward has none, it runs in torch's threads."""
    frames = allocation.frames
    if allocation.made < 0:
        return "optimizer", "(made before the recording)"
    place = next((_line(frame) for frame in frames if not _is_library(frame["filename"])), "")
    names = [frame["name"] for frame in frames]
    if any(name in _COLLECTIVES for name in names):
        return "communication", place
    if any("/torch/optim/" in frame["filename"] or "/lockstep/optim/" in frame["filename"] for frame in frames):
        return "optimizer", place
    if "forward" in names or "_call_impl" in names:
        return "activations", place
    if not frames or "_engine_run_backward" in names or "backward" in names:
        return "gradients", "(a backward)"
    return "other", place


def _line(frame: Mapping[str, Any]) -> str:
    return f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}"


def _is_library(filename: str) -> bool:
    return "/torch/" in filename or "/lockstep/" in filename or filename.startswith("<") or filename == "??"

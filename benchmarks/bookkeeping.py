"""Measures the bookkeeping of checkpoints at many ranks: one rank at a time, simulated in one process.

python benchmarks/bookkeeping.py --ranks 64 256 1024 --tensors 10000

    a process for each number of ranks
        save      as a middle rank and as rank 0: Lockstep's own state, plan, copy, hashes, file; rank 0 publishes
        resume    as a middle rank and as rank 0 of the same number of ranks; as a middle rank of half as many

A model is sharded by FSDP over torch's fake process group, and has AdamW's state: parameters, two moments and a step
count each. A rank holds four rows or fewer of each, so that what is measured is the work for each tensor and not that
for its bytes. What other ranks would answer follows from the rank's own answer, because they hold the same tensors;
files that are never read aren't written. The time of collectives is not part of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rounds import about_here, in_processes, markdown, report, save

RANKS, TENSORS = (64, 256, 1024), 10_000
_ENTRIES = 4  # tensors of a parameter: itself, two moments, a step count
_SAVES = 11
_Result = TypeVar("_Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--tensors", type=int, default=TENSORS)
    parser.add_argument("--alone", nargs=4, metavar=("VERB", "FOLDER", "RANK", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        verb, folder, rank, name = args.alone
        act = _save if verb == "save" else _resume
        report(act(Path(folder), args.ranks[0], int(rank), args.tensors, name))
        return
    here = about_here(["torch", "xxhash"])
    rows = {}
    for ranks in args.ranks:
        rows[str(ranks)] = measured(ranks, args.tensors)
        print(ranks, json.dumps(rows[str(ranks)], indent=1), file=sys.stderr, flush=True)
    command = f"python benchmarks/bookkeeping.py --ranks {' '.join(map(str, args.ranks))} --tensors {args.tensors}"
    results = {"command": command, "rounds": 1, "machine": here, "tensors": args.tensors, "after": rows}
    save("bookkeeping", {**_before(), **results})
    print(table({**_before(), **results}))


def _before() -> dict[str, Any]:
    """Return what was measured before the present form of checkpoints, which this script can't measure again."""
    path = Path(__file__).parent / "results" / "bookkeeping.json"
    kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {"before": kept.get("before", {})}


# --- one number of ranks ------------------------------------------------------------------------------------------


def measured(ranks: int, tensors: int) -> dict[str, float]:
    """Return seconds and bytes of a save and of resumes; each rank is a process of its own."""
    middle = ranks // 2
    acts = [
        ("save", ranks, middle + 1, ""),  # its file is read by half as many ranks
        ("save", ranks, middle, "middle rank"),
        ("save", ranks, 0, "rank 0"),
        ("resume", ranks, middle, "middle rank"),
        ("resume", ranks, 0, "rank 0"),
        ("resume", ranks // 2, middle // 2, "half the ranks"),
    ]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for verb, number, rank, name in acts:
            arguments = ["--alone", verb, folder, str(rank), name, "--ranks", str(number), "--tensors", str(tensors)]
            reported = in_processes(__file__, arguments, 1)
            figures.update(reported if name else {})
    return figures


def _save(folder: Path, ranks: int, rank: int, tensors: int, name: str) -> dict[str, float]:
    """Save as one rank, several times: the plan is made in the first."""
    import torch

    from lockstep.checkpoint.saving import RunMetadata, Saver, StepMetadata
    from lockstep.core.process_settings import paused_collection

    _join(ranks, rank)
    figures: dict[str, list[float]] = {}
    live = _live_state(ranks, tensors)
    saver = Saver(_storage(folder), _Axis(ranks, rank), torch.device("cpu"), RunMetadata("run", {}, {}))
    for step in range(1, _SAVES + 1):
        before = _peak_from_here()
        metadata = StepMetadata(step, 1, 1, {})
        with paused_collection():  # as the run does
            state, took = _timed(live)
        figures.setdefault("state", []).append(took)
        _, started = _timed(partial(saver.start, state, metadata))
        del state
        _, collected = _timed(partial(_make_objects, 1000))  # a garbage collection that a save has made due
        figures.setdefault("plan and copy", []).append(round(started + collected, 4))
        figures.setdefault("main thread", []).append(round(took + started + collected, 4))
        figures.setdefault("background", []).append(_timed(saver._save.join, time.process_time)[1])
        if rank == 0:
            figures.setdefault("publishing", []).append(_timed(saver.finish, time.process_time)[1])
            assert [outcome.failure for outcome in saver.outcomes()] == [None]
        saver._save = None  # the others don't vote
        figures.setdefault("GiB", []).append(round(_peak() - before, 3))
    named = {f"{name}: first save, {what}": values[0] for what, values in figures.items()}
    named |= {f"{name}: later save, {what}": median(values[1:]) for what, values in figures.items()}
    named[f"{name}: longest of {_SAVES - 1} later saves, main thread"] = max(figures["main thread"][1:])
    if rank == 0:
        named["manifest bytes"] = (folder / "step-00000001" / "manifest.json").stat().st_size
    return named


def _make_objects(number: int) -> list[list[None]]:
    return [[] for _ in range(number)]


def _resume(folder: Path, ranks: int, rank: int, tensors: int, name: str) -> dict[str, float]:
    from lockstep.checkpoint.loading import load_newest

    _join(ranks, rank)
    state = _live_state(ranks, tensors)()
    manifest = (folder / "step-00000001" / "manifest.json").read_bytes()
    step_counts = bytes(4 * (tensors // _ENTRIES))  # which rank 0 reads for all
    axis = _Axis(ranks, rank, [["step-00000001"], manifest, step_counts])
    before = _peak_from_here()
    loaded, seconds = _timed(lambda: load_newest(_storage(folder), axis, state, 1), time.process_time)
    assert loaded is not None
    assert not loaded.broken
    return {f"{name}: resume": seconds, f"{name}: resume, GiB": round(_peak() - before, 3)}


def _live_state(ranks: int, tensors: int) -> Callable[[], Any]:
    """Return a function that returns the live state of a model with this number of tensors, sharded over all ranks."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lockstep.optim.fused import fused_adam
    from lockstep.sharding.model_state import ModelState
    from lockstep.sharding.parameter_shards import parameter_shards

    most = max(RANKS)
    shapes = [(2 * most, 8), (4 * most, 4), (most,), (most, 16)]
    model = nn.Module()
    model.weights = nn.ParameterList(
        nn.Parameter(torch.zeros(shapes[number % len(shapes)])) for number in range(tensors // _ENTRIES)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    shards = parameter_shards(model)
    names, parameters = [shard.name for shard in shards], [shard.local for shard in shards]
    group: dict[str, Any] = {"params": parameters, "names": names, "lr": 1e-3, "lr_scale": 1.0, "weight_decay": 0.0}
    optimizer = fused_adam([group], (0.9, 0.99), 1e-8, decoupled=True)
    state = ModelState(model, optimizer, shards={shard.name: shard for shard in shards})
    return state.live_state


def _join(ranks: int, rank: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


class _Axis:
    """All ranks, of which one is simulated: the others answer what it does."""

    def __init__(self, size: int, rank: int, broadcasts: Iterable[object] = ()) -> None:
        self.size = size
        self.rank = rank
        self._broadcasts = iter(broadcasts)

    def gather(self, value: object) -> list[object]:
        return [value] * self.size

    def broadcast(self, value: object) -> object:
        return value if self.rank == 0 else next(self._broadcasts)

    def barrier(self) -> None:
        """Wait for no rank: the others are simulated."""

    def swap(self, *_: object) -> None:
        """Receive what others have read: nothing arrives here."""


def _storage(folder: Path) -> Any:
    """Return a storage in which each rank that isn't simulated has recorded a file like the last one's."""
    from lockstep.checkpoint.local import LocalDraft, LocalStorage

    class Draft(LocalDraft):
        record = b""

        def read(self, file: str) -> bytes:
            path = self._draft / file
            if path.exists():
                Draft.record = path.read_bytes()
            return Draft.record or next(self._draft.glob("rank-*.json")).read_bytes()

        def remove(self, file: str) -> None:
            (self._draft / file).unlink(missing_ok=True)

    class Storage(LocalStorage):
        def begin(self, name: str) -> Draft:
            (folder / f".draft-{name}").mkdir(exist_ok=True)
            return Draft(folder / f".draft-{name}", folder / name)

        def names(self) -> list[str]:
            return ["step-00000001"]

    return Storage(folder)


def _timed(call: Callable[[], _Result], clock: Callable[[], float] = time.thread_time) -> tuple[_Result, float]:
    """Return the seconds that a call computes, also on a machine that does other things: of this thread, or of all."""
    began = clock()
    result = call()
    return result, round(clock() - began, 4)


def _peak_from_here() -> float:
    """Begin to measure the peak of memory; return what is used now, in GiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 2**20


# --- the table ----------------------------------------------------------------------------------------------------


def table(results: Mapping[str, Any]) -> str:
    """Return the table in Markdown, from what `main` wrote to results/bookkeeping.json."""
    columns: dict[str, Mapping[str, float]] = {}
    for ranks, figures in results["after"].items():
        if ranks in results["before"]:
            columns[f"{ranks} ranks, version 1"] = results["before"][ranks]
        columns[f"{ranks} ranks"] = figures
    rows = []
    for name in next(iter(results["after"].values())):
        label, unit = (
            (name, 1.0) if "GiB" in name else ("manifest, MB", 1e6) if "bytes" in name else (f"{name}, s", 1.0)
        )
        rows.append([label, *(f"{of[name] / unit:,.3f}" if name in of else "" for of in columns.values())])
    return markdown([f"{results['tensors']:,} tensors", *columns], rows)


if __name__ == "__main__":
    main()

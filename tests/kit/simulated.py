"""Runs on the simulated accelerator, each rank in a process of its own: updates, an evaluation, a save.

    simulated([config, ...], ranks) --> [[Simulated on rank 0, on rank 1, ...] for each config]

Ranks exchange objects over a store, so that a checkpoint is planned and published by all of them; tensors are not
exchanged.
"""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch.distributed as dist

from kit.worlds import in_world
from lockstep.assembly.user_objects import UserObjects
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.distributed import host_group
from lockstep.simulation import device
from lockstep.simulation.groups import BACKENDS
from lockstep.simulation.ranks import SimulatedRank, simulated_rank
from lockstep.training.assemble import assemble

UPDATES = 6  # in the second, DDP rebuilds its buckets; in 1, 2, 3 and 5 parameters are watched, and after 4


@dataclass
class Simulated:
    """What a rank has done.

    Attributes:
        syncs: points of the last update, in steady state, at which the host waits for the accelerator.
        refusal: the first line of the error with which the config was refused.
        failure: what else went wrong.
        files: names of the files of the checkpoint.
        collectives: names of those of the last update.
    """

    syncs: list[str] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    refusal: str = ""
    failure: str = ""
    files: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        """What the table of cells has."""
        return self.failure or (f"refused: {self.refusal}" if self.refusal else "runs")


def simulated(configs: list[dict[str, Any]], ranks: int) -> list[list[Simulated]]:
    """Run each config on all ranks."""
    by_rank = in_world(ranks, _rank_of_all, configs, ranks, patience=600)
    return [list(rows) for rows in zip(*by_rank, strict=True)]


def _rank_of_all(configs: list[dict[str, Any]], ranks: int) -> list[Simulated]:
    rank = int(os.environ["RANK"])
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=timedelta(seconds=300))
    made = []
    for number, config in enumerate(configs):
        made.append(one_rank(config, rank, ranks, dist.PrefixStore(f"cell {number}", store)))
    store.set(f"done {rank}", b"")
    if rank == 0:
        store.wait([f"done {other}" for other in range(ranks)])  # the store ends with this rank
    return made


def one_rank(
    config: dict[str, Any], rank: int, ranks: int, store: dist.Store | None, objects: UserObjects | None = None
) -> Simulated:
    """Run a config on one rank of this process."""
    result, began = Simulated(), time.perf_counter()
    try:
        folder = _shared_folder(rank, store)
        with simulated_rank(rank, ranks) as simulation, _exchanging(store):
            _run(config, simulation, folder, result, objects or UserObjects())
    except ConfigError as error:
        result.refusal = str(error)
    except OtherRankFailed:
        result.failure = "another rank failed"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
        result.failure = (
            f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]} at {' < '.join(where[:-9:-1])}"
        )
    finally:
        if store is not None:
            store.set(f"ended {rank}", b"")
        if rank == 0:
            if store is not None:
                store.wait([f"ended {other}" for other in range(ranks)])
            shutil.rmtree(folder, ignore_errors=True)
    if "deepspeed" in sys.modules:  # its engines wait for the accelerator when they are deleted: not in a later run
        gc.collect()
    result.seconds = time.perf_counter() - began
    return result


class OtherRankFailed(RuntimeError):
    """Another rank has failed."""


class _Objects:
    """The objects of all ranks, by a store; it takes the place of a host group, too."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._exchanged: Counter[tuple[int, ...]] = Counter()

    def gather(self, objects: list[Any], own: object, group: dist.ProcessGroup | None = None) -> None:
        device.note_wait("all_gather_object")
        objects[:] = self.exchange(own, group)

    def broadcast(
        self, objects: list[Any], src: int | None = None, group: Any = None, *unused: object, group_src: int = 0
    ) -> None:
        device.note_wait("broadcast_object_list")
        root = group_src if src is None else dist.get_process_group_ranks(group).index(src)
        objects[:] = cast("list[Any]", self.exchange(list(objects), group)[root])

    def exchange(self, own: object, group: dist.ProcessGroup | None) -> list[object]:
        ranks = tuple(dist.get_process_group_ranks(group))
        self._exchanged[ranks] += 1
        prefix = f"{ranks}/{self._exchanged[ranks]}"
        keys = [f"{prefix}/{rank}" for rank in ranks]
        self._store.set(f"{prefix}/{dist.get_rank()}", pickle.dumps(own))
        while not self._store.check(keys):
            if self._store.check(["failed"]):
                raise OtherRankFailed("another rank has failed")
            time.sleep(0.002)
        return [pickle.loads(self._store.get(key)) for key in keys]


class _HostGroup:
    def __init__(self, group: dist.ProcessGroup, objects: _Objects) -> None:
        self._group, self._objects = group, objects

    def gather(self, value: object) -> list[object]:
        return self._objects.exchange(value, self._group)

    def broadcast(self, value: object) -> object:
        return self.gather(value)[0]

    def numbers(self, own: int) -> list[int]:
        return cast("list[int]", self.gather(own))


@contextmanager
def _exchanging(store: Any) -> Iterator[None]:
    """Exchange objects with the other ranks' processes over a store; None: every rank has this one's."""
    if store is None:
        yield
        return
    objects = _Objects(store)
    try:
        with (
            patch.object(dist, "all_gather_object", objects.gather),
            patch.object(dist, "broadcast_object_list", objects.broadcast),
            patch.dict(host_group.makers, {BACKENDS[device.NAME]: lambda group: _HostGroup(group, objects)}),
        ):
            yield
    except BaseException:
        store.set("failed", b"")
        raise


def _shared_folder(rank: int, store: dist.Store | None) -> str:
    if store is None or rank == 0:
        folder = tempfile.mkdtemp(prefix="lockstep-simulated-")
        if store is not None:
            store.set("folder", folder)
        return folder
    return store.get("folder").decode()


def _run(
    config: dict[str, Any], simulation: SimulatedRank, folder: str, result: Simulated, objects: UserObjects
) -> None:
    session = assemble(validate(config).config, simulation.world, objects)
    try:
        saves = session.checkpoints(folder)
        for batch in session.batches():
            simulation.execution.syncs.clear()
            simulation.collectives.clear()
            session.accumulate(batch)
            session.commit()
            if session.progress.steps == UPDATES:
                break
        result.syncs = [str(sync) for sync in simulation.execution.syncs]
        result.collectives = [collective.name for collective in simulation.collectives]
        session.evaluate()
        saves.save()
        failures = [report.failure for report in saves.finish() if report.failure is not None]
        assert not failures, failures
        result.files = sorted(path.name for path in Path(folder, f"step-{UPDATES:08d}").glob("*"))
    finally:
        session.close()

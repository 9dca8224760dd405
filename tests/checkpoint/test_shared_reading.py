"""Which rank reads what several hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.checkpoint.loading import SharedReading
from lockstep.checkpoint.manifest import GridEntry, Manifest, TensorEntry
from lockstep.checkpoint.write_plan import Holders
from lockstep.distributed.shard_boxes import TensorInfo

RANKS = 3
WRITERS = {"model.a": 2, "model.b": 0, "model.c": 1}


def read_by(rank: int, ranks_that_wrote: int) -> list[str]:
    """Return the tensors that a rank reads itself, of a model that all ranks hold whole."""
    info = TensorInfo("float32", (4,))
    held = Holders(None, [(each,) for each in range(RANKS)], [*WRITERS], [16] * len(WRITERS))
    plan: Any = SimpleNamespace(groups=[held], infos=dict.fromkeys(WRITERS, info))
    manifest = Manifest.model_construct(
        ranks=ranks_that_wrote,
        grids=tuple(GridEntry(cuts=(), ranks=(writer,)) for writer in WRITERS.values()),
        tensors={name: TensorEntry(dtype="float32", shape=(4,), grid=n) for n, name in enumerate(WRITERS)},
    )
    axis: Any = SimpleNamespace(rank=rank, size=RANKS)
    reading = SharedReading(plan, manifest, axis)
    return [name for name in WRITERS if name not in reading.received]


@pytest.mark.parametrize("rank", range(RANKS))
def test_as_many_ranks_as_have_written_each_read_what_they_wrote(rank: int) -> None:
    assert read_by(rank, RANKS) == [name for name, writer in WRITERS.items() if writer == rank]


def test_another_number_of_ranks_reads_in_order() -> None:
    assert [read_by(rank, 4) for rank in range(RANKS)] == [[*WRITERS], [], []], "a small state is one share"

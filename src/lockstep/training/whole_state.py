"""Saves the state of a rank that holds all of it in its launcher's memory, after it has lost its peers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint.memory_saving import MemorySaver
from lockstep.checkpoint.storage import checkpoint_name
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.rounds import poll
from lockstep.training.memory_snapshots import snapshots_in

if TYPE_CHECKING:
    import torch

    from lockstep.checkpoint.saving import RunMetadata, StepMetadata
    from lockstep.core.records import TrainingState

_OTHER_WRITES_S = 30.0  # for another rank to write the state that all have


def save_whole(
    memory: Path, state: TrainingState, metadata: StepMetadata, run: RunMetadata, device: torch.device
) -> bool:
    """Save a state without a collective; return whether it is in memory. Of several ranks that do, one writes."""
    storage, name = snapshots_in(memory, run.run), checkpoint_name(metadata.step)
    try:
        Path(storage.place).mkdir(exist_ok=True)  # this may be the first snapshot
        with storage.try_lock(f"whole-{name}") as is_first:
            if is_first and name not in storage.names():
                saver = MemorySaver(storage.with_separate_drafts(), LocalGroup(), device, run)
                saver.start(state, metadata, time.perf_counter())
                saver.finish()
            seconds = 0.0 if is_first else _OTHER_WRITES_S
            return poll(lambda: name in storage.names(), time.monotonic() + seconds)
    except OSError:  # memory is full
        return False

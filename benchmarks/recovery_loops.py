"""The contestants of recovery.py, as their ranks run: a DDP script with snapshots, one with torchft, and a monitor.

    python recovery_loops.py snapshots FOLDER    under torchrun --max-restarts
    python recovery_loops.py torchft FOLDER      a replica group of one rank, under a torchrun of its own
    recovery_loops.py:monitor                    a monitor of `lockstep train`

Each notes its updates in FOLDER/notes.jsonl as they end. The scripts import torch and nothing of Lockstep.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 4, 96, 4, 256, 128
SAMPLES = 4  # of each rank in an update
LEARNING_RATE = 1e-3
SNAPSHOT_EVERY = 4  # updates
NOTES, TEXT, SNAPSHOT = "notes.jsonl", "text.bin", "snapshot.pt"
_TIMEOUT_S = 10.0


class NoteFile:
    """Appends a line for each event of this process."""

    def __init__(self, folder: Path) -> None:
        self._handle = os.open(folder / NOTES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, event: str, **facts: object) -> None:
        line = {"event": event, "time": time.time(), "pid": os.getpid(), **facts}
        os.write(self._handle, f"{json.dumps(line)}\n".encode())


def monitor(folder: str) -> Any:
    """Return a monitor that notes each update of a run of Lockstep, on its first rank."""
    from lockstep.extend import Monitor

    class Notes(Monitor):
        def __init__(self) -> None:
            self._file = NoteFile(Path(folder))

        def start(self, info: Any) -> None:
            self._file.note("start", rank=0)

        def see(self, report: Any) -> Iterable[Any]:
            self._file.note("update", rank=0, step=report.step, loss=report.loss, ranks=2)
            return ()

    return Notes()


def make_model() -> Any:
    """Return a transformer of the size of the recipe `stdlib-lm`, with the same weights in every process."""
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.places = nn.Embedding(LENGTH, WIDTH)
            block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, tokens_BT: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(tokens_BT.shape[1])
            hidden = self.tokens(tokens_BT) + self.places.weight
            return self.head(self.blocks(hidden, mask=mask, is_causal=True))

    return Model()


def batches(folder: Path, rank: int, first: int) -> Iterator[Any]:
    """Yield a rank's samples of each update from `first` on; a function of rank and update alone."""
    import torch

    text = torch.from_file(str(folder / TEXT), size=(folder / TEXT).stat().st_size, dtype=torch.uint8)
    draws, update = torch.Generator(), first
    while True:
        draws.manual_seed(2 * update + rank)
        starts = torch.randint(len(text) - LENGTH - 1, (SAMPLES,), generator=draws)
        yield torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()]).long()
        update += 1


def loss_of(model: Any, samples: Any) -> Any:
    """Return the mean loss of a batch."""
    import torch
    from torch.nn.functional import cross_entropy

    with torch.autocast("cpu", torch.bfloat16):
        logits = model(samples[:, :-1])
    return cross_entropy(logits.float().flatten(0, 1), samples[:, 1:].flatten())


def train_with_snapshots(folder: Path) -> None:
    """Train with DDP; rank 0 saves a snapshot every few updates, and all ranks begin with the newest."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank, notes = int(os.environ["RANK"]), NoteFile(folder)
    notes.note("start", rank=rank)
    dist.init_process_group("gloo")
    module = make_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    updates, snapshot = 0, folder / SNAPSHOT
    if snapshot.exists():
        saved = torch.load(snapshot, weights_only=True)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        updates = saved["updates"]
    model = DistributedDataParallel(module)
    for samples in batches(folder, rank, updates):
        loss = loss_of(model, samples)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updates += 1
        notes.note("update", rank=rank, step=updates, loss=loss.item(), ranks=dist.get_world_size())
        if rank == 0 and updates % SNAPSHOT_EVERY == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "updates": updates}
            torch.save(state, snapshot.with_suffix(".new"))
            snapshot.with_suffix(".new").replace(snapshot)


def train_with_torchft(folder: Path) -> None:
    """Train as a replica group of one rank, as in torchft's train_ddp.py; a new one gets the other's state."""
    from datetime import timedelta

    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    rank, notes = int(os.environ["REPLICA_GROUP_ID"]), NoteFile(folder)
    notes.note("start", rank=rank)
    module = make_model()
    inner = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def load(state: Any) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    timeout = timedelta(seconds=_TIMEOUT_S)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout), min_replica_size=1, load_state_dict=load, timeout=timeout,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()}, replica_id=f"group_{rank}",
    )  # fmt: skip
    model, optimizer = DistributedDataParallel(manager, module), Optimizer(manager, inner)
    for samples in batches(folder, rank, 0):
        before = manager.current_step()
        optimizer.zero_grad()  # begins a quorum
        loss = loss_of(model, samples)
        loss.backward()
        optimizer.step()  # only if all agree
        if manager.current_step() > before:
            notes.note(
                "update", rank=rank, step=manager.current_step(), loss=loss.item(), ranks=manager.num_participants()
            )


if __name__ == "__main__":
    {"snapshots": train_with_snapshots, "torchft": train_with_torchft}[sys.argv[1]](Path(sys.argv[2]))

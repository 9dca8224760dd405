"""How fast tokens leave a memory-mapped file, and documents go into samples: `python benchmarks/data.py`.

    gather    (a) lockstep's source, through its loader    (b) the source alone
              (c) torch's DataLoader over a Dataset of the same windows, 0 workers
              (d) a batch at random places, one slice and one conversion per sample, as small GPT trainers do it
    pack      best-fit decreasing over lengths of natural documents, and how much stays empty

Tokens per second of processor time, so that other programs on the machine count little; one core, rounds in turn (each
contender once a round), medians with ranges. Results: benchmarks/results/data.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.config.data_sections import Data
from lockstep.config.schema import Loader, Tokens
from lockstep.core.progress import Progress
from lockstep.core.records import Batch
from lockstep.data.loader import TrainingLoader
from lockstep.data.tokens import FORMAT, Header, open_tokens, pack, write_header
from lockstep.plan.batch import plan_batch

TOKENS = 64_000_000
SHAPES = [(12, 1024), (64, 1024), (8, 256)]  # samples a batch, tokens a sample
GOAL_GATHER, GOAL_PACK, GOAL_PADDING = 551.0, 1000.0, 0.001  # M tokens/s, M tokens/s, share


class WindowDataset(Dataset[Any]):
    """Windows as torch's tutorials would write them."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._length
        window = torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))
        return window[:-1], window[1:]


def through_loader(source: Any, samples: int) -> Iterator[object]:
    loader = TrainingLoader(
        source,
        plan_batch(samples, "auto", 1),
        0,
        42,
        Data.model_construct(shuffle=True, drop_last=True, loader=Loader()),
        torch.device("cpu"),
        _count,
    )
    return iter(loader.updates(Progress()))


def _count(batch: Batch) -> int:
    return batch.tokens


def source_alone(source: Any, samples: int) -> Iterator[object]:
    draws = np.random.default_rng(0)
    while True:
        yield source.fetch(draws.integers(0, source.facts.samples, samples))


def torch_loader(tokens: np.ndarray, samples: int, length: int) -> Iterator[object]:
    loader = DataLoader(WindowDataset(tokens, length), batch_size=samples, shuffle=True, drop_last=True)
    while True:
        yield from loader


def slice_by_slice(tokens: np.ndarray, samples: int, length: int) -> Iterator[object]:
    while True:
        starts = torch.randint(len(tokens) - length, (samples,))
        inputs = [torch.from_numpy(tokens[i : i + length].astype(np.int64)) for i in starts]
        targets = [torch.from_numpy(tokens[i + 1 : i + 1 + length].astype(np.int64)) for i in starts]
        yield torch.stack(inputs), torch.stack(targets)


def write_tokens(folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 50_000, TOKENS).astype(np.uint16)
    (folder / "train.tokens").write_bytes(tokens.tobytes())
    np.array([0, TOKENS]).tofile(folder / "train.documents")
    write_header(folder, "train", Header(FORMAT, "uint16", TOKENS, 1, 50_257, "none", 0, 4.0, "random"))


def measure(contenders: dict[str, Iterator[object]], tokens: int, rounds: int) -> dict[str, list[float]]:
    """M tokens/s of each contender in each round; a round takes about a tenth of a second each."""
    batches = max(20, 30_000_000 // tokens)
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            many = batches if "lockstep" in name else max(10, batches // 4)
            start = time.process_time()
            for _ in islice(contender, many):
                pass
            if number:  # the first round warms up
                speeds[name].append(many * tokens / (time.process_time() - start) / 1e6)
    return speeds


def gather(rounds: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder))
        tokens = np.memmap(Path(folder) / "train.tokens", dtype=np.uint16, mode="r")
        for samples, length in SHAPES:
            source = open_tokens(Tokens(kind="tokens", folder=folder, length=length), aligned=False)
            contenders = {
                "lockstep (loader)": through_loader(source, samples),
                "lockstep (source)": source_alone(source, samples),
                "torch DataLoader": torch_loader(tokens, samples, length),
                "slice by slice": slice_by_slice(tokens, samples, length),
            }
            speeds = measure(contenders, samples * length, rounds)
            rows += [{"samples": samples, "length": length, **_summary(name, runs)} for name, runs in speeds.items()]
    return rows


def packing(rounds: int) -> list[dict[str, Any]]:
    rows = []
    for documents in (100_000, 1_000_000):
        lengths = np.exp(np.random.default_rng(0).normal(5.5, 1.2, documents)).astype(np.int64) + 1
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        for capacity in (1024, 4096):
            seconds, made = timed(lambda offsets=offsets, capacity=capacity: pack(offsets, capacity), rounds)
            row = _summary("lockstep pack", [int(offsets[-1]) / second / 1e6 for second in seconds])
            rows.append({"documents": documents, "length": capacity, "padding": made.padding, **row})
    return rows


def timed(function: Callable[[], Any], rounds: int) -> tuple[list[float], Any]:
    seconds, result = [], None
    for _ in range(rounds):
        start = time.process_time()
        result = function()
        seconds.append(time.process_time() - start)
    return seconds, result


def _summary(name: str, runs: list[float]) -> dict[str, Any]:
    return {
        "name": name,
        "million_tokens_per_second": round(median(runs), 1),
        "range": [round(min(runs), 1), round(max(runs), 1)],
    }


def _print(gathered: list[dict[str, Any]], packed: list[dict[str, Any]]) -> None:
    print(f"{'gather, M tokens/s on one core':34}{'batch':>12}{'median':>10}{'range':>20}")
    for row in gathered:
        shape, spread = f"{row['samples']} x {row['length']}", " .. ".join(f"{speed:.0f}" for speed in row["range"])
        print(f"{row['name']:34}{shape:>12}{row['million_tokens_per_second']:>10.0f}{spread:>20}")
    print(f"\n{'packing, M tokens/s on one core':34}{'length':>12}{'median':>10}{'range':>20}{'padding':>12}")
    for row in packed:
        name, spread = f"{row['documents']:,} documents", " .. ".join(f"{speed:.0f}" for speed in row["range"])
        speed = row["million_tokens_per_second"]
        print(f"{name:34}{row['length']:>12}{speed:>10.0f}{spread:>20}{row['padding']:>12.4%}")


def _goals(gathered: list[dict[str, Any]], packed: list[dict[str, Any]]) -> dict[str, bool]:
    """Return which goals are met: gathering at 12 x 1024, the usual shape, and packing at every size."""
    first = gathered[0]
    return {
        f"gather >= {GOAL_GATHER:.0f} M tokens/s": first["million_tokens_per_second"] >= GOAL_GATHER,
        f"packing >= {GOAL_PACK:.0f} M tokens/s": all(row["million_tokens_per_second"] >= GOAL_PACK for row in packed),
        f"padding < {GOAL_PADDING:.1%}": all(row["padding"] < GOAL_PADDING for row in packed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "data.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gathered, packed = gather(arguments.rounds), packing(arguments.rounds)
    goals = _goals(gathered, packed)
    _print(gathered, packed)
    print("\n" + "\n".join(f"{'met   ' if met else 'MISSED'}  {goal}" for goal, met in goals.items()))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    results = {
        "command": "python benchmarks/data.py",
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
        "rounds": arguments.rounds,
        "gather": gathered,
        "packing": packed,
        "goals": goals,
    }
    arguments.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

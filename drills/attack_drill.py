"""Attacks checkpoints: `python drills/attack_drill.py`, about 10 minutes.

    corruptions  files of the newest checkpoint are changed in every way; each must be found, the one before it loaded
    kills        a process that saves is killed by SIGKILL, at moments spread evenly over its saves
    faults       every disk operation of a save fails, or is the last one that happens, with and without a power failure

After each, an intact checkpoint must load, bitwise what was saved, and the next save must succeed. Prints a table,
writes results/attack_drill.json, and fails (exit code 1) if anything was lost. The corruptions are those of
tests/checkpoint/test_corruption.py, drawn many more times.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "checkpoint"))

import pytest
import test_corruption as corruption
import test_storage_faults as storage_faults
import torch
from attempts import machine
from disk_faults import Disk, ends, raises
from kit.storing import Meeting, save, state_of

from lockstep.checkpoint import hashing, write_plan
from lockstep.checkpoint.loading import load_newest
from lockstep.checkpoint.local import LocalStorage

RESULTS = Path(__file__).parent / "results"
ERRORS = {number: errno.errorcode[number] for number in (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)}
_MOST_REPEATS = 200  # draws of a kind that has no further corruptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=14, help="draws of each corruption, times those of the tests")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    began = time.perf_counter()
    lost: list[str] = []
    with tempfile.TemporaryDirectory(prefix="drill-attacks-") as folder, pytest.MonkeyPatch.context() as patch:
        results = {
            "command": f"python drills/attack_drill.py --times {arguments.times} --kills {arguments.kills} "
            f"--seed {arguments.seed}",
            "machine": machine(),
            "kills": kills(Path(folder) / "kills", arguments.kills, arguments.seed, lost),
            "faults": faults(Path(folder) / "faults", lost),
            "corruptions": corruptions(Path(folder) / "corruptions", arguments.times, arguments.seed, patch, lost),
            "lost": lost,
        }
    results["seconds"] = round(time.perf_counter() - began, 1)
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / "attack_drill.json").write_text(json.dumps(results, indent=2) + "\n")
    print(table(results), flush=True)
    sys.exit(1 if lost else 0)


# --- corruptions --------------------------------------------------------------------------------------------------


def corruptions(folder: Path, times: int, seed: int, patch: pytest.MonkeyPatch, lost: list[str]) -> dict[str, int]:
    """Return the number of different corruptions that were found, by kind."""
    patch.setattr(hashing, "BLOCK_BYTES", corruption.BLOCK)
    patch.setattr(write_plan, "MIN_SHARE_BYTES", 1)
    found: Counter[str] = Counter()
    for writers in (1, 2):
        (folder / str(writers)).mkdir(parents=True)
        place = corruption._saved_twice(folder / str(writers), writers)
        rng = random.Random(seed)
        for kind, number in corruption.CORRUPTIONS.items():
            name = kind.__name__.strip("_").replace("_", " ")
            found[name] += _of_kind(place, kind, times * number, rng, lost)
        found["whole checkpoint of another step"] += _found(place, dict(place.before), "another step", lost)
    return dict(found)


def _of_kind(place: Any, kind: Any, number: int, rng: random.Random, lost: list[str]) -> int:
    seen: set[bytes] = set()
    found = repeats = 0
    while len(seen) < number and repeats < _MOST_REPEATS:
        files = kind(place, rng)
        key = hashlib.sha256(b"".join(name.encode() + data for name, data in sorted(files.items()))).digest()
        if key in seen or all(place.intact[name] == data for name, data in files.items()):
            repeats += 1
            continue
        seen.add(key)
        found += _found(place, files, kind.__name__, lost)
    return found


def _found(place: Any, files: dict[str, bytes], what: str, lost: list[str]) -> int:
    with corruption._put(place, files):
        try:
            corruption._assert_detected(place, 1, what)
        except BaseException as error:
            lost.append(f"{what}, {sorted(files)}: {type(error).__name__}: {error}")
            return 0
    return 1


# --- kills --------------------------------------------------------------------------------------------------------


def kills(folder: Path, number: int, seed: int, lost: list[str]) -> dict[str, int]:
    """Kill a process that saves; return how often the newest checkpoint was that before, and that of the save."""
    rng, outcomes = random.Random(seed), Counter[str]()
    storage = LocalStorage(folder)
    assert save(storage, [_state(1)], 1) == []
    step, seconds = 1, _seconds_of_save(folder)
    for _ in range(number):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.write(writer, b"b")
            failed = save(LocalStorage(folder), [_state(step + 1)], step + 1)
            os.write(writer, b"s" if not failed else b"f")
            time.sleep(60)
        os.close(writer)
        os.read(reader, 1)
        time.sleep(rng.uniform(0, seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        reported = os.read(reader, 1) == b"s"
        os.close(reader)
        drafts = [entry.name for entry in folder.iterdir() if entry.name.startswith(".draft")]
        loaded = _loaded_step(folder, lost)
        if loaded not in (step, step + 1) or (reported and loaded != step + 1):
            lost.append(f"killed in the save of {step + 1}, reported {reported}: step {loaded} is the newest")
        kind = "reported" if reported else "published" if loaded == step + 1 else "draft" if drafts else "before"
        outcomes[kind] += 1
        seconds *= 0.97 if reported else 1.01  # so that a quarter of the kills comes after the save
        storage.remove_stale_drafts()
        if loaded == step + 1:
            shutil.rmtree(folder / f"step-{step:08d}")
            step += 1
    if save(storage, [_state(step + 1)], step + 1):
        lost.append("the save after all kills failed")
    return dict(outcomes)


def _state(step: int) -> Any:
    return state_of({f"model.{name}": torch.full((64, 1024), float(step)) for name in "abcd"})


def _seconds_of_save(folder: Path) -> float:
    seconds = []
    for step in range(2, 7):
        began = time.perf_counter()
        assert save(LocalStorage(folder.with_name("timed")), [_state(step)], step) == []
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _loaded_step(folder: Path, lost: list[str]) -> int:
    try:
        loaded = load_newest(LocalStorage(folder), Meeting(1).axis(0), _state(0))
    except Exception as error:
        lost.append(f"nothing can be loaded: {error}")
        return 0
    if loaded is None or loaded.broken:
        lost.append(f"a checkpoint is visible that was never complete: {loaded and loaded.broken}")
        return 0
    step = loaded.manifest.step
    if not all(bool((tensor == step).all()) for tensor in loaded.state.tensors.values()):
        lost.append(f"step {step} has other values than those that were saved")
    return step


# --- faults of the disk -------------------------------------------------------------------------------------------


def faults(folder: Path, lost: list[str]) -> dict[str, int]:
    """Let each operation of a save fail; return the number of operations by fault."""
    tried: Counter[str] = Counter()
    for ranks in (1, 2, 3):
        place = folder / str(ranks) / "checkpoints"
        assert save(LocalStorage(place), [storage_faults._state(storage_faults.OLDER)], storage_faults.OLDER) == []
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(place, patch)
            calls = storage_faults._calls_of_a_save(disk, place, ranks)
            for call in calls:
                for number, name in ERRORS.items():
                    _with_fault(disk, place, ranks, raises(call, number), None, f"{name} at {call}", lost)
                    tried[name] += 1
                for power in ("", "bytes are lost", "names are lost"):
                    _with_fault(disk, place, ranks, ends(call), power, f"ended at {call} {power}", lost)
                    tried[f"the last one that happens{f', then {power}' if power else ''}"] += 1
            disk.restart()
    return dict(tried)


def _with_fault(disk: Disk, place: Path, ranks: int, fault: Any, power: str | None, what: str, lost: list[str]) -> None:
    disk.fault = fault
    step = storage_faults.NEWEST
    with contextlib.suppress(BaseException):
        save(LocalStorage(place), [storage_faults._state(step)] * ranks, step)
    if power:
        disk.lose_power(names="names" in power)
    disk.restart()
    try:
        storage_faults._assert_whole(place, ranks, what)
        storage_faults._assert_next_save_succeeds(place, ranks, what)
    except BaseException as error:
        lost.append(f"{ranks} ranks, {what}: {error}")
    storage_faults._begin_again(disk, place)


def table(results: Mapping[str, Any]) -> str:
    """Return the drill's results as tables."""
    rows = [
        "| attack on a checkpoint | number | what was found |",
        "|---|--:|---|",
        *(f"| corruption: {kind} | {number:,} | found, the one before it loaded |"
          for kind, number in results["corruptions"].items()),
        f"| **corruptions** | **{sum(results['corruptions'].values()):,}** | |",
        *(f"| SIGKILL in a save: {_KILLED[kind]} | {number:,} | an intact checkpoint loaded |"
          for kind, number in results["kills"].items()),
        f"| **SIGKILLs** | **{sum(results['kills'].values()):,}** | |",
        *(f"| disk operation of a save: {kind} | {number:,} | an intact checkpoint loaded, the next save succeeded |"
          for kind, number in results["faults"].items()),
        f"| **disk operations** | **{sum(results['faults'].values()):,}** | |",
    ]  # fmt: skip
    lost = results["lost"]
    verdict = f"LOST: {len(lost)}\n" + "\n".join(f"  {fault}" for fault in lost) if lost else "Nothing was lost."
    return "\n".join([*rows, "", verdict])


_KILLED = {
    "before": "nothing was written yet",
    "draft": "the draft was there",
    "published": "published, and not yet reported",
    "reported": "reported",
}


if __name__ == "__main__":
    threading.excepthook = lambda args: None  # `Disk` ends threads
    main()

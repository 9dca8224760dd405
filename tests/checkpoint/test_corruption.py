"""Every corruption of a checkpoint is detected, none of its bytes are used, and the checkpoint before it is loaded.

    step 4, intact ----------------------------------------------> loaded, bitwise identical
    step 8 --- one of 1,000 corruptions --- load_newest: detected -'

The corruptions are drawn from seeds, so a failure is reproducible. Blocks are small (4 KiB), so that a small model has
many of them.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small, worlds
from kit.failures import gives
from kit.storing import Divided, Meeting, save, state_of, together
from safetensors.torch import load_file

import lockstep
from lockstep.checkpoint import hashing, write_plan
from lockstep.checkpoint.hashing import HASH_CHARACTERS
from lockstep.checkpoint.loading import LoadedCheckpoint, load_newest
from lockstep.checkpoint.local import LocalStorage
from lockstep.cli.main import command
from lockstep.core.errors import RunFailed
from lockstep.core.records import TrainingState

OLDER, NEWEST = 4, 8
MANIFEST = "manifest.json"
BLOCK = 4096
FORKS = worlds._CONTEXT


class Wide(torch.nn.Module):
    """A model with tensors of several blocks, and some smaller than one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 64, bias=False)
        self.middle = torch.nn.Linear(64, 64, bias=False)
        self.head = torch.nn.Linear(64, 3)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.inner(points)))))


@dataclass(frozen=True)
class Place:
    """A storage with two checkpoints of one run.

    Attributes:
        older: The state at the older step, as every rank held it.
        intact: Bytes of the newest checkpoint's files, by name.
        before: Those of the older checkpoint.
        other: Those of the same step of another run.
    """

    storage: LocalStorage
    folder: Path
    older: TrainingState
    intact: dict[str, bytes]
    before: dict[str, bytes]
    other: dict[str, bytes]

    @property
    def shards(self) -> list[str]:
        return sorted(set(self.intact) - {MANIFEST})


def parts_in(file: Path) -> dict[str, dict[str, Any]]:
    """Return the parts that a file's header lists, by key."""
    data = file.read_bytes()
    first = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:first])
    hashes = header.pop("__metadata__")["xxh3_128"]
    parts = {}
    for key, entry in header.items():
        start, end = entry["data_offsets"]
        number = -(-(end - start) // hashing.BLOCK_BYTES) * HASH_CHARACTERS
        blocks, hashes = hashes[:number], hashes[number:]
        parts[key] = {
            "file": file.name,
            "at": first + start,
            "sizes": entry["shape"],
            "blocks": [blocks[index : index + HASH_CHARACTERS] for index in range(0, number, HASH_CHARACTERS)],
        }
    return parts


@pytest.fixture(scope="module", params=[1, 2], ids=["written by 1 rank", "written by 2 ranks"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "BLOCK_BYTES", BLOCK)
        patch.setattr(write_plan, "MIN_SHARE_BYTES", 1)
        yield _saved_twice(tmp_path_factory.mktemp("whole"), request.param)


def _saved_twice(folder: Path, writers: int) -> Place:
    """Save a model trained with Adam after 4 updates and after 8, and another run's in the same way."""
    ours, others = LocalStorage(folder / "ours"), LocalStorage(folder / "others")
    _train(ours, writers, "one run", seed=1)
    _train(others, writers, "another", seed=2)
    older, newest = f"step-{OLDER:08d}", f"step-{NEWEST:08d}"
    return Place(
        ours,
        folder / "ours" / newest,
        _state(folder / "ours" / older),
        _files(folder / "ours" / newest),
        _files(folder / "ours" / older),
        _files(folder / "others" / newest),
    )


def _train(storage: LocalStorage, writers: int, run: str, seed: int) -> None:
    config = small.config(run={"steps": NEWEST, "seed": seed})
    config["model"] = {"kind": "custom", "target": "test_corruption:Wide"}
    with lockstep.session(config) as session:
        for report in session:
            if report.step in (OLDER, NEWEST):
                assert save(storage, [session.state()] * writers, report.step, run) == []


def _state(folder: Path) -> TrainingState:
    """Return the state that safetensors reads from an intact checkpoint."""
    shards = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return state_of({name: tensor for shard in shards for name, tensor in shard.items()})


def _files(folder: Path) -> dict[str, bytes]:
    """Return the files that have anything: a small state is one rank's share, and other ranks' files have no parts."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name == MANIFEST or parts_in(path)}


# --- the corruptions ----------------------------------------------------------------------------------------------

Files = dict[str, bytes]
Corruption = Callable[[Place, random.Random], Files]


def _flipped_bit(place: Place, rng: random.Random) -> Files:
    file = rng.choice(place.shards)
    return {file: _flip(place.intact[file], rng.randrange(8 * len(place.intact[file])))}


def _flipped_bit_of_a_header(place: Place, rng: random.Random) -> Files:
    file = rng.choice(place.shards)
    header = 8 + int.from_bytes(place.intact[file][:8], "little")
    return {file: _flip(place.intact[file], rng.randrange(8 * header))}


def _flipped_bit_of_the_manifest(place: Place, rng: random.Random) -> Files:
    return {MANIFEST: _flip(place.intact[MANIFEST], rng.randrange(8 * len(place.intact[MANIFEST])))}


def _hole(place: Place, rng: random.Random) -> Files:
    file = rng.choice(list(place.intact))
    data = bytearray(place.intact[file])
    start = rng.randrange(len(data))
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))
    return {file: bytes(data)}


def _page_of_another_place(place: Place, rng: random.Random) -> Files:
    """A write to the wrong place."""
    file, source = rng.choice(place.shards), rng.choice(place.shards)
    data, other = bytearray(place.intact[file]), place.intact[source]
    size = rng.choice([512, 4096])
    start, from_ = rng.randrange(len(data) - size), rng.randrange(len(other) - size)
    data[start : start + size] = other[from_ : from_ + size]
    return {file: bytes(data)}


def _truncation(place: Place, rng: random.Random) -> Files:
    file = rng.choice(list(place.intact))
    return {file: place.intact[file][: rng.randrange(len(place.intact[file]))]}


def _appended_bytes(place: Place, rng: random.Random) -> Files:
    file = rng.choice(list(place.intact))
    return {file: place.intact[file] + rng.randbytes(rng.choice([1, 8, 4096]))}


def _an_empty_file(place: Place, rng: random.Random) -> Files:
    return {rng.choice(list(place.intact)): b""}


def _zeros(place: Place, rng: random.Random) -> Files:
    """What some file systems leave after a power failure: zeros of the right size."""
    file = rng.choice(list(place.intact))
    return {file: bytes(len(place.intact[file]))}


def _swapped_blocks(place: Place, rng: random.Random) -> Files:
    """Two blocks of one tensor change places, or two of the same size of different ones."""
    file = rng.choice(place.shards)
    spans = _blocks(place, file)
    size = rng.choice([size for size in spans if len(spans[size]) > 1])
    first, second = rng.sample(spans[size], 2)
    data = bytearray(place.intact[file])
    data[first : first + size], data[second : second + size] = data[second : second + size], data[first : first + size]
    return {file: bytes(data)}


def _a_stale_shard(place: Place, rng: random.Random) -> Files:
    file = rng.choice(place.shards)
    return {file: place.before[file]}


def _a_shard_of_another_run(place: Place, rng: random.Random) -> Files:
    file = rng.choice(place.shards)
    return {file: place.other[file]}


def _a_stale_block(place: Place, rng: random.Random) -> Files:
    """A write that never reached the disk."""
    file = rng.choice(place.shards)
    start = 4096 * rng.randrange(-(-len(place.intact[file]) // 4096))
    data = bytearray(place.intact[file])
    data[start : start + 4096] = place.before[file][start : start + 4096]
    return {file: bytes(data)}


def _a_stale_manifest(place: Place, rng: random.Random) -> Files:
    return {MANIFEST: rng.choice([place.before, place.other])[MANIFEST]}


def _a_deleted_file(place: Place, rng: random.Random) -> Files:
    gone = rng.choice(list(place.intact))
    return {gone: GONE}


def _swapped_shards(place: Place, rng: random.Random) -> Files:
    """Two files swapped: on one rank the shard and the manifest."""
    first, second = rng.sample(place.shards if len(place.shards) > 1 else list(place.intact), 2)
    return {first: place.intact[second], second: place.intact[first]}


def _edited_manifest(place: Place, rng: random.Random) -> Files:
    """Valid JSON with a changed value and the old hash."""
    outer = json.loads(place.intact[MANIFEST])
    _edit(outer["manifest"], rng)
    return {MANIFEST: (json.dumps(outer, sort_keys=True, separators=(",", ":")) + "\n").encode()}


def _reformatted_manifest(place: Place, rng: random.Random) -> Files:
    """The same values in other bytes, which Lockstep would not have written."""
    outer = json.loads(place.intact[MANIFEST])
    return {MANIFEST: json.dumps(outer, indent=rng.choice([1, 2, 4])).encode()}


def _garbage(place: Place, rng: random.Random) -> Files:
    return {rng.choice(list(place.intact)): rng.randbytes(rng.choice([1, 100, 10_000]))}


GONE = b"no such file"

CORRUPTIONS: dict[Corruption, int] = {
    _flipped_bit: 100,
    _flipped_bit_of_a_header: 40,
    _flipped_bit_of_the_manifest: 80,
    _hole: 60,
    _page_of_another_place: 30,
    _truncation: 60,
    _appended_bytes: 20,
    _an_empty_file: 3,
    _zeros: 3,
    _swapped_blocks: 40,
    _a_stale_shard: 2,
    _a_shard_of_another_run: 2,
    _a_stale_block: 20,
    _a_stale_manifest: 2,
    _a_deleted_file: 3,
    _swapped_shards: 2,
    _edited_manifest: 40,
    _reformatted_manifest: 3,
    _garbage: 10,
}


def test_there_are_a_thousand_corruptions() -> None:
    assert 2 * sum(CORRUPTIONS.values()) >= 1000


def _flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def _blocks(place: Place, file: str) -> dict[int, list[int]]:
    """Return the offsets of a shard's hashed blocks, by size."""
    offsets: dict[int, list[int]] = {}
    for part in parts_in(place.folder / file).values():
        size = torch.Size(part["sizes"]).numel() * 4
        for start in range(0, size, BLOCK):
            offsets.setdefault(min(BLOCK, size - start), []).append(part["at"] + start)
    return offsets


def _edit(manifest: dict[str, Any], rng: random.Random) -> None:
    """Change one number or text of the manifest."""
    places = list(_leaves(manifest))
    holder, key = rng.choice(places)
    value = holder[key]
    holder[key] = value + 1 if isinstance(value, int) else f"{value}0"


def _leaves(holder: Any) -> Iterator[tuple[Any, Any]]:
    items = holder.items() if isinstance(holder, dict) else enumerate(holder)
    for key, value in items:
        if isinstance(value, dict | list):
            yield from _leaves(value)
        else:
            yield holder, key


# --- detected, however it is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CORRUPTIONS, ids=lambda kind: kind.__name__.strip("_"))
def test_each_corruption_is_detected_and_the_checkpoint_before_it_is_used(place: Place, kind: Corruption) -> None:
    rng = random.Random(kind.__name__)
    for number in range(CORRUPTIONS[kind]):
        files = kind(place, rng)
        while all(place.intact[name] == data for name, data in files.items()):
            files = kind(place, rng)  # zeros over zeros
        with _put(place, files):
            what = f"{kind.__name__} {number}: {sorted(files)}"
            _assert_detected(place, len(place.shards), what)
            _assert_detected_by_parts(place, len(place.shards) + 1, f"{what}, in parts")


def test_an_intact_checkpoint_is_loaded(place: Place) -> None:
    for ranks in (1, 2):
        for loaded in _loaded(place, [place.older] * ranks):
            assert (loaded.manifest.step, loaded.broken) == (NEWEST, {})


def test_without_an_older_checkpoint_the_error_states_the_reason(place: Place) -> None:
    file = place.shards[-1]
    with (
        _put(place, {file: _flip(place.intact[file], 8 * len(place.intact[file]) - 1)}),
        pytest.raises(RunFailed) as caught,
    ):
        load_newest(place.storage, Meeting(1).axis(0), place.older, NEWEST)
    assert re.search(rf"step-{NEWEST:08d}: {file}: bytes [\d,]+ to [\d,]+, ", str(caught.value))


@contextmanager
def _put(place: Place, files: Files) -> Iterator[None]:
    for name, data in files.items():
        (place.folder / name).write_bytes(data)
        if data is GONE:
            (place.folder / name).unlink()
    try:
        yield
    finally:
        for name in files:
            (place.folder / name).write_bytes(place.intact[name])


def _assert_detected(place: Place, ranks: int, what: str) -> None:
    for loaded in _loaded(place, [place.older] * ranks):
        _assert_older(loaded, what)
        assert loaded.state.tensors.keys() == place.older.tensors.keys(), what
        for name, tensor in place.older.tensors.items():
            assert torch.equal(loaded.state.tensors[name], tensor), f"{what}: {name}"


def _assert_detected_by_parts(place: Place, ranks: int, what: str) -> None:
    """Load with each rank reading only its own rows."""
    states = [
        state_of({name: _part(tensor, ranks, rank) for name, tensor in place.older.tensors.items()})
        for rank in range(ranks)
    ]
    for loaded, mine in zip(_loaded(place, states), states, strict=True):
        _assert_older(loaded, what)
        for name, tensor in mine.tensors.items():
            part = tensor.to_local() if isinstance(tensor, Divided) else tensor
            assert torch.equal(loaded.state.tensors[name].view(-1), part.reshape(-1)), f"{what}: {name}"


def _part(tensor: torch.Tensor, ranks: int, rank: int) -> Any:
    return Divided(tensor, ranks, rank, 0) if tensor.dim() else tensor


def _assert_older(loaded: LoadedCheckpoint, what: str) -> None:
    assert loaded.manifest.step == OLDER, f"{what}: not detected"
    assert list(loaded.broken) == [f"step-{NEWEST:08d}"], what
    assert loaded.broken[f"step-{NEWEST:08d}"], what


def _loaded(place: Place, states: list[TrainingState]) -> list[LoadedCheckpoint]:
    meeting, loaded = Meeting(len(states)), {}

    def rank(number: int) -> None:
        loaded[number] = load_newest(place.storage, meeting.axis(number), states[number])

    together(len(states), rank)
    return [loaded[number] for number in range(len(states))]


# --- through the command ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that has saved at steps 4 and 8."""
    folder = tmp_path_factory.mktemp("runs")
    config = small.config(run={"steps": 8}, checkpoint={"every": "4 steps"})
    (folder / "points.json").write_text(json.dumps(config))
    code, text = _command(folder, "train", "points.json", "--ranks", "2", "--run.folder", "run")
    assert code == 0, text
    return folder / "run"


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [(_flipped_bit, 2), (_truncation, 1), (_a_deleted_file, 2), (_a_stale_shard, 1), (_edited_manifest, 2)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_run_reports_a_corruption_and_resumes_from_the_checkpoint_before(
    finished: Path, tmp_path: Path, kind: Corruption, ranks: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    saves = run / "checkpoints"
    newest, before = _files(saves / "step-00000008"), _files(saves / "step-00000004")
    place = Place(LocalStorage(saves), saves / "step-00000008", state_of({}), newest, before, before)
    damaged = kind(place, random.Random(ranks))
    for name, data in damaged.items():
        (place.folder / name).unlink()
        if data is not GONE:
            (place.folder / name).write_bytes(data)
    code, text = _command(tmp_path, "train", "run", "--run.steps", "10", "--ranks", str(ranks))
    assert code == 0, text
    assert "resumes from step 4 (40 " in text
    assert gives(text, "step-00000008", next(iter(damaged)))
    assert f"renamed to {saves}/broken-step-00000008" in text
    assert _files(saves / "broken-step-00000008") == {
        name: data for name, data in {**newest, **damaged}.items() if data is not GONE
    }
    assert sorted(path.name for path in saves.glob("step-*")) == ["step-00000004", "step-00000008", "step-00000010"]
    losses = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses == [1, 2, 4, 6, 8, 10]


def _command(folder: Path, *words: str) -> tuple[int, str]:
    """Run `lockstep` in a forked process, which need not import torch again; return its exit code and output."""
    output = folder / "output.txt"
    process = FORKS.Process(target=_lockstep, args=(folder, output, words))
    process.start()
    process.join(60)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode, output.read_text()


def _lockstep(folder: Path, output: Path, words: tuple[str, ...]) -> None:
    os.chdir(folder)
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["lockstep", *words]
    command()

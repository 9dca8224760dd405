"""A disk may fail at any call of a save, a load or a deletion: an intact checkpoint exists before and after.

step 4, intact | saving step 8: mkdir, create, write, fsync, ... rename, fsync
                                ^ the process ends, the disk is full, or the call fails here: for each call
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_faults import EIO, ENOSPC, Disk, ends, raises
from kit import small
from kit.storing import Meeting, save, state_of, together
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint.loading import LoadedCheckpoint, load_newest
from lockstep.checkpoint.local import LocalDraft, LocalStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.saving import RunMetadata, Saver, StepMetadata
from lockstep.config.schema import Checkpoint
from lockstep.core.errors import RunFailed
from lockstep.core.records import TrainingState
from lockstep.loop.session import components_of
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # `End` ends threads

OLDER, NEWEST, NEXT = 4, 8, 9
RANKS = [1, 2]


def _state(step: int) -> TrainingState:
    """Return a state in which every element is the step."""
    return state_of({f"model.{name}": torch.full((8, 4), float(step)) for name in "abcd"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an intact checkpoint of the older step."""
    assert save(LocalStorage(tmp_path / "checkpoints"), [_state(OLDER)], OLDER) == []
    return tmp_path / "checkpoints"


@pytest.fixture
def disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(folder, monkeypatch)
    yield disk
    disk.restart()


def _calls_of_a_save(disk: Disk, folder: Path, ranks: int) -> list[str]:
    """Return the calls of a save without faults, sorted: the order of ranks in threads differs each time."""
    assert save(LocalStorage(folder), [_state(NEWEST)] * ranks, NEWEST) == []
    calls = sorted(disk.calls)
    _begin_again(disk, folder)
    return calls


def _begin_again(disk: Disk, folder: Path) -> None:
    """Remove everything but the older checkpoint."""
    disk.restart()
    for entry in folder.iterdir():
        if entry.name != f"step-{OLDER:08d}":
            shutil.rmtree(entry)
    disk.forget()


def _assert_whole(folder: Path, ranks: int, what: str) -> int:
    """Assert that ranks that start again load an intact checkpoint, the same on all; return its step."""
    loaded = _load(LocalStorage(folder), ranks)
    steps = {checkpoint.manifest.step for checkpoint in loaded}
    assert len(steps) == 1, f"{what}: ranks resume from different steps"
    step = steps.pop()
    for checkpoint in loaded:
        assert checkpoint.broken == {}, f"{what}: a checkpoint that was never complete is visible"
        assert all(bool((tensor == step).all()) for tensor in checkpoint.state.tensors.values()), what
    return step


def _load(storage: LocalStorage, ranks: int) -> list[LoadedCheckpoint]:
    meeting, loaded = Meeting(ranks), {}

    def rank(number: int) -> None:
        loaded[number] = load_newest(storage, meeting.axis(number), _state(0))

    together(ranks, rank)
    return [loaded[number] for number in range(ranks)]


def _assert_next_save_succeeds(folder: Path, ranks: int, what: str) -> None:
    """Assert that the next save succeeds, and leaves no other files."""
    storage = LocalStorage(folder)
    storage.remove_stale_drafts()
    assert save(storage, [_state(NEXT)] * ranks, NEXT) == [], what
    assert _assert_whole(folder, ranks, what) == NEXT
    assert {entry.name for entry in folder.iterdir()} == set(storage.names()), f"{what}: leftovers"


# --- a save -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("power", ["stays", "fails, bytes are lost", "fails, names are lost too"])
def test_a_process_that_ends_at_any_call_of_a_save_loses_only_that_save(
    disk: Disk, folder: Path, ranks: int, power: str
) -> None:
    steps = set()
    for call in _calls_of_a_save(disk, folder, ranks):
        disk.fault = ends(call)
        with contextlib.suppress(BaseException):
            save(LocalStorage(folder), [_state(NEWEST)] * ranks, NEWEST)
        assert call in disk.calls, f"{call} was not reached"
        if power != "stays":
            disk.lose_power(names="names" in power)
        disk.restart()
        steps.add(_assert_whole(folder, ranks, f"ended at {call}"))
        _assert_next_save_succeeds(folder, ranks, f"ended at {call}")
        _begin_again(disk, folder)
    assert steps == {OLDER, NEWEST}


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("number", "words"), [(ENOSPC, "No space left on device"), (EIO, "Input/output error")])
def test_a_save_that_fails_at_any_call_reports_it(
    disk: Disk, folder: Path, ranks: int, number: int, words: str
) -> None:
    for call in _calls_of_a_save(disk, folder, ranks):
        disk.fault = raises(call, number)
        failures = save(LocalStorage(folder), [_state(NEWEST)] * ranks, NEWEST)
        assert call in disk.calls, f"{call} was not reached"
        disk.restart()
        if _assert_whole(folder, ranks, call) == OLDER:
            assert len(failures) == 1, f"{call}: the checkpoint does not exist, and no failure is reported"
            others = ranks == 2 and "rank-00000" not in call and "another rank" in failures[0]
            assert words in failures[0] or others, call
        else:
            assert failures == [], f"{call}: the checkpoint exists, and a failure is reported"
        _assert_next_save_succeeds(folder, ranks, call)
        _begin_again(disk, folder)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_reported_save_survives_a_power_failure(disk: Disk, folder: Path, ranks: int) -> None:
    assert save(LocalStorage(folder), [_state(NEWEST)] * ranks, NEWEST) == []
    disk.lose_power(names=True)
    assert _assert_whole(folder, ranks, "power failure") == NEWEST


def test_the_failure_of_another_rank_is_reported(disk: Disk, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk.fault = raises(f"write .draft-step-{NEWEST:08d}/rank-00001.safetensors #1", ENOSPC)
    [failure] = save(LocalStorage(folder), [_state(NEWEST)] * 2, NEWEST)
    assert "No space left on device" in failure + caplog.text


def test_a_failed_save_leaves_no_files(disk: Disk, folder: Path) -> None:
    """On a full disk, files left behind would make the next save fail, too."""
    disk.fault = raises(f"write .draft-step-{NEWEST:08d}/rank-00000.safetensors #1", ENOSPC)
    assert len(save(LocalStorage(folder), [_state(NEWEST)] * 2, NEWEST)) == 1
    assert [entry.name for entry in folder.iterdir()] == [f"step-{OLDER:08d}"]


def test_a_failed_save_leaves_no_files_where_rank_0_could_not_begin(folder: Path) -> None:
    class Full(LocalStorage):
        """A disk that is full for rank 0 at its first call."""

        def begin(self, name: str) -> LocalDraft:
            if axes[0] is not None:
                axes[0] = None
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            return super().begin(name)

    meeting = Meeting(2)
    axes = [meeting.axis(0), meeting.axis(1)]
    savers = [
        Saver(storage, axis, torch.device("cpu"), RunMetadata("run", {}, {}))
        for storage, axis in zip([Full(folder), LocalStorage(folder)], axes, strict=True)
    ]

    def rank(number: int) -> None:
        savers[number].start(_state(NEWEST), StepMetadata(NEWEST, 0, 0, {}))
        savers[number].finish()

    together(2, rank)
    [outcome] = savers[0].outcomes()
    assert outcome.failure == "rank 0: No space left on device"
    assert [entry.name for entry in folder.iterdir()] == [f"step-{OLDER:08d}"]


class VotedAtOnce(Saver):
    """A saver whose vote ends before the thread that settled the save continues."""

    @property
    def settled(self) -> int:
        return self._count

    @settled.setter
    def settled(self, count: int) -> None:
        self._count = count
        if count:
            self.on_vote(float(count), 0.0)


def test_a_save_whose_vote_ends_at_once_is_published_once(folder: Path) -> None:
    saver = VotedAtOnce(LocalStorage(folder), Meeting(1).axis(0), torch.device("cpu"), RunMetadata("run", {}, {}))
    for step in range(NEWEST, NEWEST + 10):
        saver.start(_state(step), StepMetadata(step, 0, 0, {}))
        saver.finish()
        assert [(save.step, save.failure) for save in saver.outcomes()] == [(step, None)]
        assert _assert_whole(folder, 1, "voted at once") == step


@pytest.mark.parametrize("ranks", RANKS)
def test_writes_may_be_short(disk: Disk, folder: Path, ranks: int) -> None:
    disk.max_write = 100
    assert save(LocalStorage(folder), [_state(NEWEST)] * ranks, NEWEST) == []
    assert sum(call.startswith("write") for call in disk.calls) > 10
    assert _assert_whole(folder, ranks, "short writes") == NEWEST


def test_signals_interrupt_nothing(folder: Path) -> None:
    signals = []
    before = signal.signal(signal.SIGALRM, lambda *_: signals.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for step in range(NEWEST, NEWEST + 20):
            assert save(LocalStorage(folder), [_state(step)], step) == []
            assert _assert_whole(folder, 1, "signals") == step
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(signals) > 20


# --- a load -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", RANKS)
def test_a_load_that_fails_at_any_call_uses_the_older_checkpoint_on_all_ranks(
    disk: Disk, folder: Path, ranks: int
) -> None:
    storage = LocalStorage(folder)
    assert save(storage, [_state(NEWEST)] * 2, NEWEST) == []
    disk.forget()
    _load(storage, ranks)
    calls, steps = sorted(disk.calls), set()
    for call in calls:
        disk.forget()
        disk.fault = raises(call, EIO)
        if call == "list . #1":
            with pytest.raises(RunFailed, match=f"can't list {folder}: Input/output error"):
                _load(storage, ranks)
            continue
        loaded = _load(storage, ranks)
        steps |= {checkpoint.manifest.step for checkpoint in loaded}
        assert len({checkpoint.manifest.step for checkpoint in loaded}) == 1, (
            f"{call}: ranks resume from different steps"
        )
        for checkpoint in loaded:
            step = checkpoint.manifest.step
            assert all(bool((tensor == step).all()) for tensor in checkpoint.state.tensors.values()), call
            if step == OLDER:
                assert checkpoint.broken[f"step-{NEWEST:08d}"].endswith(": Input/output error"), call
    assert steps == {OLDER, NEWEST}, "a lock that is refused is no fault, a byte that can't be read is"


# --- a deletion ---------------------------------------------------------------------------------------------------


def _retention(folder: Path) -> Retention:
    return Retention(LocalStorage(folder), Checkpoint(keep_last=1), 100)


def _save_and_delete(folder: Path) -> None:
    """Publish the newest: the older checkpoint need not be kept then."""
    storage = LocalStorage(folder)
    _retention(folder).on_published(read_manifest(storage, f"step-{NEWEST:08d}"))


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_a_deletion_that_stops_at_any_call_keeps_the_other_checkpoints(
    disk: Disk, folder: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = folder.parent / "kept"
    shutil.copytree(folder, kept)
    assert save(LocalStorage(folder), [_state(NEWEST)] * 2, NEWEST) == []
    disk.forget()
    _save_and_delete(folder)
    calls = sorted(disk.calls)
    assert LocalStorage(folder).names() == [f"step-{NEWEST:08d}"]
    assert any(call.startswith("rename") for call in calls)
    for call in calls:
        disk.restart()
        shutil.rmtree(folder / f"step-{OLDER:08d}", ignore_errors=True)
        shutil.copytree(kept / f"step-{OLDER:08d}", folder / f"step-{OLDER:08d}")
        disk.forget()
        disk.fault = ends(call) if how == "ends" else raises(call, EIO)
        with contextlib.suppress(BaseException):
            _save_and_delete(folder)
        assert call in disk.calls
        disk.restart()
        assert _assert_whole(folder, 2, call) == NEWEST
        for name in LocalStorage(folder).names():
            assert read_manifest(LocalStorage(folder), name).step in (OLDER, NEWEST)
        _assert_next_save_succeeds(folder, 2, call)
        shutil.rmtree(folder / f"step-{NEXT:08d}")
    if how == "fails":
        assert "could not be deleted: [Errno 5] Input/output error" in caplog.text


# --- a run --------------------------------------------------------------------------------------------------------


def _run_on_a_bad_disk(config: dict[str, Any], folder: str, rank: int, verb: str, number: int) -> dict[str, Any]:
    """Train 8 updates and save after 2, 5 and at the end; calls of `verb` fail in the save after 5."""
    with pytest.MonkeyPatch.context() as patch, lockstep.session(config) as session:
        disk = Disk(Path(folder), patch)
        mine = components_of(session).world.rank == rank
        checkpoints = Checkpoints(session, LocalStorage(Path(folder)), {})
        checkpoints.begin(Resume())
        ended, steps = [], []
        for report in session:
            steps.append(report.step)
            ended += checkpoints.outcomes()
            if report.step in (2, 5):
                disk.fault = _fails_in_the_second_save(verb, number) if mine else lambda call: None
                checkpoints.save()
        checkpoints.save()
        ended += checkpoints.finish() if components_of(session).world.rank == 0 else checkpoints.finish()[:0]
        return {"steps": steps, "ended": [(save.step, save.failure) for save in ended], "last": session.progress.steps}


def _fails_in_the_second_save(verb: str, number: int) -> Any:
    def fault(call: str) -> None:
        if call.startswith(f"{verb} .draft-step-00000005"):
            raise OSError(number, os.strerror(number))

    return fault


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("verb", "number"), [("write", ENOSPC), ("fsync", EIO), ("rename", EIO)])
def test_a_run_continues_after_a_save_that_fails_on_one_rank(tmp_path: Path, rank: int, verb: str, number: int) -> None:
    if verb == "rename" and rank == 1:
        pytest.skip("the first rank alone publishes")
    config = small.config(run={"steps": 8}, checkpoint={"every": None})
    results = in_world(2, _run_on_a_bad_disk, config, str(tmp_path), rank, verb, number)
    assert results[0]["steps"] == results[1]["steps"] == list(range(1, 9))
    (two, fine), (five, failure), (eight, fine_too) = results[0]["ended"]
    assert (two, fine, five, eight, fine_too) == (2, None, 5, 8, None)
    assert os.strerror(number) in failure or (rank == 1 and "another rank" in failure)
    assert results[1]["ended"] == []
    assert LocalStorage(tmp_path).names() == ["step-00000002", "step-00000008"]
    assert not list(tmp_path.glob(".draft-*"))

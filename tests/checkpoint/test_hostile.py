"""A checkpoint may hold anything: nothing is executed, nothing hangs, and the error states what is wrong."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from evil import CANARY, FILES, GRIDS, MANIFESTS, REFUSED, STATES, edit_manifest
from kit import small
from kit.failures import gives
from kit.storing import Meeting, state_of
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint.loading import load_newest
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import verify
from lockstep.cli.main import main
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume

pytestmark = pytest.mark.timeout(60)

OLDER, NEWEST = "step-00000004", "step-00000008"
CONFIG = small.config(run={"steps": 8}, checkpoint={"every": "4 steps"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two intact checkpoints of a run."""
    folder = tmp_path_factory.mktemp("whole")
    with lockstep.session(CONFIG) as session:
        checkpoints = Checkpoints(session, LocalStorage(folder), {})
        checkpoints.begin(Resume())
        for report in session:
            if report.step in (4, 8):
                checkpoints.save()
        checkpoints.finish()
    return folder


@pytest.fixture
def saves(whole: Path, tmp_path: Path) -> Path:
    for name in (OLDER, NEWEST):
        shutil.copytree(whole / name, tmp_path / name)
    return tmp_path


def _begin(folder: Path) -> tuple[int | None, list[str]]:
    """Return the step that a run resumes from and its notes; two more updates show that it can train."""
    config = {**CONFIG, "run": {"steps": 10}}
    with lockstep.session(config) as session:
        checkpoints = Checkpoints(session, LocalStorage(folder), {})
        notes = checkpoints.begin(Resume())
        assert [report.step for report in session][-1] == 10
        return checkpoints.resumed_from, notes


@pytest.fixture
def harmless(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.rglob(CANARY)), "it was executed"
    assert not (tmp_path.parent / "escaped").exists()


BROKEN = {**FILES, **MANIFESTS, **GRIDS, **{f"state with {name}": evil for name, evil in STATES.items()}}

LONG = [name for name in BROKEN if name.startswith("200,000 ")]
"""Cases that take seconds of writing and reading: only their memory and the reason are looked at."""


def test_there_are_a_hundred_cases() -> None:
    assert len(BROKEN) + len(REFUSED) >= 100


@pytest.mark.usefixtures("harmless")
@pytest.mark.parametrize("name", [name for name in BROKEN if name not in LONG])
def test_a_damaged_checkpoint_is_moved_aside_and_the_one_before_it_used(saves: Path, name: str) -> None:
    if "unreadable" in name and os.geteuid() == 0:
        pytest.skip("the superuser may")
    evil, words = BROKEN[name]
    evil(saves / NEWEST)
    fault = verify(LocalStorage(saves), NEWEST).fault
    assert fault is None or re.search(words, fault, re.DOTALL), fault
    step, notes = _begin(saves)
    assert step == 4
    [note] = [note for note in notes if note.startswith(f"{NEWEST} could not be used: ")]
    assert re.search(words, note, re.DOTALL), note
    assert len(note) < 1000
    assert LocalStorage(saves).names() == [OLDER]
    assert f"broken-{NEWEST}" in {entry.name for entry in saves.iterdir()}


@pytest.mark.usefixtures("harmless")
@pytest.mark.parametrize("name", REFUSED)
def test_what_may_be_another_runs_checkpoint_is_refused_and_stays(saves: Path, name: str) -> None:
    evil, words = REFUSED[name]
    evil(saves / NEWEST)
    with pytest.raises((RunFailed, ConfigError), match=words):
        _begin(saves)


@pytest.mark.usefixtures("harmless")
@pytest.mark.parametrize("name", [name for name in FILES if re.match("a (manifest|checkpoint) that is", name)])
def test_retention_tolerates_any_older_checkpoint(saves: Path, name: str) -> None:
    """Retention reads all manifests, and deletes only checkpoints that it can read."""
    FILES[name][0](saves / OLDER)
    config = {**CONFIG, "run": {"steps": 12}, "checkpoint": {"every": "1 steps", "keep_last": 1}}
    with lockstep.session(config) as session:
        checkpoints = Checkpoints(session, LocalStorage(saves), {})
        checkpoints.begin(Resume())
        assert checkpoints.resumed_from == 8
        for report in session:
            checkpoints.save()
            assert [save.failure for save in checkpoints.finish()] == [None], report.step
    assert LocalStorage(saves).names() == [OLDER, "step-00000012"]


@pytest.mark.parametrize("name", ["step-8", "step-000000008", "step-0000000٨", "step-", "step-x", "step-00000009"])
def test_no_other_name_hides_a_checkpoint(saves: Path, name: str) -> None:
    shutil.copytree(saves / OLDER, saves / name)
    step, notes = _begin(saves)
    assert step == 8
    unusable = [note for note in notes if "could not be used" in note]
    assert [gives(note, "step-00000009", "manifest.json", "step 4") for note in unusable] == [True] * (name[-1] == "9")


def test_a_place_that_cannot_hold_checkpoints_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with lockstep.session(CONFIG) as session, pytest.raises(RunFailed) as caught:
        Checkpoints(session, LocalStorage(tmp_path / "file"), {}).begin(Resume())
    assert gives(str(caught.value), tmp_path / "file", "File exists")


ESC = "\x1b]0;owned\x07\x9b2J\n"


def _steering(manifest: dict[str, Any]) -> None:
    manifest["metrics"] = {f"held-out.{ESC}": 1.0}
    manifest["written"] = ESC
    manifest["run"] = ESC
    manifest["environment"] = {"recipe": ESC, ESC: {ESC: [ESC]}}
    manifest["tensors"][f"model.{ESC}"] = manifest["tensors"].pop("model.inner.weight")


@pytest.mark.parametrize("words", [["show", "--tensors"], ["ls"], ["verify", "--all"], ["diff"], ["audit"]], ids=str)
def test_no_text_in_a_checkpoint_steers_a_terminal(
    saves: Path, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    edit_manifest(_steering)(saves / NEWEST)
    place = saves / NEWEST if words[0] not in ("ls", "verify") else saves
    more = [str(saves / OLDER)] if words[0] == "diff" else []
    main(["ckpt", words[0], str(place), *more, *words[1:]])
    printed = capfd.readouterr()
    assert not re.search("[\x1b\x07\x9b]", printed.out + printed.err)


# --- memory -------------------------------------------------------------------------------------------------------

GREEDY = [
    "lists in lists, as manifest",
    "objects in objects, as manifest",
    "a number of a million digits, as manifest",
    "a manifest of 2 GiB",
    "a shard of 8 TiB",
    "a shard without an end",
    "a manifest without an end",
    "a shard of 10^15 bytes",
    "a header of 2^62 bytes",
    "a state a hundred thousand lists deep",
    *LONG,
]


def _appetite(folder: str) -> tuple[str, int]:
    """Return why the newest checkpoint was not used, and the peak of memory that finding out took, in bytes."""
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _peak()
    storage, axis = LocalStorage(Path(folder)), Meeting(1).axis(0)
    loaded = load_newest(storage, axis, state_of({name: torch.zeros(shape) for name, shape in SHAPES.items()}))
    assert loaded is not None
    return loaded.broken[NEWEST], _peak() - before


def _peak() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


SHAPES = {"model.inner.weight": (8, 4), "model.inner.bias": (8,), "model.head.weight": (3, 8), "model.head.bias": (3,)}


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory can't be measured")
@pytest.mark.parametrize("name", GREEDY)
def test_no_damaged_checkpoint_takes_much_memory(saves: Path, name: str) -> None:
    evil, words = BROKEN[name]
    evil(saves / NEWEST)
    manifest = saves / NEWEST / "manifest.json"
    size = manifest.stat().st_size if manifest.is_file() else 0
    [(fault, grown)] = in_world(1, _appetite, str(saves))
    assert re.search(words, fault), fault
    assert grown < 64 * 2**20 + 24 * (size if size < 2**30 else 0)

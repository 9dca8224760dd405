"""An exception of a user's code costs nothing that was learned: the state after the last finished update is saved, and
the run resumes from it with the exact next sample. The exception stays what it was."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import gives
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.checkpoint.storage import names_by_step
from lockstep.core.errors import Rescued
from lockstep.core.phase_clock import Phase
from lockstep.core.records import Batch
from lockstep.loop.ledger import audit
from lockstep.loop.session import components_of
from lockstep.resuming.checkpoints import Rescue

_FAULT = "FAULT"  # environment: which code fails, on which rank (-1: on all), from which of its calls on


def _fails(what: str, calls: int) -> bool:
    kind, rank, call = os.environ.get(_FAULT, "none 0 0").split()
    return kind == what and int(rank) in (-1, int(os.environ.get("RANK", "0"))) and calls >= int(call)


class Bad(Exception):
    """What a user's code raises."""


class Points:
    """Raises in the middle of a run."""

    def __init__(self) -> None:
        self._points = small.points()
        self._calls = 0

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        self._calls += 1
        if _fails("data", self._calls):
            raise Bad("a sample that can't be read")
        return self._points[index]


class Objective(small.CrossEntropy):
    def __init__(self) -> None:
        self._calls = 0

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        self._calls += 1
        if _fails("objective", self._calls):
            raise Bad("an objective that fails")
        return super().loss_sum(outputs, batch)


def _config(folder: Path, model: str = "Net", **sections: Any) -> dict[str, Any]:
    data = {"train": {"kind": "custom", "target": f"{__name__}:Points"}}
    objective = {"kind": "custom", "target": f"{__name__}:Objective"}
    run = {"steps": 9, "folder": str(folder)}
    return small.config(model, **{"data": data, "objective": objective, "run": run, **sections})


def _failed(config: dict[str, Any], fault: str) -> tuple[str, list[str]]:
    """The error of a rank, and its note on what was saved. It stays a while, so that its end informs no other."""
    os.environ[_FAULT] = fault
    try:
        lockstep.train(config)
    except Exception as error:
        found, notes = str(error), []
        link: BaseException | None = error
        while link is not None:
            notes += [str(note) for note in getattr(link, "__notes__", ()) if isinstance(note, Rescued)]
            link = link.__cause__
        return f"{type(error).__name__}: {found}", notes
    finally:
        os.environ[_FAULT] = "none 0 0"
    return "nothing", []


def _resumed(config: dict[str, Any]) -> float:
    return float(lockstep.train(config).summary["loss"])


def _fail_and_resume(config: dict[str, Any], fault: str) -> tuple[str, list[str], float]:
    said, notes = _failed(config, fault)
    return said, notes, _resumed(config)


def _steps(run: Path) -> list[int]:
    return list(names_by_step(LocalStorage(run / "checkpoints").names()))


def _check_whole(run: Path, attempts: int) -> None:
    storage = LocalStorage(run / "checkpoints")
    manifest = read_manifest(storage, storage.names()[-1])
    assert (manifest.step, len(manifest.state["ledger"])) == (9, attempts)
    assert audit(manifest.state, manifest.samples).complete


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> float:
    return _resumed(_config(tmp_path_factory.mktemp("undisturbed") / "run"))


@pytest.mark.parametrize(
    ("fault", "saved"),
    [
        pytest.param("data 0 60", 4, id="data"),  # while update 4 is under way, whose data are there
        pytest.param("objective 0 6", 5, id="objective"),
    ],
)
def test_one_process_saves_what_it_has_learned(fault: str, saved: int, undisturbed: float, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said, notes = _failed(_config(run), fault)
    assert "Bad" in said or "can't be read" in said
    assert [gives(note, f"step {saved}", f"saved in {run / 'checkpoints'}") for note in notes] == [True]
    assert _steps(run) == [saved]
    assert _resumed(_config(run)) == undisturbed
    _check_whole(run, attempts=2)


def test_nothing_is_saved_where_nothing_was_learned(tmp_path: Path) -> None:
    assert _failed(_config(tmp_path / "run"), "objective 0 1")[1] == []
    assert _steps(tmp_path / "run") == []


def test_good_checkpoints_stay(tmp_path: Path) -> None:
    """The one that is saved in need doesn't take the place of those that `keep_last` counts."""
    checkpoint = {"every": "2 steps", "keep_last": 1, "asynchronous": False}
    _failed(_config(tmp_path / "run", checkpoint=checkpoint), "objective 0 6")
    assert _steps(tmp_path / "run") == [4, 5]


def test_a_storage_that_fails_too_leaves_the_exception_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def train() -> None:
        with lockstep.session(small.config(run={"steps": 9})) as session:
            session.checkpoints(tmp_path)
            for report in session:
                if report.step == 4:
                    monkeypatch.setattr(LocalStorage, "names", gone)
                    monkeypatch.setattr(LocalStorage, "begin", gone)
                    raise Bad("in the loop")

    with pytest.raises(Bad) as raised:
        train()
    assert [gives(note, "step 4", os.strerror(errno.EIO)) for note in raised.value.__notes__] == [True]


class WithLargeBuffer(small.WithBatchNorm):
    """What its forwards change is too large to be copied before each update."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2**18 + 1))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(points)


_SAVES = {"every": "2 steps", "asynchronous": False}


def test_buffers_that_a_failed_forward_has_changed_are_put_back(tmp_path: Path) -> None:
    batch = {"batch": {"global_size": 10}}
    undisturbed = _resumed(_config(tmp_path / "undisturbed", "WithBatchNorm", **batch))
    config = _config(tmp_path / "run", "WithBatchNorm", **batch)
    assert "step 5 is saved" in _failed(config, "objective 0 6")[1][0]
    assert _resumed(config) == undisturbed


def test_a_state_that_is_not_sound_is_not_saved(tmp_path: Path) -> None:
    """The forward has changed the buffers already, and would do so again."""
    sections = {"batch": {"global_size": 10}, "checkpoint": _SAVES}
    model = {"kind": "custom", "target": f"{__name__}:WithLargeBuffer"}
    _, notes = _failed({**_config(tmp_path / "run", **sections), "model": model}, "objective 0 6")
    assert len(notes) == 1
    reason = "the forward that failed may have changed seen"
    assert notes[0].endswith(f": {reason}")
    assert _steps(tmp_path / "run") == [2, 4]
    (tmp_path / "data").mkdir()
    _, notes = _failed({**_config(tmp_path / "data" / "run", **sections), "model": model}, "data 0 75")
    assert "is saved in" in notes[0]


def _half_an_update(step: Any, rate: float, divisor: Any, keep: Any) -> None:
    raise Bad("in the middle of an update")


def test_half_an_update_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.loop.session import Session

    commit = Session.commit

    def cut(session: Session) -> Any:
        if session.progress.steps == 5:
            monkeypatch.setattr(type(components_of(session).sharding.step), "update", _half_an_update)
        return commit(session)

    monkeypatch.setattr(Session, "commit", cut)
    _, notes = _failed(_config(tmp_path / "run"), "none 0 0")
    assert [gives(note, "step 5", "in the middle") for note in notes] == [True]
    assert _steps(tmp_path / "run") == []


def _raise(kind: str) -> None:
    if kind == "exit":
        sys.exit(7)
    raise KeyboardInterrupt if kind == "interrupt" else Bad(f"in {kind}")


def _loop(config: dict[str, Any], saves: Path, kind: str) -> None:
    with lockstep.session(config) as session:
        session.checkpoints(saves)
        for report in session:
            if report.step == 3:
                _raise(kind)


@pytest.mark.parametrize(("kind", "raised"), [("loop", Bad), ("exit", SystemExit), ("interrupt", KeyboardInterrupt)])
def test_a_custom_loop_saves_too(
    kind: str, raised: type[BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path / "unused")
    with pytest.raises(raised) as caught:
        _loop(config, tmp_path / "saves", kind)
    assert "step 3 is saved" in caught.value.__notes__[0]
    assert ("lockstep: the state after step 3 is saved" in capsys.readouterr().err) is (kind == "exit")
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 7
    with lockstep.session(config) as session:
        saves = session.checkpoints(tmp_path / "saves")
        assert saves.resumed_from == session.progress.steps == 3


def _interrupted_amid_an_update(config: dict[str, Any], saves: Path) -> None:
    with lockstep.session(config) as session:
        session.checkpoints(saves)
        for batch in session.batches():
            session.accumulate(batch)
            if batch.step == 3:
                raise KeyboardInterrupt
            session.commit()


def test_ctrl_c_amid_an_update_loses_no_more_than_the_update(tmp_path: Path) -> None:
    """Its gradient is there, and nothing is updated yet."""
    config = _config(tmp_path / "unused")
    with pytest.raises(KeyboardInterrupt) as caught:
        _interrupted_amid_an_update(config, tmp_path / "saves")
    assert "step 3 is saved" in caught.value.__notes__[0]


_TWO = {"launch": {"device": "cpu"}}  # a rank that waited for its peers would wait for ten minutes


@pytest.mark.parametrize(
    ("strategy", "fault", "saved"),
    [
        pytest.param("ddp", "data 1 30", 2, id="ddp, data of one rank"),
        pytest.param("fsdp", "data 1 30", 2, id="fsdp, data of one rank"),
        pytest.param("ddp", "objective 1 6", 5, id="ddp, objective of one rank"),
        pytest.param("ddp", "objective -1 6", 5, id="ddp, objective of all ranks"),
    ],
)
def test_ranks_save_together_or_one_for_all(
    strategy: str, fault: str, saved: int, undisturbed: float, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = _config(run, parallel={"strategy": strategy}, **_TWO)
    alone = fault.startswith("objective 1")
    ranks = in_world(2, _failed_or_left, config, fault) if alone else in_world(2, _failed, config, fault)
    assert any("Bad" in said or "can't be read" in said for said, _ in ranks)
    text = f"the state after step {saved} is saved in {run / 'checkpoints'}; start it again to continue"
    assert [notes for said, notes in ranks if said != "left"] == [[text]] * (1 if alone else 2)
    assert _steps(run) == [saved]
    found = in_world(2, _resumed, config)
    assert found == [pytest.approx(undisturbed, rel=1e-6)] * 2
    _check_whole(run, attempts=2)


def _failed_or_left(config: dict[str, Any], fault: str) -> tuple[str, list[str]]:
    """The rank that doesn't fail waits in a collective: a launcher would end it."""
    if os.environ["RANK"] == "1":
        return _failed(config, fault)
    import threading

    found: list[tuple[str, list[str]]] = []
    threading.Thread(target=lambda: found.append(_failed(config, "none 0 0")), daemon=True).start()
    until = time.monotonic() + 30
    place = Path(config["run"]["folder"]) / "checkpoints"
    while time.monotonic() < until and not found and not LocalStorage(place).names():
        time.sleep(0.05)
    return "left", []


def test_ranks_that_hold_parts_save_them_where_all_fail(tmp_path: Path) -> None:
    config = _config(tmp_path / "run", parallel={"strategy": "fsdp"}, **_TWO)
    for _, notes in in_world(2, _failed, config, "objective -1 6"):
        assert [gives(note, "step 5", "sharded") for note in notes] == [True]
    assert _steps(tmp_path / "run") == []


def test_it_has_the_time_of_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the watch gave it that of an update: a large state that was saved slowly was taken for a hang."""
    phases, save = [], Rescue._save

    def noted(self: Rescue) -> str | None:
        phases.append(components_of(self.session).world.clock.position().phase)
        return save(self)

    monkeypatch.setattr(Rescue, "_save", noted)
    _, notes = _failed(_config(tmp_path / "run"), "objective 0 6")
    assert phases == [Phase.SAVE]
    assert "is saved" in notes[0]

"""Ctrl-C, and errors in the middle of an update, under a custom loop that handles them and continues."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import fails
from torch import Tensor

import lockstep
from lockstep.core.deferred_signals import DeferredHandler
from lockstep.core.records import Batch


class Disturbed(torch.optim.AdamW):
    """Calls a function in the middle of one of its steps."""

    def __init__(self, parameters: Any, at: int, act: Callable[[], object]) -> None:
        super().__init__(parameters, lr=0.01)
        self._at, self._act, self._steps = at, act, 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self._steps += 1
        if self._steps == self._at:
            self._act()
        return result


class DisturbedObjective(small.CrossEntropy):
    """Calls a function, once one is set, after its second forward from then on."""

    act: Callable[[], object] | None = None
    _calls = 0

    def loss_sum(self, outputs: Tensor, batch: Batch) -> Tensor:
        loss = super().loss_sum(outputs, batch)
        self._calls += self.act is not None
        if self._calls == 2 and self.act is not None:
            self.act, act = None, self.act
            act()
        return loss


def _ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _fail() -> None:
    raise ValueError("a bug")


def _opened(at: int = 0, act: Callable[[], object] = _ctrl_c, **objects: Any) -> Any:
    config = small.config(batch={"global_size": 10, "micro_size": 5})
    for given in ("model", "optim", "objective"):
        del config[given]
    objects.setdefault("objective", small.CrossEntropy())
    return lockstep.session(
        config, model=small.WithBatchNorm, optimizer=lambda groups: Disturbed(groups, at, act), **objects
    )


def _train(reports: Iterable[object]) -> None:
    for _ in reports:
        pass


def _train_in(folder: Path, at: int, act: Callable[[], object]) -> None:
    with _opened(at, act) as session:
        session.checkpoints(folder)
        _train(session)


def _tensors(session: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in session.state().tensors.items()}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    with _opened() as session:
        _train(session)
        return _tensors(session)


def _same(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in tensors.items())


def _assert_resumes(folder: Path, step: int, undisturbed: dict[str, Tensor]) -> None:
    with _opened() as session:
        assert session.checkpoints(folder).resumed_from == step
        _train(session)
        assert _same(_tensors(session), undisturbed)


def test_ctrl_c_amid_an_update_comes_at_its_end(undisturbed: dict[str, Tensor], tmp_path: Path) -> None:
    with _opened(at=3) as session:
        saves = session.checkpoints(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            _train(session)
        assert session.progress.steps == 3
        saves.save()
        assert saves.finish()[-1].failure is None
        _train(session)
        assert _same(_tensors(session), undisturbed)
    _assert_resumes(tmp_path, 3, undisturbed)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_amid_an_update_is_rescued(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        _train_in(tmp_path, 3, _ctrl_c)
    assert "the state after step 3 is saved" in str(caught.value.__notes__)


def test_ctrl_c_in_a_forward_changes_nothing(undisturbed: dict[str, Tensor], tmp_path: Path) -> None:
    """What it has changed in gradients and buffers is undone, for the save and for the updates that follow."""
    objective = DisturbedObjective()
    with _opened(objective=objective) as session:
        saves = session.checkpoints(tmp_path)
        reports = iter(session)
        assert [next(reports).step, next(reports).step] == [1, 2]
        objective.act = _ctrl_c
        with pytest.raises(KeyboardInterrupt):
            _train(reports)
        assert session.progress.steps == 2
        saves.save()
        saves.finish()
        _train(session)
        assert _same(_tensors(session), undisturbed)
    _assert_resumes(tmp_path, 2, undisturbed)


class _Disturbed(torch.utils.data.Dataset[Any]):
    """Acts once before it returns a sample."""

    def __init__(self) -> None:
        self.act: Callable[[], None] | None = None
        self._points = small.points()

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        act, self.act = self.act, None
        if act is not None:
            act()
        return self._points[index]


def test_an_update_is_repeated_after_ctrl_c_while_the_next_ones_data_is_read() -> None:
    def losses(act: Callable[[], None] | None) -> list[float]:
        data, found = _Disturbed(), []
        with lockstep.session(small.config(), train_dataset=data) as session:
            for batch in session.batches():
                if act is not None and batch.step == 2:
                    data.act = act
                    with pytest.raises(KeyboardInterrupt):
                        session.accumulate(batch)
                session.accumulate(batch)
                found.append(session.commit().result().loss)
        return found

    assert losses(_ctrl_c) == losses(None)


def _interrupted(folder: Path) -> None:
    """Saves the state after update 2, and tries everything after half of update 3."""
    with _opened(at=3, act=_fail) as session:
        saves = session.checkpoints(folder)
        batches = session.batches()
        for _ in range(2):
            session.accumulate(next(batches))
            session.commit()
        batch = next(batches)
        saves.save()
        session.accumulate(batch)
        try:
            session.commit()
        except ValueError:
            for use in (
                session.state,
                saves.save,
                lambda: session.accumulate(batch),
                lambda: next(batches),
                lambda: next(session.batches()),
            ):
                with fails(lockstep.RunFailed, "interrupted", "step 2"):
                    use()
            raise


def test_half_an_update_is_neither_saved_nor_trained_on(undisturbed: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bug") as caught:
        _interrupted(tmp_path)
    assert "the state after step 2 is saved" in str(caught.value.__notes__)
    _assert_resumes(tmp_path, 2, undisturbed)


def test_a_restored_state_is_whole_again(undisturbed: dict[str, Tensor]) -> None:
    with _opened(at=3, act=_fail) as session:
        next(iter(session))
        state = session.state()
        whole = type(state)(_tensors(session), dict(state.values), state.changes_in_forward)
        with pytest.raises(ValueError, match="a bug"):
            _train(session)
        session.restore(whole)
        _train(session)
        assert _same(_tensors(session), undisturbed)


@contextmanager
def _handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class Wanted(Exception):
    """What handlers of signals raise here."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise Wanted


@pytest.mark.parametrize("within", [False, True])
def test_a_users_own_handler_waits_too(within: bool) -> None:
    """One that was there before, and one that the loop sets; either is there afterwards."""
    with _handled(signal.SIGINT, signal.default_int_handler if within else _raise):
        with _opened(at=3) as session:
            if within:
                signal.signal(signal.SIGINT, _raise)
            with pytest.raises(Wanted):
                _train(session)
            assert session.progress.steps == 3
        assert signal.getsignal(signal.SIGINT) is _raise


def test_a_data_worker_that_dies_amid_an_update_costs_nothing(tmp_path: Path) -> None:
    """Torch's handler of SIGCHLD raises in the main thread, wherever that is."""
    with _handled(signal.SIGCHLD, DeferredHandler(_raise)), pytest.raises(Wanted) as caught:
        _train_in(tmp_path, 3, lambda: os.kill(os.getpid(), signal.SIGCHLD))
    assert "the state after step 3 is saved" in str(caught.value.__notes__)


def test_a_save_whose_thread_could_not_start_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, failures = threading.Thread.start, iter([True])

    def start_later(thread: threading.Thread) -> None:
        if thread.name == "checkpoint" and next(failures, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_later)
    with _opened() as session:
        saves = session.checkpoints(tmp_path)
        next(iter(session))
        with pytest.raises(RuntimeError, match="can't start"):
            saves.save()
        saves.save()
        assert [save.failure for save in saves.finish()] == [None]


def test_ctrl_c_while_a_save_starts_comes_when_it_has(
    undisturbed: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, interrupts = threading.Thread.start, iter([_ctrl_c])

    def start_interrupted(thread: threading.Thread) -> None:
        if thread.name == "checkpoint":
            next(interrupts, lambda: None)()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_interrupted)
    with _opened() as session:
        saves = session.checkpoints(tmp_path)
        next(reports := iter(session))
        with pytest.raises(KeyboardInterrupt):
            saves.save()
        _train(reports)
        assert [(save.step, save.failure) for save in saves.finish()] == [(1, None)]
    _assert_resumes(tmp_path, 1, undisturbed)

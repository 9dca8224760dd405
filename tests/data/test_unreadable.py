"""Errors of reading samples are reported by cause: the sample, the batch, a transient error, or memory."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from index_sources import IndexSource, make_loader
from kit.failures import fails

from lockstep.config.data_sections import BadSamples
from lockstep.core.errors import RunFailed, Stopped, UnusableSamples
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.out_of_memory import error_location
from lockstep.core.planted import UnreadableSamples, plant_unreadable
from lockstep.core.progress import Progress
from lockstep.data.custom import adapt_dataset
from lockstep.data.sources import skipping
from lockstep.training.job import prefix_warnings


class Failing(IndexSource):
    """A source that raises what `errors` returns for the number of the call, from 1."""

    def __init__(self, samples: int, errors: Callable[[int], Exception | None]) -> None:
        super().__init__(samples)
        self._errors = errors
        self.calls = 0

    def fetch(self, indices: Any) -> Any:
        self.calls += 1
        error = self._errors(self.calls)
        if error is not None:
            raise error
        return super().fetch(indices)


def first_update(source: IndexSource, **options: Any) -> None:
    loader = make_loader(source, shuffle=False, **options)
    try:
        next(loader.updates(Progress()))
    finally:
        loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_that_happens_once_costs_a_warning(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    source = Failing(3, lambda call: OSError("stale file handle") if call == 1 else None)
    first_update(source, workers=workers)
    warning = "reading samples 0, 1, 2 failed once and succeeded when it was tried again: OSError: stale file handle ("
    assert workers or warning in caplog.text


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_are_planted_fail_once_in_whichever_process_reads_them(workers: int, tmp_path: Path) -> None:
    def fails() -> bool:
        with suppress(FileExistsError):
            (tmp_path / str(os.getpid())).touch(exist_ok=False)
            return True
        return False

    def batches() -> list[list[int]]:
        loader = make_loader(IndexSource(64), shuffle=False, workers=workers)
        try:
            updates = loader.updates(Progress())
            return [next(updates).micro_batches[0].inputs[0].tolist() for _ in range(3)]
        finally:
            loader.close()

    usual = batches()
    plant_unreadable(UnreadableSamples(8, 16, fails))
    try:
        assert batches() == usual
    finally:
        plant_unreadable(None)
    (process,) = tmp_path.iterdir()
    assert (process.name == str(os.getpid())) == (workers == 0)


class Once:
    """A dataset of 8 items, of which item 5 is bad the first time that it is read for training."""

    def __init__(self, error: Exception | None) -> None:
        self._error, self.is_bad = error, False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor | None:
        if index == 5 and self.is_bad:
            self.is_bad = False
            if self._error is not None:
                raise self._error
            return None
        return torch.zeros(2)


@pytest.mark.parametrize("policy", ["fail", "skip"])
@pytest.mark.parametrize(
    ("error", "warning"),
    [
        (OSError("stale"), "reading sample 5 failed once and succeeded when it was tried again: OSError: stale ("),
    ],
)
def test_only_the_sample_that_failed_once_is_named(
    error: Exception | None, warning: str, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Once(error)
    source = skipping(adapt_dataset(dataset), BadSamples(policy=policy))
    dataset.is_bad = True
    loader = make_loader(source, shuffle=False, global_size=8, micro_size=8)
    (batch,) = next(loader.updates(Progress())).micro_batches
    assert (batch.samples, batch.left_out) == (8, ())
    (record,) = caplog.records
    assert record.getMessage().startswith(warning)


def test_a_warning_has_the_name_of_the_program(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    logger = logging.getLogger("lockstep")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logger, "handlers", [])
    for _ in range(2):
        prefix_warnings()
    logging.getLogger("lockstep.data").warning("reading sample %d failed once", 17)
    assert capsys.readouterr().err == "lockstep: reading sample 17 failed once\n"


def test_an_error_of_the_whole_batch_is_reported_as_that() -> None:
    source = Failing(3, lambda call: ValueError("sizes differ") if call in (1, 5) else None)
    with fails(RunFailed, "samples 0, 1, 2", "ValueError", kind=FailureKind.SAMPLE):
        first_update(source)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("odd", [0, 2])
def test_the_sample_whose_shape_is_another_is_named(odd: int, workers: int) -> None:
    items: list[Any] = [(torch.zeros(2), 1)] * 4
    items[odd] = (torch.zeros(3), 1)
    loader = make_loader(adapt_dataset(items), shuffle=False, global_size=4, micro_size=4, workers=workers)
    message = f"sample {odd} can be read, but not put into one batch with others: RuntimeError: "
    with pytest.raises(UnusableSamples, match=re.escape(message)) as raised:
        next(loader.updates(Progress()))
    assert raised.value.samples == (odd,)
    loader.close()


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        (
            torch.zeros(2, dtype=torch.float64),
            "sample 2 can be read, but not put into one batch with others: TypeError",
        ),
        (torch.zeros(2, requires_grad=True), "sample 2 can't be read: TypeError: "),
    ],
)
def test_the_sample_whose_tensor_is_another_is_named(odd: torch.Tensor, message: str) -> None:
    items: list[Any] = [torch.zeros(2)] * 4
    items[2] = odd
    loader = make_loader(adapt_dataset(items), shuffle=False, global_size=4, micro_size=4)
    with pytest.raises(UnusableSamples, match=re.escape(message)) as raised:
        next(loader.updates(Progress()))
    assert raised.value.samples == (2,)
    loader.close()


def test_samples_of_several_shapes_are_named() -> None:
    loader = make_loader(adapt_dataset([torch.zeros(size) for size in (2, 3, 4)]), shuffle=False)
    with fails(RunFailed, "samples 0, 1, 2", "RuntimeError", kind=FailureKind.SAMPLE):
        next(loader.updates(Progress()))


@pytest.mark.parametrize("item", [None, object(), (torch.zeros(2), {"label": None}), np.array(["a"])])
@pytest.mark.parametrize("place", [0, 1])
def test_an_item_that_torch_cant_put_into_a_batch_is_named(item: object, place: int) -> None:
    items: list[Any] = [(torch.zeros(2), {"label": 1})] * 3
    items[place] = item
    loader = make_loader(adapt_dataset(items), shuffle=False)
    with fails(RunFailed, f"sample {place} can't be read", "TypeError", kind=FailureKind.SAMPLE):
        next(loader.updates(Progress()))
    skips = skipping(adapt_dataset(items), BadSamples(policy="skip"))
    (left_out,) = skips.fetch(np.arange(3)).left_out
    assert left_out.index == place


@pytest.mark.parametrize("workers", [0, 1])
def test_out_of_memory_is_not_blamed_on_a_sample_and_not_tried_again(workers: int) -> None:
    source = Failing(3, lambda call: MemoryError() if call == 1 else None)
    with pytest.raises(MemoryError) as failed:
        first_update(source, workers=workers)
    place = error_location(failed.value)
    assert place == "while reading samples 0, 1, 2"
    assert place.phase == "data"
    assert source.calls == (1 if workers == 0 else 0)


def test_out_of_memory_during_the_search_for_the_sample_is_raised() -> None:
    with pytest.raises(MemoryError):
        first_update(Failing(3, lambda call: ValueError("bad") if call == 1 else MemoryError()))


def test_a_stop_during_the_search_for_the_sample_is_raised() -> None:
    with pytest.raises(Stopped):
        first_update(Failing(3, lambda call: ValueError("bad") if call == 1 else Stopped("stopped by SIGTERM")))


# --- items that a fingerprint reads ---------------------------------------------------------------------------------


class Items:
    """A dataset whose item 0, which every fingerprint reads, raises `error`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 0:
            raise self._error
        return torch.zeros(2)


def test_an_unreadable_item_of_the_fingerprint_is_named() -> None:
    with fails(RunFailed, "sample 0", "KeyError: 'no such image'", kind=FailureKind.SAMPLE) as failed:
        adapt_dataset(Items(KeyError("no such image")))
    assert re.search(r"unreadable.py:\d+\)$", str(failed.value))


def test_a_fingerprint_that_runs_out_of_memory_raises_with_its_place() -> None:
    with pytest.raises(MemoryError) as failed:
        adapt_dataset(Items(MemoryError()))
    assert error_location(failed.value) == "while reading sample 0"

"""Fetches micro-batches, in this process or in worker processes, with the same bits.

    requests --> workers = 0: source.fetch, in this process       --> batches, in the same order
             \\-> workers > 0: torch's DataLoader, one request each -/

A signal to the process group is handled by the rank: workers ignore it, continue to fetch for the updates that are
left, and end with the rank, also when that is killed.

torch's DataLoader brings workers, shared memory, page-locked memory and prefetch; its sampler yields requests and
its dataset answers a whole request at once, so nothing is collated sample by sample.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import BaseContext, ForkProcess, ForkServerProcess, SpawnProcess
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lockstep.core.control_groups import Kills, kernel_kills, why_killed
from lockstep.core.errors import Failure, RunFailed
from lockstep.core.protocols import Source
from lockstep.core.records import Batch
from lockstep.core.safe_path import safe_interpreters
from lockstep.core.stopping import (
    SAVE_SIGNAL,
    STOP_SIGNALS,
    blocked_signals,
    die_with_parent,
    exit_with_process,
    no_effect,
)
from lockstep.data import noise
from lockstep.data.order import Indices
from lockstep.data.unreadable import explained, named

_SIGCHLD_WAIT_S = 1.0


class FetchRequest(NamedTuple):
    """A micro-batch to fetch.

    Attributes:
        indices: [samples] of the source.
        filler: whether the batch has no weight.
        epoch_key: of the noise that belongs to each sample.
        generator_key: seed of the process' generators; None for sources that don't draw.
    """

    indices: Indices
    filler: bool
    epoch_key: int
    generator_key: int | None


@dataclass(frozen=True, slots=True)
class Workers:
    """The worker processes of a loader.

    Attributes:
        number: of processes; 0: the rank fetches itself.
        prefetch: batches that each holds ready.
        pin: batches are put into page-locked memory.
        key: seed of their generators.
    """

    number: int
    prefetch: int
    pin: bool
    key: int


def fetch_all(source: Source, requests: Iterable[FetchRequest], workers: Workers) -> Iterator[Batch]:
    """Return a batch for each request.

    Raises:
        RunFailed: the source raised, or a worker died; names the samples.
    """
    if workers.number == 0:
        return (fetch(source, request) for request in requests)
    return _from_workers(source, requests, workers)


def fetch(source: Source, request: FetchRequest) -> Batch:
    """Return the batch that `request` asks for."""
    try:
        batch = _fetch(source, request)
    except Failure:
        raise
    except Exception as error:
        read = lambda indices: _fetch(source, request._replace(indices=indices))  # noqa: E731
        raise explained(read, request.indices, error) from error
    return replace(batch, samples=0, tokens=0) if request.filler else batch


def _fetch(source: Source, request: FetchRequest) -> Batch:
    if request.generator_key is None:
        return source.fetch(request.indices)
    noise.use_epoch(request.epoch_key)
    with noise.keyed_generators(request.generator_key):
        return source.fetch(request.indices)


# --- workers ----------------------------------------------------------------------------------------------------


def _from_workers(source: Source, requests: Iterable[FetchRequest], workers: Workers) -> Iterator[Batch]:
    pending: deque[FetchRequest] = deque()  # taken by the DataLoader, which runs ahead of what it delivers
    worker_dataset = _WorkerDataset(source, workers.number)

    def taken() -> Iterator[FetchRequest]:
        for request in requests:
            pending.append(request)
            yield request

    loader = DataLoader(
        worker_dataset,
        batch_sampler=taken(),  # type: ignore[arg-type]  # any iterable will do
        collate_fn=_identity,
        num_workers=workers.number,
        prefetch_factor=workers.prefetch,
        pin_memory=workers.pin,
        multiprocessing_context=_killable_context(),
        worker_init_fn=partial(_ignore_signals, os.getpid(), _in_main_thread()),
        # its own generator, or it would draw from the process' and change what the model draws
        generator=torch.Generator().manual_seed(workers.key),
    )
    before = kernel_kills()
    forks = multiprocessing.get_start_method() == "fork"
    with nullcontext() if forks else safe_interpreters(), blocked_signals(forks=forks):
        answers = iter(loader)
    with _naming_deaths(_WorkerSet(lambda: worker_dataset.busy_with(pending), before)):
        while True:
            try:
                answer = next(answers, None)
            except RuntimeError as error:  # what torch raises when a worker has died
                raise _death(error, worker_dataset.busy_with(pending), before) from error
            except (OSError, EOFError) as error:  # its end of a pipe is gone
                time.sleep(_SIGCHLD_WAIT_S)  # SIGCHLD comes after that, and says more
                raise _death(error, worker_dataset.busy_with(pending), before) from error
            if answer is None:
                return
            pending.popleft()
            yield _batch_of(answer)


# --- signals ----------------------------------------------------------------------------------------------------

_RANK_SIGNALS = (*STOP_SIGNALS, SAVE_SIGNAL)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _ignore_signals(rank: int, from_main_thread: bool, worker: int) -> None:
    """Leave signals to the rank; called in a worker, before it fetches."""
    if os.getppid() == rank and from_main_thread:
        die_with_parent(rank)
    else:  # a fork server started it, or a thread, whose end would count as the rank's
        exit_with_process(rank)
    for number in _RANK_SIGNALS:
        # not SIG_IGN, which a program that the data set starts would inherit; system calls go on where they were
        signal.signal(number, no_effect)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RANK_SIGNALS)


class _Killable:
    """A worker that ignores SIGTERM and can be killed.

    Torch terminates one that doesn't end by itself, and Python, at its exit, those that are left.
    """

    def start(self) -> None:
        super().start()  # type: ignore[misc]
        handle: Any = self._popen  # type: ignore[attr-defined]  # Python's exit asks it, not the process
        handle.terminate = handle.kill


class _ForkWorker(_Killable, ForkProcess):
    pass


class _SpawnWorker(_Killable, SpawnProcess):
    pass


class _ForkServerWorker(_Killable, ForkServerProcess):
    pass


_WORKERS = {"fork": _ForkWorker, "spawn": _SpawnWorker, "forkserver": _ForkServerWorker}


def _killable_context() -> BaseContext:
    """Return this process's way to start others, with workers that can be terminated."""
    method = multiprocessing.get_start_method()
    context = copy.copy(multiprocessing.get_context(method))
    context.Process = _WORKERS[method]  # type: ignore[attr-defined]
    return context


# --- requests and answers ---------------------------------------------------------------------------------------


def _death(error: Exception, busy: Sequence[FetchRequest], before: Kills) -> RunFailed:
    """Return the failure that names what dead workers were fetching.

    Args:
        before: the kernel's counts when the workers were started.
    """
    if isinstance(error.__cause__, RunFailed):  # named in the handler of SIGCHLD
        return error.__cause__
    samples = f" while samples {' or '.join(named(request.indices) for request in busy)} were fetched" if busy else ""
    message = str(error).strip(" .")
    if message.endswith("signal: Killed"):
        reason = f". Reason: {why_killed(before, kernel_kills(), _FEWER)}"
    elif "killed by signal" in message:  # another one, such as a segmentation fault
        reason = ""
    else:
        reason = f". If it was killed: {why_killed(before, kernel_kills(), _FEWER)}"
    return RunFailed(
        f"a data worker died{samples}: {message}{reason}. With data.loader.workers: 0 the rank fetches itself and "
        "shows what happens"
    )


_FEWER = "Set fewer data.loader.workers, or a smaller data.loader.prefetch"


class _WorkerSet(NamedTuple):
    """A set of workers: the requests that it is busy with, and the kernel's counts when it was started."""

    busy: Callable[[], list[FetchRequest]]
    before: Kills


_running: list[_WorkerSet] = []


@contextmanager
def _naming_deaths(workers: _WorkerSet) -> Iterator[None]:
    """Name the samples of a death while the block runs, wherever the main thread is: torch's handler of SIGCHLD raises
    there."""
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and not isinstance(handler, _ChildHandler) and _in_main_thread():
        signal.signal(signal.SIGCHLD, _ChildHandler(handler))
    _running.append(workers)
    try:
        yield
    finally:
        _running.remove(workers)


class _ChildHandler:
    """Torch's handler of SIGCHLD, which torch sets once for all loaders of a process."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)
        except RuntimeError as error:
            if not _running:  # a user's own workers
                raise
            busy = [request for workers in _running for request in workers.busy()]
            raise _death(error, busy, _running[0].before) from error


class _WorkerDataset(Dataset[Any]):
    """The data set of a worker. It answers a request with a mapping, which torch can pin; failures too."""

    def __init__(self, source: Source, workers: int) -> None:
        self._source = source
        # the first index of what each worker fetches, in memory that outlives the worker; -1: nothing
        self._busy = torch.full((workers,), -1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def __getitems__(self, request: FetchRequest) -> Mapping[str, Any]:
        worker = get_worker_info()
        assert worker is not None
        self._busy[worker.id] = int(request.indices[0])
        try:
            batch = fetch(self._source, request)
        except Exception as failure:  # a `RunFailed`, or memory ran out
            return {"failure": failure, "traceback": traceback.format_exc()}
        finally:
            self._busy[worker.id] = -1
        return {"inputs": batch.inputs, "targets": batch.targets, "samples": batch.samples, "tokens": batch.tokens}

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("requests are answered whole")

    def busy_with(self, pending: Iterable[FetchRequest]) -> list[FetchRequest]:
        firsts = set(self._busy.tolist())
        return [request for request in pending if int(request.indices[0]) in firsts]


class InWorker(Exception):
    """The text of a data worker's traceback, as a failure's cause: tracebacks themselves can't be sent."""


def _identity(answer: Any) -> Any:
    return answer


def _batch_of(answer: Mapping[str, Any]) -> Batch:
    if "failure" in answer:
        raise answer["failure"] from InWorker(answer["traceback"])
    inputs = answer["inputs"]
    if not isinstance(inputs, Mapping):
        inputs = tuple(inputs)  # pinning turns tuples into lists
    return Batch(inputs, answer["targets"], answer["samples"], answer["tokens"])

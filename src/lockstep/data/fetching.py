"""Fetch micro-batches in this process or in worker processes, bitwise identical.

    requests --> workers = 0: source.fetch, in this process       --> batches, in the same order
             \\-> workers > 0: torch's DataLoader, one request each -/

torch's DataLoader provides workers, shared and page-locked memory, and prefetch. Its sampler yields requests, and its
dataset answers a whole request at once. The rank handles signals to the process group: workers ignore them, and end
with the rank, also if it is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.core import heartbeat
from lockstep.core.control_groups import Kills, kernel_kills, why_killed
from lockstep.core.deferred_signals import DeferredHandler
from lockstep.core.errors import Failure, RunFailed, WorkerDied
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.planted import UnreadableSamples, plant_unreadable, raise_planted, unreadable_samples
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
from lockstep.data.bad_samples import read_again
from lockstep.data.order import Indices
from lockstep.data.sources import skipping_part

_SIGCHLD_WAIT_S = 1.0


class FetchRequest(NamedTuple):
    """A micro-batch to fetch.

    Attributes:
        is_padding: Whether the batch only pads the update and has no weight.
        epoch_key: Key of the samples' noise.
        generator_key: Seed of the process' generators; None for sources that don't draw.
        position: Of the first sample in the order of the run, over all epochs.
        left_out: Reasons of samples that all ranks leave out, by index; a worker may not know them yet.
    """

    indices: Indices
    is_padding: bool
    epoch_key: int
    generator_key: int | None
    position: int = 0
    evaluates: bool = False
    left_out: Mapping[int, str] = {}


@dataclass(frozen=True, slots=True)
class Workers:
    """The worker processes of a loader; 0: the rank fetches itself.

    Attributes:
        prefetch: Batches that each keeps ready.
        pin: Whether batches are put into page-locked memory.
        key: Seed of their generators.
    """

    number: int
    prefetch: int
    pin: bool
    key: int


def fetch_all(source: Source, requests: Iterable[FetchRequest], workers: Workers) -> Iterator[Batch]:
    """Return an iterator over the batches of the requests. Raises RunFailed."""
    if workers.number == 0:
        return (fetch(source, request) for request in requests)
    return _from_workers(source, requests, workers)


def fetch(source: Source, request: FetchRequest) -> Batch:
    """Return the batch of a request."""
    if request.left_out and (skipping := skipping_part(source)) is not None:
        skipping.leave_out(request.left_out)
    beat = heartbeat.own()
    beat.begin_read(request.indices, request.evaluates)
    try:
        try:
            batch = _fetch(source, request)
        except Failure:
            raise
        except Exception as error:
            read = lambda indices: _fetch(source, request._replace(indices=indices))  # noqa: E731
            batch = read_again(read, request.indices, error)
    except Exception:  # after any other the process may end; its launcher looks what it was reading
        beat.end_read()
        raise
    beat.end_read()
    return replace(batch, samples=0, tokens=0, left_out=()) if request.is_padding else batch


def _fetch(source: Source, request: FetchRequest) -> Batch:
    if not request.evaluates:
        raise_planted(request.position)
    if request.generator_key is None:
        return source.fetch(request.indices)
    noise.use_epoch(request.epoch_key)
    states = noise.seed_generators(request.generator_key)
    try:
        return source.fetch(request.indices)
    finally:
        noise.restore_generators(states)


# --- workers ----------------------------------------------------------------------------------------------------


def _from_workers(source: Source, requests: Iterable[FetchRequest], workers: Workers) -> Iterator[Batch]:
    loader = DataLoader(
        _WorkerDataset(source),
        batch_sampler=requests,  # type: ignore[arg-type]  # any iterable works
        collate_fn=dict,  # an answer is a mapping already
        num_workers=workers.number,
        prefetch_factor=workers.prefetch,
        pin_memory=workers.pin,
        worker_init_fn=partial(_begin_worker, os.getpid(), _in_main_thread(), unreadable_samples()),
        # without it, torch would draw from the process' generator and change what the model draws
        generator=torch.Generator().manual_seed(workers.key),
    )
    kills = kernel_kills()
    forks = multiprocessing.get_start_method() == "fork"
    with nullcontext() if forks else safe_interpreters(), blocked_signals(forks=forks):
        answers: Any = iter(loader)
    for worker in answers._workers:  # they ignore SIGTERM, and torch and Python's exit wait for what they terminate
        worker._popen.terminate = worker._popen.kill
    with _handling_deaths(kills, answers):
        while True:
            try:
                answer = next(answers, None)
            except RuntimeError as error:  # torch raises it when a worker has died
                death = _death(error, kills)
                raise death from death.__cause__ or error  # a chain of causes has no cycle
            except (OSError, EOFError) as error:  # the worker's end of a pipe is closed
                time.sleep(_SIGCHLD_WAIT_S)  # SIGCHLD comes later, and its error is more specific
                raise _death(error, kills) from error
            if answer is None:
                return
            if source.draws:
                noise.drop_second_normal()
            if "failure" in answer:
                raise answer["failure"] from InWorker(answer["traceback"])
            inputs = answer["inputs"] if isinstance(answer["inputs"], Mapping) else tuple(answer["inputs"])
            left_out = tuple(answer["left_out"])  # pinning makes tuples lists
            yield Batch(inputs, answer["targets"], answer["samples"], answer["tokens"], left_out)


class _WorkerDataset(Dataset[Any]):
    """The dataset of a worker: answers requests with mappings, which torch can pin."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitems__(self, request: FetchRequest) -> Mapping[str, Any]:
        try:
            batch = fetch(self._source, request)
            return {name: getattr(batch, name) for name in ("inputs", "targets", "samples", "tokens", "left_out")}
        except Exception as failure:  # a `RunFailed`, or memory ran out
            return {"failure": failure, "traceback": traceback.format_exc()}

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a request is answered as a whole")


class InWorker(Exception):
    """The traceback of a data worker as text, since traceback objects can't be pickled."""


# --- signals ----------------------------------------------------------------------------------------------------

_RANK_SIGNALS = (*STOP_SIGNALS, SAVE_SIGNAL)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _begin_worker(rank: int, from_main_thread: bool, unreadable: UnreadableSamples | None, worker: int) -> None:
    """Leave signals to the rank; called in a worker, before it fetches."""
    plant_unreadable(unreadable)  # a worker that isn't forked doesn't know it
    if os.getppid() == rank and from_main_thread:
        die_with_parent(rank)
    else:  # the parent is a fork server or a thread, and its end would count as the rank's
        exit_with_process(rank)
    heartbeat.own().become_worker(worker)
    for number in _RANK_SIGNALS:
        # not SIG_IGN, which programs started by the dataset would inherit; interrupted system calls are resumed
        signal.signal(number, no_effect)
        signal.siginterrupt(number, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _RANK_SIGNALS)


# --- workers that died ------------------------------------------------------------------------------------------


_IN_THE_RANK = ". Set data.loader.workers: 0 to fetch in the rank's own process, which shows the error"
_FEWER = "Set fewer data.loader.workers, or a smaller data.loader.prefetch"
_TORCHS_ADVICE = "Details are lost due to multiprocessing."  # and what follows
_PROCESSES = re.compile(r"(?<=[( ])\d+(?=[,)])")  # (pid 7), (pid(s) 7, 8)
_running: list[Kills] = []  # the kernel's counts when each set of workers started


def _death(error: Exception, kills_before: Kills) -> RunFailed:
    if isinstance(error.__cause__, RunFailed):  # raised in the handler of SIGCHLD
        return error.__cause__
    message = str(error).partition(_TORCHS_ADVICE)[0].strip(" .")
    dead = {int(process) for process in _PROCESSES.findall(message)}
    read = [worker.reading for worker in heartbeat.own().workers() if worker.process in dead or not dead]
    samples = f" while it read {' or '.join(map(str, read))}" if read else ""
    why, kind, reason = why_killed(kills_before, kernel_kills(), lambda: _FEWER), FailureKind.WORKER_DIED, ""
    if message.endswith("signal: Killed"):
        kind = FailureKind.WORKER_MEMORY if why.by_kernel else FailureKind.WORKER_KILLED
        reason = f". Reason: {why.text}"
    elif "exited unexpectedly with exit code" in message:
        kind = FailureKind.WORKER_EXITED
    elif "killed by signal" not in message:  # another one, such as a segmentation fault
        reason = f". If it was killed: {why.text}"
    # the launcher says what to do about samples; workers that the kernel kills end silently in the rank, too
    unknown = not read and kind in (FailureKind.WORKER_DIED, FailureKind.WORKER_EXITED)
    evaluation_set = read[0].evaluation_set if read else None
    return WorkerDied(
        f"a data worker died{samples}: {message}{reason}{_IN_THE_RANK if unknown else ''}",
        tuple(sample for reading in read if reading.evaluation_set == evaluation_set for sample in reading.samples),
        evaluation_set,
        kind,
    )


@contextmanager
def _handling_deaths(kills_before: Kills, answers: Any) -> Iterator[None]:
    """Name the samples of a worker that dies within the block, wherever torch's handler of SIGCHLD raises.

    A failure would keep torch's iterator of their answers alive, and with it the workers.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and not isinstance(handler, DeferredHandler) and _in_main_thread():
        signal.signal(signal.SIGCHLD, DeferredHandler(partial(_on_death, handler)))
    _running.append(kills_before)
    try:
        yield
    except Exception:
        _end_at_once(answers)
        raise
    finally:
        _ignore_deaths(answers)
        _running.remove(kills_before)


def _ignore_deaths(answers: Any) -> None:
    if answers._worker_pids_set:
        torch._C._remove_worker_pids(id(answers))
        answers._worker_pids_set = False


def _end_at_once(answers: Any) -> None:
    """Kill the workers, also one that is busy; torch would wait for it."""
    _ignore_deaths(answers)
    answers._shutdown = True  # or torch would set an event that a killed worker may have locked
    for worker in answers._workers:
        worker.terminate()
    for worker in answers._workers:
        worker.join()
    for queue in answers._index_queues:
        queue.cancel_join_thread()
        queue.close()
    if answers._pin_memory:
        answers._pin_memory_thread_done_event.set()


def _on_death(handler: Callable[[int, FrameType | None], Any], number: int, frame: FrameType | None) -> None:
    try:
        handler(number, frame)
    except RuntimeError as error:
        if not _running:  # a user's own workers
            raise
        raise _death(error, _running[0]) from error

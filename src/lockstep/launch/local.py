"""Starts the ranks of this machine, and waits until the last has ended, on all hosts.

Ranks are forked from this process, which has imported torch. They are fresh interpreters where forking isn't safe, or
`launch.environment` sets a variable that a process reads as it starts (LD_PRELOAD). A single rank that isn't to be
started again runs in this process.

Why not torch's `start_processes` or `elastic_launch`? When one of two ranks in an all-reduce was killed, they reported
the other's broken connection as the failure; a rank that ended by KeyboardInterrupt counted as done, and the run waited
forever; and the tee takes rank 0's terminal away.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.config.schema import Launch
from lockstep.config.training_sections import Watchdog
from lockstep.core.control_groups import WhyKilled, kernel_kills, why_killed
from lockstep.core.errors import ConfigError, Failure, RunFailed, message_of
from lockstep.core.failure_kinds import FailureKind, Retry
from lockstep.core.process_settings import paused_collection, set_environment
from lockstep.core.processes import may_fork
from lockstep.core.ranks import LAUNCHER, RankEnvironment, started_by_lockstep
from lockstep.core.stopping import SignalRequests, handled_signals, stop_code
from lockstep.launch import streams
from lockstep.launch.agent import FollowerRounds, Hosts, LaunchState
from lockstep.launch.devices import check_ranks
from lockstep.launch.ends import CAUSED_BY_STOP, End, describe, first_cause, with_cause
from lockstep.launch.ends_file import append_ends
from lockstep.launch.other_launchers import read_at_start, refuse_unsettable, set_threads
from lockstep.launch.outcome import LaunchResult, gist, kind_of_stop, print_on_stderr
from lockstep.launch.rank import append_end, run_entry, signals_stop
from lockstep.launch.rank_stacks import with_last_words
from lockstep.launch.supervision import Rounds
from lockstep.launch.worker_group import Ranks, Round, watch

_FREED_S = 15.0  # until the port, memory and so on of an ended rank and its workers are free
_UNGUARDED = 97  # exit code of a fresh interpreter that would start ranks while it imports the script
_GUARD = 'ranks are fresh interpreters, which import the script: put the call under `if __name__ == "__main__":`'
_SHARE_OF_GRACE = 0.8  # in the rest, a snapshot is saved instead
_RAISED = (FailureKind.EXCEPTION, FailureKind.DEVICE, FailureKind.PEER_FAILED)


def launch(
    entry: Callable[[], int],
    ranks: int,
    launch: Launch,
    logs: Path | None,
    *,
    own_process: bool = False,
    preload: Sequence[str] = (),
    remedy: Callable[[], str] = str,
    hosts: Hosts | None = None,
    supervisor: Rounds | None = None,
    watchdog: Watchdog | None = None,
) -> LaunchResult:
    """Run `entry`, which returns an exit code, on `ranks` ranks of this machine.

    Reports the first rank to fail with its traceback, or the message of its `Failure`, and ends the others. Raises
    ConfigError if the ranks can't be started.

    Args:
        logs: Folder for rank-N.log. Rank 0 also prints to the terminal. None: all ranks print to the terminal.
        own_process: Whether a single rank also gets a process, so that this one can still fork others.
        preload: Modules that every rank imports; importing them must start no threads and use no GPU.
        remedy: Returns what to change if a rank is killed because memory ran out.
        hosts: The other hosts of the run, which have met.
        supervisor: Decides after a failure whether the ranks start again.
        watchdog: When a rank that hangs is reported and killed; None: never.
    """
    refuse_unsettable(launch.environment)
    if note := check_ranks(ranks, launch):
        print_on_stderr(f"note: {note}")
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    fresh = bool(read_at_start(launch.environment))
    may_run_here = ranks == 1 and not own_process and not fresh and hosts is None
    if may_run_here and supervisor is None:
        return _run_here(entry, launch, logs)
    import_ahead(preload)
    forks = not fresh and may_fork()
    if may_run_here and not forks:  # a notebook: no other process can have its objects
        return _run_here(entry, launch, logs)
    job = Ranks(entry, ranks, launch, logs, forks, hosts, watchdog)
    patience = math.inf if launch.grace is None else _SHARE_OF_GRACE * launch.grace
    with (
        contextlib.closing(SignalRequests(patience)) as requests,
        handled_signals(requests.stop, requests.save, last=not own_process),
    ):
        return _run_rounds(job, remedy, requests, supervisor)


def _run_rounds(job: Ranks, remedy: Callable[[], str], requests: SignalRequests, rounds: Rounds | None) -> LaunchResult:
    result, ends = _run_ranks(job, remedy, requests, rounds)
    while rounds is not None and not requests.stops:
        again = rounds.next_entry(ends, result)
        if again is None:
            return rounds.concluded(result)
        job, until = replace(job, entry=again), time.monotonic() + _FREED_S
        while True:
            try:
                result, ends = _run_ranks(job, remedy, requests, rounds)
                break
            except (RunFailed, ConfigError) as failure:
                if time.monotonic() > until or requests.stops:
                    return _not_started(job, result, failure, requests)
                time.sleep(0.5)
    return _unless_stopped(job, result, ends, requests, rounds)


def _not_started(job: Ranks, result: LaunchResult, failure: Failure, requests: SignalRequests) -> LaunchResult:
    failed = LaunchResult(failure.kind, f"{gist(result.text)}\n{message_of(failure)}", logs=job.logs)
    if job.logs is not None:
        append_ends(job.logs, 0 if job.hosts is None else job.hosts.node, [], [], failed, {})
    if job.hosts is not None and not job.hosts.leads:
        job.hosts.fail(failed.kind, message_of(failure))
        ended = job.hosts.wait_for_result(requests)
        return failed if job.hosts.state is LaunchState.CUT_OFF else ended
    return failed


def import_ahead(names: Sequence[str]) -> None:
    """Import torch and other modules that every rank needs."""
    with paused_collection():  # imports are 10 % faster
        importlib.import_module("torch")
        for name in names:
            with contextlib.suppress(ImportError):  # a rank that needs it reports that
                importlib.import_module(name)


def refuse_import_of_script() -> None:
    """Raise ConfigError while a fresh interpreter imports the script, which must not start ranks again.

    A rank of Lockstep's launcher exits instead, and the launcher reports why.
    """
    # multiprocessing's own sign that the main module is being imported, when it refuses to start processes
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    if started_by_lockstep(os.environ):
        os._exit(_UNGUARDED)
    raise ConfigError(_GUARD)


def _run_here(entry: Callable[[], int], launch: Launch, logs: Path | None) -> LaunchResult:
    variables = {**RankEnvironment(master_port=launch.port).variables(), LAUNCHER: str(os.getpid())}
    log = streams.log_path(logs, 0) if logs else None
    old_sizes = streams.sizes(logs, [0]) if logs else {}
    environment = {**variables, **launch.environment}
    with set_environment(environment), set_threads(environment), streams.doubled(log), signals_stop():
        end = run_entry(entry)
        result = result_of([end], launch.timeout)
        if log is not None and logs is not None:
            append_end(log, end)
            append_ends(logs, 0, [end], [socket.gethostname()], result, old_sizes)
        return result


def _run_ranks(
    job: Ranks, remedy: Callable[[], str], requests: SignalRequests, rounds: Rounds | None
) -> tuple[LaunchResult, list[End]]:
    logs, timeout, hosts = job.logs, job.section.timeout, job.hosts
    old_sizes = streams.sizes(logs, range(job.first, job.first + job.ranks)) if logs else {}
    kills_before = kernel_kills()

    def why_sigkill() -> WhyKilled:
        return why_killed(kills_before, kernel_kills(), remedy)

    if hosts is not None:
        hosts.why_killed, hosts.requests = why_sigkill, requests
    begun = Round.begin(job)
    try:
        ends = watch(begun.members, requests, timeout, hosts, begun.hangs)
        for rank in range(job.first, job.first + job.ranks):
            ends[rank] = with_cause(ends[rank], why_sigkill)
    finally:
        begun.close()
    if logs is not None:
        for rank, began in old_sizes.items():
            ends[rank] = with_last_words(ends[rank], streams.log_path(logs, rank), began)
    if not job.forks and any(end.status == _UNGUARDED for end in ends):
        raise ConfigError(_GUARD)
    if hosts is None or hosts.leads:
        result = result_of(ends, timeout, hosts.names() if hosts is not None else ())
    else:
        result = hosts.wait_for_result(requests)
    result = _unless_stopped(job, result, ends, requests, rounds)
    if logs is not None:
        names = [socket.gethostname()] * job.size if hosts is None else hosts.names()
        append_ends(logs, 0 if hosts is None else hosts.node, ends, names, result, old_sizes)
    has_logs = result.code == 1 and logs is not None and logs.is_dir()
    return replace(result, logs=logs) if has_logs else result, ends


def result_of(ends: list[End], timeout: float, hosts: Sequence[str] = ()) -> LaunchResult:
    """Return the result of a launch after its ranks ended like this. Arguments as of `describe`."""
    cause = first_cause(ends)
    if cause is None:
        return LaunchResult(FailureKind.DONE)
    end = ends[cause]
    text = describe(cause, ends, timeout, hosts)
    is_traceback = end.kind in _RAISED and "\n" in text
    problems = end.problems if text == end.text else ()
    return LaunchResult(end.cause, text, is_traceback, problems, advice=end.advice)


def _unless_stopped(
    job: Ranks, result: LaunchResult, ends: Sequence[End], requests: SignalRequests, rounds: Rounds | None
) -> LaunchResult:
    """Return the result of a round, or of a stop if one was requested; of several hosts, the leader knows.

    A retryable failure doesn't change that the run was stopped: its next start resumes.
    """
    cause, stop = first_cause(ends), requests.last_stop
    if cause is None or stop is None or result.cut_off:
        return result
    if job.hosts is not None and not job.hosts.leads:
        waits = isinstance(rounds, FollowerRounds) and rounds.wait > 0
        if job.hosts.state is not LaunchState.CUT_OFF or not waits:
            return result
    text = f"stopped {'at once by a second signal, ' if requests.stops > 1 else 'by '}{stop.name}"
    kind = FailureKind.STOPPED if requests.stops > 1 else kind_of_stop(stop_code(stop))
    end = ends[cause]
    if end.kind in CAUSED_BY_STOP:
        return LaunchResult(kind, text, cut_off=True)
    if rounds is not None and end.kind.retry is not Retry.NEVER:
        text = f"{text}; its ranks don't start again after a failure: {result.text}"
        return replace(result, kind=kind, text=text, is_traceback=False, cut_off=True)
    return result
